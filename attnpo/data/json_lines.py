"""JSON rows read one by one, so that what is wrong with a row costs that row and not the file.

A columnar reader gives every column one type: it refuses a file for one lone surrogate, and where it falls back on a
mixed type, such a text has come back as an empty one (datasets 5.2). Here a text in one row and a number in another, a
lone surrogate, a byte that is no UTF-8 are left to the adapters. What is no JSON at all is an error with file and line.
"""

import gzip
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable
from zlib import error as ZlibError

from attnpo.errors import UserError
from attnpo.files import Json, parse_json


@runtime_checkable
class Table(Protocol):
    """Rows by number with named columns: what a ``datasets.Dataset`` and ``Lines`` have in common."""

    @property
    def column_names(self) -> list[str]:
        """Names of all columns."""

    def __len__(self) -> int:
        """Number of rows."""

    def select(self, indices: Sequence[int]) -> Iterable[Mapping[str, object]]:
        """The rows with these numbers."""


@dataclass(frozen=True)
class Lines:
    """Rows in memory, each with every column (None where its line has no such key).

    ``headed``: the columns are those that a first line names.
    """

    rows: Sequence[Mapping[str, object]]
    column_names: list[str]
    headed: bool = False

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, indices: Sequence[int]) -> list[Mapping[str, object]]:
        """The rows with these numbers."""
        return [self.rows[index] for index in indices]


def read_lines(files: Iterable[Path], path: str) -> Lines:
    """All rows of JSON files: an object per line, or one array of objects per file.

    Bytes that are no UTF-8 become lone surrogates, which the adapters refuse row by row.

    Raises:
        UserError: a line holds no JSON object; the text names file and line, ``path`` is the option's value.
    """
    rows = [row for file in files for row in _rows(file, path)]
    names = list(dict.fromkeys(name for row in rows for name in row))
    return Lines([{name: row.get(name) for name in names} for row in rows], names)


def content_of(file: Path, path: str) -> bytes:
    """The bytes of a file, unpacked where its name ends in .gz. UserError naming file and ``path`` otherwise."""
    try:
        return gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (OSError, EOFError, ZlibError) as error:
        raise UserError(f"data.path={path}: {file.name} cannot be read ({error}); write or copy it again") from error


def _rows(file: Path, path: str) -> Iterator[dict[str, Json]]:
    text = content_of(file, path).decode("utf-8-sig", errors="surrogateescape")
    whole = _parsed(text) if text.lstrip().startswith("[") else None
    numbered = enumerate(whole, 1) if isinstance(whole, list) else _lines(text, file, path)
    for number, row in numbered:
        if not isinstance(row, dict):
            raise UserError(
                f"data.path={path}: {file.name}, line {number} holds {type(row).__name__} {str(row)[:40]!r}, expected "
                "one JSON object per row"
            )
        yield row


def _lines(text: str, file: Path, path: str) -> Iterator[tuple[int, Json]]:
    # Not splitlines: U+2028 and others end no line of JSON.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        row = _parsed(line)
        if isinstance(row, Exception):
            raise UserError(
                f"data.path={path}: {file.name}, line {number} is not JSON ({row}): {line[:40]!r}; expected one JSON "
                "object per line, in UTF-8. A file that was cut off must be written or copied again"
            ) from row
        yield number, row


def _parsed(text: str) -> Json | Exception:
    """The value of a JSON text, or the exception that says why it is none."""
    try:
        value: Json = parse_json(text)
    except ValueError as error:
        return error
    return value
