"""``attnpo.report scores``: finished evaluations in the shape of the paper's tables, with its numbers beside ours.

Reads them back, finds what cannot stand in one column, and ranks. Shows the paper's main table, rounds with their
intervals, differences below the grading noise, lengths, what was missing, and the spreads of every figure.
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
from attnpo.evaluation.result import RESULT, EvaluationResult, read_result, rounds_text
from attnpo.evaluation.spreads import grading_noise, half_widths
from attnpo.lab.reports.folder_report import MODELS, letters, whose
from attnpo.lab.reports.output import publish
from attnpo.lab.reports.report_config import SCORES
from attnpo.lab.results import nothing
from attnpo.run.identity import flatten_with_classes
from attnpo.schema import UserError, join_names
from attnpo.system.files import find_differences

MAIN = ""
"""Stands for the score of a benchmark that counts, whatever its name."""
PAPER = {
    ("alpaca_eval", "lc_win_rate"): "alpacaeval_lc",
    ("alpaca_eval", "win_rate"): "alpacaeval_wr",
    ("mt_bench", MAIN): "mt_bench",
    ("arena_hard", MAIN): "arena_hard_wr",
}
"""Columns of the paper's tables, in its order, by benchmark and score."""
OF_MODEL = ("model", "answers")  # first parts of a key's names that differ from model to model
ROUNDS = "rounds"
# What leaves figures of one kind: how often was answered and graded, and where files lie whose digests are in the key.
OF_ONE_KIND = (ROUNDS, "grading", "benchmark.settings.path")
METHOD, BENCHMARK, FIGURE, ARM, AVG_RANK = "method", "benchmark", "figure", "arm", "avg_rank"
PRINTED_RANK = "avg_rank_printed"  # what files of printed numbers call the paper's average rank
MEAN, CI, T = "_mean", "_ci95", "_t95"  # after a figure's name; the first two as in the paper's table of three runs
DECIMALS = 2  # of the paper's tables
Cells = dict[str, Cell]


def column_of(result: EvaluationResult, score: str) -> str:
    """Returns the name of a score's column: the paper's, else the benchmark's with the score's after it."""
    main = score == result.main
    named = PAPER.get((result.benchmark, score)) or (PAPER.get((result.benchmark, MAIN)) if main else None)
    return named or (result.benchmark if main else f"{result.benchmark} {score}")


# ------------------------------------------------------------------------------------------------ reading


def read_evaluations(folders: Sequence[Path]) -> tuple[dict[Path, EvaluationResult], list[str]]:
    """Returns the finished evaluations in folders or one level below them; and lines on unfinished ones.

    UserError for a folder without any, for a damaged result, for two results of one label on one benchmark.
    """
    places: dict[Path, Path] = {}
    notes = []
    for folder in folders:
        found = [folder] if (folder / RESULT).is_file() else sorted(path.parent for path in folder.glob(f"*/{RESULT}"))
        if not found and not any(folder.glob("*.jsonl")):
            raise nothing(folder, f"a finished evaluation ({RESULT}), or one with such folders in it")
        if not found:
            notes.append(f"left out, not finished: {folder} has no {RESULT}; give its command of attnpo.evaluate again")
        for place in found:
            places.setdefault(place.resolve(), place)
    if not places:
        raise UserError(f"report scores: expected at least one finished evaluation; {'; '.join(notes)}")
    results = {place: read(place) for place in places.values()}
    once: dict[tuple[str, str], Path] = {}
    for place, result in results.items():
        other = once.setdefault((result.label, result.benchmark), place)
        if other != place:
            raise UserError(
                f"report scores: {other} and {place} are both {result.label!r} on {result.benchmark}; leave one out, "
                "or evaluate one of them under another label"
            )
    return results, notes


def read(folder: Path) -> EvaluationResult:
    """Returns the result in a folder that has one. UserError where it is damaged or of another version."""
    try:
        result = read_result(folder)
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise UserError(
            f"{folder / RESULT}: expected the result of an evaluation, but it cannot be read ({problem!r}); delete it "
            "and give the command of the evaluation again"
        ) from problem
    if result is None:  # removed since it was seen
        raise nothing(folder, f"a finished evaluation ({RESULT})")
    return result


# ------------------------------------------------------------------------------------------------ comparable


@dataclass(frozen=True)
class Mixed:
    """Evaluations of a benchmark that were made otherwise than most: ``odd`` than ``usual``, by labels.

    ``how``: (name, usual, odd) of everything that differs.
    """

    benchmark: str
    usual: tuple[str, ...]
    odd: tuple[str, ...]
    how: tuple[tuple[str, str, str], ...]

    @property
    def comparable(self) -> bool:
        """Returns whether the figures are of one kind all the same: no more than ``OF_ONE_KIND`` differs."""
        return all(name in OF_ONE_KIND or name.partition(".")[0] in OF_ONE_KIND for name, _, _ in self.how)

    def line(self) -> str:
        """Returns the warning in words."""
        shown = ", ".join(f"{name} {odd} against {usual}" for name, usual, odd in self.how[:4])
        shown += f", and {len(self.how) - 4} more" if len(self.how) > 4 else ""
        verdict = "not comparable, so this benchmark is not ranked"
        return (
            f"WARNING: {self.benchmark}: {join_names(self.odd)} graded or answered otherwise than "
            f"{join_names(self.usual)} ({shown}): "
            f"{'means may be compared, spreads are not alike' if self.comparable else verdict}"
        )


def find_mixed(results: Sequence[EvaluationResult]) -> list[Mixed]:
    """Returns what differs within a benchmark from how most of its evaluations were made."""
    out = []
    for benchmark in dict.fromkeys(result.benchmark for result in results):
        made = {result.label: conditions(result) for result in results if result.benchmark == benchmark}
        usual = max(made.values(), key=list(made.values()).count)
        ways: dict[tuple[tuple[str, str, str], ...], list[str]] = {}
        for label, one in made.items():
            if how := tuple(find_differences(usual, one)):
                ways.setdefault(how, []).append(label)
        names = tuple(label for label, one in made.items() if one == usual)
        out += [Mixed(benchmark, names, tuple(odd), how) for how, odd in ways.items()]
    return out


def conditions(result: EvaluationResult) -> dict[str, object]:
    """Returns all that must agree in a column: grader, rounds and the key, without what is the model's own.

    As JSON has them, so that what was read and what was made compare alike.
    """
    key = {
        name: value
        for name, value in flatten_with_classes(result.key).items()
        if name.partition(".")[0] not in OF_MODEL
    }
    rounds = max((len(score.rounds) for score in result.scores), default=0)
    found: dict[str, object] = json.loads(json.dumps({"grader": result.grader, **key, ROUNDS: rounds}, default=str))
    return found


# ------------------------------------------------------------------------------------------------ what is compared


@dataclass(frozen=True)
class ScoreColumn:
    """Column: a benchmark's figure with the score of each label that has one.

    ``shown``: whether it is a column of the main table. ``graded``: whether a grader gives it.
    """

    name: str
    benchmark: str
    shown: bool
    scores: Mapping[str, BenchmarkScore]
    graded: bool = True

    @property
    def digits(self) -> int:
        """Returns the decimals it is printed with: two, as in the paper; four for shares."""
        largest = max(abs(score.mean) for score in self.scores.values())
        return 4 if largest <= 1 else 2

    @property
    def higher_is_better(self) -> bool | None:
        """Returns the direction of its scores; None where they do not say, or not the same."""
        said = {score.higher_is_better for score in self.scores.values()}
        return said.pop() if len(said) == 1 else None

    @property
    def printed_values(self) -> dict[str, float]:
        """Returns the means as they are printed, by label."""
        return {label: round_half_up(score.mean, self.digits) for label, score in self.scores.items()}


@dataclass(frozen=True)
class Board:
    """All that is compared: labels in their order, figures in theirs, and what cannot be compared."""

    labels: tuple[str, ...]
    figures: tuple[ScoreColumn, ...]
    mixed: tuple[Mixed, ...]

    @property
    def main_figures(self) -> list[ScoreColumn]:
        """Returns the columns of the main table."""
        return [figure for figure in self.figures if figure.shown]

    def rankable_figures(self) -> list[ScoreColumn]:
        """Returns the figures that rank: of two labels or more, graded in one way, with a direction."""
        unfit = {one.benchmark for one in self.mixed if not one.comparable}
        return [
            figure
            for figure in self.main_figures
            if len(figure.scores) > 1 and figure.benchmark not in unfit and figure.higher_is_better is not None
        ]

    def way(self, label: str, benchmark: str) -> int:
        """Returns which way of grading and answering a label's figures of a benchmark are of: 0 for that of most."""
        ways = [one for one in self.mixed if one.benchmark == benchmark and not one.comparable]
        return next((number for number, one in enumerate(ways, start=1) if label in one.odd), 0)

    def ranks(self) -> dict[str, float]:
        """Returns the mean of each label's ranks, 1 the best, over its printed figures; without labels that lack one.

        Ties share the mean of their ranks (paper, main table; reference EVALUATION 6). A benchmark with two columns
        counts twice.
        """
        figures = self.rankable_figures()
        means = [figure.printed_values for figure in figures]
        whole = {label: [row[label] for row in means] for label in self.labels if all(label in row for row in means)}
        if not figures or len(whole) < 2:
            return {}
        ranks = average_ranks(np.array(list(whole.values())), [bool(figure.higher_is_better) for figure in figures])
        return dict(zip(whole, ranks.tolist(), strict=True))


def board_of(results: Sequence[EvaluationResult], ways: Sequence[Mixed]) -> Board:
    """Returns the board of some evaluations: the paper's columns first, then the others as they come."""
    found: dict[str, list[tuple[EvaluationResult, BenchmarkScore]]] = {}
    for result in results:
        for score in result.scores:
            if isfinite(score.mean):
                found.setdefault(column_of(result, score.name), []).append((result, score))
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
    return Board(tuple(dict.fromkeys(result.label for result in results)), figures, tuple(ways))


# ------------------------------------------------------------------------------------------------ the report


def scores_report(folders: Sequence[Path], printed: Sequence[Path], model: str | None, output: Path, mark: str) -> None:
    """Prints the tables of finished evaluations and writes them to ``output``.

    ``printed``: CSV files whose rows stand beside ours, those of ``model`` where a file has several models. UserError
    for folders without a result, results that are damaged, and files that share no column with our tables.
    """
    found, notes = read_evaluations(folders)
    results = list(found.values())
    board = board_of(results, find_mixed(results))
    if not board.main_figures:
        places = ", ".join(map(str, found))
        raise UserError(f"report scores: expected a score that counts, but no figure of {places} is a number")
    scores, rounds = main_tables(board)
    lengths = lengths_table(results)
    joined: list[KeyedTable] = []
    lines: list[str] = []
    for path in printed:
        tables, said = put_beside([scores, rounds, *lengths], path, model)
        joined += tables
        lines += said
    several = any(len(score.rounds) > 1 for figure in board.main_figures for score in figure.scores.values())
    below = [*([rounds] if several else []), *close_table(board), *lengths, *missing_table(results)]
    told = [*(way.line() for way in board.mixed), *about(board), *lines, *notes]
    names = list(dict.fromkeys(name for result in results for name in result.cost))
    costs: list[list[Cell]] = [[result.label, result.benchmark, *map(result.cost.get, names)] for result in results]
    publish(
        f"Scores of {join_names(board.labels)}",
        [scores, *joined, *below, *spreads_table(board)],
        told,
        output,
        SCORES,
        mark,
        [Section("Cost", [TableBlock([METHOD, BENCHMARK, *names], costs)])],
        why="no evaluation given has them",
    )


def about(board: Board) -> list[str]:
    """Returns notes: how ranks came about, what is not ranked, unknown spreads, different numbers of questions."""
    figures, ranks, labels = board.rankable_figures(), board.ranks(), board.labels
    shown = [(figure, label, score) for figure in board.main_figures for label, score in figure.scores.items()]
    over, lower = list_names(figures), list_names(figure for figure in figures if not figure.higher_is_better)
    unranked = [label for label in labels if label not in ranks]
    alone = list_names(figure for figure in board.main_figures if len(figure.scores) == 1 and len(labels) > 1)
    aimless = list_names(
        figure for figure in board.main_figures if figure.higher_is_better is None and len(figure.scores) > 1
    )
    single = list(dict.fromkeys(label for _, label, score in shown if len(score.rounds) == 1))
    unknown = list_names(figure for figure, _, score in shown if figure.graded and score.grading is None)
    best = "highest score" + (f", of {lower} the lowest" if lower else "")
    lines: list[tuple[object, str]] = [
        (
            ranks,
            f"{AVG_RANK}: mean of the ranks over {over}, on the printed means of the {len(ranks)} rows that have them "
            f"all; best 1, the {best}; ties share their ranks",
        ),
        (
            unranked,
            f"{AVG_RANK}: none for {join_names(unranked)}: it takes two rows with the same benchmarks, all graded",
        ),
        (alone, f"{AVG_RANK}: not over {alone}, which a single row has"),
        (aimless, f"{AVG_RANK}: not over {aimless}, of which it is not known whether higher is better"),
        (single, f"one round, so no spread over rounds: {join_names(single)}"),
        (unknown, f"grading noise not known for some rows of {unknown}: no difference held against it"),
        (
            any(score.grading is not None for _, _, score in shown),
            "grading noise of a difference: 1.96 sqrt(a^2 + b^2), a and b the standard deviations that grading the "
            "same answers again gives the two figures; what is below it may be the grader's chance alone",
        ),
        (
            len(shown) < len(board.main_figures) * len(labels),
            "an empty cell: no evaluation of that row on that benchmark was given",
        ),
        (board.mixed, "*: graded or answered otherwise than most of its column, see the warning"),
    ]
    for figure in board.main_figures:
        sizes = {label: score.questions for label, score in figure.scores.items() if score.questions}
        told = ", ".join(f"{label} {count}" for label, count in sizes.items())
        lines.append((len(set(sizes.values())) > 1, f"{figure.name}: on different numbers of questions ({told})"))
    return [line for holds, line in lines if holds]


def list_names(figures: Iterable[ScoreColumn]) -> str:
    """Returns the names of figures, each once, as a list in words."""
    return ", ".join(dict.fromkeys(figure.name for figure in figures))


# ------------------------------------------------------------------------------------------------ tables


def main_tables(board: Board) -> list[KeyedTable]:
    """Returns the paper's main table (means, average rank) and its table of three runs, with both intervals.

    People read the means as they are printed, with an asterisk where they were graded otherwise than most, and
    ``21.90 ± 1.57 (t 3.45)``; the CSV has the numbers in full.
    """
    ranks, odd = board.ranks(), {(label, one.benchmark) for one in board.mixed for label in one.odd}
    tables = [list[Cells]() for _ in range(4)]
    digits = {AVG_RANK: DECIMALS}
    for label in board.labels:
        full, told, wide, words = (Cells({METHOD: label}) for _ in range(4))
        for figure in board.main_figures:
            name, score = figure.name, figure.scores.get(label)
            parts = [name + MEAN, name + CI, name + T]
            digits |= dict.fromkeys((name, *parts), figure.digits)
            full[name] = told[name] = words[name] = None if score is None else score.mean
            wide |= zip(parts, (full[name], *half_widths(() if score is None else score.rounds)), strict=True)
            if score is not None:
                mean = figure.printed_values[label]
                text = f"{mean:.{figure.digits}f}"
                told[name] = f"{text}*" if (label, figure.benchmark) in odd else mean
                words[name] = f"{text} {rounds_text(score, figure.digits)}".rstrip()
        rank = ranks.get(label)
        near = None if rank is None else round_half_up(rank, DECIMALS)
        for rows, cells, last in zip(tables, (full, told, wide, words), (rank, near, rank, near), strict=True):
            rows.append({**cells, AVG_RANK: last})
    scores, scores_read, rounds, rounds_read = tables
    title = "Means over rounds ± 1.96 s/sqrt(n) (t: the half width by Student's t)"
    return [
        *_table("scores", "Scores, means over rounds", scores, (METHOD,), scores_read, digits),
        *_table("rounds", title, rounds, (METHOD,), rounds_read, digits),
    ]


def _table(
    name: str,
    title: str,
    rows: Sequence[Cells],
    keys: tuple[str, ...],
    read: Sequence[Cells] = (),
    digits: Mapping[str, int] | None = None,
) -> list[KeyedTable]:
    if not rows:
        return []
    table = KeyedTable(name, title, tuple(rows[0]), tuple(rows), keys, None, digits or {})
    reading = replace(table, columns=tuple(read[0]), rows=tuple(read)) if read else None
    return [replace(table, reading=reading)]


def spreads_table(board: Board) -> list[KeyedTable]:
    """Returns every figure's spreads: 95 % over questions, standard deviations over rounds and of grading.

    Empty where a spread is not known.
    """
    rows: list[Cells] = []
    read: list[Cells] = []
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
            read.append({**names, **told, "sd of grading": grading})
    return _table("spreads", "Spreads of each figure", rows, (FIGURE, METHOD), read)


def close_table(board: Board) -> list[KeyedTable]:
    """Finds pairs of labels that a figure does not tell apart, since grading the same answers again moves it as much.

    Pairs that were graded or answered in different ways are left out; empty where no pair is so close.
    """
    rows: list[Cells] = []
    for figure in board.main_figures:
        graded = [
            (label, score.mean, score.grading, board.way(label, figure.benchmark))
            for label, score in figure.scores.items()
            if score.grading is not None
        ]
        for (one, higher, a, way), (other, lower, b, same) in combinations(
            sorted(graded, key=lambda item: -item[1]), 2
        ):
            if way == same and higher - lower < (noise := grading_noise(a, b)):
                names: Cells = {FIGURE: figure.name, METHOD: one, "not told from": other}
                rows.append(names | {"difference": higher - lower, "grading_noise": noise})
    return _table("close", "Differences below the grading noise", rows, (FIGURE, METHOD))


def lengths_table(results: Sequence[EvaluationResult]) -> list[KeyedTable]:
    """Returns how long the answers are, by benchmark and label; none where no evaluation says."""
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
    title = "Response lengths, means over questions; cut: share that ended at the most tokens"
    return _table("lengths", title, rows, (BENCHMARK, METHOD), digits=digits)


def missing_table(results: Sequence[EvaluationResult]) -> list[KeyedTable]:
    """Returns what was missing or replaced, by label, benchmark and reason; none where nothing was."""
    rows: list[Cells] = [
        {METHOD: result.label, BENCHMARK: result.benchmark, "reason": reason, "count": count}
        for result in results
        for reason, count in result.counts.items()
        if count
    ]
    return _table("missing", "Missing or replaced", rows, (METHOD, BENCHMARK, "reason"))


# ------------------------------------------------------------------------------------------------ printed numbers


def put_beside(tables: Sequence[KeyedTable], path: Path, model: str | None) -> tuple[list[KeyedTable], list[str]]:
    """Returns the printed rows of a model beside each of our tables that has columns of theirs; and notes.

    UserError for a file without the column ``method`` or without any column of ours.
    """
    printed = read_published_table(path, [METHOD, ARM, BENCHMARK, *MODELS], {PRINTED_RANK: AVG_RANK})
    if METHOD not in printed.columns:
        raise UserError(f"printed={path}: expected a column {METHOD}, got {', '.join(printed.columns)}")
    find_matching_table(tables, printed)  # says what is expected where no column is shared
    printed, lines = rows_of(printed, model)
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
            f"{file_label(path)}: average ranks not compared: over {len(theirs)} rows there, over {len(ranked)} here"
        )
    joined: list[KeyedTable] = []
    for table, names in sorted(zip(tables, shared, strict=True), key=lambda item: -len(item[1])):
        names = [name for name in names if name in left]
        left = [name for name in left if name not in names]
        if names:
            columns = tuple(name for name in printed.columns if name in (METHOD, BENCHMARK, *names))
            rows = tuple({name: row[name] for name in columns} for row in printed.rows)
            told = join_published(table, replace(printed, columns=columns, rows=rows), fold=True)
            told = replace(told, title=f"Printed numbers of {file_label(path)} beside our {table.name}")
            joined.append(replace(told, reading=round_like_printed(told, names)))
    if left:
        lines.append(f"{file_label(path)}: printed columns without ours: {', '.join(left)}")
    ours = dict.fromkeys(str(row[METHOD]) for table in tables for row in table.rows)
    alone = [label for label in ours if label.casefold() not in theirs]
    if alone:
        lines.append(f"{file_label(path)}: no printed row for {join_names(alone)}; its rows are {', '.join(methods)}")
    return joined, lines


def round_like_printed(table: KeyedTable, names: Sequence[str]) -> KeyedTable:
    """Returns a joined table with our numbers rounded as the printed ones are, and the differences of these."""
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


def rows_of(printed: PublishedTable, model: str | None) -> tuple[PublishedTable, list[str]]:
    """Returns the printed rows about a model, names compared by letters and digits alone; and a line on those left out.

    Without a model all rows of a file about one, and none of a file about several, whose methods have one name each.
    """
    names, label = list(dict.fromkeys(filter(None, map(whose, printed.rows)))), file_label(printed.path)
    wanted = model if model is not None else names[0] if len(names) == 1 else None
    if wanted is None:
        if not names:
            return printed, []
        said = f"say label={names[0]} (or {', '.join(names[1:])})"
        return replace(printed, rows=()), [f"{label}: left out, it is about several models; {said}"]
    rows = tuple(row for row in printed.rows if letters(whose(row) or wanted) == letters(wanted))
    others = ", ".join(name for name in names if letters(name) != letters(wanted))
    if not rows:
        lines = [f"{label}: left out, it has no rows of {wanted} but of {others}"]
    else:
        lines = [f"{label}: rows of other models left out ({others})"] if others else []
    return replace(printed, rows=rows), lines
