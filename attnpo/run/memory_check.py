"""Whether a run fits its device: estimates of training and of the judge pass, logged before any model is loaded."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from attnpo.config.compose import Root, compose, groups, part
from attnpo.data.rules import BatchPlan, LengthRules
from attnpo.models.loading import load_config
from attnpo.models.memory import MemoryEstimate, estimate_training
from attnpo.models.spec import ModelSpec
from attnpo.objectives.base import PreferenceObjective
from attnpo.run.combinations import AUTO
from attnpo.run.context import RunContext, run_judge
from attnpo.run.run_config import RunConfig
from attnpo.run.startup import log_once
from attnpo.schema import UserError
from attnpo.system.machine import device_of, memory_of
from attnpo.training.optimizer import Optimizer
from attnpo.training.processes import planned_processes
from attnpo.training.settings import TrainerSettings
from attnpo.weights.base import WeightSource, online_reads

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Planned(Root):
    """What of a configuration says how much memory its training takes; the packages it needs may be absent."""

    model: ModelSpec
    objective: PreferenceObjective
    weights: WeightSource
    optimizer: Optimizer
    trainer: TrainerSettings
    lengths: LengthRules
    batch: BatchPlan
    reference: str


def log_memory(context: RunContext, *, training: bool = True) -> None:
    """Logs what training, if there is any, and the judge pass need, and whether the device holds it if there is one.

    Raises UserError when hardware asks for a GPU and there is none.
    """
    cfg, spec = context.cfg, context.model
    if cfg.trainer.accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
        raise UserError(
            f"trainer.accelerator={cfg.trainer.accelerator}, but no CUDA device is visible: leave hardware= out, or "
            "set trainer.accelerator=auto, to run on the CPU; or check CUDA_VISIBLE_DEVICES and the driver"
        )
    capacity = capacity_of(cfg)
    if training:
        _log_training(context, load_config(spec.path, spec.revision), capacity)
    if "judge" in cfg.weights.requires:
        judge = run_judge(context)
        budget = judge.budget(capacity)
        if judge.settings.token_budget == AUTO:
            log_once([f"judge.token_budget={AUTO}: {budget:,} tokens per forward"])
        with estimating(judge.path):
            log_once(judge.estimate(budget).lines(capacity))


def _log_training(context: RunContext, config: PretrainedConfig, capacity: int | None) -> None:
    cfg = context.cfg
    with estimating(cfg.model.path):
        found = training_estimate(cfg, config, context.model, context.batch)
        others = {}
        if capacity is not None and not found.fits(capacity):
            others = dict(alternatives(cfg, config))
        log_once(found.lines(capacity, others))


@contextmanager
def estimating(path: str) -> Iterator[None]:
    """Opens a context in which an estimate that fails is a warning: configs of some kinds say less, or say it
    otherwise.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001  # configs of any model; the run does not need the estimate
        words = " ".join(str(error).split())[:200]
        log.warning("memory is not estimated: the config of %s cannot be read for it (%s)", path, words)


def capacity_of(cfg: RunConfig) -> int | None:
    """Returns bytes of the device this process will use; None without a GPU."""
    return memory_of(device_of(cfg.trainer.accelerator))


def training_estimate(
    cfg: RunConfig | Planned,
    config: PretrainedConfig,
    model: ModelSpec | None = None,
    batch: BatchPlan | None = None,
) -> MemoryEstimate:
    """Estimates what training needs on each device; of its own model and plan the least that ``auto`` may be.

    ``model`` and ``batch`` stand in their place.
    """
    plan = batch or cfg.batch.decide(cfg.lengths.max_length)
    return estimate_training(
        config,
        model or cfg.model,
        cfg.optimizer.moments,
        precision=cfg.trainer.precision,
        max_length=cfg.lengths.max_length,
        reference=cfg.reference if "reference" in cfg.objective.requires | online_reads(cfg.weights) else None,
        strategy=cfg.trainer.strategy,
        devices=planned_processes(cfg.trainer),
        micro=plan.per_forward,
        eval_micro=plan.eval_per_forward,
        tokens=plan.budget,
        eval_tokens=plan.eval_budget,
    )


def alternatives(cfg: RunConfig, config: PretrainedConfig) -> Iterator[tuple[str, MemoryEstimate]]:
    """Yields the same command under every option of the group hardware that this machine has the devices for."""
    given = [word for word in cfg.composed.overrides if not str(word).startswith("hardware=")]
    folder = cfg.composed.config_dir
    for option in groups(folder).get("hardware", []):
        try:
            planned = part(compose("fit", [*given, f"hardware={option}"], folder), Planned)
        except UserError:  # its keys contradict those given
            continue
        if planned_processes(planned.trainer) <= max(1, torch.cuda.device_count()):
            yield f"hardware={option}", training_estimate(planned, config)
