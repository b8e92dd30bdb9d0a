"""Objective protocol, and the reductions over response tokens shared by all objectives.

Objectives see only log-probabilities of response tokens; prompts, padding and packing are handled by ``models``.

Each objective's file implements its formula as a pure function of tensors and numbers, which its class calls. The
functions share these arguments, in this order. Rows are responses, all chosen ones first and then their rejected
partners; log-probabilities are in nats, lengths in tokens.

- ``policy_logps``, ``reference_logps`` [rows, R]: log-probability of each response token under policy and reference.
- ``weights`` [rows, R]: a distribution over each response's tokens, or factors. They receive no gradient.
- ``mask`` [rows, R]: true on response tokens; values elsewhere are ignored.
- ``lengths`` [rows]: |y|, which multiplies each weighted sum; None for factors and for sums without |y|.

These are followed by tensors that only one formula uses, and then by hyperparameters.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnpo.schema import ObjectiveOutput, PreferenceBatch, RowGroup, TokenStats


class Reduction(Enum):
    """Reduction of a response's per-token values to one number.

    SUM: ``sum_t w_t x_t``, where w defaults to 1. MEAN: the same, but w defaults to 1/n (a distribution replaces 1/n).
    WEIGHT_MEAN: ``sum_t w_t x_t / sum_t w_t``, or 0 if the weights sum to 0.
    """

    SUM = "sum"
    MEAN = "mean"
    WEIGHT_MEAN = "weight_mean"


def reduce(
    values: Float[Tensor, "rows R"],
    weights: Float[Tensor, "rows R"] | None,
    mask: Bool[Tensor, "rows R"],
    how: Reduction,
) -> Float[Tensor, " rows"]:
    """Reduces each row to one number; values outside the mask are ignored, even if they are infinite."""
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


class LengthFrom(Enum):
    """Tokenizer that determines |y|: the weight source's (as in the paper) or the policy's."""

    SOURCE = "source"
    TRAIN = "train"


def weighted_sum(
    values: Float[Tensor, "rows R"],
    weights: Float[Tensor, "rows R"],
    mask: Bool[Tensor, "rows R"],
    lengths: Float[Tensor, " rows"] | None = None,
) -> Float[Tensor, " rows"]:
    """Returns ``|y| sum_t a_t x_t`` for each row, which is the plain sum S(x) for uniform weights.

    Without ``lengths``, returns ``sum_t w_t x_t``.
    """
    factors = weights if lengths is None else weights * lengths.to(weights.dtype).unsqueeze(-1)
    return reduce(values, factors, mask, Reduction.SUM)


def response_lengths(rows: RowGroup, length_scale: bool, length_from: LengthFrom) -> Float[Tensor, " rows"] | None:
    """Returns |y| per row for ``weighted_sum``; None if the length scale is off or the weights are factors."""
    if rows.factors or not length_scale:
        return None
    if length_from is LengthFrom.SOURCE:
        return rows.source_lengths
    return rows.response_mask.sum(-1).to(rows.token_weights["reward"].dtype)


class ObjectivePart:
    """Base class of objective parts that contribute config keys."""

    def unused_keys(self) -> dict[str, str]:
        """Returns the keys that have no effect in this config, mapped to the reasons."""
        return {}


@dataclass(frozen=True, kw_only=True)
class LengthScaled(ObjectivePart):
    """Base class of objectives that multiply weighted sums by |y|; provides their weights, mask and lengths."""

    length_scale: bool = True
    length_from: LengthFrom = LengthFrom.SOURCE

    def unused_keys(self) -> dict[str, str]:
        """Returns the keys that have no effect in this config, mapped to the reasons."""
        return ({} if self.length_scale else {"length_from": "objective.length_scale=false"}) | super().unused_keys()

    def weighted(
        self, rows: RowGroup
    ) -> tuple[Float[Tensor, "rows R"], Bool[Tensor, "rows R"], Float[Tensor, " rows"] | None]:
        """Returns weights, mask and lengths of the rows in the form that the formulas expect."""
        lengths = response_lengths(rows, self.length_scale, self.length_from)
        return rows.token_weights["reward"], rows.response_mask, lengths


def mean_factors(rows: RowGroup) -> Float[Tensor, "rows R"]:
    """Returns the weight of each token in a mean over the response: a distribution, or factors divided by n."""
    weights = rows.token_weights["reward"]
    if not rows.factors:
        return weights
    return weights / rows.response_mask.sum(-1, keepdim=True).clamp(min=1).to(weights.dtype)


def split_pairs(rows: Float[Tensor, " rows"]) -> tuple[Float[Tensor, " pairs"], Float[Tensor, " pairs"]]:
    """Splits a per-row tensor into its chosen and rejected halves."""
    chosen, rejected = rows.chunk(2)
    return chosen, rejected


def split_by_side(name: str, rows: Float[Tensor, " rows"]) -> dict[str, Float[Tensor, " pairs"]]:
    """Returns the halves of a per-row tensor under the keys NAME/chosen and NAME/rejected."""
    chosen, rejected = split_pairs(rows)
    return {f"{name}/chosen": chosen, f"{name}/rejected": rejected}


@runtime_checkable
class PreferenceObjective(Protocol):
    """Preference loss. ``requires`` names the inputs that must be computed for it; nothing else is computed.

    "reference": log-probabilities of a frozen reference. "token_weights": weights from any source; if "factors" is also
    required, the source must provide factors. "hidden", "vocab:NAME", "joint:NAME", "input_gradient": statistics of
    ``TokenStats`` (joint ones need the reference's head). "group:NAME": additional rows, scored with each micro-batch.
    "ahead:NAME": rows that are scored before an optimizer step (``StepObjective``). "several_pairs": more than one pair
    per step.
    """

    @property
    def requires(self) -> frozenset[str]:
        """Returns the names of the inputs needed besides the policy's log-probabilities."""

    def __call__(self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch) -> ObjectiveOutput:
        """Computes losses and detached rewards of the batch's pairs."""


@runtime_checkable
class StepObjective(PreferenceObjective, Protocol):
    """Objective that needs a statistic of the whole optimizer step before its first micro-batch."""

    def step_sums(
        self, policy: TokenStats, reference: TokenStats | None, rows: RowGroup
    ) -> dict[str, Float[Tensor, ""]]:
        """Computes sums over the rows of an "ahead" group; totals over the step and all ranks form ``batch.state``."""


def log_ratios(
    policy_logps: Float[Tensor, "rows R"], reference_logps: Float[Tensor, "rows R"], mask: Bool[Tensor, "rows R"]
) -> Float[Tensor, "rows R"]:
    """Returns per-token ``d = log pi - log ref``, 0 outside the response; subtracts before anything is summed."""
    difference = policy_logps - reference_logps.to(policy_logps.dtype)
    return torch.where(mask, difference, torch.zeros_like(difference))


def logps_of(reference: TokenStats | None, rows: str = "the batch") -> Float[Tensor, "rows R"]:
    """Returns the reference's log-probabilities.

    Raises:
        ValueError: no reference statistics were given.
    """
    if reference is None:
        raise ValueError(f"this objective needs a reference, but none was computed for {rows}")
    return reference.logps
