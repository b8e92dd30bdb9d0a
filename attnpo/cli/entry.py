"""Shared entry point of the commands: composes and parses the config for the given arguments, then runs the jobs."""

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue

from attnpo.cli.help import CommandParser
from attnpo.cli.progress import heartbeat, import_phase, show_waiting
from attnpo.cli.terminal import exit_status_and_message, handling_signals, log_to_terminal, make_printable, run_guarded
from attnpo.config import compose as config
from attnpo.config.compose import (
    ParsedConfig,
    RootConfig,
    SomeRoot,
    compose,
    expand_sweep,
    list_groups,
    parse,
    report_problems,
)
from attnpo.config.reader import ABSENT, missing_value_message, to_plain_values
from attnpo.system.errors import UserError
from attnpo.system.processes import world_size

_log = logging.getLogger(__name__)


def _config_text(cfg: DictConfig, key: str) -> str:
    node: Any = OmegaConf.create(config.to_container(cfg))
    if key != "job":
        node = OmegaConf.select(node, key, default=ABSENT)
    if node is ABSENT:
        names = ", ".join(str(name) for name in cfg if name != "_target_")
        raise UserError(f"--cfg {key}: expected `job` or one of the config's keys: {names}")
    return OmegaConf.to_yaml(node) if OmegaConf.is_config(node) else f"{node}\n"


def run_entry(
    main: Callable[[SomeRoot], int | None],
    config_name: str,
    argv: Sequence[str] | None,
    description: str,
    examples: str,
    *,
    command_name: str | None = None,
    positional: str | None = None,
    complete: Callable[[SomeRoot], bool] = lambda cfg: False,
    early: Callable[[Mapping[str, object]], None] = lambda data: None,
) -> int:
    """Runs a command; returns its exit status: 0, 1 (a job failed), 2 (user error), 130 or 143 (signals).

    Composes ``config_name`` with ``argv`` (None: ``sys.argv[1:]``) and calls ``main`` with the typed root of the
    config. ``command_name``: name shown in the help. ``positional``: key that collects the arguments that are not
    overrides. ``complete``: returns whether each ``???`` in a root must be filled in. ``early``: checks the node
    ``data`` before torch is imported. Other errors propagate, or set the exit status if they have an ``exit_status``.
    """
    parser = CommandParser(command_name or config_name, description, examples, positional)

    def command() -> int:
        try:
            return _run(
                main, config_name, sys.argv[1:] if argv is None else list(argv), parser, positional, complete, early
            )
        except MissingMandatoryValue as error:
            raise UserError(f"{str(error).splitlines()[0]}; set it with KEY=VALUE") from error

    with log_to_terminal(), handling_signals():
        return run_guarded(command)


def _run(
    main: Callable[[SomeRoot], int | None],
    name: str,
    argv: list[str],
    parser: CommandParser,
    positional: str | None,
    complete: Callable[[SomeRoot], bool],
    early: Callable[[Mapping[str, object]], None],
) -> int:
    options = parser.parse_intermixed_args(argv)
    if options.help:
        sys.stdout.write(parser.help_text(config.CONFIG_DIR / f"{name}.yaml", list_groups(options.config_dir)))
        return 0
    # A path may contain an equals sign. Path.exists would raise for words longer than a file name.
    paths = positional is not None
    bare = [w for w in options.words if not w.startswith("~") and ("=" not in w or (paths and os.path.exists(w)))]
    overrides = [word for word in options.words if word not in bare]
    if bare and positional is None:
        raise UserError(f"{bare[0]!r}: expected GROUP=OPTION or KEY=VALUE; see --help")

    def compose_job(job: Sequence[str]) -> DictConfig:
        cfg = compose(name, job, options.config_dir)
        if bare:
            OmegaConf.update(cfg, str(positional), bare)
        return cfg

    if options.cfg:
        sys.stdout.write(_config_text(compose_job(overrides), options.cfg))
        return 0
    if options.multirun and world_size() > 1:
        raise UserError(
            f"--multirun runs its jobs one after another in a single process, but WORLD_SIZE is {world_size()}: "
            "start one group of processes per job, without -m"
        )
    jobs = expand_sweep(overrides, options.config_dir) if options.multirun else [overrides]
    composed = [compose_job(job) for job in jobs]
    for cfg in composed:  # other problems are reported when the config is parsed
        early(cast(dict[str, object], to_plain_values(cfg.get("data", {}), "data", [])))
    with heartbeat(name):
        # Imports torch, which takes seconds unless the process has loaded it already.
        said = "checking the configuration"
        with import_phase(said), nullcontext() if "torch" in sys.modules else show_waiting(said):
            readings = [_parse_complete(cfg, complete) for cfg in composed]
        _warn_unused_overrides([reading.unused_overrides() for reading in readings])
        roots = [cast(SomeRoot, reading.root) for reading in readings]  # the entry point's own, as its _target_ says
        if not options.multirun:
            return main(roots[0]) or 0
        return _run_jobs(main, [(" ".join(job), root) for job, root in zip(jobs, roots, strict=True)])


def _parse_complete(cfg: DictConfig, complete: Callable[[SomeRoot], bool]) -> ParsedConfig:
    """Parses a job's config. Raises UserError for problems, and for missing values if ``complete`` requires them."""
    reading = parse(cfg)
    root = cast(SomeRoot, reading.as_type(RootConfig))
    if complete(root):
        report_problems([missing_value_message(path) for path in reading.missing if not reading.is_unused(path)])
    return reading


def _warn_unused_overrides(jobs: Sequence[Mapping[str, str]]) -> None:
    """Warns once about each key on the command line that has no effect in any job."""
    idle = [{override.partition("=")[0]: why for override, why in job.items()} for job in jobs]
    for key, why in idle[0].items():
        if all(key in other for other in idle):
            _log.warning("warning: %s has no effect: %s", key, why)


def _run_jobs(main: Callable[[SomeRoot], int | None], jobs: Sequence[tuple[str, SomeRoot]]) -> int:
    failed = []
    for number, (job, cfg) in enumerate(jobs, start=1):
        _log.info("job %d of %d: %s", number, len(jobs), job)
        try:
            status = main(cfg) or 0
        except Exception as error:
            if hasattr(error, "exit_status"):  # not a failure of this job: ends the whole command
                raise
            status = 1  # one job's failure is reported, the others still run
            ending = exit_status_and_message(error)
            if ending is None:
                _log.exception("job %d failed", number)
            else:
                _log.error("%s", ending[1])
        if status:
            failed.append(job)
    if failed:
        listed = "\n  ".join([f"error: {len(failed)} of {len(jobs)} jobs failed:", *failed])
        sys.stderr.write(f"{make_printable(listed)}\n")
    return 1 if failed else 0
