"""How much of the probability at the verdict position a judge puts on its labels, and what it would write instead.

The verdict position is the verdict's where that share is near 1. A judge that would begin with a reasoning trace or
with "The better answer is" has its verdict elsewhere, and its attention at this position is about something else.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

from attnpo.judge.base import JudgeModel, JudgeReading

TOP = 3
"""Tokens that are named at most; more of them tell no more of what the judge is about to write."""


@dataclass(frozen=True)
class LabelMass:
    """The mean probability of both labels together over the first ``prompts`` prompts, between 0 and 1.

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
    judge: JudgeModel,
    prompts: Sequence[Sequence[int]],
    label_ids: tuple[int, int],
    decode: Callable[[int], str],
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
    return LabelMass(sum(shares) / len(shares), len(readings), written(tokens, decode))


def written(tokens: Iterable[int | None], decode: Callable[[int], str]) -> tuple[tuple[str, int], ...]:
    """Returns the most frequent of ``tokens`` as text with their counts; equally frequent ones as they first come."""
    counts = Counter(token for token in tokens if token is not None)
    return tuple((decode(token), count) for token, count in counts.most_common(TOP))


def in_words(texts: Sequence[tuple[str, int]], prompts: int) -> str:
    """Returns what would be written in how many of the prompts."""
    return ", ".join(f"{text!r} ({count} of {prompts})" for text, count in texts) or "unknown tokens"
