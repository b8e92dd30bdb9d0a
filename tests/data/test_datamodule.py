"""The data module: which batch carries what is looked at before a step, also in validation and after a resume."""

import pytest

from attnpo.data.collate import TrainingExample
from attnpo.data.datamodule import PreferenceDataModule
from attnpo.data.rules import BatchPlan
from attnpo.models.layouts import padded
from attnpo.schema import UserError
from tests.training.tiny import make_examples

PLAN = BatchPlan(pairs=8, micro=2, eval_micro=2)


def module(
    train: list[TrainingExample], val: int = 5, ahead: tuple[str, ...] = ("mismatched",)
) -> PreferenceDataModule:
    return PreferenceDataModule(train, make_examples(val, seed=99), padded, 0, PLAN, 0, ahead=ahead, max_length=16)


def test_the_first_batch_of_a_step_carries_the_rows_of_all_its_micro_batches() -> None:
    """20 pairs in steps of 8: two of four micro-batches, one of two."""
    batches = list(module(make_examples(20)).train_dataloader())
    first = [index for index, batch in enumerate(batches) if batch.ahead]
    assert first == [0, 4, 8]
    for index, micros in zip(first, (4, 4, 2), strict=True):
        groups = batches[index].ahead["mismatched"]
        assert list(batches[index].ahead) == ["mismatched"]
        assert [len(group.response_ids) for group in groups] == [2 * batch.pairs for batch in batches[index:][:micros]]
        assert max(int(group.inputs.attention_mask.sum(-1).max()) for group in groups) <= 16


def test_validation_is_one_step() -> None:
    batches = list(module(make_examples(20), val=5).val_dataloader())
    assert [batch.pairs for batch in batches] == [2, 2, 1]
    assert [len(group.response_ids) for group in batches[0].ahead["mismatched"]] == [4, 4, 2]
    assert not any(batch.ahead for batch in batches[1:])


def test_nothing_is_carried_for_an_objective_that_asks_for_nothing() -> None:
    data = module(make_examples(20), ahead=())
    assert not any(batch.ahead for loader in (data.train_dataloader(), data.val_dataloader()) for batch in loader)


def test_a_resumed_epoch_carries_the_rows_of_its_steps() -> None:
    whole = list(module(make_examples(20)).train_dataloader())
    data = module(make_examples(20))
    sampler = data._sampler(0, 1)
    data.load_state_dict(sampler.state_dict(batches=4))
    rest = list(data.train_dataloader())
    assert [batch.pair_ids for batch in rest] == [batch.pair_ids for batch in whole[4:]]
    for found, expected in zip(rest, whole[4:], strict=True):
        assert list(found.ahead) == list(expected.ahead)
        for one, other in zip(found.ahead.get("mismatched", ()), expected.ahead.get("mismatched", ()), strict=True):
            assert one.inputs.input_ids.equal(other.inputs.input_ids)
    assert rest[0].ahead


@pytest.mark.parametrize(("train", "val", "expected"), [(1, 5, "2 training pairs"), (8, 1, "2 validation pairs")])
def test_a_single_pair_has_nothing_to_be_put_together_with(train: int, val: int, expected: str) -> None:
    with pytest.raises(UserError, match=f"expected at least {expected}, got 1"):
        module(make_examples(train), val)
    module(make_examples(train), val, ahead=())
