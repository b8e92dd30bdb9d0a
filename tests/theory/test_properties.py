"""Section 2: what moves the reward, who is freer, who learns more; shares by thirds against loops by hand."""

import math
from dataclasses import replace

import pytest
import torch

from experiments.theory import properties
from experiments.theory.cases import Case, Reads, cases, solve, spread_weights
from experiments.theory.problem import random_problem, weighted_ratios
from experiments.theory.properties import EVEN, Ratio, objective_slope, property_row, reward_slope_error
from experiments.theory.study import both_orders
from tests.theory.by_hand import ByHand, by_hand

DELTA = 0.6


@pytest.fixture(scope="module")
def solved() -> list[Case]:
    return cases([random_problem(seed=seed) for seed in (1, 2)], Reads.RESPONSE, DELTA)


def share(hand: ByHand, name: str, case: Case, low: bool, carried: bool) -> float:
    """Mean |d| (or |w d|) of a third of the tokens by weight over DPO's , drawn from the reference."""
    ordered = sorted(w for one in hand.weights.values() for w in one)
    assert len(ordered) % 3 == 0
    third = len(ordered) // 3
    edge = ordered[third - 1] if low else ordered[-third]
    top, bottom = 0.0, 0.0
    for y, weights in hand.weights.items():
        chance = math.exp(math.fsum(hand.reference[y]))
        for w, d, plain in zip(weights, hand.ratios(name, y), hand.ratios("DPO", y), strict=True):
            if w <= edge if low else w >= edge:
                top += chance * abs(d * w if carried else d)
                bottom += chance * abs(plain)
    return top / bottom


@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize(("name", "field"), [("pi*", "best"), ("h", "heuristic")])
def test_shares_by_thirds_are_those_of_loops_by_hand(solved: list[Case], name: str, field: str, carried: bool) -> None:
    logs = []
    for case in solved:
        hand = by_hand(case)
        low, high = (share(hand, name, case, low, carried) for low in (True, False))
        logs.append(math.log(low / high))
    found = getattr(
        property_row([[case] for case in solved], "response"), f"{'carried' if carried else 'moved'}_{field}"
    )
    assert found.mean == pytest.approx(math.exp(sum(logs) / 2), rel=1e-9)
    assert (found.above, found.below) == (sum(log > 0 for log in logs), sum(log < 0 for log in logs))
    assert found.count == 2


def test_the_first_steps_follow_the_weights_of_the_loss_and_not_of_the_objective() -> None:
    problem = random_problem(seed=3)
    turns = [solve(problem, spread_weights(problem.tree, Reads.POSITION, DELTA, turn)) for turn in range(2)]
    row = property_row([turns], "position")
    # at the reference all margins are 0, so TwDPO's gradient at a position is its weight times DPO's
    assert row.moved_loss_step.mean == pytest.approx((1 - DELTA) / (1 + DELTA), rel=1e-3)
    # J_w's weights stand before log-ratios, which are 0 there, and scores have mean 0
    assert row.moved_objective_step.mean == pytest.approx(1.0, abs=EVEN)
    assert (row.moved_objective_step.above, row.moved_objective_step.below) == (0, 0)
    assert row.moved_best.above == 1
    assert row.moved_loss_step.below == 1


def test_the_objectives_slope_is_what_small_steps_change_it_by() -> None:
    (case,) = cases([random_problem(vocab=2, seed=4)], Reads.RESPONSE, DELTA)
    slope, size = objective_slope(case.problem, case.dpo, case.weights), 1e-5
    for context, word in ((0, 0), (2, 1), (6, 0)):
        step = torch.zeros_like(case.dpo)
        step[context, word] = size
        up, down = ((case.dpo + sign * step).log_softmax(-1) for sign in (1, -1))
        hand = by_hand(case, up=up, down=down)
        by_steps = (hand.objective("up") - hand.objective("down")) / (2 * size)
        assert float(slope[context, word]) == pytest.approx(by_steps, abs=1e-8)


def test_the_reward_moves_by_the_weight_of_the_token(solved: list[Case], monkeypatch: pytest.MonkeyPatch) -> None:
    (case, _) = solved
    assert reward_slope_error(case) < 1e-12

    def unweighted(problem: object, policy: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return weighted_ratios(case.problem, policy, torch.ones_like(weights))

    monkeypatch.setattr(properties, "weighted_ratios", unweighted)
    assert reward_slope_error(case) == pytest.approx(case.problem.beta * case.delta, rel=1e-9)
    assert reward_slope_error(replace(case, weights=torch.ones_like(case.weights))) < 1e-12


def test_a_ratio_the_other_way_round() -> None:
    assert Ratio(4.0, above=3, below=1, count=5).inverse == Ratio(0.25, above=1, below=3, count=5)


def test_every_problem_comes_with_rising_and_with_falling_weights() -> None:
    for pair in both_orders(Reads.POSITION, 2):
        first, second = (one.weights[0] for one in pair)
        torch.testing.assert_close(first, second.flip(0), rtol=0, atol=1e-15)
        assert float((first - second).abs().max()) > 1
