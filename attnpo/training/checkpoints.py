"""``best/`` and ``last/``: what is saved when, each replaced as a whole, always between two optimiser steps."""

import logging
import math
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.loggers import CSVLogger

from attnpo.schema import UserError
from attnpo.training.export import Exporter
from attnpo.training.folders import STATE, read_account, replaced, write_account
from attnpo.training.interruption import validation_follows
from attnpo.training.metrics_file import merge_metrics

log = logging.getLogger(__name__)


class StraightIO(TorchCheckpointIO):
    """Writes a state straight into its file.

    Lightning would hold two more copies of it in memory and write it atomically, which the folders do here.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Nothing; writes the file."""
        torch.save(checkpoint, path)


class CheckpointFolder(L.Callback):
    """A folder with ``state.ckpt`` to resume from, ``checkpoint.json`` and, on request, the policy for Hugging Face.

    All files of a folder are of the same optimiser step. ``account`` (plain data) is kept in ``checkpoint.json`` beside
    the step.
    """

    def __init__(self, folder: Path, exporter: Exporter, account: Mapping[str, Any] | None = None) -> None:
        self.folder, self.exporter, self.account = folder, exporter, dict(account or {})

    @property
    def state_key(self) -> str:
        """One key per folder."""
        return f"{type(self).__name__}[{self.folder.name}]"

    def save(self, trainer: L.Trainer, *, export: bool, **facts: Any) -> None:
        """Nothing; replaces the folder (a collective: every rank must call it)."""
        module: Any = trainer.lightning_module
        with ExitStack() as stack:
            new = self.folder
            if trainer.is_global_zero:
                flush_metrics(trainer, self.folder.parent)
                new = stack.enter_context(replaced(self.folder))
            new = trainer.strategy.broadcast(new)
            trainer.save_checkpoint(new / STATE, weights_only=False)
            if export:
                metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
                step = trainer.global_step
                self.exporter.export(module.policy.model, new, write=trainer.is_global_zero, metrics=metrics, step=step)
            if trainer.is_global_zero:
                write_account(new, {"step": trainer.global_step, **facts, **self.account})
        trainer.strategy.barrier(f"save {self.folder.name}")
        if export and trainer.is_global_zero:
            log.info("%s holds the policy of optimiser step %d", self.folder, trainer.global_step)


class BestCheckpoint(CheckpointFolder):
    """Keeps the policy with the lowest (or highest) value of ``monitor``, exported with each improvement.

    A resumed run goes on from the value that lies in the folder, so a worse policy never takes its place.
    """

    def __init__(
        self,
        folder: Path,
        exporter: Exporter,
        monitor: str = "val/loss",
        mode: str = "min",
        account: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(folder, exporter, account)
        self.monitor, self.mode = monitor, mode
        self.best: float | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Nothing; a resumed run takes up the folder's value."""
        if trainer.ckpt_path is not None:
            self.best = read_account(self.folder).get(self.monitor)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Nothing; saves where the monitored value is the best so far.

        Raises:
            UserError: the monitor was never logged.
        """
        if trainer.state.fn != "fit":
            return
        if self.monitor not in trainer.callback_metrics:
            names = ", ".join(sorted(name for name in trainer.callback_metrics if name.startswith("val/")))
            raise UserError(f"callbacks.monitor={self.monitor} is not a logged metric; there are: {names}")
        value = float(trainer.callback_metrics[self.monitor])
        if trainer.strategy.reduce_boolean_decision(self._better(value)):
            self.save(trainer, export=True, **{self.monitor: value})
            self.best = value

    def _better(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        if self.best is None:
            return True
        return value < self.best if self.mode == "min" else value > self.best


class LastCheckpoint(CheckpointFolder):
    """The state a run is resumed from: saved with every validation, every ``every`` optimiser steps, and at the end.

    The Hugging Face export is written only at the end of training, or when it is interrupted: for a large model it
    takes as long as the state, and a checkpoint to go on from does not need it.
    """

    def __init__(
        self,
        folder: Path,
        exporter: Exporter,
        every: int | None = None,
        account: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(folder, exporter, account)
        self.every = every
        self._step = 0
        self._whole = -1  # the step that was saved with its export

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Nothing; UserError when the disk cannot hold the checkpoints."""
        check_space(self.folder, pl_module)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Nothing; notes the step."""
        self._step = trainer.global_step

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Nothing; saves behind every ``every``-th optimiser step, unless a later hook of this step saves anyway."""
        step = trainer.global_step
        if self.every is None or step == self._step or step % self.every:
            return
        if not trainer.should_stop and not validation_follows(trainer):
            log_row(trainer)
            self.save(trainer, export=False)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Nothing; saves, with the export when training ends here."""
        if trainer.state.fn == "fit":
            self.save(trainer, export=trainer.should_stop)
            self._whole = trainer.global_step if trainer.should_stop else -1

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Nothing; saves with the export, unless the last validation did."""
        if self._whole != trainer.global_step:
            self.save(trainer, export=True)
            self._whole = trainer.global_step


def log_row(trainer: L.Trainer) -> None:
    """Nothing; puts the row of the step that just ended into the CSV file.

    Lightning does so only behind the hook that saves, so a run killed in between would lack the row. What the module
    measures at a step's very end (its speed) is that of the step before until Lightning's own row replaces it.
    """
    step = trainer.global_step
    if step % trainer.log_every_n_steps:  # type: ignore[attr-defined]
        return
    row = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("train/")}
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger):
            logger.log_metrics({**row, "epoch": float(trainer.current_epoch)}, step - 1)


def flush_metrics(trainer: L.Trainer, folder: Path) -> None:
    """Nothing; brings the run's ``metrics.csv`` up to the step that is about to be saved."""
    if folder.is_dir():
        for logger in trainer.loggers:
            logger.save()
        merge_metrics(folder)


def check_space(folder: Path, module: L.LightningModule) -> None:
    """Nothing; raises UserError when the disk has no room for ``best/`` and ``last/``, one of them twice.

    Both hold the trained weights, two moments for each, and an export; a folder is complete before its predecessor
    goes.
    """
    sizes = [(value.numel() * value.element_size(), value.requires_grad) for value in module.parameters()]
    one = 3 * sum(size for size, trained in sizes if trained) + sum(size for size, _ in sizes)
    place = next(path for path in (folder, *folder.parents) if path.is_dir())
    present = sum(file.stat().st_size for file in folder.parent.glob("*/*") if file.is_file())
    free = shutil.disk_usage(place).free
    if 3 * one > free + present:
        raise UserError(
            f"checkpoints of {one / 2**30:.1f} GiB each (state and export, best/ and last/, and a third while one is "
            f"replaced) need {3 * one / 2**30:.1f} GiB under {folder.parent}, where {free / 2**30:.1f} GiB are free: "
            "give output= a folder on another disk, or set callbacks.checkpoints=false"
        )
