"""First and last log lines of a run: what it is about to do, its outcome, and the next steps.

Logged only by the main process of a job; a study's grid points log to their own files. Imports nothing heavy.
"""

import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from attnpo.cli.terminal import command_text, format_override
from attnpo.config.compose import MISSING, Composition, load
from attnpo.run.folders import store_root
from attnpo.run.result import RunResult
from attnpo.run.run_config import RunConfig
from attnpo.schema import UserError
from attnpo.training.processes import planned_processes
from attnpo.training.settings import TrainerSettings
from attnpo.weights.base import WeightSource

log = logging.getLogger(__name__)


def log_opening_lines(command: str, cfg: RunConfig, folder: Path | None, budget: str | None = None) -> None:
    """Logs six lines about what ``command`` will do and where it writes output. ``budget``: a study's budget."""
    choices, later, objective = cfg.composed.choices, cfg.groups_set_by_runs(), cfg.objective
    built = None
    if cfg.prepare is not None:
        built = f"built by {choices.get('prepare') or type(cfg.prepare).__name__} (once, then from the store)"
    model, data = (
        built if built is not None and path in (MISSING, "None") else path
        for path in (cfg.model.path, str(getattr(cfg.data, "location", None)))
    )
    lora = f", LoRA of rank {cfg.model.lora.rank}" if cfg.model.lora is not None else ""
    reference = f"; reference {cfg.reference}" if "reference" in objective.requires else ""
    weights = loss = "set by each arm"
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


LOW_RATE = 1e-5  # for adapters, whose update starts at 0; 1e-6 is common when all weights are trained


def warn_low_learning_rate(rate: float) -> None:
    """Warns if adapters would be trained with a learning rate meant for full fine-tuning."""
    if rate < LOW_RATE:
        line = (
            f"optimizer.lr={rate:g} is too low for adapters (model.lora), which would hardly change: "
            f"set optimizer.lr={LOW_RATE:g} or more (1e-4 is common)"
        )
        log_once([line], logging.WARNING)


_said: set[str] = set()


def log_once(lines: Iterable[str], level: int = logging.INFO) -> None:
    """Logs each line at most once per process, because a study's grid points share most lines."""
    for line in lines:
        if line not in _said:
            _said.add(line)
            log.log(level, "%s", line)


# ------------------------------------------------------------------------------------------------ the last lines

PLACES = ("name", "resume")


def closing_lines(composed: Composition, seed: int, folder: Path, result: RunResult) -> Iterator[str]:
    """Yields the outcome of a finished run, then up to three commands for next steps, one per line."""
    yield f"result: {outcome_text(result)}"
    yield f"report and raw numbers: {folder}"
    yield "next steps:"
    for text in next_commands(composed, seed, folder):
        yield f"  {text}"


def outcome_text(result: RunResult) -> str:
    """Describes the outcome in words, and notes that a single run has nothing to be compared with."""
    if result.truth is not None:
        scores = result.truth["test"].numbers
        text = (
            f"on held-out prompts the true reward is {scores['reward']:.3f} (base {scores['base_reward']:.3f}); the "
            f"policy's answer wins in {100 * scores['win_rate']:.0f} % of cases, at KL {scores['kl']:.2f}"
        )
    else:
        loss, first = (result.metrics.get(name, math.nan) for name in ("val/loss", "first/val/loss"))
        share = result.metrics.get("val/rewards/accuracies", math.nan)
        text = (
            f"validation loss {loss:.4f} ({first:.4f} before training), ranking accuracy {100 * share:.0f} % on the "
            "validation pairs"
        )
        text += f" ({result.overlap_warning})" if result.overlap_warning else ""
    if result.training_warning is not None:
        return f"{text}. WARNING: {result.training_warning}"
    return f"{text}. This is a single run, so there is nothing to compare it with"


def next_commands(composed: Composition, seed: int, folder: Path) -> list[str]:
    """Returns commands that show the report, rerun with a new seed and, if valid, rerun with different weights."""
    uniform = composed.choices.get("weights") == "uniform"
    other, objective = ("attention", "twdpo") if uniform else ("uniform", "dpo")
    twins = [(f"weights={other}",), (f"weights={other}", f"objective={objective}")]
    other_seed = replace(composed, overrides=_replace_overrides(composed, f"seed={seed + 1}")).arguments()
    found = [other_seed, next(filter(None, (_fit_arguments(composed, *twin) for twin in twins)), None)]
    return [command_text("report", str(folder)), *(command_text("fit", *words) for words in found if words)]


def _fit_arguments(composed: Composition, *given: str) -> list[str] | None:
    """Returns ``fit`` arguments that repeat this run with extra overrides in a new folder; None if they are invalid."""
    try:
        again: RunConfig = load("fit", _replace_overrides(composed, *given), composed.config_dir)
    except UserError:
        return None
    return again.composed.arguments()


def _replace_overrides(composed: Composition, *given: str) -> tuple[str, ...]:
    """Returns the run's overrides updated with ``given``, without the keys that set the run folder."""
    replaced = {*PLACES, *map(_override_key, given)}
    return (*(item for item in composed.overrides if _override_key(item).partition(".")[0] not in replaced), *given)


def resume_arguments(composed: Composition, name: str) -> list[str]:
    """Returns the ``fit`` arguments that resume the run in the folder ``name`` under ``output``."""
    kept = [item for item in composed.overrides if _override_key(item) not in PLACES]
    return replace(composed, overrides=(*kept, format_override("name", name), "resume=auto")).arguments()


def _override_key(item: str) -> str:
    return item.lstrip("+~").partition("=")[0]
