"""What a resumed run needs beside weights and optimiser: its place in the data, random states, metrics so far."""

import logging
import random
from collections.abc import Mapping
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import distributed as dist

from attnpo.data.datamodule import PreferenceDataModule

log = logging.getLogger(__name__)


KEY = "attnpo"


class Continuation(L.Callback):
    """Makes a resumed run go on exactly where it was saved, also with another number of processes or micro-batch.

    Lightning keeps counters of micro-batches, which depend on how a step was split and on the hook that saved. They
    are set anew from the sampler's place in the epoch.

    ``metrics`` are the last values of all metrics, ``first`` those from before the first step.
    """

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.first: dict[str, float] = {}
        self._random: list[dict[str, Any]] = []

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Nothing; adds random states of all ranks and the metrics (a collective)."""
        logged = trainer.callback_metrics.items()
        now = {name: float(value) for name, value in logged if name not in ("step", "epoch")}
        checkpoint[KEY] = {
            "metrics": {**self.metrics, **now},
            "first": self.first,
            "random": _everywhere(random_state(), trainer),
        }

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Nothing; takes over what was saved and sets Lightning's counters."""
        saved = checkpoint.get(KEY, {})
        self.metrics, self.first = dict(saved.get("metrics", {})), dict(saved.get("first", {}))
        self._random = list(saved.get("random", []))
        data: Any = getattr(trainer, "datamodule", None)
        state = checkpoint.get(PreferenceDataModule.__name__)
        if isinstance(data, PreferenceDataModule) and state and "loops" in checkpoint:
            epoch, batches, length = data.place(state)
            set_counters(checkpoint["loops"]["fit_loop"], checkpoint["global_step"], epoch, batches, length)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Nothing; sets the random states once nothing but the training itself draws from them."""
        if not self._random:
            return
        if len(self._random) != trainer.world_size:
            log.warning(
                "saved with %d processes, resumed with %d: random numbers (dropout) are not those of the saved run",
                len(self._random),
                trainer.world_size,
            )
        else:
            set_random_state(self._random[trainer.global_rank])
        self._random = []


def set_counters(fit_loop: dict[str, Any], steps: int, epoch: int, batches: int, length: int) -> None:
    """Nothing; writes into a saved fit loop that ``steps`` optimiser steps are behind it, and where in the data it is.

    That is behind ``batches`` of the ``length`` micro-batches of ``epoch`` (0-based), all hooks of the last one done.
    """
    over = batches >= length
    done, inside = (epoch + 1, 0) if over else (epoch, batches)
    begun = done + (not over)
    epochs = {"ready": begun, "started": begun, "processed": done, "completed": done}
    fit_loop["epoch_progress"] = {"total": dict(epochs), "current": dict(epochs)}
    fit_loop["epoch_loop.batch_progress"] = {
        "total": _all(epoch * length + batches),
        "current": _all(inside),
        "is_last_batch": False,
    }
    fit_loop["epoch_loop.state_dict"] = {"_batches_that_stepped": steps}
    fit_loop.pop("epoch_loop.val_loop.batch_progress", None)


def _all(count: int) -> dict[str, int]:
    return {"ready": count, "started": count, "processed": count, "completed": count}


def random_state() -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's generators (this process's GPU included) as plain data."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [name, [int(key) for key in keys], int(position), int(has_gauss), float(gauss)],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Nothing; sets the generators to what ``random_state`` gave."""
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    name, numbers, *rest = state["numpy"]
    np.random.set_state((name, np.array(numbers, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


def _everywhere(own: dict[str, Any], trainer: L.Trainer) -> list[dict[str, Any]]:
    if trainer.world_size == 1:
        return [own]
    found: list[Any] = [None] * trainer.world_size
    dist.all_gather_object(found, own)
    return found
