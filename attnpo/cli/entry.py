"""Front of the commands: composes the configuration an argument list asks for, reads it, and runs its jobs."""

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
        raise UserError(f"--cfg {key}: expected `job` or a key of the configuration: {names}")
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
    """Returns the exit status of a command: 0, 1 (a job failed), 2 (an error the user can mend), 130 or 143 (signals).

    Composes ``config_name`` with ``argv`` (None: the process's own) and calls ``main`` with its typed root.
    ``command_name``: in the help. ``positional``: the key of arguments that are no overrides. ``complete``: whether
    nothing may be ``???``. ``early``: checks the node ``data`` before torch is imported. Other errors propagate, or end
    it with their ``exit_status``.
    """
    parser = CommandParser(command_name or config_name, description, examples, positional)

    def command() -> int:
        try:
            return _run(
                main, config_name, sys.argv[1:] if argv is None else list(argv), parser, positional, complete, early
            )
        except MissingMandatoryValue as error:
            raise UserError(f"{str(error).splitlines()[0]}; give KEY=VALUE") from error

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
    # Where paths are taken, one may hold an equals sign. Not Path.exists, which raises for words longer than a name.
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
            f"--multirun: its jobs run one after the other in one process, WORLD_SIZE is {world_size()}; "
            "start one group of processes per job without -m"
        )
    jobs = expand_sweep(overrides, options.config_dir) if options.multirun else [overrides]
    composed = [compose_job(job) for job in jobs]
    for cfg in composed:  # other problems are told when it is read
        early(cast(dict[str, object], to_plain_values(cfg.get("data", {}), "data", [])))
    with heartbeat(name):
        # Brings torch, which takes seconds, in a process that has not loaded it.
        said = "checking the configuration"
        with import_phase(said), nullcontext() if "torch" in sys.modules else show_waiting(said):
            readings = [_parse_complete(cfg, complete) for cfg in composed]
        _warn_unused_overrides([reading.unused_overrides() for reading in readings])
        roots = [cast(SomeRoot, reading.root) for reading in readings]  # the entry point's own, as its _target_ says
        if not options.multirun:
            return main(roots[0]) or 0
        return _run_jobs(main, [(" ".join(job), root) for job, root in zip(jobs, roots, strict=True)])


def _parse_complete(cfg: DictConfig, complete: Callable[[SomeRoot], bool]) -> ParsedConfig:
    """Returns what a job's configuration was read as; UserError also for values that ``complete`` asks for."""
    reading = parse(cfg)
    root = cast(SomeRoot, reading.as_type(RootConfig))
    if complete(root):
        report_problems([missing_value_message(path) for path in reading.missing if not reading.is_unused(path)])
    return reading


def _warn_unused_overrides(jobs: Sequence[Mapping[str, str]]) -> None:
    """Warns once of every key given on the command line that has an effect in none of the jobs."""
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
            if hasattr(error, "exit_status"):  # not a failure of this job: the whole command is to end
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
