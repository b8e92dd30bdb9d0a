"""Settings of a verbalizer: who scores the parts of responses, and how it is asked. Read before a model is loaded."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from attnpo.config.named_files import find_file
from attnpo.judge.prompts import file_text, question_text
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
    """User message with {question} and {answer}, each exactly once, and the system message before it, if any."""

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
        """Returns the template in UTF-8 text files, as they are. Raises UserError when one cannot be read."""
        return cls(
            file_text(user, "verbalizer.template_file"),
            None if system is None else file_text(system, "verbalizer.system_file"),
        )

    def messages(self, question: str, answer: str) -> list[Message]:
        """Returns the chat prompt; both texts are put in at once, so a placeholder inside them stays as it is."""
        values = {"question": question, "answer": answer}
        user = re.sub(r"\{(question|answer)\}", lambda slot: values[slot[1]], self.user)
        turns = [] if self.system is None else [Message(role="system", content=self.system)]
        return [*turns, Message(role="user", content=user)]


class ScoreQuestions:
    """Asks about single responses; nothing is cut: a prompt that does not fit is refused.

    Args:
        template: the wording.
        asked: the chat format of the model that is asked.
        trained: the chat format of training. Its tokens carry the scores, so that each training token has its score
            without any alignment, whichever model was asked.
        room: tokens a prompt may have, None without a limit.

    Raises UserError when the model's chat template takes no system message and the wording has one.
    """

    def __init__(
        self, template: ScoreTemplate, asked: ChatFormat, trained: ChatFormat, room: int | None = None
    ) -> None:
        self.template, self.asked, self.trained, self.room = template, asked, trained, room
        try:
            asked.prompt_ids(template.messages("a", "a"))
        except RefusedText as problem:
            raise UserError(
                f"the verbalizer's chat template refuses its prompt ({problem}); if it knows no system message, set "
                "verbalizer.system_file=null and put the instructions into verbalizer.template_file"
            ) from problem

    def ask(self, pair: PreferencePair, side: str) -> list[Message]:
        """Returns the chat prompt about one response.

        Raises RefusedText when the prompt is too long for the model or its text cannot be encoded, and when the
        response holds nothing to score.
        """
        messages = self.messages(pair, side)
        if not judged_text(pair, side).strip():
            raise RefusedText(f"the {side} response has no text to score", f"the {side} response has no text to score")
        count = len(self.asked.prompt_ids(messages))
        if self.room is not None and count > self.room:
            raise RefusedText(
                "a prompt is too long for the verbalizer",
                f"the prompt about the {side} response has {count} tokens, {self.room} leave room for the answer: "
                "lower verbalizer.sampling.max_new_tokens, or raise verbalizer.max_length if the model can read more",
            )
        return messages

    def messages(self, pair: PreferencePair, side: str) -> list[Message]:
        """Returns the chat prompt, whether it fits or not."""
        return self.template.messages(question_text(pair.prompt), judged_text(pair, side))

    def tokens(self, pair: PreferencePair, side: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the response's training tokens that hold a character of it, before any truncation.

        Of a response whose trace is weighed apart, those of the answer.
        """
        whole, begins = self.trained.encode(pair.prompt, pair.response(side)), weighted_start(pair, side)
        held: Sequence[tuple[int, tuple[int, int]]] = [
            (token, place)
            for token, place in zip(whole.response_ids, whole.offsets, strict=True)
            if place[1] > max(place[0], begins)
        ]
        return [token for token, _ in held], [place for _, place in held]

    def fingerprint(self) -> dict[str, object]:
        """Returns wording, room, and the tokens of both sides."""
        return {
            "wording": digest([self.template.system, self.template.user]),
            "room": self.room,
            "chat": self.asked.fingerprint(),
            "tokens": self.trained.fingerprint(),
        }


@runtime_checkable
class GeneratorMaker(Protocol):
    """Maker of a generator out of a loaded model in another way than free decoding."""

    def fingerprint(self) -> dict[str, object]:
        """Returns every setting that changes an answer."""

    def generator(self, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> Generator:
        """Returns the generator."""


@dataclass(frozen=True)
class Verbalizer:
    """Who scores the parts of responses, and how.

    ``template_file``: the user message, with {question} and {answer}; ``system_file``: the system message, if any.
    ``path`` None is the run's own model and chat format. A prompt that leaves no room for ``sampling.max_new_tokens``
    within ``max_length`` tokens (None: the positions of the model) drops its pair. A batch has at most ``batch_size``
    prompts and ``token_budget`` tokens; neither changes an answer beyond rounding. ``known_parts``: a component that
    feeds the parts to the model and reads their scores, for models that cannot quote.
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
    known_parts: GeneratorMaker | None = None

    def __post_init__(self) -> None:
        check_choice("verbalizer.dtype", self.dtype, DTYPES)
        for name in ("batch_size", "token_budget", "max_length"):
            check_at_least("verbalizer", 1, **{name: getattr(self, name)})

    def template(self) -> ScoreTemplate:
        """Returns the wording, read from its files."""
        system = None if self.system_file is None else find_file(self.system_file, "verbalizer.system_file")
        return ScoreTemplate.from_files(find_file(self.template_file, "verbalizer.template_file"), system)

    def unread(self) -> dict[str, str]:
        """Keys without effect: greedy decoding draws nothing, the run's own model has its own revision and chat."""
        found: dict[str, str] = {}
        if self.sampling.temperature == 0:
            found |= dict.fromkeys(
                ("sampling.top_p", "sampling.top_k", "sampling.seed"), "verbalizer.sampling.temperature=0"
            )
        if self.path is None:
            own = "the verbalizer is the model itself (verbalizer.path=null)"
            found |= {"revision": own, "chat_template": own}
        return found
