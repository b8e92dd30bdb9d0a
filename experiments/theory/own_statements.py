"""Our own statements on the three policies, sharper than the paper's or beside them, and what they are checked on.

The paper's are in ``paper_bounds``, ``gradient``, ``normalized_likelihood`` and ``properties``; definitions, and the
proofs about h, in ``problem``. h is the heuristic policy of the weights, pi* the optimum of J_w, D DPO's policy, T the
length; delta is the largest ``|w_t(y) - 1|``.

- *Our lemma 1.* ``J_w(pi) = J_w(h) - beta KL_w(pi, h)`` for every pi. Put ``r = beta sum_t w_t log(h_t / ref_t) +
  beta c`` into J_w; at pi = h the KL is 0. So pi* is where KL_w(., h) is least, and h is optimal when KL_w is never
  below 0.
- *Our lemma 2.* For weights of the position alone (or of y_<t), ``(1 - delta) KL <= KL_w <= (1 + delta) KL``, because
  KL_w is the sum of w_t KL_t. For weights that read y_t or later tokens that fails: the log-ratios of a response have
  both signs, and next to ``pi = h`` the KL is of second order, what the weights add of first; KL_w can be negative.
  What holds is ``|KL_w - KL| <= delta E sum_t |log(p_t / q_t)| <= delta (KL + sqrt(2 T KL))``: the mean of |log p/q| is
  at most KL + 2 TV, and Pinsker and Jensen over the positions give the root.
- *Our theorem.* (a) ``TV(pi*, h) <= sqrt(T) delta / (1 - delta)``: by our lemma 1 KL_w(pi*, h) <= 0, by our lemma 2
  then ``KL (1 - delta) <= delta sqrt(2 T KL)``, and Pinsker. Above 1, so empty, from delta = 1 / (1 + sqrt(T)) on. It
  needs no constant C and is of the order of delta; the paper's theorem is of the order of its root.
  (b) ``TV(h, D) <= (delta / 2) max_y sum_t |log(h_t / ref_t)|``: log h/D is ``g = sum_t (1 - w_t) log(h_t / ref_t)`` up
  to a constant, so KL(h, D) + KL(D, h) is at most TV (max g - min g), and at least 4 TV^2 by Pinsker.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from experiments.theory.cases import Case, Reads, spread_weights
from experiments.theory.extremes import largest, least
from experiments.theory.gradient_descent import descend
from experiments.theory.problem import (
    Problem,
    backward_heuristic,
    dpo_policy,
    kl,
    objective,
    position_kl,
    reward_deviation,
    reward_error,
    solve_heuristic,
    token_logps,
    total_variation,
    weighted_kl,
)

MARKS = (1, 2, 3, 5, 8, 13, 20, 32, 50, 80, 130, 200, 320, 500, 800, 1300)
ROUNDING = 1e-9  # what a ratio may exceed a bound by and still count as inside


@dataclass(frozen=True)
class PolicyRow:
    """Findings for one kind of weights and one delta: means over the problems, or the largest where it says so.

    Largest: ``residual`` of the equations of h, ``gradient`` left at pi*, ``spread`` of J_w over the starts,
    ``error_h`` of a reward difference recovered at h, ``used_a`` and ``used_b``, the shares of the bounds that are
    taken up (a bound holds where this is at most 1). Means: ``error_best`` of reward differences recovered at pi* (root
    mean square over pairs that pi* draws), ``gain`` J_w(pi*) - J_w(h), both total variations with their bounds.
    """

    reads: Reads
    delta: float
    residual: float
    gradient: float
    spread: float
    error_h: float
    error_best: float
    gain: float
    tv_best_h: float
    bound_a: float
    used_a: float
    tv_h_dpo: float
    bound_b: float
    used_b: float


@dataclass(frozen=True)
class LemmaRow:
    """Both lemmas over random pairs of policies: ``identity`` is lemma 1's largest error.

    ``lowest`` and ``highest``: of KL_w / KL. ``outside``: share of the pairs outside [1 - delta, 1 + delta].
    ``negative``: share with KL_w < 0. ``used``: the largest |KL_w - KL| over lemma 2's bound for any weights.
    """

    reads: Reads
    delta: float
    pairs: int
    identity: float
    lowest: float
    highest: float
    outside: float
    negative: float
    used: float


@dataclass(frozen=True)
class ExistenceRow:
    """Residual of h over problems for one pattern of weights, and the distance of solutions from two starts."""

    weights: str
    lowest: float
    highest: float
    starts: float


@dataclass(frozen=True)
class FreedomPath:
    """KL per token over that of DPO at the same position and step, for positions of low, middle and high weight.

    Geometric means over problems and both orders of the weights, by gradient steps; ``limit``: at the optimum.
    """

    weights: tuple[float, ...]
    steps: tuple[int, ...]
    ratios: Float[Tensor, "steps length"]
    limit: Float[Tensor, " length"]


def policy_row(solved: Sequence[Case], reads: Reads, delta: float) -> PolicyRow:
    """Checks h, pi* and D of every case: their distances, and our theorem's bounds."""
    found = [_policies(case, delta) for case in solved]
    columns = {name: [one[name] for one in found] for name in found[0]}
    over = {
        name: largest(column) if name in _LARGEST else sum(column) / len(column) for name, column in columns.items()
    }
    return PolicyRow(reads, delta, **over)


_LARGEST = {"residual", "gradient", "spread", "error_h", "used_a", "used_b"}  # the others are means over the problems


def _policies(case: Case, delta: float) -> dict[str, float]:
    problem, weights, h, best = case.problem, case.weights, case.heuristic, case.best
    tree = problem.tree
    moved = (token_logps(tree, h.policy) - token_logps(tree, problem.reference)).abs().sum(-1)
    bound_a, bound_b = math.sqrt(tree.length) * delta / (1 - delta), delta / 2 * float(moved.max())
    tv_best_h = total_variation(tree, best.policy, h.policy)
    tv_h_dpo = total_variation(tree, h.policy, case.dpo)
    return {
        "residual": h.residual,
        "gradient": best.gradient,
        "spread": best.spread,
        "error_h": reward_error(problem, h.policy, weights),
        "error_best": reward_deviation(problem, best.policy, weights),
        "gain": best.value - float(objective(problem, h.policy, weights)),
        "tv_best_h": tv_best_h,
        "bound_a": bound_a,
        "used_a": tv_best_h / bound_a,
        "tv_h_dpo": tv_h_dpo,
        "bound_b": bound_b,
        "used_b": tv_h_dpo / bound_b,
    }


def lemma_row(problems: Sequence[Problem], reads: Reads, delta: float, draws: int = 10) -> LemmaRow:
    """Checks both lemmas on ``draws`` policies near h, and as many at two larger distances, for every problem."""
    identity, ratios, used = [], [], []
    for seed, problem in enumerate(problems):
        tree, random = problem.tree, torch.Generator().manual_seed(seed)
        weights = spread_weights(tree, reads, delta, seed)
        h = solve_heuristic(problem, weights).policy
        best = objective(problem, h, weights)
        for scale in (0.1, 0.5, 2.0):
            for _ in range(draws):
                noise = torch.randn(h.shape, generator=random, dtype=h.dtype)
                near = (h + scale * noise).log_softmax(-1)
                plain, weighted = kl(tree, near, h), weighted_kl(tree, near, h, weights)
                identity.append(abs(float(best - objective(problem, near, weights) - problem.beta * weighted)))
                ratios.append(float(weighted / plain))
                room = delta * (plain + (2 * tree.length * plain).sqrt())
                used.append(float((weighted - plain).abs() / room))
    outside = [abs(ratio - 1) > delta + ROUNDING for ratio in ratios]
    negative = [ratio < 0 for ratio in ratios]
    count = len(ratios)
    shares = (sum(outside) / count, sum(negative) / count)
    return LemmaRow(reads, delta, count, largest(identity), least(ratios), largest(ratios), *shares, largest(used))


def existence_rows(problems: Sequence[Problem]) -> tuple[ExistenceRow, ...]:
    """Checks whether h exists for weights above 0 and for patterns with zeros, one of them on mild rewards."""
    tree = problems[0].tree
    last = torch.ones(tree.length, dtype=torch.float64).index_fill(0, torch.tensor([tree.length - 1]), 0.0)
    ends = last.expand(tree.vocab**tree.length, -1)
    word = (tree.sequences != 0).double()
    mild = [
        Problem(
            one.tree,
            one.reference,
            one.rewards.reshape(-1, tree.vocab).mean(-1).repeat_interleave(tree.vocab),
            one.beta,
        )
        for one in problems
    ]
    drawn = [spread_weights(tree, Reads.RESPONSE, 0.95, seed) for seed in range(len(problems))]
    return (
        _existence("all above 0 (delta 0.95)", problems, drawn),
        _existence("0 on the last token", problems, [ends] * len(problems)),
        _existence("0 on the last token, rewards blind to it", mild, [ends] * len(problems)),
        _existence("0 on one word wherever it stands", problems, [word] * len(problems)),
    )


def _existence(name: str, problems: Sequence[Problem], weights: Sequence[Tensor]) -> ExistenceRow:
    residuals, apart = [], []
    for problem, one in zip(problems, weights, strict=True):
        first, second = (solve_heuristic(problem, one, start) for start in (None, problem.reference))
        residuals.append(least((first.residual, second.residual)))
        apart.append(total_variation(problem.tree, first.policy, second.policy))
    return ExistenceRow(name, least(residuals), largest(residuals), largest(apart))


def freedom_path(problems: Sequence[Problem], delta: float = 0.6, marks: Sequence[int] = MARKS) -> FreedomPath:
    """Returns how far tokens of each weight move relative to DPO, in gradient descent on TwDPO's loss and at the end.

    Uses position weights, rising and falling, so that every position except the middle one has been low and high.
    """
    tree = problems[0].tree
    twice = [problem for problem in problems for _ in range(2)]
    weights = torch.stack([spread_weights(tree, Reads.POSITION, delta, turn % 2) for turn in range(len(twice))])
    ratios = descend(twice, weights, marks) / descend(twice, torch.ones_like(weights), marks)
    ends = torch.stack(
        [
            position_kl(tree, backward_heuristic(one, row[0]).policy, one.reference)
            / position_kl(tree, dpo_policy(one), one.reference)
            for one, row in zip(twice, weights, strict=True)
        ]
    )
    order = weights[:, 0].argsort(-1)
    along = ratios.log().gather(-1, order.expand(len(marks), -1, -1)).mean(1).exp()
    levels = tuple(weights[0, 0].sort().values.tolist())
    return FreedomPath(levels, tuple(marks), along, ends.log().gather(-1, order).mean(0).exp())
