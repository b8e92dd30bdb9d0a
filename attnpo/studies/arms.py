"""The config of every arm and point of a study, composed from overrides, and what of a config can change a number."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from attnpo.config import compose, plain
from attnpo.schema import UserError, digest
from attnpo.studies.grid import ONLY, Point, Study
from attnpo.studies.publish import study_overrides

log = logging.getLogger(__name__)

Composed = tuple[DictConfig, list[str]]  # a config, and the overrides that give it on the command line

# Parts of a config that change no number of a run.
BOOKKEEPING = ("name", "output", "store", "resume", "logger", "study", "grid", "grids", "seeds", "composed")


def key_of(override: str) -> str:
    """The key or group an override sets."""
    return override.split("=", 1)[0].lstrip("+~")


def layered(*layers: Sequence[str]) -> list[str]:
    """Overrides of all layers; a later layer's override replaces earlier ones of the same key."""
    merged: dict[str, str] = {}
    for override in (item for layer in layers for item in layer):
        merged.pop(key_of(override), None)
        merged[key_of(override)] = override
    return list(merged.values())


def of_points(cfg: DictConfig) -> list[str]:
    """The user's overrides that reach the points: all but those of the study's own keys."""
    return [override for override in cfg.composed.get("overrides", []) if not key_of(override).startswith("study.")]


def arm_config(cfg: DictConfig, study: Study, overrides: Sequence[str], world: str = ONLY) -> Composed:
    """The composed config of one arm in one world, and the overrides that give it on the command line.

    The user's overrides come first, then the world's, the arm's win. A user's ``weights.layer=2`` goes to the arms that
    have such a key and is left out, with a log line, where an arm's own choice of the group has none.
    """
    user = of_points(cfg)
    single = ["study=none", "seeds=null", *study_overrides(cfg, study.name)]
    chosen = [*study.worlds.get(world, []), *overrides]
    try:
        merged = layered(study.shared, user, chosen, single)
        return compose("fit", merged, config_dir(cfg)), merged
    except UserError:
        groups = {key_of(override) for override in chosen if "." not in key_of(override)}
        foreign = [
            override for override in user if key_of(override).split(".")[0] in groups and "." in key_of(override)
        ]
        if not foreign:
            raise
        log.info("arm %s: %s does not apply and is left out", " ".join(overrides), " ".join(foreign))
        merged = layered(study.shared, [override for override in user if override not in foreign], chosen, single)
        return compose("fit", merged, config_dir(cfg)), merged


def check_user(cfg: DictConfig, study: Study) -> None:
    """Nothing; refuses an override of what the study's arms or worlds choose themselves."""
    user = of_points(cfg)
    arms = list(study.arms_with(cfg.truth is not None).values())
    chosen = {key_of(item) for overrides in arms for item in overrides if "." not in key_of(item)}
    _refuse(study, "arms", chosen, [override for override in user if key_of(override) in chosen])
    fixed = {key_of(item) for overrides in study.worlds.values() for item in overrides}
    _refuse(study, "worlds", fixed, [override for override in user if key_of(override) in fixed])
    for override in user:
        group, dot, _ = key_of(override).partition(".")
        if dot and group in chosen and not any(applies(cfg, override, arm) for arm in arms):
            compose("fit", layered([override], arms[0], ["study=none"]), config_dir(cfg))


def _refuse(study: Study, of: str, chosen: set[str], clash: Sequence[str]) -> None:
    if clash:
        raise UserError(
            f"study {study.name} chooses {', '.join(sorted(chosen))} for each of its {of}, so {' '.join(clash)} would "
            "be lost: leave it out, or add study=none for a single run"
        )


def applies(cfg: DictConfig, override: str, arm: Sequence[str]) -> bool:
    """Whether an arm's config has the key of ``override``."""
    try:
        compose("fit", layered([override], arm, ["study=none"]), config_dir(cfg))
    except UserError:
        return False
    return True


def point_config(arm: Composed, point: Point) -> Composed:
    """A point's own config and overrides, from those of its arm."""
    cfg, overrides = arm[0].copy(), layered(arm[1], [*point.values, f"seed={point.seed}"])
    for key, value in (override.split("=", 1) for override in (*point.values, f"seed={point.seed}")):
        OmegaConf.update(cfg, key, yaml_value(value))
    cfg.composed.overrides = overrides
    return cfg, overrides


def yaml_value(text: str) -> Any:
    """The value an override's text stands for."""
    return OmegaConf.create(f"value: {text}").value


def config_dir(cfg: DictConfig) -> Path | None:
    """The user's own config folder this config was composed with, if any."""
    given = cfg.composed.get("config_dir")
    return None if given is None else Path(given)


def plain_store(cfg: DictConfig) -> str | None:
    """The store given in the config, to be handed to every point."""
    return None if cfg.store is None else str(cfg.store)


def clean(name: str) -> str:
    """A name as part of a file's name."""
    return "".join(letter if letter.isalnum() or letter in "=.-" else "_" for letter in name)


def point_folder(folder: Path, point: Point, cfg: DictConfig, facts: Mapping[str, Any]) -> Path:
    """Where a point's results lie: named by world, arm, grid values, seed, and the digest of all that moves a number.

    That is the composed config and ``facts``: what the files it names hold, and the versions of the code.
    """
    values = numbers_of(cfg)
    settings = [value.partition("=") for value in point.values]
    world = [point.arm.world] if point.arm.world else []
    name = "-".join([*world, point.arm.name, *(f"{key.rpartition('.')[-1]}={value}" for key, _, value in settings)])
    found = digest({"config": values, "facts": dict(facts)})[:8]
    return folder / "points" / f"{clean(name)}-seed{point.seed}-{found}"


def numbers_of(cfg: DictConfig) -> dict[str, Any]:
    """The parts of a config that can change a number; paths of model and data give way to what they hold."""
    values = {key: value for key, value in plain(cfg).items() if key not in BOOKKEEPING}
    for node in ("model", "data"):
        values[node] = {key: value for key, value in values[node].items() if key != "path"}
    return values


def counted(cfg: DictConfig) -> dict[str, Any]:
    """``numbers_of`` an arm without the seed, which differs between its points."""
    values = numbers_of(cfg)
    prepare = values["prepare"]
    return {**values, "seed": None, "prepare": None if prepare is None else {**prepare, "seed": None}}
