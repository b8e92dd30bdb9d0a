"""Steps cut under a budget of tokens: every pair once, nothing above the budget, as few as can be, resumable."""

import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnpo.data.micro_batches import PACKED, PADDED, ByCount, ByTokens, RowCost
from attnpo.data.sampler import PlannedBatch, StepBatches, steps_in
from attnpo.schema import UserError
from tests.data.test_sampler import counted, over, ranks, steps

COSTS = st.sampled_from([PADDED, PACKED])


def lengths(num_pairs: int, seed: int = 0, most: int = 60) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(4, most) for _ in range(num_pairs)]


def fewest(sizes: list[int], cost: RowCost, limit: int) -> int:
    """The fewest consecutive parts of sorted sizes within the limit, by trying every last part."""
    line, best = sorted(sizes), [0]
    for end in range(1, len(line) + 1):
        fitting = [begin for begin in range(end) if cost.together(line[begin:end]) <= limit]
        best.append(1 + min(best[begin] for begin in fitting))
    return best[-1]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 3), st.integers(60, 240), COSTS, st.integers(0, 99))
def test_budget_properties(num_pairs: int, size: int, world: int, budget: int, cost: RowCost, seed: int) -> None:
    """Two epochs: every pair once, the steps of any other cutting, the budget kept, no micro-batch too many."""
    sizes, epochs = lengths(num_pairs, seed), 2
    cutting = ByTokens(sizes, cost, budget)
    steps_each = steps_in(num_pairs, size, world)
    if steps_each == 0 or (size < world <= num_pairs):
        with pytest.raises(UserError, match="no optimiser step"):
            over(world, num_pairs, size, cutting)
        return
    plain = StepBatches(num_pairs, size, ByCount(size), seed=seed)
    whole = [steps([plain]) for _ in range(epochs)]
    short = num_pairs % size if num_pairs % size >= world else 0
    needed = [
        [math.ceil(fewest([sizes[i] for i in whole[epoch][step]], cost, budget) / world) for epoch in range(epochs)]
        for step in range(steps_each)
    ]
    counts = [size] * (num_pairs // size) + [short] * (short > 0)
    if any(max(found) * world > size for found in needed[: num_pairs // size]):
        with pytest.raises(UserError, match="forwards on each, and with"):
            over(world, num_pairs, size, cutting, seed=seed, epochs=epochs)
        return
    capped = short > 0 and max(needed[-1]) * world > short
    if capped:  # as many forwards as there are pairs for; nobody chose how many pairs are left
        needed[-1] = [short // world] * epochs
    plans = over(world, num_pairs, size, cutting, seed=seed, epochs=epochs)
    assert plans[0].split.accumulation == max(map(max, needed))
    assert plans[0].split.short == (max(needed[-1]) if short else 0)
    for epoch in range(epochs):
        batches = [list(plan) for plan in plans]
        assert {len(found) for found in batches} == {len(plan) for plan in plans}
        assert steps(batches) == {step: whole[epoch][step] for step in range(steps_each)}
        for together in zip(*batches, strict=True):
            assert len({(batch.step, batch.step_pairs, batch.micro, batch.micros) for batch in together}) == 1
            last = capped and together[0].step == steps_each - 1
            assert all(batch.indices and (last or cutting.tokens(batch.indices) <= budget) for batch in together)
        for step in range(steps_each):
            held = [[batch for batch in found if batch.step == step] for found in batches]
            assert all(found[0].of_rank == tuple(tuple(batch.indices) for batch in found) for found in held)
            assert {batch.step_pairs for found in held for batch in found} == {counts[step]}
            parts = [[cutting.tokens(batch.indices) for batch in found] for found in held]
            totals = [sum(part) for part in parts]
            assert max(totals) - min(totals) <= max(map(max, parts)) - min(map(min, parts))


def test_a_budget_gives_the_same_batches_again() -> None:
    def found() -> list[list[list[int]]]:
        cutting = ByTokens(lengths(50), PADDED, 150)
        return [[batch.indices for batch in plan] for plan in over(2, 50, 16, cutting, seed=3)]

    assert found() == found()
    by_length = lengths(50)
    for plan in found():
        assert all(by_length[batch[0]] == max(by_length[i] for i in batch) for batch in plan)


def test_a_literal_plan_with_a_budget() -> None:
    """Steps of 4 and 2 pairs on two ranks; the budget holds one long pair, or two of 4 tokens."""
    first, second = (list(plan) for plan in over(2, 6, 4, ByTokens([9, 4, 4, 8, 3, 2], PADDED, 9), shuffle=False))
    assert first == [
        PlannedBatch([0], step=0, step_pairs=4, micro=0, micros=2),
        PlannedBatch([2], step=0, step_pairs=4, micro=1, micros=2),
        PlannedBatch([4], step=1, step_pairs=2, micro=0, micros=1),
    ]
    assert [batch.indices for batch in second] == [[3], [1], [5]]
    assert [(batch.rank, batch.ranks, batch.whole) for batch in second[:1]] == [(1, 2, (0, 1, 2, 3))]


def test_a_short_step_of_long_pairs_sets_the_number_for_all() -> None:
    """Lightning steps after a fixed number of micro-batches, so no step may have more."""
    plan = StepBatches(7, 4, ByTokens([1, 1, 1, 1, 9, 9, 9], PADDED, 9), shuffle=False)
    assert (plan.split.accumulation, plan.split.short, len(plan)) == (3, 3, 6)
    assert [batch.indices for batch in plan][3:] == [[4], [5], [6]]


def test_an_epoch_that_was_not_planned_for_does_not_exceed_the_budget() -> None:
    """Two long pairs: in epoch 0 they are in different steps, later in one."""
    sizes = [9, 9, 1, 1]
    plan = next(
        plan
        for plan in (StepBatches(4, 2, ByTokens(sizes, PADDED, 10), seed=seed) for seed in range(20))
        if all(len({0, 1} & set(step)) == 1 for step in plan._steps(0)) and plan.split.accumulation == 2
    )
    assert StepBatches(4, 2, ByTokens(sizes, PADDED, 18), seed=plan.seed).split.accumulation == 1
    cheap = StepBatches(4, 2, ByTokens(sizes, PACKED, 10), seed=plan.seed)
    assert cheap.split.accumulation == 1
    with pytest.raises(ValueError, match="need 18 tokens, not 10"):
        for _ in range(20):
            list(cheap)
    assert StepBatches(4, 2, ByTokens(sizes, PACKED, 10), seed=plan.seed, epochs=20).split.accumulation == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_resume_at_any_batch_of_a_budget(rank: int) -> None:
    def plan() -> StepBatches:
        cutting = ByTokens(lengths(29), PADDED, 120)
        return StepBatches(29, 8, cutting, seed=2, rank=rank, world_size=2, epochs=3)

    whole = plan()
    for epoch, batches in enumerate([list(whole), list(whole)]):
        for consumed in range(len(batches) + 1):
            stopped = plan()
            stopped.set_epoch(epoch)
            resumed = plan()
            resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict(consumed))))
            resumed.set_epoch(epoch)
            assert list(resumed) == batches[consumed:]
            assert len(resumed) == len(batches) and next(iter(resumed)).epoch == epoch + 1


@pytest.mark.parametrize("done", range(5))
def test_a_budget_may_change_between_steps(done: int) -> None:
    """28 pairs, steps of 8 and one of 4: from single pairs to a budget, to another one on two ranks, and back."""
    sizes = lengths(28)
    plans = {
        "pairs": ranks(28, 1, 8, 1, seed=4),
        "budget": over(1, 28, 8, ByTokens(sizes, PADDED, 100), seed=4),
        "other": over(2, 28, 8, ByTokens(sizes, PACKED, 150), seed=4),
    }
    assert len({(plan[0].split.accumulation, len(plan[0])) for plan in plans.values()}) == 3
    whole = steps(plans["pairs"])
    for before, after in (("pairs", "budget"), ("budget", "other"), ("other", "pairs")):
        saved = plans[before][0]
        state = saved.state_dict(min(len(saved), done * saved.split.accumulation))
        for plan in plans[after]:
            plan.load_state_dict(state)
        assert steps(plans[after]) == {step: pairs for step, pairs in whole.items() if step >= done}, (before, after)


def test_within_a_step_the_budget_must_stay() -> None:
    def plan(budget: int) -> StepBatches:
        return StepBatches(28, 8, ByTokens(lengths(28), PADDED, budget), seed=4)

    state = plan(100).state_dict(1)
    with pytest.raises(UserError, match=r"at most 100 tokens of padded rows, accumulation \d+, 1 processes"):
        plan(101).load_state_dict(state)
    with pytest.raises(UserError, match="inside an optimiser step"):
        counted(28, 1, 8, seed=4).load_state_dict(state)
