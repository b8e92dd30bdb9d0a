"""Transported mass as weights, computed anew in every training step (OTPO, Li et al. 2025)."""

from dataclasses import dataclass
from math import isfinite
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from attnpo.schema import Kind, PreferenceBatch, TokenStats, UserError
from attnpo.weights.base import OnlineSource
from attnpo.weights.optimal_transport import LEAST_REG, Plan, sweeps_needed, token_costs, transport

MOST_REG_M = 1e9  # beyond it the masses are as good as fixed
LEAST_TOLERANCE = 1e-11  # what rounding in float64 leaves


@dataclass(frozen=True)
class Transport(OnlineSource):
    """How much of each token the optimal transport between a pair's two responses keeps; equal weights until training.

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
    why_not_captured: ClassVar[str] = "weights=transport are computed while training, nothing is captured"
    kind: ClassVar[Kind] = Kind.FACTOR
    statistics: ClassVar[frozenset[str]] = frozenset({"hidden"})

    def __post_init__(self) -> None:
        if not (isfinite(self.reg) and self.reg >= LEAST_REG):
            raise UserError(f"weights.reg must be at least {LEAST_REG}, got {self.reg}")
        if not 0 < self.reg_m <= MOST_REG_M:
            raise UserError(f"weights.reg_m must be above 0 and at most {MOST_REG_M:g}, got {self.reg_m}")
        if not LEAST_TOLERANCE <= self.tolerance < 1:
            raise UserError(
                f"weights.tolerance must be at least {LEAST_TOLERANCE:g} and below 1, got {self.tolerance:g}"
            )
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

    def plan(self, policy: TokenStats, batch: PreferenceBatch) -> Plan:
        """Returns what is transported in each pair of the batch, in float64. ValueError without hidden states."""
        if policy.hidden is None:
            raise ValueError("transport weights need the policy's hidden states, and none were computed for the batch")
        hidden, masks = policy.hidden.detach().chunk(2), batch.main.response_mask.chunk(2)
        costs = token_costs(hidden[0], hidden[1], masks[0], masks[1])
        return transport(costs, masks[0], masks[1], self.reg, self.reg_m, self.sweeps)

    def weights(
        self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch
    ) -> Float[Tensor, "rows R"]:
        """Row sums of each pair's plan (chosen) and its column sums (rejected); float32 unless the states are finer."""
        plan = self.plan(policy, batch)
        assert policy.hidden is not None
        dtype = torch.promote_types(policy.hidden.dtype, torch.float32)
        return torch.cat([plan.chosen, plan.rejected]).to(dtype)
