"""What ``model.gradient_checkpointing=auto`` and ``model.logps_chunk=auto`` become: the quickest that has room."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from attnpo.machine import planned_processes
from attnpo.models.loading import load_config
from attnpo.models.spec import AUTO, ModelSpec
from attnpo.runs.context import RunContext
from attnpo.runs.memory_check import capacity_of, estimating, training_estimate
from attnpo.runs.run_config import RunConfig
from attnpo.runs.startup import log_once
from attnpo.training.memory import GIB, MIB, MemoryEstimate

KEYS = ("gradient_checkpointing", "logps_chunk")


def fit_memory(context: RunContext) -> RunContext:
    """The context with every ``auto`` of its model decided by the memory estimate, and the reason logged once.

    The first of ``ModelSpec.choices`` that the device holds; the last, which needs least, where none fits, where the
    device's memory cannot be read (a CPU), and where the model's config allows no estimate. The saved configuration
    keeps ``auto``, so that a run may go on with another choice on another device.
    """
    choices = context.model.choices()
    if len(choices) == 1:
        return context
    estimates: list[MemoryEstimate] = []
    with estimating(context.model.path):
        config = load_config(context.model.path, context.model.revision)
        estimates = [training_estimate(context.cfg, config, choice) for choice in choices]
    capacity = least_capacity(context.cfg)
    place, why = len(choices) - 1, "of least memory: there is no estimate"
    if estimates:
        place, why = chosen(estimates, capacity)
    log_once(_lines(context.model, choices, estimates, place, why))
    return replace(context, model=choices[place])


def chosen(estimates: Sequence[MemoryEstimate], capacity: int | None) -> tuple[int, str]:
    """Which of some estimates, the quickest choice's first, is taken on a device of so many bytes, and why."""
    if capacity is None:
        return len(estimates) - 1, "of least memory: there is no GPU whose memory could be read"
    for place, estimate in enumerate(estimates):
        if estimate.fits(capacity):
            return place, f"the quickest that fits the device's {capacity / GIB:.1f} GiB"
    return len(estimates) - 1, f"of least memory: none fits the device's {capacity / GIB:.1f} GiB"


def least_capacity(cfg: RunConfig) -> int | None:
    """Bytes of the device this process will use, in a job of several processes those of the node's smallest GPU.

    So all processes of a node decide alike; those of several nodes are compared when training begins.
    """
    own = capacity_of(cfg)
    if own is None or planned_processes(cfg.trainer) == 1:
        return own
    seen = (torch.cuda.get_device_properties(place).total_memory for place in range(torch.cuda.device_count()))
    return min(own, *seen)


def decision(asked: ModelSpec, made: ModelSpec) -> tuple[str, str, str]:
    """What was left to the estimate, what it became, and what to set instead, in words."""
    keys = [key for key in KEYS if getattr(asked, key) == AUTO]
    what = " and ".join(f"model.{key}={AUTO}" for key in keys)
    instead = " ".join(f"model.{key}={str(_least(asked, key)).lower()}" for key in keys)
    return what, _words(made), f"set {instead} for all processes"


def _least(asked: ModelSpec, key: str) -> object:
    return getattr(asked.choices()[-1], key)


def _words(choice: ModelSpec) -> str:
    blocks = "activations kept"
    if choice.recomputes:
        every = "" if choice.checkpoint_every == 1 else f" of one block in {choice.checkpoint_every}"
        blocks = f"activations{every} computed again"
    return f"{blocks}, {choice.chunk} tokens at once through the vocabulary head"


def _lines(
    asked: ModelSpec, choices: Sequence[ModelSpec], estimates: Sequence[MemoryEstimate], place: int, why: str
) -> list[str]:
    lines = [f"{decision(asked, asked)[0]}: {_words(choices[place])} ({why})"]
    for choice, estimate in zip(choices, estimates, strict=False):
        unit, name = (GIB, "GiB") if estimate.total >= GIB else (MIB, "MiB")
        lines.append(f"  {estimate.total / unit:8.2f} {name} estimated: {_words(choice)}")
    return lines
