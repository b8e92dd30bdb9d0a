"""A run's first training pairs with their weights, for pages and heat maps."""

from collections.abc import Mapping

from transformers import PreTrainedTokenizerBase

from attnpo.data.arrow_rows import pairs_of
from attnpo.display.weighed_pair import WeighedPair, pair_with_weights
from attnpo.run.inputs import Inputs
from attnpo.weights.base import OnlineSource
from attnpo.weights.capture import LogpPair


def heat_rows(
    inputs: Inputs, tokenizer: PreTrainedTokenizerBase, count: int, policy: Mapping[str, LogpPair] | None = None
) -> list[WeighedPair]:
    """Returns the first ``count`` training pairs with their weights, and the judge's verdicts where it was asked.

    None where training computes the weights. ``policy``: log-probabilities of pairs' tokens after training, by id.
    """
    if isinstance(inputs.weighed.source, OnlineSource):
        return []
    examples = inputs.examples["train"].examples[:count]
    pairs = pairs_of(inputs.pairs["train"].pairs, [example.pair_id for example in examples])
    rows = []
    for example in examples:
        known = {"logp": (policy or {}).get(example.pair_id), "reference_logp": example.reference_logps}
        scores = [{name: both[side] for name, both in known.items() if both is not None} for side in range(2)]
        captured = inputs.weighed.captured.get(example.pair_id)
        pair = pairs[example.pair_id]
        rows.append(pair_with_weights(pair, example, lambda token: str(tokenizer.decode([token])), captured, scores))
    return rows
