"""Callbacks that save ``best/`` and ``last/``, each replaced atomically and only between two optimiser steps."""

import hashlib
import logging
import math
import operator
import shutil
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import lightning as L
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.loggers import CSVLogger
from safetensors import SafetensorError
from torch import Tensor

from attnpo.models.lora import MergeRounding
from attnpo.schema import UserError
from attnpo.system.files import write_checksums
from attnpo.training.checkpoint_folders import (
    STATE,
    complete_folder,
    latest_checkpoint,
    read_checkpoint_info,
    replace_folder,
    write_checkpoint_info,
)
from attnpo.training.export import ADAPTER, Exporter
from attnpo.training.metrics_file import METRICS, merge_metrics
from attnpo.training.nonfinite import check_weights
from attnpo.training.resume_state import KEY, Checkpoint
from attnpo.training.signals import is_step_end, is_validation_next

log = logging.getLogger(__name__)

LOST = 0.01  # warn if rounding loses at least this share of the adapters' update
# Raised when a file cannot be written: RuntimeError by torch, SafetensorError by the export.
DISK_ERRORS = (OSError, RuntimeError, SafetensorError)


class HashingCheckpointIO(TorchCheckpointIO):
    """Checkpoint IO that streams to the file and keeps its sha256 in ``digest``.

    Lightning's own checkpoint IO would keep two more copies in memory.
    """

    digest: str | None = None

    def save_checkpoint(self, checkpoint: dict[str, object], path: str | Path, storage_options: object = None) -> None:
        """Writes the checkpoint and computes its digest."""
        with Path(path).open("wb") as file:
            stream: Any = HashingWriter(file)
            torch.save(checkpoint, stream)
        self.digest = stream.digest.hexdigest()


class HashingWriter:
    """Write-only file that computes the sha256 of its content; it cannot seek."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.digest = file, hashlib.sha256()

    def write(self, content: bytes | memoryview) -> int:
        """Writes and hashes ``content``; returns its length in bytes."""
        self.digest.update(content)
        return self.file.write(content)

    def flush(self) -> None:
        """Flushes the file."""
        self.file.flush()


class CheckpointFolder(L.Callback):
    """Folder with ``state.ckpt`` for resuming, ``checkpoint.json`` and optionally the exported Hugging Face model.

    All files belong to one optimiser step and are sealed with digests. ``account``: plain data to add to
    ``checkpoint.json``.
    """

    def __init__(self, folder: Path, exporter: Exporter, account: Mapping[str, object] | None = None) -> None:
        self.folder, self.exporter, self.account = folder, exporter, dict(account or {})
        self._warned = False  # about the rounding of merged adapters

    @property
    def state_key(self) -> str:
        """Returns a state key that is unique per folder."""
        return f"{type(self).__name__}[{self.folder.name}]"

    def save(
        self,
        trainer: L.Trainer,
        *,
        export: bool,
        metrics: Mapping[str, Tensor | float] | None = None,
        state: Path | None = None,
        **facts: float,
    ) -> None:
        """Replaces the folder (a collective: every rank must call it; the first one writes).

        ``metrics`` (default: the logged ones) go into the model card. ``state``: a file to copy instead of saving the
        state. ``facts`` go into ``checkpoint.json``. Raises UserError for weights that are not finite and, on the first
        rank, if the folder cannot be written; the folder then keeps its previous contents.
        """
        check_weights(trainer)
        try:
            logged = trainer.callback_metrics if metrics is None else metrics
            export, merge = self._write_folder(trainer, export, logged, state, facts)
        except DISK_ERRORS as problem:
            if not trainer.is_global_zero:
                raise
            log.debug("saving %s failed", self.folder, exc_info=True)
            raise UserError(describe_save_error(self.folder, trainer.global_step, problem)) from problem
        trainer.strategy.barrier(f"save {self.folder.name}")
        if export and trainer.is_global_zero:
            log.info("saved the policy after optimiser step %d to %s", trainer.global_step, self.folder)
        if merge is not None:
            lossy = merge.lost_share >= LOST
            log.log(
                logging.WARNING if lossy and not self._warned else logging.INFO,
                "%s: %s; the adapters themselves are in %s/%s",
                *(self.folder, merge.describe(), self.folder / ADAPTER),
                "; set callbacks.export_dtype=float32 to merge them without loss" if lossy else "",
            )
            self._warned = self._warned or lossy

    def _write_folder(
        self,
        trainer: L.Trainer,
        export: bool,
        metrics: Mapping[str, Tensor | float],
        state: Path | None,
        facts: Mapping[str, float],
    ) -> tuple[bool, MergeRounding | None]:
        """Returns whether the model was exported, and the rounding error of merged adapters.

        If the export fails after the last step, the state is saved without it.
        """
        module: Any = trainer.lightning_module
        merge = None
        with ExitStack() as stack:
            new = self.folder
            if trainer.is_global_zero:
                flush_metrics(trainer, self.folder.parent)
                new = stack.enter_context(replace_folder(self.folder))
            new = trainer.strategy.broadcast(new)
            if state is None:
                trainer.save_checkpoint(new / STATE, weights_only=False)
            elif trainer.is_global_zero:
                shutil.copyfile(state, new / STATE)
            if export:
                values = {name: float(value) for name, value in metrics.items()}
                writes, step = trainer.is_global_zero, trainer.global_step
                try:
                    merge = self.exporter.export(module.policy.model, new, write=writes, metrics=values, step=step)
                except (OSError, SafetensorError):  # the disk
                    raise
                except Exception as problem:
                    if step < module.total_steps:
                        raise
                    export = False
                    self._drop_export(new, writes, problem)
            if trainer.is_global_zero:
                merged = {} if merge is None else {"merge": merge.to_json()}
                write_checkpoint_info(new, {"step": trainer.global_step, **facts, **merged, **self.account})
                rows, writer = self.folder.parent / METRICS, trainer.strategy.checkpoint_io
                if rows.is_file():
                    shutil.copyfile(rows, new / METRICS)
                digest = writer.digest if state is None and isinstance(writer, HashingCheckpointIO) else None
                write_checksums(new, None if digest is None else {STATE: digest})
        return export, merge

    def _drop_export(self, new: Path, writes: bool, problem: Exception) -> None:
        words = " ".join(str(problem).split())
        log.warning(
            "warning: %s contains no model, because its export failed after the last step (%s: %s); the trained "
            "weights are in its %s. Fix the cause, delete result.json and run the command again with resume=auto, "
            "which exports last/ unless the weights are sharded",
            *(self.folder, type(problem).__name__, words, STATE),
        )
        log.debug("exporting to %s failed", self.folder, exc_info=problem)
        for file in new.iterdir() if writes else ():
            if file.name != STATE:
                shutil.rmtree(file) if file.is_dir() else file.unlink()


class BestCheckpoint(CheckpointFolder):
    """Keeps the policy with the lowest (or highest) value of ``monitor``, exported at each improvement.

    A resumed run continues from the best value in the folder. If the resumed checkpoint was validated but not yet
    compared with the best one, it is compared first.
    """

    def __init__(
        self,
        folder: Path,
        exporter: Exporter,
        monitor: str = "val/loss",
        mode: str = "min",
        account: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(folder, exporter, account)
        self.monitor, self.mode = monitor, mode
        self.best: float | None = None
        self._validated = -1  # last validated step
        self._resumed: dict[str, float] = {}  # validation metrics of the resumed state, until they are compared

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: Checkpoint) -> None:
        """Records in the saved state whether this step has been validated."""
        checkpoint["attnpo_validated"] = self._validated == trainer.global_step

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: Checkpoint) -> None:
        """Restores the best value and the state's metrics. Raises UserError if the monitor was never logged."""
        saved = checkpoint.get(KEY, {})
        metrics = saved.get("metrics", {})
        self._check_monitor({*metrics, *saved.get("first", {})})
        best = read_checkpoint_info(self.folder).get(self.monitor)
        self.best = best if isinstance(best, int | float) else None
        if checkpoint.get("attnpo_validated", False):
            self._validated, self._resumed = checkpoint["global_step"], dict(metrics)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Saves the resumed state if it is the best so far and is not yet saved as the best."""
        metrics, self._resumed = self._resumed, {}
        if self.monitor in metrics and trainer.ckpt_path is not None:
            # Copied, because counters and random states are not restored before the first step.
            self._save_if_better(trainer, metrics, Path(trainer.ckpt_path))

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Saves the resumed state if no step was left to train; skips sharded weights, which cannot be gathered now."""
        if self._resumed and getattr(pl_module, "sharded", False):
            log.warning(
                "no steps are left to train and the weights are sharded, so the last step's policy was not compared "
                "with %s",
                self.folder,
            )
            self._resumed = {}
        self.on_train_start(trainer, pl_module)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Records the step that is being validated."""
        if trainer.state.fn == "fit":
            self._validated = trainer.global_step

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Saves the policy if the monitored value is the best so far. Raises UserError if the monitor is not logged."""
        self._check_monitor(trainer.callback_metrics)
        if trainer.state.fn == "fit":
            self._save_if_better(trainer, trainer.callback_metrics)

    def _save_if_better(
        self, trainer: L.Trainer, metrics: Mapping[str, Tensor | float], state: Path | None = None
    ) -> None:
        value = float(metrics[self.monitor])
        if float(metrics.get("val/weights/void", 0.0)) == 1:  # a mean over pairs of weight 0 measures nothing
            log.warning("warning: all validation pairs have weight 0 after this step, so %s is not saved", self.folder)
            return
        if trainer.strategy.reduce_boolean_decision(self._is_better(value)):
            self.save(trainer, export=True, metrics=metrics, state=state, **{self.monitor: value})
            self.best = value

    def _check_monitor(self, names: Iterable[str]) -> None:
        """Raises UserError if a validation logged ``names`` but not the monitor."""
        logged = sorted(name for name in names if name.startswith("val/"))
        if logged and self.monitor not in logged:
            raise UserError(
                f"callbacks.monitor={self.monitor} is not a logged metric; choose one of: {', '.join(logged)}"
            )

    def _is_better(self, value: float) -> bool:
        better = operator.lt if self.mode == "min" else operator.gt
        return math.isfinite(value) and (self.best is None or better(value, self.best))


class LastCheckpoint(CheckpointFolder):
    """Checkpoint to resume from, saved at every validation, every ``every`` optimiser steps and at the end of training.

    The model is exported only at the end of training or on interruption, because exporting a large model takes long.
    """

    def __init__(
        self, folder: Path, exporter: Exporter, every: int | None = None, account: Mapping[str, object] | None = None
    ) -> None:
        super().__init__(folder, exporter, account)
        self.every = every
        self._exported = -1  # last step saved with an export

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Raises UserError if the disk has no room for the checkpoints."""
        check_disk_space(self.folder, pl_module)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Saves after every ``every``-th optimiser step, unless a later hook in the same step will save."""
        step = trainer.global_step
        if self.every is None or not is_step_end(trainer, batch_idx) or step % self.every:
            return
        if not trainer.should_stop and not is_validation_next(trainer):
            log_step_metrics(trainer)
            self.save(trainer, export=False)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Saves, with an export if training ends here."""
        if trainer.state.fn == "fit":
            self.save(trainer, export=trainer.should_stop)
            self._exported = trainer.global_step if trainer.should_stop else -1

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Saves with an export, unless the last validation did."""
        if self._exported != trainer.global_step:
            self.save(trainer, export=True)
            self._exported = trainer.global_step

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Exports the policy if no step was left to train and the state has no export yet; skips sharded policies."""
        state = Path(trainer.ckpt_path or "")
        lacking = self._exported < 0 and not (state.parent / "config.json").is_file()
        if lacking and state == complete_folder(self.folder) / STATE:
            if getattr(pl_module, "sharded", False):
                log.warning(
                    "no steps are left to train and the weights are sharded, so no model was exported to %s",
                    self.folder,
                )
            else:
                self.save(trainer, export=True, state=state)


def describe_save_error(folder: Path, step: int, problem: Exception) -> str:
    """Returns a one-line error message for a ``folder`` that could not be saved after ``step``."""
    lines = str(problem).strip().splitlines() or [type(problem).__name__]
    place = next(path for path in folder.parents if path.is_dir())
    free = shutil.disk_usage(place).free
    saved = latest_checkpoint(folder.parent)
    stands = "nothing was saved before" if saved is None else f"the last saved step is {saved[0]}, in {saved[1]}"
    advice = "start again" if saved is None else "continue with resume=auto"
    return (
        f"cannot save optimiser step {step} to {folder} ({lines[0].strip()}); {free} bytes ({free / 2**30:.1f} GiB) "
        f"are free there after removing the unfinished copy; {stands}: free some disk space, then {advice}"
    )


def log_step_metrics(trainer: L.Trainer) -> None:
    """Writes the last step's metrics to the CSV file; Lightning would do so only after the checkpoint is saved."""
    step = trainer.global_step
    if step % trainer.log_every_n_steps:  # type: ignore[attr-defined]
        return
    row = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("train/")}
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger):
            logger.log_metrics({**row, "epoch": float(trainer.current_epoch)}, step - 1)


def flush_metrics(trainer: L.Trainer, folder: Path) -> None:
    """Updates the run's ``metrics.csv`` up to the step about to be saved."""
    if folder.is_dir():
        for logger in trainer.loggers:
            logger.save()
        merge_metrics(folder)


def check_disk_space(folder: Path, module: L.LightningModule) -> None:
    """Raises UserError if the disk has no room for three checkpoints with weights, moments and an export.

    These are ``best/``, ``last/``, and the copy written while one of them is replaced.
    """
    sizes = [(value.numel() * value.element_size(), value.requires_grad) for value in module.parameters()]
    one = 3 * sum(size for size, trained in sizes if trained) + sum(size for size, _ in sizes)
    place = next(path for path in (folder, *folder.parents) if path.is_dir())
    present = sum(file.stat().st_size for file in folder.parent.glob("*/*") if file.is_file())
    free = shutil.disk_usage(place).free
    if 3 * one > free + present:
        raise UserError(
            f"three checkpoints of {one / 2**30:.1f} GiB each (best/, last/, and a third while one is being replaced) "
            f"need {3 * one / 2**30:.1f} GiB under {folder.parent}, but only {free / 2**30:.1f} GiB are free: set "
            "output= to a folder on another disk, or callbacks.checkpoints=false"
        )
