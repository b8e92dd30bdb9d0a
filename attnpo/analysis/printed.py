"""Numbers of a paper beside ours: tables with key columns, printed tables from CSV files, and both joined by key.

A joined table has, for every column both know, ours, the printed number and, unless they are whole numbers such as
ranks, the difference ours minus printed. What
one of the two lacks stays None in the rows, and is a dash where people read them (``for_reading``).
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path

from attnpo.analysis.tables import DEFAULT_DIGITS, Cell, format_cell
from attnpo.schema import UserError

PRINTED, DIFFERENCE = " printed", " difference"
DASH = "-"


@dataclass(frozen=True)
class KeyedTable:
    """A table whose rows are told apart by ``keys``, the last of them naming the item (a token, a side, an arm).

    ``group`` is a column that only ours has (which weights): each of its values is joined with the printed rows anew.
    ``digits`` are decimals by column.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[Mapping[str, Cell], ...]
    keys: tuple[str, ...]
    group: str | None = None
    digits: Mapping[str, int] | None = None

    def groups(self) -> list[Cell]:
        """The values of ``group`` in their order; [None] for a table without one."""
        return list(dict.fromkeys(None if self.group is None else row.get(self.group) for row in self.rows))

    def of(self, value: Cell) -> tuple[Mapping[str, Cell], ...]:
        """The rows of one group."""
        return tuple(row for row in self.rows if self.group is None or row.get(self.group) == value)


@dataclass(frozen=True)
class PrintedTable:
    """The numbers of a CSV file: texts, and numbers where a whole column holds them, with their decimals."""

    path: Path
    columns: tuple[str, ...]
    rows: tuple[Mapping[str, Cell], ...]
    digits: Mapping[str, int]


def read_printed(path: Path, keys: Sequence[str], names: Mapping[str, str] | None = None) -> PrintedTable:
    """The table in a CSV file with a head line.

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
    rows: list[dict[str, Cell]] = [{} for _ in lines[1:]]
    digits: dict[str, int] = {}
    for place, name in enumerate(head):
        texts = [line[place].strip() for line in lines[1:]]
        cells: Sequence[Cell] | None = None if name in keys else _numbers(texts)
        if cells is not None:
            digits[name] = max(len(text.partition(".")[2]) for text in texts)
        for row, cell in zip(rows, cells or [text or None for text in texts], strict=True):
            row[name] = cell
    return PrintedTable(path, tuple(head), tuple(rows), digits)


def _numbers(texts: Sequence[str]) -> list[Cell] | None:
    """The cells as numbers (None for an empty one or a dash), or None when one of them is something else."""
    found: list[Cell] = []
    for text in texts:
        try:
            found.append(None if text in ("", DASH) else int(text) if text.lstrip("+-").isdigit() else float(text))
        except ValueError:
            return None
    whole = all(isinstance(number, int) for number in found if number is not None)
    return found if whole else [None if number is None else float(number) for number in found]


def counterpart(tables: Sequence[KeyedTable], printed: PrintedTable) -> int:
    """The place of the table that shares most columns of numbers with ``printed``; UserError when none shares any."""
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
    """``table`` joined with the printed numbers by the key columns both have.

    Within each group a printed row without ours stands below ours where all keys but the last are met there (the same
    model and side); other printed rows without ours come last, once. ``fold``: upper and lower case are the same in
    keys, for names (never for tokens). UserError when no key is shared.
    """
    keys = [name for name in table.keys if name in printed.columns]
    if not keys:
        raise UserError(
            f"printed={printed.path}: expected a column {' or '.join(table.keys)}, got {', '.join(printed.columns)}"
        )
    values = [name for name in printed.columns if name not in keys and name in printed.digits]
    texts = [name for name in printed.columns if name not in keys and name not in values]
    columns = [*dict.fromkeys([*texts, *table.columns, *values])]
    compared = {name for name in values if name in table.columns and printed.digits[name]}
    wide = [part for name in columns for part in _parts(name, name in values, name in compared)]

    def joined(ours: Mapping[str, Cell] | None, theirs: Mapping[str, Cell] | None, group: Cell) -> dict[str, Cell]:
        row: dict[str, Cell] = dict(ours or {})
        if theirs is not None:
            row |= {name: theirs[name] for name in (texts if ours is not None else [*keys, *texts])}
        if ours is None and table.group is not None:
            row[table.group] = group
        for name in values:
            mine, other = (ours or {}).get(name), (theirs or {}).get(name)
            row[name], row[name + PRINTED] = mine, other
            if name in compared:
                row[name + DIFFERENCE] = _difference(mine, other)
        return {name: row.get(name) for name in wide}

    rows: list[dict[str, Cell]] = []
    met: set[int] = set()
    for group in table.groups():
        mine = table.of(group)
        found: set[int] = set()
        for ours in mine:
            places = [
                i for i, row in enumerate(printed.rows) if all(_same(ours.get(key), row[key], fold) for key in keys)
            ]
            found |= set(places)
            rows += [joined(ours, printed.rows[i], group) for i in places] or [joined(ours, None, group)]
        heads = {tuple(str(ours.get(key)) for key in keys[:-1]) for ours in mine}
        for i, row in enumerate(printed.rows):
            if i not in found and len(keys) > 1 and tuple(str(row[key]) for key in keys[:-1]) in heads:
                rows.append(joined(None, row, group))
                found.add(i)
        met |= found
    rows += [joined(None, row, None) for i, row in enumerate(printed.rows) if i not in met]
    digits = dict(table.digits or {})
    for name in values:
        digits[name] = max(digits.get(name, 0), printed.digits[name])
        digits |= {name + PRINTED: printed.digits[name], name + DIFFERENCE: digits[name]}
    return replace(table, columns=tuple(wide), rows=tuple(rows), digits=digits)


def unmet(table: KeyedTable) -> list[str]:
    """The columns of a joined table that have printed numbers and none of ours."""
    names = [name.removesuffix(PRINTED) for name in table.columns if name.endswith(PRINTED)]
    return [name for name in names if all(row.get(name) is None for row in table.rows)]


def for_reading(table: KeyedTable) -> KeyedTable:
    """The table as people read it: a dash where ours or the printed number is missing.

    Where ours has nothing of a printed column at all, both share a column: "- / 60.77".
    """
    compared = [name.removesuffix(PRINTED) for name in table.columns if name.endswith(PRINTED)]
    if not compared:
        return table
    alone = unmet(table)
    dashed = {name + part for name in compared for part in ("", PRINTED, DIFFERENCE)} | {table.group}
    heads = {name: f"{name} (ours / printed)" if name in alone else name for name in table.columns}
    columns = [heads[name] for name in table.columns if name.removesuffix(PRINTED) not in alone or name in alone]
    rows: list[dict[str, Cell]] = []
    for row in table.rows:
        told: dict[str, Cell] = {
            name: DASH if row.get(name) is None and name in dashed else row.get(name) for name in table.columns
        }
        for name in alone:
            other = format_cell(row.get(name + PRINTED), (table.digits or {}).get(name, DEFAULT_DIGITS)) or DASH
            told[heads[name]] = f"{DASH} / {other}"
        rows.append({name: told[name] for name in columns})
    return replace(table, columns=tuple(columns), rows=tuple(rows))


def in_brief(table: KeyedTable) -> KeyedTable:
    """A joined table without our own columns that have no printed number; any other as it is."""
    printed = {name.removesuffix(PRINTED) for name in table.columns if name.endswith(PRINTED)}
    if not printed:
        return table
    texts = {name for name in table.columns if any(isinstance(row.get(name), str) for row in table.rows)}
    kept = texts | {name + part for name in printed for part in ("", PRINTED, DIFFERENCE)}
    return replace(table, columns=tuple(name for name in table.columns if name in kept))


def _parts(name: str, printed: bool, compared: bool) -> list[str]:
    if not printed:
        return [name]
    return [name, name + PRINTED, name + DIFFERENCE] if compared else [name, name + PRINTED]


def _same(ours: Cell, theirs: Cell, fold: bool) -> bool:
    if ours is None or theirs is None:
        return False
    return str(ours).casefold() == str(theirs).casefold() if fold else str(ours) == str(theirs)


def _difference(ours: Cell, theirs: Cell) -> Cell:
    if isinstance(ours, int | float) and isinstance(theirs, int | float):
        return ours - theirs
    return None
