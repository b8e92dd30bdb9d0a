"""What does not follow from the numbers of printed result tables: average ranks, intervals, runs that are no round.

The rules are those of the reference, EVALUATION 6: average ranks from the printed scores with ties averaged; the half
width 1.96 s / sqrt(n) over n rounds, of which the table of single runs shows the first.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from attnpo.display.printed import PrintedTable, read_printed
from attnpo.display.tables import Cell, half_up
from attnpo.evaluation.intervals import average_ranks
from attnpo.evaluation.spreads import NORMAL
from attnpo.lab.reports.evaluations import PAPER
from attnpo.lab.reports.folder_report import MODELS, letters, whose
from attnpo.lab.reports.scores import CI, DECIMALS, MEAN, METHOD, PRINTED_RANK
from attnpo.schema import UserError

RECOMPUTED, PRINTED, MISPRINT = "average rank", "printed", "misprint"
ROUNDS = 3  # of the paper's table of several runs
SLACK = 1e-9  # of sums and differences of printed decimals


@dataclass(frozen=True)
class Table:
    """The rows of one base model in a printed table: scores by method and column, all that is printed of each row.

    ``columns`` are the scores as the table of single runs names them; ``of_rounds``: whether they are means over
    rounds. ``lacking``: methods without a number in some column, which have no rank.
    """

    path: Path
    model: str
    columns: tuple[str, ...]
    rows: Mapping[str, Mapping[str, float]]
    printed: Mapping[str, Mapping[str, Cell]]
    digits: Mapping[str, int]
    of_rounds: bool
    lacking: tuple[str, ...] = ()

    @property
    def has_ranks(self) -> bool:
        """Returns whether the table prints an average rank."""
        return any(row.get(PRINTED_RANK) is not None for row in self.printed.values())

    def number(self, method: str, column: str) -> float | None:
        """Returns a printed number of a row, None where it has none."""
        value = self.printed[method].get(column)
        return float(value) if isinstance(value, int | float) else None


@dataclass(frozen=True)
class Misprint:
    """Something printed that cannot be, and what would be expected, in words."""

    table: Table
    method: str
    column: str
    printed: str
    expected: str


# ------------------------------------------------------------------------------------------------ reading


def read_tables(path: Path) -> list[Table]:
    """Returns the tables in a CSV file of printed results, one per base model. UserError for a file that holds none.

    Scores are the columns of numbers with decimals that are neither an average rank nor an interval; where some are
    named as means (``mt_bench_mean``), those.
    """
    if not path.is_file():
        raise UserError(f"report ranks: expected CSV files of printed results, there is no file {path}")
    keys = (METHOD, "arm", *MODELS)
    printed = read_printed(path, keys)
    if METHOD not in printed.columns:
        raise UserError(f"{path}: expected a column {METHOD}, got {', '.join(printed.columns)}")
    numbers = [name for name in printed.columns if printed.digits.get(name, 0) and name != PRINTED_RANK]
    means = [name for name in numbers if name.endswith(MEAN)]
    scores = means or [name for name in numbers if not name.endswith(CI)]
    if not scores:
        raise UserError(f"{path}: expected columns of scores with decimals, got {', '.join(printed.columns)}")
    models = dict.fromkeys(whose(row) or "" for row in printed.rows)
    return [_table(printed, model, scores, bool(means)) for model in models]


def _table(printed: PrintedTable, model: str, scores: Sequence[str], of_rounds: bool) -> Table:
    mine = [row for row in printed.rows if (whose(row) or "") == model]
    names = [str(row[METHOD]) for row in mine]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{printed.path}: expected each method once for {model or 'all rows'}, got {twice} again")
    by_method = dict(zip(names, mine, strict=True))
    short = {name: name.removesuffix(MEAN) for name in scores}
    rows = {
        method: {short[name]: float(value) for name in scores if isinstance(value := row[name], int | float)}
        for method, row in by_method.items()
    }
    whole = {
        method: row for method, row in rows.items() if len(row) == len(scores) and all(map(math.isfinite, row.values()))
    }
    return Table(
        path=printed.path,
        model=model,
        columns=tuple(short.values()),
        rows=whole,
        printed=by_method,
        digits={**printed.digits, **{short[name]: printed.digits[name] for name in scores}},
        of_rounds=of_rounds,
        lacking=tuple(method for method in rows if method not in whole),
    )


# ------------------------------------------------------------------------------------------------ ranks


def recomputed(table: Table) -> dict[str, float]:
    """Returns the average rank of every row, exact."""
    if not table.rows:
        return {}
    means = average_ranks(np.array([[row[name] for name in table.columns] for row in table.rows.values()]))
    return {method: float(mean) for method, mean in zip(table.rows, means, strict=True)}


def rank_rows(table: Table) -> list[dict[str, Cell]]:
    """Returns every row with its scores, its average rank as the paper would print it, and the printed one."""
    rows: list[dict[str, Cell]] = []
    for method, rank in recomputed(table).items():
        shown = half_up(rank, DECIMALS)
        row: dict[str, Cell] = {METHOD: method, **table.rows[method], RECOMPUTED: shown}
        if table.has_ranks:
            printed = table.number(method, PRINTED_RANK)
            row |= {PRINTED: printed, MISPRINT: "yes" if printed is not None and printed != shown else ""}
        rows.append(row)
    return rows


def rank_misprints(table: Table) -> list[Misprint]:
    """Returns the printed average ranks that do not follow from the printed scores."""
    return [
        Misprint(table, str(row[METHOD]), RECOMPUTED, f"{row[PRINTED]:.2f}", f"{row[RECOMPUTED]:.2f}")
        for row in rank_rows(table)
        if row.get(MISPRINT)
    ]


def rank_sum(table: Table) -> tuple[float | None, float]:
    """Returns what the printed average ranks say all ranks sum to, and what ranks must sum to: columns x n (n + 1) / 2.

    An average over k columns is a multiple of 1 / (2 k), so a printed one stands for the nearest. None where a row has
    no printed one.
    """
    count, step = len(table.rows), 2 * len(table.columns)
    expected = len(table.columns) * count * (count + 1) / 2
    ranks = [table.number(method, PRINTED_RANK) for method in table.rows]
    known = [rank for rank in ranks if rank is not None]
    if len(known) < len(ranks):
        return None, expected
    return sum(round(rank * step) for rank in known) / 2, expected


# ------------------------------------------------------------------------------------------------ intervals


def interval_misprints(table: Table) -> Iterator[Misprint]:
    """Intervals that repeat their mean, and those of no width where another figure of the same answers has one."""
    for method in table.printed if table.of_rounds else ():
        widths = {name: table.number(method, name + CI) for name in table.columns}
        for name, width in widths.items():
            mean = table.number(method, name + MEAN)
            if width is None or mean is None:
                continue
            text = f"{mean:.{table.digits[name]}f} ± {width:.{table.digits[name + CI]}f}"
            if width == mean != 0:
                yield Misprint(table, method, name, text, "an interval; it repeats the mean")
            others = [other for other in _siblings(name) if widths.get(other)]
            if width == 0 and others:
                yield Misprint(table, method, name, text, f"doubtful: {others[0]}, of the same answers, varies")


def _siblings(column: str) -> list[str]:
    """Returns the other columns of a column's benchmark."""
    benchmark = next((key[0] for key, name in PAPER.items() if name == column), None)
    return [name for key, name in PAPER.items() if key[0] == benchmark and name != column]


def impossible_rounds(single: Table, rounds: Table, count: int = ROUNDS) -> Iterator[tuple[Misprint, float]]:
    """Single runs that cannot be one of the rounds whose mean and interval another table prints, with that mean.

    With x1 = mean + d the others sum to -d, so s^2 >= d^2 n / (n - 1)^2 and the half width is at least
    1.96 d / (n - 1): 0.98 d for three rounds. What rounding may have added is allowed for.
    """
    for method, name, mean, width in shared_cells(single, rounds):
        first, digits = single.rows[method][name], rounds.digits[name]
        rounding = 0.5 * (10.0 ** -single.digits[name] + 10.0**-digits)
        least = NORMAL / (count - 1) * max(0.0, abs(first - mean) - rounding)
        if least > width + 0.5 * 10.0 ** -rounds.digits[name + CI] + SLACK:
            expected = f"a round of {mean:.{digits}f} ± {width:.{digits}f}; it takes at least ± {least:.{digits}f}"
            yield Misprint(single, method, name, f"{first:.{single.digits[name]}f}", expected), mean


def may_be_round(single: Table, rounds: Table) -> bool:
    """Returns whether one table has single runs and the other means over rounds of the same base model."""
    return not single.of_rounds and rounds.of_rounds and letters(single.model) == letters(rounds.model)


def shared_cells(single: Table, rounds: Table) -> list[tuple[str, str, float, float]]:
    """(method, column, mean, half width) of every score that both tables print, the second with an interval."""
    cells = [
        (method, name, rounds.number(method, name + MEAN), rounds.number(method, name + CI))
        for method, row in single.rows.items()
        for name in row
        if method in rounds.printed and name in rounds.columns
    ]
    return [(m, name, mean, width) for m, name, mean, width in cells if mean is not None and width is not None]


def with_other_cell(item: Misprint, mean: float) -> str:
    """Returns a line on the average ranks that still differ once a cell holds the mean over rounds."""
    table = item.table
    rows = {**table.rows, item.method: {**table.rows[item.method], item.column: mean}}
    left = rank_misprints(replace(table, rows=rows))
    told = ", ".join(f"{one.method} {one.expected} against {one.printed}" for one in left)
    where = f"{table.model}, {item.method} with {item.column} {mean:.{table.digits[item.column]}f}"
    return f"{where} in place of {item.printed}: {len(left)} average ranks still differ{f' ({told})' if told else ''}"
