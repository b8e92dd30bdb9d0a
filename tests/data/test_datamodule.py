"""The data module: rows that are looked at before a step, also in validation and after a resume; budgets of tokens."""

import logging

import pytest
import torch

from attnpo.data.collate import TrainingExample
from attnpo.data.datamodule import PreferenceDataModule, PreStepRows, find_mismatch_partners, make_mismatched_rows
from attnpo.data.micro_batches import COSTS, PACKED, PADDED, BatchByCount, RowCost, count_pair_tokens
from attnpo.data.rules import BatchPlan
from attnpo.data.sampler import PlannedBatch, StepBatchSampler
from attnpo.models.layouts import LAYOUTS, padded_layout
from attnpo.schema import EncodedResponse, PreferenceBatch, RowGroup, UserError
from tests.training.tiny import make_examples

PLAN = BatchPlan(pairs=8, micro=2, eval_micro=2)


def module(
    train: list[TrainingExample], val: int = 5, ahead: tuple[str, ...] = ("mismatched",)
) -> PreferenceDataModule:
    return PreferenceDataModule.from_examples(
        train, make_examples(val, seed=99), padded_layout, 0, PLAN, 0, ahead=ahead, max_length=16
    )


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


@pytest.mark.parametrize("tokens", [None, 60])
def test_pairs_in_the_order_of_their_rows(tokens: int | None) -> None:
    """In both epochs; a budget of tokens sorts the pairs within a step alone. Resumed in mid-epoch too."""
    plan = BatchPlan(8, None if tokens else 2, tokens=tokens, shuffle=False)
    examples = make_examples(20)

    def ordered() -> PreferenceDataModule:
        return PreferenceDataModule.from_examples(
            examples, make_examples(5, seed=99), padded_layout, 0, plan, 0, epochs=2
        )

    data = ordered()
    loader = data.train_dataloader()
    epochs = [list(loader), list(loader)]
    for batches in epochs:
        seen = [pair_id for batch in batches for pair_id in batch.pair_ids]
        names = [f"pair{i}" for i in range(20)]
        steps = [(names[start : start + 8], seen[start : start + 8]) for start in range(0, 20, 8)]
        assert all(sorted(wanted) == sorted(found) for wanted, found in steps)
        assert tokens is not None or seen == names
        if tokens is not None:
            assert (
                seen != names
                and max(2 * b.pairs * max(map(len, b.groups["main"].inputs.input_ids)) for b in batches) <= tokens
            )
    assert data.sampler is not None
    state = data.sampler.state_dict(batches=data.sampler.split.accumulation)
    again = ordered()
    again.load_state_dict(state)
    rest = list(again.train_dataloader())
    assert [b.pair_ids for b in rest] == [b.pair_ids for b in epochs[1][data.sampler.split.accumulation :]]
    shuffled = PreferenceDataModule.from_examples(
        examples, make_examples(5, seed=99), padded_layout, 0, BatchPlan(8, 2), 0, epochs=2
    )
    shuffled.load_state_dict(state)
    with pytest.raises(UserError, match="the order of the data changed: shuffle was False, is True"):
        shuffled.train_dataloader()


def test_a_resumed_epoch_carries_the_rows_of_its_steps() -> None:
    whole = list(module(make_examples(20)).train_dataloader())
    data = module(make_examples(20))
    sampler = data._make_sampler(0, 1)
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
    with pytest.raises(UserError, match=f"it needs at least {expected}, but there is only 1"):
        module(make_examples(train), val)
    module(make_examples(train), val, ahead=())


# ------------------------------------------------------------------------------------------------ budgets of tokens


def budgeted(
    cost: RowCost, tokens: int | None = 64, eval_tokens: int | None = 64, epochs: int = 2, **options: object
) -> PreferenceDataModule:
    """20 pairs in steps of 8, five to validate."""
    plan = BatchPlan(8, tokens=tokens, eval_tokens=eval_tokens)
    layout = LAYOUTS[cost.name]
    return PreferenceDataModule.from_examples(
        make_examples(20), make_examples(5, seed=99), layout, 0, plan, 0, epochs=epochs, **options
    )


def laid(rows: RowGroup | PreferenceBatch) -> int:
    """Tokens that a forward reads."""
    inputs = rows.main.inputs if isinstance(rows, PreferenceBatch) else rows.inputs
    assert inputs is not None
    return inputs.input_ids.numel()


@pytest.mark.parametrize("name", sorted(COSTS))
def test_no_forward_holds_more_than_its_budget(name: str) -> None:
    data = budgeted(COSTS[name])
    train = [batch for _ in range(2) for batch in data.train_dataloader()]
    ids = [pair for batch in train for pair in batch.pair_ids]
    assert sorted(ids) == sorted(2 * [example.pair_id for example in make_examples(20)])
    assert 40 < max(map(laid, train)) <= 64 and max(batch.pairs for batch in train) > 1
    val = list(data.val_dataloader())
    assert sorted(pair for batch in val for pair in batch.pair_ids) == [f"pair{i}" for i in range(5)]
    assert max(map(laid, val)) <= 64 and {batch.step_pairs for batch in val} == {5}
    assert len(val) < 5


def test_the_accumulation_is_that_of_the_worst_step_of_all_epochs() -> None:
    """Counted in epochs, or in the steps that end the run: six are two epochs, seven the third as well."""
    found = {epochs: budgeted(PADDED, 40, epochs=epochs).accumulation_steps(1) for epochs in range(1, 9)}
    assert found[1] < found[8] == max(found.values())
    for steps in range(1, 25):
        assert budgeted(PADDED, 40, max_steps=steps).accumulation_steps(1) == found[-(-steps // 3)], steps
    assert budgeted(PADDED, None).accumulation_steps(2) == 4
    assert [budgeted(PADDED).steps_per_epoch(processes) for processes in (1, 5)] == [3, 2]


def test_a_chosen_budget_is_halved_as_far_as_the_longest_pair_allows_and_one_that_was_set_stays() -> None:
    data = budgeted(PADDED, 64, auto=True)
    longest = max(count_pair_tokens(make_examples(20), PADDED))
    assert (data.halve_budget(), data.token_budgets) == (True, (max(32, longest), 64))
    while data.halve_budget():
        pass
    assert data.token_budgets[0] == longest and not data.halve_budget()
    fixed = budgeted(PADDED, 64)
    assert (fixed.halve_budget(), fixed.token_budgets) == (False, (64, 64))


def test_a_state_goes_on_with_the_budget_it_was_saved_with() -> None:
    """Inside a step with any choice; between steps where the run began with the same choice, which was too large."""
    sampler = budgeted(PADDED, 40)._make_sampler(0, 1)
    per_step = sampler.split.accumulation
    assert per_step > 1
    for batches, chosen, used in ((1, 64, 40), (1, 96, 40), (per_step, 64, 40), (per_step, 96, 96)):
        data = budgeted(PADDED, chosen, auto=True)
        _, consumed, length = data.locate_saved_position({**sampler.state_dict(batches), "budgets": [64, 40]})
        assert data.token_budgets == (used, 64), (batches, chosen)
        expected = budgeted(PADDED, used)._make_sampler(0, 1)
        assert (consumed == batches) if used == 40 else (consumed == expected.split.accumulation)
        assert length == len(expected)
    fixed = budgeted(PADDED, 64)
    with pytest.raises(UserError, match="within an optimizer step"):
        fixed.locate_saved_position({**sampler.state_dict(1), "budgets": [64, 40]})


@pytest.mark.parametrize("cost", COSTS.values(), ids=sorted(COSTS))
@pytest.mark.parametrize("key", ["tokens", "eval_tokens"])
def test_a_budget_below_the_longest_pair_is_refused(cost: RowCost, key: str) -> None:
    examples = make_examples(20) if key == "tokens" else make_examples(5, seed=99)
    costs = count_pair_tokens(examples, cost)
    needed = max(costs)
    longest = examples[costs.index(needed)]
    with pytest.raises(UserError) as caught:
        budgeted(cost, **{key: needed - 1})
    assert str(caught.value) == (
        f"batch.{key}={needed - 1} is too small for the longest pair: pair {longest.pair_id} has {needed} tokens in "
        f"{cost.name} rows; raise batch.{key} to at least {needed}, or lower lengths.max_length"
    )
    budgeted(cost, **{key: needed})


def test_budgets_and_processes_that_cannot_be() -> None:
    for key in ("tokens", "eval_tokens"):
        with pytest.raises(UserError, match=f"batch.{key} must be at least 1, or null"):
            BatchPlan(8, **{key: 0})
    with pytest.raises(UserError, match=r"batch\.pairs=8 must be at least the number of processes, 9"):
        BatchPlan(8, tokens=64).accumulation_steps(9)
    assert BatchPlan(9, tokens=64).accumulation_steps(2) is None
    with pytest.raises(UserError, match=r"batch\.tokens=32: a step of 8 pairs on 5 processes needs 2 forward passes"):
        budgeted(PADDED, 32).accumulation_steps(5)


def test_how_full_the_micro_batches_are_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        data = budgeted(PACKED)
        batches = list(data.train_dataloader())
        list(data.val_dataloader())
        list(budgeted(PACKED, None).train_dataloader())
    (line,) = [record.getMessage() for record in caplog.records]
    tokens = [laid(batch) for batch in batches]
    assert line == (
        f"micro-batches: {data.accumulation_steps(1)} per step of 8 pairs, "
        f"{data.accumulation_steps(1)} on each process; batch.tokens=64; each has packed rows with at "
        f"most {max(tokens)} tokens ({round(sum(tokens) / len(tokens))} on average)"
    )


def row_ids(batch: PreferenceBatch) -> list[tuple[list[int], ...]]:
    """What each row ahead of a step responds with, with its prompt's first token."""
    found = []
    for group in batch.ahead["mismatched"]:
        assert group.inputs is not None
        for ids, mask, response in zip(
            group.inputs.input_ids, group.inputs.attention_mask, group.response_mask, strict=True
        ):
            found.append((ids[: int(mask.sum())].tolist(), [int(response.sum())]))
    return sorted(found)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_rows_ahead_keep_the_budget_and_are_those_of_the_step(world: int) -> None:
    """Their lengths are others than those of the pairs: they are shared out anew, as many groups for every rank."""
    plain = module(make_examples(20))
    expected = [row_ids(batch) for batch in plain.train_dataloader() if batch.ahead]
    data = budgeted(PADDED, 48, ahead=("mismatched",), max_length=16)
    found: list[list[tuple[list[int], ...]]] = [[], [], []]
    counts: list[set[int]] = [set(), set(), set()]
    for rank in range(world):
        batches = [data.train_batches[planned] for planned in data._make_sampler(rank, world)]
        first = [batch for batch in batches if batch.ahead]
        assert max(laid(group) for batch in first for group in batch.ahead["mismatched"]) <= 48
        for step, batch in enumerate(first):
            found[step] += row_ids(batch)
            counts[step].add(len(batch.ahead["mismatched"]))
    assert [sorted(rows) for rows in found] == expected
    assert all(len(of_ranks) == 1 for of_ranks in counts)


def of_lengths(name: str, prompt: int, response: int) -> TrainingExample:
    side = EncodedResponse([3 + prompt] * prompt, [4] * response, [(j, j + 1) for j in range(response)])
    row = torch.full((response,), 1 / response)
    return TrainingExample(name, side, side, (row, row), (float(response), float(response)), (1.0, 1.0))


def test_rows_ahead_that_are_longer_than_any_pair_stand_alone() -> None:
    """Long prompts with short answers and the reverse: after a long prompt comes a long answer, 2 x 18 tokens."""
    examples = [of_lengths(f"pair{i}", *((9, 1) if i % 2 else (1, 9))) for i in range(6)]
    data = PreferenceDataModule.from_examples(
        examples, examples, padded_layout, 0, BatchPlan(6, tokens=20), 0, ahead=("mismatched",)
    )
    first = next(data.train_batches[planned] for planned in data._make_sampler(0, 1))
    groups = first.ahead["mismatched"]
    assert sum(len(group.response_ids) for group in groups) == 12
    long = [group for group in groups if laid(group) > 20]
    assert long and all((laid(group), len(group.response_ids)) == (36, 2) for group in long)


# ------------------------------------------------------------------------------- mismatched rows


Row = tuple[list[int], list[int]]


def example(index: int, prompt: list[int], length: int = 2) -> TrainingExample:
    """Responses of which every token says whose they are: 10 i chosen, 10 i + 1 rejected (i counted from 1)."""
    sides = [EncodedResponse(prompt, [10 * (index + 1) + side] * length, [(0, 1)] * length) for side in range(2)]
    weights = torch.full((length,), 1 / length)
    return TrainingExample(f"pair{index}", *sides, (weights, weights), (float(length), float(length)), (1.0, 1.0))


def having(*prompts: int) -> list[TrainingExample]:
    """One pair per prompt token."""
    return [example(i, [prompt]) for i, prompt in enumerate(prompts)]


def plan_step(step: tuple[int, ...], of_rank: tuple[tuple[int, ...], ...]) -> PlannedBatch:
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


@pytest.mark.parametrize("seed", range(5))
def test_the_partner_is_the_nearest_earlier_pair_with_another_prompt(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    examples = having(*torch.randint(0, 3, (12,), generator=generator).tolist())
    step = torch.randperm(12, generator=generator)[:7].tolist()
    for place, position in enumerate(step):
        ring = [step[(place - back) % 7] for back in range(1, 7)]
        prompt = examples[position].chosen.prompt_ids
        others = [other for other in ring if examples[other].chosen.prompt_ids != prompt]
        assert find_mismatch_partners(examples, step)[position] == (others or ring)[0]


def test_where_all_share_a_prompt_it_is_the_pair_before_and_never_the_pair_itself() -> None:
    assert find_mismatch_partners(having(1, 1, 1), (0, 1, 2)) == {0: 2, 1: 0, 2: 1}


@pytest.mark.parametrize(("position", "partner"), [(0, 3), (2, 1), (4, 3)])
def test_a_step_of_one_pair_looks_at_its_neighbours_in_the_data(position: int, partner: int) -> None:
    """Prompts 1 2 3 4 1: pair 0 passes over pair 4, which has its prompt."""
    assert find_mismatch_partners(having(1, 2, 3, 4, 1), (position,)) == {position: partner}


def test_a_single_pair_has_no_partner() -> None:
    with pytest.raises(ValueError, match="at least two pairs"):
        find_mismatch_partners(having(1), (0,))


# ------------------------------------------------------------------------------------------------ rows


def test_a_prompt_stands_before_both_responses_of_another_pair() -> None:
    """Per micro-batch of this rank, chosen rows first; the other rank's pairs (3 and 0) are partners too."""
    found = make_mismatched_rows(having(1, 2, 3, 4), plan_step((3, 0, 2, 1), ((2,), (1,))))
    assert found == [[([3], [10, 10]), ([3], [11, 11])], [([2], [30, 30]), ([2], [31, 31])]]
    (whole,) = make_mismatched_rows(having(1, 2, 3, 4), plan_step((3, 0, 2, 1), ((2, 1),)))
    assert whole == [found[0][0], found[1][0], found[0][1], found[1][1]]


@pytest.mark.parametrize(("micro", "world"), [(8, 1), (1, 1), (2, 2), (1, 4)])
def test_a_step_has_the_same_rows_however_it_is_split(micro: int, world: int) -> None:
    """Two full steps of 8 and one of 4, prompts that repeat; every rank has as many groups as any other."""
    examples = having(*[i % 5 for i in range(20)])
    found: dict[int, list[Row]] = {}
    groups: dict[int, set[int]] = {}
    for rank in range(world):
        for batch in StepBatchSampler(20, 8, BatchByCount(micro), seed=1, rank=rank, world_size=world):
            if batch.micro == 0:
                made = PreStepRows(["mismatched"]).make_rows(examples, batch, padded_layout, 0)["mismatched"]
                found.setdefault(batch.step, []).extend(row for group in made for row in rows_in(group))
                groups.setdefault(batch.step, set()).add(len(made))
                assert len(made) == batch.micros
    whole = {
        batch.step: sorted(row for micro in make_mismatched_rows(examples, batch) for row in micro)
        for batch in StepBatchSampler(20, 8, BatchByCount(8), seed=1)
    }
    assert {step: sorted(rows) for step, rows in found.items()} == whole
    assert [len(rows) for rows in whole.values()] == [16, 16, 8]
    assert all(len(counts) == 1 for counts in groups.values())


def test_rows_have_no_weights_and_no_stored_reference() -> None:
    (group,) = PreStepRows(["mismatched"]).make_rows(having(1, 2), plan_step((0, 1), ((0, 1),)), padded_layout, 0)[
        "mismatched"
    ]
    assert group.token_weights["reward"].shape == (4, 2) and not group.token_weights["reward"].any()
    assert group.reference_logps is None and group.source_lengths.tolist() == [2.0] * 4


def test_nobody_makes_rows_of_another_name() -> None:
    with pytest.raises(ValueError, match="rows anchor; known: mismatched"):
        PreStepRows(["mismatched", "anchor"])


# ------------------------------------------------------------------------------------------------ lengths


def test_responses_are_cut_to_what_the_prompt_leaves(caplog: pytest.LogCaptureFixture) -> None:
    """A prompt of 6 tokens leaves 2 of 8, one of 9 still gets a token, one of 1 takes the whole response of 5."""
    examples = [example(0, [1] * 6, 3), example(1, [2] * 9, 5), example(2, [3], 5)]
    caplog.set_level(logging.INFO)
    rows = PreStepRows(["mismatched"], max_length=8)
    for _ in range(2):
        (group,) = rows.make_rows(examples, plan_step((0, 1, 2), ((0, 1, 2),)), padded_layout, 0)["mismatched"]
        found = rows_in(group)
        assert found[:3] == [([1] * 6, [30, 30]), ([2] * 9, [10]), ([3], [20] * 5)]
        assert found[3:] == [([1] * 6, [31, 31]), ([2] * 9, [11]), ([3], [21] * 5)]
        assert group.source_lengths.tolist() == [2.0, 1.0, 5.0] * 2
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1 and told[0].startswith("mismatched rows: 4 of 6 in this step are longer than"), told
    assert "lengths.max_length=8" in told[0]


def test_rows_that_just_fit_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    examples = [example(0, [1] * 3, 2), example(1, [2] * 3, 2)]
    (group,) = PreStepRows(["mismatched"], 5).make_rows(examples, plan_step((0, 1), ((0, 1),)), padded_layout, 0)[
        "mismatched"
    ]
    assert [len(response) for _, response in rows_in(group)] == [2] * 4 and not caplog.records
