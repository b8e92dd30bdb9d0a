"""Requests, replies, prices, and the interfaces of who answers (``answering``) and who grades (``grader``)."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol, runtime_checkable

import torch

from attnpo.models.spec import ModelSpec
from attnpo.schema import Message, Sampling, digest
from attnpo.system.files import shorten
from attnpo.text.chat import ChatFormat

LENGTH = "length"
STOP = "stop"


@dataclass(frozen=True)
class ChatRequest:
    """Conversation that ends with the user's turn, to be answered.

    ``ids``: what it is in the model's own chat format, up to where the answer begins; empty where that is not at hand.
    ``draw`` tells several answers to one conversation apart.
    """

    messages: tuple[Message, ...]
    ids: tuple[int, ...] = ()
    draw: int = 0


@dataclass(frozen=True)
class Reply:
    """Answer without special tokens.

    ``finish_reason``: stop, length, or a server's other word as it came. ``tokens`` of a model on this machine leave
    the end token out, those of a server are its own account (vLLM counts the end token). ``refused``: why there is no
    answer and cannot be one; the text is empty then.
    """

    text: str
    tokens: int
    finish_reason: str
    refused: str | None = None


@runtime_checkable
class Answerer(Protocol):
    """Backend with a model: knows cheaply what decides its answers, and begins to work when it is asked."""

    @property
    def chat(self) -> ChatFormat | None:
        """Returns the model's chat format, None where nothing on this machine has it."""

    @property
    def limit(self) -> int | None:
        """Returns tokens that a prompt and its answer may have together, None where that is not known before asking."""

    @property
    def counted_by(self) -> str:
        """Returns whose tokens a reply's ``tokens`` are."""

    def key(self) -> dict[str, object]:
        """Returns what decides the answer to a given conversation beside the sampling."""

    def answer(self, asked: Sequence[ChatRequest], sampling: Sampling) -> Iterator[Mapping[int, Reply]]:
        """Replies by index in ``asked``, as they come, in any order.

        The draws follow from the seed, the conversation and the draw's number alone. UserError for a backend that
        cannot answer now; what was given back before stands.
        """


@runtime_checkable
class AnsweringBackend(Protocol):
    """Component that opens a model for answering (config group ``answering``)."""

    def open(self, model: ModelSpec, device: torch.device) -> Answerer:
        """Reads the model's description; weights are loaded, or a server is asked, with the first answer.

        UserError for a model or settings that cannot answer.
        """


ABOVE_0 = 1e-3  # what rounding may add to a log-probability of 0
_KINDS = {
    **dict.fromkeys(("text", "finish_reason", "model"), str),
    **dict.fromkeys(("input_tokens", "output_tokens"), int),
    **{"logprobs": dict | None, "seconds": float | int, "estimated": bool},
}


@dataclass(frozen=True)
class GradingCall:
    """One question to a grader.

    ``item`` is the benchmark's id of the question, ``part`` the turn or the game, ``round`` the round of generation,
    ``repeat`` 0 or, where the same answer is graded again, 1 and so on. ``labels``: the replies that count as verdicts
    where only the next token matters; ``top_logprobs`` of them are asked for (0: none). ``compared``: question, first
    and second answer of a comparison as the messages show them, for who knows without reading a wording.
    """

    benchmark: str
    item: str
    part: str
    round: int
    messages: tuple[Message, ...]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_logprobs: int = 0
    labels: tuple[str, ...] = ()
    repeat: int = 0
    compared: tuple[str, str, str] | None = field(default=None, compare=False)

    def __hash__(self) -> int:
        """Hashes what names it: messages, being dictionaries, have no hash."""
        return hash((self.benchmark, self.item, self.part, self.round, self.repeat))

    def key(self, grader: Mapping[str, object]) -> str:
        """Returns the name of the reply in a store: a digest of the call and of the grader's ``identity()``."""
        asked = {name: value for name, value in asdict(self).items() if name != "compared"}  # the messages say it
        return digest([asked, dict(grader)])[:32]


@dataclass(frozen=True)
class GradingReply:
    """Reply of a grader.

    ``logprobs``: the first token's most likely texts with their natural log-probabilities, None where the grader gives
    none. Token counts are the grader's own account (``usage``). ``estimated``: it gave none, so that they are what was
    set aside for the call, its counted input and the most output. ``model`` is who says to have replied, where that is
    said.
    """

    text: str
    finish_reason: str = "stop"
    logprobs: dict[str, float] | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0
    model: str = ""
    estimated: bool = False

    def problem(self) -> str | None:
        """Names a field whose value cannot be its own, as foreign graders give it; None where all can be used."""
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kind):
                return f"a reply whose {name} is {shorten(repr(value))}, which is of another type"
        for token, value in (self.logprobs or {}).items():
            number = isinstance(value, float | int) and not isinstance(value, bool)
            if not number or not (value == -math.inf or -(2**53) < value < ABOVE_0):  # NaN is neither
                return f"a reply whose log-probability of {token!r} is {shorten(repr(value))}, which cannot be one"
        return None


@dataclass(frozen=True)
class GradingFailure:
    """Call without a reply after the retries that its grader makes; a repeated command asks it again."""

    problem: str


@dataclass(frozen=True)
class Price:
    """Dollars per million tokens; with ``known`` false nobody has said what they cost."""

    input: float = 0.0
    output: float = 0.0
    known: bool = True

    def of(self, input_tokens: int, output_tokens: int) -> float:
        """Dollars for so many tokens."""
        return (self.input * input_tokens + self.output * output_tokens) / 1e6


@runtime_checkable
class Grader(Protocol):
    """Answers calls: a served model, a model on this machine, the testbed's truth, or a script in tests."""

    @property
    def price(self) -> Price:
        """Returns what its tokens cost."""

    def check_ready(self) -> None:
        """Raises UserError for what is known to fail before anything is asked: a package, a key, a model folder."""

    def identity(self) -> dict[str, object]:
        """Returns all that decides its replies to given calls and can be known without asking.

        Model, address, templates.
        """

    def ask(self, calls: Iterable[GradingCall]) -> Iterator[tuple[GradingCall, GradingReply | GradingFailure]]:
        """Returns each call with its reply, as they come, in any order.

        Pulls a call only when it is about to be sent, so that whoever yields the calls can stop them: what was pulled
        and not yet given back is in flight.
        """

    def count_tokens(self, call: GradingCall) -> int | None:
        """Counts a call's input tokens by the grader's own tokenizer; None where that is not at hand."""
