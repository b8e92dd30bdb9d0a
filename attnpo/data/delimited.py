"""CSV and TSV: a first line with the names of the columns, then one row per pair, every cell a text.

No cell is guessed to be a number, a date or a missing value: "42" and "NaN" stay texts. An empty cell is a missing
value (None), as the libraries that write tables mean it.
"""

import csv
import io
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from attnpo.data.json_lines import Lines, content_of
from attnpo.system.errors import UserError

_LOG = logging.getLogger(__name__)

_MARKS = {".csv": ",", ".tsv": "\t"}
_NAMED = {",": "commas", "\t": "tabs", ";": "semicolons"}
DELIMITED = (*_MARKS, *(f"{suffix}.gz" for suffix in _MARKS))

# Cells in which a library may have spelled out a missing value.
_LIKE_MISSING = frozenset({"nan", "null", "none", "n/a", "<na>"})


def read_delimited(files: Iterable[Path], path: str) -> Lines:
    """Returns all rows of CSV or TSV files of one header; a row's empty cells are None.

    Logs how many cells hold nothing but a word for a missing value, which are texts like others.

    Raises:
        UserError: a file is no UTF-8, its header lacks or repeats a name, is divided by another mark or differs from
            that of the first file, or a row has another number of cells; the text names file and line.
    """
    rows: list[dict[str, object]] = []
    names: list[str] | None = None
    for file in files:
        where = f"data.path={path}: {file.name}"
        cells = _cells(file, path, where)
        header = next(cells, None)
        if header is None:
            continue
        found = _names(header[1], _mark(file), where)
        if names is not None and found != names:
            raise UserError(
                f"{where} has the columns {', '.join(found)}, and the first file has {', '.join(names)}: give all "
                "files of a split one header"
            )
        names = found
        rows += _rows(cells, names, where)
    _tell_missing(rows, path)
    named = [name for name in names or [] if name]
    return Lines([{name: row[name] for name in named} for row in rows], named, headed=True)


def _mark(file: Path) -> str:
    return _MARKS[Path(file.name.removesuffix(".gz")).suffix]


def _cells(file: Path, path: str, where: str) -> Iterator[tuple[int, list[str]]]:
    """Yields the cells of each row that is not blank, with the number of its last line."""
    try:
        text = content_of(file, path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{where}, line {line} is not UTF-8 (byte {error.object[error.start]:#04x}): save the file as UTF-8, which "
            'spreadsheets call "CSV UTF-8"'
        ) from error
    before = csv.field_size_limit(max(len(text), 1))
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=_mark(file), strict=True)
    try:
        yield from [(reader.line_num, row) for row in reader if row]
    except csv.Error as error:
        raise UserError(
            f"{where}, line {reader.line_num} cannot be read ({error}): put a cell that holds quotes, line breaks or "
            'the dividing mark between quotes, and write a quote inside it twice ("")'
        ) from error
    finally:
        csv.field_size_limit(before)


def _names(header: list[str], mark: str, where: str) -> list[str]:
    """Returns the names of the columns; "" only for the first, where libraries put the row's number."""
    names = [name.strip() for name in header]
    other = next((one for one in _NAMED if one != mark and len(names) == 1 and one in names[0]), None)
    if other is not None:
        raise UserError(
            f"{where}, line 1 is divided by {_NAMED[other]}, expected {_NAMED[mark]}: save it with {_NAMED[mark]}"
            + (", or name it .tsv" if other == "\t" else "")
        )
    unnamed = [place for place, name in enumerate(names[1:], 2) if not name]
    if unnamed:
        raise UserError(
            f"{where}, line 1 names no column {unnamed[0]}: expected a name for every column in the first line, such "
            f"as {mark.join(('prompt', 'chosen', 'rejected'))!r}"
        )
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise UserError(f"{where}, line 1 names {', '.join(twice)} twice: give every column its own name")
    return names


def _rows(cells: Iterator[tuple[int, list[str]]], names: list[str], where: str) -> Iterator[dict[str, object]]:
    for line, row in cells:
        if len(row) != len(names):
            raise UserError(
                f"{where}, the row that ends in line {line} has {len(row)} cells and the first line names "
                f"{len(names)} columns: put a cell that holds the dividing mark or a line break between quotes"
            )
        yield {name: cell or None for name, cell in zip(names, row, strict=True)}


def _tell_missing(rows: list[dict[str, object]], path: str) -> None:
    """Warns of cells that say in a word that they are missing."""
    like = [
        number
        for number, row in enumerate(rows)
        if any(isinstance(cell, str) and cell.strip().lower() in _LIKE_MISSING for cell in row.values())
    ]
    if like:
        _LOG.warning(
            "data.path=%s: %d rows have a cell that is nothing but NaN, null, None or N/A (first: row %d), read as a "
            "text: leave cells empty where a value is missing",
            path,
            len(like),
            like[0],
        )
