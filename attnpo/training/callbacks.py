"""Callbacks that schedule validation and early stopping in optimiser steps, and report the progress of training."""

import logging
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from attnpo.cli.progress import (
    WRITTEN_EVERY,
    ProgressRow,
    is_interactive_terminal,
    is_progress_published,
    publish_progress,
    show_progress,
)
from attnpo.training.gather import all_gather_values
from attnpo.training.nonfinite import check_validation, check_weights, max_magnitude
from attnpo.training.signals import is_step_end

log = logging.getLogger(__name__)


class ProgressDisplay(L.Callback):
    """Shows step, loss and time left: live on a terminal, as log lines elsewhere, in a progress file within a study."""

    EVERY = 8.0  # seconds, less than between two heartbeats

    def __init__(self, label: str = "training") -> None:
        self.label = label
        self._start, self._first, self._said, self._noted = 0.0, 0, 0.0, 0.0
        self._row = ProgressRow(label, 0, 0)
        self._drawing = ExitStack()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Starts the clock and the display."""
        self._start, self._first = time.perf_counter(), trainer.global_step
        self._said = self._start
        self._row = ProgressRow(self.label, trainer.global_step, int(trainer.estimated_stepping_batches))
        publish_progress(self._row)
        if not is_progress_published():
            self._drawing.enter_context(show_progress(lambda: [self._row]))

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Updates the display, and logs a line when one is due."""
        if not is_step_end(trainer, batch_idx):
            return
        step, total, now = trainer.global_step, self._row.total, time.perf_counter()
        pace = (now - self._start) / max(1, step - self._first)
        loss = float(trainer.callback_metrics.get("train/loss", float("nan")))
        self._row = ProgressRow(self.label, step, total, loss, pace * (total - step))
        if is_progress_published() and now - self._noted > WRITTEN_EVERY:
            self._noted = now
            publish_progress(self._row)
        due = step % max(1, total // 8) == 0 or step == total or now - self._said > self.EVERY
        if due and (is_progress_published() or not is_interactive_terminal()):
            self._said = now
            log.info("step %d/%d  loss %.4f  %.2f s/step  %.0f s left", step, total, loss, pace, pace * (total - step))

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Shows in the display that validation is running."""
        self._row = replace(self._row, label=f"{self.label}, validating")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Restores the display's label."""
        self._row = replace(self._row, label=self.label)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Closes the display."""
        self._drawing.close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Closes the display."""
        self._drawing.close()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Closes the display."""
        self._drawing.close()


class ValidationSchedule(L.Callback):
    """Runs validation after every ``every``-th optimiser step or every epoch, and after the last step of training.

    Lightning's own interval counts micro-batches. Later callbacks read the decision from ``trainer.val_check_batch``.
    The first validation metrics must be finite. After the last step, weights and metrics must be finite before the step
    is saved.
    """

    def __init__(self, every: int | str) -> None:
        self.every = every
        self._interval = sys.maxsize

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Marks validation as not due, so that Lightning does not validate on resume."""
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        self._interval = self.every if isinstance(self.every, int) else data.steps_per_epoch(trainer.world_size)
        trainer.val_check_batch = sys.maxsize

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Decides whether Lightning validates after this micro-batch. Raises ``UserError`` for non-finite weights."""
        due = is_step_end(trainer, batch_idx) and trainer.global_step % self._interval == 0
        trainer.val_check_batch = 1 if due else sys.maxsize
        epochs_over = trainer.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs
        if epochs_over or 0 <= trainer.max_steps <= trainer.global_step:
            check_weights(trainer)
            trainer.should_stop = True  # Lightning validates first
            log.info("last step reached; validating now")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Raises ``UserError`` if metrics of the first or the last validation are not finite."""
        if trainer.state.fn == "validate" or trainer.should_stop:
            check_validation(trainer)


class Movement(L.Callback):
    """Measures how much training changed the trained weights; a resumed run continues from its checkpoint's values.

    After the last step ``metrics`` contains ``moved/weights`` (1 if the sum of the weights changed, else 0),
    ``moved/growth`` (largest magnitude divided by that before training) and ``moved/grad_norm`` (largest gradient
    norm).
    """

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self._before: tuple[float, float] | None = None
        self._pull = torch.zeros(())

    def state_dict(self) -> dict[str, float]:
        """Returns the sum and peak magnitude of the weights before training, and the largest gradient norm so far."""
        if self._before is None:
            return {}
        return {"total": self._before[0], "peak": self._before[1], "pull": float(self._pull)}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        """Restores the values of ``state_dict``."""
        self._before, self._pull = (state_dict["total"], state_dict["peak"]), torch.tensor(state_dict["pull"])

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measures the weights before the first step (a collective: every rank takes part)."""
        found = self._measure_weights(trainer, pl_module)
        self._before = self._before or found

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Updates the largest gradient norm, without waiting for the device."""
        norm = trainer.callback_metrics.get("train/grad_norm")
        if norm is not None:
            self._pull = torch.maximum(self._pull.to(norm.device), norm)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Compares the weights with those before training (a collective: every rank takes part)."""
        total, largest = self._measure_weights(trainer, pl_module)
        before = self._before or (total, largest)
        self.metrics = {
            "moved/weights": float(total != before[0]),
            "moved/growth": largest / max(before[1], 1e-30),
            "moved/grad_norm": float(self._pull),
        }

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Compares the weights if there was no step left to train, because ``on_train_end`` is not called then."""
        if not self.metrics:
            self.on_train_end(trainer, pl_module)

    def _measure_weights(self, trainer: L.Trainer, pl_module: L.LightningModule) -> tuple[float, float]:
        """Returns the sum of the trained weights (mean over ranks) and their largest magnitude, without copies."""
        trained = [value.detach() for value in pl_module.parameters() if value.requires_grad]
        shards = [value.to_local() if isinstance(value, DTensor) else value for value in trained]
        held = [value for value in shards if value.numel()]  # a rank may hold no part of a small parameter
        here = 0.0, 0.0
        if held:
            totals, peaks = (torch.stack([read(value) for value in held]) for read in (_sum_in_float64, max_magnitude))
            here = float(totals.sum()), float(peaks.max())
        sums, largest = zip(*all_gather_values(here, trainer.world_size), strict=True)
        return sum(sums) / len(sums), max(largest)


LARGE = 1 << 16
"""Larger matrices are first summed by row in float32, because summing in float64 is six times slower on a CPU."""


def _sum_in_float64(value: Tensor) -> Tensor:
    """Sums in float64, after summing the rows of large matrices in float32."""
    if value.dim() > 1 and value.numel() > LARGE:
        value = value.sum(-1, dtype=torch.promote_types(value.dtype, torch.float32))
    return value.sum(dtype=torch.float64)
