"""A run's training pairs as rows of a heat map."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from attnpo.data.arrow_rows import pairs_of
from attnpo.display.heat import HeatRow, heat_row
from attnpo.run.inputs import Inputs
from attnpo.weights.base import OnlineSource

Logps = Sequence[tuple[Sequence[float], Sequence[float]]]  # of pairs, chosen and rejected, a number per token


def heat_rows(inputs: Inputs, tokenizer: PreTrainedTokenizerBase, count: int, policy: Logps = ()) -> list[HeatRow]:
    """Returns the first ``count`` training pairs with their weights, and the judge's rounds and verdicts where it was
    asked.

    None where training computes the weights. ``policy``: log-probabilities of these pairs' tokens after training.
    """
    if isinstance(inputs.weighed.source, OnlineSource):
        return []
    examples = inputs.examples["train"].examples[:count]
    pairs = pairs_of(inputs.pairs["train"].pairs, [example.pair_id for example in examples])
    captured = inputs.weighed.captured
    return [
        heat_row(
            pairs[example.pair_id],
            example.sides,
            example.weights,
            lambda token: str(tokenizer.decode([token])),
            lengths=example.scales,
            coverage=example.coverage,
            source_coverage=example.source_coverage,
            kept_mass=example.kept_mass,
            rounds=captured[example.pair_id].rounds if example.pair_id in captured else (),
            layers=[str(layer) for layer in inputs.weighed.layers] if inputs.weighed.depth else (),
            logps=[
                (policy[place][side] if policy else None, None if known is None else known[side].tolist())
                for side in range(2)
            ],
        )
        for place, example in enumerate(examples)
        for known in [example.reference_logps]
    ]
