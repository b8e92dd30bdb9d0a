"""Sends grading calls that have no stored reply yet, within limits, and estimates their cost."""

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

LOG_EVERY = 10.0  # seconds between progress lines
NAMED = 3  # problems listed in the log
ADDED = 32
"""Upper bound on the number of tokens that a chat template adds (turn markers and, for Llama 3.1, dates)."""


@dataclass(frozen=True)
class GradingLimits:
    """Limits on grading; None means no limit.

    ``max_cost`` (dollars) and ``max_calls`` apply to all replies in an evaluation's folder, including those of earlier
    commands, so rerunning a command does not reset them. Charges for requests without a reply (timeouts) are unknown
    and not counted. ``max_failed``: number of consecutive failures after which the command stops. ``dry_run``: only
    estimate the cost. ``max_items``: use only the first questions of a benchmark; applied when calls are built.
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
        """Checks that the token price is known if there is a limit in dollars.

        Raises:
            UserError: ``max_cost`` is set and the grader's price is unknown.
        """
        if self.max_cost is not None and not grader.price.known:
            raise UserError(
                f"limits.max_cost={self.max_cost:g} needs the grader's token price, which is unknown: set "
                "grader.price_model=MODEL grader.price_input=DOLLARS grader.price_output=DOLLARS (per million tokens), "
                "or limit the calls with limits.max_calls"
            )


class InputCount(NamedTuple):
    """Input tokens of a call; ``is_bound`` marks an upper bound computed from the byte length of its messages."""

    tokens: int
    is_bound: bool

    @classmethod
    def for_call(cls, call: GradingCall, grader: Grader) -> "InputCount":
        """Counts a call's tokens with the grader's tokenizer, or uses the messages' byte length as an upper bound."""
        count = grader.count_tokens(call)
        if count is not None:
            return cls(count, False)
        return cls(ADDED + sum(len(turn["content"].encode(errors="surrogatepass")) for turn in call.messages), True)


@dataclass(frozen=True)
class CostEstimate:
    """Cost estimate of a grading session with ``calls`` calls, of which ``stored`` already have a reply.

    The other fields cover the remaining calls. ``most_output_tokens``: the sum of their ``max_tokens``, an upper bound;
    ``dollars``: maximum cost, None if the price is unknown; ``method``: how the input tokens were counted.
    """

    calls: int
    stored: int
    input_tokens: int
    most_output_tokens: int
    dollars: float | None
    method: str

    def describe_cost(self) -> str:
        """Describes the token counts and the cost in dollars of the remaining calls."""
        cost = "token price unknown" if self.dollars is None else f"at most {format_dollars(self.dollars)}"
        return (
            f"{self.input_tokens:,} input tokens ({self.method}), at most {self.most_output_tokens:,} output tokens "
            f"(upper bound from max_tokens); {cost}"
        )

    def __str__(self) -> str:
        """Returns a one-line summary for the log."""
        new = self.calls - self.stored
        return f"{self.calls} grading calls, {self.stored} already stored, {new} to send: {self.describe_cost()}"


@dataclass(frozen=True)
class SessionResult:
    """Result of a grading session.

    ``replies``: stored and new replies. ``failures``: the problem of each failed call. ``left``: calls not sent because
    the limit ``stopped`` was reached, with ``ahead`` as their cost estimate. ``made``, ``spent`` and ``seconds``:
    number of new replies, their cost in dollars, and duration of the command.
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
    def replies_by_model(self) -> dict[str, int]:
        """Returns the number of replies per model, by the name reported in the replies."""
        return dict(Counter(reply.model for reply in self.replies.values() if reply.model))

    @property
    def is_complete(self) -> bool:
        """Returns whether every call has a reply."""
        return not self.failures and not self.left

    def cost(self, price: Price) -> dict[str, float]:
        """Returns totals over all replies, stored and new: calls, tokens, dollars (if the price is known), seconds.

        ``estimated_calls``: number of replies without token counts, if any; each counts as the amount reserved for its
        call.
        """
        given = self.replies.values()
        tokens = sum(reply.input_tokens for reply in given), sum(reply.output_tokens for reply in given)
        estimated = sum(reply.estimated for reply in given)
        return {
            "calls": float(len(given)),
            "input_tokens": float(tokens[0]),
            "output_tokens": float(tokens[1]),
            **({"dollars": price.cost(*tokens)} if price.known else {}),
            **({"estimated_calls": float(estimated)} if estimated else {}),
            "seconds": math.fsum(reply.seconds for reply in given),
        }


def estimate_cost(calls: Iterable[GradingCall], grader: Grader, store: ReplyStore) -> CostEstimate:
    """Estimates the cost of ``ask_all`` without sending any call."""
    wanted, identity = list(dict.fromkeys(calls)), grader.identity()
    lacking = {call: InputCount.for_call(call, grader) for call in wanted if store.reply(call, identity) is None}
    return _make_estimate(lacking, len(wanted), grader.price)


def ask_all(
    calls: Iterable[GradingCall], grader: Grader, store: ReplyStore, limits: GradingLimits | None = None
) -> SessionResult:
    """Collects the replies to ``calls``: reads stored ones, sends the others, and stores replies as they arrive.

    Identical calls are sent once. When a limit is reached, the session stops and logs what remains. An interruption
    leaves the store intact.

    Raises:
        UserError: more than ``limits.max_failed`` consecutive calls failed, ``max_cost`` is set without a known price,
            another process is writing to the store, or the grader reports a permanent error (wrong key, unknown model).
    """
    limits = limits or GradingLimits()
    limits.check_price(grader)
    wanted = list(dict.fromkeys(calls))
    if limits.dry_run:
        ahead, stored = estimate_cost(wanted, grader, store), _find_stored(wanted, grader.identity(), store)
        log.info("limits.dry_run: %s", ahead)
        left = tuple(call for call in wanted if call not in stored)
        return SessionResult(stored, left=left, stopped="limits.dry_run", ahead=ahead)
    with store.open_for_writing():
        return _Session(wanted, grader, store, limits).run()


class _Session:
    """State of one command's grading: calls to send, calls in flight, cost and failures. Not thread-safe.

    A call is admitted if the amount spent, the maximum cost of the calls in flight and its own maximum cost together
    stay within ``limits.max_cost``. The maximum cost assumes ``max_tokens`` of output.
    """

    def __init__(self, wanted: list[GradingCall], grader: Grader, store: ReplyStore, limits: GradingLimits) -> None:
        self.wanted, self.grader, self.store, self.limits = wanted, grader, store, limits
        self.identity = identity = grader.identity()
        self.price = grader.price
        self.counted = {
            call: InputCount.for_call(call, grader) for call in wanted if store.reply(call, identity) is None
        }
        self.todo = deque(self.counted)
        before = store.replies(self.identity)
        self.replied, self.spent = len(before), math.fsum(self._cost(reply) for reply in before)
        self.flying: dict[GradingCall, float] = {}
        self.failures: dict[GradingCall, str] = {}
        self.models: set[str] = set()
        self.stopped: str | None = None
        self.answered = self.in_a_row = 0
        self.began = self.logged = time.monotonic()

    def run(self) -> SessionResult:
        """Sends calls until none is left or the next one would exceed a limit."""
        spent, replied = self.spent, self.replied
        if self.todo:
            log.info("%s", _make_estimate(self.counted, len(self.wanted), self.price))
        asking = True
        while self.todo and asking:  # a call that did not fit next to those in flight may fit after them
            asking = False
            for call, found in self.grader.ask(self._admit_calls()):
                asking = True
                self._record_outcome(call, found)
        left = {call: self.counted[call] for call in self.todo}
        asked = SessionResult(
            replies=_find_stored(self.wanted, self.identity, self.store),
            failures=self.failures,
            left=tuple(left),
            stopped=self.stopped if left else None,
            ahead=_make_estimate(left, len(left), self.price) if left else None,
            spent=self.spent - spent,
            made=self.replied - replied,
            seconds=time.monotonic() - self.began,
        )
        self._log_summary(asked)
        return asked

    def _cost(self, reply: GradingReply) -> float:
        return self.price.cost(reply.input_tokens, reply.output_tokens)

    def _admit_calls(self) -> Iterator[GradingCall]:
        """Yields calls from the queue within the limits; sets ``stopped`` to the first limit reached."""
        while self.todo:
            most = self.price.cost(self.counted[self.todo[0]].tokens, self.todo[0].max_tokens)
            self.stopped = self._find_reached_limit(most)
            if self.stopped is not None:
                return
            call = self.todo.popleft()
            self.flying[call] = most
            yield call

    def _find_reached_limit(self, most: float) -> str | None:
        max_cost, max_calls = self.limits.max_cost, self.limits.max_calls
        if max_calls is not None and self.replied + len(self.flying) >= max_calls:
            return f"limits.max_calls={max_calls}"
        if max_cost is not None and self.spent + sum(self.flying.values()) + most > max_cost:
            return f"limits.max_cost={max_cost:g}"
        return None

    def _record_outcome(self, call: GradingCall, found: GradingReply | GradingFailure) -> None:
        """Stores the reply or failure of a call; a reply without token counts is charged the amount reserved for it.

        Raises:
            UserError: too many consecutive calls failed.
        """
        del self.flying[call]
        problem = found.problem if isinstance(found, GradingFailure) else found.find_problem()
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
            self._warn_new_model(found.model)
        now = time.monotonic()
        if now - self.logged >= LOG_EVERY:
            self.logged = now
            self._log_progress(now - self.began)
        if self.in_a_row > self.limits.max_failed:
            raise UserError(
                f"{self.in_a_row} grading calls in a row failed (limits.max_failed={self.limits.max_failed}). Last "
                f"error: {problem}. The {self._reply_count} replies so far are stored: run the same command to continue"
            )

    @property
    def _reply_count(self) -> int:
        return len(self.wanted) - len(self.counted) + self.answered

    def _warn_new_model(self, model: str) -> None:
        own = str(self.identity.get("model") or "")
        if model not in ("", own, *self.models):
            self.models.add(model)
            log.warning(
                "grader.model=%s is served by %s: grades from different model versions are not comparable", own, model
            )

    def _log_progress(self, seconds: float) -> None:
        left = len(self.wanted) - self._reply_count - len(self.failures)
        pace = seconds / (self.answered + len(self.failures))
        cost = f", {format_dollars(self.spent)} spent" if self.price.known else ""
        failed = f", {len(self.failures)} failed" if self.failures else ""
        log.info("grading: %d of %d%s%s, %.0f s left", self._reply_count, len(self.wanted), failed, cost, pace * left)

    def _log_summary(self, asked: SessionResult) -> None:
        """Logs new replies, failures and the limit that was reached, if any."""
        if asked.failures:
            reasons = Counter(asked.failures.values()).most_common()
            named = "; ".join(f"{count} times: {reason}" for reason, count in reasons[:NAMED])
            more = f"; and {len(reasons) - NAMED} other reasons" if len(reasons) > NAMED else ""
            log.warning("%d grading calls failed: %s%s", len(asked.failures), named, more)
        if asked.stopped is not None:
            spent = f", {format_dollars(self.spent)} spent in total" if self.price.known else ""
            left = len(asked.left), asked.ahead.describe_cost() if asked.ahead else ""
            log.warning("%s reached%s; raise it to send the remaining %d calls: %s", asked.stopped, spent, *left)
        if asked.made:
            log.info("grading: %d calls in %.0f s, %d replies in total", asked.made, asked.seconds, len(asked.replies))
        estimated = sum(reply.estimated for reply in asked.replies.values())
        if estimated:
            log.warning(
                "%d of %d replies have no token counts (usage): their cost is an upper bound based on input counts and "
                "maximum output",
                *(estimated, len(asked.replies)),
            )


def _find_stored(
    wanted: Iterable[GradingCall], identity: Mapping[str, object], store: ReplyStore
) -> dict[GradingCall, GradingReply]:
    found = ((call, store.reply(call, identity)) for call in wanted)
    return {call: reply for call, reply in found if reply is not None}


def _make_estimate(counted: Mapping[GradingCall, InputCount], wanted: int, price: Price) -> CostEstimate:
    tokens = sum(count.tokens for count in counted.values())
    most = sum(call.max_tokens for call in counted)
    cost = price.cost(tokens, most) if price.known else None
    bounded = sum(count.is_bound for count in counted.values())
    method = "counted by the grader's tokenizer"
    if bounded == len(counted) > 0:
        method = "upper bound from the bytes of the text; set grader.tokenizer=FOLDER for exact counts"
    elif bounded:
        method += f"; upper bound from bytes for {bounded} calls that its chat template rejects"
    return CostEstimate(wanted, wanted - len(counted), tokens, most, cost, method)


def format_dollars(amount: float) -> str:
    """Formats an amount in dollars to the cent, or to two significant digits if it is below one cent."""
    return f"${amount:.2f}" if amount >= 0.01 or amount == 0 else f"${amount:.2g}"
