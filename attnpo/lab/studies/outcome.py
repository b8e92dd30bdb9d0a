"""Results of a study by arm and grid point, selection of each arm's best point, and rewards at a given KL.

Points are selected on validation data only. To compare arms at equal KL, each seed's points are sorted by KL on test
prompts and filtered by reward on validation prompts.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import mean, stdev

import numpy as np
from jaxtyping import Float

from attnpo.evaluation.intervals import Interval, mean_interval, t_quantile
from attnpo.lab.studies.study import Arm, MeasuredBy, Point, Study, WorldSeed, short_key
from attnpo.run.result import RunResult, TruthScores
from attnpo.schema import digest

Rewards = Float[np.ndarray, "prompts"]
ENDS, CHORD = "<", "~"  # marks of values not at the KL level: the path ends below it, or has no point near it
GAP = "'"  # mark of values interpolated between trained points whose KLs differ by more than a factor of FAR
FAR = 2.0  # if an arm's first point has more than this many times the KL level, nothing is known near the level


@dataclass(frozen=True)
class RowScore:
    """Score of a table row on a benchmark; ``values`` contains one score per seed, averaged over rounds.

    ``name``: the benchmark's main score. ``seeds``: number of planned evaluations; failed ones have no entry in
    ``values``. ``interval``: 95 % interval over questions, for a single evaluation. ``grading``: standard deviation of
    the mean when the same answers are graded again. ``rounds``: rounds of generation. ``questions``: number of
    questions. ``counts``: number of missing or replaced answers, by reason, over all seeds. ``higher_is_better``: None
    if unknown.
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
    def failure_text(self) -> str:
        """Returns the table cell for a row with failed evaluations; empty if none failed."""
        lacking = self.seeds - len(self.values)
        if not lacking:
            return ""
        return "FAILED" if not self.values else f"FAILED ({lacking} of {self.seeds} seeds)"

    @property
    def mean(self) -> float:
        """Returns the mean over seeds; NaN if an evaluation failed."""
        return math.nan if self.failure_text else mean(self.values)

    @property
    def half_width(self) -> float | None:
        """Returns half the width of the mean's 95 % interval over seeds (Student's t); None for a single seed."""
        count = len(self.values)
        if self.failure_text or count < 2:
            return None
        return t_quantile(0.975, count - 1) * stdev(self.values) / math.sqrt(count)

    @property
    def interval_bounds(self) -> tuple[float, float]:
        """Returns the bounds of the interval over seeds, else over questions; NaN if there is neither."""
        width = self.half_width
        if width is not None:
            return self.mean - width, self.mean + width
        return (math.nan, math.nan) if self.failure_text or self.interval is None else self.interval


@dataclass(frozen=True)
class SourceCost:
    """Cost of computing an arm's weights, in addition to ordinary training.

    ``once``: sequences per pair that models process before training, which takes ``seconds`` per pair (None if
    unknown). ``again``: sequences per pair that need an extra forward and backward pass in every training step.
    ``step_pairs``: pairs per optimizer step.
    """

    once: int = 0
    seconds: float | None = None
    again: int = 0
    step_pairs: int = 1


@dataclass(frozen=True)
class ScorerRun:
    """Trained scorer: its model folder, its run's result, and the number of sequences per pair in training.

    ``forwards`` includes the reference model's forward passes; validation is not counted.
    """

    model: Path
    result: RunResult
    forwards: float
    backwards: float


@dataclass(frozen=True)
class PointResults:
    """All results of one arm at one grid point, one per seed in ascending order."""

    arm: Arm
    values: tuple[str, ...]
    seeds: tuple[int, ...]
    results: tuple[RunResult, ...]

    def truth_scores(self, split: str) -> list[TruthScores]:
        """Returns the true-reward scores on a split, one per seed.

        Raises:
            ValueError: the true reward is not known.
        """
        known = [result.truth[split] for result in self.results if result.truth is not None]
        if len(known) < len(self.results):
            raise ValueError(f"{self.label} was not scored with a known true reward")
        return known

    def mean_truth_score(self, split: str, name: str) -> float:
        """Returns a true-reward score, averaged over seeds."""
        return float(np.mean([scores.numbers[name] for scores in self.truth_scores(split)]))

    @property
    def rewards(self) -> Float[np.ndarray, "seeds prompts"]:
        """Returns the true rewards on test prompts, one row per seed."""
        return np.array([scores.rewards for scores in self.truth_scores("test")])

    @cached_property
    def reward_interval(self) -> Interval:
        """Returns the mean test reward with its interval over seeds and prompts."""
        return mean_interval(self.rewards)

    def mean_metric(self, name: str) -> float:
        """Returns a metric's last logged value, averaged over seeds; NaN if missing."""
        return float(np.mean([result.metrics.get(name, math.nan) for result in self.results]))

    def mean_drift(self, name: str) -> float:
        """Returns a value in ``RunResult.drift``, given by its path and averaged over seeds; NaN if missing."""
        return float(np.mean([result.drift_value(name) for result in self.results]))

    def mean_input(self, name: str) -> float:
        """Returns a statistic of the training examples, averaged over seeds; NaN if missing."""
        return float(np.mean([result.input("train", name) for result in self.results]))

    @property
    def label(self) -> str:
        """Returns the grid values, e.g. "lr 5e-05 beta 0.1"."""
        return values_label(self.values)


@dataclass(frozen=True)
class Outcome:
    """Outcome of a finished study: finished points with results, failed points with errors, and the fixed settings.

    ``measured``: results of the study's analyses by name, world and seed; ``unmeasured``: errors of failed analyses.
    ``costs``: seconds spent once for all arms, by world and seed, if known: "base", "judge" (running judge, verbalizer
    and scorers on the pairs, summed over all commands) and "scorers" (training the scorers, in any command).
    ``warnings``: problems with the points' inputs. ``benchmarks``: scores by benchmark, then by world and row.
    ``reads``: cost of the weights by world, seed and arm. ``scorers``: trained scorers by world and seed, then by name;
    ``lost_scorers``: errors of failed scorers. ``folders``: run folder of each point.
    """

    study: Study
    arms: list[Arm]
    points: list[tuple[Point, RunResult]]
    failed: list[tuple[Point, str]]
    record: dict[str, object]
    folder: Path
    seconds: float
    measured: dict[str, MeasuredBy] = field(default_factory=dict)
    unmeasured: list[str] = field(default_factory=list)
    costs: dict[WorldSeed, dict[str, float]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    benchmarks: dict[str, dict[tuple[str, str], RowScore]] = field(default_factory=dict)
    reads: dict[tuple[str, int, str], SourceCost] = field(default_factory=dict)
    scorers: dict[WorldSeed, dict[str, ScorerRun]] = field(default_factory=dict)
    lost_scorers: list[str] = field(default_factory=list)
    folders: dict[Point, Path] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Returns the digest of worlds, grids and arms, which were fixed before the points ran."""
        return digest(self.record)[:16]

    @property
    def seeds(self) -> list[int]:
        """Returns the study's seeds, including those without results."""
        return sorted({point.seed for point, _ in [*self.points, *self.failed]})

    @cached_property
    def results(self) -> list[PointResults]:
        """Returns the results grouped by world, arm and grid point."""
        return group_by_point(self.points)

    @property
    def has_truth(self) -> bool:
        """Returns whether every run was scored with a known true reward."""
        return has_truth(self.results)

    @property
    def worlds(self) -> list[str]:
        """Returns the names of the study's worlds; [""] for a study without worlds."""
        return list(dict.fromkeys(arm.world for arm in self.arms))

    def arms_in_world(self, world: str) -> list[Arm]:
        """Returns the arms of a world."""
        return [arm for arm in self.arms if arm.world == world]

    def scorers_in_world(self, world: str) -> list[dict[str, ScorerRun]]:
        """Returns a world's trained scorers, one dict per seed."""
        return [made for (of, _), made in self.scorers.items() if of == world]

    def points_by_arm(self, world: str) -> dict[str, list[PointResults]]:
        """Returns the grid points of each arm in a world, in the study's order; empty for arms without results."""
        points = [point for point in self.results if point.arm.world == world]
        return {
            arm.name: [point for point in points if point.arm.name == arm.name] for arm in self.arms_in_world(world)
        }

    def best_points(self, world: str) -> dict[str, PointResults]:
        """Returns the best point of each arm in a world that has results, in the study's order."""
        found = self.points_by_arm(world).items()
        return {name: best_point(points, self.study.kl_limit) for name, points in found if points}

    def missing_seeds_mark(self, have: int) -> str:
        """Returns a mark if a value is based on fewer seeds than the study has, else an empty string."""
        every = len(self.seeds)
        return "" if have == every else f" ({have} of {every} seeds)"


def values_label(values: Sequence[str]) -> str:
    """Formats a point's grid values, e.g. "lr 5e-05 beta 0.1"."""
    pairs = [value.split("=", 1) for value in values]
    return " ".join(f"{short_key(key)} {value}" for key, value in pairs)


def group_by_point(points: Sequence[tuple[Point, RunResult]]) -> list[PointResults]:
    """Groups results by world, arm and grid point, in the study's order."""
    groups: dict[tuple[str, str, tuple[str, ...]], list[tuple[Point, RunResult]]] = {}
    for point, result in points:
        groups.setdefault((point.arm.world, point.arm.name, point.values), []).append((point, result))
    out = []
    for members in groups.values():
        members.sort(key=lambda item: item[0].seed)
        first, seeds = members[0][0], tuple(point.seed for point, _ in members)
        out.append(PointResults(first.arm, first.values, seeds, tuple(result for _, result in members)))
    return out


def has_truth(points: Sequence[PointResults]) -> bool:
    """Returns whether every run was scored with a known true reward."""
    return all(result.truth is not None for point in points for result in point.results)


def best_point(points: Sequence[PointResults], kl_limit: float) -> PointResults:
    """Selects the best point of an arm, using only validation data.

    If the true reward is known, this is the point with the highest validation reward among those with a validation KL
    up to ``kl_limit``, or the point with the lowest KL if none is below the limit. Otherwise, it is the point with the
    highest validation accuracy. Non-finite values rank last. Points with fewer seeds than others are excluded, and so
    are points whose model was destroyed by training, unless this is true of all points.
    """
    most = max(len(point.results) for point in points)
    whole = [point for point in points if len(point.results) == most]
    whole = [point for point in whole if not any(result.is_destroyed for result in point.results)] or whole
    if not has_truth(whole):
        return max(whole, key=lambda point: _finite_or(point.mean_metric("val/rewards/accuracies"), -math.inf))
    within = [point for point in whole if point.mean_truth_score("validation", "kl") <= kl_limit]
    if not within:
        return min(whole, key=lambda point: _finite_or(point.mean_truth_score("validation", "kl"), math.inf))
    return max(within, key=lambda point: _finite_or(point.mean_truth_score("validation", "reward"), -math.inf))


def _finite_or(value: float, worst: float) -> float:
    """Returns ``value``, or ``worst`` if it is not finite, since NaN has no order."""
    return value if math.isfinite(value) else worst


def interval_text(interval: Interval) -> str:
    """Formats the bounds of an interval; "[no interval]" if they are NaN."""
    return "[no interval]" if math.isnan(interval.low) else f"[{interval.low:.3f}, {interval.high:.3f}]"


def difference_text(difference: Interval | None) -> str:
    """Formats a difference with its interval; empty if None."""
    return "" if difference is None else f"{difference.mean:+.3f} {interval_text(difference)}"


def verdict(difference: Interval) -> str:
    """Returns "helps", "harms" or "no clear difference", depending only on whether the interval excludes 0."""
    if not difference.excludes_zero:
        return "no clear difference"
    return "helps" if difference.mean > 0 else "harms"


# ------------------------------------------------------------------------------------------------ at a given KL


def epochs_trained(result: RunResult, step_pairs: int) -> float:
    """Returns the number of epochs a run trained for, with ``step_pairs`` pairs per step; NaN without a pair count."""
    return result.steps * step_pairs / result.input("train", "pairs")


@dataclass(frozen=True)
class PathPoint:
    """Point on the reward-KL path of an arm and seed: KL to the base, validation and test rewards, and grid values.

    KL and ``rewards`` are measured on test prompts.
    """

    kl: float
    validation: float
    rewards: Rewards
    values: tuple[str, ...] = ()


@dataclass(frozen=True)
class RewardAtKL:
    """Rewards of an arm at a KL level.

    ``rewards``: rewards on test prompts, one row per seed in ``seeds``. ``kl``: mean KL over seeds; it is below the
    level if no point with a larger KL is better on validation prompts. ``mark``: empty for rewards at the level; ENDS
    if no point of any seed reaches the level (the rewards are those at the end of the path); CHORD if the level falls
    between the base and a first point with a KL above FAR times the level. ``gap``: whether, for some seed, the KLs of
    the trained points around the level differ by more than a factor of FAR.
    """

    seeds: tuple[int, ...]
    rewards: Float[np.ndarray, "seeds prompts"]
    kl: float
    mark: str = ""
    gap: bool = False

    @property
    def mean_reward(self) -> float:
        """Returns the mean reward over seeds and prompts."""
        return float(self.rewards.mean())


def reward_kl_path(points: Sequence[PointResults], seed: int) -> list[PathPoint]:
    """Returns the reward-KL path of an arm and seed: the base, then its grid points by ascending KL.

    A point is on the path only if its KL is finite and its validation reward exceeds that of all points with smaller
    KL. The path starts at the base, regardless of its reward; if the base's rewards were not stored, it starts at the
    first point.
    """
    scores = [
        (point.truth_scores("test")[place], point.truth_scores("validation")[place].numbers["reward"], point.values)
        for point in points
        for place, of in enumerate(point.seeds)
        if of == seed
    ]
    marks = [PathPoint(max(test.numbers["kl"], 0.0), reward, np.array(test.rewards), at) for test, reward, at in scores]
    kept: list[PathPoint] = []
    for mark in sorted((mark for mark in marks if math.isfinite(mark.kl)), key=lambda mark: mark.kl):
        if not kept or mark.validation > kept[-1].validation:
            kept.append(mark)
    base = [test.base_rewards for test, *_ in scores[:1] if test.base_rewards is not None]
    return [*(PathPoint(0.0, -math.inf, np.array(rewards)) for rewards in base), *kept]


def rewards_at_kl(points: Sequence[PointResults], level: float) -> RewardAtKL | None:
    """Interpolates an arm's test rewards at a KL level, linearly in the square root of KL on each seed's path.

    Returns None if no seed's path has a point at or below the level.
    """
    places = [
        _rewards_at_kl_for_seed(points, seed, level)
        for seed in sorted({seed for point in points for seed in point.seeds})
    ]
    known = [place for place in places if place is not None]
    if not known:
        return None
    kept = [place for place in known if not place.mark] or [place for place in known if place.mark == known[0].mark]
    rewards = np.concatenate([place.rewards for place in kept])
    seeds = tuple(seed for place in kept for seed in place.seeds)
    kl, gap = float(np.mean([place.kl for place in kept])), any(place.gap for place in kept)
    return RewardAtKL(seeds, rewards, kl, kept[0].mark, gap)


def _rewards_at_kl_for_seed(points: Sequence[PointResults], seed: int, level: float) -> RewardAtKL | None:
    marks = reward_kl_path(points, seed)
    within = [mark for mark in marks if mark.kl <= level]
    beyond = [mark for mark in marks if mark.kl > level]
    if not within:
        return None
    before = within[-1]
    if not beyond:
        far = (
            point.truth_scores("test")[point.seeds.index(seed)].numbers["kl"] for point in points if seed in point.seeds
        )
        reached = any(level <= kl < math.inf for kl in far)
        return RewardAtKL((seed,), before.rewards[None], before.kl, "" if reached else ENDS)
    low, high = math.sqrt(before.kl), math.sqrt(beyond[0].kl)
    share = (math.sqrt(level) - low) / (high - low)
    mark = CHORD if before.kl == 0 and beyond[0].kl > FAR * level else ""
    rewards = ((1 - share) * before.rewards + share * beyond[0].rewards)[None]
    return RewardAtKL((seed,), rewards, level, mark, gap=beyond[0].kl > FAR * before.kl > 0)


def points_between(points: Sequence[PointResults], levels: Sequence[float], seed: int) -> list[Point]:
    """Returns grid points to train next, at most one per arm, to get a trained point closer to a KL level.

    Their grid values are geometric means of those of the trained points around the first level at which the KLs of
    these points differ by more than a factor of FAR. Arms whose points differ in a non-numeric value are skipped.
    """
    found = []
    for arm in dict.fromkeys(point.arm for point in points):
        of_arm = [point for point in points if point.arm == arm and seed in point.seeds]
        path = [mark for mark in reward_kl_path(of_arm, seed) if mark.values]
        for low, high in itertools.pairwise(path):
            values = tuple(map(_geometric_mean, low.values, high.values))
            wide = high.kl > FAR * low.kl and any(low.kl <= level < high.kl for level in levels)
            if wide and None not in values and all(point.values != values for point in of_arm):
                found.append(Point(arm, tuple(filter(None, values)), seed))
                break
    return found


def _geometric_mean(low: str, high: str) -> str | None:
    """Returns the override with the geometric mean of two values; None if they differ and are not numeric."""
    if low == high:
        return low
    key, _, _ = low.partition("=")
    with suppress(ValueError):
        one, other = (float(override.partition("=")[2]) for override in (low, high))
        return f"{key}={math.sqrt(one * other):.3g}"
    return None


def paired_rewards(
    one: RewardAtKL | PointResults, other: RewardAtKL | PointResults
) -> tuple[list[int], Float[np.ndarray, "seeds prompts"]]:
    """Returns the seeds shared by two arms and the differences in test reward, paired by seed and prompt."""
    shared = [seed for seed in one.seeds if seed in other.seeds]
    rows = [found.rewards[[found.seeds.index(seed) for seed in shared]] for found in (one, other)]
    return shared, rows[0] - rows[1]


def reward_difference(one: RewardAtKL | PointResults, other: RewardAtKL | PointResults) -> Interval | None:
    """Returns the difference in test reward between two arms, paired by seed and prompt; None if they share no seed."""
    shared, differences = paired_rewards(one, other)
    return mean_interval(differences) if shared else None
