"""Conformance: golden records recomputed through the objects that training builds from config.

A record names its config option; what has no option yet is "not built", so a new objective, weight source or benchmark
needs its config and, where its records look different from those at hand, an adapter here.
"""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from attnpo.schema import UserError
from attnpo.system.files import parse_json
from tests.conformance import evaluation, extraction, losses
from tests.conformance import extraction_folder as folder
from tests.conformance.fields import Record
from tests.conformance.records import Item, Outcome, Status

__all__ = ["Outcome", "Status", "items", "passed", "summary", "verify"]


def verify(paths: Sequence[str | Path], only: Sequence[str] = ()) -> Iterator[Outcome]:
    """The outcomes of the records below ``paths``, each recomputed when it is asked for.

    ``only``: shell patterns for "name case"; others are left out. UserError for paths that cannot be read or hold no
    golden records though they were named as a file.
    """
    for path in paths:
        for item in items(Path(path).expanduser()):
            if not only or any(fnmatchcase(f"{item.name} {item.case}", pattern) for pattern in only):
                yield item.run()


def passed(outcomes: Sequence[Outcome]) -> bool:
    """Whether there is a record at all and none failed."""
    return bool(outcomes) and all(outcome.status is not Status.FAIL for outcome in outcomes)


def summary(outcomes: Sequence[Outcome]) -> str:
    """The number of records by status."""
    counts = [f"{sum(outcome.status is status for outcome in outcomes)} {status.value}" for status in Status]
    return f"{len(outcomes)} records: {', '.join(counts)}"


def items(path: Path) -> Iterator[Item]:
    """What is to be recomputed below ``path``: a losses file, an extraction or evaluation folder, a folder of these."""
    try:
        if path.is_file():
            yield from losses.items(_loss_records(path))
        elif path.is_dir():
            yield from _folder_items(path)
        else:
            raise UserError(f"{path}: expected a golden file or folder, there is none (looked from {Path.cwd()})")
    except PermissionError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check its permissions") from error


def _folder_items(path: Path) -> Iterator[Item]:
    if folder.is_folder(path):
        yield from extraction.items(path)
        return
    if evaluation.is_folder(path):
        yield from evaluation.items(path)
        return
    for child in sorted(path.iterdir()):
        if child.is_dir():
            yield from _folder_items(child)
        elif child.name == "losses.json":
            yield from losses.items(_loss_records(child))


def _loss_records(path: Path) -> list[Record]:
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot read golden records ({error}); expected a JSON file") from error
    records = content.get("records") if isinstance(content, dict) else None
    keys = {"name", "case", "inputs", "expected", "hyperparameters", "rtol"}
    if not isinstance(records, list) or not all(isinstance(item, dict) and keys <= item.keys() for item in records):
        raise UserError(
            f'{path}: expected {{"records": [...]}} with {", ".join(sorted(keys))} in each, got something else'
        )
    return [Record.read(record) for record in records]
