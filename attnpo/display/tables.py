"""Tables as plain text, Rich, Markdown, LaTeX, CSV and HTML, with the same number of digits in all formats."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Decimal

from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from attnpo.display.heat import make_readable
from attnpo.display.templating import render
from attnpo.schema import UserError

Cell = str | float | int | bool | None
Row = Sequence[Cell] | Mapping[str, Cell]
Digits = int | Mapping[str, int]

DEFAULT_DIGITS = 3


@dataclass(frozen=True)
class TableBlock:
    """Table with columns and rows; ``digits``: decimals of floats, for all columns or by column name.

    ``naming``: number of leading columns that identify a row, repeated when a wide table is split. ``notes``:
    explanations of columns by header, shown above the header and in a list below the table on pages.
    """

    columns: Sequence[str]
    rows: Sequence[Row]
    caption: str = ""
    digits: Digits = DEFAULT_DIGITS
    naming: int = 1
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def cells(self) -> list[list[Cell]]:
        """Returns the cells of each row in column order."""
        return ordered_cells(self.columns, self.rows)

    @property
    def decimals(self) -> list[int]:
        """Returns the number of decimals of each column."""
        digits = self.digits
        return [digits if isinstance(digits, int) else digits.get(name, DEFAULT_DIGITS) for name in self.columns]

    def format_cells(self, as_stored: bool = False) -> tuple[list[list[str]], list[bool]]:
        """Returns formatted cells, and for each column whether it contains only numbers (apart from empty cells).

        Control characters are made visible unless ``as_stored``.
        """
        values = self.cells
        cells = [[format_cell(*pair) for pair in zip(line, self.decimals, strict=True)] for line in values]
        cells = cells if as_stored else [[make_readable(cell) for cell in line] for line in cells]
        filled = [[line[place] for line in values if line[place] is not None] for place in range(len(self.columns))]
        return cells, [bool(column) and all(map(_is_number, column)) for column in filled]


def format_cell(value: Cell, digits: int = DEFAULT_DIGITS) -> str:
    """Formats a cell: floats with ``digits`` decimals, integers unchanged, None as an empty string.

    A non-zero float that would be printed as zero (e.g. a learning rate among win rates) is formatted like 5.0e-07.
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, float) or not math.isfinite(value):
        return str(value)
    text = f"{value:.{digits}f}"
    if float(text) != 0:
        return text
    return f"{value:.1e}" if value != 0 else f"{0.0:.{digits}f}"


def round_half_up(value: float, digits: int) -> float:
    """Rounds a finite number to ``digits`` decimals, halves away from zero (10.125 becomes 10.13).

    Uses the shortest decimal representation of the number, which hides binary rounding errors.
    """
    return float(Decimal(repr(round(value, digits + 7))).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


def format_fixed(value: float, digits: int) -> str:
    """Formats a number with ``digits`` decimals, halves away from zero; inf and nan as words."""
    return f"{round_half_up(value, digits):.{digits}f}" if math.isfinite(value) else str(value)


def table_rich(table: TableBlock) -> RichTable:
    """Converts the table for a Rich console; cells are shown literally, without markup, and are not cut off."""
    cells, right = table.format_cells()
    title = Text(make_readable(table.caption)) if table.caption else None
    drawn = RichTable(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for place, (head, numeric) in enumerate(zip(table.columns, right, strict=True)):
        drawn.add_column(
            Text(make_readable(head)), justify="right" if numeric else "left", overflow="fold", no_wrap=place == 0
        )
    for line in cells:
        drawn.add_row(*(Text(cell) for cell in line))
    return drawn


def table_markdown(table: TableBlock) -> str:
    """Formats the table as GitHub Markdown without a trailing newline; escapes bars and line breaks."""
    cells, right = table.format_cells()
    lines = [list(table.columns), ["---:" if numeric else "---" for numeric in right], *cells]
    return "\n".join("| " + " | ".join(_markdown_cell(cell) for cell in line) + " |" for line in lines)


def table_latex(table: TableBlock, title: str = "") -> str:
    """Formats the table as a LaTeX float with booktabs rules, without a trailing newline; all text is escaped.

    ``title`` is the caption if the table has no caption of its own.
    """
    cells, right = table.format_cells()
    caption = table.caption or title
    told = [" & ".join(_latex_text(cell) for cell in line) + r" \\" for line in [table.columns, *cells]]
    lines = [
        r"\begin{table}",
        r"\centering",
        *([rf"\caption{{{_latex_text(caption)}}}"] if caption else []),
        rf"\begin{{tabular}}{{{''.join('r' if numeric else 'l' for numeric in right)}}}",
        r"\toprule",
        told[0],
        r"\midrule",
        *told[1:],
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines)


def table_csv(columns: Sequence[str], rows: Sequence[Row]) -> str:
    """Formats the table as CSV with a header line; floats have full precision."""
    cells = [["" if value is None else str(value) for value in line] for line in ordered_cells(columns, rows)]
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([list(columns), *cells])
    return out.getvalue()


def table_html(table: TableBlock) -> str:
    """Renders the table as an unstyled HTML element; numeric columns have the class "num"; text is escaped.

    Notes are shown above the headers and in a collapsed list below the table.
    """
    cells, numeric = table.format_cells(as_stored=True)
    told = {name: table.notes[name] for name in table.columns if name in table.notes}
    shown = {"columns": table.columns, "caption": table.caption}
    return render("table.html", cells=cells, numeric=numeric, notes=told, **shown)


# ------------------------------------------------------------------------------------------------ cells


def ordered_cells(columns: Sequence[str], rows: Sequence[Row]) -> list[list[Cell]]:
    """Returns the cells of each row in column order."""
    if not columns or len(set(columns)) != len(columns):
        raise UserError(f"table: expected at least one column and unique names, got {list(columns)}")
    out: list[list[Cell]] = []
    for number, row in enumerate(rows):
        if isinstance(row, Mapping):
            unknown = [name for name in row if name not in columns]
            if unknown:
                raise UserError(f"table row {number}: unknown column {', '.join(unknown)}; known: {', '.join(columns)}")
            out.append([row.get(name) for name in columns])
        elif len(row) != len(columns):
            raise UserError(f"table row {number}: expected {len(columns)} cells ({', '.join(columns)}), got {len(row)}")
        else:
            out.append(list(row))
    return out


def _is_number(value: Cell) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _markdown_cell(cell: str) -> str:
    return " ".join(cell.split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


_LATEX = str.maketrans(
    {
        **{sign: f"\\{sign}" for sign in "&%$#_{}"},
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        "±": r"$\pm$",
        "[": "{[}",  # after a line break in a table, a bracket would be read as its option
        "]": "{]}",
    }
)


def _latex_text(text: str) -> str:
    return " ".join(text.split()).translate(_LATEX)
