"""``attnpo.report scores``: finished evaluations in the shape of the paper's tables, with its numbers beside ours."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from attnpo.display.page import Section, TableBlock
from attnpo.display.printed import (
    DIFFERENCE,
    PRINTED,
    KeyedTable,
    PrintedTable,
    beside,
    counterpart,
    for_reading,
    label_of,
    meets,
    read_printed,
)
from attnpo.display.tables import half_up
from attnpo.lab.reports.evaluations import listed, mixed, read_evaluations
from attnpo.lab.reports.folder_report import MODELS, letters, whose
from attnpo.lab.reports.output import publish
from attnpo.lab.reports.report_config import SCORES
from attnpo.lab.reports.scores import (
    AVG_RANK,
    BENCHMARK,
    METHOD,
    PRINTED_RANK,
    Board,
    Figure,
    board_of,
    close_table,
    cost_rows,
    lengths_table,
    missing_table,
    rounds_table,
    scores_table,
    spreads_table,
)
from attnpo.schema import UserError

ARM = "arm"


def scores_report(folders: Sequence[Path], printed: Sequence[Path], model: str | None, output: Path, mark: str) -> None:
    """Prints the tables of finished evaluations and writes them to ``output``.

    ``printed``: CSV files whose rows stand beside ours, those of ``model`` where a file has several models. UserError
    for folders without a result, results that are damaged, and files that share no column with our tables.
    """
    evaluations, notes = read_evaluations(folders)
    ways = mixed(evaluations)
    board = board_of(evaluations, ways)
    if not board.shown:
        names = ", ".join(str(one.folder) for one in evaluations)
        raise UserError(f"report scores: expected a score that counts, but no figure of {names} is a number")
    scores, rounds, lengths = scores_table(board), rounds_table(board), lengths_table(evaluations)
    joins = [table for table in (scores, rounds, lengths) if table is not None]
    joined: list[KeyedTable] = []
    lines: list[str] = []
    for path in printed:
        tables, said = put_beside(joins, path, model)
        joined += tables
        lines += said
    several = any(len(score.rounds) > 1 for figure in board.shown for score in figure.scores.values())
    tables = [
        scores,
        *joined,
        *([rounds] if several else []),
        *(table for table in (close_table(board), lengths, missing_table(evaluations)) if table is not None),
        spreads_table(board),
    ]
    told = [*(way.line() for way in ways), *about(board), *uneven(board), *lines, *notes]
    costs = cost_rows(evaluations)
    sections = [Section("Cost", [TableBlock(list(costs[0]), costs)])]
    title = f"Scores of {listed(board.labels)}"
    publish(title, tables, told, output, SCORES, mark, sections, why="no evaluation given has them")


# ------------------------------------------------------------------------------------------------ notes


def about(board: Board) -> list[str]:
    """Returns how the ranks came about, what is not ranked and why, and which spreads are not known."""
    figures, ranks = board.ranked(), board.ranks()
    lines = []
    if ranks:
        lines.append(
            f"{AVG_RANK}: mean of the ranks over {', '.join(figure.name for figure in figures)}, on the printed means "
            f"of the {len(ranks)} rows that have them all; best 1, the {_best(figures)}; ties share their ranks"
        )
    unranked = [label for label in board.labels if label not in ranks]
    if unranked:
        lines.append(f"{AVG_RANK}: none for {listed(unranked)}: it takes two rows with the same benchmarks, all graded")
    alone = [figure.name for figure in board.shown if len(figure.scores) == 1 and len(board.labels) > 1]
    if alone:
        lines.append(f"{AVG_RANK}: not over {', '.join(alone)}, which a single row has")
    aimless = [figure.name for figure in board.shown if figure.higher_is_better is None and len(figure.scores) > 1]
    if aimless:
        lines.append(f"{AVG_RANK}: not over {', '.join(aimless)}, of which it is not known whether higher is better")
    shown = [(figure, label, score) for figure in board.shown for label, score in figure.scores.items()]
    single = dict.fromkeys(label for _, label, score in shown if len(score.rounds) == 1)
    if single:
        lines.append(f"one round, so no spread over rounds: {listed(list(single))}")
    unknown = dict.fromkeys(figure.name for figure, _, score in shown if figure.graded and score.grading is None)
    if unknown:
        lines.append(f"grading noise not known for some rows of {', '.join(unknown)}: no difference held against it")
    if any(score.grading is not None for _, _, score in shown):
        lines.append(
            "grading noise of a difference: 1.96 sqrt(a^2 + b^2), a and b the standard deviations that grading the "
            "same answers again gives the two figures; what is below it may be the grader's chance alone"
        )
    if any(label not in figure.scores for figure in board.shown for label in board.labels):
        lines.append("an empty cell: no evaluation of that row on that benchmark was given")
    if any(way.odd for way in board.mixed):
        lines.append("*: graded or answered otherwise than most of its column, see the warning")
    return lines


def _best(figures: Sequence[Figure]) -> str:
    lower = [figure.name for figure in figures if not figure.higher_is_better]
    return "highest score" + (f", of {', '.join(lower)} the lowest" if lower else "")


def uneven(board: Board) -> list[str]:
    """Returns a line per figure whose scores stand on different numbers of questions."""
    lines = []
    for figure in board.shown:
        sizes = {label: score.questions for label, score in figure.scores.items() if score.questions}
        if len(set(sizes.values())) > 1:
            told = ", ".join(f"{label} {count}" for label, count in sizes.items())
            lines.append(f"{figure.name}: on different numbers of questions ({told})")
    return lines


# ------------------------------------------------------------------------------------------------ printed numbers


def put_beside(tables: Sequence[KeyedTable], path: Path, model: str | None) -> tuple[list[KeyedTable], list[str]]:
    """Returns the printed rows of a model beside ours, once for each of our tables that has columns of theirs; and
    notes.

    UserError for a file without the column ``method`` or without any column of ours.
    """
    keys = [METHOD, ARM, BENCHMARK, *MODELS]
    printed = read_printed(path, keys, {PRINTED_RANK: AVG_RANK})
    if METHOD not in printed.columns:
        raise UserError(f"printed={path}: expected a column {METHOD}, got {', '.join(printed.columns)}")
    counterpart(tables, printed)  # says what is expected where no column is shared
    printed, lines = rows_of(printed, model)
    if not printed.rows:
        return [], lines
    joined: list[KeyedTable] = []
    taken: set[str] = set()
    theirs = {str(row[METHOD]).casefold() for row in printed.rows}
    ranked = {str(row[METHOD]).casefold() for row in tables[0].rows if row[AVG_RANK] is not None}
    if AVG_RANK in printed.columns and ranked != theirs:
        taken.add(AVG_RANK)
        lines.append(
            f"{label_of(path)}: average ranks not compared: over {len(theirs)} rows there, over {len(ranked)} here"
        )
    for table in sorted(tables, key=lambda table: -len(_shared(table, printed))):
        shared = [name for name in _shared(table, printed) if name not in taken]
        taken |= set(shared)
        if shared:
            columns = tuple(name for name in printed.columns if name in (METHOD, BENCHMARK) or name in shared)
            rows = tuple({name: row[name] for name in columns} for row in printed.rows)
            told = beside(table, replace(printed, columns=columns, rows=rows), fold=True)
            told = replace(told, title=f"Printed numbers of {label_of(path)} beside our {table.name}")
            joined.append(replace(told, reading=rounded(told, shared)))
    lacking = [name for name in printed.columns if name in printed.digits and name not in taken]
    if lacking:
        lines.append(f"{label_of(path)}: printed columns without ours: {', '.join(lacking)}")
    ours = dict.fromkeys(str(row[METHOD]) for table in tables for row in table.rows)
    alone = [
        label for label in ours if not any(meets({METHOD: label}, row, [METHOD], fold=True) for row in printed.rows)
    ]
    if alone:
        methods = ", ".join(dict.fromkeys(str(row[METHOD]) for row in printed.rows))
        lines.append(f"{label_of(path)}: no printed row for {listed(alone)}; its rows are {methods}")
    return joined, lines


def rounded(table: KeyedTable, names: Sequence[str]) -> KeyedTable:
    """Returns a joined table as people read it: our numbers rounded as the printed ones are, differences those of the
    two.
    """
    rows = []
    for row in table.rows:
        told = dict(row)
        for name in names:
            ours, theirs, digits = row[name], row.get(name + PRINTED), table.digits[name + PRINTED]
            if isinstance(ours, int | float):
                told[name] = half_up(ours, digits)
                if isinstance(theirs, int | float) and name + DIFFERENCE in row:
                    told[name + DIFFERENCE] = half_up(half_up(ours, digits) - theirs, digits)
        rows.append(told)
    digits_of = {name: table.digits.get(name + PRINTED, count) for name, count in table.digits.items()}
    return for_reading(replace(table, rows=tuple(rows), digits=digits_of))


def _shared(table: KeyedTable, printed: PrintedTable) -> list[str]:
    return [name for name in table.columns if name in printed.digits and name not in table.keys]


def rows_of(printed: PrintedTable, model: str | None) -> tuple[PrintedTable, list[str]]:
    """Returns the printed rows about a model, names compared by letters and digits alone; and a line on those left out.

    Without a model all rows of a file about one, and none of a file about several, whose methods have one name each.
    """
    names = list(dict.fromkeys(name for row in printed.rows if (name := whose(row)) is not None))
    wanted = model if model is not None else names[0] if len(names) == 1 else None
    if wanted is None:
        if not names:
            return printed, []
        said = f"say label={names[0]} (or {', '.join(names[1:])})"
        return replace(printed, rows=()), [f"{label_of(printed.path)}: left out, it is about several models; {said}"]
    rows = tuple(row for row in printed.rows if letters(whose(row) or wanted) == letters(wanted))
    others = [name for name in names if letters(name) != letters(wanted)]
    if not rows:
        return replace(printed, rows=()), [
            f"{label_of(printed.path)}: left out, it has no rows of {wanted} but of {', '.join(others)}"
        ]
    lines = [f"{label_of(printed.path)}: rows of other models left out ({', '.join(others)})"] if others else []
    return replace(printed, rows=rows), lines
