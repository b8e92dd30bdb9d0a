"""Planned batches: every pair once, steps that do not depend on the splitting, budgets kept, resuming at any batch."""

import json
import math
import random
from collections.abc import Iterable
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from attnpo.data.micro_batches import PACKED, PADDED, BatchByCount, BatchByTokens, BatchRule, RowCost
from attnpo.data.sampler import PlannedBatch, StepBatchSampler, count_steps
from attnpo.schema import UserError

SIZES = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))  # micro-batch, accumulation, ranks


def ranks(num_pairs: int, micro: int, accumulation: int, world: int, **options: bool | int) -> list[StepBatchSampler]:
    return over(world, num_pairs, micro * accumulation * world, BatchByCount(micro), **options)


def over(world: int, num_pairs: int, size: int, cutting: BatchRule, **options: bool | int) -> list[StepBatchSampler]:
    return [StepBatchSampler(num_pairs, size, cutting, rank=r, world_size=world, **options) for r in range(world)]


def make_counting_sampler(num_pairs: int, micro: int, accumulation: int, **options: bool | int) -> StepBatchSampler:
    return StepBatchSampler(num_pairs, micro * accumulation, BatchByCount(micro), **options)


def steps(plans: Iterable[Iterable[PlannedBatch]]) -> dict[int, list[int]]:
    """Step -> its pairs in sorted order, over all ranks."""
    found: dict[int, list[int]] = {}
    for plan in plans:
        for batch in plan:
            found.setdefault(batch.step, []).extend(batch.indices)
    return {step: sorted(pairs) for step, pairs in found.items()}


def test_literal_plan_with_a_short_last_step() -> None:
    # 11 pairs, steps of 2 x 2 x 2 = 8: a full step, then 3 pairs: shares of 2 and 1, one micro-batch each.
    first, second = (list(plan) for plan in ranks(11, 2, 2, 2, shuffle=False))
    assert first == [
        PlannedBatch([0, 1], step=0, step_pairs=8, micro=0, micros=2),
        PlannedBatch([2, 3], step=0, step_pairs=8, micro=1, micros=2),
        PlannedBatch([8, 9], step=1, step_pairs=3, micro=0, micros=1),
    ]
    assert [batch.indices for batch in second] == [[4, 5], [6, 7], [10]]
    assert [batch.micro == batch.micros - 1 for batch in first] == [False, True, True]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 60), SIZES, st.booleans())
def test_plan_properties(num_pairs: int, sizes: tuple[int, int, int], shuffle: bool) -> None:
    micro, accumulation, world = sizes
    size = micro * accumulation * world
    rest = num_pairs % size
    lost = rest if rest < world else 0
    if num_pairs == lost:
        with pytest.raises(UserError, match="too few for an optimizer step"):
            ranks(num_pairs, *sizes, shuffle=shuffle)
        return
    plans = ranks(num_pairs, *sizes, shuffle=shuffle)
    batches = [list(plan) for plan in plans]
    every = [index for plan in batches for batch in plan for index in batch.indices]
    assert len(set(every)) == len(every) == num_pairs - lost
    assert {plan.dropped for plan in plans} == {lost}
    assert {len(plan) for plan in plans} == {len(found) for found in batches}
    assert {plan.steps_per_epoch for plan in plans} == {(num_pairs - lost + size - 1) // size}
    for together in zip(*batches, strict=True):  # the ranks' micro-batches of one moment
        assert len({(batch.step, batch.step_pairs, batch.micro, batch.micros) for batch in together}) == 1
        assert all(1 <= len(batch.indices) <= micro + (micro == 1) for batch in together)
    for step, pairs in steps(batches).items():
        found = [batch for plan in batches for batch in plan if batch.step == step]
        assert {batch.step_pairs for batch in found} == {len(pairs)}
        assert found[0].micros <= accumulation
        assert [batch.micro for batch in found] == list(range(found[0].micros)) * world
        shares = [sum(len(batch.indices) for batch in plan if batch.step == step) for plan in batches]
        assert max(shares) - min(shares) <= 1
        if len(pairs) == size:
            assert {len(batch.indices) for batch in found} == {micro}


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 70), st.integers(0, 3))
def test_steps_do_not_depend_on_the_splitting(num_pairs: int, epoch: int) -> None:
    # Steps of 8 pairs. With two ranks a single left-over pair is dropped, so leave such counts out.
    if num_pairs % 8 == 1:
        num_pairs += 1
    found = []
    for sizes in [(1, 8, 1), (2, 4, 1), (8, 1, 1), (1, 4, 2), (2, 2, 2), (4, 1, 2)]:
        plans = ranks(num_pairs, *sizes, seed=3)
        for plan in plans:
            plan.set_epoch(epoch)
        found.append(steps(plans))
    assert all(other == found[0] for other in found)
    assert len(found[0]) == (num_pairs + 7) // 8


def test_left_over_pairs_fewer_than_ranks_are_dropped_and_change_with_the_epoch() -> None:
    plans = ranks(17, 2, 2, 2)
    missing = []
    for _ in range(6):
        seen = {index for plan in plans for batch in plan for index in batch.indices}
        missing.append(set(range(17)) - seen)
    assert all(len(pairs) == 1 for pairs in missing)
    assert len(set.union(*missing)) > 1
    assert plans[0].dropped == 1


def test_uneven_single_pair_micro_batches_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    # Steps of 1 x 4 x 2; 3 pairs are left: shares of 2 and 1 in one micro-batch each.
    first, second = ranks(11, 1, 4, 2)
    assert "needs a micro-batch of 2 pairs instead of 1" in caplog.text
    assert [len(batch.indices) for batch in first] == [1, 1, 1, 1, 2]
    assert [len(batch.indices) for batch in second] == [1, 1, 1, 1, 1]
    caplog.clear()
    ranks(12, 1, 4, 2)
    assert not caplog.records


def test_epochs_reshuffle_and_are_keyed_by_seed_and_epoch() -> None:
    plan = make_counting_sampler(40, 4, 2, seed=5)
    epochs = [[index for batch in plan for index in batch.indices] for _ in range(3)]
    assert all(sorted(order) == list(range(40)) for order in epochs)
    assert len({tuple(order) for order in epochs}) == 3
    assert plan.epoch == 2
    again = make_counting_sampler(40, 4, 2, seed=5)
    again.set_epoch(2)
    assert [index for batch in again for index in batch.indices] == epochs[2]
    assert [index for batch in make_counting_sampler(40, 4, 2, seed=6) for index in batch.indices] != epochs[0]
    assert [batch.epoch for batch in again][:1] == [3]


def test_order_is_pinned() -> None:
    # Recorded from this implementation: a change of it would make saved runs resume on other pairs.
    assert make_counting_sampler(8, 2, 2, seed=7).epoch_order(0) == [5, 0, 6, 3, 4, 7, 1, 2]


def test_a_broken_pass_starts_anew() -> None:
    plan = make_counting_sampler(20, 2, 2, seed=1)
    whole = list(make_counting_sampler(20, 2, 2, seed=1))
    assert list(islice(plan, 3)) == whole[:3]
    assert plan.state_dict()["batches"] == 3
    plan.set_epoch(0)
    assert list(plan) == whole


@pytest.mark.parametrize("rank", [0, 1])
def test_resume_at_any_batch_gives_the_rest(rank: int) -> None:
    def plan() -> StepBatchSampler:
        return StepBatchSampler(29, 12, BatchByCount(2), seed=2, rank=rank, world_size=2)

    whole = plan()
    epochs = [list(whole), list(whole)]
    for epoch, batches in enumerate(epochs):
        for consumed in range(len(batches) + 1):
            stopped = plan()
            stopped.set_epoch(epoch)
            list(islice(stopped, consumed))
            state = json.loads(json.dumps(stopped.state_dict()))
            resumed = plan()
            resumed.load_state_dict(state)
            resumed.set_epoch(epoch)  # Lightning does so before every epoch
            assert len(resumed) == len(batches)
            assert list(resumed) == batches[consumed:]
            assert resumed.state_dict() == {**state, "batches": len(batches)}
            following = list(resumed)
            assert following[0].epoch == epoch + 1
            assert len(following) == len(batches)
            if epoch == 0:
                assert following == epochs[1]


def test_a_resumed_epoch_survives_an_unused_iterator() -> None:
    plan = make_counting_sampler(20, 2, 2, seed=1)
    whole = list(make_counting_sampler(20, 2, 2, seed=1))
    plan.load_state_dict(plan.state_dict(batches=4))
    next(iter(plan))
    assert list(plan) == whole[4:]


@pytest.mark.parametrize("done", range(5))
def test_resume_with_another_split_of_the_step(done: int) -> None:
    # 28 pairs, steps of 8: three full steps and one of 4.
    old = ranks(28, 1, 8, 1, seed=4)
    whole = steps(old)
    (saved,) = ranks(28, 1, 8, 1, seed=4)
    state = saved.state_dict(batches=[0, 8, 16, 24, 28][done])
    new = ranks(28, 2, 2, 2, seed=4)
    for plan in new:
        plan.load_state_dict(state)
    assert steps(new) == {step: pairs for step, pairs in whole.items() if step >= done}


def test_resume_refuses_what_would_be_other_batches() -> None:
    state = make_counting_sampler(28, 1, 8, seed=4).state_dict(batches=3)
    with pytest.raises(UserError, match="within an optimizer step"):
        make_counting_sampler(28, 2, 4, seed=4).load_state_dict(state)
    with pytest.raises(UserError, match="num_pairs was 28, is 27, seed was 4, is 5"):
        make_counting_sampler(27, 1, 8, seed=5).load_state_dict(state)
    with pytest.raises(UserError, match="step_size was 8, is 4"):
        make_counting_sampler(28, 1, 4, seed=4).load_state_dict(state)
    with pytest.raises(UserError, match="an epoch has only 28 batches"):
        make_counting_sampler(28, 1, 8, seed=4).load_state_dict({**state, "batches": 29})


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_sizes_below_one(sizes: tuple[int, int, int]) -> None:
    size, micro, world = sizes
    with pytest.raises(UserError, match="at least 1, got 0"):
        StepBatchSampler(10, size, BatchByCount(micro), world_size=world)


def test_rank_out_of_range() -> None:
    with pytest.raises(ValueError, match="rank must be between 0 and 1"):
        StepBatchSampler(10, 2, BatchByCount(1), rank=2, world_size=2)


class Echo(Dataset[tuple[list[int], int]]):
    def __getitem__(self, planned: PlannedBatch) -> tuple[list[int], int]:
        return planned.indices, planned.step_pairs


@pytest.mark.parametrize("workers", [0, 1])
def test_in_a_loader(workers: int) -> None:
    plan = make_counting_sampler(11, 2, 2, shuffle=False)
    loader = DataLoader(Echo(), sampler=plan, batch_size=None, num_workers=workers)
    assert len(loader) == 6
    assert [tuple(item) for item in loader] == [
        ([0, 1], 4),
        ([2, 3], 4),
        ([4, 5], 4),
        ([6, 7], 4),
        ([8, 9], 3),
        ([10], 3),
    ]


# ----------------------------------------------------------------------------- budgets of tokens


COSTS = st.sampled_from([PADDED, PACKED])


def lengths(num_pairs: int, seed: int = 0, most: int = 60) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(4, most) for _ in range(num_pairs)]


def fewest(sizes: list[int], cost: RowCost, limit: int) -> int:
    """Returns the fewest consecutive parts of sorted sizes within the limit, by trying every last part."""
    line, best = sorted(sizes), [0]
    for end in range(1, len(line) + 1):
        fitting = [begin for begin in range(end) if cost.batch_cost(line[begin:end]) <= limit]
        best.append(1 + min(best[begin] for begin in fitting))
    return best[-1]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 3), st.integers(60, 240), COSTS, st.integers(0, 99))
def test_budget_properties(num_pairs: int, size: int, world: int, budget: int, cost: RowCost, seed: int) -> None:
    """Two epochs: every pair once, the steps of any other cutting, the budget kept, no micro-batch too many."""
    sizes, epochs = lengths(num_pairs, seed), 2
    cutting = BatchByTokens(sizes, cost, budget)
    steps_each = count_steps(num_pairs, size, world)
    if steps_each == 0 or (size < world <= num_pairs):
        with pytest.raises(UserError, match="too few for an optimizer step"):
            over(world, num_pairs, size, cutting)
        return
    plain = StepBatchSampler(num_pairs, size, BatchByCount(size), seed=seed)
    whole = [steps([plain]) for _ in range(epochs)]
    short = num_pairs % size if num_pairs % size >= world else 0
    needed = [
        [math.ceil(fewest([sizes[i] for i in whole[epoch][step]], cost, budget) / world) for epoch in range(epochs)]
        for step in range(steps_each)
    ]
    counts = [size] * (num_pairs // size) + [short] * (short > 0)
    if any(max(found) * world > size for found in needed[: num_pairs // size]):
        with pytest.raises(UserError, match="forward passes on each, so some of the"):
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
            assert all(batch.indices and (last or cutting.batch_tokens(batch.indices) <= budget) for batch in together)
        for step in range(steps_each):
            held = [[batch for batch in found if batch.step == step] for found in batches]
            assert all(found[0].of_rank == tuple(tuple(batch.indices) for batch in found) for found in held)
            assert {batch.step_pairs for found in held for batch in found} == {counts[step]}
            parts = [[cutting.batch_tokens(batch.indices) for batch in found] for found in held]
            totals = [sum(part) for part in parts]
            assert max(totals) - min(totals) <= max(map(max, parts)) - min(map(min, parts))


def test_a_budget_gives_the_same_batches_again() -> None:
    def found() -> list[list[list[int]]]:
        cutting = BatchByTokens(lengths(50), PADDED, 150)
        return [[batch.indices for batch in plan] for plan in over(2, 50, 16, cutting, seed=3)]

    assert found() == found()
    by_length = lengths(50)
    for plan in found():
        assert all(by_length[batch[0]] == max(by_length[i] for i in batch) for batch in plan)


def test_a_literal_plan_with_a_budget() -> None:
    """Steps of 4 and 2 pairs on two ranks; the budget holds one long pair, or two of 4 tokens."""
    first, second = (list(plan) for plan in over(2, 6, 4, BatchByTokens([9, 4, 4, 8, 3, 2], PADDED, 9), shuffle=False))
    assert first == [
        PlannedBatch([0], step=0, step_pairs=4, micro=0, micros=2),
        PlannedBatch([2], step=0, step_pairs=4, micro=1, micros=2),
        PlannedBatch([4], step=1, step_pairs=2, micro=0, micros=1),
    ]
    assert [batch.indices for batch in second] == [[3], [1], [5]]
    assert [(batch.rank, batch.ranks, batch.whole) for batch in second[:1]] == [(1, 2, (0, 1, 2, 3))]


def test_a_short_step_of_long_pairs_sets_the_number_for_all() -> None:
    """Lightning steps after a fixed number of micro-batches, so no step may have more."""
    plan = StepBatchSampler(7, 4, BatchByTokens([1, 1, 1, 1, 9, 9, 9], PADDED, 9), shuffle=False)
    assert (plan.split.accumulation, plan.split.short, len(plan)) == (3, 3, 6)
    assert [batch.indices for batch in plan][3:] == [[4], [5], [6]]


def test_an_epoch_that_was_not_planned_for_does_not_exceed_the_budget() -> None:
    """Two long pairs: in epoch 0 they are in different steps, later in one."""
    sizes = [9, 9, 1, 1]
    plan = next(
        plan
        for plan in (StepBatchSampler(4, 2, BatchByTokens(sizes, PADDED, 10), seed=seed) for seed in range(20))
        if all(len({0, 1} & set(step)) == 1 for step in plan._split_into_steps(0)) and plan.split.accumulation == 2
    )
    assert StepBatchSampler(4, 2, BatchByTokens(sizes, PADDED, 18), seed=plan.seed).split.accumulation == 1
    cheap = StepBatchSampler(4, 2, BatchByTokens(sizes, PACKED, 10), seed=plan.seed)
    assert cheap.split.accumulation == 1
    with pytest.raises(ValueError, match="need 18 tokens, above the budget 10"):
        for _ in range(20):
            list(cheap)
    assert StepBatchSampler(4, 2, BatchByTokens(sizes, PACKED, 10), seed=plan.seed, epochs=20).split.accumulation == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_resume_at_any_batch_of_a_budget(rank: int) -> None:
    def plan() -> StepBatchSampler:
        cutting = BatchByTokens(lengths(29), PADDED, 120)
        return StepBatchSampler(29, 8, cutting, seed=2, rank=rank, world_size=2, epochs=3)

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
        "budget": over(1, 28, 8, BatchByTokens(sizes, PADDED, 100), seed=4),
        "other": over(2, 28, 8, BatchByTokens(sizes, PACKED, 150), seed=4),
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
    def plan(budget: int) -> StepBatchSampler:
        return StepBatchSampler(28, 8, BatchByTokens(lengths(28), PADDED, budget), seed=4)

    state = plan(100).state_dict(1)
    with pytest.raises(UserError, match=r"at most 100 tokens of padded rows, accumulation \d+, 1 processes"):
        plan(101).load_state_dict(state)
    with pytest.raises(UserError, match="within an optimizer step"):
        make_counting_sampler(28, 1, 8, seed=4).load_state_dict(state)
