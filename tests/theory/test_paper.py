"""The paper's sections 3 to 7: numbers against loops by hand, and identities that break when they should."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from experiments.theory.cases import Case, Reads, cases, ending_case, own_tokens, solve, spread_weights
from experiments.theory.extremes import largest, least
from experiments.theory.paper_bounds import Bounded, paper_row, tried
from experiments.theory.problem import Tree, probabilities, random_problem
from tests.theory.by_hand import ByHand, by_hand


def some_cases(kind: str) -> list[Case]:
    if kind == "ends":
        return [ending_case(0.5, length=3, seed=seed) for seed in (4, 5)]
    return cases([random_problem(seed=seed) for seed in (4, 5)], Reads(kind), 0.5)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def check(found: Bounded, actual: Sequence[float], own: Sequence[float], bound: float) -> None:
    assert found.actual == pytest.approx(mean(actual), rel=1e-9, abs=1e-14)
    assert found.bound == pytest.approx(bound, rel=1e-9)
    shares = [one / limit for one, limit in zip(actual, own, strict=True)]
    assert found.share == pytest.approx(max(shares), rel=1e-9, abs=1e-14)


@pytest.mark.parametrize("kind", ["position", "response", "ends"])
def test_constants_lemmas_and_theorem_are_those_of_loops_by_hand(kind: str) -> None:
    solved = some_cases(kind)
    row, hands = paper_row(solved, kind), [by_hand(case, ends=kind == "ends") for case in solved]
    assert row.delta == pytest.approx(max(hand.delta() for hand in hands), rel=1e-12)
    assert row.delta == pytest.approx(0.5, rel=1e-12)
    needed = {name: max(hand.largest(name) for hand in hands) for name in ("pi*", "DPO", "h")}
    assert row.constants == pytest.approx(needed, rel=1e-12)
    assert row.constant == max(needed.values())
    own = [hand.delta() * max(hand.largest(name) for name in needed) for hand in hands]
    scale = row.delta * row.constant
    first = [hand.length("DPO") + hand.length("pi*") for hand in hands]
    second = [hand.length("DPO") + hand.length("h") for hand in hands]
    check(
        row.lemma_1,
        [hand.kl("pi*", "DPO") for hand in hands],
        [one * two for one, two in zip(own, first, strict=True)],
        scale * mean(first),
    )
    check(
        row.lemma_2,
        [hand.kl("h", "DPO") for hand in hands],
        [one * two for one, two in zip(own, second, strict=True)],
        scale * mean(second),
    )
    check(
        row.theorem,
        [hand.tv("pi*", "h") for hand in hands],
        [math.sqrt(one / 2) * (math.sqrt(a) + math.sqrt(b)) for one, a, b in zip(own, first, second, strict=True)],
        math.sqrt(scale / 2) * (math.sqrt(mean(first)) + math.sqrt(mean(second))),
    )


@pytest.mark.parametrize("kind", ["position", "response", "ends"])
def test_the_perturbation_and_its_bound_are_those_of_loops_by_hand(kind: str) -> None:
    solved = some_cases(kind)
    row = paper_row(solved, kind)
    moved, limits, shares = [], [], []
    for case in solved:
        others = {f"other {i}": policy for i, policy in enumerate(tried(case)[3:])}
        hand = by_hand(case, ends=kind == "ends", **others)
        for name in hand.policies:
            actual = abs(hand.objective(name) - hand.objective(name, weighted=False))
            shares.append(actual / (hand.beta * hand.delta() * hand.largest(name) * hand.length(name)))
            if name not in others:
                moved.append(actual)
                limits.append(hand.beta * row.delta * row.constant * hand.length(name))
    assert row.departure.actual == pytest.approx(mean(moved), rel=1e-9)
    assert row.departure.bound == pytest.approx(mean(limits), rel=1e-9)
    assert row.departure.share == pytest.approx(max(shares), rel=1e-9)
    assert 0 < row.departure.share < 1


@pytest.mark.parametrize("kind", ["position", "response", "ends"])
def test_the_identities_hold_by_hand_too(kind: str) -> None:
    for case in some_cases(kind):
        hand = by_hand(case, ends=kind == "ends")
        for name in hand.policies:
            extra = hand.mean(name, {y: hand.deviation(name, y) for y in hand.rewards})
            plain = hand.objective(name, weighted=False)
            assert hand.objective(name) == pytest.approx(plain - hand.beta * extra, abs=1e-12)
            regret = hand.objective("DPO", weighted=False) - plain
            assert regret == pytest.approx(hand.beta * hand.kl(name, "DPO"), abs=1e-10)
        extra_at = {y: hand.deviation("h", y) for y in hand.rewards}
        both = hand.kl("h", "DPO") + hand.kl("DPO", "h")
        assert both == pytest.approx(hand.mean("DPO", extra_at) - hand.mean("h", extra_at), abs=1e-10)
        assert both > 1e-3  # the identity is not one of zeros


@pytest.mark.parametrize("kind", ["position", "response", "ends"])
def test_no_identity_is_broken_by_what_it_is_about(kind: str) -> None:
    row = paper_row(some_cases(kind), kind)
    errors = (row.near_optimum, row.perturbation, row.regret, row.ratio, row.jeffreys)
    assert max(errors) < 1e-10


def test_each_identity_breaks_when_its_policy_or_its_weights_are_others() -> None:
    (case,) = cases([random_problem(seed=6)], Reads.RESPONSE, 0.5)
    others = spread_weights(case.problem.tree, Reads.RESPONSE, 0.5, seed=7)
    strange = paper_row([replace(case, weights=others)], "other weights")
    assert min(strange.near_optimum, strange.ratio, strange.jeffreys) > 1e-3
    assert max(strange.perturbation, strange.regret) < 1e-10  # these two hold of any weights
    unlike = paper_row([replace(case, dpo=case.problem.reference)], "not DPO's policy")
    assert min(unlike.regret, unlike.ratio, unlike.jeffreys) > 1e-3
    short = case.own.clone()
    short[:, -1] = False
    assert paper_row([replace(case, own=short)], "a token left out").perturbation > 1e-3
    wrong = replace(case.heuristic, policy=case.heuristic.policy + 0.01)
    assert paper_row([replace(case, heuristic=wrong)], "no policy").near_optimum > 0.009


def test_looseness_is_bound_over_actual() -> None:
    assert Bounded(actual=0.5, bound=2.0, share=0.3).looseness == 4.0
    assert Bounded(actual=0.0, bound=2.0, share=0.0).looseness == math.inf


# ------------------------------------------------------------------------------------------------ responses that end


def test_own_tokens_reach_to_the_first_end() -> None:
    own, first = own_tokens(Tree(2, 3))
    # responses 000, 001, 010, 011 all end with their first word; 100, 101 with the second; 110, 111 are whole
    assert own.sum(-1).tolist() == [1, 1, 1, 1, 2, 2, 3, 3]
    assert first.tolist() == [0, 0, 0, 0, 4, 4, 6, 7]


def test_responses_that_end_have_weights_of_mean_one_over_their_own_tokens_and_one_reward() -> None:
    case = ending_case(0.4, seed=3)
    own, first = own_tokens(case.problem.tree)
    torch.testing.assert_close(case.weights.sum(-1), case.lengths)
    assert bool((case.weights[~own] == 0).all())
    assert float((case.weights[own] - 1).abs().max()) == pytest.approx(0.4)
    torch.testing.assert_close(case.problem.rewards, case.problem.rewards[first], rtol=0, atol=0)
    torch.testing.assert_close(case.weights, case.weights[first], rtol=0, atol=0)
    hand: ByHand = by_hand(case, ends=True)
    for name, policy in case.policies.items():
        assert sum(hand.chance(name, y) for y in hand.rewards) == pytest.approx(1.0, abs=1e-12)
        assert case.mean_length(policy) == pytest.approx(hand.length(name), rel=1e-12)
        ended = torch.ones(len(policy), dtype=torch.bool)
        ended[case.problem.tree.nodes[own]] = False
        torch.testing.assert_close(policy[ended], case.problem.reference[ended], rtol=0, atol=1e-6)
    assert case.mean_length(case.dpo) != pytest.approx(case.mean_length(case.best.policy), abs=1e-4)
    assert float(probabilities(case.problem.tree, case.best.policy).sum()) == pytest.approx(1.0, abs=1e-12)


def test_weights_of_one_leave_nothing_to_bound() -> None:
    problem = random_problem(seed=1)
    row = paper_row([solve(problem, torch.ones(27, 3, dtype=torch.float64))], "ones")
    assert row.delta == 0
    assert row.lemma_1.bound == row.lemma_2.bound == row.theorem.bound == 0
    assert row.lemma_2.share == row.departure.share == 0
    assert row.theorem.actual < 1e-9


def test_what_is_no_number_is_not_lost_among_numbers() -> None:
    for values in ([math.nan, 1.0, 2.0], [1.0, math.nan, 2.0], [1.0, 2.0, math.nan]):
        assert math.isnan(largest(values))
        assert math.isnan(least(values))
    assert (largest(iter([1.0, 3.0, 2.0])), least([2.0, 1.0, 3.0])) == (3.0, 1.0)
