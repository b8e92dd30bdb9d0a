"""``attnpo.report ranks``: printed result tables held against themselves and against each other."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from attnpo.display.printed import KeyedTable, label_of
from attnpo.display.tables import Cell
from attnpo.lab.reports.misprints import (
    PRINTED,
    RECOMPUTED,
    ROUNDS,
    Misprint,
    Table,
    impossible_rounds,
    interval_misprints,
    may_be_round,
    rank_misprints,
    rank_rows,
    rank_sum,
    read_tables,
    shared_cells,
    with_other_cell,
)
from attnpo.lab.reports.output import publish
from attnpo.lab.reports.report_config import RANKS

KEYS = ("file", "base_model", "method")


def ranks_report(paths: Sequence[Path], output: Path, mark: str) -> None:
    """Prints the recomputed average ranks of every table and all that does not follow from its numbers.

    UserError for a file that is no table of results.
    """
    tables = [table for path in paths for table in read_tables(path)]
    both = [(single, rounds) for single in tables for rounds in tables if may_be_round(single, rounds)]
    of_rounds = [item for single, rounds in both for item in impossible_rounds(single, rounds)]
    misprints = [
        *(item for table in tables for item in (*rank_misprints(table), *interval_misprints(table))),
        *(item for item, _ in of_rounds),
    ]
    notes = [line for table in tables for line in told(table)]
    if both:
        cells = sum(len(shared_cells(single, rounds)) for single, rounds in both)
        notes.append(
            f"single runs beside means over {ROUNDS} rounds: {cells - len(of_rounds)} of {cells} can be one of them"
        )
    notes += [with_other_cell(item, mean) for item, mean in of_rounds if item.table.has_ranks]
    listed = [misprint_table(misprints)] if misprints else []
    publish("Average ranks, recomputed", [*listed, *map(ranks_table, tables)], notes, output, RANKS, mark)


def told(table: Table) -> list[str]:
    """Returns what is said of one table: how many printed ranks follow from its scores, whether they can be ranks at
    all.
    """
    name = f"{label_of(table.path)}, {table.model}" if table.model else label_of(table.path)
    lines = [f"{name}: no scores, left out: {', '.join(table.lacking)}"] if table.lacking else []
    if not table.has_ranks:
        return [*lines, f"{name}: prints no average rank"]
    wrong, known = len(rank_misprints(table)), sum(row[PRINTED] is not None for row in rank_rows(table))
    lines.append(f"{name}: {known - wrong} of {known} printed average ranks follow from the printed scores")
    found, expected = rank_sum(table)
    if found is not None and found != expected:
        lines.append(
            f"{name}: the printed ranks of all rows and columns sum to {found:g}; ranks of {len(table.rows)} rows over "
            f"{len(table.columns)} columns sum to {expected:g}, so one wrong score cannot explain it"
        )
    return lines


def ranks_table(table: Table) -> KeyedTable:
    """Returns every row of a printed table with its recomputed average rank beside the printed one."""
    rows: list[Mapping[str, Cell]] = [
        {"file": label_of(table.path), "base_model": table.model, **row} for row in rank_rows(table)
    ]
    columns = tuple(rows[0]) if rows else KEYS
    digits = {**dict.fromkeys((RECOMPUTED, PRINTED), 2), **{name: table.digits[name] for name in table.columns}}
    title = f"{label_of(table.path)}: {table.model}" if table.model else label_of(table.path)
    shown = tuple(name for name in columns if name not in KEYS[:2])
    told = tuple({key: row[key] for key in shown} for row in rows)
    whole = KeyedTable("ranks", title, columns, tuple(rows), KEYS, None, digits)
    return replace(whole, reading=replace(whole, columns=shown, rows=told, keys=KEYS[2:]))


def misprint_table(misprints: Sequence[Misprint]) -> KeyedTable:
    """Returns everything that does not follow from the printed numbers, a row each."""
    rows = tuple(
        {
            "file": label_of(item.table.path),
            "base_model": item.table.model,
            "method": item.method,
            "column": item.column,
            "printed": item.printed,
            "expected": item.expected,
        }
        for item in misprints
    )
    return KeyedTable("misprints", "Does not follow from the printed numbers", tuple(rows[0]), rows, KEYS)
