"""Benchmarks as outcomes of a study: what may be asked for, and the score of a row of its table on one of them."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, stdev

ALL = "all"  # stands for every benchmark
BASE_ROW = "base"
# What a study sets itself, row by row.
SET_BY_STUDY = ("benchmark", "model.path", "output", "label")


@dataclass(frozen=True)
class RowScore:
    """A row's score on a benchmark, the one called ``name`` that counts there: a mean over rounds per seed.

    ``seeds``: how many evaluations were to be made; those that failed are lacking in ``values``. ``interval``: 95 %
    over questions where there is one evaluation. ``grading``: standard deviation of the mean from grading the same
    answers again. ``rounds`` of generation; ``questions`` it stands on; ``counts``: what was missing or replaced, by
    reason, over all seeds. ``higher_is_better``: the score's direction, None where it is not known.
    """

    name: str = ""
    values: tuple[float, ...] = ()
    seeds: int = 1
    interval: tuple[float, float] | None = None
    grading: float | None = None
    rounds: int = 1
    questions: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    higher_is_better: bool | None = True

    @property
    def failed(self) -> str:
        """Returns what stands in the table where an evaluation failed; empty where none did."""
        lacking = self.seeds - len(self.values)
        if not lacking:
            return ""
        return "FAILED" if not self.values else f"FAILED ({lacking} of {self.seeds} seeds)"

    @property
    def mean(self) -> float:
        """Returns the mean over seeds; NaN where an evaluation failed."""
        return math.nan if self.failed else mean(self.values)

    @property
    def half_width(self) -> float | None:
        """Half of the 95 % interval of the mean over seeds (Student's t); None for fewer than two."""
        from attnpo.evaluation.intervals import t_quantile

        count = len(self.values)
        if self.failed or count < 2:
            return None
        return t_quantile(0.975, count - 1) * stdev(self.values) / math.sqrt(count)

    @property
    def bounds(self) -> tuple[float, float]:
        """Returns the interval over seeds, else that over questions; NaN where there is neither."""
        width = self.half_width
        if width is not None:
            return self.mean - width, self.mean + width
        return (math.nan, math.nan) if self.failed or self.interval is None else self.interval


def direction(scores: Iterable[RowScore]) -> bool | None:
    """Returns whether the higher of several rows' scores on a benchmark are the better; None where they do not say
    alike.
    """
    said = {score.higher_is_better for score in scores if not score.failed}
    return said.pop() if len(said) == 1 else None


def asked_problems(
    benchmarks: Sequence[str],
    evaluate: Mapping[str, Mapping[str, object] | None],
    published: Sequence[str],
    arms: Sequence[str],
) -> Iterator[str]:
    """Yields what is wrong with the keys of a study that ask for benchmarks."""
    given = {name: keys for name, keys in evaluate.items() if keys}
    twice = [name for name in dict.fromkeys(benchmarks) if benchmarks.count(name) > 1]
    if twice:
        yield f"study.benchmarks has {', '.join(twice)} more than once"
    if published and not benchmarks:
        yield f"study.published={list(published)} names rows for benchmarks, and study.benchmarks is empty"
    lost = [name for name in given if name not in (*benchmarks, ALL)] if benchmarks else list(given)
    if lost:
        yield (
            f"study.evaluate.{lost[0]} would be lost: study.benchmarks is {list(benchmarks)} "
            f"({ALL} is for every one of them)"
        )
    for name, keys in given.items():
        taken = [key for key in keys if key in SET_BY_STUDY]
        if taken:
            yield f"study.evaluate.{name}: {taken[0]} is set by the study for each of its rows: leave it out"
    names = [*arms, *([BASE_ROW] if benchmarks else []), *published]
    clash = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if benchmarks and clash:
        yield f"study.benchmarks: {', '.join(clash)} would be two rows of one name; call the arm otherwise"
