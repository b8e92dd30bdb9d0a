import pytest
import torch

from attnpo.models.layouts import padded
from attnpo.schema import UserError


def test_rows_and_predict_index_by_hand() -> None:
    inputs, ids, mask = padded([([1, 5], [7, 8, 9]), ([1], [6])], 0)
    assert inputs.input_ids.tolist() == [[1, 5, 7, 8, 9], [1, 6, 0, 0, 0]]
    assert inputs.attention_mask is not None
    assert inputs.attention_mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]
    assert inputs.position_ids.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert ids.tolist() == [[7, 8, 9], [6, 0, 0]]
    assert mask.tolist() == [[True, True, True], [True, False, False]]
    # row 0: the state at position 1 predicts 7; row 1: flat 5 + 0 predicts 6.
    assert inputs.predict_index.tolist() == [[1, 2, 3], [5, 0, 0]]


def test_predicting_state_stands_right_before_its_token() -> None:
    inputs, ids, mask = padded([([3, 4, 5], [6, 7]), ([8], [9, 10, 11, 12]), ([2, 2], [])], 0)
    flat = inputs.input_ids.flatten()
    assert torch.equal(flat[inputs.predict_index + 1][mask], ids[mask])
    assert mask.sum(1).tolist() == [2, 4, 0]


def test_errors_name_row_and_remedy() -> None:
    with pytest.raises(UserError, match="row 1: the prompt has no token"):
        padded([([1], [2]), ([], [3])], 0)
    with pytest.raises(UserError, match="at least one sequence"):
        padded([], 0)
