"""Arithmetic on raw weight rows: combining rounds, normalising, and correcting the attention sink (as in the paper).

All functions work on distributions; factors and signed rows are never passed to them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import isfinite

import torch
from jaxtyping import Float
from torch import Tensor

from attnpo.schema import Kind, UserError, check_at_least


class RoundOrder(Enum):
    """Order of averaging and normalising when combining the two judge rounds.

    The paper's text averages the raw rows and normalises the mean; the authors' code normalises each round first. The
    results differ if the rounds put different mass on the response.
    """

    MEAN_THEN_NORMALIZE = "mean_then_normalize"
    NORMALIZE_THEN_MEAN = "normalize_then_mean"


class EndToken(Enum):
    """Weight of training tokens that contain no response text (end of turn): 0 or 1/|y|."""

    ZERO = "zero"
    MEAN = "mean"


def normalize(weights: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Divides ``weights`` by their sum; returns uniform weights if the sum is 0."""
    if is_flat(weights):
        return torch.full_like(weights, 1.0 / max(1, weights.numel()))
    scaled = weights / weights.max()  # by the maximum first, so that the sum neither overflows nor is subnormal
    return scaled / scaled.sum()


def is_flat(row: Float[Tensor, " n"]) -> bool:
    """Returns whether a raw row becomes uniform because it has no mass on the response (or the mass underflowed)."""
    return float(row.sum()) == 0


def average_rounds(rounds: Sequence[Float[Tensor, " n"]]) -> Float[Tensor, " n"]:
    """Averages the rows of all rounds token by token."""
    return torch.stack(list(rounds)).mean(dim=0)


def combine_rounds(rounds: Sequence[Float[Tensor, " n"]], order: RoundOrder) -> Float[Tensor, " n"]:
    """Combines the raw rows of all rounds into one distribution, in the given order of averaging and normalising."""
    if order is RoundOrder.NORMALIZE_THEN_MEAN:
        return average_rounds([normalize(row) for row in rounds])
    return normalize(average_rounds(rounds))


def fix_sink(weights: Float[Tensor, " n"], first: int = 1, min_length: int = 5) -> Float[Tensor, " n"]:
    """Sets each of the first ``first`` weights to the mean weight and rescales the others to preserve the total.

    The mean weight is total / |y|, that is, 1/|y| for a distribution. Rows shorter than ``min_length`` are not changed
    (the paper uses K = 1, K' = 5). Differs from the authors' code if the other weights are all 0: here they share the
    remaining mass equally, whereas the authors' code divides by zero.
    """
    count = weights.numel()
    if first <= 0 or count < min_length:
        return weights
    first = min(first, count)
    total, rest = weights.sum(), weights[first:].sum()
    mean = total / max(1, count)
    remaining = mean * (count - first)
    tail = weights[first:] / rest * remaining if rest > 0 else mean.expand(count - first)
    return torch.cat([mean.expand(first), tail])


@dataclass(frozen=True)
class Postprocess:
    """Rules for converting the raw rows of a response into its distribution.

    ``sink_tokens`` is K, and 0 leaves the sink unchanged; ``sink_min_length`` is K'. ``end_token`` is applied after
    alignment.
    """

    round_order: RoundOrder = RoundOrder.MEAN_THEN_NORMALIZE
    sink_tokens: int = 1
    sink_min_length: int = 5
    end_token: EndToken = EndToken.ZERO

    def __post_init__(self) -> None:
        check_at_least("weights.postprocess", 0, sink_tokens=self.sink_tokens)
        check_at_least("weights.postprocess", 1, sink_min_length=self.sink_min_length)

    def __call__(self, rows: Sequence[Float[Tensor, " n"]], where: str = "weights") -> Float[Tensor, " n"]:
        """Returns the distribution (sum 1) of one response from its raw rows, one per round.

        Error messages start with ``where``, e.g. "pair 3f2a, chosen". UserError if there are no rows or no tokens, or
        if a weight is negative or not finite.
        """
        if not rows or rows[0].numel() == 0:
            raise UserError(f"{where}: expected at least one round with at least one token, got none; drop the pair")
        for row in rows:
            check_finite(row, where)
            least = float(row.min())
            if least < 0:
                raise UserError(f"{where}: expected weights of at least 0, got {least:g}; signed rows cannot "
                                "become a distribution: set weights.postprocess=null")  # fmt: skip
        return fix_sink(combine_rounds(rows, self.round_order), self.sink_tokens, self.sink_min_length)


def has_flat_rounds(rows: Sequence[Float[Tensor, " n"]], order: RoundOrder) -> bool:
    """Returns whether ``combine_rounds`` replaces rows without mass with uniform weights.

    With ``mean_then_normalize`` this requires that all rounds are flat; with ``normalize_then_mean`` one flat round is
    enough.
    """
    flat = [is_flat(row) for row in rows]
    return any(flat) if order is RoundOrder.NORMALIZE_THEN_MEAN else all(flat)


def check_finite(row: Float[Tensor, " n"], where: str) -> None:
    """Raises UserError naming ``where`` and the first token whose weight is NaN or infinite."""
    if isfinite(float(row.sum())):  # an overflowing sum is checked below
        return
    broken = (~torch.isfinite(row)).nonzero()
    if broken.numel():
        place = int(broken[0, 0])
        raise UserError(
            f"{where}: expected finite weights, got {float(row[place])} at token {place} of {row.numel()}; rerun the "
            "judge (with judge.dtype=float32 if values overflow) or drop the pair"
        )


def check_is_distribution(kind: Kind, signed: bool) -> None:
    """Raises UserError if rows of this kind must not be post-processed as a distribution."""
    if kind is not Kind.DISTRIBUTION or signed:
        what = "signed weights" if signed else f"weights of kind {kind.value}"
        raise UserError(
            f"weights.postprocess: expected a source of non-negative distributions, got {what}; averaging, "
            "normalising and the sink rule would change what the weights mean: set weights.postprocess=null"
        )


def effective_token_count(weights: Float[Tensor, " m"]) -> float:
    """Returns the effective number of weighted tokens, 1 / sum a^2 with a = |w| / sum |w|.

    It is m for m uniform weights, 1 for a single token, 0 for a row without mass.
    """
    shares = absolute_shares(weights)
    square = float(shares.square().sum())
    return 1.0 / square if square > 0 else 0.0


def absolute_shares(weights: Float[Tensor, " m"]) -> Float[Tensor, " m"]:
    """Returns |w| / sum |w| in float64; zeros for a row without mass."""
    size = weights.double().abs()
    total = size.sum()
    return size / total if float(total) > 0 else torch.zeros_like(size)
