"""TwDPO's loss over all pairs of an enumerable policy, and plain gradient descent on it.

The optimum and the path of training differ: the optimum lets tokens of low weight move farther, but the gradient at a
token is proportional to its weight.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from experiments.theory.problem import Problem, position_kl

RATE = 4.0  # stable for the problems of the study (3 words, 3 tokens, beta 0.5); their loss is a mean over all pairs


def preference_loss(
    problems: Sequence[Problem],
    logits: Float[Tensor, "problems contexts vocab"],
    weights: Float[Tensor, "problems responses length"],
) -> Float[Tensor, " problems"]:
    """Returns TwDPO's expected loss (Eq. twdpo) over the reference's pairs, labelled by Bradley-Terry.

    ``weights`` are factors ``|y| a_t``; all problems share a tree. The minimum over all policies is the heuristic
    policy wherever that exists: every pair's margin is then its reward difference, the minimum of its expected loss.
    """
    tree = problems[0].tree
    base = torch.stack([one.reference for one in problems])[:, tree.nodes, tree.sequences]
    rewards = torch.stack([one.rewards for one in problems])
    beta = torch.tensor([one.beta for one in problems], dtype=base.dtype).unsqueeze(-1)
    ratios = logits.log_softmax(-1)[:, tree.nodes, tree.sequences] - base
    implicit = beta * (weights * ratios).sum(-1)
    drawn = base.sum(-1).exp()
    wins = torch.sigmoid(rewards.unsqueeze(-1) - rewards.unsqueeze(-2))
    losses = -wins * logsigmoid(implicit.unsqueeze(-1) - implicit.unsqueeze(-2))
    return 2 * (drawn.unsqueeze(-1) * drawn.unsqueeze(-2) * losses).sum((-1, -2))  # each pair comes in either order


def descend(
    problems: Sequence[Problem],
    weights: Float[Tensor, "problems responses length"],
    marks: Sequence[int],
    rate: float = RATE,
) -> Float[Tensor, "marks problems length"]:
    """Returns the expected KL to the reference at each position after each number of steps in ``marks``.

    Every policy starts at its reference and follows its own loss by plain gradient descent; all problems share a tree.
    """
    logits, seen = torch.stack([one.reference for one in problems]), []
    for step in range(1, marks[-1] + 1):
        leaf = logits.requires_grad_()
        (slope,) = torch.autograd.grad(preference_loss(problems, leaf, weights).sum(), leaf)
        logits = (leaf - rate * slope).detach()
        if step in marks:
            policies = logits.log_softmax(-1)
            moved = [position_kl(one.tree, policies[i], one.reference) for i, one in enumerate(problems)]
            seen.append(torch.stack(moved))
    return torch.stack(seen)
