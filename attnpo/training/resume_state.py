"""What a resumed run needs beside weights and optimiser: its place in the data, random states, metrics so far."""

import logging
import random
from typing import Any, Final, NotRequired, TypedDict, cast

import lightning as L
import numpy as np
import torch
from torch import Tensor

from attnpo.data.datamodule import PreferenceDataModule
from attnpo.data.sampler import SamplerState
from attnpo.training.gather import from_all_ranks

log = logging.getLogger(__name__)

KEY: Final = "attnpo"


class RandomState(TypedDict):
    """The states of Python's, NumPy's and torch's generators as plain data; ``cuda`` where there is a GPU."""

    python: tuple[int, tuple[int, ...], float | None]
    numpy: tuple[str, list[int], int, int, float]
    torch: Tensor
    cuda: NotRequired[Tensor]


class RunSoFar(TypedDict, total=False):
    """The last values of all metrics, those from before the first step, and the random states of all ranks."""

    metrics: dict[str, float]
    first: dict[str, float]
    random: list[RandomState]


class Checkpoint(TypedDict, total=False):
    """What is read of a ``state.ckpt``, or put into it; Lightning keeps more there.

    ``trained``: shapes of the weights by their names; ``attnpo_validated``: whether it was saved after the validation
    of its step.
    """

    state_dict: dict[str, Tensor]
    global_step: int
    loops: dict[str, dict[str, object]]
    trained: dict[str, list[int]]
    attnpo: RunSoFar
    attnpo_validated: bool


def typed(checkpoint: dict[str, object]) -> Checkpoint:
    """Returns the same dictionary, as Lightning gives it to its hooks, with the types of what it holds."""
    return cast(Checkpoint, checkpoint)


class Continuation(L.Callback):
    """Makes a resumed run go on exactly where it was saved, also with another number of processes or micro-batch.

    Lightning keeps counters of micro-batches, which depend on how a step was split and on the hook that saved. They
    are set anew from the sampler's place in the epoch.

    ``metrics`` are the last values of all metrics, ``first`` those from before the first step.
    """

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.first: dict[str, float] = {}
        self._random: list[RandomState] = []

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, object]
    ) -> None:
        """Adds random states of all ranks and the metrics (a collective)."""
        now = {name: float(value) for name, value in trainer.callback_metrics.items() if name not in ("step", "epoch")}
        typed(checkpoint)[KEY] = {
            "metrics": {**self.metrics, **now},
            "first": self.first,
            "random": from_all_ranks(random_state(), trainer.world_size),
        }

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, object]
    ) -> None:
        """Takes over what was saved and sets Lightning's counters."""
        contents = typed(checkpoint)
        saved = contents.get(KEY, {})
        self.metrics, self.first = dict(saved.get("metrics", {})), dict(saved.get("first", {}))
        self._random = list(saved.get("random", []))
        data: Any = getattr(trainer, "datamodule", None)
        state = cast(SamplerState | None, checkpoint.get(PreferenceDataModule.__name__))
        if isinstance(data, PreferenceDataModule) and state and "loops" in contents:
            epoch, batches, length = data.place(state)
            trainer.accumulate_grad_batches = data.accumulation(trainer.world_size)
            set_counters(contents["loops"]["fit_loop"], contents["global_step"], epoch, batches, length)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Sets the random states; from here on only the training itself draws from them."""
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


def set_counters(fit_loop: dict[str, object], steps: int, epoch: int, batches: int, length: int) -> None:
    """Writes into a saved fit loop that it has taken ``steps`` optimiser steps, and where in the data it is.

    That is after ``batches`` of the ``length`` micro-batches of ``epoch`` (0-based), all hooks of the last one done.
    """
    epoch_over = batches >= length
    done, inside = (epoch + 1, 0) if epoch_over else (epoch, batches)
    begun = done + (not epoch_over)
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


def random_state() -> RandomState:
    """Returns the states of Python's, NumPy's and torch's generators (this process's GPU included) as plain data."""
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
    """Sets the generators to what ``random_state`` gave."""
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    name, numbers, position, has_gauss, next_gauss = state["numpy"]
    np.random.set_state((name, np.array(numbers, dtype=np.uint32), position, has_gauss, next_gauss))
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
