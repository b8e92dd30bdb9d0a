"""Study as plain data: what it varies (arms, grids, worlds, seeds), what it measures and what was predicted of it."""

import itertools
import json
import re
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from attnpo.cli.terminal import exit_status_and_message
from attnpo.config.reader import did_you_mean
from attnpo.judge.layers import distinct_layers
from attnpo.schema import UserError, digest
from attnpo.weights.base import WeightSource

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
        return {name: value for name, value in asdict(self).items() if name != "settings"}


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
    """Measurement that needs no trained policy (config node ``study.analyses.NAME``)."""

    def measure(
        self,
        source: "WeightSource",
        readers: "Readers",
        truth: "Truth | None",
        encoded: "dict[str, EncodedSet]",
        folder: Path,
    ) -> dict[str, object]:
        """Returns plain JSON data of one world and seed; ``folder`` is where figures or files of its own may go.

        ``source`` and ``readers`` are the study's weights in that world without the choices of any arm, and what they
        are read with; ``truth`` is the scorer of a world whose truth is known. The result is kept, and used
        again by a repeated command whose settings, world and judge are the same.
        """

    def sections(self, outcome: Any, measured: MeasuredBy) -> "list[Section]":
        """Returns what is shown beside the tables of an ``Outcome``; ``measured`` is by (world, seed)."""


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
        return list(itertools.product(*([f"{key}={word(v)}" for v in values] for key, values in self.axes.items())))

    def record(self) -> dict[str, object]:
        """Returns the values as they are kept beside a study's results."""
        keys = {key: list(values) for key, values in self.keys.items() if values}
        return {"lr": list(self.lr), "beta": list(self.beta), **({"keys": keys} if keys else {})}

    def __str__(self) -> str:
        beta = {} if self.keys and not self.beta else {"beta": list(self.beta) or "as set"}
        keys = {short(key): list(values) for key, values in self.keys.items() if values}
        parts = [("lr", list(self.lr) or "as set"), *beta.items(), *keys.items()]
        return ", ".join(f"{name} {values}" for name, values in parts)


def short(key: str) -> str:
    """Returns a key for reading: its last part."""
    return key.rpartition(".")[2]


def word(value: object) -> str:
    """Returns a value as an override says it."""
    return quote(value) if isinstance(value, str) else json.dumps(value)


def quote(text: str) -> str:
    """Returns a text as an override says it."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


@dataclass(frozen=True)
class WorldAxis:
    """Worlds on a scale: ``at`` gives each its place, ``label`` what is counted, ``arms`` whose gains are drawn."""

    label: str
    at: dict[str, float]
    arms: tuple[str, ...]
    title: str = ""


@dataclass(frozen=True)
class Study:
    """Study by its arms.

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


def of_world(world: str, name: object) -> str:
    """Returns a name with its world before it, where there are several."""
    return f"{world}: {name}" if world else str(name)


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
        return of_world(self.world, self.name)


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
    """Returns what is fixed before an arm is run, for any number of seeds; every table shows its digest.

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
    """Returns the digest of a ``grid_record`` without what was predicted: grid, arms and worlds."""
    return digest({key: value for key, value in record.items() if key != "predictions"})[:16]


def error_text(error: Exception) -> str:
    """Returns an error as it is reported: what a user can mend as a command says it, else with its traceback."""
    ending = exit_status_and_message(error)
    return "".join(traceback.format_exception(error)).strip() if ending is None else ending[1].removeprefix("error: ")


def last_line(text: str) -> str:
    """Returns the last line of an error's text."""
    return text.strip().rpartition("\n")[2] or "no message"


WorldSeed = tuple[str, int]  # a world and a seed
ROWS = 2  # sequences of a pair: the prompt with each response
