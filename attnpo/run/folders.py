"""Locates the folders of runs and of the store.

All processes of a job use the same run folder, and all runs share the store. Used before any heavy import.
"""

import os
import time
from pathlib import Path
from tempfile import TemporaryFile

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from attnpo.config.compose import cache_root, parse_as, wrap_yaml_errors
from attnpo.run.run_config import RunConfig
from attnpo.schema import UserError
from attnpo.system.processes import world_size

STAMP = "ATTNPO_STAMP"
TABLES = "tables.json"  # tables of a finished study, read by ``report``
CONFIG = "config.yaml"  # config in a run folder
POLICIES = ("best", "last")  # checkpoints in a run folder, the better one first
FIXED = "predictions.json"  # predictions for a study, written before its points ran
STUDY_FILES = ("study.json", "results.csv", "table.md", TABLES)  # files of a finished study besides its page


def store_root(store: str | None) -> Path:
    """Returns the folder of the store, which contains weights, reference log-probabilities and testbed bases."""
    return Path(store).expanduser() if store is not None else cache_root()


def run_folder(cfg: RunConfig) -> Path:
    """Returns the folder of a run or study: ``name`` if given, else a reused or time-stamped one.

    ``RunConfig.reusable_folder`` decides whether to reuse one. Raises UserError if the path is invalid, or if ``name``
    is missing but required by ``resume=auto`` or a multi-process job.
    """
    output, kept = Path(cfg.output), cfg.reusable_folder()
    if cfg.name is not None:
        folder = output / cfg.name
    elif cfg.resume == "auto":
        raise UserError("resume=auto continues an existing run, so it needs name=NAME (the folder under `output`)")
    else:
        folder = timestamped_folder(output, cfg.default_name()) if kept is None else output / kept
    try:
        folder.exists()
    except OSError as problem:  # the name is too long, or the parent folder is not readable
        raise _make_folder_error(folder, problem) from problem
    return folder


def load_saved_config(folder: Path, setting: str) -> RunConfig:
    """Reads the config of the run in ``folder``. Raises UserError on failure, quoting the user's ``setting``."""
    path = folder.expanduser() / CONFIG
    if not path.is_file():
        raise UserError(f"{setting}: this is not a run folder ({CONFIG} is missing); specify a run folder")
    try:
        with wrap_yaml_errors(path):
            found = OmegaConf.load(path)
    except (OmegaConfBaseException, UserError, OSError) as error:
        raise UserError(f"{path} is not a valid config: {error}; specify a run folder") from error
    if not isinstance(found, DictConfig):
        raise UserError(f"{path} is not a valid config: expected a mapping, got a list; specify a run folder")
    try:
        return parse_as(found, RunConfig)
    except UserError as error:
        raise UserError(f"{path} is not a valid config for this version: {error}") from error


def find_run_of_model(model: str) -> Path | None:
    """Returns the folder of the run that saved ``model`` as its ``best/`` or ``last/``; None for any other model."""
    folder = Path(model).expanduser()
    here = folder.absolute()
    is_policy = here.name in POLICIES and (here / "config.json").is_file() and (here.parent / CONFIG).is_file()
    return folder.parent if is_policy else None


def make_folder(folder: Path) -> None:
    """Creates the folder of a run or study, including its parents. Raises UserError if it is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder, prefix="."):
            pass
    except OSError as problem:
        raise _make_folder_error(folder, problem) from problem


def _make_folder_error(folder: Path, problem: OSError) -> UserError:
    return UserError(
        f"output=: cannot create or write to the folder {folder}: {problem.strerror}; set output= to a writable folder "
        "(and name= to a short plain name)"
    )


def timestamped_folder(output: Path, prefix: str) -> Path:
    """Returns the path of a new folder ``prefix-STAMP``; child processes inherit the time stamp."""
    if world_size() > 1:
        if STAMP not in os.environ:
            raise UserError(f"this job has {world_size()} processes: set name=NAME so that they share one run folder")
        return output / f"{prefix}-{os.environ[STAMP]}"
    stamp = now = time.strftime("%Y%m%d-%H%M%S")
    number = 1
    while (output / f"{prefix}-{stamp}").exists():
        number += 1
        stamp = f"{now}-{number}"
    os.environ[STAMP] = stamp
    return output / f"{prefix}-{stamp}"
