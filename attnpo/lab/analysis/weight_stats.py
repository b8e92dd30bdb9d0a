"""Statistics of token weights on training tokens: how concentrated, where, on which tokens.

The paper's appendix tables on weights (standard deviation, maximum, length), attention sinks (share of the first
tokens) and most-weighted tokens come from here. Shares and the effective number are those of |w| / sum |w|, so they
do not change with the scale of a row and also hold for factors and signed rows; ``mass``, ``max`` and ``std`` are of
the row as it is.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnpo.schema import UserError
from attnpo.weights.postprocess import effective_number, shares_of

SINK_TOKENS = 3  # the paper's sink table covers the first three tokens
TOP_SHARE = 0.1


@dataclass(frozen=True)
class ResponseStats:
    """Statistics of one weight row, or their means over many rows.

    ``tokens``: number of weights. ``length``: |y| as the source counts it. ``mass``: sum of the weights. ``effective``:
    effective number of weights, 1 / sum a^2. ``effective_share``: the same over ``tokens``; 1 for uniform weights.
    ``entropy``: in nats. ``std``: over the tokens of the row, ddof 0. ``top10_share``: share of the most weighted
    tenth of the tokens (rounded up). ``uniform``: the share of a token under uniform weights, 1 / tokens. ``sink``:
    shares of the first three tokens, 0 where there is none.
    """

    tokens: float
    length: float
    mass: float
    effective: float
    effective_share: float
    entropy: float
    max: float
    std: float
    top10_share: float
    uniform: float
    sink: tuple[float, float, float]

    @property
    def sink_share(self) -> float:
        """Share of the first three tokens together."""
        return sum(self.sink)


@dataclass(frozen=True)
class WeightSummary:
    """The ``mean`` of every statistic over ``responses`` responses."""

    responses: int
    mean: ResponseStats


def response_statistics(weights: Float[Tensor, " m"], length: float | int | None = None) -> ResponseStats:
    """Returns the statistics of one row of at least one weight; ``length`` is |y| (the number of weights by default).

    A row without mass has effective number, entropy and shares 0. UserError for an empty or non-finite row.
    """
    count = weights.numel()
    if count == 0:
        raise UserError("weight statistics: expected at least one weight, got an empty row; drop empty responses first")
    if not bool(torch.isfinite(weights).all()):
        bad = int((~torch.isfinite(weights)).sum())
        raise UserError(f"weight statistics: expected finite weights, got {bad} of {count} that are not")
    row, shares = weights.double(), shares_of(weights)
    first = [float(share) for share in shares[:SINK_TOKENS]] + [0.0] * SINK_TOKENS
    top = shares.topk(_tenth(count)).values
    effective = effective_number(weights)
    return ResponseStats(
        tokens=float(count),
        length=float(count if length is None else length),
        mass=float(row.sum()),
        effective=effective,
        effective_share=effective / count,
        entropy=abs(float(torch.special.entr(shares).sum())),  # abs: no minus zero for a single token
        max=float(row.max()),
        std=float(row.std(correction=0)),
        top10_share=float(top.sum()),
        uniform=1.0 / count,
        sink=(first[0], first[1], first[2]),
    )


def summarize(statistics: Sequence[ResponseStats]) -> WeightSummary:
    """Returns the mean of every statistic over responses, each response counting once. UserError for none."""
    if not statistics:
        raise UserError("weight statistics: expected at least one response, got none")
    scalars = [item.name for item in fields(ResponseStats) if item.name != "sink"]
    rows = [[*(getattr(one, name) for name in scalars), *one.sink] for one in statistics]
    *means, first, second, third = torch.tensor(rows, dtype=torch.float64).mean(dim=0).tolist()
    mean = ResponseStats(**dict(zip(scalars, means, strict=True)), sink=(first, second, third))
    return WeightSummary(len(statistics), mean)


def statistics_row(model: str, side: str, summary: WeightSummary) -> dict[str, str | float | int]:
    """Returns a row of the paper's statistics table (side, model, std, max, mean_length) with what goes beyond it.

    Every number is the mean over responses of the response's own: std over its tokens, its largest weight, its |y|.
    The paper does not spell this out; a maximum over all responses would be near 1, it prints 0.09 to 0.12.
    """
    mean = summary.mean
    return {
        "side": side,
        "model": model,
        "std": mean.std,
        "max": mean.max,
        "mean_length": mean.length,
        "effective": mean.effective,
        "effective_share": mean.effective_share,
        "entropy": mean.entropy,
        "top10_share": mean.top10_share,
        "mass": mean.mass,
        "responses": summary.responses,
    }


def sink_row(model: str, summary: WeightSummary) -> dict[str, str | float | int]:
    """Returns a row of the paper's sink table (model, percent of the mass on the first, second and third token).

    ``summary``: of rows before the sink rule, both sides of all pairs. Beyond the paper: ``uniform_percent``, what each
    of these tokens would get from uniform weights on responses of these lengths.
    """
    first, second, third = (100 * share for share in summary.mean.sink)
    return {
        "model": model,
        "first_token_percent": first,
        "second_token_percent": second,
        "third_token_percent": third,
        "uniform_percent": 100 * summary.mean.uniform,
    }


# ------------------------------------------------------------------------------------------------ tokens


@dataclass(frozen=True)
class WeightedRow:
    """The weights of one response on its training tokens; ``length`` makes them relative to uniform.

    It is |y| of a distribution, the number of tokens by default, and 1 of factors.
    """

    token_ids: Int[Tensor, " m"]
    weights: Float[Tensor, " m"]
    length: float | int | None = None


@dataclass(frozen=True)
class TokenMean:
    """A token id with its mean weight relative to uniform (w * |y|), its mean weight and its occurrences."""

    token_id: int
    relative: float
    weight: float
    count: int


def token_means(rows: Iterable[WeightedRow]) -> list[TokenMean]:
    """Returns every token id over all responses by its mean weight, the largest first, as in the paper's table of top
    tokens.

    A token of short answers ranks high there for that reason alone. Each occurrence counts once, and ties go to the
    smaller id. UserError when ids and weights of a row differ in number.
    """
    ids, weights, relative = _gather(rows)
    if ids.numel() == 0:
        return []
    tokens, group, counts = torch.unique(ids, return_inverse=True, return_counts=True)
    sums = torch.zeros(2, tokens.numel(), dtype=torch.float64)
    sums.index_add_(1, group, torch.stack([relative, weights]))
    columns = zip(tokens.tolist(), *(sums / counts).tolist(), counts.tolist(), strict=True)
    return sorted((TokenMean(*values) for values in columns), key=lambda one: (-one.weight, one.token_id))


def token_rows(means: Sequence[TokenMean], decode: Callable[[int], str]) -> list[dict[str, str | float | int]]:
    """Returns a row for each of ``means``, ranked in their order; ``decode`` gives the text of a token id."""
    return [
        {
            "rank": rank,
            "token": decode(one.token_id),
            "weight": one.weight,
            "relative": one.relative,
            "count": one.count,
        }
        for rank, one in enumerate(means, 1)
    ]


def _gather(rows: Iterable[WeightedRow]) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, weights and weights times |y| of all rows, end to end."""
    ids, weights, relative = [], [], []
    for number, row in enumerate(rows):
        if row.token_ids.numel() != row.weights.numel():
            raise UserError(
                f"token weights, row {number}: expected a weight per token, got {row.weights.numel()} weights for "
                f"{row.token_ids.numel()} tokens"
            )
        ids.append(row.token_ids.long())
        weights.append(row.weights.double())
        relative.append(row.weights.double() * (row.token_ids.numel() if row.length is None else row.length))
    if not ids:
        return torch.zeros(0, dtype=torch.long), torch.zeros(0), torch.zeros(0)
    return torch.cat(ids), torch.cat(weights), torch.cat(relative)


def _tenth(count: int) -> int:
    """Returns a tenth of ``count`` rounded up, in whole numbers: 0.1 * 30 is above 3 in floating point."""
    return -(-count // round(1 / TOP_SHARE))
