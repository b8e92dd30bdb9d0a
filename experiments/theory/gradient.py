"""Paper's gradient of TwDPO's loss, against automatic differentiation of the loss over all pairs.

With ``r'(y) = beta sum_t w_t d_t`` and ``w_t = |y| a_t``::

    grad L = -beta E[ sigmoid(r'(y_l) - r'(y_w))
                      ( sum_t w_t(y_w) grad log pi(y_w,t) - sum_t w_t(y_l) grad log pi(y_l,t) ) ]

The expectation is over the pairs of ``descent.preference_loss``: two responses of the reference, labelled by
Bradley-Terry. The paper's trainer is checked against the same formula in ``tests/objectives/test_theory.py``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from experiments.theory.cases import Case
from experiments.theory.extremes import largest, least
from experiments.theory.gradient_descent import preference_loss
from experiments.theory.problem import Policy, probabilities, weighted_ratios, weighted_scores


@dataclass(frozen=True)
class GradientRow:
    """Section 8 on one set of prompts, at the reference, at DPO's policy and at one far from both.

    ``error``: the closed form's largest error over the largest entry of the gradient. ``unweighted``: the same of DPO's
    closed form (weights of 1) on TwDPO's loss: what leaving the weights out would cost. ``factors``: the pair's factor
    at the lowest margin, at margin 0 and at the highest margin seen. ``rising``: share of neighbours, pairs in order of
    their margin, at which the factor does not fall. ``at_heuristic``: the largest gradient left at h, where the loss
    should be least; ``at_dpo``: the smallest over the prompts at DPO's policy, where it should not.
    """

    error: float
    unweighted: float
    factors: tuple[float, float, float]
    rising: float
    at_heuristic: float
    at_dpo: float


def closed_form(case: Case, policy: Policy, weights: Float[Tensor, "responses length"]) -> Float[Tensor, " logits"]:
    """Returns the paper's gradient by the logits of all contexts."""
    problem = case.problem
    scores = weighted_scores(problem.tree, policy, weights)
    drawn = probabilities(problem.tree, problem.reference)
    wins = torch.sigmoid(problem.rewards.unsqueeze(-1) - problem.rewards)
    pushes = 2 * drawn.unsqueeze(-1) * drawn * wins * factors(margins(case, policy, weights))
    return -problem.beta * (pushes.sum(1) - pushes.sum(0)) @ scores


def margins(
    case: Case, policy: Policy, weights: Float[Tensor, "responses length"]
) -> Float[Tensor, "responses responses"]:
    """Returns ``r'(y_w) - r'(y_l)`` of every pair, with winners as rows."""
    implicit = case.problem.beta * weighted_ratios(case.problem, policy, weights)
    return implicit.unsqueeze(-1) - implicit


def factors(margin: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Returns ``sigmoid(r'(y_l) - r'(y_w))``, the weight of a pair's gradient, from its margin."""
    return torch.sigmoid(-margin)


def autograd_gradient(case: Case, policy: Policy) -> Float[Tensor, " logits"]:
    """Computes the same gradient by automatic differentiation of the loss."""
    leaf = policy.unsqueeze(0).clone().requires_grad_()
    (slope,) = torch.autograd.grad(preference_loss([case.problem], leaf, case.weights.unsqueeze(0)).sum(), leaf)
    return slope.flatten()


def gradient_row(cases: Sequence[Case]) -> GradientRow:
    """Checks the gradient's statements on the cases."""
    errors, bare, seen = [], [], []
    for case in cases:
        for policy in (case.problem.reference, case.dpo, case.dpo.flip(0)):
            exact = autograd_gradient(case, policy)
            size = float(exact.abs().max())
            errors.append(float((closed_form(case, policy, case.weights) - exact).abs().max()) / size)
            plain = closed_form(case, policy, torch.ones_like(case.weights))
            bare.append(float((plain - exact).abs().max()) / size)
            seen.append(margins(case, policy, case.weights).flatten())
    ordered = torch.cat(seen).sort().values
    pushes = factors(ordered)
    ends = (float(pushes[0]), float(factors(torch.zeros((), dtype=pushes.dtype))), float(pushes[-1]))
    steps = ordered.diff() > 1e-9  # neighbours closer than rounding have no order
    rising = (pushes.diff() >= 0) & steps
    left = [float(autograd_gradient(case, case.heuristic.policy).abs().max()) for case in cases]
    elsewhere = [float(autograd_gradient(case, case.dpo).abs().max()) for case in cases]
    return GradientRow(
        largest(errors), least(bare), ends, float(rising.double().mean()), largest(left), least(elsewhere)
    )
