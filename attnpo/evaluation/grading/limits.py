"""Limits on what a command asks of a grader, in calls and dollars, and the length of calls before they are made."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from attnpo.evaluation.grading.base import Grader, GradingCall, GradingReply, Price
from attnpo.schema import UserError, check_least

ADDED = 32
"""Input tokens that a chat template adds to a call at most: marks of turns, and dates as Llama 3.1's has them."""


@dataclass(frozen=True)
class GradingLimits:
    """Bounds of grading; None: no bound.

    ``max_cost`` (dollars) and ``max_calls`` hold for all replies in an evaluation's folder, those of earlier commands
    included, so that giving a command again spends nothing more. What a service charges for requests that brought no
    reply (timeouts) is not known here. ``max_failed``: more failures in a row end the command. ``dry_run``: nothing is
    asked. ``max_items`` is for who makes the calls: only so many questions of a benchmark, the first ones.
    """

    max_cost: float | None = None
    max_calls: int | None = None
    max_items: int | None = None
    max_failed: int = 20
    dry_run: bool = False

    def __post_init__(self) -> None:
        check_least("limits", 0, max_cost=self.max_cost, max_calls=self.max_calls, max_failed=self.max_failed)
        check_least("limits", 1, max_items=self.max_items)

    def check_price(self, grader: Grader) -> None:
        """Raises UserError for a budget in dollars where the price of the grader's tokens is not known."""
        if self.max_cost is not None and not grader.price.known:
            raise UserError(
                f"limits.max_cost={self.max_cost:g} needs the price of the grader's tokens, which is not known: give "
                "grader.price_model=MODEL grader.price_input=DOLLARS grader.price_output=DOLLARS (per million tokens), "
                "or bound the calls with limits.max_calls"
            )


@dataclass(frozen=True)
class InputCount:
    """Input tokens of a call before it is made; ``is_bound``: it has no more than these, by the bytes of its text."""

    tokens: int
    is_bound: bool = False


def count_input(calls: Iterable[GradingCall], grader: Grader) -> dict[GradingCall, InputCount]:
    """Counts input tokens by the grader's tokenizer; without it the bytes of the text are an upper bound."""
    counts = ((call, grader.count_tokens(call)) for call in calls)
    return {call: InputCount(_bound(call), True) if count is None else InputCount(count) for call, count in counts}


def _bound(call: GradingCall) -> int:
    return ADDED + sum(len(turn["content"].encode(errors="surrogatepass")) for turn in call.messages)


@dataclass
class Budget:
    """Lets calls through as long as they fit.

    A call fits when what was spent, the most that those in flight can cost and the most that it can cost are together
    within ``limits.max_cost``. The most: its input ``tokens`` and ``max_tokens`` of output. Not for several threads.
    """

    limits: GradingLimits
    price: Price
    tokens: Mapping[GradingCall, int]
    spent: float = 0.0
    replied: int = 0
    stopped: str | None = None
    _flying: dict[GradingCall, float] = field(default_factory=dict)

    def admitted(self, calls: deque[GradingCall]) -> Iterator[GradingCall]:
        """Takes calls from the front of ``calls`` while they fit; ``stopped`` says which bound ended it."""
        while calls:
            most = self.price.of(self.tokens[calls[0]], calls[0].max_tokens)
            self.stopped = self._bound(most)
            if self.stopped is not None:
                return
            call = calls.popleft()
            self._flying[call] = most
            yield call

    def settle(self, call: GradingCall, reply: GradingReply) -> GradingReply:
        """Replaces what was set aside for a call by what it cost, and returns the reply with it.

        What was set aside stands, as tokens too, where the grader gave no account of them.
        """
        self.drop(call)
        if reply.estimated:
            reply = replace(reply, input_tokens=self.tokens[call], output_tokens=call.max_tokens)
        self.spent += self.price.of(reply.input_tokens, reply.output_tokens)
        self.replied += 1
        return reply

    def drop(self, call: GradingCall) -> None:
        """Releases the amount reserved for a call that got no reply."""
        del self._flying[call]

    def _bound(self, most: float) -> str | None:
        max_cost, max_calls = self.limits.max_cost, self.limits.max_calls
        if max_calls is not None and self.replied + len(self._flying) >= max_calls:
            return f"limits.max_calls={max_calls}"
        reserved = sum(self._flying.values())
        if max_cost is not None and self.spent + reserved + most > max_cost:
            return f"limits.max_cost={max_cost:g}"
        return None
