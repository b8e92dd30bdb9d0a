"""Asks a grader what a store does not hold yet, within limits, and counts what that may cost."""

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from attnpo.evaluation.chat import Grader, GradingCall, GradingFailure, GradingReply, Price
from attnpo.evaluation.jsonl_store import ReplyStore
from attnpo.schema import UserError, check_least

log = logging.getLogger(__name__)

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


LOG_EVERY = 10.0  # seconds between two lines on the progress
NAMED = 3  # problems named in the log


@dataclass(frozen=True)
class Estimate:
    """What asking would take: ``calls`` in all, ``stored`` of them answered already, the rest counted in tokens.

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
class Asked:
    """What came of asking.

    ``replies`` holds stored and new ones. ``failures``: the problem of each call that got none. ``left``: calls that
    were not made because a limit was reached, ``stopped`` names it, ``ahead`` is what they would take. ``spent``:
    dollars for the ``made`` calls of this command that were answered; ``seconds`` is its time.
    """

    replies: Mapping[GradingCall, GradingReply]
    failures: Mapping[GradingCall, str] = field(default_factory=dict)
    left: tuple[GradingCall, ...] = ()
    stopped: str | None = None
    ahead: Estimate | None = None
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
        """Returns what all replies took, stored ones included: calls, tokens, dollars (not where unknown), seconds of
        calls.

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


def estimate(calls: Iterable[GradingCall], grader: Grader, store: ReplyStore) -> Estimate:
    """Returns what ``ask_all`` would take, before the first call."""
    wanted = list(dict.fromkeys(calls))
    return _estimate(count_input(_lacking(wanted, grader.identity(), store), grader), len(wanted), grader.price)


def ask_all(
    calls: Iterable[GradingCall], grader: Grader, store: ReplyStore, limits: GradingLimits | None = None
) -> Asked:
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
        identity, ahead = grader.identity(), estimate(wanted, grader, store)
        log.info("limits.dry_run: %s", ahead)
        left = tuple(_lacking(wanted, identity, store))
        return Asked(_stored(wanted, identity, store), left=left, stopped="limits.dry_run", ahead=ahead)
    with store.writing():
        return _ask(wanted, grader, store, limits)


def _ask(wanted: list[GradingCall], grader: Grader, store: ReplyStore, limits: GradingLimits) -> Asked:
    identity, price = grader.identity(), grader.price
    todo = deque(_lacking(wanted, identity, store))
    counted = count_input(todo, grader)
    before = store.replies(identity)
    spent = math.fsum(price.of(reply.input_tokens, reply.output_tokens) for reply in before)
    budget = Budget(limits, price, {call: count.tokens for call, count in counted.items()}, spent, len(before))
    if todo:
        log.info("%s", _estimate(counted, len(wanted), price))
    tally = _Tally(len(wanted), len(wanted) - len(todo), budget, limits.max_failed, str(identity.get("model") or ""))
    asking = True
    while todo and asking:  # what did not fit beside calls in flight may fit after them
        asking = False
        for call, found in grader.ask(budget.admitted(todo)):
            asking = True
            problem = None if isinstance(found, GradingFailure) else found.problem()
            reply = found if problem is None else GradingFailure(problem)
            if isinstance(reply, GradingFailure):
                budget.drop(call)
                tally.note(call, reply)
                tally.check()
            else:
                store.add(call, identity, budget.settle(call, reply))
                tally.note(call, reply)
    asked = Asked(
        replies=_stored(wanted, identity, store),
        failures=tally.failures,
        left=tuple(todo),
        stopped=budget.stopped if todo else None,
        ahead=_estimate({call: counted[call] for call in todo}, len(todo), price) if todo else None,
        spent=budget.spent - spent,
        made=budget.replied - len(before),
        seconds=time.monotonic() - tally.began,
    )
    _report(asked, budget)
    return asked


@dataclass
class _Tally:
    """Counts what comes back, and says so from time to time."""

    wanted: int
    stored: int
    budget: Budget
    max_failed: int
    model: str
    failures: dict[GradingCall, str] = field(default_factory=dict)
    models: Counter[str] = field(default_factory=Counter)
    answered: int = 0
    in_a_row: int = 0
    began: float = field(default_factory=time.monotonic)
    said: float = field(default_factory=time.monotonic)

    def note(self, call: GradingCall, reply: GradingReply | GradingFailure) -> None:
        """Takes note of what a call came back with."""
        if isinstance(reply, GradingFailure):
            self.failures[call] = reply.problem
            self.in_a_row += 1
        else:
            self.in_a_row = 0
            self.answered += 1
            self._note_model(reply.model)
        now = time.monotonic()
        if now - self.said >= LOG_EVERY:
            self.said = now
            self._say(now - self.began)

    def check(self) -> None:
        """Raises UserError when too many calls in a row have failed."""
        if self.in_a_row > self.max_failed:
            raise UserError(
                f"{self.in_a_row} grading calls in a row failed (limits.max_failed={self.max_failed}), the last with: "
                f"{list(self.failures.values())[-1]}; the {self.stored + self.answered} replies so far are stored, the "
                "same command goes on from there"
            )

    def _note_model(self, model: str) -> None:
        self.models[model] += 1
        if model not in ("", self.model) and self.models[model] == 1:
            log.warning(
                "grader.model=%s is answered by %s: grades of other versions of a model are not comparable",
                self.model,
                model,
            )

    def _say(self, seconds: float) -> None:
        done = self.stored + self.answered
        left = self.wanted - done - len(self.failures)
        pace = seconds / (self.answered + len(self.failures))
        cost = f", {dollars(self.budget.spent)} spent" if self.budget.price.known else ""
        failed = f", {len(self.failures)} failed" if self.failures else ""
        log.info("grading: %d of %d%s%s, %.0f s left", done, self.wanted, failed, cost, pace * left)


def _lacking(wanted: Iterable[GradingCall], identity: Mapping[str, object], store: ReplyStore) -> list[GradingCall]:
    """Returns the calls that have to be asked."""
    return [call for call in wanted if store.reply(call, identity) is None]


def _stored(
    wanted: Iterable[GradingCall], identity: Mapping[str, object], store: ReplyStore
) -> dict[GradingCall, GradingReply]:
    found = ((call, store.reply(call, identity)) for call in wanted)
    return {call: reply for call, reply in found if reply is not None}


def _estimate(counted: Mapping[GradingCall, InputCount], wanted: int, price: Price) -> Estimate:
    tokens = sum(count.tokens for count in counted.values())
    most = sum(call.max_tokens for call in counted)
    cost = price.of(tokens, most) if price.known else None
    bounded = sum(count.is_bound for count in counted.values())
    method = "counted by the grader's tokenizer"
    if bounded == len(counted) > 0:
        method = "an upper bound, the bytes of the text; grader.tokenizer=FOLDER counts them"
    elif bounded:
        method += f", {bounded} calls that its chat template refuses bounded by the bytes of their text"
    return Estimate(wanted, wanted - len(counted), tokens, most, cost, method)


def _report(asked: Asked, budget: Budget) -> None:
    """Says what came of asking, where anything was asked or is missing."""
    if asked.failures:
        reasons = Counter(asked.failures.values()).most_common()
        named = "; ".join(f"{count} times: {reason}" for reason, count in reasons[:NAMED])
        more = f"; and {len(reasons) - NAMED} other reasons" if len(reasons) > NAMED else ""
        log.warning("%d grading calls failed: %s%s", len(asked.failures), named, more)
    if asked.stopped is not None:
        spent = f", {dollars(budget.spent)} spent in all" if budget.price.known else ""
        left = len(asked.left), asked.ahead.rest if asked.ahead else ""
        log.warning("%s is reached%s; raise it to ask the %d calls that are left: %s", asked.stopped, spent, *left)
    if asked.made:
        log.info("grading: %d calls in %.0f s, %d replies in all", asked.made, asked.seconds, len(asked.replies))
    estimated = sum(reply.estimated for reply in asked.replies.values())
    if estimated:
        log.warning(
            "%d of %d replies had no token counts (usage): their cost is an upper estimate, from counted input and the "
            "maximum output",
            estimated,
            len(asked.replies),
        )


def dollars(amount: float) -> str:
    """Returns an amount for readers: cents, or two digits of what is below one."""
    return f"${amount:.2f}" if amount >= 0.01 or amount == 0 else f"${amount:.2g}"
