"""Identity of a run: the keys of its config, and the files they name, that can move a number.

The one notion of it, for resuming a run, for finding a study's finished points and for telling a study's arms apart.
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
from attnpo.training.settings import CallbackSettings, direction
from attnpo.weights.base import WeightSource

ROOT = ("_target_",)  # the class of the root, which is that of the command
# What lies at these paths is compared instead.
SCORERS = ("positive", "negative", "oracle", "reference")
PATHS = (
    *("model.path", "data.path", "judge.path", "verbalizer.path", "weights.path"),
    *(f"weights.{name}.path" for name in SCORERS),
)
OF_SETS = re.compile(r"data\.mix\.[^.]+\.path")
# What is done beside the training: free to change while it goes on, but a result without it is another one.
BESIDE = ("truth", "drift", "callbacks", "trainer.validate_every")
# What of it decides which policy is the best.
MONITOR, MODE = "callbacks.monitor", "callbacks.mode"
KEPT = (MONITOR, MODE)
# Parts that only a weight source reads which requires this.
NEEDED = {"judge": "judge", "auto_layer": "judge", "verbalizer": "generator"}
LAYERS = "weights.layers"
# Nodes that touch neither the pairs nor their weights; any other may. Of the objective only its class is looked at,
# which must read weights.
APART = ("name", "output", "resume", "logger", "callbacks", "composed", "study", "grid", "grids", "seeds", "truth",
         "drift", "reference", "optimizer", "trainer", "batch", "objective")  # fmt: skip
# What only reference spans read.
SPANS = ("judge.span_closing", "judge.span_drop")
# Which weights decay: nothing where none does.
DECAY, DECAY_ALL = "optimizer.weight_decay", "optimizer.decay_all"
# Moves no number. ``auto`` counts as true, which every option of hardware had before.
RECOMPUTED = "model.gradient_checkpointing"
# Moves no number beyond rounding under ``auto``, which counts as null, as every option of hardware had it before.
COMPILED = "model.compile"


@dataclass(frozen=True)
class Identity:
    """Keys of a configuration that make a run the run it is; every mapping is flat but ``inputs``.

    ``numbers``: can move a number of the training; ``result``: of a whole result, with what is scored and kept;
    ``settings``: the same whatever the weights are; ``paths``: stand for their contents; ``inputs``: nodes that can
    touch pairs or weights; ``moveless``: keys that move no number.
    """

    numbers: dict[str, object]
    result: dict[str, object]
    settings: dict[str, object]
    paths: dict[str, object]
    inputs: dict[str, object]
    moveless: Sequence[str]


def identity_of(cfg: RunConfig) -> Identity:
    """Returns what makes a run the run it is."""
    moveless, unread, every = [*ROOT, *bookkeeping_keys(cfg)], _unread(cfg.values, cfg.weights), _values(cfg.values)
    idle, alone = (*moveless, *PATHS, *unread), (*moveless, "model.path", "data.path")
    return Identity(
        numbers=_numbers(every, moveless, unread, cfg.weights),
        result={key: value for key, value in every.items() if not is_at_or_below(key, idle)},
        settings={key: value for key, value in every.items() if not is_at_or_below(key, alone)},
        paths={key: value for key, value in flatten(cfg.values) if key in PATHS and not is_at_or_below(key, unread)},
        inputs={name: node for name, node in cfg.values.items() if name not in APART},
        moveless=moveless,
    )


def saved_numbers(path: Path, moveless: Sequence[str]) -> dict[str, object]:
    """Reads ``Identity.numbers`` of the config saved at ``path``; ``moveless``: those of the one to compare with."""
    with wrap_yaml_errors(path):
        values = to_container(DictConfig(OmegaConf.load(path)))
    source = instantiate(values["weights"])
    composed = values.get("composed")
    begun = composed.get("environment") if isinstance(composed, dict) else None
    of_then = {key: f"of the environment ({was})" for key, was in begun.items()} if isinstance(begun, dict) else {}
    found = _numbers(_values(values), moveless, _unread(values, source), source)
    return {key: of_then.get(key, value) for key, value in found.items()}


def _numbers(
    every: Mapping[str, object], moveless: Sequence[str], unread: Sequence[str], source: WeightSource
) -> dict[str, object]:
    idle = (*moveless, *bookkeeping_keys(source, "weights"), *PATHS, *BESIDE, *unread)
    return {key: value for key, value in every.items() if key in KEPT or not is_at_or_below(key, idle)}


def component(value: object) -> object:
    """Returns a value of a config; of a component of the package its class alone, whichever module that is in."""
    own = isinstance(value, str) and value.startswith(f"{PACKAGE.name}.")
    return str(value).rpartition(".")[2] if own else value


def by_class(values: Mapping[str, object]) -> dict[str, object]:
    """Returns every key of a config with its value, the components of the package by their classes."""
    return {key: component(value) if key.endswith("_target_") else value for key, value in flatten(values)}


def _unread(values: Mapping[str, Json], source: WeightSource) -> list[str]:
    """Parts that nothing reads as the others stand."""
    read = dict(flatten(values))
    undecayed = [] if read.get(DECAY) else [DECAY_ALL]
    replaced = [LAYER] if read.get(LAYERS) else []
    spans = [] if str(read.get("judge.span")).lower() == "reference" else SPANS
    return [*(part for part, needed in NEEDED.items() if needed not in source.requires), *replaced, *spans, *undecayed]


def _values(values: Mapping[str, Json]) -> dict[str, object]:
    """Returns every key with its value, components as their classes; a mode that follows from the metric as it is."""
    every = {key: value for key, value in by_class(values).items() if not OF_SETS.fullmatch(key)}
    if every.get(MODE, "") is None:
        every[MODE] = direction(str(every.get(MONITOR, CallbackSettings.monitor)))
    if every.get(RECOMPUTED) == AUTO:
        every[RECOMPUTED] = True
    if every.get(COMPILED) == AUTO:
        every[COMPILED] = None
    return every
