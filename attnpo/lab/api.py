"""``train`` and ``run_study``: what the command ``fit`` does, from Python, with its outcome as frames."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from attnpo.cli.terminal import format_override, log_to_terminal
from attnpo.config.compose import load
from attnpo.lab.results import Run, StudyResults, load_run, load_study
from attnpo.run.folders import run_folder
from attnpo.schema import UserError

if TYPE_CHECKING:
    from attnpo.lab.studies.config import FitConfig

log = logging.getLogger(__name__)


def train(overrides: Sequence[str] = (), *, config_dir: str | Path | None = None, progress: bool = False) -> Run:
    """Trains one run, as ``python -m attnpo.fit`` with the same overrides, and gives it as ``load_run`` would.

    Args:
        overrides: as on the command line: ``["experiment=none", "weights=uniform", "seed=3"]``.
        config_dir: a folder with options of one's own (docs/own_things.md).
        progress: whether log lines go to the error stream; warnings always do.

    Raises:
        UserError: the overrides ask for a study; and whatever stops the command.
    """
    cfg = _load(overrides, config_dir)
    if cfg.study is not None:
        raise UserError(
            f"train: expected one run, and the configuration asks for the study {cfg.study.name}; give "
            "experiment=none, or call run_study"
        )
    if cfg.name is None:  # a time stamp in the name of its folder would be another one a second later
        cfg = _load([*overrides, format_override("name", run_folder(cfg).name)], config_dir)
    from attnpo.fit import main

    with _logging_as_command(progress):
        main(cfg)
    return load_run(run_folder(cfg))


def run_study(
    overrides: Sequence[str] = (), *, config_dir: str | Path | None = None, progress: bool = False
) -> StudyResults:
    """Runs a study, as ``python -m attnpo.fit`` with the same overrides, and gives it as ``load_study`` would.

    Points that are finished in its folder already are reused, as by the command. What failed stands in ``notes``.

    Args:
        overrides: as on the command line: ``["experiment=layer_sweep", "seeds=1"]``.
        config_dir: as for ``train``.
        progress: as for ``train``.

    Raises:
        UserError: the overrides ask for a single run; and whatever stops the command.
    """
    cfg = _load(overrides, config_dir)
    if cfg.study is None:
        raise UserError(
            "run_study: expected a study, and the configuration asks for one run; give experiment=NAME, or call train"
        )
    if cfg.name is None and cfg.reusable_folder() is None:
        cfg = _load([*overrides, format_override("name", run_folder(cfg).name)], config_dir)
    from attnpo.fit import main

    with _logging_as_command(progress):  # what it prints is in the folder as well
        status = main(cfg)
    if status:
        log.warning("not everything ran: see the notes of the study")
    return load_study(run_folder(cfg))


def _load(overrides: Sequence[str], config_dir: str | Path | None) -> "FitConfig":
    cfg: FitConfig = load("fit", list(overrides), None if config_dir is None else Path(config_dir))
    return cfg


@contextmanager
def _logging_as_command(progress: bool) -> Iterator[None]:
    """Opens a context that reports as the command does, log lines below warnings only with ``progress``, tables not.

    Levels and handlers are afterwards as they were before.
    """
    ours, root = logging.getLogger("attnpo"), logging.getLogger()
    level, handlers = ours.level, [*root.handlers]
    try:
        with log_to_terminal(bars=False), redirect_stdout(StringIO()):
            if not progress:
                ours.setLevel(logging.WARNING)
            yield
    finally:
        ours.setLevel(level)
        root.handlers[:] = handlers
