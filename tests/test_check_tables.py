"""``experiments.check_tables``: what does not follow from printed tables, the paper's own and invented ones by hand."""

import csv
from pathlib import Path

import pytest

from attnpo.schema import UserError
from experiments.check_tables import (
    check_tables,
    impossible_rounds,
    interval_misprints,
    main,
    rank_misprints,
    rank_sums,
    read_tables,
)

SHIPPED = Path(__file__).resolve().parents[1] / "experiments" / "paper"
SFT, INSTRUCT = "llama38bbasesft", "llama38binstruct"
# Evaluation sheet, section 6, and the tables' README: recomputed and printed ranks, intervals, the one impossible run.
RANKS = {
    ("Base", "13.50", "13.75"),
    ("SLiC-HF", "9.75", "10.00"),
    ("TDPO", "11.50", "11.75"),
    ("IPO", "5.00", "4.75"),
    ("CPO", "7.00", "4.88"),
    ("KTO", "8.50", "8.75"),
    ("ORPO", "9.00", "9.25"),
    ("SimPO", "2.75", "3.63"),
    ("AttentionPO", "2.50", "2.25"),
}
INTERVALS = {
    (SFT, "CPO", "alpacaeval_lc", "19.14 ± 19.14"),
    (SFT, "KTO", "alpacaeval_lc", "18.92 ± 18.92"),
    (INSTRUCT, "DPO", "alpacaeval_lc", "49.02 ± 0.00"),
}
STILL = (
    "4 average ranks still differ (IPO 5.00 against 4.75, CPO 5.63 against 4.88, SimPO 2.88 against 3.63, AttentionPO"
)


def report_on(tmp_path: Path, files: list[Path]) -> tuple[list[dict[str, str]], str]:
    """The rows of the CSV and the Markdown of a report on files."""
    folder = tmp_path / "reports"
    check_tables(files, folder)
    with (folder / "ranks.csv").open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines)), (folder / "ranks.md").read_text(encoding="utf-8")


def test_the_papers_tables_as_shipped(tmp_path: Path) -> None:
    """All that is listed of the two large tables, which are the paper's as given, is what the sheet lists."""
    names = ("main_results", "main_results_three_runs")
    single, rounds = (SHIPPED / name / "printed.csv" for name in names)
    rows, text = report_on(tmp_path, [single, rounds])
    letters = {row["base_model"]: "".join(filter(str.isalnum, row["base_model"])) for row in rows}
    listed = [(letters[row["base_model"]], row) for row in rows if row["table"] == "misprints"]
    ranks = [(model, row) for model, row in listed if row["column"] == "average rank"]
    others = [(model, row) for model, row in listed if row["column"] != "average rank"]
    assert {(row["method"], row["expected"], row["printed"]) for _, row in ranks} == RANKS
    assert {model for model, _ in ranks} == {SFT} and len(ranks) == 9
    impossible = (SFT, "CPO", "mt_bench", "5.38")
    assert {(model, row["method"], row["column"], row["printed"]) for model, row in others} == {*INTERVALS, impossible}
    assert len(others) == 4
    assert text.count("14 of 14 printed average ranks follow") == 3 and "5 of 14 printed average ranks follow" in text
    assert "sum to 418; ranks of 14 rows over 4 columns sum to 420" in text
    assert "111 of 112 can be one of them" in text and STILL in text


def test_the_mismatches_are_the_sheets(shared: Path) -> None:
    sheet = (shared / "reference" / "EVALUATION.md").read_text(encoding="utf-8")
    assert all(f"{method} {ours}" in sheet and theirs in sheet for method, ours, theirs in RANKS)


# ------------------------------------------------------------------------------------------------ by hand

SINGLE = """base_model,method,a,b,avg_rank_printed
m,X,3.00,10.00,1.25
m,Y,3.00,9.00,1.75
m,Z,1.00,8.00,3.00
n,X,1.00,1.00,1.00
"""


def a_file(folder: Path, text: str, name: str = "t.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_ranks_with_ties_by_hand(tmp_path: Path) -> None:
    """a: X and Y share 1.5; b: 1, 2, 3. Averages 1.25, 1.75, 3: all as printed; 6 + 6 in all."""
    rows, text = report_on(tmp_path, [a_file(tmp_path, SINGLE)])
    ranks = [(row["base_model"], row["method"], float(row["average rank"])) for row in rows if row["table"] == "ranks"]
    assert ranks == [("m", "X", 1.25), ("m", "Y", 1.75), ("m", "Z", 3.0), ("n", "X", 1.0)]
    assert not any(row["table"] == "misprints" for row in rows) and "3 of 3 printed average ranks follow" in text


def test_a_rank_of_halves_is_printed_upwards(tmp_path: Path) -> None:
    """Over four columns, ranks 1, 1, 1, 1.5 average 1.125, which papers print as 1.13 and Python as 1.12."""
    good = "method,a,b,c,d,avg_rank_printed\nX,2.0,2.0,2.0,2.0,1.13\nY,1.0,1.0,1.0,2.0,1.88\n"
    (table,) = read_tables(a_file(tmp_path, good))
    assert rank_misprints(table) == [] and rank_sums(table) == (12.0, 12.0)
    (table,) = read_tables(a_file(tmp_path, good.replace("1.13", "1.12")))
    (item,) = rank_misprints(table)
    assert (item["method"], item["printed"], item["expected"]) == ("X", "1.12", "1.13")


def test_a_row_without_a_score_has_no_rank(tmp_path: Path) -> None:
    rows, text = report_on(tmp_path, [a_file(tmp_path, "method,a,b\nX,1.0,2.0\nY,-,1.0\nZ,0.5,3.0\n")])
    assert [(row["method"], row["average rank"]) for row in rows] == [("X", "1.5"), ("Z", "1.5")]
    assert "left out, without scores: Y" in text and "prints no average rank" in text


def of_rounds(ci: str) -> str:
    return f"method,a_mean,a_ci95\nX,10.00,{ci}\n"


@pytest.mark.parametrize(("first", "ci", "possible"), [("11.00", "0.98", True), ("11.00", "0.95", False)])
def test_a_single_run_is_one_of_three_rounds_or_not(tmp_path: Path, first: str, ci: str, possible: bool) -> None:
    """Rounds 11, 9.5, 9.5 are the closest with mean 10: s = 0.866, half width 0.98; rounding allows 0.965."""
    (single,) = read_tables(a_file(tmp_path, f"method,a\nX,{first}\n"))
    (rounds,) = read_tables(a_file(tmp_path, of_rounds(ci), "r.csv"))
    assert (list(impossible_rounds(single, rounds)) == []) == possible
    assert list(impossible_rounds(rounds, single)) == []


def test_intervals_of_no_width_are_doubtful_beside_others_of_the_same_answers(tmp_path: Path) -> None:
    head = (
        "method,alpacaeval_lc_mean,alpacaeval_lc_ci95,alpacaeval_wr_mean,alpacaeval_wr_ci95,mt_bench_mean,mt_bench_ci95"
    )
    (table,) = read_tables(
        a_file(tmp_path, f"{head}\nX,5.00,0.00,6.00,0.10,7.00,0.00\nY,5.00,0.00,6.00,0.00,7.00,7.00\n")
    )
    found = [(row["method"], row["column"], str(row["expected"]).split(",")[0]) for row in interval_misprints(table)]
    assert found == [
        ("X", "alpacaeval_lc", "doubtful: alpacaeval_wr"),
        ("Y", "mt_bench", "an interval; it repeats the mean"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arm,a\nX,1.0\n", "expected a column method"),
        ("method,n\nX,1\n", "expected columns of scores with decimals"),
        ("method,a\nX,1.0\nX,2.0\n", "expected each method once for all rows, got X again"),
        ("method,a\n", "expected a header line and at least one row"),
    ],
)
def test_files_that_are_no_table_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        report_on(tmp_path, [a_file(tmp_path, text)])


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no file"):
        report_on(tmp_path, [tmp_path / "nowhere.csv"])


def test_the_command_writes_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Takes the same files again, refuses others in an occupied folder, and a file that is given twice."""
    monkeypatch.chdir(tmp_path)
    table, other = a_file(tmp_path, SINGLE), a_file(tmp_path, SINGLE, "other.csv")
    assert main([str(table)]) == 0 and main([str(table)]) == 0
    assert "3 of 3 printed average ranks follow" in " ".join(capsys.readouterr().out.split())
    (folder,) = (tmp_path / "outputs").iterdir()
    assert {path.name for path in folder.glob("*.*")} >= {"ranks.md", "ranks.tex", "ranks.csv", "report.html"}
    assert main([str(other), "--output", str(folder)]) == 2
    assert "would be overwritten; set --output to another folder" in capsys.readouterr().err
    assert main([str(table), f"{tmp_path}/./t.csv"]) == 2
    assert "expected each folder and file once" in capsys.readouterr().err
