"""True importance as a weight source: the tokens that decide a review's reward, known from the grammar."""

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
    """1/k on the k training tokens that hold a decisive character of the response, 0 on all others.

    A response without any decisive token gets equal weights on the tokens that hold its characters. |y| is the number
    of training tokens, as with uniform weights.
    """

    grammar: Grammar = field(default_factory=Grammar)

    name: ClassVar[str] = "true_importance"

    def capture_fingerprint(self) -> dict[str, object]:
        """Returns the grammar's identity; nothing is stored under it."""
        return {"source": self.name, "grammar": self.grammar.digest()}

    def weigh(self, pair: PreferencePair, side: str, encoded: EncodedResponse) -> Float[Tensor, " m"]:
        """Returns a weight per training token, float32. UserError for a prompt that is not of the grammar."""
        places = encoded.offsets
        marks = decisive(pair, side, places, self.grammar)
        chosen = marks if any(marks) else [start < end for start, end in places]
        if not any(chosen):  # nothing but the end of the turn
            chosen = [True] * len(places)
        row = torch.tensor(chosen, dtype=torch.float32)
        return row / row.sum().clamp(min=1)


def decisive(pair: PreferencePair, side: str, places: Sequence[tuple[int, int]], grammar: Grammar) -> list[bool]:
    """Returns whether each token, given by its characters, holds one that decides the true reward.

    UserError naming the pair whose prompt is not one question of the grammar.
    """
    spans = grammar.importance(pair.response(side), _topic(pair, grammar))
    return [any(start < stop and begin < end for begin, stop in spans) for start, end in places]


def is_flipped(pair: PreferencePair, grammar: Grammar) -> bool:
    """Returns whether the rejected response is truly the better one. UserError as for ``decisive``."""
    topic = _topic(pair, grammar)
    chosen, rejected = (grammar.true_reward(pair.response(side), topic).reward for side in SIDES)
    return chosen < rejected


def _topic(pair: PreferencePair, grammar: Grammar) -> str:
    if [turn["role"] for turn in pair.prompt] == ["user"]:
        try:
            return grammar.parse_prompt(pair.prompt[0]["content"]).topic
        except ValueError:
            pass
    raise UserError(
        f"pair {pair.pair_id}: true importance is known for the testbed's own prompts alone, got "
        f"{pair.prompt[-1]['content'][:60]!r}: for this data choose weights other than true_importance, and truth=null"
    )
