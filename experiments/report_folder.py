"""Command line and folder of a report that a command beside the package writes."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from attnpo.cli.terminal import log_to_terminal, rewrite_commands, run_guarded
from attnpo.lab.reports.output import check_free
from attnpo.lab.reports.report import require_distinct
from attnpo.schema import digest
from attnpo.system.locks import folder_lock


def new_parser(module: str, description: str, example: str) -> argparse.ArgumentParser:
    """Makes the parser of a command's arguments, with ``--output``; the others are the command's own."""
    parser = argparse.ArgumentParser(
        prog=rewrite_commands(f"python -m {module}"),
        description=description,
        epilog=rewrite_commands(example),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, help="where the report goes; by default a folder below outputs")
    return parser


def write_report(write: Callable[[], None]) -> int:
    """Runs a command that writes a report, and returns its exit status: 0, or 2 after the line of a user's error."""

    def command() -> int:
        write()
        return 0

    with log_to_terminal(bars=False):
        return run_guarded(command)


@contextmanager
def report_folder(
    kind: str, paths: Sequence[Path], output: Path | None, **settings: object
) -> Iterator[tuple[Path, str]]:
    """Holds the folder of a report on ``paths``, and yields it with the mark of what was asked for.

    ``output``: None is a folder below ``outputs`` of this report's own. UserError for a path that is given twice, and
    for a folder that holds anything but an earlier report of the same kind, paths and settings.
    """
    require_distinct(paths)
    mark = digest({"report": kind, "paths": [str(path) for path in paths], **settings})[:16]
    folder = output or Path("outputs") / f"{kind}-{mark[:8]}"
    with folder_lock(folder, instead="--output"):
        check_free(folder, mark, instead="--output another folder")
        yield folder, mark
