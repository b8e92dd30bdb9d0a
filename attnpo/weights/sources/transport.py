"""Weights from optimal transport, recomputed in every training step (OTPO, Li et al. 2025).

Unbalanced entropic optimal transport between the tokens of two responses, solved to a known accuracy. All values are
float64. The pairs of a batch are independent of each other.
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
LEAST_REG = 0.002  # costs reach 1, and exp(-1/reg) must fit into a float64


@dataclass(frozen=True)
class TransportPlan:
    """Marginals of a transport plan: the mass of each token, 0 outside the response.

    ``chosen`` and ``rejected`` are the plan's row and column sums, each side rescaled to the token count of the shorter
    response; ``scale`` is the plan's mass before rescaling, divided by that count.
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
    """Returns the cost of moving each chosen token to each rejected one, in float64.

    Costs are at most 1, and 0 where either mask is false.

    A cost is ``|h_i - h_j| + 1e-6``, divided by the pair's largest cost if that exceeds 1. As in the published code,
    positions outside the response count as zero vectors (the prompt always has some), so the largest cost is at least
    the norm of every token.
    """
    given = zip(chosen, rejected, chosen_mask, rejected_mask, strict=True)
    return torch.stack([_pair_costs(*pair) for pair in given])  # one by one, because states in float64 are large


def _pair_costs(
    chosen: Float[Tensor, "n d"],
    rejected: Float[Tensor, "m d"],
    chosen_mask: Bool[Tensor, " n"],
    rejected_mask: Bool[Tensor, " m"],
) -> Float[Tensor, "n m"]:
    one = torch.where(chosen_mask[:, None], chosen.double(), 0.0)
    other = torch.where(rejected_mask[:, None], rejected.double(), 0.0)
    norms = torch.cat([one, other]).norm(dim=-1) + OFFSET
    # Distances are invariant to a common shift; centring avoids cancellation between large vectors.
    middle = (one.sum(0) + other.sum(0)) / (chosen_mask.sum() + rejected_mask.sum()).clamp(min=1)
    distances = torch.cdist(one - middle, other - middle, compute_mode="use_mm_for_euclid_dist") + OFFSET
    costs = torch.where(chosen_mask[:, None] & rejected_mask, distances, 0.0)
    return costs / torch.maximum(costs.max(), norms.max()).clamp(min=1.0)


def sweeps_needed(reg: float, reg_m: float, tolerance: float) -> int:
    """Returns the number of ``solve_transport`` sweeps for a relative error of at most ``tolerance`` in every weight.

    Weights do not change when a constant is added to the log scalings, so their error is the range (largest minus
    smallest) of the scalings' errors. Initially that is at most ``f / reg``, because costs are between 0 and 1. Each
    half sweep multiplies it by ``f tanh(1 / (2 reg))``: the logarithm of a product with a positive matrix contracts
    ranges (Birkhoff), and the result is scaled by ``f = reg_m / (reg_m + reg)``.
    """
    shrinks = log1p(reg / reg_m) - log(tanh(1 / (2 * reg)))
    halves = log(2 * reg_m / (reg_m + reg) / reg / tolerance) / shrinks
    return max(1, ceil((halves + 1) / 2))


def solve_transport(
    costs: Float[Tensor, "pairs n m"],
    chosen_mask: Bool[Tensor, "pairs n"],
    rejected_mask: Bool[Tensor, "pairs m"],
    reg: float,
    reg_m: float,
    sweeps: int,
) -> TransportPlan:
    """Returns the plan minimising ``sum G C + reg sum G (log G - 1) + reg_m (KL(G 1 | 1) + KL(G^T 1 | 1))`` per pair.

    Each token has mass 1 (masses are not normalised); masked rows and columns are excluded. ``costs`` come from
    ``token_costs``. The entropy is plain, not relative to the product of the masses. Sinkhorn sweeps run on the
    logarithms ``u = f (log 1 - log K e^v)``, ``v = f (log 1 - log K^T e^u)``, ``K = exp(-C/reg)``; source: OTPO
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
    # Constant still missing in u and v: it converges more slowly than the weights, which do not depend on it.
    lacking = torch.where(chosen_mask, u + share * sums, 0.0).sum(-1) / chosen_mask.sum(-1).clamp(min=1) / (1 + share)
    return TransportPlan(
        chosen=_distribute_total(rows, count, chosen_mask & some.unsqueeze(-1)),
        rejected=_distribute_total(columns, count, rejected_mask & some.unsqueeze(-1)),
        scale=torch.where(some, (rows.logsumexp(-1) - lacking).exp() / count.clamp(min=1), 0.0),
    )


def _log_product(
    kernel: Float[Tensor, "pairs a b"], logs: Float[Tensor, "pairs b"], mask: Bool[Tensor, "pairs b"]
) -> Float[Tensor, "pairs a"]:
    """Returns ``log(kernel @ exp(logs))`` over the real columns.

    The largest term is factored out to prevent overflow.
    """
    real = logs.masked_fill(~mask, -torch.inf)
    top = real.amax(-1, keepdim=True)
    return torch.bmm(kernel, torch.exp(real - top).unsqueeze(-1)).squeeze(-1).log() + top


def _distribute_total(
    logs: Float[Tensor, "pairs a"], total: Float[Tensor, " pairs"], mask: Bool[Tensor, "pairs a"]
) -> Float[Tensor, "pairs a"]:
    """Distributes ``total`` over the tokens in proportion to the exponentials of ``logs``."""
    return torch.where(mask, logs.softmax(-1) * total.unsqueeze(-1), 0.0)


MOST_REG_M = 1e9  # above it the masses are practically fixed
LEAST_TOLERANCE = 1e-11  # limit of float64 rounding


@dataclass(frozen=True)
class Transport(OnlineSource):
    """Mass of each token in the optimal transport plan between a pair's two responses.

    Before training, all tokens get equal weights. The transport is unbalanced, with an entropy term ``reg`` and a
    penalty ``reg_m`` on masses other than 1 per token. Costs are distances between the policy's last hidden states at
    the positions that predict the tokens. The weights of each side sum to the token count of the shorter response.

    The number of Sinkhorn sweeps is derived from the settings to guarantee a relative error of at most ``tolerance`` in
    every weight of any pair. Settings that require more than ``max_iterations`` sweeps are rejected.
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
        if self.sweep_count > self.max_iterations:
            raise UserError(
                f"weights.max_iterations must be at least {self.sweep_count} for weights.reg={self.reg:g}, "
                f"weights.reg_m={self.reg_m:g} and weights.tolerance={self.tolerance:g}, got {self.max_iterations}: "
                "raise weights.max_iterations, weights.reg or weights.tolerance"
            )

    @property
    def sweep_count(self) -> int:
        """Returns the number of sweeps needed to reach the tolerance for any pair."""
        return sweeps_needed(self.reg, self.reg_m, self.tolerance)

    def transport_plan(self, policy: TokenStats, batch: PreferenceBatch) -> TransportPlan:
        """Returns the transport plan of each pair of the batch, in float64. ValueError if hidden states are missing."""
        if policy.hidden is None:
            raise ValueError("weights=transport needs the policy's hidden states, but none were computed for the batch")
        hidden, masks = policy.hidden.detach().chunk(2), batch.main.response_mask.chunk(2)
        costs = token_costs(hidden[0], hidden[1], masks[0], masks[1])
        return solve_transport(costs, masks[0], masks[1], self.reg, self.reg_m, self.sweep_count)

    def weights(
        self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch
    ) -> Float[Tensor, "rows R"]:
        """Returns the row sums of each pair's plan (chosen) and its column sums (rejected).

        The dtype is float32, or float64 if the hidden states are float64.
        """
        plan = self.transport_plan(policy, batch)
        assert policy.hidden is not None
        dtype = torch.promote_types(policy.hidden.dtype, torch.float32)
        return torch.cat([plan.chosen, plan.rejected]).to(dtype)
