"""Component that scores a review by forced decoding: the grammar splits it into parts, and the model scores them.

The base is not trained to copy parts, so free decoding would measure its ability to copy.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from attnpo.lab.testbed.grammar import Grammar
from attnpo.schema import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from attnpo.schema import Generator


@dataclass(frozen=True)
class KnownParts:
    """Component that scores a review's clauses by forced decoding, ``batch_size`` reviews at a time."""

    grammar: Grammar = field(default_factory=Grammar)
    batch_size: int = 256

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise UserError(f"verbalizer.known_parts.batch_size must be at least 1, got {self.batch_size}")

    def fingerprint(self) -> dict[str, object]:
        """Returns the identity of the grammar, which determines the parts."""
        return {"grammar": self.grammar.digest()}

    def make_generator(self, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerFast") -> "Generator":
        """Builds the generator for forced decoding."""
        from attnpo.lab.testbed.forced_scores import ForcedScores

        return ForcedScores(model, tokenizer, self.grammar, self.batch_size)
