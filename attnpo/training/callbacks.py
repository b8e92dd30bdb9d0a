"""Decides when to validate and when training ends, counted in optimiser steps; shows how far it is."""

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
from attnpo.training.gather import from_all_ranks
from attnpo.training.nonfinite import check_validation, check_weights, peak
from attnpo.training.signals import step_ended

log = logging.getLogger(__name__)


class ProgressDisplay(L.Callback):
    """Shows the step, the loss and the time left: a row on a terminal, else log lines, in a study a note."""

    EVERY = 8.0  # below that of a heartbeat

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
        """Renews the row; logs the line when it is due."""
        if not step_ended(trainer, batch_idx):
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
        """Says in the row that the step it shows is over and waits."""
        self._row = replace(self._row, label=f"{self.label}, validating")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Gives the row its name back."""
        self._row = replace(self._row, label=self.label)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Takes the display away."""
        self._drawing.close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Takes the display away."""
        self._drawing.close()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Takes the display away."""
        self._drawing.close()


class Validation(L.Callback):
    """Validates after every ``every``-th optimiser step or epoch, and after the last step, where it ends training.

    Lightning's own interval counts micro-batches. Later callbacks read the decision from ``trainer.val_check_batch``.
    Weights and validation must be finite before anything of the last step is saved, and validation before the first.
    """

    def __init__(self, every: int | str) -> None:
        self.every = every
        self._interval = sys.maxsize

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Marks no validation as due, so that Lightning does not look for one when it resumes."""
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        self._interval = self.every if isinstance(self.every, int) else data.steps_per_epoch(trainer.world_size)
        trainer.val_check_batch = sys.maxsize

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Makes Lightning validate after this micro-batch or not; ``UserError`` for weights that are not finite."""
        due = step_ended(trainer, batch_idx) and trainer.global_step % self._interval == 0
        trainer.val_check_batch = 1 if due else sys.maxsize
        epochs_over = trainer.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs
        if epochs_over or 0 <= trainer.max_steps <= trainer.global_step:
            check_weights(trainer)
            trainer.should_stop = True  # Lightning validates first
            log.info("the last step is done: validating")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Raises ``UserError`` when the first or the last validation is not finite."""
        if trainer.state.fn == "validate" or trainer.should_stop:
            check_validation(trainer)


class Movement(L.Callback):
    """Measures what training did to the trained weights; a resumed run goes on from what the state noted.

    ``metrics`` after the last step: ``moved/weights`` 1 where their sum changed, else 0, ``moved/growth`` the largest
    magnitude over that before, ``moved/grad_norm`` the largest gradient norm.
    """

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self._before: tuple[float, float] | None = None
        self._pull = torch.zeros(())

    def state_dict(self) -> dict[str, float]:
        """Returns the weights' numbers before training, and the largest gradient norm so far."""
        if self._before is None:
            return {}
        return {"total": self._before[0], "peak": self._before[1], "pull": float(self._pull)}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        """Takes up what ``state_dict`` returned."""
        self._before, self._pull = (state_dict["total"], state_dict["peak"]), torch.tensor(state_dict["pull"])

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Notes the weights (a collective: every rank takes part)."""
        found = self._read(trainer, pl_module)
        self._before = self._before or found

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Notes the step's gradient norm, without waiting for the device."""
        norm = trainer.callback_metrics.get("train/grad_norm")
        if norm is not None:
            self._pull = torch.maximum(self._pull.to(norm.device), norm)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Compares the weights with those before (a collective: every rank takes part)."""
        total, largest = self._read(trainer, pl_module)
        before = self._before or (total, largest)
        self.metrics = {
            "moved/weights": float(total != before[0]),
            "moved/growth": largest / max(before[1], 1e-30),
            "moved/grad_norm": float(self._pull),
        }

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Compares them where no step was left, so that training never started."""
        if not self.metrics:
            self.on_train_end(trainer, pl_module)

    def _read(self, trainer: L.Trainer, pl_module: L.LightningModule) -> tuple[float, float]:
        """Returns the sum of the trained weights, a mean over ranks, and their largest magnitude; makes no copy."""
        trained = [value.detach() for value in pl_module.parameters() if value.requires_grad]
        shards = [value.to_local() if isinstance(value, DTensor) else value for value in trained]
        held = [value for value in shards if value.numel()]  # a process may have no part of a short one
        here = 0.0, 0.0
        if held:
            totals, peaks = (torch.stack([read(value) for value in held]) for read in (_total, peak))
            here = float(totals.sum()), float(peaks.max())
        sums, largest = zip(*from_all_ranks(here, trainer.world_size), strict=True)
        return sum(sums) / len(sums), max(largest)


LARGE = 1 << 16
"""Weights from which on a matrix is summed by rows in float32 first: float64 at once takes a CPU six times as long."""


def _total(value: Tensor) -> Tensor:
    """Returns the sum in float64."""
    if value.dim() > 1 and value.numel() > LARGE:
        value = value.sum(-1, dtype=torch.promote_types(value.dtype, torch.float32))
    return value.sum(dtype=torch.float64)
