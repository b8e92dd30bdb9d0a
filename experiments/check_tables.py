"""``python -m experiments.check_tables TABLE.csv ...``: finds inconsistent numbers in printed result tables.

Checks average ranks, intervals, and whether single runs can be one of the rounds behind a mean. The rules are those of
the reference, EVALUATION 6: average ranks from the printed scores with ties averaged; half width 1.96 s / sqrt(n) over
n rounds, the first of which is in the table of single runs.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas

from attnpo.cli.terminal import install_signal_handlers
from attnpo.display.printed import KeyedTable, file_label, read_published_table
from attnpo.display.tables import Cell, round_half_up
from attnpo.evaluation.spreads import NORMAL
from attnpo.lab.reports.folder_report import MODELS, normalize_name, row_model
from attnpo.lab.reports.output import publish_report
from attnpo.lab.reports.scores import CI, DECIMALS, MEAN, METHOD, PAPER, PRINTED_RANK
from attnpo.schema import UserError
from experiments.report_folder import new_parser, report_folder, run_report_command

RECOMPUTED, PRINTED, MISPRINT = "average rank", "printed", "misprint"
KEYS = ("file", "base_model", METHOD)
ROUNDS = 3  # in the paper's table of several runs
SLACK = 1e-9  # tolerance for sums and differences of printed decimals
Row = Mapping[str, Cell]
EXAMPLE = """\
example:
  python -m experiments.check_tables experiments/paper/main_results/printed.csv"""


@dataclass(frozen=True)
class Table:
    """Rows of one base model in a printed table.

    ``numbers``: all printed numbers, one row per method, NaN if missing. ``scores``: names of the score columns, as in
    the table of single runs. ``of_rounds``: whether the scores are means over rounds.
    """

    path: Path
    model: str
    numbers: pandas.DataFrame
    scores: list[str]
    digits: Mapping[str, int]
    of_rounds: bool

    @property
    def name(self) -> str:
        """Returns the table's name for titles and notes."""
        return f"{file_label(self.path)}, {self.model}" if self.model else file_label(self.path)

    @property
    def complete_rows(self) -> pandas.DataFrame:
        """Returns the scores of the methods without missing scores."""
        return self.numbers[self.scores].dropna()

    @property
    def has_ranks(self) -> bool:
        """Returns whether the table prints an average rank."""
        return bool(PRINTED_RANK in self.numbers and self.numbers[PRINTED_RANK].notna().any())


def read_tables(path: Path) -> list[Table]:
    """Reads the tables in a CSV file of printed results, one per base model.

    Scores are the columns of decimal numbers that are neither average ranks nor intervals. If some columns are named as
    means (``mt_bench_mean``), only those count. Raises UserError for a file without such a table.
    """
    if not path.is_file():
        raise UserError(f"check_tables: expected CSV files of printed results, but there is no file {path}")
    printed = read_published_table(path, (METHOD, "arm", *MODELS))
    if METHOD not in printed.columns:
        raise UserError(f"{path}: expected a column {METHOD}, got {', '.join(printed.columns)}")
    numbers = [name for name in printed.columns if printed.digits.get(name, 0) and name != PRINTED_RANK]
    means = [name for name in numbers if name.endswith(MEAN)]
    scores = means or [name for name in numbers if not name.endswith(CI)]
    if not scores:
        raise UserError(f"{path}: expected columns of scores with decimals, got {', '.join(printed.columns)}")
    short = {name: name.removesuffix(MEAN) for name in scores}
    digits = {short.get(name, name): count for name, count in printed.digits.items()}
    frame = (
        pandas.DataFrame(printed.rows)
        .set_index(METHOD)[[*printed.digits]]
        .astype(float)
        .rename(index=str, columns=short)
    )
    frame = frame.replace([np.inf, -np.inf], np.nan)
    models = np.array([row_model(row) or "" for row in printed.rows])
    tables = [
        Table(path, str(model), frame[models == model], [*short.values()], digits, bool(means))
        for model in dict.fromkeys(models)
    ]
    for table in tables:
        twice = table.numbers.index[table.numbers.index.duplicated()]
        if len(twice):
            raise UserError(f"{path}: expected each method once for {table.model or 'all rows'}, got {twice[0]} again")
    return tables


def misprint_row(table: Table, method: object, column: str, printed: str, expected: str) -> Row:
    """Builds a row of the misprint table: the printed text, and the expected one in words."""
    cells = (file_label(table.path), table.model, str(method), column, printed, expected)
    return dict(zip((*KEYS, "column", "printed", "expected"), cells, strict=True))


# ------------------------------------------------------------------------------------------------ ranks


def rank_methods(table: Table) -> pandas.DataFrame:
    """Returns the scores with the recomputed average rank, the printed one, and whether they differ."""
    ranks = table.complete_rows.rank(ascending=False).mean(axis=1)
    found = table.complete_rows.assign(**{RECOMPUTED: [round_half_up(rank, DECIMALS) for rank in ranks]})
    if table.has_ranks:
        printed = table.numbers.loc[found.index, PRINTED_RANK]
        differs = printed.notna() & (printed != found[RECOMPUTED])
        found = found.assign(**{PRINTED: printed, MISPRINT: np.where(differs, "yes", "")})
    return found


def rank_misprints(table: Table) -> list[Row]:
    """Lists the printed average ranks that contradict the printed scores."""
    found = rank_methods(table)
    wrong = found[found[MISPRINT] == "yes"] if table.has_ranks else found[:0]
    return [
        misprint_row(table, method, RECOMPUTED, f"{row[PRINTED]:.2f}", f"{row[RECOMPUTED]:.2f}")
        for method, row in wrong.iterrows()
    ]


def rank_sums(table: Table) -> tuple[float | None, float]:
    """Returns the sum of all ranks implied by the printed averages, and the true sum, columns x n (n + 1) / 2.

    An average over k columns is a multiple of 1 / (2 k), so a printed one is taken as the nearest multiple. The first
    sum is None if any row has no printed average.
    """
    count, columns = table.complete_rows.shape
    ranks = table.numbers.loc[table.complete_rows.index, PRINTED_RANK]
    found = None if ranks.isna().any() else float((ranks * 2 * columns).round().sum() / 2)
    return found, columns * count * (count + 1) / 2


# ------------------------------------------------------------------------------------------------ intervals


def interval_misprints(table: Table) -> Iterator[Row]:
    """Yields intervals that repeat their mean, and zero-width ones where another score of the same answers varies."""
    for method, row in table.numbers.iterrows() if table.of_rounds else ():
        for name in table.scores:
            mean, width = row[name], row.get(name + CI, np.nan)
            if np.isnan(mean) or np.isnan(width):
                continue
            text = f"{mean:.{table.digits[name]}f} ± {width:.{table.digits[name + CI]}f}"
            if width == mean != 0:
                yield misprint_row(table, method, name, text, "an interval; it repeats the mean")
            others = [other for other in other_scores(name) if row.get(other + CI, 0) > 0]
            if width == 0 and others:
                yield misprint_row(table, method, name, text, f"doubtful: {others[0]}, of the same answers, varies")


def other_scores(column: str) -> list[str]:
    """Returns the other columns of a column's benchmark."""
    benchmark = next((key[0] for key, name in PAPER.items() if name == column), None)
    return [name for key, name in PAPER.items() if key[0] == benchmark and name != column]


def can_compare_rounds(single: Table, rounds: Table) -> bool:
    """Returns whether the tables hold single runs and means over rounds of the same base model."""
    return not single.of_rounds and rounds.of_rounds and normalize_name(single.model) == normalize_name(rounds.model)


def shared_cells(single: Table, rounds: Table) -> list[tuple[str, str, float, float, float]]:
    """Returns (method, column, score, mean, half width) of scores in both tables with an interval in the second."""
    both = single.complete_rows.index.intersection(rounds.numbers.index, sort=False)
    names = [name for name in single.scores if name in rounds.scores and name + CI in rounds.numbers]
    one, other = single.numbers.at, rounds.numbers.at
    cells = [(str(m), name, one[m, name], other[m, name], other[m, name + CI]) for m in both for name in names]
    return [cell for cell in cells if not np.isnan(cell[3:]).any()]


def impossible_rounds(single: Table, rounds: Table, count: int = ROUNDS) -> Iterator[tuple[Row, float]]:
    """Yields single runs that cannot belong to the rounds whose mean and interval another table prints, with that mean.

    With x1 = mean + d, the deviations of the others sum to -d, so s^2 >= d^2 n / (n - 1)^2 and the half width is at
    least 1.96 d / (n - 1): 0.98 d for three rounds. The bound allows for rounding.
    """
    for method, name, first, mean, width in shared_cells(single, rounds):
        digits = rounds.digits[name]
        rounding = 0.5 * (10.0 ** -single.digits[name] + 10.0**-digits)
        least = NORMAL / (count - 1) * max(0.0, abs(first - mean) - rounding)
        if least > width + 0.5 * 10.0 ** -rounds.digits[name + CI] + SLACK:
            expected = f"a round of {mean:.{digits}f} ± {width:.{digits}f}; this needs at least ± {least:.{digits}f}"
            yield misprint_row(single, method, name, f"{first:.{single.digits[name]}f}", expected), mean


def note_without_cell(table: Table, item: Row, mean: float) -> str:
    """Returns a note on average ranks that still differ after replacing a cell by the mean over rounds."""
    method, column = str(item[METHOD]), str(item["column"])
    numbers = table.numbers.copy()
    numbers.loc[method, column] = mean
    left = rank_misprints(replace(table, numbers=numbers))
    told = ", ".join(f"{one[METHOD]} {one['expected']} against {one['printed']}" for one in left)
    where = f"{table.model}, {method} with {column} {mean:.{table.digits[column]}f}"
    return (
        f"{where} in place of {item['printed']}: {len(left)} average ranks still differ{f' ({told})' if told else ''}"
    )


# ------------------------------------------------------------------------------------------------ the report


def check_tables(paths: Sequence[Path], output: Path | None = None) -> None:
    """Prints every table's recomputed average ranks and inconsistencies, and writes them into a report folder.

    ``output``: by default a folder below ``outputs``. Raises UserError for a file that is not a table of results.
    """
    with report_folder("ranks", paths, output) as (folder, mark):
        tables = [table for path in paths for table in read_tables(path)]
        both = [(single, rounds) for single in tables for rounds in tables if can_compare_rounds(single, rounds)]
        of_rounds = [(single, *found) for single, rounds in both for found in impossible_rounds(single, rounds)]
        misprints = [row for table in tables for row in (*rank_misprints(table), *interval_misprints(table))]
        misprints += [row for _, row, _ in of_rounds]
        notes = [line for table in tables for line in describe_ranks(table)]
        if both:
            cells = sum(len(shared_cells(single, rounds)) for single, rounds in both)
            possible = f"{cells - len(of_rounds)} of {cells} can be one of them"
            notes.append(f"single runs compared with means over {ROUNDS} rounds: {possible}")
        notes += [note_without_cell(single, row, mean) for single, row, mean in of_rounds if single.has_ranks]
        title, names = "Inconsistent printed numbers", (*KEYS, "column", "printed", "expected")
        listed = [KeyedTable("misprints", title, names, tuple(misprints), KEYS)] if misprints else []
        publish_report("Average ranks, recomputed", [*listed, *map(ranks_table, tables)], notes, folder, "ranks", mark)


def describe_ranks(table: Table) -> list[str]:
    """Lists notes on how many of a table's printed ranks agree with its scores, and whether their sum is possible."""
    lacking = table.numbers.index.difference(table.complete_rows.index, sort=False)
    lines = [f"{table.name}: left out, without scores: {', '.join(lacking)}"] if len(lacking) else []
    if not table.has_ranks:
        return [*lines, f"{table.name}: prints no average rank"]
    wrong, known = len(rank_misprints(table)), rank_methods(table)[PRINTED].count()
    lines.append(f"{table.name}: {known - wrong} of {known} printed average ranks follow from the printed scores")
    found, expected = rank_sums(table)
    if found is not None and found != expected:
        rows, columns = table.complete_rows.shape
        lines.append(
            f"{table.name}: the printed ranks of all rows and columns sum to {found:g}; ranks of {rows} rows over "
            f"{columns} columns sum to {expected:g}, so one wrong score cannot explain it"
        )
    return lines


def ranks_table(table: Table) -> KeyedTable:
    """Builds a table of all rows with the recomputed average rank next to the printed one."""
    found = rank_methods(table).reset_index()
    shown = tuple(found.columns)
    rows: list[Row] = found.astype(object).where(found.notna(), None).to_dict("records")
    digits = {**dict.fromkeys((RECOMPUTED, PRINTED), DECIMALS), **{name: table.digits[name] for name in table.scores}}
    of = {"file": file_label(table.path), "base_model": table.model}
    title = f"{of['file']}: {table.model}" if table.model else of["file"]
    read = KeyedTable("ranks", title, shown, tuple(rows), KEYS[2:], None, digits)
    full = tuple({**of, **row} for row in rows)
    return replace(read, columns=(*of, *shown), rows=full, keys=KEYS, reading=read)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints and writes the report on the given files; returns 0, or 2 for a file that is not a table of results."""
    about = "Recompute average ranks and intervals of printed result tables, and list inconsistencies."
    parser = new_parser("experiments.check_tables", about, EXAMPLE)
    parser.add_argument("tables", nargs="+", type=Path, metavar="TABLE.csv", help="printed results, one row per method")
    chosen = parser.parse_args(arguments)
    return run_report_command(lambda: check_tables(chosen.tables, chosen.output))


if __name__ == "__main__":
    install_signal_handlers()
    sys.exit(main())
