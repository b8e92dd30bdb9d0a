"""What a command says first: itself, its model, data, weights, objective, budget, and where the results go.

Only the process that leads a job speaks; a study's points log into their own files. Light: nothing heavy is loaded.
"""

import logging
from collections.abc import Iterable
from pathlib import Path

from attnpo.config.compose import MISSING
from attnpo.run.folders import store_root
from attnpo.run.run_config import RunConfig
from attnpo.training.processes import planned_processes
from attnpo.training.settings import TrainerSettings
from attnpo.weights.base import WeightSource

log = logging.getLogger(__name__)


def announce(command: str, cfg: RunConfig, folder: Path | None, budget: str | None = None) -> None:
    """Logs six lines on what ``command`` (fit, weigh) is about to do; it writes into ``folder`` if there is one.

    ``budget`` stands in place of the configuration's: a study's, which knows its points. The whole configuration is in
    the folder's config.yaml.
    """
    choices, later, objective = cfg.composed.choices, cfg.chosen_later(), cfg.objective
    built = None
    if cfg.prepare is not None:
        built = f"built by {choices.get('prepare') or type(cfg.prepare).__name__} (once, then from the store)"
    model, data = (
        built if built is not None and path in (MISSING, "None") else path
        for path in (cfg.model.path, str(getattr(cfg.data, "place", None)))
    )
    lora = f", LoRA of rank {cfg.model.lora.rank}" if cfg.model.lora is not None else ""
    reference = f"; reference {cfg.reference}" if "reference" in objective.requires else ""
    weights = loss = "each arm's own"
    if "weights" not in later:
        name = choices.get("weights") or type(cfg.weights).__name__
        weights = _describe_weights(name, cfg.weights, cfg.judge.path or "the model itself", cfg.transforms)
    if "objective" not in later:
        beta = getattr(objective, "beta", None)
        name = choices.get("objective") or type(objective).__name__
        loss = (
            f"{name}{'' if beta is None else f', beta {beta:g}'}, learning rate {cfg.optimizer.lr:g}{cfg.grid_note()}"
        )
    results = f"results   in the store {store_root(cfg.store)}"
    if folder is not None:
        device = _describe_device(cfg.seed, cfg.trainer)
        results = f"budget    {budget or cfg.budget()}; {device}; results in {folder} (all settings: config.yaml)"
    for line in (
        f"{command:10}{cfg.headline()}",
        f"model     {model}{lora}{reference}",
        f"data      {data}, {cfg.batch.pairs} pairs a step",
        f"weights   {weights}",
        f"objective {loss}",
        results,
    ):
        log.info("%s", line)


def _describe_weights(name: str, source: WeightSource, judge: str, transforms: Iterable[str]) -> str:
    layer, names = getattr(source, "layer", None), list(transforms)
    parts = [
        name,
        *([] if layer is None else [f"layer {layer}"]),
        *([f"judge {judge}"] if "judge" in source.requires else []),
        *([f"transforms {', '.join(names)}"] if names else []),
    ]
    return ", ".join(parts)


def _describe_device(seed: int, trainer: TrainerSettings) -> str:
    processes = planned_processes(trainer)
    device = "CPU" if trainer.accelerator == "cpu" else f"device {trainer.accelerator}"
    return f"seed {seed}, {device}{f', {processes} processes' if processes > 1 else ''}"


LOW_RATE = 1e-5  # for adapters, which start at no update at all; of rates for all weights 1e-6 is a common one


def warn_low_rate(rate: float) -> None:
    """Warns of adapters under a learning rate that is meant for all weights."""
    if rate < LOW_RATE:
        line = (
            f"optimizer.lr={rate:g} is too low for adapters (model.lora), which hardly move at it: "
            f"set optimizer.lr={LOW_RATE:g} or more (1e-4 is common)"
        )
        log_once([line], logging.WARNING)


_said: set[str] = set()


def log_once(lines: Iterable[str], level: int = logging.INFO) -> None:
    """Logs the lines that this process has not logged yet: the points of a study share most of them."""
    for line in lines:
        if line not in _said:
            _said.add(line)
            log.log(level, "%s", line)
