"""Reasoning traces weighed apart: a trace has its share of the tokens as its mass, a source's weights are the answer's.

Of a response with t tokens of trace and n tokens of answer each token of the trace gets 1 / (t + n), and the answer's
share n / (t + n) in proportion to its own distribution. Uniform weights stay uniform.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from attnpo.schema import EncodedResponse, Kind, TokenWeights, UserError
from attnpo.text.traces import before
from attnpo.weights.base import OnlineSource, WeightSource, is_neutral
from attnpo.weights.postprocess import normalize


def check_apart(source: WeightSource) -> None:
    """Raises UserError for a source whose weights are no shares of a whole."""
    online = isinstance(source, OnlineSource) and not is_neutral(source)
    if online or source.signed or source.kind is not Kind.DISTRIBUTION:
        what = "computes its own in every step" if online else f"gives {'signed rows' if source.signed else 'factors'}"
        raise UserError(
            "data.columns.traces=weigh_apart shares the mass of a distribution between a reasoning trace and its "
            f"answer, and {type(source).__name__} {what}: set data.columns.traces=keep or strip, or take a source of "
            "distributions, such as weights=attention"
        )


def rows_with_trace(
    source: WeightSource, rows: Sequence[TokenWeights], encoded: EncodedResponse, begins: int
) -> tuple[list[TokenWeights], int]:
    """Returns the rounds of one response on the tokens of trace and answer, and how many of these are the trace's.

    ``begins``: the answer's first character; 0 when nothing is weighed apart. A judge has read the answer alone: the
    trace's training tokens, those that hold a character of it, are put in front with a weight of 0.
    """
    if not begins:
        return list(rows), 0
    check_apart(source)
    if source.tokens != "train":
        rows = [_prepended(row, encoded, begins) for row in rows]
    return list(rows), before(begins, rows[0].offsets.tolist())


def _prepended(row: TokenWeights, encoded: EncodedResponse, begins: int) -> TokenWeights:
    tokens = list(zip(encoded.response_ids, encoded.offsets, strict=True))[: before(begins, encoded.offsets)]
    held = [(token, place) for token, place in tokens if place[1] > place[0]]
    ids = torch.tensor([token for token, _ in held], dtype=torch.long)
    offsets = torch.tensor([place for _, place in held], dtype=torch.long).reshape(-1, 2)
    nothing = row.weights.new_zeros(row.weights.shape[0], len(held))
    return replace(
        row,
        token_ids=torch.cat([ids, row.token_ids]),
        offsets=torch.cat([offsets, row.offsets]),
        weights=torch.cat([nothing, row.weights], dim=1),
    )


def beside_trace(answer: Float[Tensor, " n"], trace: int) -> Float[Tensor, " m"]:
    """Returns the distribution of trace and answer: ``trace`` tokens at the mean, the answer's weights in the rest; sum
    1.
    """
    tokens = max(1, trace + answer.numel())
    return torch.cat([answer.new_full((trace,), 1 / tokens), normalize(answer) * (answer.numel() / tokens)])
