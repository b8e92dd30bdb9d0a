"""Properties that the paper claims of token weights: what moves the reward, who is free to move, who learns more.

- *P1.* The implicit reward ``beta sum_t w_t d_t`` moves by ``beta w_t`` for each unit of a token's log-probability.
- *P2.* Tokens of low weight are freer to leave the reference, those of high weight are held more strictly.
- *P3.* The policy of the RL objective and the near-optimum of TwDPO learn more from important tokens.

P2 and P3 contradict each other unless they speak of different things: a token that is held more strictly ends nearer to
the reference. So P3 is read in two ways: by how far a token's log-probability moves, and by how much of the implicit
reward the token carries, ``w_t d_t``. Either is taken relative to DPO's policy, since words of low weight may differ in
more than their weight, and both at the first gradient step and at the end of training.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from experiments.theory.cases import Case
from experiments.theory.extremes import largest
from experiments.theory.gradient import autograd_gradient
from experiments.theory.problem import Policy, Problem, Weights, objective, probabilities, weighted_ratios

THIRDS = 3  # tokens are compared by thirds of their weights
STEP = 1e-4  # length of the first gradient step: the ratios are those of its limit
EVEN = 1e-6  # logarithm of a ratio that counts as 1; rounding in a step of STEP leaves less


@dataclass(frozen=True)
class Ratio:
    """Ratio over ``count`` problems: its geometric ``mean``, and the numbers of problems above and below 1."""

    mean: float
    above: int
    below: int
    count: int

    @property
    def inverse(self) -> "Ratio":
        """Returns the reciprocal ratio."""
        return Ratio(1 / self.mean, self.below, self.above, self.count)


@dataclass(frozen=True)
class PropertyRow:
    """P1 to P3 for one kind of weights.

    ``reward_error``: largest error of P1's ``beta w_t``. The others are what the lowest third of tokens by weight does
    over what the highest third does, each relative to DPO's policy: above 1 where low weights do more. ``moved_*``:
    mean |d_t|, at pi*, at h, and after the first step of gradient descent on TwDPO's loss and of ascent on J_w.
    ``carried_*``: mean |w_t d_t| at pi* and at h.
    """

    kind: str
    reward_error: float
    moved_best: Ratio
    moved_heuristic: Ratio
    moved_loss_step: Ratio
    moved_objective_step: Ratio
    carried_best: Ratio
    carried_heuristic: Ratio


def property_row(problems: Sequence[Sequence[Case]], kind: str) -> PropertyRow:
    """Checks P1 to P3 on problems, each a group of cases of one problem under several weights, which are averaged."""
    found = [[_ratios(case) for case in group] for group in problems]
    ratios = {name: _merged([[one[name] for one in group] for group in found]) for name in found[0][0]}
    return PropertyRow(kind, largest(reward_slope_error(case) for group in problems for case in group), **ratios)


def reward_slope_error(case: Case, rise: float = 0.25) -> float:
    """Checks P1: returns the largest error, over responses and tokens, of the predicted slope ``beta w_t``."""
    problem, tree, worst = case.problem, case.problem.tree, 0.0
    before = problem.beta * weighted_ratios(problem, case.dpo, case.weights)
    for context in range(tree.contexts):
        for word in range(tree.vocab):
            raised = case.dpo.clone()
            raised[context, word] += rise
            slope = (problem.beta * weighted_ratios(problem, raised, case.weights) - before) / rise
            there = (tree.nodes == context) & (tree.sequences == word)
            expected = problem.beta * (case.weights * there).sum(-1)
            worst = largest((worst, float((slope - expected).abs().max())))
    return worst


# ------------------------------------------------------------------------------------------------ parts


def _ratios(case: Case) -> dict[str, float]:
    ones, best, h = torch.ones_like(case.weights), case.best.policy, case.heuristic.policy
    by_loss, by_plain_loss, by_objective, by_plain_objective = _steps(case)
    return {
        "moved_best": _low_over_high(case, best, case.dpo, ones),
        "moved_heuristic": _low_over_high(case, h, case.dpo, ones),
        "moved_loss_step": _low_over_high(case, by_loss, by_plain_loss, ones),
        "moved_objective_step": _low_over_high(case, by_objective, by_plain_objective, ones),
        "carried_best": _low_over_high(case, best, case.dpo, case.weights),
        "carried_heuristic": _low_over_high(case, h, case.dpo, case.weights),
    }


def _merged(groups: Sequence[Sequence[float]]) -> Ratio:
    """Returns the ratio over problems, each the geometric mean of its group; values close to 1 count on no side."""
    logs = torch.tensor([[math.log(one) for one in group] for group in groups], dtype=torch.float64).mean(-1)
    above, below = int((logs > EVEN).sum()), int((logs < -EVEN).sum())
    return Ratio(float(logs.mean().exp()), above, below, len(groups))


def _low_over_high(case: Case, policy: Policy, control: Policy, factors: Weights) -> float:
    """Returns how much more the lowest third of tokens moves than the highest third, relative to the control."""
    drawn = probabilities(case.problem.tree, case.problem.reference).unsqueeze(-1)
    size, plain = drawn * (factors * case.log_ratios(policy)).abs(), drawn * case.log_ratios(control).abs()
    low, high = (float(size[one].sum() / plain[one].sum()) for one in _thirds(case.weights))
    return low / high


def _thirds(weights: Weights) -> tuple[Bool[Tensor, "responses length"], Bool[Tensor, "responses length"]]:
    """Returns the tokens of the lowest third and of the highest third by weight."""
    edges = weights.flatten().quantile(torch.tensor([1 / THIRDS, 1 - 1 / THIRDS], dtype=weights.dtype))
    return weights <= edges[0], weights >= edges[1]


def _steps(case: Case) -> tuple[Policy, Policy, Policy, Policy]:
    """Policies one short step from the reference: by TwDPO's loss, DPO's loss, J_w and J."""
    start, shape = case.problem.reference, case.problem.reference.shape
    plain = Case(**{**vars(case), "weights": torch.ones_like(case.weights)})
    descents = [-autograd_gradient(one, start).reshape(shape) for one in (case, plain)]
    ascents = [objective_slope(case.problem, start, one.weights) for one in (case, plain)]
    first, second, third, fourth = ((start + STEP * slope).log_softmax(-1) for slope in (*descents, *ascents))
    return first, second, third, fourth


def objective_slope(problem: Problem, policy: Policy, weights: Weights) -> Float[Tensor, "contexts vocab"]:
    """Returns the gradient of J_w by the logits."""
    leaf = policy.clone().requires_grad_()
    (slope,) = torch.autograd.grad(objective(problem, leaf.log_softmax(-1), weights), leaf)
    return slope
