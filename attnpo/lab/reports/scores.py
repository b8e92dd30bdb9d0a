"""``attnpo.report scores``: tables of finished evaluations in the paper's format, next to the paper's numbers.

Reads the evaluations, finds scores that are not comparable, and ranks the rest. Shows the paper's main table, rounds
with intervals, differences below the grading noise, response lengths, missing items, and the spread of every score.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import isfinite
from pathlib import Path
from statistics import stdev

import numpy as np

from attnpo.display.page import Section, TableBlock
from attnpo.display.printed import (
    DIFFERENCE,
    PRINTED,
    KeyedTable,
    PublishedTable,
    file_label,
    find_matching_table,
    format_missing,
    join_published,
    read_published_table,
)
from attnpo.display.tables import Cell, format_fixed, round_half_up
from attnpo.evaluation.base import BenchmarkScore
from attnpo.evaluation.intervals import average_ranks
from attnpo.evaluation.result import RESULT, EvaluationResult, format_rounds, read_result
from attnpo.evaluation.spreads import grading_noise, half_widths
from attnpo.lab.reports.folder_report import MODELS, normalize_name, row_model
from attnpo.lab.reports.output import publish_report
from attnpo.lab.reports.report_config import SCORES
from attnpo.lab.results import missing_folder_error
from attnpo.run.identity import flatten_with_classes
from attnpo.schema import UserError, join_names
from attnpo.system.files import find_differences

MAIN = ""
"""Placeholder for a benchmark's main score, regardless of its name."""
PAPER = {
    ("alpaca_eval", "lc_win_rate"): "alpacaeval_lc",
    ("alpaca_eval", "win_rate"): "alpacaeval_wr",
    ("mt_bench", MAIN): "mt_bench",
    ("arena_hard", MAIN): "arena_hard_wr",
}
"""Column names of the paper's tables by benchmark and score, in the paper's order."""
OF_MODEL = ("model", "answers")  # leading parts of key names that differ between models
ROUNDS = "rounds"
# Differences that keep scores comparable: numbers of rounds and gradings, and paths of files whose digests are checked.
OF_ONE_KIND = (ROUNDS, "grading", "benchmark.settings.path")
METHOD, BENCHMARK, FIGURE, ARM, AVG_RANK = "method", "benchmark", "figure", "arm", "avg_rank"
PRINTED_RANK = "avg_rank_printed"  # column of the paper's average rank in files of printed numbers
MEAN, CI, T = "_mean", "_ci95", "_t95"  # column suffixes; the first two as in the paper's table of three runs
DECIMALS = 2  # in the paper's tables
Cells = dict[str, Cell]


def column_name(result: EvaluationResult, score: str) -> str:
    """Returns the column name of a score: the paper's if it has one, otherwise one built from benchmark and score."""
    main = score == result.main
    named = PAPER.get((result.benchmark, score)) or (PAPER.get((result.benchmark, MAIN)) if main else None)
    return named or (result.benchmark if main else f"{result.benchmark} {score}")


# ------------------------------------------------------------------------------------------------ reading


def read_evaluations(folders: Sequence[Path]) -> tuple[dict[Path, EvaluationResult], list[str]]:
    """Reads the finished evaluations in ``folders`` or one level below; returns them with notes on unfinished ones.

    Raises UserError for a folder without evaluations, a damaged result, or two results with the same label and
    benchmark.
    """
    places: dict[Path, Path] = {}
    notes = []
    for folder in folders:
        found = [folder] if (folder / RESULT).is_file() else sorted(path.parent for path in folder.glob(f"*/{RESULT}"))
        if not found and not any(folder.glob("*.jsonl")):
            raise missing_folder_error(folder, f"a finished evaluation ({RESULT}), or a parent of such folders")
        if not found:
            notes.append(
                f"skipped {folder}, which is not finished (no {RESULT}); run its attnpo.evaluate command again"
            )
        for place in found:
            places.setdefault(place.resolve(), place)
    if not places:
        raise UserError(f"report scores: expected at least one finished evaluation; {'; '.join(notes)}")
    results = {place: read_evaluation(place) for place in places.values()}
    once: dict[tuple[str, str], Path] = {}
    for place, result in results.items():
        other = once.setdefault((result.label, result.benchmark), place)
        if other != place:
            raise UserError(
                f"report scores: {other} and {place} both evaluate {result.label!r} on {result.benchmark}; omit one "
                "of them, or evaluate one of them under another label"
            )
    return results, notes


def read_evaluation(folder: Path) -> EvaluationResult:
    """Reads the result in a folder. Raises UserError if it is missing, damaged or from another version."""
    try:
        result = read_result(folder)
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise UserError(
            f"{folder / RESULT}: expected the result of an evaluation, but it cannot be read ({problem!r}); delete it "
            "and run the evaluation's command again"
        ) from problem
    if result is None:  # removed in the meantime
        raise missing_folder_error(folder, f"a finished evaluation ({RESULT})")
    return result


# ------------------------------------------------------------------------------------------------ comparable


@dataclass(frozen=True)
class ConditionMismatch:
    """Evaluations of a benchmark whose conditions differ from those of the majority.

    ``usual``, ``odd``: labels evaluated under the usual and the differing conditions. ``how``: each difference as
    (name, usual value, odd value).
    """

    benchmark: str
    usual: tuple[str, ...]
    odd: tuple[str, ...]
    how: tuple[tuple[str, str, str], ...]

    @property
    def is_comparable(self) -> bool:
        """Returns whether the scores are still comparable, i.e. whether all differences are in ``OF_ONE_KIND``."""
        return all(name in OF_ONE_KIND or name.partition(".")[0] in OF_ONE_KIND for name, _, _ in self.how)

    def warning(self) -> str:
        """Returns a warning that names the labels and the first four differences."""
        shown = ", ".join(f"{name} {odd} against {usual}" for name, usual, odd in self.how[:4])
        shown += f", and {len(self.how) - 4} more" if len(self.how) > 4 else ""
        verdict = "not comparable, so this benchmark is not ranked"
        return (
            f"WARNING: {self.benchmark}: conditions for {join_names(self.odd)} differ from those for "
            f"{join_names(self.usual)} ({shown}): "
            f"{'means are comparable, but spreads are not' if self.is_comparable else verdict}"
        )


def find_mismatches(results: Sequence[EvaluationResult]) -> list[ConditionMismatch]:
    """Finds each benchmark's evaluations whose conditions differ from those of the majority."""
    out = []
    for benchmark in dict.fromkeys(result.benchmark for result in results):
        made = {result.label: grading_conditions(result) for result in results if result.benchmark == benchmark}
        usual = max(made.values(), key=list(made.values()).count)
        ways: dict[tuple[tuple[str, str, str], ...], list[str]] = {}
        for label, one in made.items():
            if how := tuple(find_differences(usual, one)):
                ways.setdefault(how, []).append(label)
        names = tuple(label for label, one in made.items() if one == usual)
        out += [ConditionMismatch(benchmark, names, tuple(odd), how) for how, odd in ways.items()]
    return out


def grading_conditions(result: EvaluationResult) -> dict[str, object]:
    """Returns everything that must agree within a column: grader, rounds, and the key without its model-specific parts.

    The values are converted to JSON, so that stored and new evaluations compare equal.
    """
    key = {
        name: value
        for name, value in flatten_with_classes(result.key).items()
        if name.partition(".")[0] not in OF_MODEL
    }
    rounds = max((len(score.rounds) for score in result.scores), default=0)
    found: dict[str, object] = json.loads(json.dumps({"grader": result.grader, **key, ROUNDS: rounds}, default=str))
    return found


# ------------------------------------------------------------------------------------------------ columns


@dataclass(frozen=True)
class ScoreColumn:
    """Column of one benchmark score, with the score of each label that has one.

    ``shown``: whether the main table has this column. ``graded``: whether a grader produces the score.
    """

    name: str
    benchmark: str
    shown: bool
    scores: Mapping[str, BenchmarkScore]
    graded: bool = True

    @property
    def digits(self) -> int:
        """Returns the number of printed decimals: two as in the paper, four for shares."""
        largest = max(abs(score.mean) for score in self.scores.values())
        return 4 if largest <= 1 else 2

    @property
    def higher_is_better(self) -> bool | None:
        """Returns whether higher scores are better; None if the evaluations disagree or do not say."""
        said = {score.higher_is_better for score in self.scores.values()}
        return said.pop() if len(said) == 1 else None

    @property
    def printed_values(self) -> dict[str, float]:
        """Returns the rounded means by label."""
        return {label: round_half_up(score.mean, self.digits) for label, score in self.scores.items()}


@dataclass(frozen=True)
class Leaderboard:
    """Labels and score columns in display order, and the evaluations that are not comparable."""

    labels: tuple[str, ...]
    figures: tuple[ScoreColumn, ...]
    mixed: tuple[ConditionMismatch, ...]

    @property
    def main_columns(self) -> list[ScoreColumn]:
        """Returns the columns of the main table."""
        return [figure for figure in self.figures if figure.shown]

    def rankable_columns(self) -> list[ScoreColumn]:
        """Returns the columns used for ranks. These need at least two labels, uniform grading and a known direction."""
        unfit = {one.benchmark for one in self.mixed if not one.is_comparable}
        return [
            figure
            for figure in self.main_columns
            if len(figure.scores) > 1 and figure.benchmark not in unfit and figure.higher_is_better is not None
        ]

    def conditions_index(self, label: str, benchmark: str) -> int:
        """Returns an index for the grading conditions used for a label on a benchmark; 0 for the usual conditions."""
        ways = [one for one in self.mixed if one.benchmark == benchmark and not one.is_comparable]
        return next((number for number, one in enumerate(ways, start=1) if label in one.odd), 0)

    def mean_ranks(self) -> dict[str, float]:
        """Returns each label's mean rank over the printed scores (1 is best); omits labels that lack a score.

        Ties share the mean of their ranks (paper, main table; reference EVALUATION 6). A benchmark with two columns
        counts twice.
        """
        figures = self.rankable_columns()
        means = [figure.printed_values for figure in figures]
        whole = {label: [row[label] for row in means] for label in self.labels if all(label in row for row in means)}
        if not figures or len(whole) < 2:
            return {}
        ranks = average_ranks(np.array(list(whole.values())), [bool(figure.higher_is_better) for figure in figures])
        return dict(zip(whole, ranks.tolist(), strict=True))


def build_leaderboard(results: Sequence[EvaluationResult], ways: Sequence[ConditionMismatch]) -> Leaderboard:
    """Builds the leaderboard of the given evaluations: the paper's columns first, then the others in input order."""
    found: dict[str, list[tuple[EvaluationResult, BenchmarkScore]]] = {}
    for result in results:
        for score in result.scores:
            if isfinite(score.mean):
                found.setdefault(column_name(result, score.name), []).append((result, score))
    paper = list(PAPER.values())
    names = sorted(found, key=lambda name: paper.index(name) if name in paper else len(paper))
    figures = tuple(
        ScoreColumn(
            name,
            found[name][0][0].benchmark,
            any(one.name == of.main or (of.benchmark, one.name) in PAPER for of, one in found[name]),
            {result.label: score for result, score in found[name]},
            any(result.grader is not None for result, _ in found[name]),
        )
        for name in names
    )
    return Leaderboard(tuple(dict.fromkeys(result.label for result in results)), figures, tuple(ways))


# ------------------------------------------------------------------------------------------------ the report


def write_scores_report(
    folders: Sequence[Path], printed: Sequence[Path], model: str | None, output: Path, mark: str
) -> None:
    """Prints the tables of finished evaluations and writes them to ``output``.

    ``printed``: CSV files whose rows are shown next to ours. ``model``: model whose rows are used if a file covers
    several. ``mark``: digest of the command. Raises UserError for folders without a result, damaged results, and files
    that share no column with our tables.
    """
    found, notes = read_evaluations(folders)
    results = list(found.values())
    board = build_leaderboard(results, find_mismatches(results))
    if not board.main_columns:
        places = ", ".join(map(str, found))
        raise UserError(f"report scores: expected a main score, but no main score in {places} is a number")
    scores, rounds = main_tables(board)
    lengths = lengths_table(results)
    joined: list[KeyedTable] = []
    lines: list[str] = []
    for path in printed:
        tables, said = join_printed_scores([scores, rounds, *lengths], path, model)
        joined += tables
        lines += said
    several = any(len(score.rounds) > 1 for figure in board.main_columns for score in figure.scores.values())
    below = [*([rounds] if several else []), *within_noise_table(board), *lengths, *missing_table(results)]
    told = [*(way.warning() for way in board.mixed), *leaderboard_notes(board), *lines, *notes]
    names = list(dict.fromkeys(name for result in results for name in result.cost))
    costs: list[list[Cell]] = [[result.label, result.benchmark, *map(result.cost.get, names)] for result in results]
    publish_report(
        f"Scores of {join_names(board.labels)}",
        [scores, *joined, *below, *spreads_table(board)],
        told,
        output,
        SCORES,
        mark,
        [Section("Cost", [TableBlock([METHOD, BENCHMARK, *names], costs)])],
        why="none of the evaluations has them",
    )


def leaderboard_notes(board: Leaderboard) -> list[str]:
    """Lists notes below the tables: how ranks are computed, what is not ranked, unknown spreads, question counts."""
    figures, ranks, labels = board.rankable_columns(), board.mean_ranks(), board.labels
    shown = [(figure, label, score) for figure in board.main_columns for label, score in figure.scores.items()]
    over, lower = (
        join_column_names(figures),
        join_column_names(figure for figure in figures if not figure.higher_is_better),
    )
    unranked = [label for label in labels if label not in ranks]
    alone = join_column_names(figure for figure in board.main_columns if len(figure.scores) == 1 and len(labels) > 1)
    aimless = join_column_names(
        figure for figure in board.main_columns if figure.higher_is_better is None and len(figure.scores) > 1
    )
    single = list(dict.fromkeys(label for _, label, score in shown if len(score.rounds) == 1))
    unknown = join_column_names(figure for figure, _, score in shown if figure.graded and score.grading is None)
    best = "highest score" + (f", for {lower} the lowest" if lower else "")
    lines: list[tuple[object, str]] = [
        (
            ranks,
            f"{AVG_RANK}: mean rank over {over}, from the printed means of the {len(ranks)} rows with all of them; "
            f"1 is best ({best}); ties share the mean rank",
        ),
        (
            unranked,
            f"{AVG_RANK}: none for {join_names(unranked)}; ranking needs two rows with scores on the same benchmarks",
        ),
        (alone, f"{AVG_RANK}: does not include {alone}, which only one row has"),
        (aimless, f"{AVG_RANK}: does not include {aimless}, because it is unknown whether higher is better"),
        (single, f"only one round, so no spread over rounds: {join_names(single)}"),
        (unknown, f"grading noise is unknown for some rows of {unknown}; their differences are not compared with it"),
        (
            any(score.grading is not None for _, _, score in shown),
            "grading noise of a difference: 1.96 sqrt(a^2 + b^2), where a and b are the standard deviations of the two "
            "scores when the same answers are graded again; smaller differences may be due to grading alone",
        ),
        (
            len(shown) < len(board.main_columns) * len(labels),
            "empty cell: the row was not evaluated on that benchmark",
        ),
        (board.mixed, "*: graded or answered under other conditions than most of the column; see the warning"),
    ]
    for figure in board.main_columns:
        sizes = {label: score.questions for label, score in figure.scores.items() if score.questions}
        told = ", ".join(f"{label} {count}" for label, count in sizes.items())
        lines.append((len(set(sizes.values())) > 1, f"{figure.name}: different numbers of questions ({told})"))
    return [line for holds, line in lines if holds]


def join_column_names(figures: Iterable[ScoreColumn]) -> str:
    """Joins the distinct names of score columns with commas."""
    return ", ".join(dict.fromkeys(figure.name for figure in figures))


# ------------------------------------------------------------------------------------------------ tables


def main_tables(board: Leaderboard) -> list[KeyedTable]:
    """Builds the paper's main table (means, average rank), and its table over rounds with both kinds of interval.

    Printed means are rounded and marked with an asterisk if they were graded differently from most. Rounds are printed
    as e.g. ``21.90 ± 1.57 (t 3.45)``. The CSV has the unrounded numbers.
    """
    ranks, odd = board.mean_ranks(), {(label, one.benchmark) for one in board.mixed for label in one.odd}
    tables = [list[Cells]() for _ in range(4)]
    digits = {AVG_RANK: DECIMALS}
    for label in board.labels:
        full, told, wide, words = (Cells({METHOD: label}) for _ in range(4))
        for figure in board.main_columns:
            name, score = figure.name, figure.scores.get(label)
            parts = [name + MEAN, name + CI, name + T]
            digits |= dict.fromkeys((name, *parts), figure.digits)
            full[name] = told[name] = words[name] = None if score is None else score.mean
            wide |= zip(parts, (full[name], *half_widths(() if score is None else score.rounds)), strict=True)
            if score is not None:
                mean = figure.printed_values[label]
                text = f"{mean:.{figure.digits}f}"
                told[name] = f"{text}*" if (label, figure.benchmark) in odd else mean
                words[name] = f"{text} {format_rounds(score, figure.digits)}".rstrip()
        rank = ranks.get(label)
        near = None if rank is None else round_half_up(rank, DECIMALS)
        for rows, cells, last in zip(tables, (full, told, wide, words), (rank, near, rank, near), strict=True):
            rows.append({**cells, AVG_RANK: last})
    scores, scores_read, rounds, rounds_read = tables
    title = "Means over rounds ± 1.96 s/sqrt(n) (t: half width by Student's t)"
    return [
        *_make_table("scores", "Scores, means over rounds", scores, (METHOD,), scores_read, digits),
        *_make_table("rounds", title, rounds, (METHOD,), rounds_read, digits),
    ]


def _make_table(
    name: str,
    title: str,
    rows: Sequence[Cells],
    keys: tuple[str, ...],
    shown: Sequence[Cells] = (),
    digits: Mapping[str, int] | None = None,
) -> list[KeyedTable]:
    if not rows:
        return []
    table = KeyedTable(name, title, tuple(rows[0]), tuple(rows), keys, None, digits or {})
    reading = replace(table, columns=tuple(shown[0]), rows=tuple(shown)) if shown else None
    return [replace(table, reading=reading)]


def spreads_table(board: Leaderboard) -> list[KeyedTable]:
    """Builds the table of spreads: 95 % interval over questions, standard deviations over rounds and over gradings.

    Cells are empty for unknown spreads.
    """
    rows: list[Cells] = []
    shown: list[Cells] = []
    for figure in board.figures:
        for label, score in figure.scores.items():
            spread = stdev(score.rounds) if len(score.rounds) > 1 else None
            low, high = score.interval or (None, None)
            names: Cells = {FIGURE: figure.name, METHOD: label}
            of_questions: Cells = {"questions": score.questions, "questions_low": low, "questions_high": high}
            of_rounds: Cells = {"rounds": len(score.rounds), "rounds_sd": spread, "grading_sd": score.grading}
            rows.append(names | {"mean": score.mean} | of_questions | of_rounds)
            mean, first, last, of, grading = (
                "" if one is None else format_fixed(one, figure.digits)
                for one in (score.mean, low, high, spread, score.grading)
            )
            within = f"{first} to {last} ({score.questions})" if first else f"({score.questions})"
            told: Cells = {"mean": mean, "95 % over questions (n)": within}
            told["sd of rounds (n)"] = of and f"{of} ({len(score.rounds)})"
            shown.append({**names, **told, "sd of grading": grading})
    return _make_table("spreads", "Spread of every score", rows, (FIGURE, METHOD), shown)


def within_noise_table(board: Leaderboard) -> list[KeyedTable]:
    """Builds a table of label pairs whose scores differ by less than the grading noise; empty if no pair does.

    Pairs that were graded or answered differently are skipped.
    """
    rows: list[Cells] = []
    for figure in board.main_columns:
        graded = [
            (label, score.mean, score.grading, board.conditions_index(label, figure.benchmark))
            for label, score in figure.scores.items()
            if score.grading is not None
        ]
        for (one, higher, a, way), (other, lower, b, same) in combinations(
            sorted(graded, key=lambda item: -item[1]), 2
        ):
            if way == same and higher - lower < (noise := grading_noise(a, b)):
                names: Cells = {FIGURE: figure.name, METHOD: one, "not told from": other}
                rows.append(names | {"difference": higher - lower, "grading_noise": noise})
    return _make_table("close", "Differences below the grading noise", rows, (FIGURE, METHOD))


def lengths_table(results: Sequence[EvaluationResult]) -> list[KeyedTable]:
    """Builds the table of answer lengths by benchmark and label; empty if no evaluation recorded lengths."""
    rows: list[Cells] = [
        {
            BENCHMARK: result.benchmark,
            METHOD: result.label,
            "n_tokens": lengths.tokens,
            "n_characters": lengths.characters,
            "cut": lengths.cut,
            "tokenizer": lengths.tokenizer,
        }
        for result in sorted(results, key=lambda result: result.benchmark)
        if (lengths := result.lengths) is not None
    ]
    digits = {"n_tokens": 1, "n_characters": 1, "cut": 3}
    title = "Response lengths, means over questions; cut: share that reached the maximum number of tokens"
    return _make_table("lengths", title, rows, (BENCHMARK, METHOD), digits=digits)


def missing_table(results: Sequence[EvaluationResult]) -> list[KeyedTable]:
    """Builds the table of missing or replaced items by label, benchmark and reason, if there are any such items."""
    rows: list[Cells] = [
        {METHOD: result.label, BENCHMARK: result.benchmark, "reason": reason, "count": count}
        for result in results
        for reason, count in result.counts.items()
        if count
    ]
    return _make_table("missing", "Missing or replaced", rows, (METHOD, BENCHMARK, "reason"))


# ------------------------------------------------------------------------------------------------ printed numbers


def join_printed_scores(
    tables: Sequence[KeyedTable], path: Path, model: str | None
) -> tuple[list[KeyedTable], list[str]]:
    """Joins a model's printed rows to each of our tables that has columns in common; returns tables and notes.

    Raises UserError for a file without a ``method`` column or without any of our columns.
    """
    printed = read_published_table(path, [METHOD, ARM, BENCHMARK, *MODELS], {PRINTED_RANK: AVG_RANK})
    if METHOD not in printed.columns:
        raise UserError(f"printed={path}: expected a column {METHOD}, got {', '.join(printed.columns)}")
    find_matching_table(tables, printed)  # raises if no column is shared
    printed, lines = select_model_rows(printed, model)
    if not printed.rows:
        return [], lines
    methods = dict.fromkeys(str(row[METHOD]) for row in printed.rows)
    theirs = {name.casefold() for name in methods}
    ranked = {str(row[METHOD]).casefold() for row in tables[0].rows if row[AVG_RANK] is not None}
    left = [name for name in printed.columns if name in printed.digits]
    shared = [[name for name in left if name in table.columns and name not in table.keys] for table in tables]
    if AVG_RANK in left and ranked != theirs:
        left.remove(AVG_RANK)
        lines.append(
            f"{file_label(path)}: average ranks are not compared, because the ranked rows differ ({len(theirs)} "
            f"in the file, {len(ranked)} here)"
        )
    joined: list[KeyedTable] = []
    for table, names in sorted(zip(tables, shared, strict=True), key=lambda item: -len(item[1])):
        names = [name for name in names if name in left]
        left = [name for name in left if name not in names]
        if names:
            columns = tuple(name for name in printed.columns if name in (METHOD, BENCHMARK, *names))
            rows = tuple({name: row[name] for name in columns} for row in printed.rows)
            told = join_published(table, replace(printed, columns=columns, rows=rows), fold=True)
            told = replace(told, title=f"Printed numbers of {file_label(path)} next to our {table.name}")
            joined.append(replace(told, reading=round_like_printed(told, names)))
    if left:
        lines.append(f"{file_label(path)}: printed columns that our tables lack: {', '.join(left)}")
    ours = dict.fromkeys(str(row[METHOD]) for table in tables for row in table.rows)
    alone = [label for label in ours if label.casefold() not in theirs]
    if alone:
        lines.append(
            f"{file_label(path)}: no printed row for {join_names(alone)}; the printed rows are {', '.join(methods)}"
        )
    return joined, lines


def round_like_printed(table: KeyedTable, names: Sequence[str]) -> KeyedTable:
    """Rounds our numbers in a joined table to as many decimals as the printed ones, and recomputes the differences."""
    rows = []
    for row in table.rows:
        told = dict(row)
        for name in names:
            ours, theirs, digits = row[name], row.get(name + PRINTED), table.digits[name + PRINTED]
            if isinstance(ours, int | float):
                told[name] = near = round_half_up(ours, digits)
                if isinstance(theirs, int | float) and name + DIFFERENCE in row:
                    told[name + DIFFERENCE] = round_half_up(near - theirs, digits)
        rows.append(told)
    digits_of = {name: table.digits.get(name + PRINTED, count) for name, count in table.digits.items()}
    return format_missing(replace(table, rows=tuple(rows), digits=digits_of))


def select_model_rows(printed: PublishedTable, model: str | None) -> tuple[PublishedTable, list[str]]:
    """Selects the printed rows of a model, and returns them with a note about skipped rows.

    Names are compared by letters and digits only. Without ``model``, all rows are selected if the file covers one
    model, and none if it covers several, because method names would clash.
    """
    names, label = list(dict.fromkeys(filter(None, map(row_model, printed.rows)))), file_label(printed.path)
    wanted = model if model is not None else names[0] if len(names) == 1 else None
    if wanted is None:
        if not names:
            return printed, []
        said = f"set label={names[0]} (or {', '.join(names[1:])})"
        return replace(printed, rows=()), [f"{label}: skipped, because it has rows for several models; {said}"]
    rows = tuple(row for row in printed.rows if normalize_name(row_model(row) or wanted) == normalize_name(wanted))
    others = ", ".join(name for name in names if normalize_name(name) != normalize_name(wanted))
    if not rows:
        lines = [f"{label}: skipped, because it has no rows for {wanted}, only for {others}"]
    else:
        lines = [f"{label}: skipped rows for other models ({others})"] if others else []
    return replace(printed, rows=rows), lines
