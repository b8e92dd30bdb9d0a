"""Outcome of a study: results by arm and grid point, and which point stands for an arm, chosen on validation alone."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float

from attnpo.evaluation.intervals import Interval, hierarchical_bootstrap
from attnpo.lab.studies.study import Arm, Outcome, Point, RowScore, short
from attnpo.run.result import RunResult, Scores


def direction(scores: Iterable[RowScore]) -> bool | None:
    """Returns whether the higher of several rows' scores on a benchmark are the better; None where they do not say
    alike.
    """
    said = {score.higher_is_better for score in scores if not score.failure}
    return said.pop() if len(said) == 1 else None


@dataclass(frozen=True)
class PointResults:
    """All results of one arm at one grid point, one per seed in rising order."""

    arm: Arm
    values: tuple[str, ...]
    seeds: tuple[int, ...]
    results: tuple[RunResult, ...]

    def scores(self, split: str) -> list[Scores]:
        """Returns the scores of a split, one per seed. ValueError where no truth is known."""
        known = [result.truth[split] for result in self.results if result.truth is not None]
        if len(known) < len(self.results):
            raise ValueError(f"{self.label} has no scores against a known truth")
        return known

    def truth(self, split: str, name: str) -> float:
        """Returns the mean over seeds of a truth score."""
        return float(np.mean([scores.numbers[name] for scores in self.scores(split)]))

    @property
    def rewards(self) -> Float[np.ndarray, "seeds prompts"]:
        """True rewards on test prompts, a row per seed and a column per prompt."""
        return np.array([scores.rewards for scores in self.scores("test")])

    @cached_property
    def interval(self) -> Interval:
        """Returns the mean test reward with its interval over seeds and prompts."""
        return hierarchical_bootstrap(self.rewards)

    def metric(self, name: str) -> float:
        """Returns the mean over seeds of a last logged metric; NaN where it is missing."""
        return float(np.mean([result.metrics.get(name, math.nan) for result in self.results]))

    def drift(self, name: str) -> float:
        """Returns the mean over seeds of a number of ``RunResult.drift`` by its path; NaN where it is missing."""
        return float(np.mean([result.moved(name) for result in self.results]))

    def input(self, name: str) -> float:
        """Returns the mean over seeds of a statistic of the training examples; NaN where it is missing."""
        return float(np.mean([result.input("train", name) for result in self.results]))

    @property
    def is_destroyed(self) -> bool:
        """Returns whether training destroyed the model of a seed."""
        return any(result.is_destroyed for result in self.results)

    @property
    def steps(self) -> float:
        """Returns the mean optimiser steps of a run."""
        return float(np.mean([result.steps for result in self.results]))

    @property
    def seconds(self) -> float:
        """Returns the mean seconds of a run."""
        return float(np.mean([result.seconds["all"] for result in self.results]))

    @property
    def label(self) -> str:
        """Returns the grid values, as in "lr 5e-05 beta 0.1"."""
        return label_of(self.values)


def label_of(values: Sequence[str]) -> str:
    """Grid values for reading."""
    pairs = [value.split("=", 1) for value in values]
    return " ".join(f"{short(key)} {value}" for key, value in pairs)


def gather(points: Sequence[tuple[Point, RunResult]]) -> list[PointResults]:
    """Returns the results by world, arm and grid point, in the order the study lists them."""
    groups: dict[tuple[str, str, tuple[str, ...]], list[tuple[Point, RunResult]]] = {}
    for point, result in points:
        groups.setdefault((point.arm.world, point.arm.name, point.values), []).append((point, result))
    out = []
    for members in groups.values():
        members.sort(key=lambda item: item[0].seed)
        first = members[0][0]
        seeds = tuple(point.seed for point, _ in members)
        out.append(PointResults(first.arm, first.values, seeds, tuple(result for _, result in members)))
    return out


def has_truth(points: Sequence[PointResults]) -> bool:
    """Returns whether every result carries scores against a known truth."""
    return all(result.truth is not None for point in points for result in point.results)


def complete(points: Sequence[PointResults]) -> list[PointResults]:
    """Returns the grid points of an arm that have as many seeds as any: one that lacks some is not chosen."""
    most = max((len(point.results) for point in points), default=0)
    return [point for point in points if len(point.results) == most]


def all_seeds(outcome: Outcome) -> list[int]:
    """Returns the seeds of a study, those without results too."""
    return sorted({point.seed for point, _ in [*outcome.points, *outcome.failed]})


def lacking_seeds(outcome: Outcome, world: str) -> dict[str, dict[tuple[str, ...], int]]:
    """Of arms with results, the grid points that are no candidates: by arm and values, how many seeds they have."""
    out: dict[str, dict[tuple[str, ...], int]] = {}
    for name, points in by_arm(outcome, world).items():
        ran = [*outcome.points, *outcome.failed]
        every = dict.fromkeys(point.values for point, _ in ran if (point.arm.name, point.arm.world) == (name, world))
        counts = {point.values: len(point.results) for point in points}
        candidates = {point.values for point in complete(points)}
        lacking = {values: counts.get(values, 0) for values in every if values not in candidates}
        if points and lacking:
            out[name] = lacking
    return out


def best_point(points: Sequence[PointResults], kl_limit: float) -> PointResults:
    """Returns the point that stands for an arm, chosen on validation data alone.

    With a known truth: the highest validation reward among points with validation KL up to ``kl_limit`` (if none, the
    one with the smallest KL). Otherwise the highest validation accuracy of the rewards. What is not finite loses, and
    so does a model that training destroyed, unless all are.
    """
    whole = complete(points)
    whole = [point for point in whole if not point.is_destroyed] or whole
    if not has_truth(whole):
        return max(whole, key=lambda point: _or_worst(point.metric("val/rewards/accuracies"), -math.inf))
    found = best_within(whole, kl_limit)
    return (
        min(whole, key=lambda point: _or_worst(point.truth("validation", "kl"), math.inf)) if found is None else found
    )


def best_within(points: Sequence[PointResults], kl: float) -> PointResults | None:
    """Returns the point with the highest validation reward among those with validation KL up to ``kl``; None if none
    has.
    """
    within = [point for point in complete(points) if point.truth("validation", "kl") <= kl]
    return max(within, key=lambda point: _or_worst(point.truth("validation", "reward"), -math.inf), default=None)


def _or_worst(value: float, worst: float) -> float:
    """``value``, or ``worst`` for one that is not finite: NaN has no order."""
    return value if math.isfinite(value) else worst


def by_arm(outcome: Outcome, world: str) -> dict[str, list[PointResults]]:
    """Returns the grid points of every arm of a world, in the study's order; none for an arm without results."""
    points = [point for point in gather(outcome.points) if point.arm.world == world]
    return {
        arm.name: [point for point in points if point.arm.name == arm.name]
        for arm in outcome.arms
        if arm.world == world
    }


def best_by_arm(outcome: Outcome, world: str) -> dict[str, PointResults]:
    """Returns the best point of every arm of a world that has results, in the study's order."""
    found = by_arm(outcome, world).items()
    return {name: best_point(points, outcome.study.kl_limit) for name, points in found if points}


def training_warnings(best: Mapping[str, PointResults]) -> Iterator[str]:
    """Warns of arms whose chosen point moved no weight or destroyed the model in a seed."""
    for name, point in best.items():
        for text in dict.fromkeys(result.training_warning for result in point.results if result.training_warning):
            yield f"WARNING: {name}: {text}"


def seeds_mark(have: int, outcome: Outcome) -> str:
    """Returns a mark on what stands on fewer seeds than the study has; else empty."""
    every = len(all_seeds(outcome))
    return "" if have == every else f" ({have} of {every} seeds)"


def interval_text(interval: Interval) -> str:
    """Returns both ends, or a remark where there is none."""
    return "[no interval]" if math.isnan(interval.low) else f"[{interval.low:.3f}, {interval.high:.3f}]"


def difference_text(difference: Interval | None) -> str:
    """Returns a difference with its interval; empty where there is none."""
    return "" if difference is None else f"{difference.mean:+.3f} {interval_text(difference)}"


def verdict(difference: Interval) -> str:
    """Returns what a difference of rewards says, by whether its interval excludes 0 and by nothing else."""
    if not difference.excludes_zero:
        return "no clear difference"
    return "helps" if difference.mean > 0 else "harms"
