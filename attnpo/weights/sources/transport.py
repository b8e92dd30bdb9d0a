"""Transported mass as weights, computed anew in every training step (OTPO, Li et al. 2025).

Unbalanced optimal transport between the tokens of two responses, with an entropy term, to a known accuracy. Plain
numbers in float64: masks in, a plan per pair out. No row of a batch depends on the others.
"""

from dataclasses import dataclass
from math import ceil, log, log1p, tanh
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnpo.schema import Kind, PreferenceBatch, TokenStats, UserError, check_range
from attnpo.weights.base import OnlineSource

OFFSET = 1e-6  # added to every distance
LEAST_REG = 0.002  # costs reach 1, and exp(-1/reg) has to be a float64


@dataclass(frozen=True)
class TransportPlan:
    """Transport plan by token: for every token its share of the plan, 0 off the response.

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
    """Returns the cost of moving a chosen token onto a rejected one, in float64.

    At most 1, and 0 where either mask is false.

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
) -> TransportPlan:
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
    return TransportPlan(
        chosen=_spread(rows, count, chosen_mask & some.unsqueeze(-1)),
        rejected=_spread(columns, count, rejected_mask & some.unsqueeze(-1)),
        scale=torch.where(some, (rows.logsumexp(-1) - lacking).exp() / count.clamp(min=1), 0.0),
    )


def _log_product(
    kernel: Float[Tensor, "pairs a b"], logs: Float[Tensor, "pairs b"], mask: Bool[Tensor, "pairs b"]
) -> Float[Tensor, "pairs a"]:
    """Returns ``log(kernel @ exp(logs))`` over the real columns.

    The largest term is taken out, so that nothing overflows.
    """
    real = logs.masked_fill(~mask, -torch.inf)
    top = real.amax(-1, keepdim=True)
    return torch.bmm(kernel, torch.exp(real - top).unsqueeze(-1)).squeeze(-1).log() + top


def _spread(
    logs: Float[Tensor, "pairs a"], total: Float[Tensor, " pairs"], mask: Bool[Tensor, "pairs a"]
) -> Float[Tensor, "pairs a"]:
    """Shares of ``total`` as the logarithms say."""
    return torch.where(mask, logs.softmax(-1) * total.unsqueeze(-1), 0.0)


MOST_REG_M = 1e9  # beyond it the masses are as good as fixed
LEAST_TOLERANCE = 1e-11  # what rounding in float64 leaves


@dataclass(frozen=True)
class Transport(OnlineSource):
    """Mass of each token that the optimal transport between a pair's two responses keeps; equal weights until training.

    Unbalanced, with an entropy term ``reg`` and a penalty ``reg_m`` on masses other than 1 per token; costs are
    distances between the policy's last hidden states at the positions that predict the tokens. The weights of either
    side sum to the token count of the shorter response.

    The number of Sinkhorn sweeps follows from the settings: enough for a relative error of ``tolerance`` in every
    weight, whatever the pair. Settings that take more than ``max_iterations`` are refused.
    """

    reg: float = 1.0
    reg_m: float = 0.2
    tolerance: float = 1e-9
    max_iterations: int = 1000

    name: ClassVar[str] = "transport"
    kind: ClassVar[Kind] = Kind.FACTOR
    statistics: ClassVar[frozenset[str]] = frozenset({"hidden"})

    def __post_init__(self) -> None:
        check_range("weights", f"[{LEAST_REG}, inf)", reg=self.reg)
        check_range("weights", f"(0, {MOST_REG_M:g}]", reg_m=self.reg_m)
        check_range("weights", f"[{LEAST_TOLERANCE:g}, 1)", tolerance=self.tolerance)
        if self.sweeps > self.max_iterations:
            raise UserError(
                f"weights.max_iterations must be at least {self.sweeps} for weights.reg={self.reg:g}, "
                f"weights.reg_m={self.reg_m:g} and weights.tolerance={self.tolerance:g}, got {self.max_iterations}: "
                "raise it, or raise reg or tolerance"
            )

    @property
    def sweeps(self) -> int:
        """Returns how many sweeps reach the tolerance for any pair."""
        return sweeps_needed(self.reg, self.reg_m, self.tolerance)

    def plan(self, policy: TokenStats, batch: PreferenceBatch) -> TransportPlan:
        """Returns what is transported in each pair of the batch, in float64. ValueError without hidden states."""
        if policy.hidden is None:
            raise ValueError("transport weights need the policy's hidden states, and none were computed for the batch")
        hidden, masks = policy.hidden.detach().chunk(2), batch.main.response_mask.chunk(2)
        costs = token_costs(hidden[0], hidden[1], masks[0], masks[1])
        return transport(costs, masks[0], masks[1], self.reg, self.reg_m, self.sweeps)

    def weights(
        self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch
    ) -> Float[Tensor, "rows R"]:
        """Returns row sums of each pair's plan (chosen) and its column sums (rejected).

        Float32 unless the states are finer.
        """
        plan = self.plan(policy, batch)
        assert policy.hidden is not None
        dtype = torch.promote_types(policy.hidden.dtype, torch.float32)
        return torch.cat([plan.chosen, plan.rejected]).to(dtype)
