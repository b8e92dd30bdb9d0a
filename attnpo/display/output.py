"""Sections as text: on a terminal, in Markdown and LaTeX, and as JSON that is read back; ``page`` writes pages."""

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

from attnpo.display.heat import readable
from attnpo.display.page import Banner, Block, Image, KeyValues, Paragraph, Preformatted, Section
from attnpo.display.tables import Cell, TableBlock, format_cell, table_latex, table_markdown, table_rich
from attnpo.schema import UserError
from attnpo.system.files import parse_json

WIDTH = 190  # columns, where the output is no terminal


def terminal() -> Console:
    """Returns the console of tables: as wide as the terminal, or as COLUMNS says; text in a notebook too."""
    wide = Console().is_terminal or "COLUMNS" in os.environ
    return Console(width=None if wide else WIDTH, force_jupyter=False)


def print_sections(console: Console, sections: Sequence[Section]) -> None:
    """Prints the sections as text: titles right above tables, figures as the names of their files.

    Tables without text between them stand beside each other where the console is wide enough. One that is too wide for
    it, so that numbers would be broken, is continued below.
    """
    for section in sections:
        parts, heading = list(_parts(section)), section.title
        for tables, lines in parts:
            if heading and (tables or not any(shown for shown, _ in parts)):
                console.print(readable(heading), highlight=False, markup=False, style="bold")
                heading = ""
            drawn = [table_rich(part) for one in tables for part in fitting(console, one)]
            if len(drawn) > len(tables):
                for table in drawn:
                    console.print(table)
            elif drawn:
                console.print(Columns(drawn, padding=(0, 4)) if len(drawn) > 1 else drawn[0])
            for line in lines:
                console.print(_note(console, line), highlight=False, markup=False, soft_wrap=True)


def _note(console: Console, line: str) -> str:
    """Returns a line below a table, set in: broken between words on a terminal, whole where programs read it."""
    if console.width >= WIDTH:
        return f"  {line}"
    lines = wrap(line, console.width - 2, break_long_words=False, break_on_hyphens=False)
    return "\n".join(f"  {text}" for text in lines)


def fitting(console: Console, table: TableBlock) -> list[TableBlock]:
    """Returns a table as parts that are as narrow as the console, each with the columns that name its rows.

    As it is where it has room. Numbers are kept whole, with their intervals; the names of rows and texts above a third
    of the console are broken between words, and heads to their cells. Of the widths for names the one that takes the
    fewest parts is chosen.
    """
    if _width(console, table) <= console.width:
        return [table]
    naming = _naming(table)
    cells = [[*line[:naming], *(_broken(cell, console.width // 3) for cell in line[naming:])] for line in table.cells]
    table = _with_narrow_heads(replace(table, rows=cells))
    widths = [console.width // share for share in (2, 3, 4, 5)]
    tried = [_parts_of(console, table, naming, width) for width in widths]
    best = min(range(len(tried)), key=lambda place: len(tried[place]))
    made = [_cut(table, part, naming, widths[best]) for part in tried[best]]
    return [part if number == 0 else replace(part, caption="") for number, part in enumerate(made)]


def _naming(table: TableBlock) -> int:
    """Returns how many columns name the rows: those the table says, and the texts after them that tell rows apart."""
    lines, least = table.cells, min(table.naming, len(table.columns))
    for count in range(least, len(table.columns)):
        if len({tuple(line[:count]) for line in lines}) == len(lines):
            return count
        if not all(isinstance(line[count], str) for line in lines):
            break
    return least


def _parts_of(console: Console, table: TableBlock, naming: int, width: int) -> list[list[int]]:
    """Returns the columns of each part of a table whose names are in lines of ``width``."""
    names = list(range(naming))
    parts = [names]
    for place in range(naming, len(table.columns)):
        wider = [*parts[-1], place]
        if len(parts[-1]) > naming and _width(console, _cut(table, wider, naming, width)) > console.width:
            parts.append([*names, place])
        else:
            parts[-1] = wider
    return parts


def _cut(table: TableBlock, places: Sequence[int], naming: int, width: int) -> TableBlock:
    """Returns the columns at ``places``, the names of rows in lines of ``width`` where words allow."""
    columns = [table.columns[place] for place in places]
    lines = [[*(_broken(cell, width) for cell in line[:naming]), *line[naming:]] for line in table.cells]
    return replace(table, columns=columns, rows=[[line[place] for place in places] for line in lines])


def _broken(cell: Cell, width: int) -> Cell:
    """Returns a text in lines between words, what stands in brackets kept together; numbers as they are."""
    if not isinstance(cell, str) or cell_len(cell) <= width:
        return cell
    kept = re.sub(r"\[[^\[\]]*\]|\([^()]*\)", lambda found: found[0].replace(" ", _KEPT), cell)
    lines = wrap(kept, width, break_long_words=False, break_on_hyphens=False)
    if any(cell_len(line) > width for line in lines):  # a long remark in brackets
        lines = wrap(cell, width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace(_KEPT, " ")


_KEPT = "\ue000"  # of no font: stands for a blank that is not broken at


def _with_narrow_heads(table: TableBlock) -> TableBlock:
    """Returns the table with heads in lines no longer than its cells need, where words allow: Rich breaks words."""
    cells, _ = table.texts()
    heads = {
        name: "\n".join(
            wrap(name, max([1, *(cell_len(line[place]) for line in cells)]), break_long_words=False) or [name]
        )
        for place, name in enumerate(table.columns)
    }
    digits = table.digits
    renamed = digits if isinstance(digits, int) else {heads.get(name, name): count for name, count in digits.items()}
    return replace(table, columns=list(heads.values()), rows=table.cells, digits=renamed)


def _width(console: Console, table: TableBlock) -> int:
    """Columns of the terminal that a table needs where no cell is broken."""
    drawn = table_rich(replace(table, caption=""))
    return Measurement.get(console, console.options.update(width=10_000), drawn).maximum


def latex(sections: Sequence[Section], title: str = "") -> str:
    """Returns the tables of the sections in LaTeX (package booktabs), what else they say as comments."""
    told = [title] if title else []
    parts = ["\n".join(f"% {line}" for line in [*told, r"needs \usepackage{booktabs}"])]
    for section in sections:
        for tables, lines in _parts(section):
            parts += [table_latex(table, section.title) for table in tables]
            parts += ["\n".join(f"% {' '.join(line.split())}" for line in lines)] if lines else []
    return "\n\n".join(parts) + "\n"


def markdown(sections: Sequence[Section], title: str = "") -> str:
    """Returns the sections in Markdown, below ``title`` if there is one; text in lists."""
    parts = [f"# {title}"] if title else []
    for section in sections:
        parts.append(f"## {section.title}")
        for tables, lines in _parts(section):
            for table in tables:
                parts += [table.caption] if table.caption else []
                parts.append(table_markdown(table))
            parts += ["\n".join(f"- {line}" for line in lines)] if lines else []
    return "\n\n".join(parts) + "\n"


def _parts(section: Section) -> Iterator[tuple[list[TableBlock], list[str]]]:
    """Yields the section's tables and lines of text in order: tables in a row, or the text between them."""
    for _, group in groupby(section.blocks, lambda block: isinstance(block, TableBlock)):
        blocks = list(group)
        tables = [block for block in blocks if isinstance(block, TableBlock)]
        yield tables, [line for block in blocks for line in _lines(block)]


def _lines(block: Block) -> list[str]:
    """Returns a block as lines of text; none for tables and HTML."""
    match block:
        case Paragraph(text) | Banner(text):
            return [readable(text)]
        case KeyValues(values, digits):
            return [f"{name}: {format_cell(value, digits)}" for name, value in values.items()]
        case Preformatted(text):
            return [readable(line) for line in text.splitlines()]
        case Image(source, caption):
            return [f"{caption}: {source}" if caption else str(source)]
        case _:
            return []


# ------------------------------------------------------------------------------------------------ JSON


def tables_json(sections: Sequence[Section]) -> str:
    """Returns the sections as JSON: titles, tables with the numbers in full, other text line by line."""
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
            "notes": [line for block in section.blocks for line in _lines(block)],
        }
        for section in sections
    ]
    return json.dumps({"sections": told}, indent=1) + "\n"


def read_tables(path: Path) -> list[Section]:
    """Returns the sections in a file that ``tables_json`` wrote, each with its tables and below them its lines of text.

    UserError for a file that holds none.
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
        raise UserError(f"{path}: expected the tables of a study, but they cannot be read ({problem!r})") from problem
    return sections
