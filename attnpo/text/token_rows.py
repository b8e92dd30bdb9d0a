"""Token ids that a model has embeddings for, and the refusal of texts with others."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from attnpo.text.refusals import RefusedText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


class TokenWithoutRow(RefusedText):
    """Refusal of a text with a token that the model has no embedding for."""


class TokenRows:
    """Token ids that a model has embeddings for: those below ``count``, or all where it is None.

    Logs a warning where the padding token is outside.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", count: int | None) -> None:
        self._tokenizer, self.count = tokenizer, count
        pad = tokenizer.pad_token_id
        if pad is not None and self.is_outside(pad):
            log.warning(
                "the padding token %r of %r has the id %d, and the model has %d token embeddings: rows are padded with "
                "the id %d instead, which changes no number",
                tokenizer.pad_token,
                tokenizer.name_or_path,
                pad,
                count,
                self.pad_id,
            )

    @property
    def pad_id(self) -> int:
        """Returns the id for padding positions: the tokenizer's, or where that is outside EOS's, or 0."""
        known = (self._tokenizer.pad_token_id or 0, self._tokenizer.eos_token_id, 0)
        return next(index for index in known if index is not None and not self.is_outside(index))

    def is_outside(self, token: int) -> bool:
        """Tells whether the model has no embedding for a token."""
        return self.count is not None and token >= self.count

    def require(self, ids: Sequence[int]) -> None:
        """Raises TokenWithoutRow where one of ``ids`` is outside."""
        last = max(ids, default=0)
        if self.is_outside(last):
            raise TokenWithoutRow(
                "a token that the model has no embedding for",
                f"the token {self._tokenizer.convert_ids_to_tokens(last)!r} of {self._tokenizer.name_or_path!r} has "
                f"the id {last}, and the model has {self.count} token embeddings (vocab_size in its config.json): take "
                "it out of the chat template (model.chat_template gives another) or of the text, or give a model whose "
                "embeddings were resized to its tokenizer (resize_token_embeddings)",
            )
