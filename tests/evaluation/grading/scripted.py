"""A grader that says what a test tells it to."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from attnpo.evaluation.chat import GradingCall, GradingFailure, GradingReply, Price

Said = str | GradingReply | GradingFailure


@dataclass
class ScriptedGrader:
    """Replies by a function of the call, or by its item; for tests, so no configuration names it.

    ``at_once`` calls are pulled before the first of them is given back. ``asked`` keeps every call. ``tokens`` counts a
    call's input tokens; the replies' own account of them is what ``answer`` says.
    """

    answer: Callable[[GradingCall], Said] | Mapping[str, Said]
    price: Price = field(default_factory=Price)
    name: str = "scripted"
    at_once: int = 1
    tokens: Callable[[GradingCall], int | None] | None = None
    asked: list[GradingCall] = field(default_factory=list)

    def check_ready(self) -> None:
        """A script is always ready."""

    def identity(self) -> dict[str, object]:
        """Its name: two scripts of one name count as one grader."""
        return {"kind": "scripted", "name": self.name}

    def ask(self, calls: Iterable[GradingCall]) -> Iterator[tuple[GradingCall, GradingReply | GradingFailure]]:
        """Yields each call with what the script says, in the order of the calls."""
        pulled = iter(calls)
        while batch := list(islice(pulled, self.at_once)):
            self.asked += batch
            yield from ((call, self._said(call)) for call in batch)

    def count_tokens(self, call: GradingCall) -> int | None:
        """By ``tokens``."""
        return None if self.tokens is None else self.tokens(call)

    def _said(self, call: GradingCall) -> GradingReply | GradingFailure:
        said = self.answer[call.item] if isinstance(self.answer, Mapping) else self.answer(call)
        return GradingReply(said) if isinstance(said, str) else said
