"""Answers by ``generate`` of transformers on this machine, in left-padded batches."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from attnpo.evaluation.answers.base import LENGTH, STOP, Answerer, Asked, Reply
from attnpo.models.spec import BATCH_SIZE, TOKEN_BUDGET, ModelSpec
from attnpo.schema import BOOKKEEPING, Sampling, check_least
from attnpo.text.chat import ChatFormat

if TYPE_CHECKING:
    from attnpo.models.generate import HFGenerator


@dataclass(frozen=True)
class HFAnswering:
    """A model folder, or a hub name, that answers on this machine.

    A batch has at most ``batch_size`` prompts and ``token_budget`` tokens (padded prompts and room for answers);
    neither changes a draw. Prompt and answer have at most ``max_length`` tokens (None: the positions of the model).
    """

    batch_size: int = field(default=BATCH_SIZE, metadata=BOOKKEEPING)
    token_budget: int = field(default=TOKEN_BUDGET, metadata=BOOKKEEPING)
    max_length: int | None = None

    def __post_init__(self) -> None:
        check_least("answering", 1, **asdict(self))

    def open(self, model: ModelSpec, device: torch.device) -> Answerer:
        """Reads config and tokenizer; the weights are loaded onto ``device`` with the first answer."""
        from attnpo.evaluation.answers.answering import described
        from attnpo.models.generate import longest_sequence

        spec, chat = described(model)
        limit = longest_sequence(spec.path, spec.revision, "answering.max_length", self.max_length)
        return LocalAnswerer(self, spec, chat, limit, device)


class LocalAnswerer:
    """A model on this machine, loaded when it is first asked."""

    def __init__(
        self, settings: HFAnswering, model: ModelSpec, chat: ChatFormat, limit: int | None, device: torch.device
    ) -> None:
        self.settings, self.model, self.chat, self.limit, self.device = settings, model, chat, limit, device

    @property
    def counted_by(self) -> str:
        """Returns the model, whose tokenizer counts."""
        return self.model.path

    def key(self) -> dict[str, object]:
        """Weights, ends of answers, number format, attention kernel, chat format."""
        from attnpo.models.generate import ends_of_folder
        from attnpo.models.loading import attention_of, weights_fingerprint

        model = self.model
        return {
            "model": {**weights_fingerprint(model.path, model.revision), **ends_of_folder(model.path)},
            "model.dtype": model.dtype,
            "model.attn_implementation": attention_of(model.path, model.revision, model.attn_implementation),
            "chat": self.chat.fingerprint(),
        }

    @cached_property
    def _generator(self) -> "HFGenerator":
        from attnpo.models.generate import chat_generator
        from attnpo.models.loading import load_model

        model = self.model
        loaded = load_model(
            model.path, dtype=model.dtype, attn_implementation=model.attn_implementation, revision=model.revision
        )
        loaded.to(self.device)  # type: ignore[arg-type]
        return chat_generator(loaded, self.chat, self.settings.batch_size, self.settings.token_budget)

    def answer(self, asked: Sequence[Asked], sampling: Sampling) -> Iterator[Mapping[int, Reply]]:
        """Replies batch by batch, the longest prompts first."""
        from attnpo.models.generate import Request

        if not asked:
            return
        requests = [Request(one.ids, one.draw) for one in asked]
        for batch in self._generator.batches(requests, sampling):
            answers = self._generator.answer([requests[index] for index in batch], sampling)
            yield {
                index: Reply(answer.text, answer.tokens, STOP if answer.ended else LENGTH)
                for index, answer in zip(batch, answers, strict=True)
            }
