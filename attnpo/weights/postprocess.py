"""Pure arithmetic on raw weight rows: rounds, normalisation, attention sink (the paper: its weights and its sink rule).

Everything here is about distributions; factors and signed rows never come this way.
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
    """Order of averaging and normalising when the two judge rounds are combined.

    The paper's text averages the raw rows and normalises the mean; the authors' code normalises each round first.
    They differ whenever the rounds put different mass on the response.
    """

    MEAN_THEN_NORMALIZE = "mean_then_normalize"
    NORMALIZE_THEN_MEAN = "normalize_then_mean"


class EndToken(Enum):
    """Weight of training tokens without a character of the response (end of turn): 0, or 1/|y|."""

    ZERO = "zero"
    MEAN = "mean"


def normalize(weights: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Returns ``weights`` divided by their sum; uniform when the sum is 0."""
    if is_flat(weights):
        return torch.full_like(weights, 1.0 / max(1, weights.numel()))
    scaled = weights / weights.max()  # first by the largest: neither a huge nor a subnormal sum can spoil the quotient
    return scaled / scaled.sum()


def is_flat(row: Float[Tensor, " n"]) -> bool:
    """Returns whether a raw row has no mass on the response (or underflowed to none): it becomes uniform."""
    return float(row.sum()) == 0


def average_rounds(rounds: Sequence[Float[Tensor, " n"]]) -> Float[Tensor, " n"]:
    """Returns the mean of the rows of all rounds, token by token."""
    return torch.stack(list(rounds)).mean(dim=0)


def combine(rounds: Sequence[Float[Tensor, " n"]], order: RoundOrder) -> Float[Tensor, " n"]:
    """Returns one distribution out of the raw rows of all rounds, in the given order of averaging and normalising."""
    if order is RoundOrder.NORMALIZE_THEN_MEAN:
        return average_rounds([normalize(row) for row in rounds])
    return normalize(average_rounds(rounds))


def fix_sink(weights: Float[Tensor, " n"], first: int = 1, min_length: int = 5) -> Float[Tensor, " n"]:
    """Returns ``weights`` with the first ``first`` of them set to the mean and the others rescaled; the total is kept.

    Rows shorter than ``min_length`` stay as they are (the paper: K = 1, K' = 5).
    Differs from the authors' code when the other weights are all 0: they then share the remaining mass equally,
    because the code divides by zero there.
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
    """Rules by which the raw rows of a response become its distribution.

    ``sink_tokens`` (K) 0 keeps the sink; ``sink_min_length`` is K'. ``end_token`` is applied after alignment.
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

        ``where`` opens the error message, e.g. "pair 3f2a, chosen". UserError for no row, no token, or a weight
        that is negative or not finite.
        """
        if not rows or rows[0].numel() == 0:
            raise UserError(f"{where}: expected at least one round with at least one token, got none; drop the pair")
        for row in rows:
            check_finite(row, where)
            least = float(row.min())
            if least < 0:
                raise UserError(f"{where}: expected weights of 0 or more, got {least:g}; signed rows cannot "
                                "be made a distribution, use them with weights.postprocess=null")  # fmt: skip
        return fix_sink(combine(rows, self.round_order), self.sink_tokens, self.sink_min_length)


def flat_rounds(rows: Sequence[Float[Tensor, " n"]], order: RoundOrder) -> bool:
    """Returns whether ``combine`` puts uniform weights in the place of rows without mass.

    Under ``mean_then_normalize`` that takes all rounds, a flat one counts for nothing beside another; under
    ``normalize_then_mean`` one flat round is enough.
    """
    flat = [is_flat(row) for row in rows]
    return any(flat) if order is RoundOrder.NORMALIZE_THEN_MEAN else all(flat)


def check_finite(row: Float[Tensor, " n"], where: str) -> None:
    """Raises UserError naming ``where`` and the first token whose weight is NaN or infinite."""
    if isfinite(float(row.sum())):  # a sum that overflows is looked into
        return
    broken = (~torch.isfinite(row)).nonzero()
    if broken.numel():
        place = int(broken[0, 0])
        raise UserError(
            f"{where}: expected finite weights, got {float(row[place])} at token {place} of {row.numel()}; judge the "
            "pair again (judge.dtype=float32 if the numbers overflow) or drop it"
        )


def require_distribution(kind: Kind, signed: bool) -> None:
    """Raises UserError when rows of this kind must not be post-processed as a distribution."""
    if kind is not Kind.DISTRIBUTION or signed:
        what = "signed weights" if signed else f"weights of kind {kind.value}"
        raise UserError(
            f"weights.postprocess: expected a source of non-negative distributions, got {what}; averaging, "
            "normalising and the sink rule would change their meaning, set weights.postprocess=null"
        )


def effective_number(weights: Float[Tensor, " m"]) -> float:
    """Returns 1 / sum a^2 with a = |w| / sum |w|.

    That is m for uniform weights, 1 for a single token, 0 for a row without mass.
    """
    shares = shares_of(weights)
    square = float(shares.square().sum())
    return 1.0 / square if square > 0 else 0.0


def shares_of(weights: Float[Tensor, " m"]) -> Float[Tensor, " m"]:
    """Returns |w| / sum |w| in float64; zeros for a row without mass."""
    size = weights.double().abs()
    total = size.sum()
    return size / total if float(total) > 0 else torch.zeros_like(size)
