"""Opens and closes the loggers of a run: always a CSV file, Weights & Biases on request.

W&B prints nothing, and logs both training and validation metrics by optimiser step.
"""

import json
import logging
import os
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from attnpo.schema import UserError
from attnpo.system.credentials import mask_credentials, to_savable
from attnpo.system.files import Json, parse_json, write_atomically
from attnpo.training.metrics_file import LOGS, RUN_ID
from attnpo.training.settings import LoggerSettings, WandbSettings, check_wandb

log = logging.getLogger(__name__)

STEP = "trainer/global_step"  # the name that Lightning logs
EXIT_CODES = {"success": 0, "failed": 1, "interrupted": 130}


class WandbRunLogger(WandbLogger):
    """W&B logger that starts its run on first use and keeps the run id in ``logs/wandb.json`` for resuming.

    In online mode the environment variables ``WANDB_MODE``, ``WANDB_ENTITY`` and ``WANDB_RUN_ID`` take precedence.
    """

    def __init__(self, settings: WandbSettings, folder: Path, config: Mapping[str, Json], job: str = "train") -> None:
        check_wandb(LoggerSettings(settings))
        named: dict[str, Any] = {
            "group": settings.group,
            "tags": list(settings.tags),
            "job_type": job,
            "config": to_savable(config),
        }
        super().__init__(settings.name or folder.name, folder, project=settings.project, **named)
        self.folder, self.offline = folder, settings.mode == "offline"

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """Returns the W&B run, which starts on the first call. Raises UserError if W&B refuses to start it."""
        if self._experiment is None:
            self._start_run()
        return self._experiment

    def _start_run(self) -> None:
        import wandb

        mode: Any = "offline" if self.offline else os.environ.get("WANDB_MODE")
        quiet = wandb.Settings(console="off", silent=True, reinit="create_new")  # Lightning would join an open run
        given = {name: value for name, value in self._wandb_init.items() if name != "anonymous"}  # deprecated in W&B
        self.folder.mkdir(parents=True, exist_ok=True)
        typed, sys.argv = sys.argv, list(map(mask_credentials, sys.argv))  # W&B records the command line
        try:
            run = wandb.init(**{**given, "id": load_or_create_run_id(self.folder), "mode": mode, "settings": quiet})
        except wandb.errors.Error as problem:
            raise UserError(
                f"W&B did not start the run: {problem}; log in with `wandb login`, or set logger.wandb.mode=offline "
                "(no account needed) or logger=csv"
            ) from problem
        finally:
            sys.argv = typed
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP, step_sync=True)
        place = f"offline, {Path(run.dir).parent}; upload with wandb sync" if run.offline else run.url
        log.info("W&B run %s in project %s: %s", run.id, self._project, place)
        self._experiment = run

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, object], step: int | None = None) -> None:
        """Logs metrics or media at an optimiser step."""
        row = dict(metrics) if step is None else {**metrics, STEP: step}
        self.experiment.log(row, step=step)

    def close(self, status: str) -> None:
        """Finishes the run, if it has started, with the exit code for ``status``."""
        if self._experiment is not None:
            self._experiment.finish(exit_code=EXIT_CODES.get(status, 1))


def load_or_create_run_id(folder: Path) -> str:
    """Reads the folder's W&B run id; creates and saves a new one if there is none."""
    path = folder / LOGS / RUN_ID
    try:
        return str(parse_json(path.read_text(encoding="utf-8"))["id"])
    except (OSError, ValueError, KeyError, TypeError):
        new_id = os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps({"id": new_id}) + "\n")
    return new_id


def make_loggers(settings: LoggerSettings, folder: Path, config: Mapping[str, Json]) -> list[Logger]:
    """Returns the CSV logger (``logs/version_N/metrics.csv``) and, if requested, W&B's; ``config`` is plain data."""
    loggers: list[Logger] = [CSVLogger(save_dir=folder, name=LOGS)]
    if settings.wandb is not None:
        loggers.append(WandbRunLogger(settings.wandb, folder, config))
    return loggers


def wandb_loggers(loggers: Sequence[Logger]) -> list[WandbRunLogger]:
    """Returns the W&B loggers among ``loggers``."""
    return [logger for logger in loggers if isinstance(logger, WandbRunLogger)]


def close_loggers(loggers: Sequence[Logger], status: str) -> None:
    """Finishes the loggers' runs as "success", "failed" or "interrupted", including W&B's if another logger fails."""
    try:
        for logger in loggers:
            logger.finalize(status)
    finally:
        for tracker in wandb_loggers(loggers):
            tracker.close(status)


@contextmanager
def open_loggers(settings: LoggerSettings, folder: Path, config: Mapping[str, Json]) -> Iterator[list[Logger]]:
    """Opens the loggers for a block; closes them as "success", "failed" or "interrupted" (Ctrl-C)."""
    loggers = make_loggers(settings, folder, config)
    status = "failed"
    try:
        yield loggers
        status = "success"
    except (KeyboardInterrupt, SystemExit):
        status = "interrupted"
        raise
    finally:
        try:
            close_loggers(loggers, status)
        except Exception as problem:  # noqa: BLE001  a logger's failure must not discard the training
            log.warning("warning: could not close the run's loggers (%s: %s)", type(problem).__name__, problem)
