"""Results as tables: plain text, rich, Markdown, LaTeX, CSV, HTML, the same numbers with the same number of digits."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Decimal

from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from attnpo.display.heat import readable
from attnpo.display.templating import render
from attnpo.schema import UserError

Cell = str | float | int | bool | None
Row = Sequence[Cell] | Mapping[str, Cell]
Digits = int | Mapping[str, int]

DEFAULT_DIGITS = 3


@dataclass(frozen=True)
class TableBlock:
    """Table: its columns and rows, with decimals of floats for all columns or by column.

    ``naming``: how many columns at its beginning say what a row is; they are repeated where a table is continued.
    ``notes``: what columns hold, by head, which a page shows over the head and in a list below the table.
    """

    columns: Sequence[str]
    rows: Sequence[Row]
    caption: str = ""
    digits: Digits = DEFAULT_DIGITS
    naming: int = 1
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def cells(self) -> list[list[Cell]]:
        """Returns the cells of every row in the order of the columns."""
        return ordered_cells(self.columns, self.rows)

    @property
    def decimals(self) -> list[int]:
        """Returns the decimals of each column."""
        digits = self.digits
        return [digits if isinstance(digits, int) else digits.get(name, DEFAULT_DIGITS) for name in self.columns]

    def texts(self, as_stored: bool = False) -> tuple[list[list[str]], list[bool]]:
        """Returns formatted cells, and for each column whether it holds numbers only (empty cells aside).

        Characters that would act on a terminal or a page are named instead, unless ``as_stored``.
        """
        values = self.cells
        cells = [[format_cell(*pair) for pair in zip(line, self.decimals, strict=True)] for line in values]
        cells = cells if as_stored else [[readable(cell) for cell in line] for line in cells]
        filled = [[line[place] for line in values if line[place] is not None] for place in range(len(self.columns))]
        return cells, [bool(column) and all(map(_is_number, column)) for column in filled]


def format_cell(value: Cell, digits: int = DEFAULT_DIGITS) -> str:
    """Returns the text of a cell: floats with ``digits`` decimals, whole numbers as they are, None as an empty cell.

    A float that would read as zero without being zero (a learning rate among win rates) is written as 5.0e-07.
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


def half_up(value: float, digits: int) -> float:
    """Returns a finite number rounded to ``digits`` decimals, halves away from zero (10.125 gives 10.13).

    Reads the shortest decimal that stands for the number, without what arithmetic leaves in its last places.
    """
    return float(Decimal(repr(round(value, digits + 7))).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


def format_fixed(value: float, digits: int) -> str:
    """Returns a number with ``digits`` decimals, halves away from zero; inf and nan as these words."""
    return f"{half_up(value, digits):.{digits}f}" if math.isfinite(value) else str(value)


def table_rich(table: TableBlock) -> RichTable:
    """Returns the table for a rich console; cells are shown as they are, never read as markup, and none is cut off."""
    cells, right = table.texts()
    title = Text(readable(table.caption)) if table.caption else None
    drawn = RichTable(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for place, (head, numeric) in enumerate(zip(table.columns, right, strict=True)):
        drawn.add_column(
            Text(readable(head)), justify="right" if numeric else "left", overflow="fold", no_wrap=place == 0
        )
    for line in cells:
        drawn.add_row(*(Text(cell) for cell in line))
    return drawn


def table_markdown(table: TableBlock) -> str:
    """Returns the table in GitHub's Markdown, without a trailing newline; bars and line breaks in cells are escaped."""
    cells, right = table.texts()
    lines = [list(table.columns), ["---:" if numeric else "---" for numeric in right], *cells]
    return "\n".join("| " + " | ".join(_markdown_cell(cell) for cell in line) + " |" for line in lines)


def table_latex(table: TableBlock, title: str = "") -> str:
    """Returns the table as a LaTeX float with the rules of booktabs, without a trailing newline; every text is escaped.

    ``title`` is its caption where it has none of its own.
    """
    cells, right = table.texts()
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
    """Returns the table as CSV with a head line; floats in full: the shortest text that reads back equal."""
    cells = [["" if value is None else str(value) for value in line] for line in ordered_cells(columns, rows)]
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([list(columns), *cells])
    return out.getvalue()


def table_html(table: TableBlock) -> str:
    """Returns the table as an HTML element without style; numeric columns carry the class "num"; everything is escaped.

    Its notes are shown over the heads, and in a folded list below the table.
    """
    cells, numeric = table.texts(as_stored=True)
    told = {name: table.notes[name] for name in table.columns if name in table.notes}
    shown = {"columns": table.columns, "caption": table.caption}
    return render("table.html", cells=cells, numeric=numeric, notes=told, **shown)


# ------------------------------------------------------------------------------------------------ parts


def ordered_cells(columns: Sequence[str], rows: Sequence[Row]) -> list[list[Cell]]:
    """Returns the cells of every row in the order of the columns."""
    if not columns or len(set(columns)) != len(columns):
        raise UserError(f"table: expected at least one column and no name twice, got {list(columns)}")
    out: list[list[Cell]] = []
    for number, row in enumerate(rows):
        if isinstance(row, Mapping):
            unknown = [name for name in row if name not in columns]
            if unknown:
                raise UserError(f"table row {number}: no column {', '.join(unknown)}; columns are {', '.join(columns)}")
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
        "[": "{[}",  # after a line break in a table a bracket would be read as the break's option
        "]": "{]}",
    }
)


def _latex_text(text: str) -> str:
    return " ".join(text.split()).translate(_LATEX)
