"""Part scores by forced decoding, as a component: the grammar splits the review, the model scores the parts.

The base never learns to copy a part back, so free decoding would measure copying.
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
    """Makes the generator that feeds a review's clauses and reads their scores, ``batch_size`` reviews at a time."""

    grammar: Grammar = field(default_factory=Grammar)
    batch_size: int = 256

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise UserError(f"verbalizer.known_parts.batch_size must be at least 1, got {self.batch_size}")

    def fingerprint(self) -> dict[str, object]:
        """Returns the identity of the grammar, which says where the parts are."""
        return {"grammar": self.grammar.digest()}

    def generator(self, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerFast") -> "Generator":
        """Returns the generator."""
        from attnpo.lab.testbed.forced_scores import ForcedScores

        return ForcedScores(model, tokenizer, self.grammar, self.batch_size)
