"""What a study varies: arms, one grid for all of them, seeds. Pure: overrides in, points out."""

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from attnpo.schema import UserError
from attnpo.weights.base import resolve_layer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Grid:
    """Learning rates and betas that every arm of a study is given alike, fixed before any arm is run."""

    lr: tuple[float, ...] = ()
    beta: tuple[float, ...] = ()

    def overrides(self) -> list[tuple[str, ...]]:
        """One tuple of overrides per grid point; a single empty one when nothing is varied."""
        axes = [[f"optimizer.lr={value!r}" for value in self.lr], [f"objective.beta={value!r}" for value in self.beta]]
        return list(itertools.product(*(axis for axis in axes if axis)))


@dataclass(frozen=True)
class Study:
    """A study by its arms.

    ``arms`` maps a name to the overrides that make it. ``layers`` splits the arm named ``layer_arm`` into one arm per
    layer (numbers, "last", fractions of depth; those that coincide on a shallow model are merged and logged).
    ``control`` is the arm the others are compared with. ``seeds`` are counted from the run's seed. ``kl_limit`` bounds
    the KL to the base of the point that represents an arm. ``workers`` points run at a time on a CPU. ``shared`` are
    overrides of every point. ``restart`` gives a repeated command a fresh folder instead of its finished points.
    """

    name: str
    arms: dict[str, list[str]]
    grid: Grid = field(default_factory=Grid)
    layers: tuple[int | str, ...] = ()
    layer_arm: str = "attention"
    control: str = "uniform"
    seeds: int = 5
    kl_limit: float = 2.0
    workers: int = 2
    shared: tuple[str, ...] = ()
    restart: bool = False
    title: str = ""

    def __post_init__(self) -> None:
        if not self.arms:
            raise UserError(f"study {self.name}: study.arms is empty; give at least one arm")
        if self.layers and self.layer_arm not in self.arms:
            raise UserError(f"study {self.name}: study.layer_arm={self.layer_arm} is none of {', '.join(self.arms)}")
        if self.control not in self.arms:
            raise UserError(f"study {self.name}: study.control={self.control} is none of {', '.join(self.arms)}")
        if self.seeds < 1 or self.workers < 1:
            raise UserError(f"study {self.name}: study.seeds and study.workers must be at least 1")


@dataclass(frozen=True)
class Arm:
    """One arm: its name, the overrides that make it, and its layer when it stands for one."""

    name: str
    overrides: tuple[str, ...]
    layer: int | None = None


@dataclass(frozen=True)
class Point:
    """One run of a study."""

    arm: Arm
    values: tuple[str, ...]
    seed: int

    @property
    def label(self) -> str:
        """A short name for logs."""
        return f"{self.arm.name} {' '.join(self.values)} seed={self.seed}"


def expand_arms(study: Study, num_layers: int) -> list[Arm]:
    """The study's arms, the layer arm replaced by one per distinct layer of a model of ``num_layers`` layers."""
    arms: list[Arm] = []
    for name, overrides in study.arms.items():
        if not study.layers or name != study.layer_arm:
            arms.append(Arm(name, tuple(overrides)))
            continue
        named: dict[int, list[str]] = {}
        for layer in study.layers:
            named.setdefault(resolve_layer(layer, num_layers), []).append(str(layer))
        for layer, names in sorted(named.items()):
            if len(names) > 1:
                log.info("layers %s are one and the same here: layer %d of %d", ", ".join(names), layer, num_layers)
            arms.append(Arm(f"{name} L{layer}", (*overrides, f"weights.layer={layer}"), layer))
    return arms


def make_points(study: Study, arms: Sequence[Arm], seeds: Sequence[int]) -> list[Point]:
    """Every arm at every grid point for every seed, seeds outermost so that early results cover all arms."""
    return [Point(arm, values, seed) for seed, values, arm in itertools.product(seeds, study.grid.overrides(), arms)]


def grid_record(study: Study, arms: Mapping[str, Mapping[str, object]], world: str | None) -> dict[str, object]:
    """What is fixed before an arm is run, the same for any number of seeds; its digest stands under every table.

    ``arms``: the config of every arm without seeds, paths and grid values. ``world``: digest of a testbed's grammar and
    true reward, None elsewhere.
    """
    return {
        "grid": {"lr": list(study.grid.lr), "beta": list(study.grid.beta)},
        "arms": dict(arms),
        "kl_limit": study.kl_limit,
        "world": world,
    }
