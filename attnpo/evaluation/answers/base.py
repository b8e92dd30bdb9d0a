"""Who answers: a model on this machine or a server, both chosen by the config group ``answering``."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NotRequired, Protocol, runtime_checkable

import torch

from attnpo.evaluation.jsonl_store import Row
from attnpo.models.spec import ModelSpec
from attnpo.schema import Message, Sampling
from attnpo.text.chat import ChatFormat

LENGTH = "length"
STOP = "stop"


@dataclass(frozen=True)
class Asked:
    """A conversation that ends with the user's turn, to be answered.

    ``ids``: what it is in the model's own chat format, up to where the answer begins; empty where that is not at hand.
    ``draw`` tells several answers to one conversation apart.
    """

    messages: tuple[Message, ...]
    ids: tuple[int, ...] = ()
    draw: int = 0


@dataclass(frozen=True)
class Reply:
    """An answer without special tokens.

    ``finish_reason``: stop, length, or a server's other word as it came. ``tokens`` of a model on this machine leave
    the end token out, those of a server are its own account (vLLM counts the end token). ``refused``: why there is no
    answer and cannot be one; the text is empty then.
    """

    text: str
    tokens: int
    finish_reason: str
    refused: str | None = None


class AnswerRow(Row):
    """One answer in a file. ``draw`` counts the answers to one prompt, or the turns of a question from 0.

    ``finish_reason`` and ``refused`` are those of the reply. ``temperature``: that of the question, where it has one of
    its own.
    """

    prompt: list[Message]
    answer: str
    finish_reason: str
    tokens: int
    refused: NotRequired[str]
    temperature: NotRequired[float]


@runtime_checkable
class Answerer(Protocol):
    """A backend with a model: knows cheaply what decides its answers, and begins to work when it is asked."""

    @property
    def chat(self) -> ChatFormat | None:
        """Returns the model's chat format, None where nothing on this machine has it."""

    @property
    def limit(self) -> int | None:
        """Returns tokens that a prompt and its answer may have together, None where that is not known before asking."""

    @property
    def counted_by(self) -> str:
        """Whose tokens a reply's ``tokens`` are."""

    def key(self) -> dict[str, object]:
        """Returns what decides the answer to a given conversation beside the sampling."""

    def answer(self, asked: Sequence[Asked], sampling: Sampling) -> Iterator[Mapping[int, Reply]]:
        """Replies by index in ``asked``, as they come, in any order.

        The draws follow from the seed, the conversation and the draw's number alone. UserError for a backend that
        cannot answer now; what was given back before stands.
        """


@runtime_checkable
class AnsweringBackend(Protocol):
    """A component that opens a model for answering (config group ``answering``)."""

    def open(self, model: ModelSpec, device: torch.device) -> Answerer:
        """Reads the model's description; weights are loaded, or a server is asked, with the first answer.

        UserError for a model or settings that cannot answer.
        """
