"""Numbers of a paper beside ours: tables with key columns, printed tables from CSV files, and printed rows with ours.

Our tables stay as they are. A joined table has the printed rows, each with what of ours meets it by key: for every
column both know ours, the printed number and, unless both are whole numbers such as ranks, the difference ours minus
printed. What one of the two lacks stays None in the rows, and is a dash where people read them (``for_reading``).
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
    """Table whose rows are told apart by ``keys``, the last of them naming the item (a token, a side, an arm).

    ``group`` is a column that only ours has (which weights): each of its values is joined with the printed rows anew.
    ``digits`` are decimals by column. ``reading`` is the table as people read it, where that is another one than the
    numbers in full: several of them in a cell, rounded as a paper rounds.
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
class PrintedTable:
    """Numbers of a CSV file: texts, and numbers where a whole column holds them, with their decimals."""

    path: Path
    columns: tuple[str, ...]
    rows: tuple[Mapping[str, Cell], ...]
    digits: Mapping[str, int]


def read_printed(path: Path, keys: Sequence[str], names: Mapping[str, str] | None = None) -> PrintedTable:
    """Returns the table in a CSV file with a head line.

    ``keys`` are columns that stay text even where all their cells are numbers (a token can be "1"). ``names`` maps
    heads to the names we have for them. UserError for what is no such table.
    """
    try:
        lines = list(csv.reader(StringIO(path.read_text(encoding="utf-8-sig"), newline=""), strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else problem
        raise UserError(f"printed={path}: expected a CSV file with a head line, but: {reason}") from problem
    lines = [line for line in lines if any(cell.strip() for cell in line)]
    if len(lines) < 2:
        raise UserError(f"printed={path}: expected a head line and at least one row, got {len(lines)} lines")
    head = [(names or {}).get(name.strip(), name.strip()) for name in lines[0]]
    if len(set(head)) < len(head) or not all(head):
        raise UserError(f"printed={path}: expected a name for every column and none twice, got {', '.join(lines[0])}")
    for number, line in enumerate(lines[1:], start=2):
        if len(line) != len(head):
            raise UserError(f"printed={path}: line {number} has {len(line)} cells, expected {len(head)} as in the head")
    columns: dict[str, Sequence[Cell]] = {}
    digits: dict[str, int] = {}
    for name, cells in zip(head, zip(*lines[1:], strict=True), strict=True):
        texts = [cell.strip() for cell in cells]
        numbers = None if name in keys else _numbers(texts)
        if numbers is not None:
            digits[name] = max(len(text.partition(".")[2]) for text in texts)
        columns[name] = numbers or [text or None for text in texts]
    rows = zip(*columns.values(), strict=True)
    return PrintedTable(path, tuple(head), tuple(dict(zip(head, row, strict=True)) for row in rows), digits)


def _numbers(texts: Sequence[str]) -> list[Cell] | None:
    """Returns the cells as numbers (None for an empty one or a dash), or None when one of them is something else."""
    numbers: list[Cell] = []
    for text in texts:
        try:
            numbers.append(None if text in ("", DASH) else int(text) if text.lstrip("+-").isdigit() else float(text))
        except ValueError:
            return None
    whole = all(isinstance(number, int) for number in numbers if number is not None)
    return numbers if whole else [None if number is None else float(number) for number in numbers]


def counterpart(tables: Sequence[KeyedTable], printed: PrintedTable) -> int:
    """Returns the place of the table that shares most columns of numbers with ``printed``.

    UserError when none shares any.
    """
    shared = [
        len(set(table.columns) & set(printed.columns) - set(table.keys)) * bool(set(table.keys) & set(printed.columns))
        for table in tables
    ]
    if not any(shared):
        known = "; ".join(f"{table.name}: {', '.join(table.columns)}" for table in tables)
        raise UserError(
            f"printed={printed.path}: expected columns of one of our tables ({known}), got {', '.join(printed.columns)}"
        )
    return shared.index(max(shared))


def beside(table: KeyedTable, printed: PrintedTable, *, fold: bool = False) -> KeyedTable:
    """Returns the printed rows in the columns of their file, each with ours that meets it; for each group of ours anew.

    Rows meet by the key columns both have; ours has a number only where ``table`` has a column of that name. ``fold``:
    upper and lower case are the same in keys, for names (never for tokens). UserError when no key is shared.
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
            for ours in [row for row in mine if meets(row, theirs, keys, fold=fold)] or [nothing]:
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
        title=f"Printed numbers of {label_of(printed.path)}, with ours",
        columns=tuple(wide),
        rows=tuple(rows),
        digits=digits,
        reading=None,
    )


def shared_keys(table: KeyedTable, printed: PrintedTable) -> list[str]:
    """Returns the key columns both have. UserError when there is none."""
    keys = [name for name in table.keys if name in printed.columns]
    if not keys:
        raise UserError(
            f"printed={printed.path}: expected a column {' or '.join(table.keys)}, got {', '.join(printed.columns)}"
        )
    return keys


def meets(ours: Mapping[str, Cell], theirs: Mapping[str, Cell], keys: Sequence[str], *, fold: bool = False) -> bool:
    """Returns whether a row of ours and a printed one have the same keys."""
    both = [(ours.get(key), theirs[key]) for key in keys]
    texts = [[str(cell).casefold() if fold else str(cell) for cell in cells] for cells in both if None not in cells]
    return len(texts) == len(both) and all(one == other for one, other in texts)


def label_of(path: Path) -> str:
    """Returns what notes and titles call a file of printed numbers: its folder and name."""
    return "/".join(path.parts[-2:])


def unmet(table: KeyedTable) -> list[str]:
    """Returns the columns of a joined table that have printed numbers and none of ours."""
    names = [name.removesuffix(PRINTED) for name in table.columns if name.endswith(PRINTED)]
    return [name for name in names if all(row.get(name) is None for row in table.rows)]


def for_reading(table: KeyedTable) -> KeyedTable:
    """Returns the table as people read it: its own form, or a dash where ours or the printed number is missing."""
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
