"""A study as plain data: what it varies (arms, grids, worlds, seeds), what it measures and what was predicted of it."""

import itertools
import json
import math
import re
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from attnpo.cli.terminal import ending_of
from attnpo.config.reader import did_you_mean
from attnpo.judge.layers import distinct_layers
from attnpo.objectives.base import PreferenceObjective
from attnpo.run.result import RunResult
from attnpo.schema import UserError, digest
from attnpo.weights.base import WeightSource, online_reads

if TYPE_CHECKING:
    from attnpo.data.prepare import EncodedSet
    from attnpo.display.page import Section
    from attnpo.run.components import Truth
    from attnpo.run.resolve import Readers


@dataclass(frozen=True)
class Claim:
    """One prediction: at KL ``level`` the test rewards of ``above`` sum to more than those of ``below``.

    Both list as many (world, arm); one of each is a difference of two arms, two of each a difference of differences.
    ``about`` names the explanation it follows from, ``says`` is the prediction in words.
    """

    about: str
    says: str
    above: tuple[tuple[str, str], ...]
    below: tuple[tuple[str, str], ...]
    level: float = 1.0

    def __post_init__(self) -> None:
        if not self.above or len(self.above) != len(self.below):
            raise UserError(
                "study.predictions: expected as many (world, arm) in above as in below, got "
                f"{len(self.above)} and {len(self.below)}"
            )
        if not self.level > 0:
            raise UserError(f"study.predictions: expected a KL level above 0, got {self.level}")


@dataclass(frozen=True)
class Predictions:
    """Predictions for a study on ``seeds``, made before it ran on any of them, and the ``rule`` that decides.

    ``settings``: digest of the grid, arms and worlds they were made for (``settings_digest``); None takes any.
    """

    seeds: tuple[int, ...]
    rule: str
    claims: dict[str, Claim]
    settings: str | None = None

    def record(self) -> dict[str, object]:
        """Returns the predictions as they are kept beside a study's results, and digested."""
        claims = {
            name: {**vars(claim), "above": [*map(list, claim.above)], "below": [*map(list, claim.below)]}
            for name, claim in self.claims.items()
        }
        return {"seeds": list(self.seeds), "rule": self.rule, "claims": claims}


PREFIX = "SCORER."
# Where a model that weighs may stand: all paths of a run but those of what is trained.
PLACES = ("judge.path", "verbalizer.path", "weights.path", "weights.NAME.path")


def scorers_of(overrides: Sequence[str]) -> dict[str, str]:
    """Returns the scorers that an arm's overrides name, by the key that takes the model's path."""
    parts = (item.partition("=") for item in overrides)
    return {
        key.lstrip("+~"): value.removeprefix(PREFIX)
        for key, _, value in parts
        if value.startswith(PREFIX) and value != PREFIX
    }


def scorer_problems(scorers: Mapping[str, Sequence[str]], arms: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yields what is wrong with a study's scorers, and with the names that its arms have for them."""
    for name, overrides in scorers.items():
        if not name.isidentifier():
            yield f"study.scorers has {name!r}: expected a name of letters, digits and _, as in {PREFIX}oracle"
        for key, other in scorers_of(overrides).items():
            yield (
                f"study.scorers.{name} has {key}={PREFIX}{other}: scorers are trained side by side, and none can wait "
                "for another: give a path, or leave it out"
            )
        if any(item.lstrip("+~").startswith(("data.path=", "data.mix")) for item in overrides):
            yield (
                f"study.scorers.{name} sets data.path or data.mix: scorers are trained on the study's own pairs; leave "
                "it out"
            )
    for arm, overrides in arms.items():
        for key, name in scorers_of(overrides).items():
            if name not in scorers:
                yield (
                    f"arm {arm} has {key}={PREFIX}{name}, and study.scorers has "
                    f"{', '.join(scorers) or 'none'}{did_you_mean(name, list(scorers))}"
                )
            if key not in PLACES and re.fullmatch(r"weights\.[^.]*\.path", key) is None:
                yield (
                    f"arm {arm} has {key}={PREFIX}{name}: a scorer stands for a model that weighs; expected one of "
                    f"{', '.join(PLACES)}"
                )


ALL = "all"  # stands for every benchmark
BASE_ROW = "base"
# What a study sets itself, row by row.
SET_BY_STUDY = ("benchmark", "model.path", "output", "label")


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


LR, BETA = "optimizer.lr", "objective.beta"  # the keys of a grid's two named axes
ONLY = ""  # the name of the world of a study that has no worlds


MeasuredBy = dict[tuple[str, int], dict[str, object]]


@runtime_checkable
class StudyAnalysis(Protocol):
    """A measurement that needs no trained policy (config node ``study.analyses.NAME``)."""

    def measure(
        self,
        source: "WeightSource",
        readers: "Readers",
        truth: "Truth | None",
        encoded: "dict[str, EncodedSet]",
        folder: Path,
    ) -> dict[str, object]:
        """Plain JSON data of one world and seed; ``folder`` is where figures or files of its own may go.

        ``source`` and ``readers`` are the study's weights in that world without the choices of any arm, and what they
        are read with; ``truth`` is the scorer of a world whose truth is known. The result is kept, and used
        again by a repeated command whose settings, world and judge are the same.
        """

    def sections(self, outcome: "Outcome", measured: MeasuredBy) -> "list[Section]":
        """Returns what is shown of it beside the study's tables; ``measured`` is by (world, seed), the only world being
        "".
        """


@dataclass(frozen=True)
class Grid:
    """Learning rates, betas and values of further keys that an arm's points are the product of, fixed before any runs.

    ``keys`` maps a key of the configuration to its values, for what neither of the others is: the ratio of SimPO, the
    coefficient of ORPO; one value sets the key at every point. ``origin`` says in tables and footnotes where the values
    come from or what unit they count in; empty says nothing.
    """

    lr: tuple[float, ...] = ()
    beta: tuple[float, ...] = ()
    keys: dict[str, tuple[object, ...]] = field(default_factory=dict, hash=False)
    origin: str = ""

    def __post_init__(self) -> None:
        for name, values in (("lr", self.lr), ("beta", self.beta)):
            if not all(value > 0 for value in values):
                raise UserError(f"grid.{name}: expected numbers above 0, got {list(values)}")
        for key, name in {LR: "lr", BETA: "beta"}.items():
            if key in self.keys:
                raise UserError(f"grid.keys has {key}, which is the grid's axis {name}: give its values as {name}")

    @property
    def axes(self) -> dict[str, tuple[object, ...]]:
        """Returns the values by key, in the order of a point's overrides; nothing for an empty axis."""
        every = {LR: self.lr, BETA: self.beta, **self.keys}
        return {key: values for key, values in every.items() if values}

    def overrides(self) -> list[tuple[str, ...]]:
        """Returns one tuple of overrides per grid point; a single empty one when nothing is varied."""
        return list(itertools.product(*([f"{key}={_word(v)}" for v in values] for key, values in self.axes.items())))

    def record(self) -> dict[str, object]:
        """Returns the values as they are kept beside a study's results."""
        keys = {key: list(values) for key, values in self.keys.items() if values}
        return {"lr": list(self.lr), "beta": list(self.beta), **({"keys": keys} if keys else {})}

    def __str__(self) -> str:
        parts = [f"lr {list(self.lr) or 'as set'}"]
        if self.beta or not self.keys:
            parts.append(f"beta {list(self.beta) or 'as set'}")
        return ", ".join([*parts, *(f"{short(key)} {list(values)}" for key, values in self.keys.items() if values)])


def short(key: str) -> str:
    """Returns a key for reading: its last part."""
    return key.rpartition(".")[2]


def _word(value: object) -> str:
    """Returns a value as an override says it."""
    return json.dumps(value) if value is None or isinstance(value, bool | list | dict) else repr(value)


@dataclass(frozen=True)
class WorldAxis:
    """Worlds on a scale: ``at`` gives each its place, ``label`` what is counted, ``arms`` whose gains are drawn."""

    label: str
    at: dict[str, float]
    arms: tuple[str, ...]
    title: str = ""


@dataclass(frozen=True)
class Study:
    """A study by its arms.

    ``arms`` maps a name to the overrides that make it; ``truth_arms`` are added after them where the setting has a
    known truth. ``layers`` splits the arm named ``layer_arm`` into one arm per layer (numbers, "last", fractions of
    depth; those that coincide on a shallow model are merged and logged). ``sources`` are options of the group
    weights, each one more arm that is named by it. ``scorers`` are models that the study trains for its arms, runs
    of their own in each world and seed: a name to the overrides that make it; an arm's
    ``weights.oracle.path=SCORER.NAME`` stands for that model. ``control`` is the arm the others are compared with;
    null compares none. ``grid`` is that of every arm but those in ``grids``, which have other keys or units.
    ``worlds`` maps a name to the overrides that make it: every arm runs in every world, with a base, a judge pass
    and a comparison of that world's own; an arm named in ``only_in`` runs in the worlds listed there alone.
    ``world_axis`` puts worlds on a scale, over which gains are drawn. ``predictions`` are what was expected before
    the runs. ``analyses`` are measured once per world and seed. ``seeds`` are counted from the run's seed.
    ``kl_limit`` bounds the KL to the base of the point that represents an arm; ``kl_levels`` are those at which
    rewards are compared. ``workers`` points run at a time on a CPU. ``shared`` are overrides of every point.
    ``restart`` gives a repeated command a fresh folder instead of its finished points. ``ranking`` adds a table of
    all arms with the average of their ranks, ``costs`` one of what their weights cost. ``benchmarks`` are options
    of the group of that name, on which the base, the chosen point of every arm and ``published`` models (folders or
    hub names) are measured, with the keys in ``evaluate`` (by benchmark, "all" for every one) set to the values
    there.
    """

    name: str
    arms: dict[str, list[str]]
    grid: Grid = field(default_factory=Grid)
    layers: tuple[int | str, ...] = ()
    layer_arm: str = "attention"
    control: str | None = "uniform"
    seeds: int = 5
    kl_limit: float = 2.0
    workers: int = 2
    shared: tuple[str, ...] = ()
    restart: bool = False
    title: str = ""
    truth_arms: dict[str, list[str]] = field(default_factory=dict)
    grids: dict[str, Grid] = field(default_factory=dict)
    worlds: dict[str, list[str]] = field(default_factory=dict)
    only_in: dict[str, list[str]] = field(default_factory=dict)
    world_axis: WorldAxis | None = None
    predictions: Predictions | None = None
    analyses: dict[str, StudyAnalysis] = field(default_factory=dict)
    kl_levels: tuple[float, ...] = (0.5, 1.0, 2.0)
    ranking: bool = False
    sources: tuple[str, ...] = ()
    scorers: dict[str, list[str]] = field(default_factory=dict)
    costs: bool = False
    benchmarks: tuple[str, ...] = ()
    evaluate: dict[str, dict[str, object] | None] = field(default_factory=dict)
    published: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for problem in self._problems():
            raise UserError(f"study {self.name}: {problem}")

    def _problems(self) -> Iterator[str]:
        names = ", ".join(self.arms)
        if not self.arms:
            yield "study.arms is empty; give at least one arm"
        if self.layers and self.layer_arm not in self.arms:
            yield f"study.layer_arm={self.layer_arm} is none of {names}"
        if self.control is not None and self.control not in self.arms:
            yield f"study.control={self.control} is none of {names} (null compares no arm)"
        if self.layers and self.control == self.layer_arm:
            yield f"study.control={self.control} is split into layers by study.layers; choose another arm"
        if self.seeds < 1 or self.workers < 1:
            yield "study.seeds and study.workers must be at least 1"
        twice = [name for name in self.truth_arms if name in self.arms]
        if twice:
            yield f"{', '.join(twice)} stands in study.arms and in study.truth_arms; give it once"
        again = [name for name, count in Counter([*self.arms, *self.truth_arms, *self.sources]).items() if count > 1]
        if again and not twice:
            yield f"study.sources has {', '.join(again)}, which is an arm already; leave it out"
        every = self.arms_with(truth=True)
        yield from scorer_problems(self.scorers, every)
        unknown = [name for name in self.grids if name not in every]
        if unknown:
            yield f"study.grids has {', '.join(unknown)}, which is no arm; arms are {', '.join(every)}"
        yield from self._lost_worlds(every)
        given = Counter(str(layer).strip().lower() for layer in self.layers)
        repeated = [layer for layer, count in given.items() if count > 1]
        if repeated:
            yield f"study.layers has {', '.join(repeated)} more than once; give each layer once"
        if any(not level > 0 for level in self.kl_levels) or not self.kl_limit > 0:
            yield "study.kl_limit and study.kl_levels must be above 0"
        yield from asked_problems(self.benchmarks, self.evaluate, self.published, list(every))

    def _lost_worlds(self, every: Mapping[str, list[str]]) -> Iterator[str]:
        """Yields what is wrong with names of arms and worlds in ``only_in``, ``world_axis`` and ``predictions``."""
        worlds = self.worlds or {ONLY: []}
        for name, chosen in self.only_in.items():
            if name not in every or not chosen or any(world not in self.worlds for world in chosen):
                yield f"study.only_in.{name}: expected an arm and some of its worlds {', '.join(worlds)}, got {chosen}"
            if name == self.control:
                yield f"study.only_in has the control {name}, which every world needs"
        axis = self.world_axis
        if axis is not None:
            unknown = [world for world in axis.at if world not in worlds] + [
                arm for arm in axis.arms if not self.is_layer(arm) and (arm not in every or self.is_split(arm))
            ]
            if unknown:
                yield f"study.world_axis has {', '.join(unknown)}, which is no world or no arm of the study"
        for name, claim in self.predictions.claims.items() if self.predictions else []:
            for world, arm in (*claim.above, *claim.below):
                known = self.is_layer(arm) or (arm in every and self.runs_in(arm, world) and not self.is_split(arm))
                if world not in worlds or not known:
                    where = f" in world {world}" if world else ""
                    yield (
                        f"study.predictions.claims.{name}: arm {arm} does not run{where}; study.predictions=null "
                        "leaves the predictions out"
                    )

    def is_split(self, arm: str) -> bool:
        """Returns whether an arm stands for one arm per layer."""
        return bool(self.layers) and arm == self.layer_arm

    def is_layer(self, arm: str) -> bool:
        """Returns whether a name is that of one of these, as far as it can be told before a model's depth is known."""
        return bool(self.layers) and re.fullmatch(rf"{re.escape(self.layer_arm)} L\d+", arm) is not None

    def runs_in(self, arm: str, world: str) -> bool:
        """Returns whether an arm of ``arms`` or ``truth_arms`` runs in a world."""
        return arm not in self.only_in or world in self.only_in[arm]

    def arms_in(self, world: str, truth: bool) -> dict[str, list[str]]:
        """Returns the arms of a world, in a setting with a known truth or without one."""
        return {name: found for name, found in self.arms_with(truth).items() if self.runs_in(name, world)}

    def arms_with(self, truth: bool) -> dict[str, list[str]]:
        """Returns the arms of a setting with a known truth or without one."""
        sources = {name: [f"weights={name}"] for name in self.sources}
        return {**self.arms, **sources, **(self.truth_arms if truth else {})}

    def grid_of(self, arm: str) -> Grid:
        """Returns the grid of an arm of ``arms`` or ``truth_arms``."""
        return self.grids.get(arm, self.grid)


@dataclass(frozen=True)
class Arm:
    """One arm in one world: its name, the overrides that make it, its layer when it stands for one, its grid."""

    name: str
    overrides: tuple[str, ...]
    layer: int | None = None
    world: str = ONLY
    grid: Grid | None = None

    @property
    def label(self) -> str:
        """Returns the name for logs, with the world where there are several."""
        return f"{self.world}: {self.name}" if self.world else self.name


@dataclass(frozen=True)
class Point:
    """One run of a study."""

    arm: Arm
    values: tuple[str, ...]
    seed: int

    @property
    def label(self) -> str:
        """Returns a short name for logs."""
        return f"{self.arm.label} {' '.join(self.values)} seed={self.seed}"


def expand_arms(study: Study, num_layers: int, *, truth: bool = False, world: str = ONLY) -> list[Arm]:
    """Returns the study's arms in one world, the layer arm replaced by one per distinct layer of ``num_layers``.

    ``truth``: whether the setting has a known truth.
    """
    arms: list[Arm] = []
    for name, overrides in study.arms_in(world, truth).items():
        grid = study.grid_of(name)
        if not study.layers or name != study.layer_arm:
            arms.append(Arm(name, tuple(overrides), None, world, grid))
            continue
        for layer in distinct_layers(study.layers, num_layers, "study.layers"):
            arms.append(Arm(f"{name} L{layer}", (*overrides, f"weights.layer={layer}"), layer, world, grid))
    return arms


def make_points(study: Study, arms: Sequence[Arm], seeds: Sequence[int]) -> list[Point]:
    """Returns every arm at every point of its grid for every seed.

    Seeds outermost so that early results cover all arms, then worlds, so that a process meets one base at a time.
    """
    points = []
    worlds = dict.fromkeys(arm.world for arm in arms)
    for seed, world in itertools.product(seeds, worlds):
        mine = [
            [Point(arm, values, seed) for values in (arm.grid or study.grid).overrides()]
            for arm in arms
            if arm.world == world
        ]
        points += [point for row in itertools.zip_longest(*mine) for point in row if point is not None]
    return points


def grid_record(study: Study, arms: Mapping[str, Mapping[str, object]], world: object) -> dict[str, object]:
    """Returns what is fixed before an arm is run, the same for any number of seeds; its digest stands under every
    table.

    ``arms``: the config of every arm without seeds, paths and grid values. ``world``: digest of a testbed's grammar and
    true reward (by world where there are several), None elsewhere.
    """
    own = {name: grid.record() for name, grid in study.grids.items()}
    return {
        "grid": study.grid.record(),
        **({"grids": own} if own else {}),
        "arms": dict(arms),
        **({"predictions": study.predictions.record()} if study.predictions else {}),
        "kl_limit": study.kl_limit,
        "kl_levels": list(study.kl_levels),
        "world": world,
    }


def settings_digest(record: Mapping[str, object]) -> str:
    """Digest of a ``grid_record`` without what was predicted: grid, arms and worlds."""
    return digest({key: value for key, value in record.items() if key != "predictions"})[:16]


def error_text(error: Exception) -> str:
    """Returns an error as it is reported: what a user can mend as a command says it, else with its traceback."""
    ending = ending_of(error)
    return "".join(traceback.format_exception(error)).strip() if ending is None else ending[1].removeprefix("error: ")


def last_line(text: str) -> str:
    """Returns the last line of an error's text."""
    return text.strip().rpartition("\n")[2] or "no message"


WorldSeed = tuple[str, int]  # a world and a seed
ROWS = 2  # sequences of a pair: the prompt with each response


def times_trained(result: RunResult, step_pairs: int) -> float:
    """Returns how often a run trained on each of its pairs, by its steps of ``step_pairs``; NaN without a count of
    pairs.
    """
    return result.steps * step_pairs / result.input("train", "pairs")


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
    def failure(self) -> str:
        """Returns what stands in the table where an evaluation failed; empty where none did."""
        lacking = self.seeds - len(self.values)
        if not lacking:
            return ""
        return "FAILED" if not self.values else f"FAILED ({lacking} of {self.seeds} seeds)"

    @property
    def mean(self) -> float:
        """Returns the mean over seeds; NaN where an evaluation failed."""
        return math.nan if self.failure else mean(self.values)

    @property
    def half_width(self) -> float | None:
        """Half of the 95 % interval of the mean over seeds (Student's t); None for fewer than two."""
        from attnpo.evaluation.intervals import t_quantile

        count = len(self.values)
        if self.failure or count < 2:
            return None
        return t_quantile(0.975, count - 1) * stdev(self.values) / math.sqrt(count)

    @property
    def bounds(self) -> tuple[float, float]:
        """Returns the interval over seeds, else that over questions; NaN where there is neither."""
        width = self.half_width
        if width is not None:
            return self.mean - width, self.mean + width
        return (math.nan, math.nan) if self.failure or self.interval is None else self.interval


@dataclass(frozen=True)
class Reads:
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
    """A trained scorer: its model folder, the run's result, and the sequences that training read of each pair.

    ``forwards`` has those of the reference too; validation is not counted.
    """

    model: Path
    result: RunResult
    forwards: float
    backwards: float

    @classmethod
    def of(
        cls,
        model: Path,
        result: RunResult,
        step_pairs: int,
        objective: PreferenceObjective,
        weights: WeightSource,
        reference: str,
    ) -> "ScorerRun":
        """Returns the scorer of a finished run; ``reference``: when its reference is read, if it is at all."""
        times, more = times_trained(result, step_pairs), 0.0
        if "reference" in objective.requires | online_reads(weights):
            more = ROWS * (1.0 if reference in ("cached", "first_epoch") else times)
        return cls(model, result, ROWS * times + more, ROWS * times)


@dataclass(frozen=True)
class Cost:
    """Seconds that were spent once for all arms; None where nothing is known of it.

    ``judge``: the passes of judge, verbalizer and scorers over the pairs, those of all commands together. ``scorers``:
    the training of the study's scorers, by whichever command.
    """

    base: float | None = None
    judge: float | None = None
    scorers: float | None = None


@dataclass(frozen=True)
class Outcome:
    """A finished study: its points with their results, those that failed with their errors, the grid's digest.

    ``measured``: results of the study's analyses by their names, world and seed; ``unmeasured``: what failed of them.
    ``costs``: what was spent once per world and seed. ``warnings``: what is wrong with what the points stand on.
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
    costs: dict[WorldSeed, Cost] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    benchmarks: dict[str, dict[tuple[str, str], RowScore]] = field(default_factory=dict)
    reads: dict[tuple[str, int, str], Reads] = field(default_factory=dict)
    scorers: dict[WorldSeed, dict[str, ScorerRun]] = field(default_factory=dict)
    lost_scorers: list[str] = field(default_factory=list)
    folders: dict[Point, Path] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Digest of world, grid and arms, fixed before the points ran."""
        return digest(self.record)[:16]

    @property
    def worlds(self) -> list[str]:
        """Returns the study's worlds in its order; the only one of a study without worlds is ""."""
        return list(dict.fromkeys(arm.world for arm in self.arms))
