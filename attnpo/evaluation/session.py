"""Asks a grader what a store does not hold yet, within limits, and counts what that may cost."""

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from attnpo.evaluation.chat import Grader, GradingCall, GradingFailure, GradingReply, Price
from attnpo.evaluation.jsonl_store import ReplyStore
from attnpo.schema import UserError, check_at_least

log = logging.getLogger(__name__)

LOG_EVERY = 10.0  # seconds between two lines on the progress
NAMED = 3  # problems named in the log
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
        check_at_least("limits", 0, max_cost=self.max_cost, max_calls=self.max_calls, max_failed=self.max_failed)
        check_at_least("limits", 1, max_items=self.max_items)

    def check_price(self, grader: Grader) -> None:
        """Raises UserError for a budget in dollars where the price of the grader's tokens is not known."""
        if self.max_cost is not None and not grader.price.known:
            raise UserError(
                f"limits.max_cost={self.max_cost:g} needs the price of the grader's tokens, which is not known: give "
                "grader.price_model=MODEL grader.price_input=DOLLARS grader.price_output=DOLLARS (per million tokens), "
                "or bound the calls with limits.max_calls"
            )


class InputCount(NamedTuple):
    """Input tokens of a call before it is made; ``is_bound``: it has no more than these, by the bytes of its text."""

    tokens: int
    is_bound: bool

    @classmethod
    def of(cls, call: GradingCall, grader: Grader) -> "InputCount":
        """Counts by the grader's tokenizer; without it the bytes of the text are an upper bound."""
        count = grader.count_tokens(call)
        if count is not None:
            return cls(count, False)
        return cls(ADDED + sum(len(turn["content"].encode(errors="surrogatepass")) for turn in call.messages), True)


@dataclass(frozen=True)
class CostEstimate:
    """Estimate of a grading session: ``calls`` in all, ``stored`` of them answered already, the rest counted in tokens.

    ``most_output_tokens`` is an upper bound, the sum of the calls' ``max_tokens``; ``dollars`` is the most it costs,
    None where the price is not known. ``method``: how the input tokens were counted.
    """

    calls: int
    stored: int
    input_tokens: int
    most_output_tokens: int
    dollars: float | None
    method: str

    @property
    def rest(self) -> str:
        """Returns what is to be asked, for readers."""
        cost = "the price of its tokens is not known" if self.dollars is None else f"at most {dollars(self.dollars)}"
        return (
            f"{self.input_tokens:,} input tokens ({self.method}), at most {self.most_output_tokens:,} output tokens "
            f"(upper bound from max_tokens); {cost}"
        )

    def __str__(self) -> str:
        """Returns one line for the log."""
        new = self.calls - self.stored
        return f"{self.calls} grading calls, {self.stored} of them stored, {new} to ask: {self.rest}"


@dataclass(frozen=True)
class SessionResult:
    """Result of a grading session.

    ``replies`` holds stored and new ones. ``failures``: the problem of each call that got none. ``left``: calls that
    were not made because a limit was reached, ``stopped`` names it, ``ahead`` is what they would take. ``spent``:
    dollars for the ``made`` calls of this command that were answered; ``seconds`` is its time.
    """

    replies: Mapping[GradingCall, GradingReply]
    failures: Mapping[GradingCall, str] = field(default_factory=dict)
    left: tuple[GradingCall, ...] = ()
    stopped: str | None = None
    ahead: CostEstimate | None = None
    spent: float = 0.0
    made: int = 0
    seconds: float = 0.0

    @property
    def models(self) -> dict[str, int]:
        """Returns how many replies each model gave, by the name that the replies state."""
        return dict(Counter(reply.model for reply in self.replies.values() if reply.model))

    @property
    def whole(self) -> bool:
        """Returns whether every call has its reply."""
        return not self.failures and not self.left

    def cost(self, price: Price) -> dict[str, float]:
        """Returns what all replies took, stored ones included: calls, tokens, dollars where known, seconds of calls.

        ``estimated_calls``, where there are any, came without an account: of these, tokens and dollars are what was set
        aside for them.
        """
        given = self.replies.values()
        tokens = sum(reply.input_tokens for reply in given), sum(reply.output_tokens for reply in given)
        estimated = sum(reply.estimated for reply in given)
        return {
            "calls": float(len(given)),
            "input_tokens": float(tokens[0]),
            "output_tokens": float(tokens[1]),
            **({"dollars": price.of(*tokens)} if price.known else {}),
            **({"estimated_calls": float(estimated)} if estimated else {}),
            "seconds": math.fsum(reply.seconds for reply in given),
        }


def estimate(calls: Iterable[GradingCall], grader: Grader, store: ReplyStore) -> CostEstimate:
    """Returns what ``ask_all`` would take, before the first call."""
    wanted, identity = list(dict.fromkeys(calls)), grader.identity()
    lacking = {call: InputCount.of(call, grader) for call in wanted if store.reply(call, identity) is None}
    return _estimate(lacking, len(wanted), grader.price)


def ask_all(
    calls: Iterable[GradingCall], grader: Grader, store: ReplyStore, limits: GradingLimits | None = None
) -> SessionResult:
    """Returns the replies to ``calls``: those that are stored, and the rest asked for and stored as they come.

    Equal calls are asked once. At a limit it stops and says what is left. Interrupted, it leaves a whole store.

    Raises:
        UserError: more than ``limits.max_failed`` calls failed in a row, ``max_cost`` without a price, another process
            works on the store, or whatever the grader says no repetition will mend (a wrong key, an unknown model).
    """
    limits = limits or GradingLimits()
    limits.check_price(grader)
    wanted = list(dict.fromkeys(calls))
    if limits.dry_run:
        ahead, stored = estimate(wanted, grader, store), _find_stored(wanted, grader.identity(), store)
        log.info("limits.dry_run: %s", ahead)
        left = tuple(call for call in wanted if call not in stored)
        return SessionResult(stored, left=left, stopped="limits.dry_run", ahead=ahead)
    with store.writing():
        return _Session(wanted, grader, store, limits).run()


class _Session:
    """One command's asking: what is to be asked, in flight, spent, failed.

    A call fits when what was spent, the most that those in flight can cost and the most that it can cost are together
    within ``limits.max_cost``. The most: its counted input and ``max_tokens`` of output. Not for several threads.
    """

    def __init__(self, wanted: list[GradingCall], grader: Grader, store: ReplyStore, limits: GradingLimits) -> None:
        self.wanted, self.grader, self.store, self.limits = wanted, grader, store, limits
        self.identity = identity = grader.identity()
        self.price = grader.price
        self.counted = {call: InputCount.of(call, grader) for call in wanted if store.reply(call, identity) is None}
        self.todo = deque(self.counted)
        before = store.replies(self.identity)
        self.replied, self.spent = len(before), math.fsum(self._cost(reply) for reply in before)
        self.flying: dict[GradingCall, float] = {}
        self.failures: dict[GradingCall, str] = {}
        self.models: set[str] = set()
        self.stopped: str | None = None
        self.answered = self.in_a_row = 0
        self.began = self.said = time.monotonic()

    def run(self) -> SessionResult:
        """Asks until nothing is left, or nothing fits."""
        spent, replied = self.spent, self.replied
        if self.todo:
            log.info("%s", _estimate(self.counted, len(self.wanted), self.price))
        asking = True
        while self.todo and asking:  # what did not fit beside calls in flight may fit after them
            asking = False
            for call, found in self.grader.ask(self._find_admitted()):
                asking = True
                self._settle(call, found)
        left = {call: self.counted[call] for call in self.todo}
        asked = SessionResult(
            replies=_find_stored(self.wanted, self.identity, self.store),
            failures=self.failures,
            left=tuple(left),
            stopped=self.stopped if left else None,
            ahead=_estimate(left, len(left), self.price) if left else None,
            spent=self.spent - spent,
            made=self.replied - replied,
            seconds=time.monotonic() - self.began,
        )
        self._report(asked)
        return asked

    def _cost(self, reply: GradingReply) -> float:
        return self.price.of(reply.input_tokens, reply.output_tokens)

    def _find_admitted(self) -> Iterator[GradingCall]:
        """Takes calls from the front of those to ask while they fit; ``stopped`` says which bound ended it."""
        while self.todo:
            most = self.price.of(self.counted[self.todo[0]].tokens, self.todo[0].max_tokens)
            self.stopped = self._bound(most)
            if self.stopped is not None:
                return
            call = self.todo.popleft()
            self.flying[call] = most
            yield call

    def _bound(self, most: float) -> str | None:
        max_cost, max_calls = self.limits.max_cost, self.limits.max_calls
        if max_calls is not None and self.replied + len(self.flying) >= max_calls:
            return f"limits.max_calls={max_calls}"
        if max_cost is not None and self.spent + sum(self.flying.values()) + most > max_cost:
            return f"limits.max_cost={max_cost:g}"
        return None

    def _settle(self, call: GradingCall, found: GradingReply | GradingFailure) -> None:
        """Keeps what a call came back with. UserError where too many in a row have failed.

        What was set aside for a call stands, as tokens too, where the grader gave no account of them.
        """
        del self.flying[call]
        problem = found.problem if isinstance(found, GradingFailure) else found.problem()
        if isinstance(found, GradingFailure) or problem is not None:
            self.failures[call] = str(problem)
            self.in_a_row += 1
        else:
            if found.estimated:
                found = replace(found, input_tokens=self.counted[call].tokens, output_tokens=call.max_tokens)
            self.store.add(call, self.identity, found)
            self.spent += self._cost(found)
            self.replied += 1
            self.answered += 1
            self.in_a_row = 0
            self._note_model(found.model)
        now = time.monotonic()
        if now - self.said >= LOG_EVERY:
            self.said = now
            self._say(now - self.began)
        if self.in_a_row > self.limits.max_failed:
            raise UserError(
                f"{self.in_a_row} grading calls in a row failed (limits.max_failed={self.limits.max_failed}), the last "
                f"with: {problem}; the {self._done} replies so far are stored, the same command goes on from there"
            )

    @property
    def _done(self) -> int:
        return len(self.wanted) - len(self.counted) + self.answered

    def _note_model(self, model: str) -> None:
        own = str(self.identity.get("model") or "")
        if model not in ("", own, *self.models):
            self.models.add(model)
            log.warning(
                "grader.model=%s is answered by %s: grades of other versions of a model are not comparable", own, model
            )

    def _say(self, seconds: float) -> None:
        left = len(self.wanted) - self._done - len(self.failures)
        pace = seconds / (self.answered + len(self.failures))
        cost = f", {dollars(self.spent)} spent" if self.price.known else ""
        failed = f", {len(self.failures)} failed" if self.failures else ""
        log.info("grading: %d of %d%s%s, %.0f s left", self._done, len(self.wanted), failed, cost, pace * left)

    def _report(self, asked: SessionResult) -> None:
        """Says what came of asking, where anything was asked or is missing."""
        if asked.failures:
            reasons = Counter(asked.failures.values()).most_common()
            named = "; ".join(f"{count} times: {reason}" for reason, count in reasons[:NAMED])
            more = f"; and {len(reasons) - NAMED} other reasons" if len(reasons) > NAMED else ""
            log.warning("%d grading calls failed: %s%s", len(asked.failures), named, more)
        if asked.stopped is not None:
            spent = f", {dollars(self.spent)} spent in all" if self.price.known else ""
            left = len(asked.left), asked.ahead.rest if asked.ahead else ""
            log.warning("%s is reached%s; raise it to ask the %d calls that are left: %s", asked.stopped, spent, *left)
        if asked.made:
            log.info("grading: %d calls in %.0f s, %d replies in all", asked.made, asked.seconds, len(asked.replies))
        estimated = sum(reply.estimated for reply in asked.replies.values())
        if estimated:
            log.warning(
                "%d of %d replies had no token counts (usage): their cost is an upper estimate, from counted input and "
                "the maximum output",
                *(estimated, len(asked.replies)),
            )


def _find_stored(
    wanted: Iterable[GradingCall], identity: Mapping[str, object], store: ReplyStore
) -> dict[GradingCall, GradingReply]:
    found = ((call, store.reply(call, identity)) for call in wanted)
    return {call: reply for call, reply in found if reply is not None}


def _estimate(counted: Mapping[GradingCall, InputCount], wanted: int, price: Price) -> CostEstimate:
    tokens = sum(count.tokens for count in counted.values())
    most = sum(call.max_tokens for call in counted)
    cost = price.of(tokens, most) if price.known else None
    bounded = sum(count.is_bound for count in counted.values())
    method = "counted by the grader's tokenizer"
    if bounded == len(counted) > 0:
        method = "an upper bound, the bytes of the text; grader.tokenizer=FOLDER counts them"
    elif bounded:
        method += f", {bounded} calls that its chat template refuses bounded by the bytes of their text"
    return CostEstimate(wanted, wanted - len(counted), tokens, most, cost, method)


def dollars(amount: float) -> str:
    """Returns an amount for readers: cents, or two digits of what is below one."""
    return f"${amount:.2f}" if amount >= 0.01 or amount == 0 else f"${amount:.2g}"
