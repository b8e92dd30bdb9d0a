"""Compares our tables with published ones: reads a paper's tables from CSV files and joins them with ours by key.

Our tables stay unchanged. A joined table combines the published rows with our matching rows. For each column present in
both, it shows our number, the published number and, unless both are integers (e.g. ranks), the difference (ours minus
published). Missing values are None in the rows and shown as dashes (``format_missing``).
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path

from attnpo.display.tables import Cell
from attnpo.schema import UserError

PRINTED, DIFFERENCE = " printed", " difference"
DASH = "-"


@dataclass(frozen=True)
class KeyedTable:
    """Table whose rows are identified by ``keys``; the last key names the item (a token, a side, an arm).

    ``group``: column that only our table has (e.g. the kind of weights); the rows of each group are joined with all
    published rows. ``digits``: decimals by column. ``reading``: the table to display instead of the full numbers, e.g.
    with several rounded numbers per cell, as in a paper.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[Mapping[str, Cell], ...]
    keys: tuple[str, ...]
    group: str | None = None
    digits: Mapping[str, int] = field(default_factory=dict)
    reading: "KeyedTable | None" = None


@dataclass(frozen=True)
class PublishedTable:
    """Table from a CSV file: columns of text, or of numbers if all cells are numbers, with their decimals."""

    path: Path
    columns: tuple[str, ...]
    rows: tuple[Mapping[str, Cell], ...]
    digits: Mapping[str, int]


def read_published_table(path: Path, keys: Sequence[str], names: Mapping[str, str] | None = None) -> PublishedTable:
    """Reads a published table from a CSV file with a header line.

    ``keys``: columns that stay text even if all their cells are numbers (a token can be "1"). ``names``: our column
    names, by header.

    Raises:
        UserError: the file is not a CSV table with a header line.
    """
    try:
        lines = list(csv.reader(StringIO(path.read_text(encoding="utf-8-sig"), newline=""), strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else problem
        raise UserError(f"printed={path}: cannot be read as a CSV file with a header line ({reason})") from problem
    lines = [line for line in lines if any(cell.strip() for cell in line)]
    if len(lines) < 2:
        raise UserError(f"printed={path}: expected a header line and at least one row, got {len(lines)} lines")
    head = [(names or {}).get(name.strip(), name.strip()) for name in lines[0]]
    if len(set(head)) < len(head) or not all(head):
        raise UserError(f"printed={path}: expected unique names for all columns, got {', '.join(lines[0])}")
    for number, line in enumerate(lines[1:], start=2):
        if len(line) != len(head):
            raise UserError(f"printed={path}: line {number} has {len(line)} cells, but the header has {len(head)}")
    columns: dict[str, Sequence[Cell]] = {}
    digits: dict[str, int] = {}
    for name, cells in zip(head, zip(*lines[1:], strict=True), strict=True):
        texts = [cell.strip() for cell in cells]
        numbers = None if name in keys else _parse_numbers(texts)
        if numbers is not None:
            digits[name] = max(len(text.partition(".")[2]) for text in texts)
        columns[name] = numbers or [text or None for text in texts]
    rows = zip(*columns.values(), strict=True)
    return PublishedTable(path, tuple(head), tuple(dict(zip(head, row, strict=True)) for row in rows), digits)


def _parse_numbers(texts: Sequence[str]) -> list[Cell] | None:
    """Parses cells as numbers (None for an empty cell or a dash); returns None if a cell is not a number."""
    numbers: list[Cell] = []
    for text in texts:
        try:
            numbers.append(None if text in ("", DASH) else int(text) if text.lstrip("+-").isdigit() else float(text))
        except ValueError:
            return None
    whole = all(isinstance(number, int) for number in numbers if number is not None)
    return numbers if whole else [None if number is None else float(number) for number in numbers]


def find_matching_table(tables: Sequence[KeyedTable], printed: PublishedTable) -> int:
    """Returns the index of the table that shares the most numeric columns with ``printed``.

    Raises:
        UserError: no table shares a numeric column.
    """
    shared = [
        len(set(table.columns) & set(printed.columns) - set(table.keys)) * bool(set(table.keys) & set(printed.columns))
        for table in tables
    ]
    if not any(shared):
        known = "; ".join(f"{table.name}: {', '.join(table.columns)}" for table in tables)
        raise UserError(
            f"printed={printed.path}: expected the columns of one of our tables ({known}), "
            f"got {', '.join(printed.columns)}"
        )
    return shared.index(max(shared))


def join_published(table: KeyedTable, printed: PublishedTable, *, fold: bool = False) -> KeyedTable:
    """Joins published rows with our matching rows, separately for each of our groups.

    Rows match if the key columns present in both are equal. ``fold``: whether to ignore case in keys, which is correct
    for names but not for tokens.

    Raises:
        UserError: no key column is shared.
    """
    keys = shared_keys(table, printed)
    values = [name for name in printed.columns if name not in keys and name in printed.digits]
    only_ours = [name for name in (table.group, *table.keys) if name is not None and name not in printed.columns]
    wide = [*only_ours]
    for name in printed.columns:
        known = name in table.columns
        fractions = bool(printed.digits.get(name)) or any(isinstance(row.get(name), float) for row in table.rows)
        parts = [(name, known), (name + PRINTED, True), (name + DIFFERENCE, known and fractions)]
        wide += [part for part, shown in parts if shown] if name in values else [name]
    of_group, nothing = table.group or "", dict[str, Cell]()
    rows: list[Mapping[str, Cell]] = []
    for group in dict.fromkeys(row.get(of_group) for row in table.rows):
        mine = [row for row in table.rows if row.get(of_group) == group]
        for theirs in printed.rows:
            for ours in [row for row in mine if has_same_keys(row, theirs, keys, fold=fold)] or [nothing]:
                row = {**theirs, **{name: ours.get(name, theirs.get(name)) for name in keys}, of_group: group}
                row |= {name: ours.get(name) for name in (*values, *table.keys) if name not in keys}
                row |= {name + PRINTED: theirs[name] for name in values}
                row |= {name + DIFFERENCE: _difference(ours.get(name), theirs[name]) for name in values}
                rows.append({name: row[name] for name in wide})
    digits = dict(table.digits)
    for name in values:
        digits[name] = max(digits.get(name, 0), printed.digits[name])
        digits |= {name + PRINTED: printed.digits[name], name + DIFFERENCE: digits[name]}
    return replace(
        table,
        name=f"{table.name}{PRINTED}",
        title=f"Published numbers of {file_label(printed.path)}, with ours",
        columns=tuple(wide),
        rows=tuple(rows),
        digits=digits,
        reading=None,
    )


def shared_keys(table: KeyedTable, printed: PublishedTable) -> list[str]:
    """Returns the key columns present in both tables.

    Raises:
        UserError: no key column is shared.
    """
    keys = [name for name in table.keys if name in printed.columns]
    if not keys:
        raise UserError(
            f"printed={printed.path}: expected a column {' or '.join(table.keys)}, got {', '.join(printed.columns)}"
        )
    return keys


def has_same_keys(
    ours: Mapping[str, Cell], theirs: Mapping[str, Cell], keys: Sequence[str], *, fold: bool = False
) -> bool:
    """Returns whether one of our rows and a published row have the same keys."""
    both = [(ours.get(key), theirs[key]) for key in keys]
    texts = [[str(cell).casefold() if fold else str(cell) for cell in cells] for cells in both if None not in cells]
    return len(texts) == len(both) and all(one == other for one, other in texts)


def file_label(path: Path) -> str:
    """Returns a file's name with its parent folder, used as a label in notes and titles."""
    return "/".join(path.parts[-2:])


def unmatched_columns(table: KeyedTable) -> list[str]:
    """Returns the columns of a joined table that have published numbers but none of ours."""
    names = [name.removesuffix(PRINTED) for name in table.columns if name.endswith(PRINTED)]
    return [name for name in names if all(row.get(name) is None for row in table.rows)]


def format_missing(table: KeyedTable) -> KeyedTable:
    """Returns the table for display: ``table.reading`` if set, otherwise ``table`` with dashes for missing numbers."""
    if table.reading is not None:
        return table.reading
    compared = [name.removesuffix(PRINTED) for name in table.columns if name.endswith(PRINTED)]
    if not compared:
        return table
    dashed = {name + part for name in compared for part in ("", PRINTED, DIFFERENCE)}
    rows = [{name: DASH if row[name] is None and name in dashed else row[name] for name in row} for row in table.rows]
    return replace(table, rows=tuple(rows))


def _difference(ours: Cell, theirs: Cell) -> Cell:
    if isinstance(ours, int | float) and isinstance(theirs, int | float):
        return ours - theirs
    return None
