"""``report scores``: evaluations written to disk and read back as the paper's tables, numbers by hand."""

import csv
import json
import math
import re
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from rich.console import Console

from attnpo.config.compose import compose, parse_as
from attnpo.display.output import print_sections
from attnpo.display.page import Section, TableBlock
from attnpo.evaluation.base import BenchmarkScore
from attnpo.evaluation.result import RESULT, AnswerLengths, EvaluationResult
from attnpo.lab.reports.report import write_report
from attnpo.lab.reports.report_config import ReportConfig
from attnpo.lab.reports.scores import Leaderboard, ScoreColumn, column_name, read_evaluations
from attnpo.schema import UserError
from attnpo.system.files import write_record

MAIN = {"alpaca_eval": "lc_win_rate", "mt_bench": "score", "arena_hard": "win_rate", "ifeval": "accuracy"}
PAPER_TABLES = Path(__file__).resolve().parents[3] / "experiments" / "paper"
Rounds = Mapping[str, Sequence[float]]


def an_evaluation(
    folder: Path,
    label: str,
    benchmark: str,
    rounds: Rounds | Sequence[float],
    *,
    grader: str | None = "gpt-4o-mini",
    grading: float | None = 0.2,
    key: Mapping[str, object] | None = None,
    questions: int = 80,
    higher: bool | None = True,
    counts: Mapping[str, int] | None = None,
    lengths: AnswerLengths | None = None,
) -> Path:
    """The folder of a finished evaluation; rounds alone are those of the score that counts."""
    by_name = rounds if isinstance(rounds, Mapping) else {MAIN[benchmark]: rounds}
    scores = tuple(
        BenchmarkScore(name, sum(of) / len(of), tuple(of), (min(of) - 1, max(of) + 1), grading, questions, higher)
        for name, of in by_name.items()
    )
    result = EvaluationResult(
        label=label,
        model=f"models/{label}",
        benchmark=benchmark,
        grader=grader,
        main=MAIN.get(benchmark, "score"),
        scores=scores,
        key={"model": {"weights": label}, "answers": [label], "benchmark": {"prompts": "a"}, **(key or {})},
        lengths=lengths,
        counts=counts or {},
        cost={"calls": 160.0, "dollars": 0.06},
    )
    place = folder / f"eval-{label.replace('/', '_')}-{benchmark}"
    place.mkdir(parents=True)
    result.write(place)
    return place


def report_on(tmp_path: Path, what: Sequence[Path], *overrides: str) -> Path:
    raw = compose("report", [f"output={tmp_path / 'reports'}", "name=r", *overrides])
    OmegaConf.update(raw, "what", ["scores", *map(str, what)])
    write_report(parse_as(raw, ReportConfig))
    return tmp_path / "reports" / "r"


def rows_of(folder: Path, table: str) -> list[dict[str, str]]:
    with (folder / "scores.csv").open(encoding="utf-8", newline="") as lines:
        return [row for row in csv.DictReader(lines) if row["table"] == table]


def markdown_table(folder: Path, title: str) -> dict[str, list[str]]:
    """The cells of a table of the Markdown by its first column."""
    block = (folder / "scores.md").read_text(encoding="utf-8").split(f"## {title}")[1].split("\n\n")[1]
    lines = [[cell.strip() for cell in line[1:-1].split("|")] for line in block.splitlines()]
    return {line[0]: line[1:] for line in (lines[0], *lines[2:])}


def a_paper(folder: Path) -> Path:
    """Three rows on the paper's three benchmarks."""
    alpaca = {
        "Base": ((10.0, 10.25, 10.125), (5.0, 5.0, 5.0)),
        "DPO": ((20.0, 22.0, 21.0), (6.0, 6.0, 6.0)),
        "AttentionPO": ((20.0, 22.0, 21.0), (7.0, 7.0, 7.0)),
    }
    others = {"Base": (4.0, 30.0), "DPO": (5.0, 20.0), "AttentionPO": (6.0, 20.0)}
    for label, (lc, wr) in alpaca.items():
        an_evaluation(folder, label, "alpaca_eval", {"lc_win_rate": lc, "win_rate": wr})
        mt, arena = others[label]
        an_evaluation(folder, label, "mt_bench", {"score": [mt] * 3, "turn_1": [mt + 1] * 3})
        an_evaluation(folder, label, "arena_hard", [arena] * 3)
    return folder


# ------------------------------------------------------------------------------------------------ the main table


def test_the_main_table_has_the_papers_columns_and_ranks_by_hand(tmp_path: Path) -> None:
    """LC: DPO and AttentionPO share 1.5, Base 3; WR, MT: 1, 2, 3; Arena: Base 1, the others share 2.5."""
    folder = report_on(tmp_path, [a_paper(tmp_path / "in")])
    rows = {row["method"]: row for row in rows_of(folder, "scores")}
    assert [name for name in rows["DPO"] if name and rows["DPO"][name]] == [
        *("table", "method", "alpacaeval_lc", "alpacaeval_wr", "mt_bench", "arena_hard_wr", "avg_rank")
    ]
    assert float(rows["Base"]["avg_rank"]) == (3 + 3 + 3 + 1) / 4
    assert float(rows["DPO"]["avg_rank"]) == (1.5 + 2 + 2 + 2.5) / 4
    assert float(rows["AttentionPO"]["avg_rank"]) == (1.5 + 1 + 1 + 2.5) / 4
    assert float(rows["Base"]["alpacaeval_lc"]) == 10.125
    shown = markdown_table(folder, "Scores, means over rounds")
    assert shown["Base"] == ["10.13", "5.00", "4.00", "30.00", "2.50"]
    assert "turn_1" not in shown["method"]
    assert {row["figure"] for row in rows_of(folder, "spreads")} >= {"mt_bench turn_1", "alpacaeval_wr"}


def test_ranks_are_of_printed_values_and_print_halves_upwards() -> None:
    """10.121 and 10.119 both print as 10.12, so they tie; an average of 10.125 prints as 10.13."""

    def figure(name: str, *means: float) -> ScoreColumn:
        return ScoreColumn(
            name, name, True, {str(place): BenchmarkScore(name, mean) for place, mean in enumerate(means)}
        )

    board = Leaderboard(("0", "1", "2"), (figure("a", 10.121, 10.119, 10.11),), ())
    assert board.mean_ranks() == {"0": 1.5, "1": 1.5, "2": 3.0}
    shares = Leaderboard(("0", "1"), (figure("a", 0.5012, 0.5009),), ())
    assert shares.mean_ranks() == {"0": 1.0, "1": 2.0}  # four decimals for what lies between -1 and 1
    assert figure("a", 10.125).printed_values["0"] == 10.13


def test_of_a_perplexity_the_lowest_ranks_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By MT-Bench A, B; by perplexity B, A; the third is not ranked, as its library does not say what is better."""
    for label, scores in (("A", (7.0, 12.5, 3.0)), ("B", (6.0, 11.5, 4.0)), ("C", (5.0, 10.5, 5.0))):
        for (name, higher), score in zip((("mt_bench", True), ("ifeval", False), ("odd", None)), scores, strict=True):
            an_evaluation(tmp_path / "in", label, name, {MAIN.get(name, "score"): [score]}, higher=higher)
    folder = report_on(tmp_path, [tmp_path / "in"])
    ranks = {row["method"]: float(row["avg_rank"]) for row in rows_of(folder, "scores")}
    assert ranks == {"A": (1 + 3) / 2, "B": 2.0, "C": (3 + 1) / 2}
    out = " ".join(capsys.readouterr().out.split())
    assert "1 is best (highest score, for ifeval the lowest)" in out
    assert "does not include odd, because it is unknown whether higher is better" in out


def test_rounds_have_both_intervals_and_the_three_spreads_stand_apart(tmp_path: Path) -> None:
    folder = report_on(tmp_path, [a_paper(tmp_path / "in")])
    row = next(row for row in rows_of(folder, "rounds") if row["method"] == "DPO")
    assert float(row["alpacaeval_lc_ci95"]) == pytest.approx(1.131607, abs=1e-6)
    assert float(row["alpacaeval_lc_t95"]) == pytest.approx(2.484138, abs=1e-6)
    title = "Means over rounds ± 1.96 s/sqrt(n) (t: half width by Student's t)"
    assert markdown_table(folder, title)["DPO"][0] == "21.00 ± 1.13 (t 2.48)"
    spread = next(
        row for row in rows_of(folder, "spreads") if (row["figure"], row["method"]) == ("alpacaeval_lc", "DPO")
    )
    apart = ("questions_low", "questions_high", "rounds_sd", "grading_sd")
    assert [float(spread[name]) for name in apart] == [19.0, 23.0, 1.0, 0.2]


def test_one_round_has_no_spread(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for label in ("A", "B"):
        an_evaluation(tmp_path / "in", label, "mt_bench", [6.0 + len(label)])
    folder = report_on(tmp_path, [tmp_path / "in"])
    assert rows_of(folder, "rounds") == []
    assert all(row["rounds_sd"] == "" and row["rounds"] == "1" for row in rows_of(folder, "spreads"))
    assert "only one round, so no spread over rounds: A, B" in capsys.readouterr().out


def test_a_row_that_lacks_a_benchmark_has_an_empty_cell_and_no_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_paper(tmp_path / "in")
    an_evaluation(tmp_path / "in", "New", "mt_bench", [9.0, 9.0, 9.0])
    an_evaluation(tmp_path / "in", "New", "ifeval", [0.5], grader=None, grading=None)
    folder = report_on(tmp_path, [tmp_path / "in"])
    rows = {row["method"]: row for row in rows_of(folder, "scores")}
    assert (rows["New"]["alpacaeval_lc"], rows["New"]["avg_rank"], rows["New"]["ifeval"]) == ("", "", "0.5")
    assert float(rows["Base"]["avg_rank"]) == 2.5  # as without the row
    out = capsys.readouterr().out
    assert "grading noise is unknown" not in out  # a measure without a grader has none
    assert "avg_rank: none for New" in out and "avg_rank: does not include ifeval, which only one row has" in out
    assert markdown_table(folder, "Scores, means over rounds")["New"] == ["", "", "9.00", "", "0.5000", ""]


def test_a_score_that_is_no_number_is_an_empty_cell(tmp_path: Path) -> None:
    for label, mean in (("A", 5.0), ("B", math.nan)):
        an_evaluation(tmp_path / "in", label, "mt_bench", [mean] * 3)
    folder = report_on(tmp_path, [tmp_path / "in"])
    assert [row["mt_bench"] for row in rows_of(folder, "scores") if row["method"] == "B"] == [""]
    with pytest.raises(UserError, match=r"no main score in .*eval-B-mt_bench is a number"):
        report_on(tmp_path, [tmp_path / "in" / "eval-B-mt_bench"], "name=other")


# ------------------------------------------------------------------------------------------------ noise


def test_differences_below_the_grading_noise_are_named(tmp_path: Path) -> None:
    """Noise of a difference: 1.96 sqrt(0.3^2 + 0.4^2) = 0.98."""
    an_evaluation(tmp_path / "in", "A", "mt_bench", [6.0, 6.0], grading=0.3)
    an_evaluation(tmp_path / "in", "B", "mt_bench", [6.97, 6.97], grading=0.4)
    an_evaluation(tmp_path / "in", "C", "mt_bench", [7.96, 7.96], grading=0.3)  # 0.99 from B
    an_evaluation(tmp_path / "in", "D", "mt_bench", [7.96, 7.96], grading=None)
    (row,) = rows_of(report_on(tmp_path, [tmp_path / "in"]), "close")
    assert (row["method"], row["not told from"]) == ("B", "A")
    assert float(row["difference"]) == pytest.approx(0.97) and float(row["grading_noise"]) == pytest.approx(0.98)


# ------------------------------------------------------------------------------------------------ mixed


@pytest.mark.parametrize(
    ("how", "told", "ranked"),
    [
        ({"grader": "gpt-4o"}, "grader gpt-4o against gpt-4o-mini", False),
        ({"key": {"benchmark": {"prompts": "b"}}}, "benchmark.prompts b against a", False),
        ({"rounds": [6.0]}, "rounds 1 against 3", True),
        ({"key": {"grading": {"again": 0.5}}}, "grading.again 0.5 against null", True),
        (
            {"key": {"benchmark": {"prompts": "a", "settings": {"path": "x"}}}},
            "benchmark.settings.path x against null",
            True,
        ),
    ],
)
def test_what_is_mixed_in_a_column_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: dict[str, object], told: str, ranked: bool
) -> None:
    """A column of different graders or prompts is not ranked either; another number of rounds is said alone."""
    for label in ("A", "B"):
        an_evaluation(tmp_path / "in", label, "mt_bench", [6.0, 6.5, 7.0])
        an_evaluation(tmp_path / "in", label, "arena_hard", [30.0])
    rounds = how.pop("rounds", [6.0, 6.5, 7.0])
    an_evaluation(tmp_path / "in", "Odd", "mt_bench", rounds, **how)  # type: ignore[arg-type]
    an_evaluation(tmp_path / "in", "Odd", "arena_hard", [40.0])
    folder = report_on(tmp_path, [tmp_path / "in"])
    out = " ".join(capsys.readouterr().out.split())
    assert f"WARNING: mt_bench: conditions for Odd differ from those for A, B ({told})" in out
    rows = {row["method"]: row["avg_rank"] for row in rows_of(folder, "scores")}
    # Arena-Hard: Odd 1, the others 2.5. MT-Bench, where it counts: Odd 3 with one round of 6, else all three 2.
    lower = {"A": 2.0, "B": 2.0, "Odd": 2.0} if "rounds" in told else {"A": 2.25, "B": 2.25, "Odd": 1.5}
    expected = lower if ranked else {"A": 2.5, "B": 2.5, "Odd": 1.0}
    assert {name: float(rank) for name, rank in rows.items()} == expected
    assert ("mean rank over mt_bench, arena_hard_wr" in out) == ranked
    assert markdown_table(folder, "Scores, means over rounds")["Odd"][0].endswith("*")


def test_pairs_of_different_graders_are_not_held_against_noise(tmp_path: Path) -> None:
    for label, grader in (("A", "one"), ("B", "one"), ("C", "two")):
        an_evaluation(tmp_path / "in", label, "mt_bench", [6.0, 6.0], grader=grader)
    pairs = {(row["method"], row["not told from"]) for row in rows_of(report_on(tmp_path, [tmp_path / "in"]), "close")}
    assert pairs == {("A", "B")}


# ------------------------------------------------------------------------------------------------ folders


def test_two_results_of_one_label_are_refused(tmp_path: Path) -> None:
    one = an_evaluation(tmp_path / "one", "A", "mt_bench", [6.0])
    two = an_evaluation(tmp_path / "two", "A", "mt_bench", [7.0])
    with pytest.raises(UserError, match="both evaluate 'A' on mt_bench"):
        report_on(tmp_path, [one, two])
    assert len(rows_of(report_on(tmp_path, [one, tmp_path / "one"]), "scores")) == 1  # the same folder twice is one


def test_an_unfinished_evaluation_is_left_out_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = an_evaluation(tmp_path, "A", "mt_bench", [6.0])
    begun = tmp_path / "eval-B-mt_bench"
    begun.mkdir()
    (begun / "grades.jsonl").write_text("")
    report_on(tmp_path, [done, begun])
    left = f"skipped {begun}, which is not finished"
    assert "".join(left.split()) in "".join(capsys.readouterr().out.split())
    with pytest.raises(UserError, match=f"at least one finished evaluation; {re.escape(left)}"):
        report_on(tmp_path, [begun], "name=other")


@pytest.mark.parametrize("damage", ["edited", "cut", "of another version", "a list"])
def test_a_damaged_result_is_an_error_of_the_user(tmp_path: Path, damage: str) -> None:
    place = an_evaluation(tmp_path, "A", "mt_bench", [6.0])
    path = place / RESULT
    text = path.read_text(encoding="utf-8")
    if damage == "of another version":
        write_record(path, {"label": "A", "scores": [{"name": "score"}]})
    else:
        path.write_text({"edited": text.replace("6.0", "9.0"), "cut": text[:50], "a list": "[]"}[damage])
    with pytest.raises(UserError, match=r"evaluation\.json"):
        report_on(tmp_path, [place])


def test_a_folder_without_evaluations_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"expected the folder of a finished evaluation .*found nothing"):
        report_on(tmp_path, [tmp_path / "empty"])
    with pytest.raises(UserError, match="it does not exist"):
        report_on(tmp_path, [tmp_path / "nowhere"])
    raw = compose("report", [])
    OmegaConf.update(raw, "what", ["scores"])
    with pytest.raises(UserError, match=r"report scores: expected .*`scores FOLDER \.\.\.`"):
        write_report(parse_as(raw, ReportConfig))


# ------------------------------------------------------------------------------------------------ printed numbers


def test_printed_numbers_stand_beside_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the difference, of the base model asked for; average ranks over other rows are not compared."""
    a_paper(tmp_path / "in")
    printed = f"printed={PAPER_TABLES / 'main_results' / 'printed.csv'}"
    folder = report_on(tmp_path, [tmp_path / "in"], printed, "label=llama-3-8b-instruct")
    rows = {row["method"]: row for row in rows_of(folder, "scores printed")}
    assert len(rows) == 14 and rows["SimPO"]["mt_bench"] == ""
    assert (rows["DPO"]["mt_bench printed"], float(rows["DPO"]["mt_bench difference"])) == ("6.73", 5.0 - 6.73)
    assert all("avg_rank printed" not in row or row["avg_rank printed"] == "" for row in rows.values())
    out = " ".join(capsys.readouterr().out.split())
    assert "average ranks are not compared, because the ranked rows differ (14 in the file, 3 here)" in out
    assert "skipped rows for other models (llama3_8b_base_sft)" in out
    assert r"\caption{Printed numbers of main\_results/printed.csv next to our scores}" in (
        folder / "scores.tex"
    ).read_text(encoding="utf-8")


def test_a_file_on_several_models_needs_the_one_that_is_meant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_paper(tmp_path / "in")
    printed = f"printed={PAPER_TABLES / 'main_results' / 'printed.csv'}"
    folder = report_on(tmp_path, [tmp_path / "in"], printed)
    assert rows_of(folder, "scores printed") == []
    out = " ".join(capsys.readouterr().out.split())
    assert "because it has rows for several models; set label=llama3_8b_base_sft (or llama3_8b_instruct)" in out
    report_on(tmp_path, [tmp_path / "in"], printed, "label=mistral", "name=other")
    assert "because it has no rows for mistral, only for llama3_8b_base_sft" in " ".join(
        capsys.readouterr().out.split()
    )


def test_lengths_and_means_over_rounds_meet_their_printed_columns(tmp_path: Path) -> None:
    an_evaluation(
        tmp_path / "in", "dpo", "arena_hard", [50.0, 52.0, 51.0], lengths=AnswerLengths(500.0, 2000.0, 0.25, "gpt-4o")
    )
    printed = tmp_path / "lengths.csv"
    printed.write_text("method,arena_hard_wr_mean,arena_hard_wr_ci95,n_tokens,other\nDPO,50.50,1.00,533,1.5\n")
    folder = report_on(tmp_path, [tmp_path / "in"], f"printed={printed}")
    (rounds,) = rows_of(folder, "rounds printed")
    assert float(rounds["arena_hard_wr_mean difference"]) == pytest.approx(0.5)
    assert float(rounds["arena_hard_wr_ci95 difference"]) == pytest.approx(0.131607, abs=1e-6)
    (lengths,) = rows_of(folder, "lengths printed")
    assert (lengths["n_tokens printed"], float(lengths["n_tokens difference"])) == ("533", -33.0)
    assert "printed columns that our tables lack: other" in (folder / "scores.md").read_text(encoding="utf-8")
    wrong = tmp_path / "wrong.csv"
    wrong.write_text("arm,mt_bench\nDPO,6.73\n")
    with pytest.raises(UserError, match="expected a column method"):
        report_on(tmp_path, [tmp_path / "in"], f"printed={wrong}", "name=w")
    wrong.write_text("method,loss\nDPO,6.73\n")
    with pytest.raises(UserError, match="expected the columns of one of our tables"):
        report_on(tmp_path, [tmp_path / "in"], f"printed={wrong}", "name=w")


# ------------------------------------------------------------------------------------------------ forms


def test_texts_are_escaped_in_latex(tmp_path: Path) -> None:
    an_evaluation(tmp_path / "in", r"50% & a_b \x", "mt_bench", [6.0, 7.0])
    text = (report_on(tmp_path, [tmp_path / "in"]) / "scores.tex").read_text(encoding="utf-8")
    assert r"50\% \& a\_b \textbackslash{}x & 6.50 &" in text
    assert r"6.50 $\pm$ 0.98 (t 6.35)" in text  # s = 0.7071: 1.96 / 2, 12.7062 / 2
    assert text.count(r"\begin{table}") == text.count(r"\bottomrule") >= 3


def test_wide_tables_are_continued_on_a_narrow_terminal() -> None:
    """No line is longer than the terminal, no number is broken, and each part names its rows."""
    columns = ["figure", "method", *(f"alpacaeval lc column {place}" for place in range(14))]
    rows = [["lc", name, *(1000.25 + place for place in range(14))] for name in ("Base", "AttentionPO")]
    out = StringIO()
    table = TableBlock(columns, rows, "Title", dict.fromkeys(columns, 2), naming=2)
    print_sections(Console(file=out, width=80), [Section("Section", [table])])
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    numbers = [word for line in lines for word in line.split() if "." in word]
    assert sorted(numbers) == sorted(2 * [f"{1000.25 + place:.2f}" for place in range(14)])
    parts = sum("AttentionPO" in line for line in lines)
    assert parts > 1 and sum(line.split()[:2] == ["lc", "Base"] for line in lines) == parts
    assert out.getvalue().count("Title") == 1


def test_columns_are_named_by_benchmark_and_score(tmp_path: Path) -> None:
    place = an_evaluation(tmp_path, "A", "ifeval", {"accuracy": [0.5], "strict": [0.25]})
    (result,) = read_evaluations([place])[0].values()
    assert [column_name(result, name) for name in ("accuracy", "strict")] == ["ifeval", "ifeval strict"]
    folder = report_on(tmp_path, [place])
    assert json.loads((folder / "report.json").read_text())["files"] == [
        *("report.html", "scores.csv", "scores.md", "scores.tex")
    ]
    assert "Cost" in (folder / "report.html").read_text(encoding="utf-8")


def test_what_was_missing_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    an_evaluation(tmp_path / "in", "A", "mt_bench", [6.0], counts={"no verdict": 2, "empty answer": 0}, questions=79)
    an_evaluation(tmp_path / "in", "B", "mt_bench", [6.0])
    (row,) = rows_of(report_on(tmp_path, [tmp_path / "in"]), "missing")
    assert (row["method"], row["reason"], row["count"]) == ("A", "no verdict", "2")
    assert "mt_bench: different numbers of questions (A 79, B 80)" in capsys.readouterr().out
