"""Report sections as terminal text, Markdown, LaTeX, and JSON that can be read back."""

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from textwrap import wrap

from rich.cells import cell_len
from rich.columns import Columns
from rich.console import Console
from rich.measure import Measurement

from attnpo.display.heat import make_readable
from attnpo.display.page import Banner, Block, CodeBlock, Image, KeyValues, Paragraph, Section
from attnpo.display.tables import Cell, TableBlock, format_cell, table_latex, table_markdown, table_rich
from attnpo.schema import UserError
from attnpo.system.files import parse_json

WIDTH = 190  # columns, if the output is not a terminal


def make_console() -> Console:
    """Creates the console for tables: as wide as the terminal or COLUMNS, and plain text even in notebooks."""
    wide = Console().is_terminal or "COLUMNS" in os.environ
    return Console(width=None if wide else WIDTH, force_jupyter=False)


def print_sections(console: Console, sections: Sequence[Section]) -> None:
    """Prints the sections as text: titles above tables, figures as file names.

    Consecutive tables are printed side by side if the console is wide enough. A table that is too wide continues below,
    so numbers are never broken across lines.
    """
    for section in sections:
        parts, heading = list(_iter_tables_and_text(section)), section.title
        for tables, lines in parts:
            if heading and (tables or not any(shown for shown, _ in parts)):
                console.print(make_readable(heading), highlight=False, markup=False, style="bold")
                heading = ""
            drawn = [table_rich(part) for one in tables for part in split_to_width(console, one)]
            if len(drawn) > len(tables):
                for table in drawn:
                    console.print(table)
            elif drawn:
                console.print(Columns(drawn, padding=(0, 4)) if len(drawn) > 1 else drawn[0])
            for line in lines:
                console.print(_wrap_note(console, line), highlight=False, markup=False, soft_wrap=True)


def _wrap_note(console: Console, line: str) -> str:
    """Indents a line below a table. Wraps it at words on a terminal, but not in output read by programs."""
    if console.width >= WIDTH:
        return f"  {line}"
    lines = wrap(line, console.width - 2, break_long_words=False, break_on_hyphens=False)
    return "\n".join(f"  {text}" for text in lines)


def split_to_width(console: Console, table: TableBlock) -> list[TableBlock]:
    """Splits a table into parts that fit on the console, each with the key columns of its rows.

    Returns the table unchanged if it fits. Keeps each number on one line with its interval. Wraps row names and text
    cells at words if they are wider than a third of the console, and wraps headers to the width of the cells below.
    Picks the width for row names that results in the fewest parts.
    """
    if _table_width(console, table) <= console.width:
        return [table]
    naming = _count_key_columns(table)
    cells = [
        [*line[:naming], *(_wrap_cell(cell, console.width // 3) for cell in line[naming:])] for line in table.cells
    ]
    table = _wrap_headers(replace(table, rows=cells))
    widths = [console.width // share for share in (2, 3, 4, 5)]
    tried = [_group_columns(console, table, naming, width) for width in widths]
    best = min(range(len(tried)), key=lambda place: len(tried[place]))
    made = [_select_columns(table, part, naming, widths[best]) for part in tried[best]]
    return [part if number == 0 else replace(part, caption="") for number, part in enumerate(made)]


def _count_key_columns(table: TableBlock) -> int:
    """Counts the key columns: those the table declares, plus text columns needed to distinguish rows."""
    lines, least = table.cells, min(table.naming, len(table.columns))
    for count in range(least, len(table.columns)):
        if len({tuple(line[:count]) for line in lines}) == len(lines):
            return count
        if not all(isinstance(line[count], str) for line in lines):
            break
    return least


def _group_columns(console: Console, table: TableBlock, naming: int, width: int) -> list[list[int]]:
    """Groups column indices into parts of a table that fit on the console with row names wrapped to ``width``."""
    names = list(range(naming))
    parts = [names]
    for place in range(naming, len(table.columns)):
        wider = [*parts[-1], place]
        if (
            len(parts[-1]) > naming
            and _table_width(console, _select_columns(table, wider, naming, width)) > console.width
        ):
            parts.append([*names, place])
        else:
            parts[-1] = wider
    return parts


def _select_columns(table: TableBlock, places: Sequence[int], naming: int, width: int) -> TableBlock:
    """Selects the columns at the indices ``places``, with row names wrapped to ``width`` if possible."""
    columns = [table.columns[place] for place in places]
    lines = [[*(_wrap_cell(cell, width) for cell in line[:naming]), *line[naming:]] for line in table.cells]
    return replace(table, columns=columns, rows=[[line[place] for place in places] for line in lines])


def _wrap_cell(cell: Cell, width: int) -> Cell:
    """Wraps a text cell at words without breaking inside brackets; returns numbers unchanged."""
    if not isinstance(cell, str) or cell_len(cell) <= width:
        return cell
    kept = re.sub(r"\[[^\[\]]*\]|\([^()]*\)", lambda found: found[0].replace(" ", _KEPT), cell)
    lines = wrap(kept, width, break_long_words=False, break_on_hyphens=False)
    if any(cell_len(line) > width for line in lines):  # a long text in brackets
        lines = wrap(cell, width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace(_KEPT, " ")


_KEPT = "\ue000"  # private-use character: marks a non-breaking space


def _wrap_headers(table: TableBlock) -> TableBlock:
    """Wraps headers at words to the width of the cells below, because Rich would break words."""
    cells, _ = table.format_cells()
    heads = {
        name: "\n".join(
            wrap(name, max([1, *(cell_len(line[place]) for line in cells)]), break_long_words=False) or [name]
        )
        for place, name in enumerate(table.columns)
    }
    digits = table.digits
    renamed = digits if isinstance(digits, int) else {heads.get(name, name): count for name, count in digits.items()}
    return replace(table, columns=list(heads.values()), rows=table.cells, digits=renamed)


def _table_width(console: Console, table: TableBlock) -> int:
    """Returns the number of terminal columns that a table needs without wrapping."""
    drawn = table_rich(replace(table, caption=""))
    return Measurement.get(console, console.options.update(width=10_000), drawn).maximum


def to_latex(sections: Sequence[Section], title: str = "") -> str:
    """Formats the tables in the sections as LaTeX (package booktabs), and other text as comments."""
    told = [title] if title else []
    parts = ["\n".join(f"% {line}" for line in [*told, r"needs \usepackage{booktabs}"])]
    for section in sections:
        for tables, lines in _iter_tables_and_text(section):
            parts += [table_latex(table, section.title) for table in tables]
            parts += ["\n".join(f"% {' '.join(line.split())}" for line in lines)] if lines else []
    return "\n\n".join(parts) + "\n"


def to_markdown(sections: Sequence[Section], title: str = "") -> str:
    """Formats the sections as Markdown, below ``title`` if given; text becomes lists."""
    parts = [f"# {title}"] if title else []
    for section in sections:
        parts.append(f"## {section.title}")
        for tables, lines in _iter_tables_and_text(section):
            for table in tables:
                parts += [table.caption] if table.caption else []
                parts.append(table_markdown(table))
            parts += ["\n".join(f"- {line}" for line in lines)] if lines else []
    return "\n\n".join(parts) + "\n"


def _iter_tables_and_text(section: Section) -> Iterator[tuple[list[TableBlock], list[str]]]:
    """Yields, in order, each group of consecutive tables and the lines of text between groups."""
    for _, group in groupby(section.blocks, lambda block: isinstance(block, TableBlock)):
        blocks = list(group)
        tables = [block for block in blocks if isinstance(block, TableBlock)]
        yield tables, [line for block in blocks for line in _block_lines(block)]


def _block_lines(block: Block) -> list[str]:
    """Returns a block as lines of text; an empty list for tables and HTML."""
    match block:
        case Paragraph(text) | Banner(text):
            return [make_readable(text)]
        case KeyValues(values, digits):
            return [f"{name}: {format_cell(value, digits)}" for name, value in values.items()]
        case CodeBlock(text):
            return [make_readable(line) for line in text.splitlines()]
        case Image(source, caption):
            return [f"{caption}: {source}" if caption else str(source)]
        case _:
            return []


# ------------------------------------------------------------------------------------------------ JSON


def tables_to_json(sections: Sequence[Section]) -> str:
    """Formats the sections as JSON: titles, tables with full-precision numbers, and other text line by line."""
    told = [
        {
            "title": section.title,
            "tables": [
                {
                    "caption": block.caption,
                    "columns": list(block.columns),
                    "decimals": block.decimals,
                    "rows": block.cells,
                }
                for block in section.blocks
                if isinstance(block, TableBlock)
            ],
            "notes": [line for block in section.blocks for line in _block_lines(block)],
        }
        for section in sections
    ]
    return json.dumps({"sections": told}, indent=1) + "\n"


def read_tables(path: Path) -> list[Section]:
    """Reads the sections from a file written by ``tables_to_json``. In each section, text comes after the tables.

    Raises:
        UserError: the file has a different format.
    """
    try:
        sections = [
            Section(
                str(section["title"]),
                [
                    *(
                        TableBlock(
                            table["columns"],
                            table["rows"],
                            table["caption"],
                            dict(zip(table["columns"], table["decimals"], strict=True)),
                        )
                        for table in section["tables"]
                    ),
                    *(Paragraph(line) for line in section["notes"]),
                ],
            )
            for section in parse_json(path.read_text(encoding="utf-8"))["sections"]
        ]
    except (ValueError, KeyError, TypeError) as problem:
        raise UserError(f"{path}: cannot be read as study tables ({problem!r})") from problem
    return sections
