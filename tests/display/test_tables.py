"""Tables: one set of numbers, five ways to write it."""

import csv
import io
import math

import pytest
from rich.console import Console

from attnpo.display.output import print_sections
from attnpo.display.page import Section, TableBlock
from attnpo.display.tables import format_cell, table_csv, table_markdown, table_rich
from attnpo.schema import UserError

COLUMNS = ["arm", "reward", "seeds", "lr"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.12345, "0.123"), (2, "2"), (None, ""), (True, "yes"), ("a", "a"), (math.nan, "nan"), (math.inf, "inf"),
     (0.0, "0.000"), (-0.0, "0.000"), (5e-7, "5.0e-07"), (-0.0004, "-4.0e-04"), (0.0006, "0.001"),
     (1234.5678, "1234.568")],
)  # fmt: skip
def test_format_cell(value: float | str | None, text: str) -> None:
    assert format_cell(value) == text


def test_control_characters_never_reach_a_terminal() -> None:
    out = io.StringIO()
    Console(file=out, color_system=None, width=60).print(
        table_rich(TableBlock(["a", "[b]"], [["[red]x[/red]\x1b", 1]]))
    )
    assert "[red]x[/red]␛" in out.getvalue() and "[b]" in out.getvalue()


def test_markdown_escapes() -> None:
    assert table_markdown(TableBlock(["a", "b"], [["x|y\nz<i>", 1.5]], digits=1)) == (
        "| a | b |\n| --- | ---: |\n| x\\|y z&lt;i> | 1.5 |"
    )
    assert table_markdown(TableBlock(["a", "bb"], [])) == "| a | bb |\n| --- | --- |"


def test_csv_reads_back_equal() -> None:
    rows = [['say "x, y"\nz', 0.1 + 0.2, 7, None]]
    read = list(csv.reader(io.StringIO(table_csv(COLUMNS, rows))))
    assert read[0] == COLUMNS
    assert read[1] == ['say "x, y"\nz', "0.30000000000000004", "7", ""]


def test_mistakes_are_named() -> None:
    with pytest.raises(UserError, match=r"row 1: expected 2 cells \(a, b\), got 1"):
        table_markdown(TableBlock(["a", "b"], [[1, 2], [1]]))
    with pytest.raises(UserError, match="unknown column c"):
        table_markdown(TableBlock(["a", "b"], [{"c": 1}]))
    with pytest.raises(UserError, match="unique names"):
        table_csv(["a", "a"], [])


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_number_of_a_wide_table_is_broken(width: int) -> None:
    """Each part names its rows, intervals stay in one line, and long texts are broken between words alone."""
    names = ["uniform", "inverse of true importance", "uniform length-normalised"]
    columns = ["arm", "point", "minus uniform, KL 0.5", "reward", "95 %", "win rate", "why"]
    rows = [
        [name, "lr 2.5e-05 beta 0.01", f"+0.07{i} [-0.028, 0.190] (4 of 5 seeds)", i + 0.25, "[-0.150, 0.301]", 0.5 + i,
         "the judge sees it in the first of two rounds, and only there"]
        for i, name in enumerate(names)
    ]  # fmt: skip
    out = io.StringIO()
    print_sections(Console(file=out, width=width), [Section("Arms", [TableBlock(columns, rows)])])
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    text = " ".join(lines)
    for i in range(3):
        for whole in (f"+0.07{i}", "[-0.028, 0.190]", f"{i}.250", f"{0.5 + i:.3f}", "[-0.150, 0.301]"):
            assert any(whole in line for line in lines), whole
    assert text.count("[-0.150, 0.301]") == 3 and text.count("2.5e-05") == 3
    assert set(" ".join([*names, "the judge sees it in first of two rounds,"]).split()) <= set(text.split())


def test_each_part_of_a_wide_table_says_which_row_is_which() -> None:
    """Also where the table names its rows by a column that is the same for two of them."""
    columns = ["weights", "side", *(f"statistic {number}" for number in range(12))]
    rows = [[weights, side, *range(12)] for weights in ("layer 1", "layer 2") for side in ("chosen", "rejected")]
    stream = io.StringIO()
    print_sections(Console(file=stream, width=80), [Section("t", [TableBlock(columns, rows)])])
    lines = stream.getvalue().splitlines()
    heads = [line for line in lines if "weights" in line]
    assert len(heads) > 1 and all("side" in line for line in heads)
    assert sum("layer 1" in line and "rejected" in line for line in lines) == len(heads)
