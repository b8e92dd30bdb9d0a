"""Batches by literal tensors: who stands in which row, what padding holds, which position predicts what."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attnpo.data.collate import TrainingExample, collate
from attnpo.models.layouts import padded_layout
from attnpo.schema import EncodedResponse, PreferenceBatch
from tests.training.tiny import make_examples, make_module

PAD = 1


def response(prompt: list[int], ids: list[int]) -> EncodedResponse:
    return EncodedResponse(prompt, ids, [(i, i + 1) for i in range(len(ids))])


# Prompts of 3 and 1 tokens; chosen responses of 2 and 1, rejected ones of 1 and 3.
FIRST = TrainingExample(
    "first",
    response([5, 6, 7], [8, 9]),
    response([5, 6, 7], [10]),
    (torch.tensor([0.25, 0.5]), torch.tensor([1.0])),
    (2.0, 1.0),
    (1.0, 1.0),
)
SECOND = TrainingExample(
    "second",
    response([5], [11]),
    response([5], [12, 13, 14]),
    (torch.tensor([0.75]), torch.tensor([0.125, 0.375, 0.5])),
    (4.0, 3.0),
    (1.0, 1.0),
    pair_weight=0.0,
)


@pytest.fixture
def batch() -> PreferenceBatch:
    return collate([FIRST, SECOND], padded_layout, PAD, step_pairs=16)


def test_chosen_rows_first_then_rejected_rows(batch: PreferenceBatch) -> None:
    rows = batch.main
    assert rows.inputs is not None and rows.inputs.attention_mask is not None
    assert rows.inputs.input_ids.tolist() == [[5, 6, 7, 8, 9], [5, 11, 1, 1, 1], [5, 6, 7, 10, 1], [5, 12, 13, 14, 1]]
    assert rows.inputs.attention_mask.sum(-1).tolist() == [5, 2, 4, 4]
    assert rows.response_ids.tolist() == [[8, 9, 1], [11, 1, 1], [10, 1, 1], [12, 13, 14]]
    assert rows.response_mask.tolist() == [
        [True, True, False],
        [True, False, False],
        [True, False, False],
        [True, True, True],
    ]


def test_each_token_is_predicted_from_the_position_before_it(batch: PreferenceBatch) -> None:
    """Flat positions in 4 rows of 5; 0 under a false mask."""
    rows = batch.main
    assert rows.inputs is not None
    assert rows.inputs.predict_index.tolist() == [[2, 3, 0], [5, 0, 0], [12, 0, 0], [15, 16, 17]]
    after = rows.inputs.input_ids.flatten()[rows.inputs.predict_index + 1]
    assert torch.equal(after[rows.response_mask], rows.response_ids[rows.response_mask])


def test_weights_lengths_and_pair_weights_follow_their_rows(batch: PreferenceBatch) -> None:
    rows = batch.main
    assert rows.token_weights["reward"].tolist() == [
        [0.25, 0.5, 0.0],
        [0.75, 0.0, 0.0],
        [1.0, 0.0, 0.0],
        [0.125, 0.375, 0.5],
    ]
    assert rows.source_lengths.tolist() == [2.0, 4.0, 1.0, 3.0]
    assert batch.pair_weight.tolist() == [1.0, 0.0]
    assert batch.pair_ids == ("first", "second")
    assert (batch.pairs, batch.step_pairs) == (2, 16)


def test_reference_rows_are_padded_with_zeros() -> None:
    stored = replace(FIRST, reference_logps=(torch.tensor([-1.0, -2.0]), torch.tensor([-3.0])))
    other = replace(SECOND, reference_logps=(torch.tensor([-4.0]), torch.tensor([-5.0, -6.0, -7.0])))
    found = collate([stored, other], padded_layout, PAD, 2).main.reference_logps
    assert found is not None and found.dtype == torch.float32
    assert found.tolist() == [[-1.0, -2.0, 0.0], [-4.0, 0.0, 0.0], [-3.0, 0.0, 0.0], [-5.0, -6.0, -7.0]]
    assert collate([FIRST, SECOND], padded_layout, PAD, 2).main.reference_logps is None
    assert collate([stored, SECOND], padded_layout, PAD, 2).main.reference_logps is None


def losses(examples: list[TrainingExample]) -> tuple[Tensor, dict[str, float]]:
    """Losses against a reference of other weights, so that no loss is ln 2; by pair id too."""
    module = make_module(1)
    with torch.no_grad():
        for parameter in module.policy.parameters():
            parameter.mul_(1.1)
        batch = collate(examples, padded_layout, PAD, len(examples))
        *_, output = module.score(batch)
    return output.losses, dict(zip(batch.pair_ids, output.losses.tolist(), strict=True))


def test_the_order_of_pairs_and_their_company_change_no_loss() -> None:
    examples = make_examples(6)
    together, by_pair = losses(examples)
    assert together.std() > 0.01, "the losses must differ, or the order would not show"
    _, shuffled = losses([examples[i] for i in (3, 0, 5, 1, 4, 2)])
    assert shuffled == pytest.approx(by_pair, rel=1e-5)
    for example in examples:
        _, alone = losses([example])
        assert alone[example.pair_id] == pytest.approx(by_pair[example.pair_id], rel=1e-5)
