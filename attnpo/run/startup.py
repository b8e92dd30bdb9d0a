"""What a command says first: itself, its model, data, weights, objective, budget, and where the results go.

Only the process that leads a job speaks; a study's points log into their own files. Light: nothing heavy is loaded.
"""

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

from attnpo.config.compose import MISSING
from attnpo.run.folders import store_root
from attnpo.run.run_config import RunConfig
from attnpo.system.files import Json
from attnpo.training.processes import planned_processes

log = logging.getLogger(__name__)


def announce(command: str, cfg: RunConfig, folder: Path | None, budget: str | None = None) -> None:
    """Logs the lines of ``opening``."""
    for line in opening(command, cfg, folder, budget):
        log.info("%s", line)


def opening(command: str, cfg: RunConfig, folder: Path | None, budget: str | None = None) -> Iterator[str]:
    """Six lines on what ``command`` (fit, weigh) is about to do; it writes into ``folder`` if there is one.

    ``budget`` stands in place of the configuration's: a study's, which knows its points. The whole configuration is in
    the folder's config.yaml.
    """
    yield f"{command:10}{cfg.headline()}"
    yield f"model     {_model(cfg)}"
    yield f"data      {_data(cfg)}"
    yield f"weights   {_weights(cfg)}"
    yield f"objective {_objective(cfg)}"
    store = store_root(cfg)
    if folder is None:
        yield f"results   in the store {store}"
    else:
        yield f"budget    {budget or cfg.budget()}; {_device(cfg)}; results in {folder} (all settings: config.yaml)"


def _model(cfg: RunConfig) -> str:
    lora = f", LoRA of rank {cfg.model.lora.rank}" if cfg.model.lora is not None else ""
    reference = f"; reference {cfg.reference}" if "reference" in cfg.objective.requires else ""
    return f"{_place(cfg, cfg.model.path)}{lora}{reference}"


def _data(cfg: RunConfig) -> str:
    return f"{_place(cfg, str(getattr(cfg.data, 'place', None)))}, {cfg.batch.pairs} pairs a step"


def _place(cfg: RunConfig, path: str) -> str:
    """Returns a path or hub name; where the setting builds what lies there, its name."""
    if path in (MISSING, "None") and cfg.prepare is not None:
        return (
            f"built by {cfg.composed.choices.get('prepare') or type(cfg.prepare).__name__} (once, then from the store)"
        )
    return path


def _weights(cfg: RunConfig) -> str:
    if "weights" in cfg.chosen_later():
        return "each arm's own"
    layer, judge = getattr(cfg.weights, "layer", None), cfg.judge.path or "the model itself"
    parts = [
        _name(cfg, "weights", cfg.weights),
        *([] if layer is None else [f"layer {layer}"]),
        *([f"judge {judge}"] if "judge" in cfg.weights.requires else []),
        *([f"transforms {', '.join(cfg.transforms)}"] if cfg.transforms else []),
    ]
    return ", ".join(parts)


def _objective(cfg: RunConfig) -> str:
    if "objective" in cfg.chosen_later():
        return "each arm's own"
    settings: dict[str, Json] = cfg.below("objective")
    beta = f", beta {settings['beta']:g}" if isinstance(settings.get("beta"), float | int) else ""
    return f"{_name(cfg, 'objective', cfg.objective)}{beta}, learning rate {cfg.optimizer.lr:g}{cfg.grid_note()}"


def _name(cfg: RunConfig, group: str, component: object) -> str:
    """Returns the option of a group that was chosen, else the component's own name."""
    return cfg.composed.choices.get(group) or type(component).__name__


def _device(cfg: RunConfig) -> str:
    processes = planned_processes(cfg.trainer)
    device = "CPU" if cfg.trainer.accelerator == "cpu" else f"device {cfg.trainer.accelerator}"
    return f"seed {cfg.seed}, {device}{f', {processes} processes' if processes > 1 else ''}"


LOW_RATE = 1e-5  # for adapters, which start at no update at all; of rates for all weights 1e-6 is a common one


def warn_low_rate(cfg: RunConfig) -> None:
    """Warns of adapters under a learning rate that is meant for all weights."""
    if cfg.model.lora is not None and cfg.optimizer.lr < LOW_RATE:
        line = (
            f"optimizer.lr={cfg.optimizer.lr:g} is too low for adapters (model.lora), which hardly move at it: "
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
