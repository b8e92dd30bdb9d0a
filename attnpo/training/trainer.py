"""Lightning's Trainer built from the run's settings, with checkpoints and validation scheduled in optimiser steps."""

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import lightning as L
import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import ModelParallelStrategy

from attnpo.config.reader import import_target
from attnpo.schema import UserError
from attnpo.training.callbacks import Movement, ProgressDisplay, ValidationSchedule
from attnpo.training.checkpoints import BestCheckpoint, HashingCheckpointIO, LastCheckpoint
from attnpo.training.export import Exporter
from attnpo.training.resume_state import ExactResume
from attnpo.training.settings import CallbackSettings, TrainerSettings
from attnpo.training.signals import SignalHandler

# Lightning's warnings about deliberate choices.
HARMLESS = (
    "does not have many workers",  # batches are collated from memory
    "in eval mode at the start of training",  # set to train mode in on_fit_start
    "dataloader is not resumable",  # the data module resumes its sampler
    "accumulate the metric across devices",  # PairMeans already sums over them
    "LeafSpec",
)


def make_callbacks(
    settings: CallbackSettings,
    trainer: TrainerSettings,
    folder: Path,
    exporter: Exporter,
    account: Mapping[str, object] | None = None,
) -> list[Callback]:
    """Returns the callbacks of a run: signals, resuming, weight change, checkpoints, progress, ``callbacks.extra``."""
    callbacks: list[Callback] = [ExactResume(), SignalHandler(), Movement()]
    if settings.checkpoints:
        # last/ before best/: if saving best/ fails, resuming from last/ saves it.
        callbacks.append(LastCheckpoint(folder / "last", exporter, settings.save_every, account))
        callbacks.append(BestCheckpoint(folder / "best", exporter, settings.monitor, settings.monitor_mode, account))
    if trainer.progress:
        callbacks.append(ProgressDisplay(folder.name))
    return [*callbacks, *make_extra_callbacks(settings.extra or {})]


def make_extra_callbacks(extra: Mapping[str, Mapping[str, object]]) -> list[Callback]:
    """Creates the callbacks of ``callbacks.extra``. Raises UserError if a class or its arguments are invalid."""
    made = []
    for name, node in extra.items():
        key, given = f"callbacks.extra.{name}", {word: value for word, value in node.items() if word != "_target_"}
        target, problem = import_target(str(node.get("_target_")), "class")
        if problem:
            raise UserError(f"{key}._target_: {problem}")
        if not (isinstance(target, type) and issubclass(target, Callback)):
            raise UserError(f"{key}._target_: expected a Lightning Callback, got {node['_target_']}")
        try:
            made.append(target(**given))
        except (TypeError, ValueError, MisconfigurationException) as error:
            raise UserError(f"{key}: {error}") from error
    return made


class FSDP2Strategy(ModelParallelStrategy):
    """FSDP2 over all processes, without tensor parallelism; checkpoints are single files."""

    def __init__(self) -> None:
        super().__init__(tensor_parallel_size=1, save_distributed_checkpoint=False)

    def setup_environment(self) -> None:
        """Creates the mesh over all processes; Lightning's "auto" would put one data-parallel rank on each node."""
        self._data_parallel_size = self.world_size
        super().setup_environment()


class SingleVisibleGPU(CUDAAccelerator):
    """Accelerator for nodes where each process sees only its own GPU, as device 0 (srun --gpus-per-task=1)."""

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> list[int]:
        """Returns a list with GPU 0 repeated ``devices`` times, one entry per process."""
        return [0] * int(str(devices))


def make_accelerator(settings: TrainerSettings) -> str | CUDAAccelerator:
    """Returns Lightning's accelerator; ``auto`` selects CUDA or the CPU, because other accelerators are untested."""
    several = settings.devices.isdigit() and int(settings.devices) > 1
    gpus = torch.cuda.device_count() if settings.accelerator in ("auto", "gpu", "cuda") else 0
    if several and gpus == 1:
        return SingleVisibleGPU()
    return "cpu" if settings.accelerator == "auto" and gpus == 0 else settings.accelerator


class SrunEnvironment(SLURMEnvironment):
    """Environment of processes started by srun, with any of srun's options; jobs are not requeued."""

    def __init__(self) -> None:
        super().__init__(auto_requeue=False)

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Skips Lightning's check, because ``training.processes`` has a stricter one."""

    @staticmethod
    def _validate_srun_variables() -> None:
        """Skips Lightning's check, because ``training.processes`` has a stricter one."""


def make_trainer(
    settings: TrainerSettings,
    loggers: list[Logger],
    callbacks: list[Callback],
    folder: Path,
    accumulation: int,
    *,
    environment: ClusterEnvironment | None = None,
) -> L.Trainer:
    """Returns the Trainer of a run.

    ``accumulation``: micro-batches per optimiser step on one process. ``environment``: tells Lightning the rank of this
    process.
    """
    return L.Trainer(
        accelerator=make_accelerator(settings),
        devices=int(settings.devices) if settings.devices.isdigit() else settings.devices,
        num_nodes=settings.num_nodes,
        strategy=FSDP2Strategy() if settings.strategy == "fsdp" else settings.strategy,
        precision=settings.precision,  # type: ignore[arg-type]
        max_epochs=settings.max_epochs if settings.max_steps < 0 else -1,
        max_steps=settings.max_steps,
        accumulate_grad_batches=accumulation,
        gradient_clip_val=settings.gradient_clip_val,
        val_check_interval=1,  # ValidationSchedule decides
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        log_every_n_steps=settings.log_every_n_steps,
        use_distributed_sampler=False,
        enable_checkpointing=False,  # BestCheckpoint and LastCheckpoint save instead
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        logger=loggers,
        callbacks=[ValidationSchedule(settings.validate_every), *callbacks],
        plugins=[HashingCheckpointIO(), *([] if environment is None else [environment])],
    )


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Hides Lightning's banners and tips, and its warnings about deliberate choices, inside the context."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "lightning")]
    before = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        for text in HARMLESS:
            warnings.filterwarnings("ignore", message=f".*{text}.*")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, before, strict=True):
                logger.setLevel(level)
