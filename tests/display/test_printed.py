"""Printed numbers beside ours: what is matched, what is not, and files that hold no such table."""

from pathlib import Path

import pytest

from attnpo.display.printed import (
    KeyedTable,
    find_matching_table,
    format_missing,
    join_published,
    read_published_table,
    unmatched_columns,
)
from attnpo.display.tables import Cell
from attnpo.schema import UserError

KEYS = ("model", "side", "token")
OURS = KeyedTable(
    "tokens",
    "Tokens",
    ("weights", "model", "side", "rank", "token", "weight", "count"),
    (
        {"weights": "L1", "model": "m", "side": "chosen", "rank": 1, "token": "Yes", "weight": 0.5, "count": 100},
        {"weights": "L1", "model": "m", "side": "chosen", "rank": 2, "token": "1", "weight": 0.25, "count": 200},
        {"weights": "L2", "model": "m", "side": "chosen", "rank": 1, "token": "no", "weight": 0.125, "count": 300},
    ),
    KEYS,
    "weights",
    {"weight": 2},
)


def printed(folder: Path, text: str) -> Path:
    path = folder / "printed.csv"
    path.write_text(text, encoding="utf-8")
    return path


def told(table: KeyedTable, *names: str) -> list[tuple[Cell, ...]]:
    return [tuple(row[name] for name in names) for row in table.rows]


def test_rows_are_matched_by_their_keys(tmp_path: Path) -> None:
    """Case counts, a token that is a number is a text, and each group of ours meets every printed row."""
    path = printed(
        tmp_path, 'model,side,rank,token,weight\nm,chosen,1,yes,0.9\nm,chosen,2,1,0.2\nother,chosen,1,"a,b",0.1\n'
    )
    table = join_published(OURS, read_published_table(path, KEYS))
    assert told(table, "weights", "model", "token", "rank", "rank printed", "weight", "weight printed") == [
        ("L1", "m", "yes", None, 1, None, 0.9),
        ("L1", "m", "1", 2, 2, 0.25, 0.2),
        ("L1", "other", "a,b", None, 1, None, 0.1),
        ("L2", "m", "yes", None, 1, None, 0.9),
        ("L2", "m", "1", None, 2, None, 0.2),
        ("L2", "other", "a,b", None, 1, None, 0.1),
    ]
    assert table.rows[1]["weight difference"] == pytest.approx(0.05)
    assert {row["weight difference"] for row in (table.rows[0], *table.rows[2:])} == {None}
    assert table.columns == (
        *("weights", "model", "side", "rank", "rank printed", "token"),
        *("weight", "weight printed", "weight difference"),
    )


def test_what_one_lacks_is_a_dash_for_readers_only(tmp_path: Path) -> None:
    path = printed(tmp_path, "model,side,token,weight\nm,chosen,1,0.2\nm,chosen,Yes,-\n")
    table = join_published(OURS, read_published_table(path, KEYS))
    read = format_missing(table)
    assert told(read, "weight", "weight printed") == [(0.25, 0.2), (0.5, "-"), ("-", 0.2), ("-", "-")]
    assert table.rows[1]["weight printed"] is None
    assert format_missing(OURS) is OURS


def test_columns_that_only_the_paper_has_stand_alone(tmp_path: Path) -> None:
    """A row of ours that no printed one meets is not repeated; one that two meet is there for both."""
    rows: tuple[dict[str, Cell], ...] = ({"arm": "dpo", "reward": 0.5}, {"arm": "shuffled", "reward": 0.25})
    arms = KeyedTable("arms", "", ("arm", "reward"), rows, ("arm",))
    path = printed(tmp_path, "base_model,arm,mt_bench,reward\nbig,DPO,6.73,0.4\nbig,Other,7.1,-\nsmall,DPO,5.50,-\n")
    table = join_published(arms, read_published_table(path, arms.keys), fold=True)
    assert unmatched_columns(table) == ["mt_bench"]
    assert table.columns == (
        "base_model",
        "arm",
        "mt_bench printed",
        "reward",
        "reward printed",
        "reward difference",
    )
    assert told(table, "base_model", "arm", "mt_bench printed", "reward", "reward printed") == [
        ("big", "dpo", 6.73, 0.5, 0.4),
        ("big", "Other", 7.1, None, None),
        ("small", "dpo", 5.5, 0.5, None),
    ]


def test_a_file_goes_to_the_table_it_shares_numbers_with(tmp_path: Path) -> None:
    sinks = KeyedTable("sink", "", ("model", "first"), ({"model": "m", "first": 1.0},), ("model",))
    path = printed(tmp_path, "model,first\nm,2.5\n")
    assert find_matching_table([OURS, sinks], read_published_table(path, KEYS)) == 1
    with pytest.raises(
        UserError, match=r"expected the columns of one of our tables .*sink: model, first\), got model, mt"
    ):
        find_matching_table([OURS, sinks], read_published_table(printed(tmp_path, "model,mt_bench\nm,2.5\n"), KEYS))


def test_files_that_are_no_table_are_refused(tmp_path: Path) -> None:
    cases = {
        "": "expected a header line and at least one row, got 0 lines",
        "a,b\n": "got 1 lines",
        "a,a\n1,2\n": "expected unique names for all columns, got a, a",
        "a,b\n1\n": "line 2 has 1 cells, but the header has 2",
    }
    for text, message in cases.items():
        with pytest.raises(UserError, match=message):
            read_published_table(printed(tmp_path, text), KEYS)
    (tmp_path / "x.csv").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "x.csv", tmp_path):
        with pytest.raises(UserError, match="cannot be read as a CSV file with a header line"):
            read_published_table(path, KEYS)


def test_a_table_without_a_shared_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected a column model or side or token, got weight"):
        join_published(OURS, read_published_table(printed(tmp_path, "weight\n0.5\n"), KEYS))


def test_empty_cells_and_dashes_are_no_numbers(tmp_path: Path) -> None:
    table = read_published_table(printed(tmp_path, "model,weight,rank\nm,,1\nn,-,2\no,1e-2,3\n"), KEYS)
    assert [tuple(row.values()) for row in table.rows] == [("m", None, 1), ("n", None, 2), ("o", 0.01, 3)]
