"""Handles signals that stop a run: records them, acts on them between optimiser steps, and then raises an error."""

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import lightning as L
import torch

from attnpo.cli.terminal import REPEAT, SIGNALS
from attnpo.training.checkpoint_folders import complete_folder
from attnpo.training.interrupted import RunInterrupted

log = logging.getLogger(__name__)


class SignalHandler(L.Callback):
    """Stops training on all ranks after the optimiser step in which SIGINT, SIGTERM or SIGUSR1 arrived.

    A validation that is due or running finishes first. The same signal, sent again at least ``REPEAT`` seconds later,
    triggers the handler that was installed before training. ``signum``: the signal that stopped training.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._noted: int | None = None
        self._heard: dict[int, float] = {}
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    # ------------------------------------------------------------------------------------------- handlers
    def _install_handlers(self, trainer: L.Trainer) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        # Lightning's SIGTERM handler would leave the epoch within an optimiser step and wait for other ranks there.
        trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
        self._before = {number: signal.getsignal(number) for number in SIGNALS}
        for number, handler in self._before.items():
            if handler is not signal.SIG_IGN:  # the caller of this process wants the signal ignored
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        now = time.monotonic()
        if number in self._heard and now - self._heard[number] >= REPEAT:
            signal.signal(number, self._before.get(number) or signal.SIG_DFL)
            signal.raise_signal(number)
            return
        self._heard.setdefault(number, now)
        if self._noted is None:
            self._noted = number
            log.warning("%s: stopping after this step; send it again to stop at once", signal.Signals(number).name)

    def _restore_handlers(self) -> None:
        for number, handler in self._before.items():
            if handler is not None:
                signal.signal(number, handler)
        self._before = {}

    # ------------------------------------------------------------------------------------------- hooks
    def _has_signal(self, trainer: L.Trainer) -> bool:
        """Returns whether a signal arrived on any rank, and sets ``signum`` on every rank if so."""
        number = self._noted or 0
        if trainer.world_size > 1:
            mine = torch.tensor(float(number), device=trainer.strategy.root_device)
            number = int(trainer.strategy.reduce(mine, reduce_op="max"))
        self.signum = number or None
        return self.signum is not None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Aborts training before its first step if a signal arrived; there is nothing to save yet."""
        if self._has_signal(trainer):
            raise KeyboardInterrupt

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Stops training after an optimiser step if a signal arrived."""
        if not is_step_end(trainer, batch_idx) or is_validation_next(trainer) or not self._has_signal(trainer):
            return
        trainer.limit_val_batches = 0  # else Lightning would validate before it stops
        trainer.should_stop = True

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Aborts the validation before the first step if a signal arrived; there is nothing to save yet."""
        if trainer.state.fn == "validate" and self._has_signal(trainer):
            raise KeyboardInterrupt

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stops training after this validation if a signal arrived."""
        if trainer.state.fn == "fit" and self._has_signal(trainer):
            trainer.should_stop = True

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Sets ``signum`` on every rank for a signal that arrived while the last step was saved."""
        self._has_signal(trainer)

    @contextmanager
    def handle_signals(self, trainer: L.Trainer, total: int, saved: Path | None) -> Iterator[None]:
        """Handles signals during validation and fitting inside the context.

        ``saved``: folder of the checkpoint. Raises ``RunInterrupted`` if a signal stopped the run, and
        KeyboardInterrupt for a Ctrl-C that went to the handler installed before training.
        """
        self._install_handlers(trainer)
        try:
            yield
        except SystemExit as end:
            if not isinstance(end.__context__, KeyboardInterrupt):  # how Lightning handles Ctrl-C
                raise
            if self.signum is None:
                raise end.__context__ from None
        finally:
            self._restore_handlers()
        number = self.signum or self._noted  # the latter arrived after the ranks' last exchange
        if number is not None:
            folder = saved if saved is not None and complete_folder(saved).exists() else None
            raise RunInterrupted(number, trainer.global_step, total, folder)


def is_step_end(trainer: L.Trainer, batch_idx: int) -> bool:
    """Returns whether the micro-batch that just ended (``batch_idx`` in the epoch) completed an optimiser step."""
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch


def is_validation_next(trainer: L.Trainer) -> bool:
    """Returns whether ``ValidationSchedule`` scheduled a validation after the micro-batch that just ended."""
    return trainer.enable_validation and (trainer.should_stop or trainer.val_check_batch == 1)
