"""Statistics of a judge: verdicts, probability of the labels, and lengths of the traces.

A judge states its verdict at the verdict position only if nearly all probability there is on the labels. A judge that
would start with a reasoning trace or with "The better answer is" states it elsewhere, and its attention at the verdict
position is not about the verdict.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import Enum

from attnpo.judge.base import JudgeModel, JudgeReading
from attnpo.judge.settings import TraceRules
from attnpo.schema import JudgeRound, PairWeights

ENOUGH = 20  # pairs: with fewer, the interval of a judge with accuracy 0.8 may contain one half
Z95 = 1.959964  # standard deviations on either side of a 95 % interval


@dataclass(frozen=True)
class JudgeStatistics:
    """Fractions between 0 and 1 over ``pairs`` pairs with a verdict in every round; NaN if ``pairs`` is 0.

    ``agreement``: rounds whose higher label logit picks the chosen response (ties count as half). ``pair_accuracy``:
    pairs whose logit difference, averaged over both orders, picks the chosen response (ties count as half).
    ``consistency``: pairs for which all orders pick the same response (a tie picks none). ``other_tokens``: rounds
    whose most likely token is neither label. ``chosen_first``, ``chosen_second``: agreement of the rounds that show the
    chosen response first (as answer A) and second. ``first_picked``: rounds that pick the answer shown first, whichever
    it is (ties count as half in all three).
    """

    agreement: float
    pair_accuracy: float
    consistency: float
    other_tokens: float
    pairs: int
    chosen_first: float = math.nan
    chosen_second: float = math.nan
    first_picked: float = math.nan


class JudgeStanding(Enum):
    """Quality of a judge according to the 95 % interval of its accuracy (averaged over both orders).

    ``FEW``: undecided, because there are fewer than 20 pairs.
    """

    ABOVE = "above chance"
    CHANCE = "at chance"
    BELOW = "below chance"
    FEW = "too few pairs to say"


def judge_statistics(captured: Iterable[PairWeights], label_ids: tuple[int, int]) -> JudgeStatistics:
    """Computes statistics over all captured pairs with verdicts; ``label_ids``: token ids of labels A and B."""
    margins: list[list[float]] = []
    tokens: list[int] = []
    first: list[float] = []
    second: list[float] = []
    for pair in captured:  # one by one: none of them is held
        if not pairs_with_verdicts([pair]):
            continue
        margins.append([verdict_margin(item) for item in pair.rounds])
        tokens += [item.verdict_token for item in pair.rounds if item.verdict_token is not None]
        for item, margin in zip(pair.rounds, margins[-1], strict=True):
            (first if item.chosen_is_a else second).append(_win_score(margin))
    flat = [margin for pair in margins for margin in pair]
    return JudgeStatistics(
        agreement=_mean_or_nan([_win_score(margin) for margin in flat]),
        pair_accuracy=_mean_or_nan([_win_score(_mean_or_nan(pair)) for pair in margins]),
        consistency=_mean_or_nan(
            [float(all(one > 0 for one in pair) or all(one < 0 for one in pair)) for pair in margins]
        ),
        other_tokens=_mean_or_nan([float(token not in label_ids) for token in tokens]),
        pairs=len(margins),
        chosen_first=_mean_or_nan(first),
        chosen_second=_mean_or_nan(second),
        first_picked=_mean_or_nan([*first, *(1 - won for won in second)]),
    )


def judge_standing(verdicts: JudgeStatistics) -> JudgeStanding:
    """Classifies a judge by whether the 95 % interval of its accuracy (both orders) is above, around or below one half.

    This is the Wilson interval. It contains one half if and only if a test at the 5 % level cannot distinguish the
    judge from a coin flip.
    """
    if verdicts.pairs < ENOUGH:
        return JudgeStanding.FEW
    low, high = wilson_interval(verdicts.pair_accuracy, verdicts.pairs)
    return JudgeStanding.ABOVE if low > 0.5 else JudgeStanding.BELOW if high < 0.5 else JudgeStanding.CHANCE


def describe_accuracy(verdicts: JudgeStatistics) -> str:
    """Describes the judge's standing, its accuracy over both orders, and the interval."""
    right = f"right in {100 * verdicts.pair_accuracy:.1f} % of {verdicts.pairs} pairs, averaged over both orders"
    if verdicts.pairs >= ENOUGH:
        low, high = wilson_interval(verdicts.pair_accuracy, verdicts.pairs)
        right += f" (95 % interval {100 * low:.1f} to {100 * high:.1f})"
    return f"{judge_standing(verdicts).value}: {right}"


def judge_summary_lines(verdicts: JudgeStatistics) -> tuple[str, str]:
    """Summarises the judge in two lines: whether it knows the better answer, and how consistent it is."""
    return (
        f"judge {describe_accuracy(verdicts)}; {100 * verdicts.chosen_first:.1f} % if the chosen answer "
        f"comes first, {100 * verdicts.chosen_second:.1f} % if it comes second",
        f"judge picks the first answer in {100 * verdicts.first_picked:.1f} % of its verdicts; the two orders agree in "
        f"{100 * verdicts.consistency:.1f} % of the pairs; {100 * verdicts.other_tokens:.1f} % of verdicts are neither "
        "label",
    )


def judge_warning(verdicts: JudgeStatistics) -> str | None:
    """Returns a warning if the judge's verdicts carry no preference; None otherwise.

    A judge at chance (``judge_standing``) does not know which answer is better. A judge does not answer if more than
    half of its verdicts name neither label. How often the orders agree is not a criterion: a judge with position bias
    may be right on every pair that its bias does not decide. Accuracy over fewer than 20 pairs is not assessed.
    """
    unlabelled = f"{100 * verdicts.other_tokens:.0f} % of its verdicts name no label"
    silent = is_silent(verdicts)
    advice = "choose another judge or wording (judge=...)"
    if judge_standing(verdicts) is JudgeStanding.CHANCE:
        low, high = wilson_interval(verdicts.pair_accuracy, verdicts.pairs)
        told = f"right in {100 * verdicts.pair_accuracy:.0f} % of {verdicts.pairs} pairs"
        told += f", 95 % interval {100 * low:.0f} to {100 * high:.0f}" + (f"; {unlabelled}" if silent else "")
        what = f"the judge does not know which answer is better ({told})"
        return f"{what}: its weights say nothing about preference; {advice}"
    if silent:
        return f"the judge does not answer in the requested form: {unlabelled}; {advice}"
    return None


def is_silent(verdicts: JudgeStatistics) -> bool:
    """Returns whether more than half of the verdicts name neither label; False if no verdict token was read."""
    return verdicts.other_tokens > 0.5


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """Returns the Wilson 95 % interval of a proportion observed over ``count`` cases."""
    spread = Z95 * math.sqrt(share * (1 - share) / count + Z95**2 / (4 * count**2))
    middle, scale = share + Z95**2 / (2 * count), 1 + Z95**2 / count
    return (middle - spread) / scale, (middle + spread) / scale


def pairs_with_verdicts(captured: Sequence[PairWeights]) -> list[PairWeights]:
    """Returns the pairs that were shown to the judge and have a verdict in every round."""
    return [pair for pair in captured if pair.rounds and all(item.verdict_logits is not None for item in pair.rounds)]


def verdict_margin(item: JudgeRound) -> float:
    """Returns the log-odds in nats of the chosen response's label over the other one.

    Raises ValueError if there is no verdict.
    """
    if item.verdict_logits is None:
        raise ValueError("this round has no verdict")
    difference = float(item.verdict_logits[0]) - float(item.verdict_logits[1])
    return difference if item.chosen_is_a else -difference


def _win_score(margin: float) -> float:
    return 0.5 if margin == 0 else float(margin > 0)


def _mean_or_nan(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


CUT = "judge's trace was cut"


@dataclass(frozen=True)
class TraceStatistics:
    """Statistics over ``traces`` traces: mean and maximum number of tokens, and how many were ``cut``.

    ``at_limit``: traces cut because they reached ``limit`` tokens; the other cut traces end where the judge ended its
    turn. ``until``: the text that closed them. ``first``: the pairs of the first cut traces, at most three.
    """

    traces: int
    mean: float
    longest: int
    cut: int
    at_limit: int
    limit: int
    until: str
    first: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """Returns the statistics as plain data."""
        return {**asdict(self), "mean": round(self.mean, 2), "first": list(self.first)}

    def describe_lengths(self) -> str:
        """Describes the trace lengths for the log."""
        return f"judge: {self.traces} traces with {self.mean:.1f} tokens on average, at most {self.longest}"

    def describe_cut_traces(self) -> str | None:
        """Describes how many traces were cut, why, and what was done about it; None if no trace was cut."""
        if not self.cut:
            return None
        ended = self.cut - self.at_limit
        why = [f"{self.at_limit} reached {self.limit} tokens (judge.trace.max_new_tokens)"] * (self.at_limit > 0)
        why += [f"in {ended} the judge ended its turn"] * (ended > 0)
        return (
            f"{CUT}: {self.cut} of {self.traces} ({self.cut / self.traces:.1%}; {', '.join(why)}; first: "
            f"{', '.join(self.first)}); each was closed with {self.until!r} before its verdict was read"
        )


def trace_statistics(captured: Iterable[PairWeights], rules: TraceRules) -> TraceStatistics | None:
    """Computes statistics over all captured rounds with a trace generated under ``rules``; None without traces."""
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


# ------------------------------------------------------------------------------------------------ the labels

TOP = 3
"""Maximum number of most likely tokens to report; the rest say little about the judge's reply."""


@dataclass(frozen=True)
class LabelMass:
    """Mean total probability of both labels over the first ``prompts`` prompts, between 0 and 1.

    ``written``: the judge's most likely next tokens as text, with the number of prompts for each, most frequent first.
    """

    share: float
    prompts: int
    written: tuple[tuple[str, int], ...]

    def to_dict(self) -> dict[str, object]:
        """Returns the measurement as plain data."""
        return {**asdict(self), "written": [list(one) for one in self.written]}

    def describe_share(self) -> str:
        """Describes the share and the most likely tokens, for the log."""
        return (
            f"judge: {100 * self.share:.3g} % of the probability at the verdict position is on its two labels (mean "
            f"over {self.prompts} prompts); most likely tokens: {describe_texts(self.written, self.prompts)}"
        )

    def describe_shortfall(self, minimum: float) -> str | None:
        """Describes a share below ``minimum`` and suggests remedies; None if the share is high enough."""
        if self.share >= minimum:
            return None
        return (
            f"the judge puts {100 * self.share:.3g} % of its probability on its labels, less than the "
            f"{100 * minimum:.3g} % required by judge.min_label_mass (most likely tokens: "
            f"{describe_texts(self.written, self.prompts)}), so its attention at this position does not reflect a "
            "verdict. Possible remedies: turn thinking off (judge.chat_template_kwargs), let it reason first "
            "(judge.trace), prefill its reply up to the letter (judge.prefill), change the wording "
            "(judge=..., judge.template_file), or use the letters that it actually generates (judge.labels)"
        )


def measure_label_mass(
    judge: JudgeModel, prompts: Sequence[Sequence[int]], label_ids: tuple[int, int], decode: Callable[[int], str]
) -> LabelMass:
    """Reads the verdicts on ``prompts`` (at least one) and averages the total probability of ``label_ids``."""
    return average_label_mass(judge.read(prompts, layers=(), verdict=True, label_ids=label_ids), decode)


def average_label_mass(readings: Sequence[JudgeReading], decode: Callable[[int], str]) -> LabelMass:
    """Averages ``label_mass`` over ``readings`` and counts the most likely tokens.

    Raises ValueError if a reading has no verdict.
    """
    masses = [reading.label_mass for reading in readings]
    tokens = [reading.verdict_token for reading in readings]
    shares = [mass for mass in masses if mass is not None]
    if not readings or len(shares) < len(readings):
        raise ValueError("expected readings with verdicts")
    return LabelMass(sum(shares) / len(shares), len(readings), count_most_frequent(tokens, decode))


def count_most_frequent(tokens: Iterable[int | None], decode: Callable[[int], str]) -> tuple[tuple[str, int], ...]:
    """Counts the most frequent ``tokens``, decoded; ties are in order of first appearance."""
    counts = Counter(token for token in tokens if token is not None)
    return tuple((decode(token), count) for token, count in counts.most_common(TOP))


def describe_texts(texts: Sequence[tuple[str, int]], prompts: int) -> str:
    """Describes each text with the number of prompts for which it is the most likely next token."""
    return ", ".join(f"{text!r} ({count} of {prompts})" for text, count in texts) or "unknown tokens"
