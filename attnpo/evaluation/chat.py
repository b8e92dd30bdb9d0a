"""Requests, replies, prices, and the interfaces of answering backends (``answering``) and graders (``grader``)."""

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
    """Conversation that ends with a user turn.

    ``ids``: the conversation's token ids in the model's chat format, up to the start of the answer; empty if no local
    tokenizer is available. ``draw``: index among several answers to the same conversation.
    """

    messages: tuple[Message, ...]
    ids: tuple[int, ...] = ()
    draw: int = 0


@dataclass(frozen=True)
class Reply:
    """Answer without special tokens.

    ``finish_reason``: stop, length, or any other value a server returns. ``tokens``: number of tokens. Local models
    exclude the end token; servers report their own count (vLLM includes the end token). ``refused``: reason why the
    request can never be answered; the text is then empty.
    """

    text: str
    tokens: int
    finish_reason: str
    refused: str | None = None


@runtime_checkable
class ChatModel(Protocol):
    """Chat model that is loaded on first use, so its properties and ``key`` are cheap."""

    @property
    def chat(self) -> ChatFormat | None:
        """Returns the model's chat format; None if it is not available locally."""

    @property
    def limit(self) -> int | None:
        """Returns the maximum total number of prompt and answer tokens; None if unknown in advance."""

    @property
    def counted_by(self) -> str:
        """Returns the name of the tokenizer that counts a reply's ``tokens``."""

    def key(self) -> dict[str, object]:
        """Returns the settings and versions, other than sampling, that determine the answer to a conversation."""

    def answer(self, asked: Sequence[ChatRequest], sampling: Sampling) -> Iterator[Mapping[int, Reply]]:
        """Yields replies as they arrive, in any order, keyed by their index in ``asked``.

        Sampling depends only on the seed, the conversation and the draw's index.

        Raises:
            UserError: the backend is unable to answer; replies already yielded remain valid.
        """


@runtime_checkable
class AnsweringBackend(Protocol):
    """Component that opens a model for generating answers (config group ``answering``)."""

    def open(self, model: ModelSpec, device: torch.device) -> ChatModel:
        """Opens a model by reading only its configuration; first use loads the weights or contacts the server.

        Raises:
            UserError: the model cannot generate answers with these settings.
        """


ABOVE_0 = 1e-3  # tolerance for log-probabilities above 0 due to rounding
_KINDS = {
    **dict.fromkeys(("text", "finish_reason", "model"), str),
    **dict.fromkeys(("input_tokens", "output_tokens"), int),
    **{"logprobs": dict | None, "seconds": float | int, "estimated": bool},
}


@dataclass(frozen=True)
class GradingCall:
    """One request to a grader.

    ``item``: the benchmark's question id; ``part``: the turn or game; ``round``: the round of generation; ``repeat``: 0
    for the first grading of an answer, 1 for the second, and so on. ``labels``: verdict tokens, if only the next token
    matters; ``top_logprobs``: number of log-probabilities to request (0: none). ``compared``: the question and the two
    answers to compare, in the order in which the messages show them; for graders that do not read the messages.
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
        """Hashes the identifying fields, because messages are dictionaries, which are not hashable."""
        return hash((self.benchmark, self.item, self.part, self.round, self.repeat))

    def key(self, grader: Mapping[str, object]) -> str:
        """Returns the store key of the reply: a digest of the call and the grader's ``identity()``."""
        asked = {name: value for name, value in asdict(self).items() if name != "compared"}  # part of the messages
        return digest([asked, dict(grader)])[:32]


@dataclass(frozen=True)
class GradingReply:
    """Reply from a grader.

    ``logprobs``: natural log-probabilities of the most likely first tokens; None if the grader returns none. Token
    counts are those that the grader reports (``usage``). ``estimated``: True if the grader reported none, in which case
    the counts are those reserved for the call (counted input and maximum output). ``model``: name of the model as
    reported in the reply, if any.
    """

    text: str
    finish_reason: str = "stop"
    logprobs: dict[str, float] | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0
    model: str = ""
    estimated: bool = False

    def find_problem(self) -> str | None:
        """Describes the first invalid field of a reply from a third-party grader; returns None if all are valid."""
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kind):
                return f"a reply with {name}={shorten(repr(value))}, which has the wrong type"
        for token, value in (self.logprobs or {}).items():
            number = isinstance(value, float | int) and not isinstance(value, bool)
            if not number or not (value == -math.inf or -(2**53) < value < ABOVE_0):  # NaN is neither
                return f"a reply with an invalid log-probability of {token!r}: {shorten(repr(value))}"
        return None


@dataclass(frozen=True)
class GradingFailure:
    """Call that failed even after all of the grader's retries; rerunning the command sends it again."""

    problem: str


@dataclass(frozen=True)
class Price:
    """Price in dollars per million tokens; ``known`` is false if no price was set."""

    input: float = 0.0
    output: float = 0.0
    known: bool = True

    def cost(self, input_tokens: int, output_tokens: int) -> float:
        """Returns the cost in dollars of the given numbers of input and output tokens."""
        return (self.input * input_tokens + self.output * output_tokens) / 1e6


@runtime_checkable
class Grader(Protocol):
    """Interface for graders: a served model, a local model, the testbed's true preferences, or a stub in tests."""

    @property
    def price(self) -> Price:
        """Returns the price of the grader's tokens."""

    def check_ready(self) -> None:
        """Checks everything that can be known before the first call, such as packages, API keys and model folders.

        Raises:
            UserError: the grader cannot be used.
        """

    def identity(self) -> dict[str, object]:
        """Returns everything known in advance that determines the replies, such as model, address and templates."""

    def ask(self, calls: Iterable[GradingCall]) -> Iterator[tuple[GradingCall, GradingReply | GradingFailure]]:
        """Yields each call with its reply as replies arrive, in any order.

        Draws each call from the iterator just before sending it, so the caller can stop by ending the iterator. Calls
        that were drawn but have no result yet are in flight.
        """

    def count_tokens(self, call: GradingCall) -> int | None:
        """Counts a call's input tokens with the grader's tokenizer; returns None if that is not available."""
