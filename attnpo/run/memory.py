"""Checks, before any model is loaded, whether a run fits in memory; resolves ``auto`` in model and batch settings.

Each ``auto`` in the model settings becomes the fastest choice that fits; token budgets are then maximized.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PretrainedConfig

from attnpo.config.compose import RootConfig, compose, list_groups, parse_subset
from attnpo.data.rules import BatchPlan, LengthRules
from attnpo.judge.judge import RunJudge
from attnpo.models.loading import load_config
from attnpo.models.memory import GIB, MIB, MOST, MemoryEstimate, estimate_training, max_token_budget
from attnpo.models.spec import AUTO, ModelSpec
from attnpo.objectives.base import PreferenceObjective
from attnpo.run.messages import log_once
from attnpo.run.run_config import RunConfig
from attnpo.schema import UserError
from attnpo.system.machine import device_memory, inference_device
from attnpo.training.optimizer import Optimizer
from attnpo.training.processes import planned_processes
from attnpo.training.settings import TrainerSettings
from attnpo.weights.base import WeightSource, online_statistics

log = logging.getLogger(__name__)

KEYS = ("gradient_checkpointing", "logps_chunk")
BUDGETS = ("tokens", "eval_tokens")


@dataclass(frozen=True)
class MemoryConfig(RootConfig):
    """Config fields that determine how much memory training needs. Can be loaded without optional packages."""

    model: ModelSpec
    objective: PreferenceObjective
    weights: WeightSource
    optimizer: Optimizer
    trainer: TrainerSettings
    lengths: LengthRules
    batch: BatchPlan
    reference: str


@dataclass(frozen=True)
class MemoryPlan:
    """Settings that determine how much memory training needs; ``auto`` values in model and batch are unresolved.

    ``reference``: kind of reference, None if the objective uses none. ``moments``: dtype of the optimiser's moments.
    """

    model: ModelSpec
    batch: BatchPlan
    max_length: int
    trainer: TrainerSettings
    moments: str
    reference: str | None

    @property
    def smallest_batch(self) -> BatchPlan:
        """Returns the batch with each ``auto`` set to its smallest value."""
        return self.batch.resolve_auto(self.max_length)

    def estimate(self, config: PretrainedConfig, model: ModelSpec, batch: BatchPlan) -> MemoryEstimate:
        """Estimates the memory that training with this model and batch needs on each device."""
        return estimate_training(
            config,
            model,
            self.moments,
            precision=self.trainer.precision,
            max_length=self.max_length,
            reference=self.reference,
            strategy=self.trainer.strategy,
            devices=planned_processes(self.trainer),
            micro=batch.pairs_per_forward,
            eval_micro=batch.eval_pairs_per_forward,
            tokens=batch.token_budget,
            eval_tokens=batch.eval_token_budget,
        )

    def device_memory(self) -> int | None:
        """Returns this device's memory in bytes (with several processes, the smallest GPU's), or None if unknown."""
        own = device_memory(inference_device(self.trainer.accelerator))
        if own is None or planned_processes(self.trainer) == 1:
            return own
        seen = (torch.cuda.get_device_properties(place).total_memory for place in range(torch.cuda.device_count()))
        return min(own, *seen)


def make_memory_plan(cfg: RunConfig | MemoryConfig) -> MemoryPlan:
    """Returns the settings of a config that determine how much memory training needs."""
    reads = cfg.objective.requires | online_statistics(cfg.weights)
    reference = cfg.reference if "reference" in reads else None
    return MemoryPlan(cfg.model, cfg.batch, cfg.lengths.max_length, cfg.trainer, cfg.optimizer.moments, reference)


# ------------------------------------------------------------------------------------------------ does it fit


def require_device(accelerator: str) -> None:
    """Raises UserError if the config requires a GPU but none is available."""
    if accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
        raise UserError(
            f"trainer.accelerator={accelerator}, but no CUDA device is visible: to run on the CPU, omit hardware= "
            "or set trainer.accelerator=auto; otherwise check CUDA_VISIBLE_DEVICES and the driver"
        )


def log_training_memory(
    plan: MemoryPlan, model: ModelSpec, batch: BatchPlan, overrides: Sequence[str], config_dir: Path | None
) -> None:
    """Logs the memory that training needs and whether it fits; if not, also lists options of the group ``hardware``."""
    config, capacity = (
        load_config(model.path, model.revision),
        device_memory(inference_device(plan.trainer.accelerator)),
    )
    with tolerate_failed_estimate(model.path):
        found = plan.estimate(config, model, batch)
        others = {}
        if capacity is not None and not found.fits(capacity):
            others = dict(estimate_hardware_options(config, overrides, config_dir))
        log_once(found.lines(capacity, others))


def log_judge_memory(judge: RunJudge, device: torch.device) -> None:
    """Logs the memory that the judge needs, and whether it fits on the device."""
    capacity = device_memory(device)
    budget = judge.choose_token_budget(capacity)
    if judge.settings.token_budget == AUTO:
        log_once([f"judge.token_budget={AUTO}: {budget:,} tokens per forward"])
    with tolerate_failed_estimate(judge.path):
        log_once(judge.estimate_memory(budget).lines(capacity))


@contextmanager
def tolerate_failed_estimate(path: str) -> Iterator[None]:
    """Logs a warning and continues if an estimate fails, because some model configs lack the required fields."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001  # configs of any model; the run does not need the estimate
        words = " ".join(str(error).split())[:200]
        log.warning("cannot estimate memory from the config of %s (%s)", path, words)


def estimate_hardware_options(
    config: PretrainedConfig, overrides: Sequence[str], config_dir: Path | None
) -> Iterator[tuple[str, MemoryEstimate]]:
    """Yields each option of the group ``hardware`` that this machine has enough devices for, with its estimate."""
    given = [word for word in overrides if not str(word).startswith("hardware=")]
    for option in list_groups(config_dir).get("hardware", []):
        try:
            plan = make_memory_plan(
                parse_subset(compose("fit", [*given, f"hardware={option}"], config_dir), MemoryConfig)
            )
        except UserError:  # the option contradicts the given overrides
            continue
        if planned_processes(plan.trainer) <= max(1, torch.cuda.device_count()):
            yield f"hardware={option}", plan.estimate(config, plan.model, plan.smallest_batch)


# ------------------------------------------------------------------------------------------------ what auto becomes


def fit_memory(plan: MemoryPlan) -> tuple[ModelSpec, BatchPlan]:
    """Resolves each ``auto`` in model and batch from the memory estimate, and logs the reason once.

    Picks the first of ``ModelSpec.memory_choices`` that fits with the smallest budgets, then the largest budgets that
    fit. If nothing fits or there is no estimate, picks the choice that needs the least memory. The saved config keeps
    ``auto``.
    """
    asked, batch = plan.model, plan.smallest_batch
    if asked.compile == AUTO:
        backend, reason = asked.backend(inference_device(plan.trainer.accelerator).type)
        asked = replace(asked, compile=backend)
        log_once([f"model.compile={AUTO}: {backend or 'blocks are not compiled'} ({reason})"])
    choices = asked.memory_choices()
    if batch == plan.batch and len(choices) == 1:
        return asked, batch
    estimates: list[MemoryEstimate] = []
    capacity = plan.device_memory()
    place, why = len(choices) - 1, "the one that needs the least memory, because there is no estimate"
    with tolerate_failed_estimate(asked.path):
        config = load_config(asked.path, asked.revision)
        estimates = [plan.estimate(config, choice, batch) for choice in choices]
        place, why = choose_fastest_fit(estimates, capacity)
        if capacity is not None and estimates[place].fits(capacity):
            batch = maximize_token_budgets(plan, config, choices[place], capacity)
    log_once(_decision_lines(plan, choices, estimates, place, why, batch))
    return choices[place], batch


def maximize_token_budgets(plan: MemoryPlan, config: PretrainedConfig, model: ModelSpec, capacity: int) -> BatchPlan:
    """Sets each ``auto`` budget to the most tokens that fit in ``capacity`` bytes, up to a process's full step."""
    least = plan.smallest_batch
    share = min(MOST, 2 * plan.max_length * -(-least.pairs // planned_processes(plan.trainer)))

    def has_room(batch: BatchPlan) -> bool:
        return plan.estimate(config, model, batch).fits(capacity)

    made, floors = least, (least.token_budget, least.eval_token_budget)
    if plan.batch.tokens == AUTO and floors[0] is not None:
        made = replace(
            made, tokens=max_token_budget(lambda most: has_room(replace(least, tokens=most)), floors[0], share)
        )
    if plan.batch.eval_tokens == AUTO and floors[1] is not None:
        made = replace(
            made, eval_tokens=max_token_budget(lambda most: has_room(replace(least, eval_tokens=most)), floors[1])
        )
    return made


def choose_fastest_fit(estimates: Sequence[MemoryEstimate], capacity: int | None) -> tuple[int, str]:
    """Returns the index of the first (fastest) estimate that fits in ``capacity`` bytes, and the reason."""
    if capacity is None:
        return len(estimates) - 1, "the one that needs the least memory, because no GPU memory could be read"
    for place, estimate in enumerate(estimates):
        if estimate.fits(capacity):
            return place, f"the fastest that fits in the device's {capacity / GIB:.1f} GiB"
    return len(estimates) - 1, (
        f"the one that needs the least memory, but it exceeds the device's {capacity / GIB:.1f} GiB"
    )


def describe_decision(asked: ModelSpec, made: ModelSpec) -> tuple[str, str, str]:
    """Returns the ``auto`` keys, their resolved values, and the settings to use instead of ``auto``, as strings."""
    keys = [key for key in (*KEYS, "compile") if getattr(asked, key) == AUTO]
    what = _join_auto_keys([f"model.{key}" for key in keys])
    least = replace(asked.memory_choices()[-1], compile=None)
    instead = " ".join(f"model.{key}={str(getattr(least, key)).lower().replace('none', 'null')}" for key in keys)
    return what, _describe_choice(made), f"set {instead} for all processes"


def _join_auto_keys(keys: Sequence[str]) -> str:
    *others, last = (f"{key}={AUTO}" for key in keys)
    return f"{', '.join(others)} and {last}" if others else last


def _describe_choice(choice: ModelSpec) -> str:
    blocks = "activations kept"
    if choice.uses_checkpointing:
        every = "" if choice.checkpoint_every == 1 else f" of one block in {choice.checkpoint_every}"
        blocks = f"activations{every} recomputed"
    compiled = "" if choice.compile is None else ", blocks compiled"
    return f"{blocks}, {choice.chunk} tokens at a time through the vocabulary head{compiled}"


def _decision_lines(
    plan: MemoryPlan,
    choices: Sequence[ModelSpec],
    estimates: Sequence[MemoryEstimate],
    place: int,
    why: str,
    batch: BatchPlan,
) -> list[str]:
    keys = [f"model.{key}" for key in KEYS if getattr(plan.model, key) == AUTO]
    keys += [f"batch.{key}" for key in BUDGETS if getattr(plan.batch, key) == AUTO]
    made = [_describe_choice(choices[place])]
    made += [f"{batch.token_budget:,} tokens per forward"] if batch.token_budget else []
    made += [f"{batch.eval_token_budget:,} in validation"] if batch.eval_token_budget else []
    lines = [f"{_join_auto_keys(keys)}: {', '.join(made)} ({why})"]
    for choice, estimate in zip(choices, estimates, strict=False):
        unit, name = (GIB, "GiB") if estimate.total >= GIB else (MIB, "MiB")
        lines.append(f"  {estimate.total / unit:8.2f} {name} estimated: {_describe_choice(choice)}")
    return lines
