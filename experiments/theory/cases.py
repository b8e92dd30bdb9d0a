"""Case of one prompt: a problem, its token weights, the mask of its responses' own tokens, and its three policies.

A response may end early: ``own`` masks its own tokens. Tokens after the end have weight 0, no reward, and the
reference's probabilities under all three policies, so that they add nothing to any sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from experiments.theory.problem import (
    Heuristic,
    Optimum,
    Policy,
    Problem,
    Tree,
    Weights,
    backward_heuristic,
    dpo_policy,
    optimal_policy,
    probabilities,
    random_problem,
    solve_heuristic,
    token_logps,
)


class Reads(Enum):
    """Dependence of a weight: on the position alone, or on the whole response, later tokens included."""

    POSITION = "position"
    RESPONSE = "response"


def spread_weights(tree: Tree, reads: Reads, delta: float, seed: int = 0) -> Float[Tensor, "responses length"]:
    """Returns weights with mean 1 over every response and largest distance ``delta`` from 1.

    POSITION: rising over the positions for an even seed, falling for an odd one. RESPONSE: drawn independently for
    every token of every response, like those of a judge that has read the whole response.
    """
    if reads is Reads.POSITION:
        slope = torch.linspace(-1.0, 1.0, tree.length, dtype=torch.float64) * (1 - 2 * (seed % 2))
        return (1 + delta * slope).expand(tree.vocab**tree.length, -1)
    random = torch.Generator().manual_seed(1000 + seed)
    drawn = torch.randn(tree.vocab**tree.length, tree.length, generator=random, dtype=torch.float64)
    centred = drawn - drawn.mean(-1, keepdim=True)
    return 1 + delta * centred / centred.abs().max()


@dataclass(frozen=True)
class Case:
    """Problem with weights, the mask of own tokens, and its solutions: pi* (``best``), h and DPO's policy."""

    problem: Problem
    weights: Weights
    own: Bool[Tensor, "responses length"]
    best: Optimum
    heuristic: Heuristic
    dpo: Policy

    @property
    def policies(self) -> dict[str, Policy]:
        """Returns the policies that assumption A2 is about."""
        return {"pi*": self.best.policy, "DPO": self.dpo, "h": self.heuristic.policy}

    @property
    def lengths(self) -> Float[Tensor, " responses"]:
        """Returns ``|y|`` of every response."""
        return self.own.sum(-1).double()

    @property
    def epsilons(self) -> Weights:
        """Returns ``eps_t = w_t - 1`` on own tokens, 0 elsewhere."""
        return (self.weights - 1) * self.own

    @property
    def delta(self) -> float:
        """Returns A1's constant: the largest ``|eps_t|``."""
        return float(self.epsilons.abs().max())

    def log_ratios(self, policy: Policy) -> Weights:
        """Returns ``d_t`` of every own token of every response, 0 elsewhere."""
        tree = self.problem.tree
        return (token_logps(tree, policy) - token_logps(tree, self.problem.reference)) * self.own

    def largest_ratio(self, policy: Policy) -> float:
        """Returns the constant that A2 needs for this policy: the largest ``|d_t|``."""
        return float(self.log_ratios(policy).abs().max())

    def mean_length(self, policy: Policy) -> float:
        """Returns ``E_policy |y|``."""
        return float(probabilities(self.problem.tree, policy) @ self.lengths)


def solve(
    problem: Problem, weights: Weights, own: Bool[Tensor, "responses length"] | None = None, starts: int = 2
) -> Case:
    """Solves the case for its three policies; h by backward recursion if weights depend only on the position.

    pi* is optimised from ``starts`` starting points. If responses end early, only the reference is used: other starts
    would keep their own policy after the end of a response, which neither J_w nor its gradient constrains.
    """
    whole = torch.ones_like(weights, dtype=torch.bool) if own is None else own
    positional = own is None and bool((weights == weights[0]).all())
    h = backward_heuristic(problem, weights[0]) if positional else solve_heuristic(problem, weights)
    best = optimal_policy(problem, weights, starts=starts if own is None else 1)
    return Case(problem, weights, whole, best, h, dpo_policy(problem))


def cases(problems: Sequence[Problem], reads: Reads, delta: float, starts: int = 2) -> list[Case]:
    """Solves every problem for weights of one kind and size."""
    weights = [spread_weights(problem.tree, reads, delta, seed) for seed, problem in enumerate(problems)]
    return [solve(problem, one, starts=starts) for problem, one in zip(problems, weights, strict=True)]


def ending_case(delta: float, vocab: int = 3, length: int = 3, beta: float = 0.5, seed: int = 0) -> Case:
    """Returns a random case with weights by response, whose responses end with word 0 or at ``length`` tokens."""
    drawn = random_problem(vocab, length, beta, seed)
    tree = drawn.tree
    own, first = own_tokens(tree)
    weights = spread_weights(tree, Reads.RESPONSE, delta, seed)[first] * own
    counts = own.sum(-1, keepdim=True)
    centred = (weights - weights.sum(-1, keepdim=True) / counts) * own
    weights = (1 + delta * centred / centred.abs().max()) * own
    return solve(replace(drawn, rewards=drawn.rewards[first]), weights, own)


def own_tokens(tree: Tree) -> tuple[Bool[Tensor, "responses length"], Tensor]:
    """Returns the mask of tokens up to the first word 0, and the number of each response with only 0 after it."""
    ended = (tree.sequences == 0).long().cumsum(-1)
    own = (ended - (tree.sequences == 0).long()) == 0  # no 0 before this token
    powers = tree.vocab ** torch.arange(tree.length - 1, -1, -1)
    return own, (tree.sequences * own * powers).sum(-1)
