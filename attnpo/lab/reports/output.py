"""Prints a report's tables and writes them as Markdown, LaTeX, CSV and an HTML page to the report's folder."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

from attnpo.display.output import make_console, print_sections, to_latex, to_markdown
from attnpo.display.page import Paragraph, Section, TableBlock, report_page
from attnpo.display.printed import KeyedTable, format_missing, unmatched_columns
from attnpo.display.tables import DEFAULT_DIGITS, Cell, format_cell, table_csv
from attnpo.run.folders import make_folder
from attnpo.schema import UserError
from attnpo.system.files import parse_json, write_atomically

MARK = "report.json"  # in a report's folder: digest of the command that wrote it
RUNS = ("run",)  # the keys of a listing of runs
Rows = Sequence[Mapping[str, Cell]]


def publish_report(
    title: str,
    tables: Sequence[KeyedTable],
    notes: Sequence[str],
    folder: Path,
    stem: str,
    mark: str,
    sections: Sequence[Section] = (),
    *,
    by: str | None = None,
    why: str = "",
) -> None:
    """Prints the tables and notes, and writes STEM.md, STEM.tex, STEM.csv and report.html with added ``sections``.

    The CSV contains all tables: one column names the table, and cells in the columns of other tables are empty.
    ``mark``: digest of the command. ``by``: tables with this column are split by its values, and the parts are printed
    side by side. ``why``: explanation to print if some of a paper's columns have no counterpart in our tables.
    """
    notes = [*dict.fromkeys(notes), *unmatched_column_notes(tables, why)]
    below = [Section("Notes", [Paragraph(line) for line in notes])] if notes else []
    read = [format_missing(table) for table in tables]
    console = make_console()
    print_sections(console, [*(section for table in read for section in terminal_sections(table, by)), *below])
    told = [Section(table.title, [TableBlock(table.columns, table.rows, digits=table.digits)]) for table in read]
    columns = ["table", *dict.fromkeys(name for table in tables for name in table.columns)]
    texts = {
        f"{stem}.md": to_markdown([*told, *below], title),
        f"{stem}.tex": to_latex([*told, *below], title),
        f"{stem}.csv": table_csv(columns, [{"table": table.name, **row} for table in tables for row in table.rows]),
        "report.html": report_page(title, [*told, *below, *sections]),
    }
    make_folder(folder)
    for name, text in {MARK: json.dumps({"mark": mark, "files": sorted(texts)}) + "\n", **texts}.items():
        write_atomically(folder / name, text)
    console.print(f"  {folder}/report.html, {stem}.md, {stem}.tex, {stem}.csv", highlight=False, markup=False)


def terminal_sections(table: KeyedTable, by: str | None) -> list[Section]:
    """Formats a table for the terminal: headers wrap between words, and the table's parts are placed side by side."""
    table = drop_constant_columns(table)
    digits = {name.replace("_", " "): count for name, count in table.digits.items()}

    def block(part: str, columns: Sequence[str], rows: Rows) -> TableBlock:
        naming = len(list(takewhile(lambda name: name in table.keys, columns))) or 1
        cells = [[row.get(name) for name in columns] for row in rows]
        return TableBlock([name.replace("_", " ") for name in columns], cells, part, digits, naming=naming)

    # A table with a column ``by`` that is not its last key is split by its group and by ``by``.
    if by is None or by not in table.columns or table.keys[-1] == by or table.group is None:
        return [Section(table.title, [block("", table.columns, table.rows)])]
    outer = [name for name in table.keys if name not in (by, table.keys[-1])]
    parts: dict[str, dict[str, list[Mapping[str, Cell]]]] = {}
    for row in table.rows:
        heading = ", ".join(str(row[name]) for name in [table.group, *outer])
        parts.setdefault(heading, {}).setdefault(str(row[by]), []).append(row)
    left = [name for name in table.columns if name not in (table.group, by, *outer)]
    return [
        Section(f"{table.title}: {heading}", [block(part, left, rows) for part, rows in found.items()])
        for heading, found in parts.items()
    ]


def drop_constant_columns(table: KeyedTable) -> KeyedTable:
    """Drops the columns of a run table that have the same value in all rows, and adds these values to the title."""
    if table.keys != RUNS or len(table.rows) < 2:
        return table
    first = table.rows[0]
    same = [name for name in table.columns if all(row.get(name) == first.get(name) for row in table.rows)]
    told = ", ".join(f"{name} {format_cell(first.get(name), table.digits.get(name, DEFAULT_DIGITS))}" for name in same)
    return replace(
        table,
        columns=tuple(name for name in table.columns if name not in same),
        title=f"{table.title} (same in all rows: {told})" if told else table.title,
    )


def unmatched_column_notes(tables: Sequence[KeyedTable], why: str) -> list[str]:
    """Returns a note on a paper's columns that are missing from our tables, followed by ``why``, if there are any."""
    lacking = dict.fromkeys(name for table in tables for name in unmatched_columns(table))
    reason = f": {why}" if why else ""
    return [f"printed columns that our tables lack: {', '.join(lacking)}{reason}"] if lacking else []


def check_output_folder(folder: Path, mark: str, *, instead: str = "name= to another folder below `output`") -> None:
    """Checks that a folder is empty or contains an earlier report of the same command.

    ``instead``: the KEY=VALUE that the error message suggests.

    Raises:
        UserError: the folder is unreadable or contains anything else.
    """
    try:
        names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    except OSError as problem:
        raise UserError(f"output=: {folder} cannot be read as a folder ({problem.strerror})") from problem
    held = [name for name in names if not name.startswith(".")]  # its lock
    if not held:
        return
    try:
        before = parse_json((folder / MARK).read_text(encoding="utf-8"))["mark"]
    except (OSError, ValueError, KeyError, TypeError):
        before = None
    if before != mark:
        other = "the report of another command" if before else f"{', '.join(held[:3])}"
        raise UserError(f"{folder} contains {other}, which would be overwritten; set {instead}")
