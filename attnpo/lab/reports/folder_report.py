"""Reports of finished folders: each study's tables again, studies side by side, runs row by row, a paper's numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from attnpo.display.page import Image, Section, TableBlock
from attnpo.display.printed import (
    KeyedTable,
    PublishedTable,
    file_label,
    has_same_keys,
    join_published,
    read_published_table,
    shared_keys,
)
from attnpo.display.tables import DEFAULT_DIGITS, Cell, format_cell, ordered_cells
from attnpo.lab.reports.output import RUNS, publish
from attnpo.lab.reports.report_config import RUN, STUDY
from attnpo.lab.results import StudyResults, kind_in, read_study, run_row, run_warnings, setting_in, warn_unsealed

METHOD = "method"  # what the paper's tables call the column that names the rows
SETTING = "setting"
MODELS = (SETTING, "base_model", "model")  # columns that say whose numbers a printed row holds, the first that is there
KEYS = ("world", "arm")
HEADLINES = ("reward", "val accuracy")
GRADED = "scores of graded answers are no part of a study's folder"


@dataclass(frozen=True)
class Ours:
    """Table that printed rows may meet, and the settings of its numbers; none where its folders do not say."""

    table: KeyedTable
    settings: frozenset[str]


def folder_report(folders: Sequence[Path], kind: str, printed: Sequence[Path], output: Path, mark: str) -> None:
    """Prints the tables of finished folders and writes them, with the studies' figures, to ``output``.

    ``kind``: study or run; empty goes by what each folder holds. ``printed``: CSV files, of which each study has those
    rows that are of its setting, in a table below its own (the runs likewise). UserError for a folder that holds
    nothing of the kind.
    """
    kinds = [kind or kind_in(folder) for folder in folders]
    studies = [read_study(folder) for folder, one in zip(folders, kinds, strict=True) if one == STUDY]
    runs = [folder for folder, one in zip(folders, kinds, strict=True) if one == RUN]
    notes = [f"{study.title}: {line}" if len(studies) > 1 else line for study in studies for line in study.notes]
    names = column_names([study.path for study in studies])
    told = [
        [
            replace(table, name=name, title=f"{name}: {table.title}" if table.title else name)
            for table in keyed_tables(study)
        ]
        for study, name in zip(studies, names, strict=True)
    ]
    if runs:
        rows = [{**run_row(folder), "run": name} for folder, name in zip(runs, column_names(runs), strict=True)]
        told.append([runs_table(rows)])
        notes += warn_unsealed(runs)
        notes += [line for folder in runs for line in run_warnings(folder)]
    settings = [[study.setting] for study in studies] + [[setting_in(folder) for folder in runs]] * bool(runs)
    ours = [Ours(tables[0], frozenset(filter(None, of))) for tables, of in zip(told, settings, strict=True)]
    for path in printed:
        joined, lines = put_beside(ours, path)
        notes += lines
        for tables, table in zip(told, joined, strict=True):
            tables[1:1] = [] if table is None else [table]
    finished = [study for study in studies if study.is_finished]
    together = [side_by_side(finished)] if len(finished) > 1 else []
    sections = [section for study in finished for section in pictures(study)]
    every = [*together, *(table for tables in told for table in tables)]
    title = ", ".join([*(study.title for study in studies), *(path.resolve().name for path in runs)])[:120]
    publish(title, every, notes, output, STUDY if studies else "runs", mark, sections, why=GRADED)


def keyed_tables(study: StudyResults) -> list[KeyedTable]:
    """Returns the tables that a study printed; of one that is not finished the listing of its runs."""
    if not study.is_finished:
        return [replace(runs_table(study.rows), title=study.state)]
    tables = []
    for title, block in study.printed:
        rows = [dict(zip(block.columns, row, strict=True)) for row in ordered_cells(block.columns, block.rows)]
        keys = tuple(key for key in KEYS if key in block.columns) or (block.columns[0],)
        digits = block.digits if isinstance(block.digits, Mapping) else dict.fromkeys(block.columns, block.digits)
        tables.append(KeyedTable("arms", title, tuple(block.columns), tuple(rows), keys, None, digits))
    return tables


def headline(table: KeyedTable) -> tuple[str, dict[tuple[Cell, ...], str]]:
    """Returns the column that tells a study's arms apart and its cells by the row's keys, with the interval after it.

    The reward, else the validation accuracy, else the first column of numbers; "" for a table without one.
    """
    numeric = [
        name
        for name in table.columns
        if name not in table.keys
        and all(isinstance(row[name], int | float | None) for row in table.rows)
        and any(row[name] is not None for row in table.rows)
    ]
    if not numeric:
        return "", {}
    name = next((wanted for wanted in HEADLINES if wanted in numeric), numeric[0])
    after = table.columns[table.columns.index(name) + 1 :][:1]
    cells = {}
    for row in table.rows:
        text = format_cell(row[name], table.digits.get(name, DEFAULT_DIGITS))
        interval = str(row[after[0]]) if after and str(row[after[0]]).startswith("[") else ""
        cells[tuple(row[key] for key in table.keys)] = f"{text} {interval}".strip()
    return name, cells


def side_by_side(studies: Sequence[StudyResults]) -> KeyedTable:
    """Returns several studies in one table: a row per arm, a column per study with its headline number."""
    names = column_names([study.path for study in studies])
    keys = tuple(key for key in KEYS if any(key in study.printed[0][1].columns for study in studies)) or ("arm",)
    by_key: dict[tuple[Cell, ...], dict[str, Cell]] = {}
    columns = list(keys)
    for study, name in zip(studies, names, strict=True):
        table = keyed_tables(study)[0]
        what, cells = headline(table)
        column = f"{name}: {what}" if what else name
        columns.append(column)
        for row_key, text in cells.items():
            given = dict(zip(table.keys if table.keys[0] in keys else ("arm",), row_key, strict=True))
            row = by_key.setdefault(tuple(given.get(key) for key in keys), {key: given.get(key) for key in keys})
            row[column] = text
    rows = tuple({column: row.get(column) for column in columns} for row in by_key.values())
    return KeyedTable("studies", "Studies side by side", tuple(columns), rows, keys, None, {})


def column_names(paths: Sequence[Path]) -> list[str]:
    """Names folders by as many last parts of their paths as tell them apart."""
    every = [path.resolve().parts for path in paths]

    def name_of(parts: tuple[str, ...]) -> str:
        alone = (size for size in range(1, len(parts)) if [one[-size:] for one in every].count(parts[-size:]) == 1)
        return "/".join(parts[-next(alone, len(parts)) :])

    return [name_of(parts) for parts in every]


def runs_table(rows: Sequence[Mapping[str, Cell]]) -> KeyedTable:
    """Returns the rows of several runs as one table, with the columns that any of them has, the seconds last."""
    columns = sorted(dict.fromkeys(column for row in rows for column in row), key=lambda column: column == "s/run")
    digits = {"beta": 4, "KL": 2, "length": 1, "coverage": 4, "source coverage": 4, "s/run": 1}
    return KeyedTable("runs", "Finished runs", tuple(columns), tuple(rows), RUNS, None, digits)


# ------------------------------------------------------------------------------------------------ printed numbers


def put_beside(ours: Sequence[Ours], path: Path) -> tuple[list[KeyedTable | None], list[str]]:
    """Returns for each of our tables the rows of a file that are of its setting, joined with ours.

    And what must be said.

    A row without any of ours is shown once, below the first table of its setting. UserError when the file has no column
    that names our rows.
    """
    files = [read_rows(path, one.table) for one in ours]
    mine: list[list[int]] = []
    met: set[tuple[int, int]] = set()
    for number, (file, one) in enumerate(zip(files, ours, strict=True)):
        keys = shared_keys(one.table, file)
        # Settings are compared by letters and digits alone; a row that says nothing of its model may stand beside any.
        settings, names = set(map(letters, one.settings)), [whose(row) for row in file.rows]
        mine.append([place for place, name in enumerate(names) if name is None or letters(name) in settings])
        for place in mine[-1]:
            if any(has_same_keys(row, file.rows[place], keys, fold=True) for row in one.table.rows):
                met.add((number, place))
    every = {place for places in mine for place in places}
    left = every - {place for _, place in met}
    notes = about_rows(path, files[0], ours, sorted(left), every)
    tables: list[KeyedTable | None] = []
    for number, (file, one) in enumerate(zip(files, ours, strict=True)):
        shown = [place for place in mine[number] if (number, place) in met or place in left]
        left -= set(shown)
        if not shown:
            tables.append(None)
            continue
        columns = tuple(name for name in file.columns if name != SETTING)
        table = join_published(
            one.table, replace(file, columns=columns, rows=tuple(file.rows[i] for i in shown)), fold=True
        )
        where = f", {SETTING} {', '.join(sorted(one.settings))}" if one.settings else ""
        tables.append(replace(table, title=f"{one.table.name}: printed numbers of {file_label(path)}{where}"))
    return tables, notes


def read_rows(path: Path, table: KeyedTable) -> PublishedTable:
    """Returns a file with its rows named as ours are; its methods stand for arms (or runs) where it has none.

    UserError when it has neither.
    """
    item = table.keys[-1]
    printed = read_published_table(path, [*table.keys, METHOD, *MODELS])
    if item not in printed.columns:
        printed = read_published_table(path, [*table.keys, *MODELS], {METHOD: item})
    shared_keys(table, printed)
    return printed


def whose(row: Mapping[str, Cell]) -> str | None:
    """Returns the setting a printed row is of, or the name of its model; None when it does not say."""
    return next((str(row[name]) for name in MODELS if row.get(name) is not None), None)


def letters(name: str) -> str:
    """Returns a name without case and signs: a model's name as the paper writes it is then that of its setting."""
    return "".join(sign for sign in name.casefold() if sign.isalnum())


def about_rows(
    path: Path, printed: PublishedTable, ours: Sequence[Ours], left: Sequence[int], mine: set[int]
) -> list[str]:
    """Lines on the rows of a file that are of another model, and on those of which we have no row."""
    others = ", ".join(dict.fromkeys(str(whose(row)) for place, row in enumerate(printed.rows) if place not in mine))
    settings = ", ".join(sorted({setting for one in ours for setting in one.settings}))
    here = f"{SETTING} {settings}" if settings else "an unknown setting (no config.yaml says it)"
    if not mine:
        return [f"{file_label(path)}: left out, its numbers belong to other models ({others}) than these, of {here}"]
    lines = [f"{file_label(path)}: rows of other models left out ({others})"] if others else []
    item = ours[0].table.keys[-1]
    if left and item in printed.columns:
        lacking = dict.fromkeys(str(printed.rows[place][item]) for place in left)
        lines.append(f"{file_label(path)}: printed alone, with no {item} of ours: {', '.join(lacking)}")
    return lines


# ------------------------------------------------------------------------------------------------ page


def pictures(study: StudyResults) -> list[Section]:
    """Returns a finished study's own figures, as its study.json names them, and every one of its runs."""
    images = [Image(path, path.stem) for path in figures(study)]
    sections = [Section(f"{study.title}: figures", images)] if images else []
    if study.rows:
        sections.append(Section(f"{study.title}: every run", [TableBlock(list(study.rows[0]), study.rows)]))
    return sections


def figures(study: StudyResults) -> list[Path]:
    """Lists the figures that a study drew where they are still there."""
    drawn = [study.path / name for name in study.record.get("figures", []) if name.endswith(".png")]
    return [path for path in drawn if path.is_file()]
