"""Statistics of a judge: its verdicts, the probability of its labels, the length of its traces.

The verdict position is the verdict's where the labels have nearly all probability. A judge that would begin with a
reasoning trace or with "The better answer is" has its verdict elsewhere, and its attention there is about something
else.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import Enum

from attnpo.judge.base import JudgeModel, JudgeReading
from attnpo.judge.settings import TraceRules
from attnpo.schema import JudgeRound, PairWeights

ENOUGH = 20  # pairs: with fewer, the interval of a judge that is right four times of five may hold one half
Z95 = 1.959964  # standard deviations on either side of a 95 % interval


@dataclass(frozen=True)
class JudgeStatistics:
    """Shares between 0 and 1 over ``pairs`` pairs with a verdict in every round; NaN when there is none.

    ``agreement``: rounds whose higher label logit picks the chosen response (a tie counts as half).
    ``pair_accuracy``: pairs whose logit difference, averaged over both orders, picks the chosen one (same).
    ``consistency``: pairs whose orders all pick the same response (a tie picks none).
    ``other_tokens``: rounds whose most likely token is neither label. ``chosen_first``, ``chosen_second``: the
    agreement of the rounds that show the chosen response first (as answer A), and of the others; ``first_picked``:
    rounds that pick the answer shown first, whichever it is (a tie counts as half in all three).
    """

    agreement: float
    pair_accuracy: float
    consistency: float
    other_tokens: float
    pairs: int
    chosen_first: float = math.nan
    chosen_second: float = math.nan
    first_picked: float = math.nan


class Standing(Enum):
    """Standing of a judge by the 95 % interval of its accuracy (both orders averaged).

    ``FEW``: no verdict of it yet, there are fewer than 20 pairs.
    """

    ABOVE = "above chance"
    CHANCE = "at chance"
    BELOW = "below chance"
    FEW = "too few pairs to say"


def judge_statistics(captured: Iterable[PairWeights], label_ids: tuple[int, int]) -> JudgeStatistics:
    """Returns the statistics of all captured pairs with verdicts; ``label_ids``: the tokens of labels (A, B)."""
    margins: list[list[float]] = []
    tokens: list[int] = []
    first: list[float] = []
    second: list[float] = []
    for pair in captured:  # one by one: none of them is held
        if not with_verdicts([pair]):
            continue
        margins.append([margin_of(item) for item in pair.rounds])
        tokens += [item.verdict_token for item in pair.rounds if item.verdict_token is not None]
        for item, margin in zip(pair.rounds, margins[-1], strict=True):
            (first if item.chosen_is_a else second).append(_won(margin))
    flat = [margin for pair in margins for margin in pair]
    return JudgeStatistics(
        agreement=_mean([_won(margin) for margin in flat]),
        pair_accuracy=_mean([_won(_mean(pair)) for pair in margins]),
        consistency=_mean([float(all(one > 0 for one in pair) or all(one < 0 for one in pair)) for pair in margins]),
        other_tokens=_mean([float(token not in label_ids) for token in tokens]),
        pairs=len(margins),
        chosen_first=_mean(first),
        chosen_second=_mean(second),
        first_picked=_mean([*first, *(1 - won for won in second)]),
    )


def judge_standing(verdicts: JudgeStatistics) -> Standing:
    """Returns where the 95 % interval of the accuracy (both orders averaged) lies.

    Above one half, below it, or around it.

    The interval is Wilson's, which holds one half exactly where a test of size 5 % cannot tell the judge from a coin.
    """
    if verdicts.pairs < ENOUGH:
        return Standing.FEW
    low, high = wilson(verdicts.pair_accuracy, verdicts.pairs)
    return Standing.ABOVE if low > 0.5 else Standing.BELOW if high < 0.5 else Standing.CHANCE


def accuracy_in_words(verdicts: JudgeStatistics) -> str:
    """Returns where the judge stands, with its accuracy over both orders and the interval."""
    right = f"right in {100 * verdicts.pair_accuracy:.1f} % of {verdicts.pairs} pairs, both orders averaged"
    if verdicts.pairs >= ENOUGH:
        low, high = wilson(verdicts.pair_accuracy, verdicts.pairs)
        right += f" (95 % interval {100 * low:.1f} to {100 * high:.1f})"
    return f"{judge_standing(verdicts).value}: {right}"


def judge_lines(verdicts: JudgeStatistics) -> tuple[str, str]:
    """Returns the judge's passport in two lines: whether it knows the better answer, and how steadily it says so."""
    return (
        f"judge {accuracy_in_words(verdicts)}; {100 * verdicts.chosen_first:.1f} % where the chosen answer "
        f"comes first, {100 * verdicts.chosen_second:.1f} % where it comes second",
        f"judge picks the first answer in {100 * verdicts.first_picked:.1f} % of its verdicts; the orders agree in "
        f"{100 * verdicts.consistency:.1f} %; {100 * verdicts.other_tokens:.1f} % are neither label",
    )


def judge_warning(verdicts: JudgeStatistics) -> str | None:
    """Returns what is wrong with a judge whose verdicts tell nothing of preference, in words; None for any other.

    It does not know which answer is better where it is at chance (``judge_standing``). It does not answer where more
    than half of its verdicts name no label. How often the orders agree is no criterion of its own: a judge drawn to one
    place may be right in every pair in which it is not. Accuracy over fewer than 20 pairs is not judged.
    """
    unlabelled = f"{100 * verdicts.other_tokens:.0f} % of its verdicts name no label"
    silent = is_silent(verdicts)
    advice = "choose another judge or wording (judge=...)"
    if judge_standing(verdicts) is Standing.CHANCE:
        low, high = wilson(verdicts.pair_accuracy, verdicts.pairs)
        told = f"{100 * verdicts.pair_accuracy:.0f} % right of {verdicts.pairs} pairs"
        told += f", 95 % interval {100 * low:.0f} to {100 * high:.0f}" + (f"; {unlabelled}" if silent else "")
        what = f"the judge does not know which answer is better ({told})"
        return f"{what}: its weights say nothing about preference; {advice}"
    if silent:
        return f"the judge does not answer as it is asked to: {unlabelled}; {advice}"
    return None


def is_silent(verdicts: JudgeStatistics) -> bool:
    """Returns whether more than half of the verdicts name no label; false where no verdict's token was read."""
    return verdicts.other_tokens > 0.5


def wilson(share: float, count: int) -> tuple[float, float]:
    """Returns Wilson's 95 % interval of a share observed over ``count`` cases."""
    spread = Z95 * math.sqrt(share * (1 - share) / count + Z95**2 / (4 * count**2))
    middle, scale = share + Z95**2 / (2 * count), 1 + Z95**2 / count
    return (middle - spread) / scale, (middle + spread) / scale


def with_verdicts(captured: Sequence[PairWeights]) -> list[PairWeights]:
    """Returns the pairs that the judge was shown and whose verdicts were read in every round."""
    return [pair for pair in captured if pair.rounds and all(item.verdict_logits is not None for item in pair.rounds)]


def margin_of(item: JudgeRound) -> float:
    """Returns log-odds in nats of the chosen response's label over the rejected one's. ValueError without a verdict."""
    if item.verdict_logits is None:
        raise ValueError("the verdict of this round was not read")
    difference = float(item.verdict_logits[0]) - float(item.verdict_logits[1])
    return difference if item.chosen_is_a else -difference


def _won(margin: float) -> float:
    return 0.5 if margin == 0 else float(margin > 0)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


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
    """Returns the statistics of all captured rounds with a trace written under ``rules``; None without any."""
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
"""Tokens that are named at most; more of them tell no more of what the judge is about to write."""


@dataclass(frozen=True)
class LabelMass:
    """Mean probability of both labels together over the first ``prompts`` prompts, between 0 and 1.

    ``written``: the texts that the judge would write, most likely tokens alone, with the number of prompts; the most
    frequent first.
    """

    share: float
    prompts: int
    written: tuple[tuple[str, int], ...]

    def numbers(self) -> dict[str, object]:
        """Returns all of it as plain data."""
        return {**asdict(self), "written": [list(one) for one in self.written]}

    def text(self) -> str:
        """Returns the share with what the judge would write, for the log."""
        return (
            f"judge: {100 * self.share:.3g} % of the probability at the verdict position is on its two labels (mean of "
            f"{self.prompts} prompts); it would write {in_words(self.written, self.prompts)}"
        )

    def problem(self, minimum: float) -> str | None:
        """Returns what is wrong below ``minimum`` and which options help, in words; None from there on."""
        if self.share >= minimum:
            return None
        return (
            f"the judge puts {100 * self.share:.3g} % of its probability on its labels, less than the "
            f"{100 * minimum:.3g} % of judge.min_label_mass, and would write {in_words(self.written, self.prompts)}: "
            "the attention that is read is not that of a verdict. What helps: thinking switched off "
            "(judge.chat_template_kwargs), its reasoning written first (judge.trace), the beginning of its reply up to "
            "the letter (judge.prefill), another wording (judge=..., judge.template_file), the letters that it does "
            "write (judge.labels)"
        )


def measure_labels(
    judge: JudgeModel, prompts: Sequence[Sequence[int]], label_ids: tuple[int, int], decode: Callable[[int], str]
) -> LabelMass:
    """Returns the mass on ``label_ids`` after ``prompts`` (at least one), read in the judge's full depth."""
    return mass_of(judge.read(prompts, layers=(), verdict=True, label_ids=label_ids), decode)


def mass_of(readings: Sequence[JudgeReading], decode: Callable[[int], str]) -> LabelMass:
    """Returns the same of readings that have verdicts. ValueError for one that has none."""
    masses = [reading.label_mass for reading in readings]
    tokens = [reading.verdict_token for reading in readings]
    shares = [mass for mass in masses if mass is not None]
    if not readings or len(shares) < len(readings):
        raise ValueError("expected readings with verdicts")
    return LabelMass(sum(shares) / len(shares), len(readings), count_texts(tokens, decode))


def count_texts(tokens: Iterable[int | None], decode: Callable[[int], str]) -> tuple[tuple[str, int], ...]:
    """Returns the most frequent of ``tokens`` as text with their counts; equally frequent ones as they first come."""
    counts = Counter(token for token in tokens if token is not None)
    return tuple((decode(token), count) for token, count in counts.most_common(TOP))


def in_words(texts: Sequence[tuple[str, int]], prompts: int) -> str:
    """Returns what would be written in how many of the prompts."""
    return ", ".join(f"{text!r} ({count} of {prompts})" for text, count in texts) or "unknown tokens"
