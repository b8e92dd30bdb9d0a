"""Composes the configs of a study's arms and grid points, and checks the user's overrides."""

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
from attnpo.lab.studies.study import BETA, LR, ONLY, Arm, Grid, Point, Study, quote, scorer_names_by_key, short_key
from attnpo.run.combinations import LAYER, is_auto_layer
from attnpo.run.identity import LAYERS, make_identity
from attnpo.run.resolve import missing_path_keys
from attnpo.schema import UserError, digest
from attnpo.system.files import Json, safe_filename

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ComposedConfig:
    """Hydra config of an arm or a grid point, with the command-line overrides that produce it."""

    raw: DictConfig
    overrides: list[str]

    @cached_property
    def config(self) -> FitConfig:
        """Returns the typed root config; raises UserError if it is invalid."""
        return parse_as(self.raw, FitConfig)

    def config_with_paths(self, model: str, data: str | None) -> FitConfig:
        """Returns the typed root config, with missing model and data paths filled in."""
        cfg = self.config
        for key in missing_path_keys(cfg.model, cfg.data):
            cfg = cfg.with_value(key, model if key == "model.path" else data)
        return cfg

    def with_values(self, values: Mapping[str, Json], overrides: Sequence[str] = ()) -> "ComposedConfig":
        """Returns a copy with ``values`` set by key; interpolations like ``${seed}`` resolve to the new values."""
        raw, given = self.raw.copy(), merge_overrides(self.overrides, overrides)
        for key, value in values.items():
            OmegaConf.update(raw, key, value)
        raw.composed.overrides = [override.replace("${", "\\${") for override in given]
        return ComposedConfig(raw, given)


# Prefixes of keys that only a study has: its own keys, and the grids of its arms.
OF_STUDY = ("study.", "grids.")
SINGLE = "experiment=none"  # turns any command into a single run

# Keys that select the judge model of an arm.
WHOSE = ("judge.path", "judge.other")


def override_key(override: str) -> str:
    """Returns the key or config group that an override sets."""
    return override.split("=", 1)[0].lstrip("+~")


def merge_overrides(*layers: Sequence[str]) -> list[str]:
    """Merges lists of overrides; a later override replaces earlier ones for the same key."""
    merged: dict[str, str] = {}
    for override in (item for layer in layers for item in layer):
        merged.pop(override_key(override), None)
        merged[override_key(override)] = override
    return list(merged.values())


class RawStudyNode(TypedDict, total=False):
    """Study config node with unresolved interpolations."""

    arms: dict[str, list[str]]
    truth_arms: dict[str, list[str]] | None
    grid: object
    grids: dict[str, object] | None


@dataclass(frozen=True)
class Composer:
    """Composes the configs of a study's arms from the user's ``overrides`` and ``config_dir``.

    ``seed``: first seed of the study. ``truth``: whether the setting's true reward is known. ``tracked``: overrides
    that put all runs into one W&B group, unless the user has set one.
    """

    study: Study
    overrides: tuple[str, ...]
    config_dir: Path | None
    seed: int
    truth: bool
    tracked: tuple[str, ...]

    @property
    def arms(self) -> dict[str, list[str]]:
        """Returns the overrides of all the study's arms, keyed by arm name."""
        return self.study.all_arms(self.truth)

    @property
    def _shared_overrides(self) -> list[str]:
        """Returns the study's shared overrides; those of ``truth`` are dropped if the setting has no true reward."""
        return [item for item in self.study.shared if self.truth or not override_key(item).startswith("truth.")]

    def overrides_for_points(self) -> list[str]:
        """Returns the user's overrides that apply to single runs: all except those of study-only keys."""
        return [override for override in self.overrides if not override_key(override).startswith(OF_STUDY)]

    def compose_arm(self, overrides: Sequence[str], world: str = ONLY) -> ComposedConfig:
        """Composes the config of one arm in one world.

        An arm's overrides take precedence over those of its world, which take precedence over the user's. A user
        override like ``weights.layer=2`` applies to the arms that have this key; for other arms it is ignored and
        logged.
        """
        user, single = self.overrides_for_points(), [SINGLE, "seeds=null", f"seed={self.seed}", *self.tracked]
        chosen = [*self.study.worlds.get(world, []), *overrides]
        groups = {override_key(override) for override in chosen if "." not in override_key(override)}
        parts = [(override, override_key(override).partition(".")) for override in user]
        foreign = [override for override, (group, dot, _) in parts if dot and group in groups]
        merged = merge_overrides(self._shared_overrides, user, chosen, single)
        try:
            return ComposedConfig(compose("fit", merged, self.config_dir), merged)
        except UserError:
            if not foreign:
                raise
        log.info(
            "arm %s: ignoring override %s, which does not apply to this arm", " ".join(overrides), " ".join(foreign)
        )
        merged = merge_overrides(self._shared_overrides, [item for item in user if item not in foreign], chosen, single)
        return ComposedConfig(compose("fit", merged, self.config_dir), merged)

    def compose_all_arms(self) -> dict[tuple[str, str], ComposedConfig]:
        """Composes the configs of all arms, keyed by world and name; the layer arm is not yet split into layers."""
        return {
            (world, name): self.compose_arm(overrides, world)
            for world in self.study.worlds or [ONLY]
            for name, overrides in self.study.arms_in_world(world, self.truth).items()
        }

    @cached_property
    def raw_study_node(self) -> RawStudyNode:
        """Returns the study's config node with unresolved interpolations."""
        return cast(
            RawStudyNode, OmegaConf.to_container(compose("fit", self.overrides, self.config_dir).study, resolve=False)
        )

    def has_key(self, override: str, arm: Sequence[str]) -> bool:
        """Returns whether an arm's config accepts the key of ``override``."""
        try:
            compose("fit", merge_overrides([override], arm, [SINGLE]), self.config_dir)
        except UserError:
            return False
        return True


def make_composer(cfg: FitConfig, study: Study) -> Composer:
    """Creates a composer for the study's arms from the user's command."""
    wandb, given = cfg.logger.wandb, cfg.composed
    tracked = (f"logger.wandb.group={quote(study.name)}",) if wandb is not None and wandb.group is None else ()
    return Composer(study, given.overrides, given.config_dir, cfg.seed, cfg.truth is not None, tracked)


def check_user_overrides(composer: Composer, result: Mapping[str, object]) -> None:
    """Checks that the user's overrides do not conflict with the study.

    The user may override the layer and keys that an arm interpolates (``${...}``). An arm that sets such a key keeps
    its own value; the other arms use the user's. ``result``: settings of the composed command that can change its
    results (``RunIdentity.result``).

    Raises:
        UserError: an override sets a config group that arms select, a key that an arm, a world or the grid sets, or a
            layer or judge that differs between arms; an override's key exists in no arm; or the experiment sets keys
            other than its study and seed, which would be lost because runs are composed without the experiment.
    """
    study, user, arms = composer.study, composer.overrides_for_points(), list(composer.arms.values())
    chosen = {override_key(item) for overrides in arms for item in overrides if "." not in override_key(item)}
    _raise_on_conflict(study, "arms", chosen, [override for override in user if override_key(override) in chosen])
    fixed = {override_key(item) for overrides in study.worlds.values() for item in overrides}
    _raise_on_conflict(
        study, "worlds", fixed, [override for override in user if _has_overlap(override_key(override), fixed)]
    )
    for problem in (*_arm_key_conflicts(composer, user, chosen), *_grid_conflicts(composer, user)):
        raise UserError(f"study {study.name}: {problem}, or use {SINGLE} for a single run")
    for override in user:
        group, dot, _ = override_key(override).partition(".")
        if dot and group in chosen and not any(composer.has_key(override, arm) for arm in arms):
            compose("fit", merge_overrides([override], arms[0], [SINGLE]), composer.config_dir)
    alone = make_identity(
        load("fit", merge_overrides(user, [SINGLE, f"seed={composer.seed}"]), composer.config_dir)
    ).result
    for key, value in result.items():
        if value != alone.get(key):
            raise UserError(
                f"study {study.name}: its experiment sets {key}, but runs are composed without the experiment: move "
                "this setting to study.shared, or set it on the command line"
            )


def _arm_key_conflicts(composer: Composer, user: Sequence[str], chosen: set[str]) -> Iterator[str]:
    """Yields error messages for user overrides of keys that differ between arms."""
    written = composer.raw_study_node
    given = {**composer.arms, **written["arms"], **(written.get("truth_arms") or {})}
    sets = [item for name in composer.arms for item in given[name]]
    literal = [override_key(item) for item in sets if not item.partition("=")[2].startswith("${")]
    own = {key for key in literal if "." in key and key != LAYER}
    for override in user:
        key = override_key(override)
        if _has_overlap(key, own):
            yield (
                f"the arms differ in {key}, so {override} would give some arms settings that contradict the arm names: "
                f"remove the override"
            )
        if composer.study.layers and key == LAYERS:
            yield (
                f"study.layers creates one arm per layer, but {override} would make all of them read the same layers: "
                f"use study.layers={override.partition('=')[2]} instead"
            )
        if "judge" in chosen and key in WHOSE:
            yield (
                f"the arms use different judges, but {override} would make all arms use the same one: set "
                "other_judge.path to change the second judge"
            )


def _grid_conflicts(composer: Composer, user: Sequence[str]) -> Iterator[str]:
    """Yields error messages for user overrides of keys that a grid of the study sets."""
    grids = list(_grids_by_key(composer))
    for override in user:
        key, value = override_key(override), override.partition("=")[2]
        axis = f"{short_key(key)}=[{value}]" if key in (LR, BETA) else f"keys={{{key}:[{value}]}}"
        sets = [f"{name}.{axis}" for name, grid in grids if key in grid.axes]
        if sets:
            yield f"{override} would have no effect, because the study's grid sets this key: use {' '.join(sets)}"


def _grids_by_key(composer: Composer) -> Iterator[tuple[str, Grid]]:
    """Yields each grid used by an arm of the study, with the config key that overrides it."""
    study, arms, node = composer.study, composer.arms, composer.raw_study_node
    named = {"study.grid": (node.get("grid"), study.grid)} if any(name not in study.grids for name in arms) else {}
    own = node.get("grids") or {}
    named |= {f"study.grids.{name}": (own.get(name), study.grids[name]) for name in arms if name in study.grids}
    seen: dict[str, Grid] = {}
    for key, (text, grid) in named.items():
        origin = re.fullmatch(r"\$\{([\w.]+)\}", str(text))
        seen.setdefault(key if origin is None else origin[1], grid)
    yield from seen.items()


def _has_overlap(key: str, others: set[str]) -> bool:
    """Returns whether ``key`` equals, contains or is part of one of ``others``; always False for config groups."""
    return key in others or (
        "." in key and any(is_at_or_below(key, [other]) or is_at_or_below(other, [key]) for other in others)
    )


def _raise_on_conflict(study: Study, of: str, chosen: set[str], clash: Sequence[str]) -> None:
    if clash:
        raise UserError(
            f"study {study.name} sets {', '.join(sorted(chosen))} for each of its {of}, so {' '.join(clash)} would "
            f"have no effect: remove it, or use {SINGLE} for a single run"
        )


def check_distinct_arms(
    study: Study,
    arms: Sequence[Arm],
    composed: Mapping[tuple[str, str], ComposedConfig],
    depths: Mapping[tuple[str, str], int] | None = None,
) -> None:
    """Checks that no two arms of a world would train identical runs.

    ``composed``: configs by world and arm. ``depths``: number of layers of each arm's judge, if known, used to resolve
    layers like "last".

    Raises:
        UserError: two arms would train identical runs; the message names both.
    """
    seen: dict[str, Arm] = {}
    for arm in arms:
        place = (arm.world, arm.name)
        same = digest(_training_identity(composed[place], arm.grid or study.grid, (depths or {}).get(place, 0)))
        other = seen.setdefault(f"{arm.world}/{same}", arm)
        if other is not arm:
            raise UserError(
                f"study {study.name}: arms {other.label} and {arm.label} would train identical runs: remove the "
                f"override that makes them identical, or one of the arms"
            )


def _training_identity(made: ComposedConfig, grid: Grid, depth: int) -> dict[str, object]:
    values = {
        key: value for key, value in arm_identity(make_identity(made.config).result).items() if key not in grid.axes
    }
    layer = values.get(LAYER)
    if depth and isinstance(layer, int | str) and not is_auto_layer(layer):
        values[LAYER] = resolve_layer(layer, depth)
    return {"config": values, "paths": make_identity(made.config).paths, "grid": grid.point_overrides()}


def point_config(arm: ComposedConfig, point: Point, scorers: Mapping[str, str] | None = None) -> ComposedConfig:
    """Derives the config of a point from that of its arm. ``scorers``: model folders of trained scorers by name."""
    named = scorer_names_by_key(arm.overrides).items() if scorers else ()
    paths = [f"{key}={quote(scorers[name])}" for key, name in named if scorers]
    own = [*point.values, f"seed={point.seed}", *paths]
    return arm.with_values(
        {key: parse_yaml_value(value) for key, _, value in (item.partition("=") for item in own)}, own
    )


def parse_yaml_value(text: str) -> Json:
    """Parses the value of an override as YAML."""
    return to_container(DictConfig(OmegaConf.create(f"value: {text}")))["value"]


def point_folder(folder: Path, point: Point, result: Mapping[str, object], facts: Mapping[str, object]) -> Path:
    """Returns a point's run folder, named after its arm, grid values, seed and ``run_digest``.

    ``result``: settings of the point's config that can change its results (``RunIdentity.result``). ``facts``:
    fingerprints of the code and of the files and folders that the config names.
    """
    settings = [value.partition("=") for value in point.values]
    world = [point.arm.world] if point.arm.world else []
    name = "-".join([*world, point.arm.name, *(f"{key.rpartition('.')[-1]}={value}" for key, _, value in settings)])
    return folder / "points" / f"{safe_filename(name)}-seed{point.seed}-{run_digest(result, facts)[:8]}"


def run_digest(result: Mapping[str, object], facts: Mapping[str, object]) -> str:
    """Returns a digest of everything that can change a run's results: settings, the files they name, and ``facts``."""
    return digest({"config": result, "files": digest_named_files(result), "facts": dict(facts)})


# Options added in later versions, with the value that older configs imply.
LATER = {
    "judge.turns": "all",
    "truth.samples_per_prompt": 1,
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
    """Returns the settings in ``result`` that identify an arm: all except seeds, which differ between its runs.

    Options added in later versions are omitted if they have the value that older configs imply, so digests of older
    studies stay valid.
    """
    return {
        key: value
        for key, value in result.items()
        if key not in ("seed", "prepare.seed") and not (key in LATER and LATER[key] == value)
    }
