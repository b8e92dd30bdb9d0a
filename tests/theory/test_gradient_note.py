"""Sections 8 and 9: the closed form against differences of the loss, the note against loops by hand."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from experiments.theory import gradient
from experiments.theory import normalized_likelihood as note
from experiments.theory.cases import Case, Reads, cases, spread_weights
from experiments.theory.gradient import autograd_gradient, closed_form, gradient_row, margins
from experiments.theory.gradient_descent import preference_loss
from experiments.theory.normalized_likelihood import note_row
from experiments.theory.problem import random_problem
from tests.theory.by_hand import by_hand


@pytest.fixture(scope="module")
def case() -> Case:
    (one,) = cases([random_problem(vocab=2, seed=6)], Reads.RESPONSE, 0.5)
    return one


def test_the_closed_form_is_what_small_steps_change_the_loss_by(case: Case) -> None:
    point, size = case.problem.reference.flip(0), 1e-5

    def loss(logits: Tensor) -> float:
        return float(preference_loss([case.problem], logits.unsqueeze(0), case.weights.unsqueeze(0)))

    expected = []
    for place in range(point.numel()):
        step = torch.zeros(point.numel(), dtype=point.dtype)
        step[place] = size
        step = step.reshape(point.shape)
        expected.append((loss(point + step) - loss(point - step)) / (2 * size))
    by_steps = torch.tensor(expected, dtype=torch.float64)
    assert by_steps.abs().max() > 1e-2
    torch.testing.assert_close(closed_form(case, point, case.weights), by_steps, rtol=0, atol=1e-9)
    torch.testing.assert_close(autograd_gradient(case, point), by_steps, rtol=0, atol=1e-9)


def test_margins_are_differences_of_implicit_rewards(case: Case) -> None:
    hand = by_hand(case)
    found = margins(case, case.dpo, case.weights)
    for i, winner in enumerate(hand.rewards):
        for j, loser in enumerate(hand.rewards):
            assert float(found[i, j]) == pytest.approx(hand.implicit("DPO", winner) - hand.implicit("DPO", loser))


def test_the_gradient_row_says_what_breaks(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    row = gradient_row([case])
    assert row.error < 1e-12
    assert row.unweighted > 0.01
    assert row.at_heuristic < 1e-9 < 1e-4 < row.at_dpo
    assert row.factors[0] > row.factors[1] == 0.5 > row.factors[2]
    assert row.rising == 0
    lowest, highest = (1 / (1 + math.exp(-sign * largest(case))) for sign in (1, -1))
    assert row.factors[0] == pytest.approx(lowest)
    assert row.factors[2] == pytest.approx(highest)
    others = replace(case, weights=spread_weights(case.problem.tree, Reads.RESPONSE, 0.5, seed=9))
    assert gradient_row([others]).at_heuristic > 1e-3
    monkeypatch.setattr(gradient, "factors", torch.sigmoid)  # pushes hardest what is already right
    wrong = gradient_row([case])
    assert wrong.error > 0.1
    assert wrong.rising > 0.5


def largest(case: Case) -> float:
    """The largest margin of any pair at the places where the row looks."""
    places = (case.problem.reference, case.dpo, case.dpo.flip(0))
    return max(float(margins(case, policy, case.weights).max()) for policy in places)


# ------------------------------------------------------------------------------------------------ the note


def test_the_note_is_that_of_loops_by_hand(case: Case) -> None:
    hand, row = by_hand(case), note_row([case], 0.5)
    names, ys = ("pi*", "DPO", "h"), list(hand.rewards)
    masses = {name: hand.mass(name) for name in (*names, "reference")}
    assert row.log_mass == pytest.approx(masses["h"], abs=1e-12)
    assert abs(row.log_mass) > 1e-3
    assert row.constant == pytest.approx(max(masses[n] for n in names) - min(masses[n] for n in names), abs=1e-12)
    normal = {name: {y: hand.log_likelihood(name, y) - masses[name] for y in ys} for name in masses}
    apart = sum(abs(math.exp(normal["h"][y]) - hand.chance("h", y)) for y in ys) / 2
    assert row.distance == pytest.approx(apart, rel=1e-9)
    assert row.intractable == pytest.approx(hand.tv("pi*", "h"), rel=1e-9)
    tilted = {y: math.exp(normal["reference"][y] + hand.rewards[y] / hand.beta) for y in ys}
    log_z = math.log(sum(tilted.values()))
    for y in ys:
        assert math.exp(normal["h"][y]) == pytest.approx(tilted[y] / math.exp(log_z), abs=1e-10)
    gaps = []
    for name in names:
        head = hand.beta * (log_z + masses["reference"] - masses[name])
        logs = {y: normal[name][y] - normal["h"][y] for y in ys}
        mended = head - hand.beta * hand.mean(name, logs)
        assert hand.objective(name) == pytest.approx(mended, abs=1e-10)
        printed = head - hand.mean(name, {y: math.exp(log) for y, log in logs.items()})
        gaps.append(hand.objective(name) - printed)
    assert row.printed == pytest.approx((max(gaps) - min(gaps)) / 2, rel=1e-6)
    assert row.printed > 1e-4
    assert max(row.error, row.pairs, row.reward, row.lemma_2, row.display) < 1e-10


def test_each_part_of_the_note_breaks_when_it_should(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    dpo = replace(case, heuristic=replace(case.heuristic, policy=case.dpo))
    row = note_row([dpo], 0.5)  # DPO's policy in the place of h
    assert min(row.error, row.reward, row.lemma_2, row.display) > 1e-3
    assert row.pairs < 1e-10  # the mass cancels in a pair at every policy
    plain = replace(case, weights=torch.ones_like(case.weights))
    monkeypatch.setattr(note, "margins", lambda one, policy, weights: margins(one, policy, plain.weights))
    assert note_row([case], 0.5).pairs > 1e-3
    monkeypatch.setattr(note, "deviation", lambda one, policy: torch.zeros(len(one.weights)))
    assert note_row([case], 0.5).lemma_2 > 1e-3
