"""Token-weighted RL on policies small enough to enumerate: its optimum, the policy TwDPO aims at, and DPO's.

The paper grounds TwDPO on token-weighted RL: J_w and h are its definitions (h is its heuristic policy, the
near-optimum); what is shown of h here, and the proofs, are ours. With
``d_t = log pi(y_t | y_<t) - log ref(y_t | y_<t)`` and ``w_t(y) = |y| a_t(y)``::

    J_w(pi)   = E_{y ~ pi} [ r(y) - beta sum_t w_t(y) d_t ]                                      the RL objective
    KL_w(p,q) = E_{y ~ p} [ sum_t w_t(y) (log p(y_t | y_<t) - log q(y_t | y_<t)) ]       its penalty is KL_w(pi, ref)
    sum_t w_t(y) log (h(y_t | y_<t) / ref(y_t | y_<t)) = r(y) / beta - c  for all y            the heuristic policy h

TwDPO's margin is right on every pair of responses exactly when the policy is h: h is where its loss leads under
Bradley-Terry preferences, just as DPO's policy ``ref exp(r / beta) / Z`` (h for w = 1) is where DPO's leads.
What we can show of h (V words, T tokens):

- *Weights of the position alone* (or of y_<t): ``U_T = r / beta``, ``U_{t-1} = w_t log E_ref[exp(U_t / w_t)]``, and
  ``log h / ref = (U_t - U_{t-1}) / w_t`` solves the equations from the last token back. Maximising J_w from the last
  token back gives the same recursion, because E[w_t d_t | y_<t] is w_t KL_t: h is the optimum.
- *Any weights above 0*: h exists and is unique, though nothing closed gives it. Write X_p for the log-ratio of prefix
  p's last token. At a prefix of T - 1 tokens, ``sum_v ref(v) exp((r/beta - c - sum_{s<T} w_s X_s) / w_T) = 1`` has a
  left side that falls strictly from infinity to 0 in c and in every X_s; so it gives X_{T-1} as a function that falls
  strictly, and without bound, in c and the earlier X_s. Put these into ``sum_b ref(b) exp(X_b) = 1`` one token earlier:
  the same shape. At the root one equation in c alone is left, with one solution.
- *With zero weights* h need not exist: two responses that have the same weights up to where they part, and weight 0
  from there on, get the same implicit reward from every policy, whatever their rewards.
- *Weights that read y_t or later tokens*: h is not the optimum. At the optimum, for every context with
  ``A = E[r - beta sum_s w_s d_s | y_<=t]``, ``A - beta E[w_t | y_<=t]`` is equal for all y_t; at h, A is equal.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnpo.schema import UserError

LARGEST = 4096  # responses that are enumerated at most
GRADIENT = 1e-12  # a gradient that counts as 0
REACH, TINY = 4.0, 1e-12  # how far one Newton step may move a logit; a step that counts as none
Policy = Float[Tensor, "contexts vocab"]  # log-probabilities of the next token after every prefix
Weights = Float[Tensor, "responses length"]


@dataclass(frozen=True)
class Tree:
    """All ``vocab ** length`` responses of ``length`` tokens, and all contexts (prefixes shorter than ``length``)."""

    vocab: int
    length: int

    def __post_init__(self) -> None:
        if self.vocab < 2 or self.length < 1 or self.vocab**self.length > LARGEST:
            raise UserError(
                f"theory: expected vocab >= 2, length >= 1 and vocab ** length <= {LARGEST}, got vocab {self.vocab} "
                f"and length {self.length}; every response is enumerated"
            )

    @cached_property
    def sequences(self) -> Int[Tensor, "responses length"]:
        """Returns the tokens of every response, in order of the number they spell."""
        return torch.stack([self._number // self.vocab**left % self.vocab for left in self._left], dim=1)

    @cached_property
    def nodes(self) -> Int[Tensor, "responses length"]:
        """Returns the context in which each token of each response is chosen, contexts counted from the empty one."""
        return torch.stack(
            [self._first(t) + self._number // self.vocab ** (left + 1) for t, left in enumerate(self._left)], dim=1
        )

    @cached_property
    def words(self) -> Int[Tensor, "responses length vocab"]:
        """Returns the tokens of every response as ones among zeros."""
        return torch.nn.functional.one_hot(self.sequences, self.vocab)

    @property
    def contexts(self) -> int:
        """Returns the number of prefixes shorter than ``length``."""
        return self._first(self.length)

    def level(self, table: Policy, position: int) -> Float[Tensor, "prefixes vocab"]:
        """Returns the rows of ``table`` for contexts of ``position`` tokens."""
        return table[self._first(position) : self._first(position + 1)]

    @cached_property
    def _number(self) -> Int[Tensor, " responses"]:
        return torch.arange(self.vocab**self.length)

    @property
    def _left(self) -> range:
        return range(self.length - 1, -1, -1)

    def _first(self, position: int) -> int:
        return sum(self.vocab**before for before in range(position))


@dataclass(frozen=True)
class Problem:
    """Reference policy, a reward per response and beta: all that token-weighted RL needs besides weights."""

    tree: Tree
    reference: Policy
    rewards: Float[Tensor, " responses"]
    beta: float


def random_problem(vocab: int = 3, length: int = 3, beta: float = 0.5, seed: int = 0) -> Problem:
    """Makes a random problem with standard normal logits and rewards, in float64."""
    tree = Tree(vocab, length)
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(tree.contexts, vocab, generator=random, dtype=torch.float64)
    rewards = torch.randn(vocab**length, generator=random, dtype=torch.float64)
    return Problem(tree, logits.log_softmax(-1), rewards, beta)


# ------------------------------------------------------------------------------------------------ what policies give


def token_logps(tree: Tree, policy: Policy) -> Float[Tensor, "responses length"]:
    """Returns the log-probability of every token of every response."""
    return policy[tree.nodes, tree.sequences]


def probabilities(tree: Tree, policy: Policy) -> Float[Tensor, " responses"]:
    """Returns the probability of every response."""
    return token_logps(tree, policy).sum(-1).exp()


def weighted_kl(tree: Tree, first: Policy, second: Policy, weights: Weights) -> Float[Tensor, ""]:
    """Returns ``KL_w(first, second)``; with weights of 1 the KL divergence of the responses."""
    ratios = token_logps(tree, first) - token_logps(tree, second)
    return probabilities(tree, first) @ (weights * ratios).sum(-1)


def kl(tree: Tree, first: Policy, second: Policy) -> Float[Tensor, ""]:
    """Returns ``KL(first || second)`` of the responses, in nats."""
    return probabilities(tree, first) @ (token_logps(tree, first) - token_logps(tree, second)).sum(-1)


def position_kl(tree: Tree, first: Policy, second: Policy) -> Float[Tensor, " length"]:
    """Returns the expected KL of the next token at each position, prefixes drawn from ``first``; the sum is ``kl``."""
    per_context = (first.exp() * (first - second)).sum(-1)
    return probabilities(tree, first) @ per_context[tree.nodes]


def total_variation(tree: Tree, first: Policy, second: Policy) -> float:
    """Returns half the L1 distance between the distributions of responses."""
    return float((probabilities(tree, first) - probabilities(tree, second)).abs().sum() / 2)


def objective(problem: Problem, policy: Policy, weights: Weights) -> Float[Tensor, ""]:
    """Returns ``J_w(policy)``."""
    tree = problem.tree
    penalty = problem.beta * weighted_kl(tree, policy, problem.reference, weights)
    return probabilities(tree, policy) @ problem.rewards - penalty


def weighted_ratios(problem: Problem, policy: Policy, weights: Weights) -> Float[Tensor, " responses"]:
    """Returns ``sum_t w_t d_t`` of every response: TwDPO's implicit reward over beta."""
    ratios = token_logps(problem.tree, policy) - token_logps(problem.tree, problem.reference)
    return (weights * ratios).sum(-1)


def reward_error(problem: Problem, policy: Policy, weights: Weights) -> float:
    """Returns the largest error, over all pairs, of implicit reward differences; 0 only at h."""
    gap = problem.beta * weighted_ratios(problem, policy, weights) - problem.rewards
    return float(gap.max() - gap.min())


def reward_deviation(problem: Problem, policy: Policy, weights: Weights) -> float:
    """Returns the root mean square error of implicit reward differences over pairs that the policy itself draws."""
    gap = problem.beta * weighted_ratios(problem, policy, weights) - problem.rewards
    drawn = probabilities(problem.tree, policy)
    return float((2 * (drawn @ (gap - drawn @ gap).square())).sqrt())


def weighted_likelihood(
    tree: Tree, policy: Policy, weights: Weights
) -> tuple[Float[Tensor, " responses"], Float[Tensor, ""]]:
    """Returns the normalised weighted likelihood ``prod_t pi_t^w_t / Z`` in logs, and ``log Z`` (0 for weights of 1).

    The paper's note: ``prod_t pi_t^w_t`` is no distribution over responses. Z depends on the policy but not on
    the response, so that it cancels in the margin of two answers to one prompt: TwDPO is DPO on the normalised
    likelihoods P and P_ref, exactly. The optimum of ``E_P[r] - beta KL(P || P_ref)`` over all P is
    ``P_ref exp(r / beta) / Z'``, and it is the normalised weighted likelihood of h. But P is not what the policy
    samples from, so this optimum is not that of J_w.
    """
    raw = (weights * token_logps(tree, policy)).sum(-1)
    mass = raw.logsumexp(0)
    return raw - mass, mass


# ------------------------------------------------------------------------------------------------ three policies


@dataclass(frozen=True)
class Heuristic:
    """Heuristic policy with its constant ``c`` and ``residual``, the largest error of its equations over y.

    A residual far from 0 means that none was found; the policy is then the least-squares solution.
    """

    policy: Policy
    constant: float
    residual: float


def dpo_policy(problem: Problem) -> Policy:
    """Returns ``ref exp(r / beta) / Z`` as a policy over tokens: the heuristic policy of weights 1."""
    return backward_heuristic(problem, torch.ones(problem.tree.length, dtype=torch.float64)).policy


def backward_heuristic(problem: Problem, position_weights: Float[Tensor, " length"]) -> Heuristic:
    """Computes the exact heuristic policy for weights that depend only on the position, by backward recursion.

    Raises:
        UserError: a weight is not above 0; the equations then have no solution in general.
    """
    if not bool((position_weights > 0).all()):
        raise UserError(f"theory: expected position weights above 0, got {position_weights.tolist()}")
    tree, rows = problem.tree, []
    value = problem.rewards / problem.beta
    for position in range(tree.length - 1, -1, -1):
        weight, base = position_weights[position], tree.level(problem.reference, position)
        after = value.reshape(-1, tree.vocab)
        value = weight * (base + after / weight).logsumexp(-1)
        rows.append(base + (after - value.unsqueeze(-1)) / weight)
    policy = torch.cat(rows[::-1])
    weights = position_weights.expand(len(problem.rewards), -1)
    constant = float(value)
    return Heuristic(policy, constant, float(_equations(problem, policy, constant, weights).abs().max()))


def solve_heuristic(
    problem: Problem, weights: Weights, start: Policy | None = None, steps: int = 200, tolerance: float = 1e-12
) -> Heuristic:
    """Computes the heuristic policy of any weights by damped Gauss-Newton from ``start`` (default: DPO's policy).

    If none exists, ``Heuristic.residual`` stays away from 0.
    """
    theta = dpo_policy(problem) if start is None else start
    constant = torch.zeros((), dtype=torch.float64)
    error, damping = _equations(problem, theta, constant, weights), 1e-3
    for _ in range(steps):
        if float(error.abs().max()) < tolerance or damping > 1e12:
            break
        scores = weighted_scores(problem.tree, theta, weights)
        slope = torch.cat([scores, torch.ones(len(scores), 1, dtype=scores.dtype)], dim=1)  # by the logits and by c
        normal = slope.T @ slope + damping * torch.eye(slope.shape[1], dtype=slope.dtype)
        step = torch.linalg.solve(normal, -slope.T @ error)
        trial = (theta + step[:-1].reshape(theta.shape)).log_softmax(-1)
        found = _equations(problem, trial, constant + step[-1], weights)
        if float(found.square().sum()) < float(error.square().sum()):
            theta, constant, error, damping = trial, constant + step[-1], found, max(damping / 10, 1e-15)
        else:
            damping *= 10
    return Heuristic(theta, float(constant), float(error.abs().max()))


def _equations(
    problem: Problem, policy: Policy, constant: float | Tensor, weights: Weights
) -> Float[Tensor, " responses"]:
    """Returns ``sum_t w_t d_t - r / beta + c`` of every response."""
    return weighted_ratios(problem, policy, weights) - problem.rewards / problem.beta + constant


def weighted_scores(tree: Tree, policy: Policy, weights: Weights) -> Float[Tensor, "responses logits"]:
    """Derivatives of ``sum_t w_t log pi_t`` of every response by the logits of every context."""
    count = len(tree.sequences)
    slope = torch.zeros(count, tree.contexts, tree.vocab, dtype=torch.float64)
    scores = tree.words - policy.exp()[tree.nodes]
    slope[torch.arange(count).unsqueeze(-1), tree.nodes] = weights.unsqueeze(-1) * scores
    return slope.flatten(1)


@dataclass(frozen=True)
class Optimum:
    """Best policy found for J_w, its value, the largest gradient left (by logits) and the spread over starts.

    ``spread``: the best value minus the worst over the starts. J_w of weights that read later tokens need not be
    concave, and a spread far from 0 means that some start ended elsewhere.
    """

    policy: Policy
    value: float
    gradient: float
    spread: float


def optimal_policy(problem: Problem, weights: Weights, starts: int = 2, steps: int = 200) -> Optimum:
    """Maximises J_w by Newton's method on the logits, from the reference and from random policies."""
    ends = [_climb(problem, weights, start, steps) for start in _starts(problem, starts)]
    values = [value for _, value, _ in ends]
    policy, value, gradient = ends[max(range(len(ends)), key=values.__getitem__)]
    return Optimum(policy, value, gradient, value - min(values))


def _starts(problem: Problem, count: int) -> list[Policy]:
    random = torch.Generator().manual_seed(1)
    noise = [
        torch.randn(problem.reference.shape, generator=random, dtype=torch.float64).log_softmax(-1)
        for _ in range(count - 1)
    ]
    return [problem.reference, *noise]


def _climb(problem: Problem, weights: Weights, start: Policy, steps: int) -> tuple[Policy, float, float]:
    """Climbs from ``start``; returns the final policy, its value and its largest gradient.

    Where J_w is convex, the step uses the curvature's absolute value, so that it never descends to a saddle.
    """
    here, value = start, float(objective(problem, start, weights))
    slope, bend = _derivatives(problem, here, weights)
    for _ in range(steps):
        if float(slope.abs().max()) < GRADIENT:
            break
        sizes, axes = torch.linalg.eigh(bend)
        step = axes @ ((axes.T @ slope) / sizes.abs().clamp(min=1e-9))
        step = (step * min(1.0, REACH / float(step.abs().max()))).reshape(here.shape)
        trial = (here + step).log_softmax(-1)
        while (better := float(objective(problem, trial, weights))) < value and float(step.abs().max()) > TINY:
            step = step / 2
            trial = (here + step).log_softmax(-1)
        found = _derivatives(problem, trial, weights)
        if better <= value and float(found[0].abs().max()) >= float(slope.abs().max()):
            break  # nothing better within rounding
        here, value, (slope, bend) = trial, better, found
    return here, value, float(slope.abs().max())


def _derivatives(
    problem: Problem, policy: Policy, weights: Weights
) -> tuple[Float[Tensor, " logits"], Float[Tensor, "logits logits"]]:
    """Returns the gradient and Hessian of J_w by the logits.

    They are sums of the score over responses, and of the softmax over contexts.
    """
    tree, beta = problem.tree, problem.beta
    score, weighted = weighted_scores(tree, policy, torch.ones_like(weights)), weighted_scores(tree, policy, weights)
    drawn = probabilities(tree, policy)
    gain = drawn * (problem.rewards - beta * weighted_ratios(problem, policy, weights))
    slope = gain @ score - beta * (drawn @ weighted)
    cross = (beta * drawn.unsqueeze(-1) * score).T @ weighted
    at_context = torch.zeros(tree.contexts, dtype=policy.dtype)
    at_context.index_add_(
        0, tree.nodes.flatten(), (beta * drawn.unsqueeze(-1) * weights - gain.unsqueeze(-1)).flatten()
    )
    chances = policy.exp()
    softmax = torch.diag_embed(chances) - chances.unsqueeze(-1) * chances.unsqueeze(-2)
    own = torch.block_diag(*(at_context[:, None, None] * softmax))  # type: ignore[no-untyped-call]
    return slope, (gain.unsqueeze(-1) * score).T @ score - cross - cross.T + own
