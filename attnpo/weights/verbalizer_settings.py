"""Settings of a verbalizer: the model that scores the parts of responses, and its prompts. No model is loaded here."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from attnpo.config.named_files import find_file
from attnpo.judge.prompts import question_text, read_text_file
from attnpo.models.spec import DTYPES
from attnpo.schema import (
    BOOKKEEPING,
    Generator,
    Message,
    PreferencePair,
    Sampling,
    UserError,
    check_at_least,
    check_choice,
    digest,
)
from attnpo.text.chat import ChatFormat, RefusedText
from attnpo.text.traces import judged_text, weighted_start

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SLOTS = ("question", "answer")


@dataclass(frozen=True)
class ScoreTemplate:
    """User message with {question} and {answer}, each exactly once, and an optional system message."""

    user: str
    system: str | None = None

    def __post_init__(self) -> None:
        slots = re.findall(r"\{(question|answer)\}", self.user)
        if sorted(slots) != sorted(SLOTS):
            raise UserError(
                "verbalizer.template_file: expected the placeholders {question} and {answer}, each exactly once; found "
                + (", ".join("{" + name + "}" for name in slots) or "none")
            )

    @classmethod
    def from_files(cls, user: str | Path, system: str | Path | None = None) -> "ScoreTemplate":
        """Reads the template from UTF-8 text files, unchanged. Raises UserError if one cannot be read."""
        return cls(
            read_text_file(user, "verbalizer.template_file"),
            None if system is None else read_text_file(system, "verbalizer.system_file"),
        )

    def messages(self, question: str, answer: str) -> list[Message]:
        """Returns the chat prompt; both texts are inserted in one pass, so placeholders inside them stay unchanged."""
        values = {"question": question, "answer": answer}
        user = re.sub(r"\{(question|answer)\}", lambda slot: values[slot[1]], self.user)
        turns = [] if self.system is None else [Message(role="system", content=self.system)]
        return [*turns, Message(role="user", content=user)]


class ScorePromptBuilder:
    """Builds prompts that ask for scores for one response. Nothing is truncated; a prompt that is too long is rejected.

    Args:
        template: the prompt template.
        asked: the chat format of the scoring model.
        trained: the chat format of training. Scores are assigned to its tokens, so each training token gets its score
            without alignment, regardless of the scoring model.
        room: maximum number of tokens in a prompt; None for no limit.

    Raises UserError if the template has a system message and the model's chat template accepts none.
    """

    def __init__(
        self, template: ScoreTemplate, asked: ChatFormat, trained: ChatFormat, room: int | None = None
    ) -> None:
        self.template, self.asked, self.trained, self.room = template, asked, trained, room
        try:
            asked.prompt_ids(template.messages("a", "a"))
        except RefusedText as problem:
            raise UserError(
                f"the verbalizer's chat template rejects its prompt ({problem}); if it does not support system "
                "messages, set verbalizer.system_file=null and put the instructions into verbalizer.template_file"
            ) from problem

    def build_prompt(self, pair: PreferencePair, side: str) -> list[Message]:
        """Returns the chat prompt for one response.

        Raises RefusedText if the prompt is too long for the model, if its text cannot be encoded, or if the response
        has no text to score.
        """
        messages = self.messages(pair, side)
        if not judged_text(pair, side).strip():
            raise RefusedText(f"the {side} response has no text to score", f"the {side} response has no text to score")
        count = len(self.asked.prompt_ids(messages))
        if self.room is not None and count > self.room:
            raise RefusedText(
                "a prompt is too long for the verbalizer",
                f"the prompt for the {side} response has {count} tokens, but must have at most {self.room} to leave "
                "room for the answer: lower verbalizer.sampling.max_new_tokens, or raise verbalizer.max_length if the "
                "model supports it",
            )
        return messages

    def messages(self, pair: PreferencePair, side: str) -> list[Message]:
        """Returns the chat prompt, even if it is too long."""
        return self.template.messages(question_text(pair.prompt), judged_text(pair, side))

    def training_tokens(self, pair: PreferencePair, side: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the response's training tokens that contain text, before any truncation, and their character ranges.

        If the response has a separately weighted trace, only the tokens of the answer are returned.
        """
        whole, begins = self.trained.encode(pair.prompt, pair.response(side)), weighted_start(pair, side)
        held: Sequence[tuple[int, tuple[int, int]]] = [
            (token, place)
            for token, place in zip(whole.response_ids, whole.offsets, strict=True)
            if place[1] > max(place[0], begins)
        ]
        return [token for token, _ in held], [place for _, place in held]

    def fingerprint(self) -> dict[str, object]:
        """Returns the template, the prompt limit, and the chat formats of both models."""
        return {
            "wording": digest([self.template.system, self.template.user]),
            "room": self.room,
            "chat": self.asked.fingerprint(),
            "tokens": self.trained.fingerprint(),
        }


@runtime_checkable
class GeneratorFactory(Protocol):
    """Builds, from a loaded model, a generator whose answers are not decoded freely."""

    def fingerprint(self) -> dict[str, object]:
        """Returns all settings that affect the answers."""

    def make_generator(self, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> Generator:
        """Returns the generator."""


@dataclass(frozen=True)
class Verbalizer:
    """Settings of a verbalizer: the model that scores the parts of responses, and the prompts.

    ``template_file``: the user message, with {question} and {answer}; ``system_file``: the system message, if any. If
    ``path`` is None, the run's own model and chat format are used. A pair is dropped if its prompt leaves no room for
    ``sampling.max_new_tokens`` within ``max_length`` tokens (None: the model's maximum). A batch has at most
    ``batch_size`` prompts and ``token_budget`` tokens; both affect answers only through rounding. ``known_parts``: a
    component for models that cannot quote; it feeds the parts of a response to the model and reads a score for each.
    """

    template_file: str
    system_file: str | None = None
    path: str | None = None
    revision: str | None = None
    dtype: str = "float32"
    chat_template: str | None = None
    sampling: Sampling = field(default_factory=lambda: Sampling(max_new_tokens=2048, temperature=0.0))
    batch_size: int = field(default=16, metadata=BOOKKEEPING)
    token_budget: int = field(default=65536, metadata=BOOKKEEPING)
    max_length: int | None = None
    known_parts: GeneratorFactory | None = None

    def __post_init__(self) -> None:
        check_choice("verbalizer.dtype", self.dtype, DTYPES)
        for name in ("batch_size", "token_budget", "max_length"):
            check_at_least("verbalizer", 1, **{name: getattr(self, name)})

    def load_template(self) -> ScoreTemplate:
        """Reads the template from ``template_file`` and ``system_file``."""
        system = None if self.system_file is None else find_file(self.system_file, "verbalizer.system_file")
        return ScoreTemplate.from_files(find_file(self.template_file, "verbalizer.template_file"), system)

    def unused_keys(self) -> dict[str, str]:
        """Lists keys without effect: sampling keys if decoding is greedy, model keys if the run's own model is used."""
        found: dict[str, str] = {}
        if self.sampling.temperature == 0:
            found |= dict.fromkeys(
                ("sampling.top_p", "sampling.top_k", "sampling.seed"), "verbalizer.sampling.temperature=0"
            )
        if self.path is None:
            own = "the verbalizer is the run's own model (verbalizer.path=null)"
            found |= {"revision": own, "chat_template": own}
        return found
