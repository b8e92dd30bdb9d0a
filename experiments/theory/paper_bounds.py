"""Statements of the paper on J_w's optimum, the heuristic policy and DPO's: perturbation, both lemmas, the theorem.

With ``eps_t = w_t - 1``, ``d_t`` the log-ratio to the reference, and ``R(pi; y) = sum_t eps_t d_t``, for one prompt and
then as a mean over prompts:

- *A1, A2.* ``|eps_t| <= delta`` for all tokens; ``|d_t| <= C`` for pi*, h and DPO's policy D at once.
- *Perturbation.* ``J_w(pi) = J(pi) - beta E_pi[R]``, so ``|J_w(pi) - J(pi)| <= beta delta C E_pi|y|``.
- *Lemma 1.* ``J(D) - J(pi) = beta KL(pi, D)``, so ``KL(pi*, D) <= delta C (E_D|y| + E_pi*|y|)``.
- *Lemma 2.* ``log h/D = log Z_D - log Z - R(h; y)``, so ``KL(h, D) + KL(D, h) = E_D[R(h)] - E_h[R(h)]`` and
  ``KL(h, D) <= delta C (E_D|y| + E_h|y|)``.
- *Theorem.* ``TV(pi*, h) <= sqrt(delta C / 2) (sqrt(E_D|y| + E_pi*|y|) + sqrt(E_D|y| + E_h|y|))``.

The constants are those that the computed policies need: the smallest with which A1 and A2 hold.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from experiments.theory.cases import Case
from experiments.theory.extremes import largest
from experiments.theory.problem import Policy, kl, objective, probabilities, token_logps, total_variation

NOTHING = 1e-12  # nats or total variation that rounding leaves of 0
TRIVIAL = 1.0  # a total variation is never above it, so that a bound from here on says nothing


@dataclass(frozen=True)
class Bounded:
    """Quantity and its bound, as means over prompts under shared constants, and the largest ratio on one prompt.

    ``share``: actual value over bound with the prompt's own, smaller constants; the statement holds if it is at most 1.
    """

    actual: float
    bound: float
    share: float

    @property
    def looseness(self) -> float:
        """Returns the bound divided by the actual value."""
        return self.bound / self.actual if self.actual > 0 else math.inf


@dataclass(frozen=True)
class PaperRow:
    """Sections 3 to 7 for one set of prompts: ``kind`` names the weights, the errors are the largest of an identity.

    ``near_optimum``: of h's equation ``sum_t w_t d_t = r / beta - log Z`` and of h's probabilities as a sum of 1.
    ``constants``: C that each policy needs, over all prompts. ``perturbation``: of ``J_w = J - beta E[R]``;
    ``departure``: |J_w - J| of the three policies and of random ones. ``regret``: of ``J(D) - J(pi) = beta KL(pi, D)``.
    ``ratio``: of log h/D as a constant minus R. ``jeffreys``: of the sum of both KLs.
    """

    kind: str
    delta: float
    near_optimum: float
    constants: dict[str, float]
    perturbation: float
    departure: Bounded
    regret: float
    lemma_1: Bounded
    ratio: float
    jeffreys: float
    lemma_2: Bounded
    theorem: Bounded

    @property
    def constant(self) -> float:
        """Returns C of A2: the largest constant that any of the three policies needs."""
        return largest(self.constants.values())


def deviation(case: Case, policy: Policy) -> Float[Tensor, " responses"]:
    """Returns ``R(policy; y)``: the contribution of the weights to the log-ratio of every response."""
    return (case.epsilons * case.log_ratios(policy)).sum(-1)


def plain_objective(case: Case, policy: Policy) -> float:
    """Returns ``J(policy)``: the RL objective of DPO, weights of 1."""
    return float(objective(case.problem, policy, case.own.double()))


def lemma_bound(delta: float, constant: float, lengths: float) -> float:
    """Returns the bound of lemmas 1 and 2, in nats; ``lengths``: the sum of the two mean lengths."""
    return delta * constant * lengths


def theorem_bound(delta: float, constant: float, optimum_lengths: float, heuristic_lengths: float) -> float:
    """Returns the theorem's bound on TV(pi*, h), from the sums of mean lengths of lemma 1 and lemma 2."""
    return math.sqrt(delta * constant / 2) * (math.sqrt(optimum_lengths) + math.sqrt(heuristic_lengths))


def paper_row(cases: Sequence[Case], kind: str) -> PaperRow:
    """Checks the paper's statements on the cases, one per prompt."""
    needed = [{name: case.largest_ratio(policy) for name, policy in case.policies.items()} for case in cases]
    constants = {name: largest(one[name] for one in needed) for name in needed[0]}
    delta, constant = largest(case.delta for case in cases), largest(constants.values())
    own = [(case.delta, largest(one.values())) for case, one in zip(cases, needed, strict=True)]
    best, lengths_1 = [kl(case.problem.tree, case.best.policy, case.dpo) for case in cases], []
    heuristic, lengths_2 = [kl(case.problem.tree, case.heuristic.policy, case.dpo) for case in cases], []
    for case in cases:
        plain = case.mean_length(case.dpo)
        lengths_1.append(plain + case.mean_length(case.best.policy))
        lengths_2.append(plain + case.mean_length(case.heuristic.policy))
    apart = [total_variation(case.problem.tree, case.best.policy, case.heuristic.policy) for case in cases]
    over_1 = [lemma_bound(*limits, length) for limits, length in zip(own, lengths_1, strict=True)]
    over_2 = [lemma_bound(*limits, length) for limits, length in zip(own, lengths_2, strict=True)]
    over = [theorem_bound(*limits, *both) for limits, *both in zip(own, lengths_1, lengths_2, strict=True)]
    mean_1, mean_2 = _mean(lengths_1), _mean(lengths_2)
    return PaperRow(
        kind=kind,
        delta=delta,
        near_optimum=largest(_near_optimum_error(case) for case in cases),
        constants=constants,
        perturbation=largest(_perturbation_error(case, policy) for case in cases for policy in tried(case)),
        departure=_departure(cases, delta, constant),
        regret=largest(_regret_error(case, policy) for case in cases for policy in tried(case)),
        lemma_1=_bounded([float(one) for one in best], over_1, lemma_bound(delta, constant, mean_1)),
        ratio=largest(_ratio_error(case) for case in cases),
        jeffreys=largest(_jeffreys_error(case) for case in cases),
        lemma_2=_bounded([float(one) for one in heuristic], over_2, lemma_bound(delta, constant, mean_2)),
        theorem=_bounded(apart, over, theorem_bound(delta, constant, mean_1, mean_2)),
    )


def tried(case: Case) -> list[Policy]:
    """Returns the three policies and three random ones near and far, equal to the reference after a response's end."""
    random = torch.Generator().manual_seed(3)
    noise = [scale * torch.randn(case.dpo.shape, generator=random, dtype=case.dpo.dtype) for scale in (0.1, 0.5, 2.0)]
    live = torch.zeros(len(case.dpo), dtype=torch.bool)
    live[case.problem.tree.nodes[case.own]] = True
    moved = [(case.dpo + one * live.unsqueeze(-1)).log_softmax(-1) for one in noise]
    return [*case.policies.values(), *moved]


# ------------------------------------------------------------------------------------------------ parts


def _bounded(actual: Sequence[float], own_bounds: Sequence[float], bound: float) -> Bounded:
    shares = [_share(one, limit) for one, limit in zip(actual, own_bounds, strict=True)]
    return Bounded(_mean(actual), bound, largest(shares))


def _share(actual: float, bound: float) -> float:
    """Returns the actual value divided by its bound.

    If the bound is 0 (weights of 1), returns 0 for a value of 0 and infinity otherwise.
    """
    if bound == 0:
        return math.inf if actual > NOTHING else 0.0
    return actual / bound


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _near_optimum_error(case: Case) -> float:
    problem, h = case.problem, case.heuristic
    implicit = (case.weights * case.log_ratios(h.policy)).sum(-1)
    missed = implicit - problem.rewards / problem.beta + h.constant
    return largest((float(missed.abs().max()), float((h.policy.exp().sum(-1) - 1).abs().max())))


def _perturbation_error(case: Case, policy: Policy) -> float:
    drawn = probabilities(case.problem.tree, policy)
    expected = plain_objective(case, policy) - case.problem.beta * float(drawn @ deviation(case, policy))
    return abs(float(objective(case.problem, policy, case.weights)) - expected)


def _departure(cases: Sequence[Case], delta: float, constant: float) -> Bounded:
    """Returns |J_w - J| of the three policies under the shared C, and of every policy tried under its own C."""
    moved, limits, shares = [], [], []
    for case in cases:
        beta, held = case.problem.beta, list(case.policies.values())
        for place, policy in enumerate(tried(case)):
            actual = abs(float(objective(case.problem, policy, case.weights)) - plain_objective(case, policy))
            length = case.mean_length(policy)
            shares.append(_share(actual, beta * lemma_bound(case.delta, case.largest_ratio(policy), length)))
            if place < len(held):
                moved.append(actual)
                limits.append(beta * lemma_bound(delta, constant, length))
    return Bounded(_mean(moved), _mean(limits), largest(shares))


def _regret_error(case: Case, policy: Policy) -> float:
    lost = plain_objective(case, case.dpo) - plain_objective(case, policy)
    return abs(lost - case.problem.beta * float(kl(case.problem.tree, policy, case.dpo)))


def _ratio_error(case: Case) -> float:
    tree, problem, h = case.problem.tree, case.problem, case.heuristic
    log_z_dpo = float((token_logps(tree, problem.reference).sum(-1) + problem.rewards / problem.beta).logsumexp(0))
    stated = log_z_dpo - h.constant - deviation(case, h.policy)
    found = (token_logps(tree, h.policy) - token_logps(tree, case.dpo)).sum(-1)
    return float((stated - found).abs().max())


def _jeffreys_error(case: Case) -> float:
    tree, h = case.problem.tree, case.heuristic.policy
    both = float(kl(tree, h, case.dpo) + kl(tree, case.dpo, h))
    extra = deviation(case, h)
    return abs(both - float((probabilities(tree, case.dpo) - probabilities(tree, h)) @ extra))
