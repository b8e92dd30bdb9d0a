"""How long the traces are that a judge wrote before its verdicts, and how many of them it did not end."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from attnpo.judge.trace_rules import TraceRules
from attnpo.schema import PairWeights

CUT = "judge's trace was cut"


@dataclass(frozen=True)
class TraceStatistics:
    """Over ``traces`` traces: tokens in the mean and at most; how many were ``cut``, and why.

    ``at_limit``: cut since they had all ``limit`` tokens; in the others the judge ended its turn. ``until``: the text
    that they were closed with. ``first``: the pairs of the first of them, three at most.
    """

    traces: int
    mean: float
    longest: int
    cut: int
    at_limit: int
    limit: int
    until: str
    first: tuple[str, ...] = ()

    def numbers(self) -> dict[str, object]:
        """Returns all of it as plain data."""
        return {**asdict(self), "mean": round(self.mean, 2), "first": list(self.first)}

    def text(self) -> str:
        """Returns the lengths, for the log."""
        return f"judge: {self.traces} traces of {self.mean:.1f} tokens in the mean, {self.longest} at most"

    def problem(self) -> str | None:
        """Returns how many were cut, why and what was done, in words; None where none was."""
        if not self.cut:
            return None
        ended = self.cut - self.at_limit
        why = [f"{self.at_limit} had {self.limit} tokens (judge.trace.max_new_tokens)"] * (self.at_limit > 0)
        why += [f"in {ended} the judge ended its turn"] * (ended > 0)
        return (
            f"{CUT}: {self.cut} of {self.traces} ({self.cut / self.traces:.1%}; {', '.join(why)}; first: "
            f"{', '.join(self.first)}); each was closed with {self.until!r}, and its verdict read after that"
        )


def trace_statistics(captured: Iterable[PairWeights], rules: TraceRules) -> TraceStatistics | None:
    """Returns the statistics of all captured rounds with a trace, which was written under ``rules``;
    None without any.
    """
    traced = [(pair.pair_id, item.trace) for pair in captured for item in pair.rounds if item.trace is not None]
    if not traced:
        return None
    lengths = [trace.tokens for _, trace in traced]
    cut = [(pair_id, trace.tokens) for pair_id, trace in traced if not trace.closed]
    return TraceStatistics(
        traces=len(traced),
        mean=sum(lengths) / len(lengths),
        longest=max(lengths),
        cut=len(cut),
        at_limit=sum(tokens >= rules.max_new_tokens for _, tokens in cut),
        limit=rules.max_new_tokens,
        until=rules.until,
        first=tuple(list(dict.fromkeys(pair_id for pair_id, _ in cut))[:3]),
    )
