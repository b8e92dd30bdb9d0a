"""Command line and output folder of the reports in ``experiments``."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from attnpo.cli.terminal import log_to_terminal, rewrite_commands, run_guarded
from attnpo.lab.reports.output import check_output_folder
from attnpo.lab.reports.report import require_distinct
from attnpo.schema import digest
from attnpo.system.locks import folder_lock


def new_parser(module: str, description: str, example: str) -> argparse.ArgumentParser:
    """Creates a command's argument parser with the option ``--output``; the caller adds its own arguments."""
    parser = argparse.ArgumentParser(
        prog=rewrite_commands(f"python -m {module}"),
        description=description,
        epilog=rewrite_commands(example),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, help="folder of the report; by default a new one below outputs")
    return parser


def run_report_command(write: Callable[[], None]) -> int:
    """Runs a command that writes a report; returns its exit status: 0, or 2 after printing a user error."""

    def command() -> int:
        write()
        return 0

    with log_to_terminal(bars=False):
        return run_guarded(command)


@contextmanager
def report_folder(
    kind: str, paths: Sequence[Path], output: Path | None, **settings: object
) -> Iterator[tuple[Path, str]]:
    """Locks the folder of a report on ``paths``; yields it with a digest of the request.

    ``output``: None means a folder of its own below ``outputs``. Raises UserError for a path given twice, and for a
    folder that holds anything but an earlier report of the same kind, paths and settings.
    """
    require_distinct(paths)
    mark = digest({"report": kind, "paths": [str(path) for path in paths], **settings})[:16]
    folder = output or Path("outputs") / f"{kind}-{mark[:8]}"
    with folder_lock(folder, instead="--output"):
        check_output_folder(folder, mark, instead="--output to another folder")
        yield folder, mark
