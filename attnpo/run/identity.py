"""Identity of a run: the config keys that can affect its results, and the files those keys name.

Used to resume a run, to reuse a study's finished grid points and to distinguish a study's arms.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from attnpo.config.compose import instantiate, to_container, wrap_yaml_errors
from attnpo.config.fields import bookkeeping_keys
from attnpo.config.named_files import is_at_or_below
from attnpo.run.combinations import AUTO, LAYER
from attnpo.run.run_config import RunConfig
from attnpo.system.files import Json, flatten
from attnpo.system.source_digest import PACKAGE
from attnpo.training.settings import CallbackSettings, monitor_mode
from attnpo.weights.base import WeightSource

ROOT = ("_target_",)  # class of the root config, which only depends on the command
# Paths whose contents are compared instead.
SCORERS = ("positive", "negative", "oracle", "reference")
PATHS = (
    *("model.path", "data.path", "judge.path", "verbalizer.path", "weights.path"),
    *(f"weights.{name}.path" for name in SCORERS),
)
OF_SETS = re.compile(r"data\.mix\.[^.]+\.path")
# Keys without effect on training, free to change on resume; but they do change the result.
BESIDE = ("truth", "drift", "callbacks", "trainer.validate_every")
# The exceptions, which decide which policy is the best.
MONITOR, MODE = "callbacks.monitor", "callbacks.mode"
KEPT = (MONITOR, MODE)
# Nodes that are used only by weight sources with this requirement.
NEEDED = {"judge": "judge", "auto_layer": "judge", "verbalizer": "generator"}
LAYERS = "weights.layers"
# Nodes that change neither the pairs nor their weights; all others may. Only the objective's class matters, which must
# use weights.
APART = ("name", "output", "resume", "logger", "callbacks", "composed", "study", "grid", "grids", "seeds", "truth",
         "drift", "reference", "optimizer", "trainer", "batch", "objective")  # fmt: skip
# Keys used only by reference spans.
SPANS = ("judge.span_closing", "judge.span_drop")
# Chooses the weights that decay; no effect without weight decay.
DECAY, DECAY_ALL = "optimizer.weight_decay", "optimizer.decay_all"
# Changes no number. ``auto`` counts as true, the earlier value in all hardware options.
RECOMPUTED = "model.gradient_checkpointing"
# Changes numbers only by rounding under ``auto``, which counts as null, the earlier value in all hardware options.
COMPILED = "model.compile"


@dataclass(frozen=True)
class RunIdentity:
    """Config keys that define a run; all mappings are flat except ``inputs``.

    ``numbers``: keys that can affect training numerically. ``result``: keys that can affect any number in the result,
    including scores and checkpoint selection. ``settings``: all keys that can affect a number, except the model and
    data paths. ``paths``: paths compared by file contents. ``inputs``: config nodes that can affect pairs or weights.
    ``ignored_keys``: keys that affect no number.
    """

    numbers: dict[str, object]
    result: dict[str, object]
    settings: dict[str, object]
    paths: dict[str, object]
    inputs: dict[str, object]
    ignored_keys: Sequence[str]


def make_identity(cfg: RunConfig) -> RunIdentity:
    """Returns the config keys that define a run."""
    ignored_keys, unread, every = (
        [*ROOT, *bookkeeping_keys(cfg)],
        _unused_keys(cfg.values, cfg.weights),
        _comparable_values(cfg.values),
    )
    idle, alone = (*ignored_keys, *PATHS, *unread), (*ignored_keys, "model.path", "data.path")
    return RunIdentity(
        numbers=_select_numbers(every, ignored_keys, unread, cfg.weights),
        result={key: value for key, value in every.items() if not is_at_or_below(key, idle)},
        settings={key: value for key, value in every.items() if not is_at_or_below(key, alone)},
        paths={key: value for key, value in flatten(cfg.values) if key in PATHS and not is_at_or_below(key, unread)},
        inputs={name: node for name, node in cfg.values.items() if name not in APART},
        ignored_keys=ignored_keys,
    )


def load_saved_numbers(path: Path, ignored_keys: Sequence[str]) -> dict[str, object]:
    """Reads ``RunIdentity.numbers`` from the config saved at ``path``, without the current run's ``ignored_keys``."""
    with wrap_yaml_errors(path):
        values = to_container(DictConfig(OmegaConf.load(path)))
    source = instantiate(values["weights"])
    composed = values.get("composed")
    begun = composed.get("environment") if isinstance(composed, dict) else None
    of_then = {key: f"of the environment ({was})" for key, was in begun.items()} if isinstance(begun, dict) else {}
    found = _select_numbers(_comparable_values(values), ignored_keys, _unused_keys(values, source), source)
    return {key: of_then.get(key, value) for key, value in found.items()}


def _select_numbers(
    every: Mapping[str, object], ignored_keys: Sequence[str], unread: Sequence[str], source: WeightSource
) -> dict[str, object]:
    idle = (*ignored_keys, *bookkeeping_keys(source, "weights"), *PATHS, *BESIDE, *unread)
    return {key: value for key, value in every.items() if key in KEPT or not is_at_or_below(key, idle)}


def shorten_class_path(value: object) -> object:
    """Shortens a config value to the class name if it is the import path of a class in this package."""
    own = isinstance(value, str) and value.startswith(f"{PACKAGE.name}.")
    return str(value).rpartition(".")[2] if own else value


def flatten_with_classes(values: Mapping[str, object]) -> dict[str, object]:
    """Flattens a config and shortens the import paths of this package's classes."""
    return {key: shorten_class_path(value) if key.endswith("_target_") else value for key, value in flatten(values)}


def _unused_keys(values: Mapping[str, Json], source: WeightSource) -> list[str]:
    """Returns the keys that have no effect given the other settings."""
    read = dict(flatten(values))
    undecayed = [] if read.get(DECAY) else [DECAY_ALL]
    replaced = [LAYER] if read.get(LAYERS) else []
    spans = [] if str(read.get("judge.span")).lower() == "reference" else SPANS
    return [*(part for part, needed in NEEDED.items() if needed not in source.requires), *replaced, *spans, *undecayed]


def _comparable_values(values: Mapping[str, Json]) -> dict[str, object]:
    """Returns all keys with values that can be compared across versions of attnpo.

    Class names have no module path, and defaults are filled in.
    """
    every = {key: value for key, value in flatten_with_classes(values).items() if not OF_SETS.fullmatch(key)}
    if every.get(MODE, "") is None:
        every[MODE] = monitor_mode(str(every.get(MONITOR, CallbackSettings.monitor)))
    if every.get(RECOMPUTED) == AUTO:
        every[RECOMPUTED] = True
    if every.get(COMPILED) == AUTO:
        every[COMPILED] = None
    return every
