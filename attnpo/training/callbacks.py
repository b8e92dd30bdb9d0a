"""Checkpoint folders, validation before the first step, plain progress lines."""

import logging
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

from attnpo.schema import UserError
from attnpo.training.export import Exporter

log = logging.getLogger(__name__)

STATE = "state"


class FolderCheckpoint(ModelCheckpoint):
    """A checkpoint that is a folder: ``state.ckpt`` to resume from, and the policy as a Hugging Face folder.

    ``best`` keeps the lowest (or highest) value of ``monitor``; without a monitor it keeps the last one.
    """

    def __init__(self, folder: Path, exporter: Exporter, monitor: str | None = None, mode: str = "min") -> None:
        super().__init__(
            dirpath=folder,
            filename=STATE,
            monitor=monitor,
            mode=mode,
            save_top_k=1,
            enable_version_counter=False,
            auto_insert_metric_name=False,
            save_on_train_epoch_end=False,
        )
        self.folder, self.exporter = folder, exporter

    @property
    def state_key(self) -> str:
        """One state per folder, so that best and last do not overwrite each other's."""
        return f"FolderCheckpoint[{self.folder.name}]"

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Nothing; refuses a monitor that was never logged and names those that were."""
        if trainer.state.fn == "fit" and self.monitor and self.monitor not in trainer.callback_metrics:
            names = ", ".join(sorted(name for name in trainer.callback_metrics if name.startswith("val/")))
            raise UserError(f"callbacks.monitor={self.monitor} is not a logged metric; there are: {names}")
        super().on_validation_end(trainer, pl_module)

    def _save_checkpoint(self, trainer: L.Trainer, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        module: Any = trainer.lightning_module
        self.exporter.export(module.policy.model, self.folder, write=trainer.is_global_zero)


class PlainProgress(L.Callback):
    """One log line every ``every`` optimiser steps: for output that is a file, where a progress bar is noise."""

    def __init__(self, every: int) -> None:
        self.every = max(1, every)
        self._start, self._first = 0.0, 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Nothing; starts the clock."""
        self._start, self._first = time.perf_counter(), trainer.global_step

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Nothing; prints the line."""
        step, total = trainer.global_step, int(trainer.estimated_stepping_batches)
        at_step = (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch
        if not at_step or (step % self.every and step != total):
            return
        pace = (time.perf_counter() - self._start) / max(1, step - self._first)
        loss = float(trainer.callback_metrics.get("train/loss", float("nan")))
        log.info("step %d/%d  loss %.4f  %.2f s/step  %.0f s left", step, total, loss, pace, pace * (total - step))


class StepValidation(L.Callback):
    """Validates behind every ``every``-th optimiser step.

    Lightning's own interval counts micro-batches, of which the short last step of an epoch has fewer: it would drift
    and validate (and save) within a step.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._before = 0

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Nothing; notes the step."""
        self._before = trainer.global_step

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Nothing; makes this micro-batch one that Lightning validates behind, or not."""
        due = trainer.global_step > self._before and trainer.global_step % self.every == 0
        trainer.val_check_batch = 1 if due else sys.maxsize


class FinalValidation(L.Callback):
    """Validates behind the last optimiser step, wherever the validation interval falls, and ends training there."""

    def __init__(self, total_steps: int) -> None:
        self.total_steps = total_steps

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Nothing; asks Lightning to stop, which makes it validate first."""
        # Epochs are a step shorter than planned where fewer pairs are left over than there are processes.
        over = trainer.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs
        if over or trainer.global_step >= self.total_steps:
            trainer.should_stop = True
