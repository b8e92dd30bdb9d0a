"""State needed to resume, in addition to weights and optimiser: position in the data, random states and metrics."""

import logging
import random
from typing import Any, Final

import lightning as L
import numpy as np
import torch

from attnpo.data.datamodule import PreferenceDataModule
from attnpo.training.gather import all_gather_values

log = logging.getLogger(__name__)

KEY: Final = "attnpo"


RandomState = dict[str, Any]
"""States of Python's, NumPy's and torch's random generators as plain data; also ``cuda`` on a machine with a GPU."""
Checkpoint = dict[str, Any]
"""Contents of a ``state.ckpt``. In addition to Lightning's keys: ``attnpo`` (latest and first metrics, random states of
all ranks), ``trained`` (shapes of the trained weights by name), ``attnpo_validated`` (whether the step was
validated)."""


class ExactResume(L.Callback):
    """Resumes a run exactly where it was saved, even if the number of processes or micro-batches changes.

    Sets Lightning's micro-batch counters from the sampler's position. ``metrics``: the latest values; ``first``: the
    values before the first step.
    """

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.first: dict[str, float] = {}
        self._random: list[RandomState] = []

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: Checkpoint) -> None:
        """Adds the random states of all ranks and the metrics (a collective)."""
        now = {name: float(value) for name, value in trainer.callback_metrics.items() if name not in ("step", "epoch")}
        checkpoint[KEY] = {
            "metrics": {**self.metrics, **now},
            "first": self.first,
            "random": all_gather_values(get_random_state(), trainer.world_size),
        }

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: Checkpoint) -> None:
        """Restores the saved values and sets Lightning's counters."""
        saved = checkpoint.get(KEY, {})
        self.metrics, self.first = dict(saved.get("metrics", {})), dict(saved.get("first", {}))
        self._random = list(saved.get("random", []))
        data, state = getattr(trainer, "datamodule", None), checkpoint.get(PreferenceDataModule.__name__)
        if isinstance(data, PreferenceDataModule) and state and "loops" in checkpoint:
            epoch, batches, length = data.locate_saved_position(state)
            trainer.accumulate_grad_batches = data.accumulation_steps(trainer.world_size)
            set_loop_counters(checkpoint["loops"]["fit_loop"], checkpoint["global_step"], epoch, batches, length)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Restores the random states; from then on, only training draws random numbers."""
        if not self._random:
            return
        if len(self._random) != trainer.world_size:
            log.warning(
                "the run was saved with %d processes and is resumed with %d: random numbers (dropout) will differ",
                len(self._random),
                trainer.world_size,
            )
        else:
            set_random_state(self._random[trainer.global_rank])
        self._random = []


COUNTERS = ("ready", "started", "processed", "completed")


def set_loop_counters(fit_loop: dict[str, object], steps: int, epoch: int, batches: int, length: int) -> None:
    """Sets a saved fit loop to ``steps`` optimiser steps and to micro-batch ``batches`` of ``epoch`` (0-based)."""
    epoch_over = batches >= length
    done, inside = (epoch + 1, 0) if epoch_over else (epoch, batches)
    begun = done + (not epoch_over)
    epochs = dict(zip(COUNTERS, (begun, begun, done, done), strict=True))
    fit_loop["epoch_progress"] = {"total": dict(epochs), "current": dict(epochs)}
    total, current = (dict.fromkeys(COUNTERS, count) for count in (epoch * length + batches, inside))
    fit_loop["epoch_loop.batch_progress"] = {"total": total, "current": current, "is_last_batch": False}
    fit_loop["epoch_loop.state_dict"] = {"_batches_that_stepped": steps}
    fit_loop.pop("epoch_loop.val_loop.batch_progress", None)


def get_random_state() -> RandomState:
    """Returns the states of Python's, NumPy's and torch's generators (including this process's GPU) as plain data."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state: RandomState = {
        "python": random.getstate(),
        "numpy": (name, [int(key) for key in keys], int(position), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: RandomState) -> None:
    """Restores the generators from the value of ``get_random_state``."""
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    name, numbers, position, has_gauss, next_gauss = state["numpy"]
    np.random.set_state((name, np.array(numbers, dtype=np.uint32), position, has_gauss, next_gauss))
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
