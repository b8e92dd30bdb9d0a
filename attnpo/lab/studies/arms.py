"""Config of every arm and point of a study, composed from overrides; what a user may override in one."""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypedDict, cast

from omegaconf import DictConfig, OmegaConf

from attnpo.config.compose import compose, load, parse_as, to_container
from attnpo.config.named_files import digest_named_files, is_at_or_below
from attnpo.judge.layers import resolve_layer
from attnpo.lab.studies.config import FitConfig
from attnpo.lab.studies.study import BETA, LR, ONLY, Arm, Grid, Point, Study, quote, scorers_of, short
from attnpo.run.combinations import LAYER, is_auto
from attnpo.run.identity import LAYERS, identity_of
from attnpo.run.resolve import open_paths
from attnpo.schema import UserError, digest
from attnpo.system.files import Json, safe_filename

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Composed:
    """Config of an arm or a point as Hydra composed it, and the overrides that give it on the command line."""

    raw: DictConfig
    overrides: list[str]

    @cached_property
    def config(self) -> FitConfig:
        """Returns its typed root. UserError when it cannot be built."""
        return parse_as(self.raw, FitConfig)

    def with_paths(self, model: str, data: str | None) -> FitConfig:
        """Returns its typed root, with these paths of model and data where it lacks them."""
        cfg = self.config
        for key in open_paths(cfg.model, cfg.data):
            cfg = cfg.with_value(key, model if key == "model.path" else data)
        return cfg

    def with_values(self, values: Mapping[str, Json], overrides: Sequence[str] = ()) -> "Composed":
        """Returns a copy with other values by key, which those that are read from them (``${seed}``) follow."""
        raw, given = self.raw.copy(), merge_overrides(self.overrides, overrides)
        for key, value in values.items():
            OmegaConf.update(raw, key, value)
        raw.composed.overrides = [override.replace("${", "\\${") for override in given]
        return Composed(raw, given)


# What only a study has: its own keys, and the grids of its arms.
OF_STUDY = ("study.", "grids.")
SINGLE = "experiment=none"  # what makes a single run of any command

# What says whose attention an arm with a judge of its own reads.
WHOSE = ("judge.path", "judge.other")


def key_of(override: str) -> str:
    """Returns the key or group an override sets."""
    return override.split("=", 1)[0].lstrip("+~")


def merge_overrides(*layers: Sequence[str]) -> list[str]:
    """Overrides of all layers; a later layer's override replaces earlier ones of the same key."""
    merged: dict[str, str] = {}
    for override in (item for layer in layers for item in layer):
        merged.pop(key_of(override), None)
        merged[key_of(override)] = override
    return list(merged.values())


class AsWritten(TypedDict, total=False):
    """Study's node read with its interpolations as they stand in its file."""

    arms: dict[str, list[str]]
    truth_arms: dict[str, list[str]] | None
    grid: object
    grids: dict[str, object] | None


@dataclass(frozen=True)
class Composer:
    """Composes the configs of a study's arms: the user's ``overrides`` and ``config_dir``, and what every point gets.

    ``seed`` is the first. ``truth``: whether the setting has a known truth. ``tracked``: overrides that put the points
    into one W&B group, where the user has named none.
    """

    study: Study
    overrides: tuple[str, ...]
    config_dir: Path | None
    seed: int
    truth: bool
    tracked: tuple[str, ...]

    @property
    def arms(self) -> dict[str, list[str]]:
        """Returns the arms by name, in all worlds, with the overrides that make each."""
        return self.study.arms_with(self.truth)

    def of_points(self) -> list[str]:
        """Returns the user's overrides that reach the points: all but those of the study's own keys and named grids."""
        return [override for override in self.overrides if not key_of(override).startswith(OF_STUDY)]

    def arm(self, overrides: Sequence[str], world: str = ONLY) -> Composed:
        """Returns the composed config of one arm in one world, and the overrides that give it on the command line.

        The user's overrides come first, then the world's, the arm's win. A user's ``weights.layer=2`` goes to the arms
        that have such a key and is left out, with a log line, where an arm's own choice of the group has none.
        """
        user, single = self.of_points(), [SINGLE, "seeds=null", f"seed={self.seed}", *self.tracked]
        chosen = [*self.study.worlds.get(world, []), *overrides]
        groups = {key_of(override) for override in chosen if "." not in key_of(override)}
        parts = [(override, key_of(override).partition(".")) for override in user]
        foreign = [override for override, (group, dot, _) in parts if dot and group in groups]
        merged = merge_overrides(self.study.shared, user, chosen, single)
        try:
            return Composed(compose("fit", merged, self.config_dir), merged)
        except UserError:
            if not foreign:
                raise
        log.info("arm %s: %s does not apply and is left out", " ".join(overrides), " ".join(foreign))
        merged = merge_overrides(self.study.shared, [item for item in user if item not in foreign], chosen, single)
        return Composed(compose("fit", merged, self.config_dir), merged)

    def every_arm(self) -> dict[tuple[str, str], Composed]:
        """Returns the configs of the study's arms by world and name, layers not yet told apart."""
        return {
            (world, name): self.arm(overrides, world)
            for world in self.study.worlds or [ONLY]
            for name, overrides in self.study.arms_in(world, self.truth).items()
        }

    @cached_property
    def as_written(self) -> AsWritten:
        """Returns the study's node as it stands in its file."""
        return cast(
            AsWritten, OmegaConf.to_container(compose("fit", self.overrides, self.config_dir).study, resolve=False)
        )

    def applies(self, override: str, arm: Sequence[str]) -> bool:
        """Returns whether an arm's config has the key of ``override``."""
        try:
            compose("fit", merge_overrides([override], arm, [SINGLE]), self.config_dir)
        except UserError:
            return False
        return True


def composer_of(cfg: FitConfig, study: Study) -> Composer:
    """Returns what composes the arms of a study under the user's command."""
    wandb, given = cfg.logger.wandb, cfg.composed
    tracked = (f"logger.wandb.group={quote(study.name)}",) if wandb is not None and wandb.group is None else ()
    return Composer(study, given.overrides, given.config_dir, cfg.seed, cfg.truth is not None, tracked)


def check_user(composer: Composer, result: Mapping[str, object]) -> None:
    """Refuses overrides that would be lost to the study's choices or make its arms others than they are named.

    UserError for a group that arms choose, a key that an arm or a world sets, layers or a judge that arms differ in, a
    value that the grid sets, and a key that no arm has. A key that an arm takes from another one (``${...}``) and the
    layer stay free: the arm keeps its own, the others take the user's. UserError too for an experiment that sets more
    than the study and its seed, which the points, composed without it, would not get: ``result`` has what can move a
    number as the command was composed (``Identity.result``).
    """
    study, user, arms = composer.study, composer.of_points(), list(composer.arms.values())
    chosen = {key_of(item) for overrides in arms for item in overrides if "." not in key_of(item)}
    _refuse(study, "arms", chosen, [override for override in user if key_of(override) in chosen])
    fixed = {key_of(item) for overrides in study.worlds.values() for item in overrides}
    _refuse(study, "worlds", fixed, [override for override in user if _touches(key_of(override), fixed)])
    for problem in (*_arm_key_conflicts(composer, user, chosen), *_lost_to_grids(composer, user)):
        raise UserError(f"study {study.name}: {problem}, or give {SINGLE} for a single run")
    for override in user:
        group, dot, _ = key_of(override).partition(".")
        if dot and group in chosen and not any(composer.applies(override, arm) for arm in arms):
            compose("fit", merge_overrides([override], arms[0], [SINGLE]), composer.config_dir)
    alone = identity_of(
        load("fit", merge_overrides(user, [SINGLE, f"seed={composer.seed}"]), composer.config_dir)
    ).result
    for key, value in result.items():
        if value != alone.get(key):
            raise UserError(
                f"study {study.name}: its experiment sets {key}, which no point would get: put it into "
                "study.shared, or give it on the command line"
            )


def _arm_key_conflicts(composer: Composer, user: Sequence[str], chosen: set[str]) -> Iterator[str]:
    """Yields what is wrong with overrides that reach every arm and that some arms are told apart by."""
    written = composer.as_written
    given = {**composer.arms, **written["arms"], **(written.get("truth_arms") or {})}
    sets = [item for name in composer.arms for item in given[name]]
    literal = [key_of(item) for item in sets if not item.partition("=")[2].startswith("${")]
    own = {key for key in literal if "." in key and key != LAYER}
    for override in user:
        key = key_of(override)
        if _touches(key, own):
            yield (
                f"its arms differ in {key}, so {override} would make some of them others than they are named: leave "
                "it out"
            )
        if composer.study.layers and key == LAYERS:
            yield (
                f"study.layers makes an arm of every layer, and {override} would be read in place of each: give "
                f"study.layers={override.partition('=')[2]}"
            )
        if "judge" in chosen and key in WHOSE:
            yield (
                f"some arms read another judge than others, and {override} would make them one: give "
                "other_judge.path to change the other judge"
            )


def _lost_to_grids(composer: Composer, user: Sequence[str]) -> Iterator[str]:
    """Yields what is wrong with overrides whose key is an axis of a grid of the study."""
    grids = list(_grids(composer))
    for override in user:
        key, value = key_of(override), override.partition("=")[2]
        axis = f"{short(key)}=[{value}]" if key in (LR, BETA) else f"keys={{{key}:[{value}]}}"
        sets = [f"{name}.{axis}" for name, grid in grids if key in grid.axes]
        if sets:
            yield f"{override} would be lost, the study's grid sets it: {' '.join(sets)}"


def _grids(composer: Composer) -> Iterator[tuple[str, Grid]]:
    """Yields the grids that the study's arms get, each with the key that it is overridden by."""
    study, arms, node = composer.study, composer.arms, composer.as_written
    named = {"study.grid": (node.get("grid"), study.grid)} if any(name not in study.grids for name in arms) else {}
    own = node.get("grids") or {}
    named |= {f"study.grids.{name}": (own.get(name), study.grids[name]) for name in arms if name in study.grids}
    seen: dict[str, Grid] = {}
    for key, (text, grid) in named.items():
        origin = re.fullmatch(r"\$\{([\w.]+)\}", str(text))
        seen.setdefault(key if origin is None else origin[1], grid)
    yield from seen.items()


def _touches(key: str, others: set[str]) -> bool:
    """Returns whether overrides of ``key`` and of one of ``others`` meet; a group's choice meets none."""
    return key in others or (
        "." in key and any(is_at_or_below(key, [other]) or is_at_or_below(other, [key]) for other in others)
    )


def _refuse(study: Study, of: str, chosen: set[str], clash: Sequence[str]) -> None:
    if clash:
        raise UserError(
            f"study {study.name} chooses {', '.join(sorted(chosen))} for each of its {of}, so {' '.join(clash)} would "
            f"be lost: leave it out, or give {SINGLE} for a single run"
        )


def check_distinct(
    study: Study,
    arms: Sequence[Arm],
    composed: Mapping[tuple[str, str], Composed],
    depths: Mapping[tuple[str, str], int] | None = None,
) -> None:
    """Raises UserError naming two arms of a world that would train the very same points.

    ``composed`` by world and arm; ``depths``: layers of an arm's judge, as far as known, which make "last" a number.
    """
    seen: dict[str, Arm] = {}
    for arm in arms:
        place = (arm.world, arm.name)
        same = digest(_training_identity(composed[place], arm.grid or study.grid, (depths or {}).get(place, 0)))
        other = seen.setdefault(f"{arm.world}/{same}", arm)
        if other is not arm:
            raise UserError(
                f"study {study.name}: its arms {other.label} and {arm.label} would be the same runs under two names: "
                "leave out the override that makes them one, or one of the arms"
            )


def _training_identity(made: Composed, grid: Grid, depth: int) -> dict[str, object]:
    values = {
        key: value for key, value in arm_identity(identity_of(made.config).result).items() if key not in grid.axes
    }
    layer = values.get(LAYER)
    if depth and isinstance(layer, int | str) and not is_auto(layer):
        values[LAYER] = resolve_layer(layer, depth)
    return {"config": values, "paths": identity_of(made.config).paths, "grid": grid.overrides()}


def point_config(arm: Composed, point: Point, scorers: Mapping[str, str] | None = None) -> Composed:
    """Returns a point's config, from that of its arm; ``scorers``: the folders of those it names."""
    named = scorers_of(arm.overrides).items() if scorers else ()
    paths = [f"{key}={quote(scorers[name])}" for key, name in named if scorers]
    own = [*point.values, f"seed={point.seed}", *paths]
    return arm.with_values({key: yaml_value(value) for key, _, value in (item.partition("=") for item in own)}, own)


def yaml_value(text: str) -> Json:
    """Returns the value an override's text stands for."""
    return to_container(DictConfig(OmegaConf.create(f"value: {text}")))["value"]


def point_folder(folder: Path, point: Point, result: Mapping[str, object], facts: Mapping[str, object]) -> Path:
    """Returns where a point's results lie, named by what it varies and the digest of all that moves a number.

    That is ``result`` (``Identity.result`` of the config), what the files it names hold, and ``facts``: contents of its
    paths, and the code.
    """
    settings = [value.partition("=") for value in point.values]
    world = [point.arm.world] if point.arm.world else []
    name = "-".join([*world, point.arm.name, *(f"{key.rpartition('.')[-1]}={value}" for key, _, value in settings)])
    return folder / "points" / f"{safe_filename(name)}-seed{point.seed}-{run_digest(result, facts)[:8]}"


def run_digest(result: Mapping[str, object], facts: Mapping[str, object]) -> str:
    """Returns the digest of all that moves a number of a run: see ``point_folder``."""
    return digest({"config": result, "files": digest_named_files(result), "facts": dict(facts)})


# Options that came later: what a config that lacks one of them meant.
LATER = {
    **{"judge.span_drop": 2, "judge.prefill": None, "judge.chat_template_kwargs": None, "judge.trace": None},
    **{"model.chat_template_kwargs": None, "model.fold_system": False},
    **{"optimizer.warmup_from": "first", "lengths.keep": "start", "batch.shuffle": True},
    **{"objective.anchor": 0.0, "objective.anchor_on": "all", "objective.clip_ratio": None},
    **{"data.exchanged": False, "data.val_share": None, "data.mix": None, "data.mix_seed": 0, "model.reward": False},
    **{"model.router_aux_loss_coef": 0.0, "optimizer.decay_all": True, "model.fallback_template": None},
    **{"data.columns.input": None, "data.columns.system": None, "data.columns.role": "role"},
    **{"data.columns.content": "content", "data.columns.traces": "keep", "data.columns.tools": None},
    **{"prepare.base.easy_length": 1.0, "prepare.base.answer_tokens": 64, "truth.max_new_tokens": 64},
    "callbacks.extra": None,
}


def arm_identity(result: Mapping[str, object]) -> dict[str, object]:
    """Returns what of ``result`` counts for an arm: all but the seed, which differs between its points.

    Options that came later are left out where they do what was done before them, so that a study keeps its digest.
    """
    return {
        key: value
        for key, value in result.items()
        if key not in ("seed", "prepare.seed") and not (key in LATER and LATER[key] == value)
    }
