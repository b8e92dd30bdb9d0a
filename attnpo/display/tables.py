"""Results as tables: plain text, rich, Markdown, LaTeX, CSV, HTML, the same numbers with the same number of digits."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
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
    """Returns a finite number rounded to ``digits`` decimals, halves away from zero, as papers print (10.125 gives
    10.13).

    Reads the shortest decimal that stands for the number, without what arithmetic leaves in its last places.
    """
    return float(Decimal(repr(round(value, digits + 7))).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


def fixed(value: float, digits: int) -> str:
    """Returns a number with ``digits`` decimals, halves away from zero; inf and nan as these words."""
    return f"{half_up(value, digits):.{digits}f}" if math.isfinite(value) else str(value)


def table_rich(
    columns: Sequence[str], rows: Sequence[Row], *, digits: Digits = DEFAULT_DIGITS, title: str = ""
) -> RichTable:
    """Returns the table for a rich console; cells are shown as they are, never read as markup, and none is cut off."""
    cells, right = cell_texts(columns, rows, digits)
    table = RichTable(
        title=Text(readable(title)) if title else None, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False
    )
    for place, (head, numeric) in enumerate(zip(columns, right, strict=True)):
        table.add_column(
            Text(readable(head)), justify="right" if numeric else "left", overflow="fold", no_wrap=place == 0
        )
    for line in cells:
        table.add_row(*(Text(cell) for cell in line))
    return table


def table_markdown(columns: Sequence[str], rows: Sequence[Row], *, digits: Digits = DEFAULT_DIGITS) -> str:
    """Returns the table in GitHub's Markdown, without a trailing newline; bars and line breaks in cells are escaped."""
    cells, right = cell_texts(columns, rows, digits)
    lines = [list(columns), ["---:" if numeric else "---" for numeric in right], *cells]
    return "\n".join("| " + " | ".join(_markdown_cell(cell) for cell in line) + " |" for line in lines)


def table_latex(
    columns: Sequence[str], rows: Sequence[Row], *, digits: Digits = DEFAULT_DIGITS, caption: str = ""
) -> str:
    """Returns the table as a LaTeX float with the rules of booktabs, without a trailing newline; every
    text is escaped.
    """
    cells, right = cell_texts(columns, rows, digits)
    told = [" & ".join(_latex_text(cell) for cell in line) + r" \\" for line in [columns, *cells]]
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


def table_html(
    columns: Sequence[str],
    rows: Sequence[Row],
    *,
    digits: Digits = DEFAULT_DIGITS,
    caption: str = "",
    notes: Mapping[str, str] | None = None,
) -> str:
    """Returns the table as an HTML element without style; numeric columns carry the class "num"; everything is escaped.

    ``notes``: what columns hold, by head; shown over the head, and in a folded list below the table.
    """
    cells, numeric = cell_texts(columns, rows, digits, as_stored=True)
    told = {name: notes[name] for name in columns if name in notes} if notes else {}
    return render("table.html", columns=columns, cells=cells, numeric=numeric, caption=caption, notes=told)


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


def cell_texts(
    columns: Sequence[str], rows: Sequence[Row], digits: Digits, as_stored: bool = False
) -> tuple[list[list[str]], list[bool]]:
    """Formatted cells, and for each column whether it holds numbers only (empty cells aside).

    Characters that would act on a terminal or a page are named instead, unless ``as_stored``.
    """
    values = ordered_cells(columns, rows)
    wanted = [digits if isinstance(digits, int) else digits.get(name, DEFAULT_DIGITS) for name in columns]
    cells = [[format_cell(value, count) for value, count in zip(line, wanted, strict=True)] for line in values]
    cells = cells if as_stored else [[readable(cell) for cell in line] for line in cells]
    filled = [[line[i] for line in values if line[i] is not None] for i in range(len(columns))]
    return cells, [bool(column) and all(_is_number(value) for value in column) for column in filled]


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
