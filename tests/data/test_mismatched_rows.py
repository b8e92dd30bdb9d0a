"""Mismatched rows: whose responses follow whose prompt, how long they are, when they come."""

import logging

import pytest
import torch

from attnpo.data.collate import TrainingExample
from attnpo.data.micro_batches import ByCount
from attnpo.data.mismatched_rows import StepRows, mismatched, partners
from attnpo.data.sampler import PlannedBatch, StepBatches
from attnpo.models.layouts import padded
from attnpo.schema import EncodedResponse, RowGroup

Row = tuple[list[int], list[int]]


def example(index: int, prompt: list[int], length: int = 2) -> TrainingExample:
    """Responses of which every token says whose they are: 10 i chosen, 10 i + 1 rejected (i counted from 1)."""
    sides = [EncodedResponse(prompt, [10 * (index + 1) + side] * length, [(0, 1)] * length) for side in range(2)]
    weights = torch.full((length,), 1 / length)
    return TrainingExample(f"pair{index}", *sides, (weights, weights), (float(length), float(length)), (1.0, 1.0))


def having(*prompts: int) -> list[TrainingExample]:
    """One pair per prompt token."""
    return [example(i, [prompt]) for i, prompt in enumerate(prompts)]


def planned(step: tuple[int, ...], of_rank: tuple[tuple[int, ...], ...]) -> PlannedBatch:
    return PlannedBatch(list(of_rank[0]), 0, len(step), 0, len(of_rank), whole=step, of_rank=of_rank)


def rows_in(group: RowGroup) -> list[Row]:
    """Prompt and response of each row as the model gets them."""
    assert group.inputs is not None and group.inputs.attention_mask is not None
    found = []
    for ids, kept, mask in zip(group.inputs.input_ids, group.inputs.attention_mask, group.response_mask, strict=True):
        whole = ids[kept.bool()].tolist()
        start = len(whole) - int(mask.sum())
        found.append((whole[:start], whole[start:]))
    return found


# ------------------------------------------------------------------------------------------------ partners


def test_the_pair_before_in_the_order_of_the_step_gives_the_responses() -> None:
    assert partners(having(1, 2, 3, 4), (2, 0, 3, 1)) == {2: 1, 0: 2, 3: 0, 1: 3}


def test_pairs_of_the_same_prompt_are_passed_over() -> None:
    """Prompts 1 1 2 2 1 in the order of the step; the step is a ring, and its first two go back past the last."""
    assert partners(having(1, 1, 2, 2, 1), (0, 1, 2, 3, 4)) == {0: 3, 1: 3, 2: 1, 3: 1, 4: 3}


@pytest.mark.parametrize("seed", range(5))
def test_the_partner_is_the_nearest_earlier_pair_with_another_prompt(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    examples = having(*torch.randint(0, 3, (12,), generator=generator).tolist())
    step = torch.randperm(12, generator=generator)[:7].tolist()
    for place, position in enumerate(step):
        ring = [step[(place - back) % 7] for back in range(1, 7)]
        prompt = examples[position].chosen.prompt_ids
        others = [other for other in ring if examples[other].chosen.prompt_ids != prompt]
        assert partners(examples, step)[position] == (others or ring)[0]


def test_where_all_share_a_prompt_it_is_the_pair_before_and_never_the_pair_itself() -> None:
    assert partners(having(1, 1, 1), (0, 1, 2)) == {0: 2, 1: 0, 2: 1}


@pytest.mark.parametrize(("position", "partner"), [(0, 3), (2, 1), (4, 3)])
def test_a_step_of_one_pair_looks_at_its_neighbours_in_the_data(position: int, partner: int) -> None:
    """Prompts 1 2 3 4 1: pair 0 passes over pair 4, which has its prompt."""
    assert partners(having(1, 2, 3, 4, 1), (position,)) == {position: partner}


def test_a_single_pair_has_no_partner() -> None:
    with pytest.raises(ValueError, match="at least two pairs"):
        partners(having(1), (0,))


# ------------------------------------------------------------------------------------------------ rows


def test_a_prompt_stands_before_both_responses_of_another_pair() -> None:
    """Per micro-batch of this rank, chosen rows first; the other rank's pairs (3 and 0) are partners too."""
    found = mismatched(having(1, 2, 3, 4), planned((3, 0, 2, 1), ((2,), (1,))))
    assert found == [[([3], [10, 10]), ([3], [11, 11])], [([2], [30, 30]), ([2], [31, 31])]]
    (whole,) = mismatched(having(1, 2, 3, 4), planned((3, 0, 2, 1), ((2, 1),)))
    assert whole == [found[0][0], found[1][0], found[0][1], found[1][1]]


@pytest.mark.parametrize(("micro", "world"), [(8, 1), (1, 1), (2, 2), (1, 4)])
def test_a_step_has_the_same_rows_however_it_is_split(micro: int, world: int) -> None:
    """Two full steps of 8 and one of 4, prompts that repeat; every rank has as many groups as any other."""
    examples = having(*[i % 5 for i in range(20)])
    found: dict[int, list[Row]] = {}
    groups: dict[int, set[int]] = {}
    for rank in range(world):
        for batch in StepBatches(20, 8, ByCount(micro), seed=1, rank=rank, world_size=world):
            if batch.micro == 0:
                made = StepRows(["mismatched"]).make(examples, batch, padded, 0)["mismatched"]
                found.setdefault(batch.step, []).extend(row for group in made for row in rows_in(group))
                groups.setdefault(batch.step, set()).add(len(made))
                assert len(made) == batch.micros
    whole = {
        batch.step: sorted(row for micro in mismatched(examples, batch) for row in micro)
        for batch in StepBatches(20, 8, ByCount(8), seed=1)
    }
    assert {step: sorted(rows) for step, rows in found.items()} == whole
    assert [len(rows) for rows in whole.values()] == [16, 16, 8]
    assert all(len(counts) == 1 for counts in groups.values())


def test_rows_have_no_weights_and_no_stored_reference() -> None:
    (group,) = StepRows(["mismatched"]).make(having(1, 2), planned((0, 1), ((0, 1),)), padded, 0)["mismatched"]
    assert group.token_weights["reward"].shape == (4, 2) and not group.token_weights["reward"].any()
    assert group.reference_logps is None and group.source_lengths.tolist() == [2.0] * 4


def test_nobody_makes_rows_of_another_name() -> None:
    with pytest.raises(ValueError, match="called anchor; there are mismatched"):
        StepRows(["mismatched", "anchor"])


# ------------------------------------------------------------------------------------------------ lengths


def test_responses_are_cut_to_what_the_prompt_leaves(caplog: pytest.LogCaptureFixture) -> None:
    """A prompt of 6 tokens leaves 2 of 8, one of 9 still gets a token, one of 1 takes the whole response of 5."""
    examples = [example(0, [1] * 6, 3), example(1, [2] * 9, 5), example(2, [3], 5)]
    caplog.set_level(logging.INFO)
    rows = StepRows(["mismatched"], max_length=8)
    for _ in range(2):
        (group,) = rows.make(examples, planned((0, 1, 2), ((0, 1, 2),)), padded, 0)["mismatched"]
        found = rows_in(group)
        assert found[:3] == [([1] * 6, [30, 30]), ([2] * 9, [10]), ([3], [20] * 5)]
        assert found[3:] == [([1] * 6, [31, 31]), ([2] * 9, [11]), ([3], [21] * 5)]
        assert group.source_lengths.tolist() == [2.0, 1.0, 5.0] * 2
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1 and told[0].startswith("mismatched rows: 4 of the 6 of this step are longer than"), told
    assert "lengths.max_length 8" in told[0]


def test_rows_that_just_fit_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    examples = [example(0, [1] * 3, 2), example(1, [2] * 3, 2)]
    (group,) = StepRows(["mismatched"], 5).make(examples, planned((0, 1), ((0, 1),)), padded, 0)["mismatched"]
    assert [len(response) for _, response in rows_in(group)] == [2] * 4 and not caplog.records
