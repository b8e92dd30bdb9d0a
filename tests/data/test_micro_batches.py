"""Pairs put together for their forwards: what they cost, cuts than which there is no better, even shares, padding."""

import math
import random
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnpo.data.micro_batches import (
    COSTS,
    PACKED,
    PADDED,
    BatchByCount,
    BatchByTokens,
    RowCost,
    assign_to_ranks,
    fill_greedily,
    partition_by_cost,
)
from attnpo.data.sampler import StepBatchSampler
from attnpo.models.layouts import LAYOUTS
from attnpo.schema import UserError

SIZES = st.lists(st.integers(1, 30), min_size=1, max_size=8).map(lambda sizes: sorted(sizes, reverse=True))
COST = st.sampled_from([PADDED, PACKED])


# ------------------------------------------------------------------------------------------------ what pairs cost

PROMPTS = st.lists(st.integers(1, 9), min_size=1, max_size=5)
PAIR = st.tuples(PROMPTS, PROMPTS, PROMPTS, st.one_of(st.none(), PROMPTS))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(LAYOUTS)), st.lists(PAIR, min_size=1, max_size=4))
def test_a_cost_is_the_tokens_that_the_layout_lays(
    name: str, pairs: list[tuple[list[int], list[int], list[int], list[int] | None]]
) -> None:
    """Also where the prompts of a pair differ, which no layout can share."""
    rows = [((prompt, chosen), (other or prompt, rejected)) for prompt, chosen, rejected, other in pairs]
    laid = LAYOUTS[name]([pair[0] for pair in rows] + [pair[1] for pair in rows], 0)
    cost = COSTS[name]
    assert cost.batch_cost([cost.pair_cost(pair) for pair in rows]) == laid.inputs.input_ids.numel()


def test_every_layout_has_a_cost() -> None:
    assert COSTS.keys() == LAYOUTS.keys() and all(COSTS[name].name == name for name in COSTS)


# ------------------------------------------------------------------------------------------------ cutting a line


def every_cut(count: int, parts: int) -> list[list[range]]:
    cuts = combinations(range(1, count), parts - 1)
    return [[range(low, high) for low, high in pairwise([0, *cut, count])] for cut in cuts]


def largest(sizes: list[int], parts: list[range], cost: RowCost) -> int:
    return max(cost.batch_cost(sizes[part.start : part.stop]) for part in parts)


@settings(max_examples=60, deadline=None)
@given(SIZES, COST, st.data())
def test_no_other_cut_has_a_smaller_largest_part(sizes: list[int], cost: RowCost, data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(sizes)))
    found = partition_by_cost(sizes, parts, cost)
    assert len(found) == parts and all(found)
    assert [place for part in found for place in part] == list(range(len(sizes)))
    assert largest(sizes, found, cost) == min(largest(sizes, cut, cost) for cut in every_cut(len(sizes), parts))


@settings(max_examples=60, deadline=None)
@given(SIZES, COST, st.integers(30, 150))
def test_no_other_cut_keeps_the_limit_in_fewer_parts(sizes: list[int], cost: RowCost, limit: int) -> None:
    starts = fill_greedily(sizes, cost, limit)
    parts = [range(low, high) for low, high in pairwise([*starts, len(sizes)])]
    assert largest(sizes, parts, cost) <= limit
    fewer = range(1, len(parts))
    assert all(largest(sizes, cut, cost) > limit for count in fewer for cut in every_cut(len(sizes), count))


@pytest.mark.parametrize("parts", [0, 4])
def test_parts_that_cannot_be(parts: int) -> None:
    with pytest.raises(ValueError, match=f"cannot split 3 pairs into {parts} non-empty parts"):
        partition_by_cost([3, 2, 1], parts, PADDED)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.data())
def test_ranks_get_as_many_parts_and_alike_totals(ranks: int, each: int, data: st.DataObject) -> None:
    count = ranks * each
    costs = data.draw(st.lists(st.integers(1, 50), min_size=count, max_size=count))
    hands = assign_to_ranks(costs, ranks)
    assert sorted(part for hand in hands for part in hand) == list(range(count))
    assert {len(hand) for hand in hands} == {each}
    totals = [sum(costs[part] for part in hand) for hand in hands]
    assert max(totals) - min(totals) <= max(costs) - min(costs)
    rounds = list(zip(*hands, strict=True))  # what the ranks compute at the same time
    for before, after in pairwise(rounds):
        assert min(costs[part] for part in before) >= max(costs[part] for part in after)


# ------------------------------------------------------------------------------------------------ cutting a step


def test_a_step_is_sorted_and_equal_pairs_keep_the_order_of_the_step() -> None:
    cutting = BatchByTokens([5, 9, 5, 3, 5], PADDED, budget=15)
    (hand,) = cutting.split_step((4, 0, 3, 1, 2), 3, 1)
    assert hand == [(4, 0), (2, 3), (1,)]  # 10, 10 and 9 tokens
    assert cutting.split_step([4, 0, 3, 1, 2], 3, 1) == [hand]
    assert (cutting.min_micro_batches((4, 0, 3, 1, 2), 1), cutting.min_micro_batches((4, 0, 3, 1, 2), 2)) == (3, 2)


def test_a_step_that_was_not_planned_for_is_no_silent_excess() -> None:
    cutting = BatchByTokens([8, 8], PADDED, budget=10)
    with pytest.raises(ValueError, match="1 micro-batches on 1 ranks need 16 tokens, above the budget 10"):
        cutting.split_step((0, 1), 1, 1)
    assert cutting.split_ignoring_budget((0, 1), 1, 1) == [[(0, 1)]]


def test_more_forwards_than_pairs_are_refused() -> None:
    cutting = BatchByTokens([8, 8, 8, 8, 8], PADDED, budget=10, key="batch.eval_tokens")
    with pytest.raises(
        UserError, match=r"^batch\.eval_tokens=10: a step of 5 pairs on 2 processes needs 3 forward passes"
    ):
        cutting.num_micro_batches([range(5)], 5, 2)
    assert cutting.num_micro_batches([range(4)], 4, 2) == 2


def test_a_short_last_step_may_go_above_the_budget_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """Three pairs left for two processes: one has to take two at once, since both take as many forwards."""
    batches = StepBatchSampler(7, 4, BatchByTokens([10] * 7, PADDED, 10), world_size=2)
    assert (
        "the final step has only 3 pairs across 2 processes, so a forward pass may exceed batch.tokens=" in caplog.text
    )
    assert (batches.split.accumulation, batches.split.short) == (2, 1)
    assert sorted(len(part) for part in batches.iter_micro_batches()) == [1, 1, 1, 1, 1, 2]


# ------------------------------------------------------------------------------------------------ what it is for


def paper_like(count: int) -> list[tuple[int, int, int]]:
    """Tokens of prompts and both responses, drawn with the paper's means (171, 272, 238) and its maximum of 2048."""
    rng = random.Random(0)

    def near(mean: float, spread: float, shared: float = 0.0) -> int:
        return max(4, int(rng.lognormvariate(math.log(mean) - (spread**2 + shared**2) / 2, spread)))

    drawn = []
    for _ in range(count):
        topic = rng.gauss(0, 0.6)  # long answers come in pairs
        prompt = min(1800, near(171, 1.0))
        sides = [min(2048 - prompt, int(near(mean, 0.35, 0.6) * math.exp(topic))) for mean in (272, 238)]
        drawn.append((prompt, *(max(1, side) for side in sides)))
    return drawn


def test_a_budget_pads_less_and_runs_fewer_forwards_than_single_pairs() -> None:
    """1,600 pairs in steps of 32: padded tokens per real one, at no more tokens per forward than one pair may have."""
    drawn = paper_like(1600)
    real = sum(2 * prompt + chosen + rejected for prompt, chosen, rejected in drawn)
    sizes = [2 * (prompt + max(chosen, rejected)) for prompt, chosen, rejected in drawn]
    steps = [range(first, first + 32) for first in range(0, 1600, 32)]
    pooled = BatchByTokens(sizes, PADDED, budget=4096)
    worst = pooled.num_micro_batches(steps, 32, 1)
    costs = {"tokens": [pooled.batch_tokens(part) for step in steps for part in pooled.split_step(step, worst, 1)[0]]}
    for micro in (1, 4):
        parts = [part for step in steps for part in BatchByCount(micro).split_step(step, 32 // micro, 1)[0]]
        costs[f"micro {micro}"] = [pooled.batch_tokens(part) for part in parts]
    waste = {name: sum(found) / real for name, found in costs.items()}
    assert max(costs["tokens"]) <= 4096 < max(costs["micro 4"])
    assert waste["tokens"] < 1.2 < 1.6 < waste["micro 4"]
    assert waste["tokens"] < waste["micro 1"] + 0.08 and len(costs["tokens"]) < 0.8 * len(costs["micro 1"])
