"""Outcome of a study: results by arm and grid point, which point stands for an arm, and its rewards at a given KL.

The point is chosen on validation alone. For a KL the points of a seed stand in the order of theirs on test prompts;
which of them stay is decided on validation prompts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import mean, stdev

import numpy as np
from jaxtyping import Float

from attnpo.evaluation.intervals import Interval, hierarchical_bootstrap, paired_difference, t_quantile
from attnpo.lab.studies.study import Arm, MeasuredBy, Point, Study, WorldSeed, short_key
from attnpo.run.result import RunResult, TruthScores
from attnpo.schema import digest

Rewards = Float[np.ndarray, "prompts"]
ENDS, CHORD = "<", "~"  # after a value that is none at the level: the path ends before it, or has nothing near it
FAR = 2.0  # times the level: from a first point beyond that nothing is known of the level


@dataclass(frozen=True)
class RowScore:
    """Row's score on a benchmark, the one called ``name`` that counts there: a mean over rounds per seed.

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
    def failure_text(self) -> str:
        """Returns what stands in the table where an evaluation failed; empty where none did."""
        lacking = self.seeds - len(self.values)
        if not lacking:
            return ""
        return "FAILED" if not self.values else f"FAILED ({lacking} of {self.seeds} seeds)"

    @property
    def mean(self) -> float:
        """Returns the mean over seeds; NaN where an evaluation failed."""
        return math.nan if self.failure_text else mean(self.values)

    @property
    def half_width(self) -> float | None:
        """Returns half of the 95 % interval of the mean over seeds (Student's t); None for fewer than two."""
        count = len(self.values)
        if self.failure_text or count < 2:
            return None
        return t_quantile(0.975, count - 1) * stdev(self.values) / math.sqrt(count)

    @property
    def interval_bounds(self) -> tuple[float, float]:
        """Returns the interval over seeds, else that over questions; NaN where there is neither."""
        width = self.half_width
        if width is not None:
            return self.mean - width, self.mean + width
        return (math.nan, math.nan) if self.failure_text or self.interval is None else self.interval


@dataclass(frozen=True)
class SourceCost:
    """Forward passes that an arm's weights ask of models, beyond what training does with any weights.

    ``once``: sequences read of each pair before training, in ``seconds`` (None: not known). ``again``: sequences read
    forward and backward once more whenever a pair is trained on. ``step_pairs``: pairs of an optimiser step.
    """

    once: int = 0
    seconds: float | None = None
    again: int = 0
    step_pairs: int = 1


@dataclass(frozen=True)
class ScorerRun:
    """Trained scorer: its model folder, the run's result, and the sequences that training read of each pair.

    ``forwards`` has those of the reference too; validation is not counted.
    """

    model: Path
    result: RunResult
    forwards: float
    backwards: float


@dataclass(frozen=True)
class PointResults:
    """All results of one arm at one grid point, one per seed in rising order."""

    arm: Arm
    values: tuple[str, ...]
    seeds: tuple[int, ...]
    results: tuple[RunResult, ...]

    def truth_scores(self, split: str) -> list[TruthScores]:
        """Returns the scores of a split, one per seed. ValueError where no truth is known."""
        known = [result.truth[split] for result in self.results if result.truth is not None]
        if len(known) < len(self.results):
            raise ValueError(f"{self.label} has no scores against a known truth")
        return known

    def mean_truth_score(self, split: str, name: str) -> float:
        """Returns the mean over seeds of a truth score."""
        return float(np.mean([scores.numbers[name] for scores in self.truth_scores(split)]))

    @property
    def rewards(self) -> Float[np.ndarray, "seeds prompts"]:
        """Returns true rewards on test prompts, a row per seed and a column per prompt."""
        return np.array([scores.rewards for scores in self.truth_scores("test")])

    @cached_property
    def interval(self) -> Interval:
        """Returns the mean test reward with its interval over seeds and prompts."""
        return hierarchical_bootstrap(self.rewards)

    def mean_metric(self, name: str) -> float:
        """Returns the mean over seeds of a last logged metric; NaN where it is missing."""
        return float(np.mean([result.metrics.get(name, math.nan) for result in self.results]))

    def mean_drift(self, name: str) -> float:
        """Returns the mean over seeds of a number of ``RunResult.drift`` by its path; NaN where it is missing."""
        return float(np.mean([result.drift_value(name) for result in self.results]))

    def mean_input(self, name: str) -> float:
        """Returns the mean over seeds of a statistic of the training examples; NaN where it is missing."""
        return float(np.mean([result.input("train", name) for result in self.results]))

    @property
    def label(self) -> str:
        """Returns the grid values, as in "lr 5e-05 beta 0.1"."""
        return values_label(self.values)


@dataclass(frozen=True)
class Outcome:
    """Finished study: its points with their results, those that failed with their errors, the grid's digest.

    ``measured``: results of the study's analyses by their names, world and seed; ``unmeasured``: what failed of them.
    ``costs``: seconds that were spent once for all arms, per world and seed, as far as they are known: of the "base",
    of the "judge" (the passes of judge, verbalizer and scorers over the pairs, those of all commands together), of the
    training of "scorers", by whichever command. ``warnings``: what is wrong with what the points stand on.
    ``benchmarks``: scores of the table's rows by benchmark, then by world and name of the row. ``reads``: what an arm's
    weights ask of models, by world, seed and arm; ``scorers``: those that were trained, by their names. ``folders``:
    where each run lies.
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
        """Returns the digest of world, grid and arms, fixed before the points ran."""
        return digest(self.record)[:16]

    @property
    def seeds(self) -> list[int]:
        """Returns the seeds of a study, those without results too."""
        return sorted({point.seed for point, _ in [*self.points, *self.failed]})

    @cached_property
    def results(self) -> list[PointResults]:
        """Returns the results by world, arm and grid point."""
        return group_by_point(self.points)

    @property
    def has_truth(self) -> bool:
        """Returns whether every result carries scores against a known truth."""
        return has_truth(self.results)

    @property
    def worlds(self) -> list[str]:
        """Returns the study's worlds in its order; the only one of a study without worlds is ""."""
        return list(dict.fromkeys(arm.world for arm in self.arms))

    def arms_in_world(self, world: str) -> list[Arm]:
        """Returns the arms of a world."""
        return [arm for arm in self.arms if arm.world == world]

    def scorers_in_world(self, world: str) -> list[dict[str, ScorerRun]]:
        """Returns the trained scorers of each seed of a world."""
        return [made for (of, _), made in self.scorers.items() if of == world]

    def points_by_arm(self, world: str) -> dict[str, list[PointResults]]:
        """Returns the grid points of every arm of a world, in the study's order; none for an arm without results."""
        points = [point for point in self.results if point.arm.world == world]
        return {
            arm.name: [point for point in points if point.arm.name == arm.name] for arm in self.arms_in_world(world)
        }

    def best_points(self, world: str) -> dict[str, PointResults]:
        """Returns the point that stands for each arm of a world with results, in the study's order."""
        found = self.points_by_arm(world).items()
        return {name: best_point(points, self.study.kl_limit) for name, points in found if points}

    def missing_seeds_mark(self, have: int) -> str:
        """Returns a mark on what stands on fewer seeds than the study has; else empty."""
        every = len(self.seeds)
        return "" if have == every else f" ({have} of {every} seeds)"


def values_label(values: Sequence[str]) -> str:
    """Returns the grid values for reading."""
    pairs = [value.split("=", 1) for value in values]
    return " ".join(f"{short_key(key)} {value}" for key, value in pairs)


def group_by_point(points: Sequence[tuple[Point, RunResult]]) -> list[PointResults]:
    """Returns the results by world, arm and grid point, in the order the study lists them."""
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
    """Returns whether every result carries scores against a known truth."""
    return all(result.truth is not None for point in points for result in point.results)


def best_point(points: Sequence[PointResults], kl_limit: float) -> PointResults:
    """Returns the point that stands for an arm, chosen on validation data alone.

    With a known truth: the highest validation reward among points with validation KL up to ``kl_limit`` (if none, the
    one with the smallest KL). Otherwise the highest validation accuracy of the rewards. What is not finite loses, and
    so does a model that training destroyed, unless all are. A point that lacks seeds is not chosen.
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
    """Returns ``value``, or ``worst`` for one that is not finite: NaN has no order."""
    return value if math.isfinite(value) else worst


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


# ------------------------------------------------------------------------------------------------ at a given KL


def epochs_trained(result: RunResult, step_pairs: int) -> float:
    """Returns how often a run of steps of ``step_pairs`` trained on each pair; NaN without their count."""
    return result.steps * step_pairs / result.input("train", "pairs")


@dataclass(frozen=True)
class PathPoint:
    """Policy on the path of an arm and a seed: its KL to the base on test prompts, its rewards."""

    kl: float
    validation: float
    rewards: Rewards


@dataclass(frozen=True)
class RewardAtKL:
    """Arm at a KL level.

    ``rewards``: on test prompts, a row per seed of ``seeds``. ``kl``: the mean over seeds of the level, or of less
    where nothing beyond is better on validation. ``mark`` is empty where the value is one at the level, of the seeds
    that have one; where none has, it is ENDS if no point goes as far (the value is the end of the path), or CHORD if
    the level lies between the base and a first point of more than FAR times the level.
    """

    seeds: tuple[int, ...]
    rewards: Float[np.ndarray, "seeds prompts"]
    kl: float
    mark: str = ""

    @property
    def reward(self) -> float:
        """Returns the mean over seeds and prompts."""
        return float(self.rewards.mean())


def reward_kl_path(points: Sequence[PointResults], seed: int) -> list[PathPoint]:
    """Returns the path of an arm and a seed: the base, then the grid points by rising KL.

    A point stays if its validation reward is above those of all points with less KL; one whose KL is not finite has no
    place. The base only gives the path its start; it competes with no point, and is left out where its rewards were not
    stored.
    """
    scores = [
        (point.truth_scores("test")[place], point.truth_scores("validation")[place].numbers["reward"])
        for point in points
        for place, of in enumerate(point.seeds)
        if of == seed
    ]
    marks = [PathPoint(max(test.numbers["kl"], 0.0), reward, np.array(test.rewards)) for test, reward in scores]
    kept: list[PathPoint] = []
    for mark in sorted((mark for mark in marks if math.isfinite(mark.kl)), key=lambda mark: mark.kl):
        if not kept or mark.validation > kept[-1].validation:
            kept.append(mark)
    base = [test.base_rewards for test, _ in scores[:1] if test.base_rewards is not None]
    return [*(PathPoint(0.0, -math.inf, np.array(rewards)) for rewards in base), *kept]


def rewards_at_kl(points: Sequence[PointResults], level: float) -> RewardAtKL | None:
    """Returns an arm's test rewards at a KL level, linear in the root of KL on each seed's path.

    None where no seed's path has anything within the level.
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
    return RewardAtKL(seeds, rewards, float(np.mean([place.kl for place in kept])), kept[0].mark)


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
    return RewardAtKL((seed,), ((1 - share) * before.rewards + share * beyond[0].rewards)[None], level, mark)


def reward_difference(one: RewardAtKL | PointResults, other: RewardAtKL | PointResults) -> Interval | None:
    """Returns the difference of two arms' test rewards, paired by seed and prompt; None when they share no seed."""
    shared = [seed for seed in one.seeds if seed in other.seeds]
    if not shared:
        return None
    rows = [found.rewards[[found.seeds.index(seed) for seed in shared]] for found in (one, other)]
    return paired_difference(rows[0], rows[1])
