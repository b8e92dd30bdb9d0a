"""Unbalanced optimal transport between the tokens of two responses, with an entropy term, to a known accuracy (OTPO).

Plain numbers in float64: masks in, a plan per pair out. No row of a batch depends on the others.
"""

from dataclasses import dataclass
from math import ceil, log, log1p, tanh

import torch
from jaxtyping import Bool, Float
from torch import Tensor

OFFSET = 1e-6  # added to every distance
LEAST_REG = 0.002  # costs reach 1, and exp(-1/reg) has to be a float64


@dataclass(frozen=True)
class Plan:
    """What is transported: for every token its share of the plan, 0 off the response.

    ``chosen`` and ``rejected`` are the plan's row and column sums, each side rescaled to the token count of the shorter
    response; ``scale`` is the plan's mass before that, over the same count.
    """

    chosen: Float[Tensor, "pairs n"]
    rejected: Float[Tensor, "pairs m"]
    scale: Float[Tensor, " pairs"]


def token_costs(
    chosen: Float[Tensor, "pairs n d"],
    rejected: Float[Tensor, "pairs m d"],
    chosen_mask: Bool[Tensor, "pairs n"],
    rejected_mask: Bool[Tensor, "pairs m"],
) -> Float[Tensor, "pairs n m"]:
    """Returns the cost of moving a chosen token onto a rejected one, in float64; at most 1, and 0 where either mask is
    false.

    ``|h_i - h_j| + 1e-6``, divided by the largest cost of the pair if that exceeds 1. As in the published code, where
    positions off the response count as zero vectors, the largest cost is never below a token's own norm: every prompt
    is such a position.
    """
    given = zip(chosen, rejected, chosen_mask, rejected_mask, strict=True)
    return torch.stack([_pair_costs(*pair) for pair in given])  # one by one: states in float64 are large


def _pair_costs(
    chosen: Float[Tensor, "n d"],
    rejected: Float[Tensor, "m d"],
    chosen_mask: Bool[Tensor, " n"],
    rejected_mask: Bool[Tensor, " m"],
) -> Float[Tensor, "n m"]:
    one = torch.where(chosen_mask[:, None], chosen.double(), 0.0)
    other = torch.where(rejected_mask[:, None], rejected.double(), 0.0)
    norms = torch.cat([one, other]).norm(dim=-1) + OFFSET
    # Distances do not see a common shift, but products of large vectors would drown them.
    middle = (one.sum(0) + other.sum(0)) / (chosen_mask.sum() + rejected_mask.sum()).clamp(min=1)
    distances = torch.cdist(one - middle, other - middle, compute_mode="use_mm_for_euclid_dist") + OFFSET
    costs = torch.where(chosen_mask[:, None] & rejected_mask, distances, 0.0)
    return costs / torch.maximum(costs.max(), norms.max()).clamp(min=1.0)


def sweeps_needed(reg: float, reg_m: float, tolerance: float) -> int:
    """Returns how many sweeps of ``transport`` bring every weight within ``tolerance`` of its limit, relative to it.

    Weights do not change when a constant is added to the log scalings, so their error is the range (largest minus
    smallest) of the scalings' errors. That is at most ``f / reg`` at first, as costs lie between 0 and 1, and each half
    sweep shrinks it by ``f tanh(1 / (2 reg))``: the logarithm of a product with a positive matrix contracts ranges
    (Birkhoff), and ``f = reg_m / (reg_m + reg)`` multiplies it.
    """
    shrinks = log1p(reg / reg_m) - log(tanh(1 / (2 * reg)))
    halves = log(2 * reg_m / (reg_m + reg) / reg / tolerance) / shrinks
    return max(1, ceil((halves + 1) / 2))


def transport(
    costs: Float[Tensor, "pairs n m"],
    chosen_mask: Bool[Tensor, "pairs n"],
    rejected_mask: Bool[Tensor, "pairs m"],
    reg: float,
    reg_m: float,
    sweeps: int,
) -> Plan:
    """Returns the plan of least ``sum G C + reg sum G (log G - 1) + reg_m (KL(G 1 | 1) + KL(G^T 1 | 1))`` per pair.

    A mass of 1 on every token, not normalised; masked rows and columns take no part. ``costs`` as ``token_costs``
    gives them. Plain entropy, not the divergence from the product of the masses. Sinkhorn sweeps over the logarithms
    ``u = f (log 1 - log K e^v)``, ``v = f (log 1 - log K^T e^u)``, ``K = exp(-C/reg)``; source: OTPO
    (``scripts/otpo_trainer.py``) with POT 0.9.4's ``sinkhorn_unbalanced``.
    """
    both = chosen_mask.unsqueeze(2) & rejected_mask.unsqueeze(1)
    kernel = torch.where(both, torch.exp(-costs / reg), 0.0)
    back = kernel.transpose(1, 2)
    share = reg_m / (reg_m + reg)
    v = torch.zeros_like(costs[:, 0])
    u = torch.zeros_like(costs[:, :, 0])
    for _ in range(sweeps):
        u = -share * _log_product(kernel, v, rejected_mask)
        v = -share * _log_product(back, u, chosen_mask)
    sums = _log_product(kernel, v, rejected_mask)
    rows = (u + sums).masked_fill(~chosen_mask, -torch.inf)
    columns = (v + _log_product(back, u, chosen_mask)).masked_fill(~rejected_mask, -torch.inf)
    count = torch.minimum(chosen_mask.sum(-1), rejected_mask.sum(-1)).to(costs.dtype)
    some = count > 0
    # The constant that u and v still lack: it settles more slowly than the weights, which do not depend on it.
    lacking = torch.where(chosen_mask, u + share * sums, 0.0).sum(-1) / chosen_mask.sum(-1).clamp(min=1) / (1 + share)
    return Plan(
        chosen=_spread(rows, count, chosen_mask & some.unsqueeze(-1)),
        rejected=_spread(columns, count, rejected_mask & some.unsqueeze(-1)),
        scale=torch.where(some, (rows.logsumexp(-1) - lacking).exp() / count.clamp(min=1), 0.0),
    )


def _log_product(
    kernel: Float[Tensor, "pairs a b"], logs: Float[Tensor, "pairs b"], mask: Bool[Tensor, "pairs b"]
) -> Float[Tensor, "pairs a"]:
    """``log(kernel @ exp(logs))`` over the real columns; the largest term is taken out, so that nothing overflows."""
    real = logs.masked_fill(~mask, -torch.inf)
    top = real.amax(-1, keepdim=True)
    return torch.bmm(kernel, torch.exp(real - top).unsqueeze(-1)).squeeze(-1).log() + top


def _spread(
    logs: Float[Tensor, "pairs a"], total: Float[Tensor, " pairs"], mask: Bool[Tensor, "pairs a"]
) -> Float[Tensor, "pairs a"]:
    """Shares of ``total`` as the logarithms say."""
    return torch.where(mask, logs.softmax(-1) * total.unsqueeze(-1), 0.0)
