"""Signals that end a run: noted while it trains, obeyed between two optimiser steps, reported as ``Interrupted``."""

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
from attnpo.training.checkpoint_folders import whole
from attnpo.training.interrupted import Interrupted

log = logging.getLogger(__name__)


class Interruption(L.Callback):
    """Ends training after the optimiser step in which SIGINT, SIGTERM or SIGUSR1 came, on all ranks alike.

    A validation that is due or running is finished first. The same signal ``REPEAT`` seconds later does what it did
    before training. ``signum``: the signal that ended training.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._noted: int | None = None
        self._heard: dict[int, float] = {}
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    # ------------------------------------------------------------------------------------------- handlers
    def _listen(self, trainer: L.Trainer) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        # Lightning's own for SIGTERM would leave the epoch within an optimiser step, and wait for other ranks in it.
        trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
        self._before = {number: signal.getsignal(number) for number in SIGNALS}
        for number, handler in self._before.items():
            if handler is not signal.SIG_IGN:  # as the caller of this process wants it
                signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        now = time.monotonic()
        if number in self._heard and now - self._heard[number] >= REPEAT:
            signal.signal(number, self._before.get(number) or signal.SIG_DFL)
            signal.raise_signal(number)
            return
        self._heard.setdefault(number, now)
        if self._noted is None:
            self._noted = number
            log.warning("%s: ending after this step; the same again ends at once", signal.Signals(number).name)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            if handler is not None:
                signal.signal(number, handler)
        self._before = {}

    # ------------------------------------------------------------------------------------------- obeying
    def _any_signal(self, trainer: L.Trainer) -> bool:
        """Returns whether a signal came on any rank; then ``signum`` is set on every rank."""
        number = self._noted or 0
        if trainer.world_size > 1:
            mine = torch.tensor(float(number), device=trainer.strategy.root_device)
            number = int(trainer.strategy.reduce(mine, reduce_op="max"))
        self.signum = number or None
        return self.signum is not None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Leaves training before its first step if a signal came: nothing of it needs saving."""
        if self._any_signal(trainer):
            raise KeyboardInterrupt

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Ends training after an optimiser step if a signal came."""
        if not step_ended(trainer, batch_idx) or validation_follows(trainer) or not self._any_signal(trainer):
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
        """Leaves the validation before training if a signal came: there is nothing to save yet."""
        if trainer.state.fn == "validate" and self._any_signal(trainer):
            raise KeyboardInterrupt

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Ends training after this validation if a signal came."""
        if trainer.state.fn == "fit" and self._any_signal(trainer):
            trainer.should_stop = True

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Notes on every rank a signal that came too late for a step: while the last of them was saved."""
        self._any_signal(trainer)

    @contextmanager
    def handle_signals(self, trainer: L.Trainer, total: int, saved: Path | None) -> Iterator[None]:
        """Opens a context for validating and fitting, in which signals are noted from beginning to end.

        Raises ``Interrupted`` where one ended them (``saved``: the folder with the state), and KeyboardInterrupt of the
        handlers from before.
        """
        self._listen(trainer)
        try:
            yield
        except SystemExit as end:
            if not isinstance(end.__context__, KeyboardInterrupt):  # Lightning's way to take Ctrl-C
                raise
            if self.signum is None:
                raise end.__context__ from None
        finally:
            self._restore()
        number = self.signum or self._noted  # the latter came after the ranks agreed for the last time
        if number is not None:
            folder = saved if saved is not None and whole(saved).exists() else None
            raise Interrupted(number, trainer.global_step, total, folder)


def step_ended(trainer: L.Trainer, batch_idx: int) -> bool:
    """Returns whether the micro-batch ``batch_idx`` of the epoch, which has just ended, ended an optimiser step."""
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch


def validation_follows(trainer: L.Trainer) -> bool:
    """Returns whether Lightning validates after the micro-batch that just ended (``Validation`` has decided)."""
    return trainer.enable_validation and (trainer.should_stop or trainer.val_check_batch == 1)
