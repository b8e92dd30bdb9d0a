"""What every ``auto`` of a run's model and batch becomes: the quickest that has room, then as large as it can be."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PretrainedConfig

from attnpo.data.rules import BatchPlan
from attnpo.models.loading import load_config
from attnpo.models.memory import GIB, MIB, MOST, MemoryEstimate, most_tokens
from attnpo.models.spec import AUTO, ModelSpec
from attnpo.run.context import RunContext
from attnpo.run.memory_check import Planned, capacity_of, estimating, training_estimate
from attnpo.run.run_config import RunConfig
from attnpo.run.startup import log_once
from attnpo.system.machine import device_of
from attnpo.training.processes import planned_processes

KEYS = ("gradient_checkpointing", "logps_chunk")
BUDGETS = ("tokens", "eval_tokens")


def fit_memory(context: RunContext) -> RunContext:
    """Decides every ``auto`` of a context's model and batch by the memory estimate, and logs the reason once.

    The first of ``ModelSpec.choices`` that the device holds with the least budgets: blocks that keep their activations
    are quicker with few tokens than others with many. Then the budgets, as large as they have room. The last choice,
    which needs least, where none fits, where the device's memory cannot be read (a CPU), and where the model's config
    allows no estimate. The saved configuration keeps ``auto``, so that a run may go on with another choice on another
    device.
    """
    asked, batch = context.model, context.batch
    if asked.compile == AUTO:
        backend, reason = asked.backend(device_of(context.cfg.trainer.accelerator).type)
        asked = replace(asked, compile=backend)
        log_once([f"model.compile={AUTO}: {backend or 'blocks are not compiled'} ({reason})"])
    choices = asked.choices()
    if batch == context.cfg.batch and len(choices) == 1:
        return replace(context, model=asked) if asked != context.model else context
    estimates: list[MemoryEstimate] = []
    capacity = least_capacity(context.cfg)
    place, why = len(choices) - 1, "of least memory: there is no estimate"
    with estimating(asked.path):
        config = load_config(asked.path, asked.revision)
        estimates = [training_estimate(context.cfg, config, choice, batch) for choice in choices]
        place, why = chosen(estimates, capacity)
        if capacity is not None and estimates[place].fits(capacity):
            batch = fill_card(context.cfg, config, choices[place], capacity)
    log_once(_lines(context.cfg, choices, estimates, place, why, batch))
    return replace(context, model=choices[place], batch=batch)


def fill_card(cfg: RunConfig | Planned, config: PretrainedConfig, model: ModelSpec, capacity: int) -> BatchPlan:
    """Makes every ``auto`` of a plan as large as a device of so many bytes holds beside ``model``.

    No larger than a process's share of a step, in training.
    """
    plan = cfg.batch.decide(cfg.lengths.max_length)
    share = min(MOST, 2 * cfg.lengths.max_length * -(-plan.pairs // planned_processes(cfg.trainer)))

    def fits(batch: BatchPlan) -> bool:
        return training_estimate(cfg, config, model, batch).fits(capacity)

    made, least = plan, (plan.budget, plan.eval_budget)
    if cfg.batch.tokens == AUTO and least[0] is not None:
        made = replace(made, tokens=most_tokens(lambda most: fits(replace(plan, tokens=most)), least[0], share))
    if cfg.batch.eval_tokens == AUTO and least[1] is not None:
        made = replace(made, eval_tokens=most_tokens(lambda most: fits(replace(plan, eval_tokens=most)), least[1]))
    return made


def chosen(estimates: Sequence[MemoryEstimate], capacity: int | None) -> tuple[int, str]:
    """Returns which of some estimates, the quickest choice's first, is taken on a device of so many bytes, and why."""
    if capacity is None:
        return len(estimates) - 1, "of least memory: there is no GPU whose memory could be read"
    for place, estimate in enumerate(estimates):
        if estimate.fits(capacity):
            return place, f"the quickest that fits the device's {capacity / GIB:.1f} GiB"
    return len(estimates) - 1, f"of least memory: none fits the device's {capacity / GIB:.1f} GiB"


def least_capacity(cfg: RunConfig) -> int | None:
    """Returns bytes of the device this process will use, in a job of several processes those of the node's smallest
    GPU.

    So all processes of a node decide alike; those of several nodes are compared when training begins.
    """
    own = capacity_of(cfg)
    if own is None or planned_processes(cfg.trainer) == 1:
        return own
    seen = (torch.cuda.get_device_properties(place).total_memory for place in range(torch.cuda.device_count()))
    return min(own, *seen)


def decision(asked: ModelSpec, made: ModelSpec) -> tuple[str, str, str]:
    """Returns what was left to the estimate, what it became, and what to set instead, in words."""
    keys = [key for key in (*KEYS, "compile") if getattr(asked, key) == AUTO]
    what = _named([f"model.{key}" for key in keys])
    least = replace(asked.choices()[-1], compile=None)
    instead = " ".join(f"model.{key}={str(getattr(least, key)).lower().replace('none', 'null')}" for key in keys)
    return what, _words(made), f"set {instead} for all processes"


def _named(keys: Sequence[str]) -> str:
    *others, last = (f"{key}={AUTO}" for key in keys)
    return f"{', '.join(others)} and {last}" if others else last


def _words(choice: ModelSpec) -> str:
    blocks = "activations kept"
    if choice.recomputes:
        every = "" if choice.checkpoint_every == 1 else f" of one block in {choice.checkpoint_every}"
        blocks = f"activations{every} computed again"
    compiled = "" if choice.compile is None else ", blocks compiled"
    return f"{blocks}, {choice.chunk} tokens at once through the vocabulary head{compiled}"


def _lines(
    cfg: RunConfig,
    choices: Sequence[ModelSpec],
    estimates: Sequence[MemoryEstimate],
    place: int,
    why: str,
    batch: BatchPlan,
) -> list[str]:
    keys = [f"model.{key}" for key in KEYS if getattr(cfg.model, key) == AUTO]
    keys += [f"batch.{key}" for key in BUDGETS if getattr(cfg.batch, key) == AUTO]
    made = [_words(choices[place])]
    made += [f"{batch.budget:,} tokens per forward"] if batch.budget else []
    made += [f"{batch.eval_budget:,} in validation"] if batch.eval_budget else []
    lines = [f"{_named(keys)}: {', '.join(made)} ({why})"]
    for choice, estimate in zip(choices, estimates, strict=False):
        unit, name = (GIB, "GiB") if estimate.total >= GIB else (MIB, "MiB")
        lines.append(f"  {estimate.total / unit:8.2f} {name} estimated: {_words(choice)}")
    return lines
