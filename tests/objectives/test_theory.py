"""TwDPO against its theory: closed-form gradient, zero weights, rewards recovered where its loss leads."""

from itertools import combinations

import pytest
import torch
from torch import Tensor

from attnpo.objectives.base import PreferenceObjective
from attnpo.objectives.dpo import DPO
from attnpo.objectives.twdpo import TwDPO
from attnpo.schema import ObjectiveOutput, PreferenceBatch, TokenStats
from experiments.theory.cases import Reads, spread_weights
from experiments.theory.gradient_descent import preference_loss
from experiments.theory.problem import (
    Problem,
    dpo_policy,
    random_problem,
    solve_heuristic,
    token_logps,
    total_variation,
)
from tests.objectives.inputs import make_batch, make_rows

COUNTS = (5, 3, 1, 4, 2, 5)  # three chosen responses, then their rejected ones
LENGTHS = torch.tensor(COUNTS, dtype=torch.float64)[:, None]


def batch_of(weights: Tensor, counts: tuple[int, ...]) -> PreferenceBatch:
    return make_batch(make_rows(counts, weights))


def drawn(scale: float) -> tuple[Tensor, Tensor, PreferenceBatch]:
    """Policy and reference log-probs and a batch with distributions over the response tokens as weights."""
    random = torch.Generator().manual_seed(11)
    mask = make_rows(COUNTS).response_mask
    policy, reference, raw = (torch.rand(6, 5, generator=random, dtype=torch.float64) for _ in range(3))
    weights = raw * mask / (raw * mask).sum(-1, keepdim=True)
    return -scale * policy, -scale * reference, batch_of(weights, COUNTS)


def gradient(policy: Tensor, reference: Tensor, batch: PreferenceBatch, objective: PreferenceObjective) -> Tensor:
    leaf = policy.clone().requires_grad_()
    objective(TokenStats(leaf), TokenStats(reference), batch).losses.sum().backward()
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize("length_scale", [True, False])
@pytest.mark.parametrize("scale", [1.0, 500.0])
def test_the_gradient_is_the_closed_form(scale: float, length_scale: bool) -> None:
    beta = 0.7
    policy, reference, batch = drawn(scale)
    factors = batch.main.token_weights["reward"] * (LENGTHS if length_scale else 1.0)
    rewards = beta * (factors * (policy - reference)).sum(-1)
    push = -beta * torch.sigmoid(-(rewards[:3] - rewards[3:]))  # of the chosen side; the rejected side is its opposite
    expected = factors * torch.cat([push, -push])[:, None]
    found = gradient(policy, reference, batch, TwDPO(beta, length_scale=length_scale))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert found.abs().max() > 1e-3


def test_the_gradient_by_the_logits_is_a_difference_of_weighted_scores() -> None:
    # as in a model: token log-probs are read off a softmax, so a score is the one-hot of the token minus the softmax
    beta, words = 0.5, 4
    _, reference, batch = drawn(2.0)
    random = torch.Generator().manual_seed(2)
    logits = torch.randn(6, 5, words, generator=random, dtype=torch.float64).requires_grad_()
    ids = torch.randint(words, (6, 5, 1), generator=random)
    logps = logits.log_softmax(-1).gather(-1, ids).squeeze(-1)
    TwDPO(beta)(TokenStats(logps), TokenStats(reference), batch).losses.sum().backward()
    factors = batch.main.token_weights["reward"] * LENGTHS
    rewards = beta * (factors * (logps.detach() - reference)).sum(-1)
    push = -beta * torch.sigmoid(-(rewards[:3] - rewards[3:]))
    scores = torch.nn.functional.one_hot(ids.squeeze(-1), words) - logits.detach().softmax(-1)
    expected = (factors * torch.cat([push, -push])[:, None])[..., None] * scores
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, expected, rtol=1e-11, atol=1e-15)


def test_a_token_of_weight_zero_gets_exactly_no_gradient() -> None:
    policy, reference, batch = drawn(3.0)
    weights = batch.main.token_weights["reward"].clone()
    weights[0, 2] = weights[3, 0] = 0.0
    policy[0, 2] = -torch.inf  # not even a token the policy forbids
    batch = batch_of(weights, COUNTS)
    found = gradient(policy, reference, batch, TwDPO(0.3))
    silent = (weights == 0) | ~batch.main.response_mask
    assert torch.equal(found[silent], torch.zeros_like(found[silent]))
    assert found[~silent].abs().min() > 0
    assert torch.isfinite(found).all()


# ------------------------------------------------------------------------------------------------ rewards recovered


def all_pairs(
    problem: Problem, policy: Tensor, weights: Tensor, objective: PreferenceObjective
) -> tuple[Tensor, Tensor]:
    """The objective's implicit reward differences over all pairs of responses, and the true ones."""
    out, (first, second) = scored(problem, policy, weights, objective)
    return out.chosen_rewards - out.rejected_rewards, problem.rewards[first] - problem.rewards[second]


def scored(
    problem: Problem, policy: Tensor, weights: Tensor, objective: PreferenceObjective
) -> tuple[ObjectiveOutput, Tensor]:
    pairs = torch.tensor(list(combinations(range(len(problem.rewards)), 2))).T
    rows, length = pairs.flatten(), problem.tree.length
    batch = batch_of(weights[rows] / length, (length,) * len(rows))
    policy_logps, reference_logps = (token_logps(problem.tree, one)[rows] for one in (policy, problem.reference))
    return objective(TokenStats(policy_logps), TokenStats(reference_logps), batch), pairs


@pytest.mark.parametrize("reads", list(Reads))
def test_rewards_recovered_from_the_heuristic_policy_reproduce_pairwise_differences(reads: Reads) -> None:
    problem = random_problem(seed=4)
    weights = spread_weights(problem.tree, reads, 0.7)
    found, true = all_pairs(problem, solve_heuristic(problem, weights).policy, weights, TwDPO(problem.beta))
    torch.testing.assert_close(found, true, rtol=0, atol=1e-10)
    # DPO's policy is another one and gives other differences
    other, _ = all_pairs(problem, dpo_policy(problem), weights, TwDPO(problem.beta))
    assert (other - true).abs().max() > 0.1


def test_rewards_recovered_from_dpos_policy_reproduce_pairwise_differences() -> None:
    problem = random_problem(seed=5)
    found, true = all_pairs(problem, dpo_policy(problem), torch.ones(27, 3, dtype=torch.float64), DPO(problem.beta))
    torch.testing.assert_close(found, true, rtol=0, atol=1e-10)


def test_the_study_descends_on_twdpos_own_loss() -> None:
    problem = random_problem(seed=6)
    weights = spread_weights(problem.tree, Reads.RESPONSE, 0.5)
    policy = dpo_policy(problem)
    out, (first, second) = scored(problem, policy, weights, TwDPO(problem.beta))
    back, _ = scored(problem, policy, weights, TwDPO(problem.beta, label_smoothing=0.25))
    flipped = (back.losses - 0.75 * out.losses) / 0.25  # the loss of the pair with its sides changed
    chances = token_logps(problem.tree, problem.reference).sum(-1).exp()
    wins = torch.sigmoid(problem.rewards[first] - problem.rewards[second])
    drawn_twice = 2 * chances[first] * chances[second]
    same = (chances.square()).sum() * torch.tensor(2.0, dtype=torch.float64).log()  # a response against itself: ln 2
    expected = (drawn_twice * (wins * out.losses + (1 - wins) * flipped)).sum() + same
    found = preference_loss([problem], policy.unsqueeze(0), weights.unsqueeze(0))
    torch.testing.assert_close(found.squeeze(0), expected, rtol=1e-12, atol=0)


def test_twdpos_loss_is_least_at_the_heuristic_policy() -> None:
    problem = random_problem(vocab=2, length=3, beta=1.0, seed=7)
    weights = spread_weights(problem.tree, Reads.RESPONSE, 0.6)
    h = solve_heuristic(problem, weights).policy
    logits = problem.reference.unsqueeze(0).clone().requires_grad_()
    search = torch.optim.LBFGS(
        [logits],
        max_iter=500,
        history_size=30,
        tolerance_grad=1e-13,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        search.zero_grad()
        loss = preference_loss([problem], logits, weights.unsqueeze(0)).sum()
        loss.backward()
        return loss

    search.step(closure)
    trained = logits.detach()[0].log_softmax(-1)
    assert total_variation(problem.tree, trained, h) < 1e-5
    assert total_variation(problem.tree, problem.reference, h) > 0.05
    assert total_variation(problem.tree, dpo_policy(problem), h) > 1e-3
