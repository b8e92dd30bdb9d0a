"""``train`` and ``run_study``: run the ``fit`` command from Python and return results as data frames."""

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
    """Trains one run and returns it, like ``python -m attnpo.fit`` followed by ``load_run``.

    Args:
        overrides: command-line overrides, e.g. ``["experiment=none", "weights=uniform", "seed=3"]``.
        config_dir: a folder with your own options (docs/own_things.md).
        progress: whether to write log lines to stderr. Warnings are always written.

    Raises:
        UserError: the overrides configure a study, or the command fails.
    """
    cfg = _load(overrides, config_dir)
    if cfg.study is not None:
        raise UserError(
            f"train: expected a single run, but the configuration is for the study {cfg.study.name}; pass "
            "experiment=none, or call run_study"
        )
    if cfg.name is None:  # the folder's name has a time stamp, so fix it now
        cfg = _load([*overrides, format_override("name", run_folder(cfg).name)], config_dir)
    from attnpo.fit import main

    with _log_like_command(progress):
        main(cfg)
    return load_run(run_folder(cfg))


def run_study(
    overrides: Sequence[str] = (), *, config_dir: str | Path | None = None, progress: bool = False
) -> StudyResults:
    """Runs a study and returns it, like ``python -m attnpo.fit`` followed by ``load_study``.

    As with the command, sweep points already finished in the study's folder are reused. Failures are listed in
    ``notes``.

    Args:
        overrides: command-line overrides, e.g. ``["experiment=layer_sweep", "seeds=1"]``.
        config_dir: as for ``train``.
        progress: as for ``train``.

    Raises:
        UserError: the overrides configure a single run, or the command fails.
    """
    cfg = _load(overrides, config_dir)
    if cfg.study is None:
        raise UserError(
            "run_study: expected a study, but the configuration is for a single run; pass experiment=NAME, or call "
            "train"
        )
    if cfg.name is None and cfg.reusable_folder() is None:
        cfg = _load([*overrides, format_override("name", run_folder(cfg).name)], config_dir)
    from attnpo.fit import main

    with _log_like_command(progress):  # everything it prints is also in the folder
        status = main(cfg)
    if status:
        log.warning("the study is incomplete; see its notes")
    return load_study(run_folder(cfg))


def _load(overrides: Sequence[str], config_dir: str | Path | None) -> "FitConfig":
    cfg: FitConfig = load("fit", list(overrides), None if config_dir is None else Path(config_dir))
    return cfg


@contextmanager
def _log_like_command(progress: bool) -> Iterator[None]:
    """Sets up the command's logging, but prints no tables; messages below warning level appear only with ``progress``.

    Restores levels and handlers on exit.
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
