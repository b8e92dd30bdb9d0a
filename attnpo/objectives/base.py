"""Objective protocol, and the reductions over response tokens that every objective uses.

Objectives see log-probabilities of response tokens only: prompts, padding and packing are known to ``models`` alone.

Each objective's file holds its formula as a pure function of tensors and numbers, which its class calls. The functions
share these arguments, in this order. Rows are responses, all chosen ones first and their rejected partners after them;
log-probabilities are in nats, lengths in tokens.

- ``policy_logps``, ``reference_logps`` [rows, R]: log-probability of each response token under policy and reference.
- ``weights`` [rows, R]: a distribution over each response's tokens, or factors. They get no gradient.
- ``mask`` [rows, R]: which columns are response tokens; whatever stands in the others never matters.
- ``lengths`` [rows]: |y|, which multiplies each weighted sum; None for factors and for sums without |y|.

After them come the tensors that only this formula reads, and its hyperparameters.
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
) -> Float[Tensor, " rows"]:
    """Returns one number per row; positions with a false mask never matter, infinities included."""
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
    """Whose tokens |y| counts: the weight source's (paper) or the training side's."""

    SOURCE = "source"
    TRAIN = "train"


def weighted_sum(
    values: Float[Tensor, "rows R"],
    weights: Float[Tensor, "rows R"],
    mask: Bool[Tensor, "rows R"],
    lengths: Float[Tensor, " rows"] | None = None,
) -> Float[Tensor, " rows"]:
    """Returns ``|y| sum_t a_t x_t`` of each row: S(x) for uniform weights.

    ``sum_t w_t x_t`` where ``lengths`` is None.
    """
    factors = weights if lengths is None else weights * lengths.to(weights.dtype).unsqueeze(-1)
    return reduce(values, factors, mask, Reduction.SUM)


def response_lengths(rows: RowGroup, length_scale: bool, length_from: LengthFrom) -> Float[Tensor, " rows"] | None:
    """Returns |y| of each row as ``weighted_sum`` takes it: None without the length scale, and for factors."""
    if rows.factors or not length_scale:
        return None
    if length_from is LengthFrom.SOURCE:
        return rows.source_lengths
    return rows.response_mask.sum(-1).to(rows.token_weights["reward"].dtype)


class Keys:
    """Base of the parts that objectives are made of, each with some of their keys."""

    def unread(self) -> dict[str, str]:
        """Names keys without effect as the others stand, with the reason."""
        return {}


@dataclass(frozen=True, kw_only=True)
class LengthScaled(Keys):
    """Keys of objectives whose weighted sums are multiplied by |y|, and what these read of a batch's rows."""

    length_scale: bool = True
    length_from: LengthFrom = LengthFrom.SOURCE

    def unread(self) -> dict[str, str]:
        """Names keys without effect as the others stand, with the reason."""
        return ({} if self.length_scale else {"length_from": "objective.length_scale=false"}) | super().unread()

    def weighted(
        self, rows: RowGroup
    ) -> tuple[Float[Tensor, "rows R"], Bool[Tensor, "rows R"], Float[Tensor, " rows"] | None]:
        """Returns weights, mask and lengths of the rows, as the formulas take them."""
        lengths = response_lengths(rows, self.length_scale, self.length_from)
        return rows.token_weights["reward"], rows.response_mask, lengths


def mean_factors(rows: RowGroup) -> Float[Tensor, "rows R"]:
    """Returns what multiplies each token's term in a mean over the response: a distribution, or factors over n."""
    weights = rows.token_weights["reward"]
    if not rows.factors:
        return weights
    return weights / rows.response_mask.sum(-1, keepdim=True).clamp(min=1).to(weights.dtype)


def split_pairs(rows: Float[Tensor, " rows"]) -> tuple[Float[Tensor, " pairs"], Float[Tensor, " pairs"]]:
    """Returns the chosen and the rejected half of a per-row tensor."""
    chosen, rejected = rows.chunk(2)
    return chosen, rejected


def by_side(name: str, rows: Float[Tensor, " rows"]) -> dict[str, Float[Tensor, " pairs"]]:
    """Returns the halves of a per-row tensor as NAME/chosen and NAME/rejected."""
    chosen, rejected = split_pairs(rows)
    return {f"{name}/chosen": chosen, f"{name}/rejected": rejected}


@runtime_checkable
class PreferenceObjective(Protocol):
    """Preference loss. ``requires`` names what the module must compute for it, and only that is computed.

    "reference": log-probabilities of a frozen reference. "token_weights": weights of any source; with "factors" those
    of a source of factors alone. "hidden", "vocab:NAME", "joint:NAME", "input_gradient": statistics of ``TokenStats``
    (joint ones need the reference's head). "group:NAME": further rows, scored with each micro-batch. "ahead:NAME": rows
    that are looked at before an optimiser step (``StepObjective``). "several_pairs": more than one pair per step.
    """

    @property
    def requires(self) -> frozenset[str]:
        """Returns names of the inputs the objective reads beyond the policy's log-probabilities."""

    def __call__(self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch) -> ObjectiveOutput:
        """Returns losses and detached rewards of the batch's pairs."""


@runtime_checkable
class StepObjective(PreferenceObjective, Protocol):
    """Objective with a number over the whole optimiser step, known before its first micro-batch is scored."""

    def sums(self, policy: TokenStats, reference: TokenStats | None, rows: RowGroup) -> dict[str, Float[Tensor, ""]]:
        """Sums over the rows of an "ahead" group; added up over the step and all ranks they are ``batch.state``."""


def log_ratios(
    policy_logps: Float[Tensor, "rows R"], reference_logps: Float[Tensor, "rows R"], mask: Bool[Tensor, "rows R"]
) -> Float[Tensor, "rows R"]:
    """Returns per-token ``d = log pi - log ref``, 0 off the response. Subtracted per token, before any sum."""
    difference = policy_logps - reference_logps.to(policy_logps.dtype)
    return torch.where(mask, difference, torch.zeros_like(difference))


def logps_of(reference: TokenStats | None, rows: str = "the batch") -> Float[Tensor, "rows R"]:
    """Returns the reference's log-probabilities.

    Raises:
        ValueError: no reference statistics were given.
    """
    if reference is None:
        raise ValueError(f"this objective compares with a reference, and none was computed for {rows}")
    return reference.logps
