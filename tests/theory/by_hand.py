"""The paper's quantities a second time, in loops over responses as tuples of words; no code shared with theory/."""

import math
from dataclasses import dataclass
from itertools import product

from torch import Tensor

from experiments.theory.cases import Case

Response = tuple[int, ...]


@dataclass(frozen=True)
class ByHand:
    """One prompt: its responses as they end, with reward, weights and the policies' log-probabilities per token."""

    beta: float
    rewards: dict[Response, float]
    weights: dict[Response, list[float]]
    reference: dict[Response, list[float]]
    policies: dict[str, dict[Response, list[float]]]

    def chance(self, name: str, y: Response) -> float:
        return math.exp(math.fsum(self.policies[name][y]))

    def ratios(self, name: str, y: Response) -> list[float]:
        return [log - base for log, base in zip(self.policies[name][y], self.reference[y], strict=True)]

    def mean(self, name: str, values: dict[Response, float]) -> float:
        return math.fsum(self.chance(name, y) * value for y, value in values.items())

    def length(self, name: str) -> float:
        return self.mean(name, {y: float(len(y)) for y in self.rewards})

    def objective(self, name: str, weighted: bool = True) -> float:
        gains = {}
        for y, reward in self.rewards.items():
            factors = self.weights[y] if weighted else [1.0] * len(y)
            penalty = math.fsum(w * d for w, d in zip(factors, self.ratios(name, y), strict=True))
            gains[y] = reward - self.beta * penalty
        return self.mean(name, gains)

    def implicit(self, name: str, y: Response) -> float:
        return self.beta * math.fsum(w * d for w, d in zip(self.weights[y], self.ratios(name, y), strict=True))

    def deviation(self, name: str, y: Response) -> float:
        return math.fsum((w - 1) * d for w, d in zip(self.weights[y], self.ratios(name, y), strict=True))

    def kl(self, first: str, second: str) -> float:
        logs = {y: math.log(self.chance(first, y)) - math.log(self.chance(second, y)) for y in self.rewards}
        return self.mean(first, logs)

    def tv(self, first: str, second: str) -> float:
        return math.fsum(abs(self.chance(first, y) - self.chance(second, y)) for y in self.rewards) / 2

    def delta(self) -> float:
        return max(abs(w - 1) for one in self.weights.values() for w in one)

    def largest(self, name: str) -> float:
        return max(abs(d) for y in self.rewards for d in self.ratios(name, y))

    def log_likelihood(self, name: str, y: Response) -> float:
        """``log P~``: the weighted log-probability."""
        logs = self.reference[y] if name == "reference" else self.policies[name][y]
        return math.fsum(w * log for w, log in zip(self.weights[y], logs, strict=True))

    def mass(self, name: str) -> float:
        """The logarithm of P~'s sum over the responses."""
        return math.log(math.fsum(math.exp(self.log_likelihood(name, y)) for y in self.rewards))


def by_hand(case: Case, ends: bool = False, **more: Tensor) -> ByHand:
    """The case's numbers in plain lists; where ``ends``, word 0 ends a response; ``more`` policies by name."""
    tree, problem = case.problem.tree, case.problem
    policies: dict[str, dict[Response, list[float]]] = {name: {} for name in (*case.policies, *more)}
    rewards, weights, reference = {}, {}, {}
    for number, words in enumerate(product(range(tree.vocab), repeat=tree.length)):
        y = words[: words.index(0) + 1] if ends and 0 in words else words
        rewards[y] = float(problem.rewards[number])
        weights[y] = case.weights[number].tolist()[: len(y)]
        reference[y] = _logs(problem.reference, y, tree.vocab)
        for name, policy in (*case.policies.items(), *more.items()):
            policies[name][y] = _logs(policy, y, tree.vocab)
    return ByHand(problem.beta, rewards, weights, reference, policies)


def _logs(policy: Tensor, y: Response, vocab: int) -> list[float]:
    """Log-probabilities of a response's words: contexts are numbered by length, then as numbers of base ``vocab``."""
    out = []
    for place, word in enumerate(y):
        before = sum(vocab**shorter for shorter in range(place))
        number = sum(one * vocab ** (place - 1 - i) for i, one in enumerate(y[:place]))
        out.append(float(policy[before + number, word]))
    return out
