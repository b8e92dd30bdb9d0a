"""A run's training pairs as rows of a heat map."""

from attnpo.display.heat import HeatRow, heat_row
from attnpo.runs.inputs import Inputs
from attnpo.weights.base import OnlineSource


def heat_rows(inputs: Inputs, count: int) -> list[HeatRow]:
    """The first ``count`` training pairs with their weights, and the judge's verdicts where it was asked.

    None where training computes the weights.
    """
    if isinstance(inputs.weighed.source, OnlineSource):
        return []
    pairs = {pair.pair_id: pair for pair in inputs.pairs["train"].pairs}
    tokenizer, captured = inputs.context.tokenizer, inputs.weighed.captured
    return [
        heat_row(
            pairs[example.pair_id],
            example.sides,
            example.weights,
            lambda token: str(tokenizer.decode([token])),
            lengths=example.scales,
            coverage=example.coverage,
            rounds=captured[example.pair_id].rounds if example.pair_id in captured else (),
        )
        for example in inputs.examples["train"].examples[:count]
    ]
