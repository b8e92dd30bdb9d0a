"""Where a command's results go: a folder that no other run writes into, the same for all processes of one job.

And where the store is, which all runs share. Light: known before anything heavy is loaded.
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
TABLES = "tables.json"  # what ``report`` reads of a finished study
CONFIG = "config.yaml"  # of a run folder
POLICIES = ("best", "last")  # what a run folder has of its policy, the better first
FIXED = "predictions.json"  # what was predicted of a study before its points ran
STUDY_FILES = ("study.json", "results.csv", "table.md", TABLES)  # what a finished study has beside its page


def store_root(store: str | None) -> Path:
    """Returns the folder of stored weights, reference log-probabilities and testbed bases, by the key ``store``."""
    return Path(store).expanduser() if store is not None else cache_root()


def run_folder(cfg: RunConfig) -> Path:
    """Returns the folder of a run or study: ``name`` if given; else study and setting, or for what starts anew a stamp.

    Raises UserError for ``resume=auto`` or a job of several processes without a name, and for a path that cannot be.
    """
    output, kept = Path(cfg.output), cfg.kept_folder()
    if cfg.name is not None:
        folder = output / cfg.name
    elif cfg.resume == "auto":
        raise UserError("resume=auto continues the run of a folder, so it needs name=NAME (the folder under `output`)")
    else:
        folder = timestamped_folder(output, cfg.title()) if kept is None else output / kept
    try:
        folder.exists()
    except OSError as problem:  # a name that is too long, a folder that may not be looked into
        raise _unusable(folder, problem) from problem
    return folder


def saved_config(folder: Path, said: str) -> RunConfig:
    """Returns the typed configuration of the run in ``folder``, which the user named by ``said``; else UserError."""
    path = folder.expanduser() / CONFIG
    if not path.is_file():
        raise UserError(f"{said}: no run lies there ({CONFIG} is missing); give the folder of a run")
    try:
        with wrap_yaml_errors(path):
            found = OmegaConf.load(path)
    except (OmegaConfBaseException, UserError, OSError) as error:
        raise UserError(f"{path} is no configuration: {error}; give the folder of a run") from error
    if not isinstance(found, DictConfig):
        raise UserError(f"{path} is no configuration: it holds a list; give the folder of a run")
    try:
        return parse_as(found, RunConfig)
    except UserError as error:
        raise UserError(f"{path} is no configuration of this version: {error}") from error


def run_of(model: str) -> Path | None:
    """Returns the folder of the run that wrote ``model`` as its ``best/`` or ``last/``; None for any other model."""
    folder = Path(model).expanduser()
    here = folder.absolute()
    is_policy = here.name in POLICIES and (here / "config.json").is_file() and (here.parent / CONFIG).is_file()
    return folder.parent if is_policy else None


def make_folder(folder: Path) -> None:
    """Makes the folder of a run or study, with its parents. UserError when nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder, prefix="."):
            pass
    except OSError as problem:
        raise _unusable(folder, problem) from problem


def _unusable(folder: Path, problem: OSError) -> UserError:
    return UserError(
        f"output=: the folder {folder} must be one that can be made and written into, but: {problem.strerror}; give "
        "output= a folder that can (and name= a short plain name)"
    )


def timestamped_folder(output: Path, prefix: str) -> Path:
    """Returns ``prefix`` with a time stamp that no other folder has; processes launched by this one inherit it."""
    if world_size() > 1:
        if STAMP not in os.environ:
            raise UserError(f"this job has {world_size()} processes, which need name=NAME to share one run folder")
        return output / f"{prefix}-{os.environ[STAMP]}"
    stamp = now = time.strftime("%Y%m%d-%H%M%S")
    number = 1
    while (output / f"{prefix}-{stamp}").exists():
        number += 1
        stamp = f"{now}-{number}"
    os.environ[STAMP] = stamp
    return output / f"{prefix}-{stamp}"
