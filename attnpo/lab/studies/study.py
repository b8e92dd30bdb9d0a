"""Defines studies as plain data: arms, grids, worlds, seeds, analyses, benchmarks and registered predictions."""

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
    """Prediction that at KL ``level``, the summed test reward of ``above`` exceeds that of ``below``.

    ``above`` and ``below`` list the same number of (world, arm) pairs: one each to compare two arms, two each to
    compare two differences. ``about`` names the underlying hypothesis; ``says`` states the prediction in words.
    """

    about: str
    says: str
    above: tuple[tuple[str, str], ...]
    below: tuple[tuple[str, str], ...]
    level: float = 1.0

    def __post_init__(self) -> None:
        if not self.above or len(self.above) != len(self.below):
            raise UserError(
                "study.predictions: above and below must list the same number of (world, arm) pairs, got "
                f"{len(self.above)} and {len(self.below)}"
            )
        if not self.level > 0:
            raise UserError(f"study.predictions: expected a KL level above 0, got {self.level}")


@dataclass(frozen=True)
class Predictions:
    """Predictions registered before a study ran on ``seeds``, and the ``rule`` that decides each of them.

    ``settings``: digest of the grid, arms and worlds that the predictions apply to (``settings_digest``); None for any.
    """

    seeds: tuple[int, ...]
    rule: str
    claims: dict[str, Claim]
    settings: str | None = None

    def to_dict(self) -> dict[str, object]:
        """Returns the predictions as plain data, as saved with a study's results and included in its digest."""
        return {name: value for name, value in asdict(self).items() if name != "settings"}


PREFIX = "SCORER."
# Keys that may refer to a scorer: the paths of models that compute weights.
PLACES = ("judge.path", "verbalizer.path", "weights.path", "weights.NAME.path")


def scorer_names_by_key(overrides: Sequence[str]) -> dict[str, str]:
    """Returns the names of the scorers used in an arm's overrides, keyed by the config key for the model path."""
    parts = (item.partition("=") for item in overrides)
    return {
        key.lstrip("+~"): value.removeprefix(PREFIX)
        for key, _, value in parts
        if value.startswith(PREFIX) and value != PREFIX
    }


def scorer_problems(scorers: Mapping[str, Sequence[str]], arms: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yields error messages for a study's invalid scorers and for its arms' invalid references to scorers."""
    for name, overrides in scorers.items():
        if not name.isidentifier():
            yield (
                f"study.scorers has {name!r}: a scorer's name may only contain letters, digits and _, e.g. "
                f"{PREFIX}oracle"
            )
        for key, other in scorer_names_by_key(overrides).items():
            yield (
                f"study.scorers.{name} sets {key}={PREFIX}{other}, but scorers are trained in parallel and cannot "
                "depend on each other: use a path, or remove the override"
            )
        if any(item.lstrip("+~").startswith(("data.path=", "data.mix")) for item in overrides):
            yield (
                f"study.scorers.{name} sets data.path or data.mix, but scorers are trained on the study's own pairs: "
                "remove the override"
            )
    for arm, overrides in arms.items():
        for key, name in scorer_names_by_key(overrides).items():
            if name not in scorers:
                yield (
                    f"arm {arm} sets {key}={PREFIX}{name}, but the scorers in study.scorers are: "
                    f"{', '.join(scorers) or 'none'}{did_you_mean(name, list(scorers))}"
                )
            if key not in PLACES and re.fullmatch(r"weights\.[^.]*\.path", key) is None:
                yield (
                    f"arm {arm} sets {key}={PREFIX}{name}, but a scorer can only be used for one of these keys: "
                    f"{', '.join(PLACES)}"
                )


ALL = "all"  # in study.evaluate: settings of every benchmark
BASE_ROW = "base"
# Keys of an evaluation that the study sets itself for each row.
SET_BY_STUDY = ("benchmark", "model.path", "output", "label")


def benchmark_problems(
    benchmarks: Sequence[str],
    evaluate: Mapping[str, Mapping[str, object] | None],
    published: Sequence[str],
    arms: Sequence[str],
) -> Iterator[str]:
    """Yields error messages for a study's benchmark keys."""
    given = {name: keys for name, keys in evaluate.items() if keys}
    twice = [name for name in dict.fromkeys(benchmarks) if benchmarks.count(name) > 1]
    if twice:
        yield f"study.benchmarks lists {', '.join(twice)} more than once: list each benchmark once"
    if published and not benchmarks:
        yield (
            f"study.published={list(published)} needs at least one benchmark, but study.benchmarks is empty: add a "
            "benchmark, or remove study.published"
        )
    lost = [name for name in given if name not in (*benchmarks, ALL)] if benchmarks else list(given)
    if lost:
        yield (
            f"study.evaluate.{lost[0]} would have no effect, because study.benchmarks is {list(benchmarks)}: use one "
            f"of these names, or {ALL} for every benchmark"
        )
    for name, keys in given.items():
        taken = [key for key in keys if key in SET_BY_STUDY]
        if taken:
            yield f"study.evaluate.{name} sets {taken[0]}, which the study itself sets for each row: remove it"
    names = [*arms, *([BASE_ROW] if benchmarks else []), *published]
    clash = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if benchmarks and clash:
        yield f"study.benchmarks: two rows of the table would be named {', '.join(clash)}: rename the arm"


LR, BETA = "optimizer.lr", "objective.beta"  # keys of a grid's two named axes
ONLY = ""  # name of the only world, in a study without worlds


MeasuredBy = dict[tuple[str, int], dict[str, object]]


@runtime_checkable
class StudyAnalysis(Protocol):
    """Analysis that needs no trained policy (config node ``study.analyses.NAME``)."""

    def measure(
        self,
        source: "WeightSource",
        readers: "Readers",
        truth: "Truth | None",
        encoded: "dict[str, EncodedSet]",
        folder: Path,
    ) -> dict[str, object]:
        """Analyses one world and seed and returns the result as plain JSON data.

        ``source``: the study's weight source in that world, without any arm's overrides. ``readers``: models and
        settings used to compute weights. ``truth``: scorer of a world with a known true reward, else None. ``folder``:
        folder for figures and other files. If the command is repeated with the same settings, world and judge, the
        saved result is reused.
        """

    def sections(self, outcome: Any, measured: MeasuredBy) -> "list[Section]":
        """Returns the report sections to show after the tables; ``measured`` contains the results by (world, seed)."""


@dataclass(frozen=True)
class Grid:
    """Grid of an arm: all combinations of learning rates, betas and values of further keys.

    The grid is fixed before any run. ``keys`` maps any other config key (e.g. SimPO's ratio or ORPO's coefficient) to
    its values; a single value is used at all points. ``origin`` is an optional note for tables and footnotes on the
    source or unit of the values.
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
                raise UserError(f"grid.keys has {key}, which is a separate axis: set its values in grid.{name}")

    @property
    def axes(self) -> dict[str, tuple[object, ...]]:
        """Returns the values by key, in the order of a point's overrides; empty axes are omitted."""
        every = {LR: self.lr, BETA: self.beta, **self.keys}
        return {key: values for key, values in every.items() if values}

    def point_overrides(self) -> list[tuple[str, ...]]:
        """Returns one tuple of overrides per grid point; a single empty tuple if nothing is varied."""
        return list(
            itertools.product(*([f"{key}={format_value(v)}" for v in values] for key, values in self.axes.items()))
        )

    def to_dict(self) -> dict[str, object]:
        """Returns the grid's values as plain data, as saved with a study's results."""
        keys = {key: list(values) for key, values in self.keys.items() if values}
        return {"lr": list(self.lr), "beta": list(self.beta), **({"keys": keys} if keys else {})}

    def __str__(self) -> str:
        beta = {} if self.keys and not self.beta else {"beta": list(self.beta) or "as set"}
        keys = {short_key(key): list(values) for key, values in self.keys.items() if values}
        parts = [("lr", list(self.lr) or "as set"), *beta.items(), *keys.items()]
        return ", ".join(f"{name} {values}" for name, values in parts)


def short_key(key: str) -> str:
    """Returns the last part of a dotted config key, for tables and messages."""
    return key.rpartition(".")[2]


def format_value(value: object) -> str:
    """Formats a value for a command-line override."""
    return quote(value) if isinstance(value, str) else json.dumps(value)


def quote(text: str) -> str:
    """Quotes a string for a command-line override."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


@dataclass(frozen=True)
class WorldAxis:
    """X axis labelled ``label`` for plotting the gains of ``arms``. ``at``: position of each world."""

    label: str
    at: dict[str, float]
    arms: tuple[str, ...]
    title: str = ""


@dataclass(frozen=True)
class Study:
    """Definition of a study: the arms to compare, their grids and seeds, and everything to measure.

    ``arms`` maps each arm's name to its overrides; ``truth_arms`` are added if the setting has a known true reward, and
    each of ``sources`` (options of the config group weights) adds an arm with the same name. ``layers`` splits the arm
    ``layer_arm`` into one arm per layer (numbers, "last" or fractions of depth; layers that coincide on a shallow model
    are merged and logged). ``control`` is the arm that the others are compared with; null turns comparisons off.
    ``grid`` applies to all arms without an entry in ``grids``. ``shared`` overrides apply to all points; ``truth``
    overrides apply only if the setting has a true reward. ``seeds``: number of consecutive seeds, starting at the run's
    seed. ``workers``: number of points that run in parallel on a CPU.

    ``worlds`` maps names to overrides: every arm runs in every world, which has its own base, judge pass and
    comparison; ``only_in`` restricts an arm to the listed worlds. ``world_axis`` plots gains against a quantity that
    differs between worlds. ``scorers`` maps names to the overrides of models that the study trains for its arms, once
    per world and seed; an arm uses such a model through an override like ``weights.oracle.path=SCORER.NAME``.

    ``kl_limit``: maximum KL to the base of the point selected to represent an arm. ``kl_levels``: KLs at which rewards
    are compared. ``bisect``: maximum number of additional points to train per arm and seed if the points around a level
    are far apart in KL. ``predictions`` are registered before the runs; ``analyses`` run once per world and seed.
    ``ranking`` adds a table of average ranks, and ``costs`` adds a table of the cost of weights. ``benchmarks``
    (options of the config group) evaluate the base, each arm's best point and the ``published`` models (folders or hub
    names); ``evaluate`` sets keys of these evaluations, by benchmark or for "all". With ``restart``, a repeated command
    starts in a new folder instead of reusing finished points.
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
    bisect: int = 0
    ranking: bool = False
    sources: tuple[str, ...] = ()
    scorers: dict[str, list[str]] = field(default_factory=dict)
    costs: bool = False
    benchmarks: tuple[str, ...] = ()
    evaluate: dict[str, dict[str, object] | None] = field(default_factory=dict)
    published: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for problem in self._config_problems():
            raise UserError(f"study {self.name}: {problem}")

    def _config_problems(self) -> Iterator[str]:
        names = ", ".join(self.arms)
        if not self.arms:
            yield "study.arms is empty: add at least one arm"
        if self.layers and self.layer_arm not in self.arms:
            yield f"study.layer_arm={self.layer_arm} is not an arm; the arms are {names}"
        if self.control is not None and self.control not in self.arms:
            yield (
                f"study.control={self.control} is not an arm; the arms are {names} (study.control=null turns "
                "comparisons off)"
            )
        if self.layers and self.control == self.layer_arm:
            yield f"study.control={self.control} is split into layers by study.layers: use another control"
        if self.seeds < 1 or self.workers < 1 or self.bisect < 0:
            yield "study.seeds and study.workers must be at least 1, and study.bisect at least 0"
        twice = [name for name in self.truth_arms if name in self.arms]
        if twice:
            yield f"{', '.join(twice)} is in both study.arms and study.truth_arms: define it in only one of them"
        again = [name for name, count in Counter([*self.arms, *self.truth_arms, *self.sources]).items() if count > 1]
        if again and not twice:
            yield f"study.sources lists {', '.join(again)}, which is already an arm: remove it from study.sources"
        every = self.all_arms(truth=True)
        yield from scorer_problems(self.scorers, every)
        unknown = [name for name in self.grids if name not in every]
        if unknown:
            yield f"study.grids has {', '.join(unknown)}, which is not an arm; the arms are {', '.join(every)}"
        yield from self._world_problems(every)
        given = Counter(str(layer).strip().lower() for layer in self.layers)
        repeated = [layer for layer, count in given.items() if count > 1]
        if repeated:
            yield f"study.layers lists {', '.join(repeated)} more than once: list each layer once"
        if any(not level > 0 for level in self.kl_levels) or not self.kl_limit > 0:
            yield "study.kl_limit and study.kl_levels must be above 0"
        yield from benchmark_problems(self.benchmarks, self.evaluate, self.published, list(every))

    def _world_problems(self, every: Mapping[str, list[str]]) -> Iterator[str]:
        """Yields error messages for unknown arms and worlds in ``only_in``, ``world_axis`` and ``predictions``."""
        worlds = self.worlds or {ONLY: []}
        for name, chosen in self.only_in.items():
            if name not in every or not chosen or any(world not in self.worlds for world in chosen):
                yield (
                    f"study.only_in.{name}: expected the name of an arm and a list of worlds from "
                    f"{', '.join(worlds)}, got {chosen}"
                )
            if name == self.control:
                yield f"study.only_in restricts the control {name}, but each world needs it: remove this entry"
        axis = self.world_axis
        if axis is not None:
            unknown = [world for world in axis.at if world not in worlds] + [
                arm for arm in axis.arms if not self.is_layer_arm(arm) and (arm not in every or self.is_split(arm))
            ]
            if unknown:
                yield f"study.world_axis refers to {', '.join(unknown)}, which is not in the study"
        for name, claim in self.predictions.claims.items() if self.predictions else []:
            for world, arm in (*claim.above, *claim.below):
                known = self.is_layer_arm(arm) or (
                    arm in every and self.runs_in_world(arm, world) and not self.is_split(arm)
                )
                if world not in worlds or not known:
                    where = f" in world {world}" if world else ""
                    yield (
                        f"study.predictions.claims.{name}: arm {arm} does not run{where} (study.predictions=null turns "
                        f"predictions off)"
                    )

    def is_split(self, arm: str) -> bool:
        """Returns whether ``layers`` splits this arm into one arm per layer."""
        return bool(self.layers) and arm == self.layer_arm

    def is_layer_arm(self, arm: str) -> bool:
        """Returns whether a name looks like a single-layer arm; does not check that the model has this layer."""
        return bool(self.layers) and re.fullmatch(rf"{re.escape(self.layer_arm)} L\d+", arm) is not None

    def runs_in_world(self, arm: str, world: str) -> bool:
        """Returns whether an arm runs in a world."""
        return arm not in self.only_in or world in self.only_in[arm]

    def arms_in_world(self, world: str, truth: bool) -> dict[str, list[str]]:
        """Returns the arms of a world with their overrides; ``truth``: whether the true reward is known."""
        return {name: found for name, found in self.all_arms(truth).items() if self.runs_in_world(name, world)}

    def all_arms(self, truth: bool) -> dict[str, list[str]]:
        """Returns all arms with their overrides; ``truth``: whether the setting's true reward is known."""
        sources = {name: [f"weights={name}"] for name in self.sources}
        return {**self.arms, **sources, **(self.truth_arms if truth else {})}

    def grid_of(self, arm: str) -> Grid:
        """Returns the grid of an arm."""
        return self.grids.get(arm, self.grid)


def name_in_world(world: str, name: object) -> str:
    """Prefixes a name with its world, if there is one."""
    return f"{world}: {name}" if world else str(name)


@dataclass(frozen=True)
class Arm:
    """Arm in one world: name, overrides and grid, and the layer of a single-layer arm."""

    name: str
    overrides: tuple[str, ...]
    layer: int | None = None
    world: str = ONLY
    grid: Grid | None = None

    @property
    def label(self) -> str:
        """Returns the name for logs, prefixed with the world if there is one."""
        return name_in_world(self.world, self.name)


@dataclass(frozen=True)
class Point:
    """One run of a study: an arm, its grid values and a seed."""

    arm: Arm
    values: tuple[str, ...]
    seed: int

    @property
    def label(self) -> str:
        """Returns a short name for logs."""
        return f"{self.arm.label} {' '.join(self.values)} seed={self.seed}"


def expand_arms(study: Study, num_layers: int, *, truth: bool = False, world: str = ONLY) -> list[Arm]:
    """Returns the study's arms in one world, with the layer arm split into one arm per distinct layer.

    ``num_layers``: depth of the judge. ``truth``: whether the setting's true reward is known.
    """
    arms: list[Arm] = []
    for name, overrides in study.arms_in_world(world, truth).items():
        grid = study.grid_of(name)
        if not study.layers or name != study.layer_arm:
            arms.append(Arm(name, tuple(overrides), None, world, grid))
            continue
        for layer in distinct_layers(study.layers, num_layers, "study.layers"):
            arms.append(Arm(f"{name} L{layer}", (*overrides, f"weights.layer={layer}"), layer, world, grid))
    return arms


def make_points(study: Study, arms: Sequence[Arm], seeds: Sequence[int]) -> list[Point]:
    """Returns all runs: every arm at every point of its grid for every seed.

    Runs are sorted by seed, so that early results cover all arms, then by world, so that only one base is loaded at a
    time.
    """
    points = []
    worlds = dict.fromkeys(arm.world for arm in arms)
    for seed, world in itertools.product(seeds, worlds):
        mine = [
            [Point(arm, values, seed) for values in (arm.grid or study.grid).point_overrides()]
            for arm in arms
            if arm.world == world
        ]
        points += [point for row in itertools.zip_longest(*mine) for point in row if point is not None]
    return points


def settings_record(study: Study, arms: Mapping[str, Mapping[str, object]], world: object) -> dict[str, object]:
    """Returns the settings that are fixed before the first run; their digest is shown with the main table.

    ``arms``: each arm's config without seeds, paths and grid values. ``world``: digest of the testbed's grammar and
    true reward (by world if the study has worlds), or None without a testbed. The number of seeds is not included.
    """
    own = {name: grid.to_dict() for name, grid in study.grids.items()}
    return {
        "grid": study.grid.to_dict(),
        **({"grids": own} if own else {}),
        "arms": dict(arms),
        **({"predictions": study.predictions.to_dict()} if study.predictions else {}),
        "kl_limit": study.kl_limit,
        "kl_levels": list(study.kl_levels),
        **({"bisect": study.bisect} if study.bisect else {}),
        "world": world,
    }


def settings_digest(record: Mapping[str, object]) -> str:
    """Returns a digest of a ``settings_record`` without its predictions: grid, arms and worlds."""
    return digest({key: value for key, value in record.items() if key != "predictions"})[:16]


def error_text(error: Exception) -> str:
    """Formats an error: only the message if the user can fix the error, otherwise with the traceback."""
    ending = exit_status_and_message(error)
    return "".join(traceback.format_exception(error)).strip() if ending is None else ending[1].removeprefix("error: ")


def last_line(text: str) -> str:
    """Returns the last line of an error message."""
    return text.strip().rpartition("\n")[2] or "no message"


WorldSeed = tuple[str, int]  # world and seed
ROWS = 2  # sequences per pair: the prompt with each response
