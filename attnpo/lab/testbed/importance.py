"""True importance as a weight source: weights on the tokens that determine a review's reward in the grammar."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from attnpo.lab.testbed.grammar import Grammar
from attnpo.schema import SIDES, EncodedResponse, PreferencePair, UserError
from attnpo.weights.base import TextSource


@dataclass(frozen=True)
class TrueImportance(TextSource):
    """Weight source that puts 1/k on each of the k tokens that overlap a decisive word, and 0 on all others.

    A response without decisive tokens gets equal weights on all tokens that contain text. As with uniform weights, the
    length |y| is the number of training tokens.
    """

    grammar: Grammar = field(default_factory=Grammar)

    name: ClassVar[str] = "true_importance"

    def capture_fingerprint(self) -> dict[str, object]:
        """Returns the grammar's identity; this source stores nothing."""
        return {"source": self.name, "grammar": self.grammar.digest()}

    def weigh(self, pair: PreferencePair, side: str, encoded: EncodedResponse) -> Float[Tensor, " m"]:
        """Returns one weight per training token, float32.

        Raises:
            UserError: the prompt does not belong to the grammar.
        """
        places = encoded.offsets
        marks = mark_decisive_tokens(pair, side, places, self.grammar)
        chosen = marks if any(marks) else [start < end for start, end in places]
        if not any(chosen):  # only the end of the turn
            chosen = [True] * len(places)
        row = torch.tensor(chosen, dtype=torch.float32)
        return row / row.sum().clamp(min=1)


def mark_decisive_tokens(
    pair: PreferencePair, side: str, places: Sequence[tuple[int, int]], grammar: Grammar
) -> list[bool]:
    """Marks the tokens, given as character spans, that overlap a word which determines the true reward.

    Raises:
        UserError: the pair's prompt does not belong to the grammar.
    """
    spans = grammar.importance(pair.response(side), _find_topic(pair, grammar))
    return [any(start < stop and begin < end for begin, stop in spans) for start, end in places]


def is_flipped(pair: PreferencePair, grammar: Grammar) -> bool:
    """Returns whether the rejected response has the higher true reward; errors as in ``mark_decisive_tokens``."""
    topic = _find_topic(pair, grammar)
    chosen, rejected = (grammar.true_reward(pair.response(side), topic).reward for side in SIDES)
    return chosen < rejected


def _find_topic(pair: PreferencePair, grammar: Grammar) -> str:
    if [turn["role"] for turn in pair.prompt] == ["user"]:
        try:
            return grammar.parse_prompt(pair.prompt[0]["content"]).topic
        except ValueError:
            pass
    raise UserError(
        f"pair {pair.pair_id}: true importance is known only for prompts of the testbed, got "
        f"{pair.prompt[-1]['content'][:60]!r}: for other data, use other weights and set truth=null"
    )
