"""The loggers of a run and their end: the CSV file that is always there, Weights & Biases on request."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger

from attnpo.training.settings import LoggerSettings

LOGS = "logs"


def make_loggers(settings: LoggerSettings, folder: Path, config: Mapping[str, Any]) -> list[Logger]:
    """The CSV logger (``logs/version_N/metrics.csv``, a version per session) and, if asked for, Weights & Biases."""
    loggers: list[Logger] = [CSVLogger(save_dir=folder, name=LOGS)]
    if settings.wandb is not None:
        chosen = settings.wandb
        loggers.append(
            WandbLogger(
                project=chosen.project,
                name=chosen.name or folder.name,
                group=chosen.group,
                save_dir=folder,
                offline=chosen.mode == "offline",
                tags=list(chosen.tags),
                config=dict(config),
            )
        )
    return loggers


def close_loggers(loggers: Sequence[Logger], status: str) -> None:
    """Nothing; ends the loggers' runs ("success" or "failed"), so that the next run of this process gets its own."""
    for logger in loggers:
        logger.finalize(status)
        if isinstance(logger, WandbLogger):
            logger.experiment.finish(exit_code=0 if status == "success" else 1)
