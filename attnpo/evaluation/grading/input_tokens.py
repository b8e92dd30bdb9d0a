"""Input tokens of calls before they are made: counted by a tokenizer, or estimated and fitted to a grader's account."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float

from attnpo.evaluation.grading.base import Grader, GradingCall, GradingReply

# About a token each, by kinds that tokenizers treat differently: the first six letters of a word, six more of them, a
# digit, up to two marks or a line end, a letter with an accent or a typographic mark, a letter of another alphabet, any
# other sign (Chinese, emoji), two to four blanks (code).
PIECES = tuple(
    re.compile(kind)
    for kind in (
        r"(?<![A-Za-z])[A-Za-z]{1,6}",
        r"(?<=[A-Za-z]{6})[A-Za-z]{1,6}",
        r"\d",
        r"[!-/:-@\[-`{-~]{1,2}|\n",
        r"[\x80-\u024f\u2000-\u206f]",
        r"[\u0250-\u1fff]",
        r"[\u2070-\U0010ffff]",
        r"[ \t]{2,4}",
    )
)
FOREIGN = slice(4, 7)  # the kinds beyond ASCII
ENOUGH = 20  # replies whose account corrects the estimate
# How far tokens per piece of a kind may lie from their mean over all kinds, and what a call's template adds: standard
# deviations of the prior. The last: by how much the tokens of a text differ from what its pieces say (a share).
PRIOR = np.array([0.5, 0.5, 0.5, 0.5, 0.8, 0.8, 0.8, 1.0, 20.0])
SCATTER = 0.1
SHARES = (0.05, 0.5)  # of pieces beyond ASCII, which part calls into three groups before they are spread by length
FIRST_STEPS = 50 * ENOUGH  # in search of calls, where some are much longer than all others

Pieces = Float[np.ndarray, "kinds"]


@dataclass
class InputTokens:
    """Counts the tokens of calls before they are made.

    By the grader's tokenizer, times the ratio of its account and the count from the 20th reply on. Else from pieces of
    the text (``PIECES``), from the 20th reply on with the tokens per piece of each kind that the account shows: least
    squares with every call weighted by one over its pieces, drawn to one ratio for all kinds (``PRIOR``).
    """

    grader: Grader
    seen: int = 0
    exact: bool = False
    _counted: float = 0.0
    _actual: float = 0.0
    _squares: Float[np.ndarray, "kinds kinds"] = field(default_factory=lambda: np.zeros((len(PRIOR), len(PRIOR))))
    _products: Pieces = field(default_factory=lambda: np.zeros(len(PRIOR)))
    _known: dict[GradingCall, Pieces | int] = field(default_factory=dict)
    _rates: Pieces | None = None

    def of(self, call: GradingCall) -> int:
        """Returns tokens of a call, corrected by what was seen."""
        return round(self._of(call))

    def total(self, calls: Iterable[GradingCall]) -> int:
        """Returns tokens of several calls."""
        return round(sum(self._of(call) for call in calls))

    def raw(self, call: GradingCall) -> int:
        """Returns the count without the correction."""
        counted = self._count(call)
        return counted if isinstance(counted, int) else int(counted[:-1].sum())

    def saw(self, call: GradingCall, reply: GradingReply) -> None:
        """Takes note of the account of a call; a reply without an account says nothing."""
        raw, counted = self.raw(call), self._count(call)
        if reply.estimated or reply.input_tokens <= 0 or raw <= 0:
            return
        self.seen += 1
        self._counted += raw
        self._actual += reply.input_tokens
        if not isinstance(counted, int):
            self._squares += np.outer(counted, counted) / raw
            self._products += counted * reply.input_tokens / raw
            self._rates = None

    @property
    def method(self) -> str:
        """Returns how it counts, for readers."""
        counted = "counted by the grader's tokenizer" if self.exact else "estimated from the text"
        refused = sum(not isinstance(count, int) for count in self._known.values()) if self.exact else 0
        if refused:
            counted += f", {refused} calls that its chat template refuses from the text"
        if self.seen < ENOUGH:
            return counted
        ratio = f"{self._actual / self._counted:.2f}"
        if self.exact:
            return f"{counted}, times {ratio} after {self.seen} replies"
        return f"{counted}, fitted to {self.seen} replies, which took {ratio} times as many"

    def spread(self, calls: Sequence[GradingCall]) -> list[GradingCall]:
        """Returns the calls in an order of which every beginning is like the whole: in languages and in lengths.

        Sorted by the share of pieces beyond ASCII and by length they are taken in steps of the golden section: the
        first ``ENOUGH`` along their summed pieces, so that a call is the likelier among them the longer it is, the
        others along their number. As they come where nothing is to be learned: with a tokenizer, after ``ENOUGH``
        replies, and for no more calls than that.
        """
        known = [self.raw(call) for call in calls]
        if self.exact or self.seen >= ENOUGH or len(calls) <= ENOUGH:
            return list(calls)
        foreign = [sum(_foreign(self._count(call)) > share for share in SHARES) for call in calls]
        places = sorted(range(len(calls)), key=lambda place: (foreign[place], known[place]))
        edges = np.cumsum([known[place] for place in places], dtype=float)
        taken: dict[int, None] = {}
        for step in range(FIRST_STEPS):
            if len(taken) < ENOUGH:
                taken.setdefault(int(np.searchsorted(edges, _golden(step) * edges[-1], side="right")))
        step = 0
        while len(taken) < len(calls):
            taken.setdefault(int(_golden(step) * len(calls)))
            step += 1
        return [calls[places[number]] for number in taken]

    def _of(self, call: GradingCall) -> float:
        if self.seen < ENOUGH:
            return float(self.raw(call))
        counted = self._count(call)
        if isinstance(counted, int):
            return counted * self._actual / self._counted
        return max(0.0, float(counted @ self._fitted()))

    def _count(self, call: GradingCall) -> Pieces | int:
        if call not in self._known:
            counted = self.grader.count_tokens(call)
            self.exact = self.exact or counted is not None
            self._known[call] = _pieces(call) if counted is None else counted
        return self._known[call]

    def _fitted(self) -> Pieces:
        """Returns tokens per piece of each kind, and tokens per call."""
        if self._rates is None:
            mean = np.append(np.full(len(PIECES), self._actual / self._counted), 0.0)
            scatter = SCATTER**2 * self._counted / self.seen
            inner = self._squares / scatter + np.diag(PRIOR**-2)
            self._rates = mean + np.linalg.solve(inner, (self._products - self._squares @ mean) / scatter)
        return self._rates


def _pieces(call: GradingCall) -> Pieces:
    """Returns how many pieces of each kind a call has, and a one for the call."""
    counts = [sum(len(kind.findall(message["content"])) for message in call.messages) for kind in PIECES]
    return np.array([*counts, 1], dtype=float)


def _foreign(counted: Pieces | int) -> float:
    return 0.0 if isinstance(counted, int) else float(counted[FOREIGN].sum() / max(1.0, counted[:-1].sum()))


def _golden(step: int) -> float:
    """Returns a sequence of numbers in [0, 1), of which every beginning is spread evenly: multiples of the golden
    section.
    """
    return (step * (5**0.5 - 1) / 2 + 0.5) % 1
