"""JSON rows read one by one, so that what is wrong with a row costs that row and not the file.

A columnar reader gives every column one type: it refuses a file for one lone surrogate, and where it falls back on a
mixed type, such a text has come back as an empty one (datasets 5.2). Here a text in one row and a number in another, a
lone surrogate, a byte that is no UTF-8 are left to the adapters. What is no JSON at all is an error with file and line.
"""

import gzip
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Protocol, runtime_checkable
from zlib import error as ZlibError

from attnpo.system.errors import UserError
from attnpo.system.files import Json, parse_json


@runtime_checkable
class Table(Protocol):
    """Rows by number with named columns: what a ``datasets.Dataset`` and ``Lines`` have in common."""

    @property
    def column_names(self) -> list[str]:
        """Names of all columns."""

    def __len__(self) -> int:
        """Number of rows."""

    def select(self, indices: Sequence[int]) -> Iterable[Mapping[str, object]]:
        """Returns the rows with these numbers."""


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
        """Returns the rows with these numbers."""
        return [self.rows[index] for index in indices]


@dataclass(frozen=True)
class LinesOnDisk:
    """Rows of files with an object on each line, parsed when they are asked for.

    Row i begins at the byte ``begins[i]`` of ``files[numbers[i]]``. ``path``: the option's value.
    """

    files: Sequence[Path]
    numbers: Sequence[int]
    begins: Sequence[int]
    column_names: list[str]
    path: str

    def __len__(self) -> int:
        return len(self.begins)

    def select(self, indices: Sequence[int]) -> Iterator[Mapping[str, object]]:
        """Yields the rows with these numbers. UserError where a file has changed since it was looked through."""
        with ExitStack() as stack:
            opened = [stack.enter_context(file.open("rb")) for file in self.files]
            for index in indices:
                file = opened[self.numbers[index]]
                file.seek(self.begins[index])
                row = _parsed(_decoded(file.readline()))
                if not isinstance(row, dict):
                    name = self.files[self.numbers[index]].name
                    raise UserError(f"data.path={self.path}: {name} was changed while it was read; start again")
                yield {name: row.get(name) for name in self.column_names}


def read_lines(files: Iterable[Path], path: str) -> Table:
    """Returns all rows of JSON files: an object per line, or one array of objects per file.

    Of plain files with lines no row is held: they are looked through, and parsed again where they are asked for.
    Bytes that are no UTF-8 become lone surrogates, which the adapters refuse row by row.

    Raises:
        UserError: a line holds no JSON object; the text names file and line, ``path`` is the option's value.
    """
    files = list(files)
    if any(file.suffix == ".gz" or _begins_array(file, path) for file in files):
        rows = [row for file in files for row in _rows(file, path)]
        names = list(dict.fromkeys(name for row in rows for name in row))
        return Lines([{name: row.get(name) for name in names} for row in rows], names)
    columns, numbers, begins = dict[str, None](), array("q"), array("q")
    for number, file in enumerate(files):
        with _reading(file, path), file.open("rb") as opened:
            for _, begin, row in _lines(opened, file, path):
                columns |= dict.fromkeys(row)
                numbers.append(number)
                begins.append(begin)
    return LinesOnDisk(files, numbers, begins, list(columns), path)


def content_of(file: Path, path: str) -> bytes:
    """Returns the bytes of a file, unpacked where its name ends in .gz. UserError naming file and
    ``path`` otherwise.
    """
    with _reading(file, path):
        return gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()


@contextmanager
def _reading(file: Path, path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, ZlibError) as error:
        raise UserError(f"data.path={path}: {file.name} cannot be read ({error}); write or copy it again") from error


def _begins_array(file: Path, path: str) -> bool:
    with _reading(file, path), file.open("rb") as opened:
        return next((text for line in opened if (text := _decoded(line).strip("\ufeff \t\r\n"))), "").startswith("[")


def _rows(file: Path, path: str) -> Iterator[dict[str, Json]]:
    content = content_of(file, path)
    text = _decoded(content)
    whole = _parsed(text) if text.lstrip().startswith("[") else None
    if not isinstance(whole, list):
        yield from (row for _, _, row in _lines(BytesIO(content), file, path))
        return
    for number, row in enumerate(whole, 1):
        yield _object(row, number, file, path)


def _lines(lines: Iterable[bytes], file: Path, path: str) -> Iterator[tuple[int, int, dict[str, Json]]]:
    """Yields the number of each line that is not blank, its first byte and what it holds."""
    begin = 0
    for number, line in enumerate(lines, 1):  # of bytes: U+2028 and others end no line of JSON
        text = _decoded(line).removesuffix("\n")
        if text.strip():
            row = _parsed(text)
            if isinstance(row, Exception):
                raise UserError(
                    f"data.path={path}: {file.name}, line {number} is not JSON ({row}): {text[:40]!r}; expected one "
                    "JSON object per line, in UTF-8. A file that was cut off must be written or copied again"
                ) from row
            yield number, begin, _object(row, number, file, path)
        begin += len(line)


def _object(row: Json, number: int, file: Path, path: str) -> dict[str, Json]:
    if not isinstance(row, dict):
        raise UserError(
            f"data.path={path}: {file.name}, line {number} holds {type(row).__name__} {str(row)[:40]!r}, expected "
            "one JSON object per row"
        )
    return row


def _decoded(content: bytes) -> str:
    """Returns text with what is no UTF-8 as lone surrogates, without a mark of byte order at its beginning."""
    return content.decode("utf-8", errors="surrogateescape").removeprefix("\ufeff")


def _parsed(text: str) -> Json | Exception:
    """Returns the value of a JSON text, or the exception that says why it is none."""
    try:
        value: Json = parse_json(text)
    except ValueError as error:
        return error
    return value
