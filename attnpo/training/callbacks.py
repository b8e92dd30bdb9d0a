"""When to validate and when to end, counted in optimiser steps; plain progress lines."""

import logging
import sys
import time
from typing import Any

import lightning as L

from attnpo.training.nonfinite import check_validation, check_weights

log = logging.getLogger(__name__)


class PlainProgress(L.Callback):
    """One log line every ``every`` optimiser steps: for output that is a file, where a progress bar is noise.

    Without ``every`` there are eight lines.
    """

    def __init__(self, every: int | None = None) -> None:
        self.every = every
        self._start, self._first = 0.0, 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Nothing; starts the clock."""
        self._start, self._first = time.perf_counter(), trainer.global_step

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Nothing; prints the line."""
        step, total = trainer.global_step, int(trainer.estimated_stepping_batches)
        every = max(1, total // 8 if self.every is None else self.every)
        at_step = (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch
        if not at_step or (step % every and step != total):
            return
        pace = (time.perf_counter() - self._start) / max(1, step - self._first)
        loss = float(trainer.callback_metrics.get("train/loss", float("nan")))
        log.info("step %d/%d  loss %.4f  %.2f s/step  %.0f s left", step, total, loss, pace, pace * (total - step))


class StepValidation(L.Callback):
    """Validates behind every ``every``-th optimiser step, or behind the last one of every epoch.

    Lightning's own interval counts micro-batches, of which the short last step of an epoch has fewer: it would drift
    and validate (and save) within a step. Callbacks that come later find the decision in ``trainer.val_check_batch``.
    """

    def __init__(self, every: int | str) -> None:
        self.every = every
        self._interval, self._before = sys.maxsize, 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Nothing; no validation is due, so that Lightning does not look for one when it resumes."""
        self._interval = self.every if isinstance(self.every, int) else _steps_per_epoch(trainer)
        trainer.val_check_batch = sys.maxsize

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Nothing; notes the step."""
        self._before = trainer.global_step

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Nothing; makes this micro-batch one that Lightning validates behind, or not."""
        due = trainer.global_step > self._before and trainer.global_step % self._interval == 0
        trainer.val_check_batch = 1 if due else sys.maxsize


def _steps_per_epoch(trainer: L.Trainer) -> int:
    """The optimiser steps of an epoch on as many processes as there are, as the data module counts them."""
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    return int(data.steps_per_epoch(trainer.world_size))


class FinalValidation(L.Callback):
    """Validates behind the last optimiser step, wherever the validation interval falls, and ends training there.

    A run that ends there ends well only with finite weights and a finite validation, which are asked for before
    anything of the last step is saved. A validation before training that is not finite ends the run at once.

    ``total_steps`` ends it earlier than the trainer's own ``max_epochs`` or ``max_steps``.
    """

    def __init__(self, total_steps: int | None = None) -> None:
        self.total_steps = total_steps

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Asks Lightning to stop, which makes it validate first; ``UserError`` for weights that are not finite."""
        limits = [limit for limit in (self.total_steps, trainer.max_steps) if limit is not None and limit >= 0]
        over = trainer.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs
        if over or any(trainer.global_step >= limit for limit in limits):
            check_weights(trainer)
            trainer.should_stop = True

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Raises ``UserError`` when the first or the last validation is not finite."""
        if trainer.state.fn == "validate" or trainer.should_stop:
            check_validation(trainer)
