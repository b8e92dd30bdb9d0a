"""The objective protocol and the one reduction over response tokens that every objective uses.

Objectives see log-probabilities of response tokens only: prompts, padding and packing are known to ``models`` alone.
"""

from enum import Enum
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnpo.schema import ObjectiveOutput, PreferenceBatch, TokenStats


class Reduction(Enum):
    """How per-token values of one response become one number.

    SUM: ``sum_t w_t x_t``, w = 1 where no weights are given. MEAN: the same with w = 1/n where none are given (a
    distribution takes the place of 1/n). WEIGHT_MEAN: ``sum_t w_t x_t / sum_t w_t``, 0 where the weights sum to 0.
    """

    SUM = "sum"
    MEAN = "mean"
    WEIGHT_MEAN = "weight_mean"


def reduce(
    values: Float[Tensor, "rows R"],
    weights: Float[Tensor, "rows R"] | None,
    mask: Bool[Tensor, "rows R"],
    how: Reduction,
) -> Float[Tensor, "rows"]:
    """One number per row; positions with a false mask never matter, whatever they hold (infinities included)."""
    zero = torch.zeros((), dtype=values.dtype, device=values.device)
    kept = torch.where(mask, values, zero)
    if weights is None:
        total = kept.sum(-1)
        return total / mask.sum(-1).clamp(min=1).to(values.dtype) if how is not Reduction.SUM else total
    used = torch.where(mask, weights.to(values.dtype), zero)
    total = (used * torch.where(used == 0, zero, kept)).sum(-1)
    if how is not Reduction.WEIGHT_MEAN:
        return total
    mass = used.sum(-1)
    return torch.where(mass == 0, zero, total / torch.where(mass == 0, torch.ones_like(mass), mass))


def split_pairs(rows: Float[Tensor, "rows"]) -> tuple[Float[Tensor, "pairs"], Float[Tensor, "pairs"]]:
    """The chosen and the rejected half of a per-row tensor."""
    chosen, rejected = rows.chunk(2)
    return chosen, rejected


@runtime_checkable
class PreferenceObjective(Protocol):
    """A preference loss. ``requires`` names what the module must compute for it: "reference", "token_weights", ..."""

    @property
    def requires(self) -> frozenset[str]:
        """Names of the inputs the objective reads beyond the policy's log-probabilities."""
        ...

    def __call__(self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch) -> ObjectiveOutput:
        """Losses and detached rewards of the batch's pairs."""
        ...


def log_ratios(policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch) -> Float[Tensor, "rows R"]:
    """Per-token ``log pi - log ref`` of the batch, 0 off the response. Subtracted per token, before any sum.

    Raises:
        ValueError: no reference statistics were given.
    """
    if reference is None:
        raise ValueError("this objective compares with a reference, and none was computed for the batch")
    difference = policy.logps - reference.logps.to(policy.logps.dtype)
    return torch.where(batch.main.response_mask, difference, torch.zeros_like(difference))
