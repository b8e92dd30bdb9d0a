"""Statistics of token weights on training tokens: how concentrated, where, on which tokens.

The paper's appendix tables on weights (standard deviation, maximum, length), attention sinks (share of the first
tokens) and most-weighted tokens come from here. Shares and the effective number are those of |w| / sum |w|, so they
do not change with the scale of a row and also hold for factors and signed rows; ``mass``, ``max`` and ``std`` are of
the row as it is.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from attnpo.schema import UserError
from attnpo.weights.postprocess import effective_number, shares_of

if TYPE_CHECKING:
    import pandas

SINK = ("first", "second", "third")  # the tokens of the paper's sink table
TOP_SHARE = 0.1


def response_statistics(weights: Float[Tensor, " m"], length: float | int | None = None) -> dict[str, float]:
    """Returns the statistics of one row of at least one weight.

    ``std``: over the tokens of the row, ddof 0. ``mean_length``: ``length``, which is |y| as the source counts it (the
    number of weights by default). ``effective``: effective number of weights, 1 / sum a^2. ``effective_share``: the
    same over the number of weights; 1 for uniform ones. ``entropy``: in nats. ``top10_share``: share of the most
    weighted tenth of the tokens (rounded up). ``mass``: sum of the weights. ``uniform``: the share of a token under
    uniform weights. ``first``, ``second``, ``third``: shares of these tokens, 0 where there is none.

    A row without mass has effective number, entropy and shares 0. UserError for an empty or non-finite row.
    """
    count = weights.numel()
    if count == 0:
        raise UserError("weight statistics: expected at least one weight, got an empty row; drop empty responses first")
    if not bool(torch.isfinite(weights).all()):
        bad = int((~torch.isfinite(weights)).sum())
        raise UserError(f"weight statistics: expected finite weights, got {bad} of {count} that are not")
    row, shares, effective = weights.double(), shares_of(weights), effective_number(weights)
    tenth = -(-count // round(1 / TOP_SHARE))  # in whole numbers: 0.1 * 30 is above 3 in floating point
    return {
        "std": float(row.std(correction=0)),
        "max": float(row.max()),
        "mean_length": float(count if length is None else length),
        "effective": effective,
        "effective_share": effective / count,
        "entropy": abs(float(torch.special.entr(shares).sum())),  # abs: no minus zero for a single token
        "top10_share": float(shares.topk(tenth).values.sum()),
        "mass": float(row.sum()),
        "uniform": 1.0 / count,
        **dict(zip(SINK, [*shares[: len(SINK)].tolist(), 0.0, 0.0, 0.0], strict=False)),
    }


def summarize(statistics: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Returns the mean of every statistic over responses, each counting once, and their number ``responses``.

    UserError for none.
    """
    rows = list(statistics)
    if not rows:
        raise UserError("weight statistics: expected at least one response, got none")
    means = torch.tensor([[*one.values()] for one in rows], dtype=torch.float64).mean(dim=0).tolist()
    return {**dict(zip(rows[0], means, strict=True)), "responses": len(rows)}


def statistics_row(model: str, side: str, summary: Mapping[str, float]) -> dict[str, str | float | int]:
    """Returns a row of the paper's statistics table (side, model, std, max, mean_length) with what goes beyond it.

    Every number is the mean over responses of the response's own: std over its tokens, its largest weight, its |y|.
    The paper does not spell this out; a maximum over all responses would be near 1, it prints 0.09 to 0.12.
    """
    numbers = {name: value for name, value in summary.items() if name not in ("uniform", *SINK)}
    return {"side": side, "model": model, **numbers}


def sink_row(model: str, summary: Mapping[str, float]) -> dict[str, str | float | int]:
    """Returns a row of the paper's sink table (model, percent of the mass on the first, second and third token).

    ``summary``: of rows before the sink rule, both sides of all pairs. Beyond the paper: ``uniform_percent``, what each
    of these tokens would get from uniform weights on responses of these lengths.
    """
    percents = {f"{place}_token_percent": 100 * summary[place] for place in SINK}
    return {"model": model, **percents, "uniform_percent": 100 * summary["uniform"]}


# ------------------------------------------------------------------------------------------------ tokens


def token_means(
    ids: Sequence[Sequence[int]], weights: Sequence[Float[Tensor, " _"]], lengths: Sequence[float | int]
) -> "pandas.DataFrame":
    """Returns every token id over all responses by its mean weight, the largest first, as in the paper's table of top
    tokens.

    A token of short answers ranks high there for that reason alone: ``relative`` is the mean of the weight times
    ``lengths``, |y| of a distribution and 1 of factors. Each occurrence counts once, and ties go to the smaller id.
    """
    import pandas

    frame = pandas.DataFrame(
        {
            "id": np.concatenate([np.zeros(0, dtype=np.int64), *ids]),
            "weight": torch.cat([torch.zeros(0), *weights]).double().numpy(),
            "length": np.repeat(np.array(lengths, dtype=float), np.array([len(of) for of in ids], dtype=int)),
        }
    )
    frame["relative"] = frame["weight"] * frame["length"]
    means = frame.groupby("id").agg(weight=("weight", "mean"), relative=("relative", "mean"), count=("weight", "size"))
    return means.sort_values("weight", ascending=False, kind="stable")


def token_rows(means: "pandas.DataFrame", decode: Callable[[int], str]) -> list[dict[str, str | float | int]]:
    """Returns a row for each of ``means``, ranked in their order; ``decode`` gives the text of a token id."""
    rows = means.to_dict("index").items()
    return [{"rank": rank, "token": decode(token), **row} for rank, (token, row) in enumerate(rows, 1)]
