"""Paper's note on the weighted log-probability: what normalising it changes, and what it does not.

``prod_t pi_t^w_t`` is no distribution; divided by its sum over responses it is one, P, and the reference's is P_ref.
With ``M`` the logarithm of that sum (the note's C1 for the policy, C2 for the reference):

- margins of two responses are those of TwDPO, M cancels;
- P of h is ``P_ref exp(r / beta) / Z'``, and ``beta log(P / P_ref)`` is the reward up to a constant of the prompt;
- lemma 2 keeps its form: its log Z is ``log Z' - M_h + M_ref``, so its bound is the same one;
- ``J_w(pi) = beta (log Z' + M_ref - M_pi) - beta E_pi[ log(P_pi / P_h) ]``. The expectation is over pi,
  not over P_pi: no KL. The note's last display prints the ratio itself, without the logarithm and beta.

Ours: M_pi is a constant of the prompt but not of the policy, so an objective of P alone differs from J_w by beta M_pi.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from experiments.theory.cases import Case
from experiments.theory.extremes import largest, least
from experiments.theory.gradient import margins
from experiments.theory.paper_bounds import deviation
from experiments.theory.problem import (
    Policy,
    objective,
    probabilities,
    token_logps,
    total_variation,
    weighted_likelihood,
)


@dataclass(frozen=True)
class NoteRow:
    """Note on one set of prompts; errors are the largest, the others means.

    ``log_mass``: M of h, 0 where the weighted likelihood is a distribution as it is. ``error``: of P of h against
    ``P_ref exp(r / beta) / Z'``. ``distance``: total variation of P of h from h, the policy that is sampled from.
    ``pairs``: of the margins of normalised likelihoods. ``reward``: of beta log(P / P_ref) at h, up to its mean.
    ``lemma_2``: of log h / DPO from the normalised constants. ``display`` and ``printed``: of the objective written by
    P with the logarithm and beta, and as the note prints it (the smallest, from the best constant per prompt).
    ``intractable``: total variation of pi* from h. ``constant``: by how much M differs between pi*, h and DPO's policy.
    """

    delta: float
    log_mass: float
    error: float
    distance: float
    pairs: float
    reward: float
    lemma_2: float
    display: float
    printed: float
    intractable: float
    constant: float


def note_row(cases: Sequence[Case], delta: float) -> NoteRow:
    """Checks the note's statements on the cases."""
    found = [_note(case) for case in cases]
    columns = {name: [one[name] for one in found] for name in found[0]}
    merged = {name: _over(name, column) for name, column in columns.items()}
    return NoteRow(delta, **merged)


# ------------------------------------------------------------------------------------------------ parts


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _over(name: str, column: Sequence[float]) -> float:
    if name in ("log_mass", "distance", "intractable", "constant"):
        return _mean(column)
    return least(column) if name == "printed" else largest(column)


def _note(case: Case) -> dict[str, float]:
    problem, tree, weights, h = case.problem, case.problem.tree, case.weights, case.heuristic.policy
    logs, mass = weighted_likelihood(tree, h, weights)
    base, base_mass = weighted_likelihood(tree, problem.reference, weights)
    log_z = (base + problem.rewards / problem.beta).logsumexp(0)
    best = (base + problem.rewards / problem.beta - log_z).exp()
    read_off = problem.beta * (logs - base) - problem.rewards
    log_z_dpo = (token_logps(tree, problem.reference).sum(-1) + problem.rewards / problem.beta).logsumexp(0)
    stated = log_z_dpo - (log_z - mass + base_mass) - deviation(case, h)
    ratio = (token_logps(tree, h) - token_logps(tree, case.dpo)).sum(-1)
    objectives = [_displays(case, policy, logs, float(log_z + base_mass)) for policy in case.policies.values()]
    masses = [float(weighted_likelihood(tree, policy, weights)[1]) for policy in case.policies.values()]
    return {
        "log_mass": float(mass),
        "error": float((logs.exp() - best).abs().max()),
        "distance": float((logs.exp() - probabilities(tree, h)).abs().sum() / 2),
        "pairs": largest(_pairs_error(case, policy) for policy in case.policies.values()),
        "reward": float(read_off.max() - read_off.min()),
        "lemma_2": float((stated - ratio).abs().max()),
        "display": largest(abs(true - mended) for true, mended, _ in objectives),
        "printed": _least_error([(true, printed) for true, _, printed in objectives]),
        "intractable": total_variation(tree, case.best.policy, h),
        "constant": largest(masses) - least(masses),
    }


def _pairs_error(case: Case, policy: Policy) -> float:
    """Returns the largest error of a pair's margin computed from normalised instead of weighted likelihoods."""
    tree, problem = case.problem.tree, case.problem
    logs, _ = weighted_likelihood(tree, policy, case.weights)
    base, _ = weighted_likelihood(tree, problem.reference, case.weights)
    implicit = problem.beta * (logs - base)
    normalised = implicit.unsqueeze(-1) - implicit
    return float((normalised - margins(case, policy, case.weights)).abs().max())


def _displays(case: Case, policy: Policy, best: torch.Tensor, constant: float) -> tuple[float, float, float]:
    """Returns J_w of a policy, the note's last display with logarithm and beta, and the display as printed."""
    problem, tree = case.problem, case.problem.tree
    logs, mass = weighted_likelihood(tree, policy, case.weights)
    drawn = probabilities(tree, policy)
    head = problem.beta * (constant - float(mass))
    true = float(objective(problem, policy, case.weights))
    return true, head - problem.beta * float(drawn @ (logs - best)), head - float(drawn @ (logs - best).exp())


def _least_error(pairs: Sequence[tuple[float, float]]) -> float:
    """Returns the largest error left over the policies after adding the best constant."""
    gaps = [true - printed for true, printed in pairs]
    return (largest(gaps) - least(gaps)) / 2
