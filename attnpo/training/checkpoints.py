"""Saves ``best/`` and ``last/``: each replaced as a whole, always between two optimiser steps."""

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
from attnpo.training.checkpoint_folders import STATE, newest, read_account, replace_folder, whole, write_account
from attnpo.training.export import ADAPTER, Exporter
from attnpo.training.metrics_file import METRICS, merge_metrics
from attnpo.training.nonfinite import check_weights
from attnpo.training.resume_state import KEY, Checkpoint
from attnpo.training.signals import step_ended, validation_follows

log = logging.getLogger(__name__)

LOST = 0.01  # share of the adapters' update from which its loss to rounding is a warning
# Raised for a file that cannot be written: torch's writer raises RuntimeError, the export's an error of its own.
DISK_ERRORS = (OSError, RuntimeError, SafetensorError)


class StraightIO(TorchCheckpointIO):
    """Writer of a state straight into its file, with its ``digest``; Lightning would hold two more copies in memory."""

    digest: str | None = None

    def save_checkpoint(self, checkpoint: dict[str, object], path: str | Path, storage_options: object = None) -> None:
        """Writes the file."""
        with Path(path).open("wb") as file:
            stream: Any = HashedStream(file)
            torch.save(checkpoint, stream)
        self.digest = stream.digest.hexdigest()


class HashedStream:
    """File written from beginning to end, with the sha256 of what went into it; a writer that seeks fails."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.digest = file, hashlib.sha256()

    def write(self, content: bytes | memoryview) -> int:
        """Writes and counts in ``content``; returns its length in bytes."""
        self.digest.update(content)
        return self.file.write(content)

    def flush(self) -> None:
        """Flushes the file."""
        self.file.flush()


class CheckpointFolder(L.Callback):
    """Folder with ``state.ckpt`` to resume from, ``checkpoint.json`` and, on request, the policy for Hugging Face.

    Its files are of one optimiser step and sealed. ``account`` (plain data) is kept in ``checkpoint.json``.
    """

    def __init__(self, folder: Path, exporter: Exporter, account: Mapping[str, object] | None = None) -> None:
        self.folder, self.exporter, self.account = folder, exporter, dict(account or {})
        self._warned = False  # of what the rounding of merged adapters took

    @property
    def state_key(self) -> str:
        """Returns one key per folder."""
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

        ``metrics`` (by default what is logged) go into the model card; ``state`` is a file to be copied as the state;
        ``facts`` go into ``checkpoint.json``. Raises UserError for weights that are not finite, and (first rank) where
        the folder cannot be written; it holds what it held before.
        """
        check_weights(trainer)
        try:
            logged = trainer.callback_metrics if metrics is None else metrics
            export, merge = self._save(trainer, export, logged, state, facts)
        except DISK_ERRORS as problem:
            if not trainer.is_global_zero:
                raise
            log.debug("saving %s failed", self.folder, exc_info=True)
            raise UserError(describe_save_error(self.folder, trainer.global_step, problem)) from problem
        trainer.strategy.barrier(f"save {self.folder.name}")
        if export and trainer.is_global_zero:
            log.info("%s holds the policy of optimiser step %d", self.folder, trainer.global_step)
        if merge is not None:
            lossy = merge.lost_share >= LOST
            log.log(
                logging.WARNING if lossy and not self._warned else logging.INFO,
                "%s: %s; %s/ holds the adapters whole%s",
                *(self.folder, merge.describe(), self.folder / ADAPTER),
                ", and callbacks.export_dtype=float32 merges them without loss" if lossy else "",
            )
            self._warned = self._warned or lossy

    def _save(
        self,
        trainer: L.Trainer,
        export: bool,
        metrics: Mapping[str, Tensor | float],
        state: Path | None,
        facts: Mapping[str, float],
    ) -> tuple[bool, MergeRounding | None]:
        """Returns whether there is an export, which may fail after the last step, and what merging adapters took."""
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
                    self._keep_state_alone(new, writes, problem)
            if trainer.is_global_zero:
                merged = {} if merge is None else {"merge": merge.to_json()}
                write_account(new, {"step": trainer.global_step, **facts, **merged, **self.account})
                rows, writer = self.folder.parent / METRICS, trainer.strategy.checkpoint_io
                if rows.is_file():
                    shutil.copyfile(rows, new / METRICS)
                digest = writer.digest if state is None and isinstance(writer, StraightIO) else None
                write_checksums(new, None if digest is None else {STATE: digest})
        return export, merge

    def _keep_state_alone(self, new: Path, writes: bool, problem: Exception) -> None:
        words = " ".join(str(problem).split())
        log.warning(
            "warning: %s holds no model: its export failed after the last step (%s: %s); the trained weights are in "
            "its %s; fix the cause, delete result.json and give the command again with resume=auto, which exports "
            "last/ unless the weights are sharded",
            *(self.folder, type(problem).__name__, words, STATE),
        )
        log.debug("exporting to %s failed", self.folder, exc_info=problem)
        for file in new.iterdir() if writes else ():
            if file.name != STATE:
                shutil.rmtree(file) if file.is_dir() else file.unlink()


class BestCheckpoint(CheckpointFolder):
    """Keeps the policy with the lowest (or highest) value of ``monitor``, exported with each improvement.

    A resumed run goes on from the value in the folder, and saves a validated state that was not compared yet.
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
        self._validated = -1  # the step that was validated last
        self._resumed: dict[str, float] = {}  # metrics of a resumed state's validation, until they are compared

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: Checkpoint) -> None:
        """Notes in the state whether it has been validated."""
        checkpoint["attnpo_validated"] = self._validated == trainer.global_step

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: Checkpoint) -> None:
        """Takes up the folder's value and the metrics of the state; UserError where the monitor was never logged."""
        saved = checkpoint.get(KEY, {})
        metrics = saved.get("metrics", {})
        self._check({*metrics, *saved.get("first", {})})
        best = read_account(self.folder).get(self.monitor)
        self.best = best if isinstance(best, int | float) else None
        if checkpoint.get("attnpo_validated", False):
            self._validated, self._resumed = checkpoint["global_step"], dict(metrics)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Saves a resumed state that is the best so far and was not saved as such."""
        metrics, self._resumed = self._resumed, {}
        if self.monitor in metrics and trainer.ckpt_path is not None:
            # A copy: counters and random states are not in their places before the first step.
            self._compare(trainer, metrics, Path(trainer.ckpt_path))

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Saves it where no step was left, unless shards, which cannot be gathered any more, are all there is."""
        if self._resumed and getattr(pl_module, "sharded", False):
            log.warning("no step is left to train: %s is not compared with the last step's policy", self.folder)
            self._resumed = {}
        self.on_train_start(trainer, pl_module)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Notes the step."""
        if trainer.state.fn == "fit":
            self._validated = trainer.global_step

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Saves the policy where the value is the best so far; UserError where the monitor is not logged."""
        self._check(trainer.callback_metrics)
        if trainer.state.fn == "fit":
            self._compare(trainer, trainer.callback_metrics)

    def _compare(self, trainer: L.Trainer, metrics: Mapping[str, Tensor | float], state: Path | None = None) -> None:
        value = float(metrics[self.monitor])
        if float(metrics.get("val/weights/void", 0.0)) == 1:  # a mean over pairs of weight 0 measures nothing
            log.warning("warning: every validation pair has the weight 0 after this step: %s is not saved", self.folder)
            return
        if trainer.strategy.reduce_boolean_decision(self._better(value)):
            self.save(trainer, export=True, metrics=metrics, state=state, **{self.monitor: value})
            self.best = value

    def _check(self, names: Iterable[str]) -> None:
        """Refuses the monitor if ``names`` are of a validation that did not log it."""
        logged = sorted(name for name in names if name.startswith("val/"))
        if logged and self.monitor not in logged:
            raise UserError(f"callbacks.monitor={self.monitor} is not a logged metric; there are: {', '.join(logged)}")

    def _better(self, value: float) -> bool:
        better = operator.lt if self.mode == "min" else operator.gt
        return math.isfinite(value) and (self.best is None or better(value, self.best))


class LastCheckpoint(CheckpointFolder):
    """State that a run is resumed from: saved with every validation, every ``every`` optimiser steps, and at the end.

    The export, which takes as long for a large model, is written only at the end of training or when interrupted.
    """

    def __init__(
        self, folder: Path, exporter: Exporter, every: int | None = None, account: Mapping[str, object] | None = None
    ) -> None:
        super().__init__(folder, exporter, account)
        self.every = every
        self._exported = -1  # the step that was saved with its export

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Raises UserError when the disk cannot hold the checkpoints."""
        check_space(self.folder, pl_module)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Saves after every ``every``-th optimiser step, unless a later hook of this step saves anyway."""
        step = trainer.global_step
        if self.every is None or not step_ended(trainer, batch_idx) or step % self.every:
            return
        if not trainer.should_stop and not validation_follows(trainer):
            log_row(trainer)
            self.save(trainer, export=False)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Saves, with the export when training ends here."""
        if trainer.state.fn == "fit":
            self.save(trainer, export=trainer.should_stop)
            self._exported = trainer.global_step if trainer.should_stop else -1

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Saves with the export, unless the last validation did."""
        if self._exported != trainer.global_step:
            self.save(trainer, export=True)
            self._exported = trainer.global_step

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Exports the policy of a run without a step left whose own state has no export yet, unless it is sharded."""
        state = Path(trainer.ckpt_path or "")
        lacking = self._exported < 0 and not (state.parent / "config.json").is_file()
        if lacking and state == whole(self.folder) / STATE:
            if getattr(pl_module, "sharded", False):
                log.warning("no step is left to train: %s gets no model, as its shards cannot be gathered", self.folder)
            else:
                self.save(trainer, export=True, state=state)


def describe_save_error(folder: Path, step: int, problem: Exception) -> str:
    """Returns what to tell the user when ``folder`` could not be saved after ``step``, in one line."""
    lines = str(problem).strip().splitlines() or [type(problem).__name__]
    place = next(path for path in folder.parents if path.is_dir())
    free = shutil.disk_usage(place).free
    saved = newest(folder.parent)
    stands = "nothing is saved yet" if saved is None else f"saved last is step {saved[0]}, in {saved[1]}"
    advice = "start again" if saved is None else "go on with resume=auto"
    return (
        f"cannot save optimiser step {step} to {folder} ({lines[0].strip()}); {free} bytes ({free / 2**30:.1f} GiB) "
        f"are free there without the unfinished copy, which is removed; {stands}: make room, then {advice}"
    )


def log_row(trainer: L.Trainer) -> None:
    """Puts the row of the step that just ended into the CSV file, which Lightning does after the hook that saves."""
    step = trainer.global_step
    if step % trainer.log_every_n_steps:  # type: ignore[attr-defined]
        return
    row = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("train/")}
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger):
            logger.log_metrics({**row, "epoch": float(trainer.current_epoch)}, step - 1)


def flush_metrics(trainer: L.Trainer, folder: Path) -> None:
    """Brings the run's ``metrics.csv`` up to the step that is about to be saved."""
    if folder.is_dir():
        for logger in trainer.loggers:
            logger.save()
        merge_metrics(folder)


def check_space(folder: Path, module: L.LightningModule) -> None:
    """Raises UserError when the disk has no room for ``best/`` and ``last/`` (weights, moments, export) and a third."""
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
