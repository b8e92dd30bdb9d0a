"""Memory check of a run before a model loads: does it fit, and what every ``auto`` of its model and batch becomes.

An ``auto`` is the quickest choice that has room, then as large as it can be.
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
from attnpo.weights.base import WeightSource, online_reads

log = logging.getLogger(__name__)

KEYS = ("gradient_checkpointing", "logps_chunk")
BUDGETS = ("tokens", "eval_tokens")


@dataclass(frozen=True)
class Planned(RootConfig):
    """Parts of a configuration that decide the memory of its training; the packages it needs may be absent."""

    model: ModelSpec
    objective: PreferenceObjective
    weights: WeightSource
    optimizer: Optimizer
    trainer: TrainerSettings
    lengths: LengthRules
    batch: BatchPlan
    reference: str


@dataclass(frozen=True)
class Footprint:
    """Model and batch of a training as they are asked for, with their ``auto``: what decides its memory.

    ``reference``: its kind, None where the objective reads none. ``moments``: number format of the optimiser's.
    """

    model: ModelSpec
    batch: BatchPlan
    max_length: int
    trainer: TrainerSettings
    moments: str
    reference: str | None

    @property
    def least(self) -> BatchPlan:
        """Returns the batch with every ``auto`` at its least."""
        return self.batch.resolve_auto(self.max_length)

    def estimate(self, config: PretrainedConfig, model: ModelSpec, batch: BatchPlan) -> MemoryEstimate:
        """Estimates what training needs on each device with these choices for model and batch."""
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

    def capacity(self) -> int | None:
        """Returns bytes of this process's device, of several those of the node's smallest GPU; None without."""
        own = device_memory(inference_device(self.trainer.accelerator))
        if own is None or planned_processes(self.trainer) == 1:
            return own
        seen = (torch.cuda.get_device_properties(place).total_memory for place in range(torch.cuda.device_count()))
        return min(own, *seen)


def footprint(cfg: RunConfig | Planned) -> Footprint:
    """Returns what decides the memory of a configuration's training."""
    reads = cfg.objective.requires | online_reads(cfg.weights)
    reference = cfg.reference if "reference" in reads else None
    return Footprint(cfg.model, cfg.batch, cfg.lengths.max_length, cfg.trainer, cfg.optimizer.moments, reference)


# ------------------------------------------------------------------------------------------------ does it fit


def require_device(accelerator: str) -> None:
    """Raises UserError when hardware asks for a GPU and there is none."""
    if accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
        raise UserError(
            f"trainer.accelerator={accelerator}, but no CUDA device is visible: leave hardware= out, or set "
            "trainer.accelerator=auto, to run on the CPU; or check CUDA_VISIBLE_DEVICES and the driver"
        )


def log_training(
    plan: Footprint, model: ModelSpec, batch: BatchPlan, overrides: Sequence[str], config_dir: Path | None
) -> None:
    """Logs what training needs, whether the device holds it, and else the ``alternatives`` to ``overrides``."""
    config, capacity = (
        load_config(model.path, model.revision),
        device_memory(inference_device(plan.trainer.accelerator)),
    )
    with estimating(model.path):
        found = plan.estimate(config, model, batch)
        others = {}
        if capacity is not None and not found.fits(capacity):
            others = dict(alternatives(config, overrides, config_dir))
        log_once(found.lines(capacity, others))


def log_judge(judge: RunJudge, device: torch.device) -> None:
    """Logs what the judge pass needs, and whether the device holds it if there is one."""
    capacity = device_memory(device)
    budget = judge.budget(capacity)
    if judge.settings.token_budget == AUTO:
        log_once([f"judge.token_budget={AUTO}: {budget:,} tokens per forward"])
    with estimating(judge.path):
        log_once(judge.estimate(budget).lines(capacity))


@contextmanager
def estimating(path: str) -> Iterator[None]:
    """Opens a context in which an estimate that fails is a warning: configs of some kinds say less than it needs."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001  # configs of any model; the run does not need the estimate
        words = " ".join(str(error).split())[:200]
        log.warning("memory is not estimated: the config of %s cannot be read for it (%s)", path, words)


def alternatives(
    config: PretrainedConfig, overrides: Sequence[str], config_dir: Path | None
) -> Iterator[tuple[str, MemoryEstimate]]:
    """Yields the same command under every option of the group hardware that this machine has the devices for."""
    given = [word for word in overrides if not str(word).startswith("hardware=")]
    for option in list_groups(config_dir).get("hardware", []):
        try:
            plan = footprint(parse_subset(compose("fit", [*given, f"hardware={option}"], config_dir), Planned))
        except UserError:  # its keys contradict those given
            continue
        if planned_processes(plan.trainer) <= max(1, torch.cuda.device_count()):
            yield f"hardware={option}", plan.estimate(config, plan.model, plan.least)


# ------------------------------------------------------------------------------------------------ what auto becomes


def fit_memory(plan: Footprint) -> tuple[ModelSpec, BatchPlan]:
    """Decides every ``auto`` of model and batch by the memory estimate, and logs the reason once.

    Takes the first of ``ModelSpec.memory_choices`` that fits the device with the smallest budgets, then the largest
    budgets that still fit. Takes the choice of least memory if none fits or there is no estimate. The saved config
    keeps ``auto``.
    """
    asked, batch = plan.model, plan.least
    if asked.compile == AUTO:
        backend, reason = asked.backend(inference_device(plan.trainer.accelerator).type)
        asked = replace(asked, compile=backend)
        log_once([f"model.compile={AUTO}: {backend or 'blocks are not compiled'} ({reason})"])
    choices = asked.memory_choices()
    if batch == plan.batch and len(choices) == 1:
        return asked, batch
    estimates: list[MemoryEstimate] = []
    capacity = plan.capacity()
    place, why = len(choices) - 1, "of least memory: there is no estimate"
    with estimating(asked.path):
        config = load_config(asked.path, asked.revision)
        estimates = [plan.estimate(config, choice, batch) for choice in choices]
        place, why = chosen(estimates, capacity)
        if capacity is not None and estimates[place].fits(capacity):
            batch = fill_card(plan, config, choices[place], capacity)
    log_once(_lines(plan, choices, estimates, place, why, batch))
    return choices[place], batch


def fill_card(plan: Footprint, config: PretrainedConfig, model: ModelSpec, capacity: int) -> BatchPlan:
    """Makes every ``auto`` of a batch as large as a device of so many bytes holds, at most a share of a step."""
    least = plan.least
    share = min(MOST, 2 * plan.max_length * -(-least.pairs // planned_processes(plan.trainer)))

    def fits(batch: BatchPlan) -> bool:
        return plan.estimate(config, model, batch).fits(capacity)

    made, floors = least, (least.token_budget, least.eval_token_budget)
    if plan.batch.tokens == AUTO and floors[0] is not None:
        made = replace(made, tokens=max_token_budget(lambda most: fits(replace(least, tokens=most)), floors[0], share))
    if plan.batch.eval_tokens == AUTO and floors[1] is not None:
        made = replace(
            made, eval_tokens=max_token_budget(lambda most: fits(replace(least, eval_tokens=most)), floors[1])
        )
    return made


def chosen(estimates: Sequence[MemoryEstimate], capacity: int | None) -> tuple[int, str]:
    """Returns which of some estimates, the quickest choice's first, is taken on a device of so many bytes, and why."""
    if capacity is None:
        return len(estimates) - 1, "of least memory: there is no GPU whose memory could be read"
    for place, estimate in enumerate(estimates):
        if estimate.fits(capacity):
            return place, f"the quickest that fits the device's {capacity / GIB:.1f} GiB"
    return len(estimates) - 1, f"of least memory: none fits the device's {capacity / GIB:.1f} GiB"


def decision(asked: ModelSpec, made: ModelSpec) -> tuple[str, str, str]:
    """Returns what was left to the estimate, what it became, and what to set instead, in words."""
    keys = [key for key in (*KEYS, "compile") if getattr(asked, key) == AUTO]
    what = _name_parts([f"model.{key}" for key in keys])
    least = replace(asked.memory_choices()[-1], compile=None)
    instead = " ".join(f"model.{key}={str(getattr(least, key)).lower().replace('none', 'null')}" for key in keys)
    return what, _words(made), f"set {instead} for all processes"


def _name_parts(keys: Sequence[str]) -> str:
    *others, last = (f"{key}={AUTO}" for key in keys)
    return f"{', '.join(others)} and {last}" if others else last


def _words(choice: ModelSpec) -> str:
    blocks = "activations kept"
    if choice.uses_checkpointing:
        every = "" if choice.checkpoint_every == 1 else f" of one block in {choice.checkpoint_every}"
        blocks = f"activations{every} computed again"
    compiled = "" if choice.compile is None else ", blocks compiled"
    return f"{blocks}, {choice.chunk} tokens at once through the vocabulary head{compiled}"


def _lines(
    plan: Footprint,
    choices: Sequence[ModelSpec],
    estimates: Sequence[MemoryEstimate],
    place: int,
    why: str,
    batch: BatchPlan,
) -> list[str]:
    keys = [f"model.{key}" for key in KEYS if getattr(plan.model, key) == AUTO]
    keys += [f"batch.{key}" for key in BUDGETS if getattr(plan.batch, key) == AUTO]
    made = [_words(choices[place])]
    made += [f"{batch.token_budget:,} tokens per forward"] if batch.token_budget else []
    made += [f"{batch.eval_token_budget:,} in validation"] if batch.eval_token_budget else []
    lines = [f"{_name_parts(keys)}: {', '.join(made)} ({why})"]
    for choice, estimate in zip(choices, estimates, strict=False):
        unit, name = (GIB, "GiB") if estimate.total >= GIB else (MIB, "MiB")
        lines.append(f"  {estimate.total / unit:8.2f} {name} estimated: {_words(choice)}")
    return lines
