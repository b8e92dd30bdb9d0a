"""The folder of a report that a command beside the package writes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from attnpo.lab.reports.output import check_free
from attnpo.lab.reports.report import require_distinct
from attnpo.schema import digest
from attnpo.system.locks import locked


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
    with locked(folder, instead="--output"):
        check_free(folder, mark, instead="--output another folder")
        yield folder, mark
