"""Reports on finished folders: each study's tables, studies side by side, a table of runs, and a paper's numbers."""

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
from attnpo.lab.reports.output import RUNS, publish_report
from attnpo.lab.reports.report_config import RUN, STUDY
from attnpo.lab.results import (
    StudyResults,
    folder_kind,
    read_setting_name,
    read_study,
    run_row,
    run_warnings,
    unsealed_warnings,
)

METHOD = "method"  # the paper's name for the column of row names
SETTING = "setting"
MODELS = (SETTING, "base_model", "model")  # columns that may name a printed row's model; the first one present counts
KEYS = ("world", "arm")
HEADLINES = ("reward", "val accuracy")
GRADED = "a study's folder has no scores of graded answers"


@dataclass(frozen=True)
class ResultTable:
    """Table of our results to join with a paper's rows. ``settings``: names of its settings, empty if unknown."""

    table: KeyedTable
    settings: frozenset[str]


def write_folder_report(folders: Sequence[Path], kind: str, printed: Sequence[Path], output: Path, mark: str) -> None:
    """Prints the tables of finished folders and writes them, with the studies' figures, to ``output``.

    ``kind``: "study" or "run"; empty detects it per folder. ``printed``: CSV files of a paper's numbers; rows for the
    setting of a study or run are shown in a separate table below its own. ``mark``: digest of the command. Raises
    UserError for a folder that is not of the given kind.
    """
    kinds = [kind or folder_kind(folder) for folder in folders]
    studies = [read_study(folder) for folder, one in zip(folders, kinds, strict=True) if one == STUDY]
    runs = [folder for folder, one in zip(folders, kinds, strict=True) if one == RUN]
    notes = [f"{study.title}: {line}" if len(studies) > 1 else line for study in studies for line in study.notes]
    names = unique_folder_names([study.path for study in studies])
    told = [
        [
            replace(table, name=name, title=f"{name}: {table.title}" if table.title else name)
            for table in keyed_tables(study)
        ]
        for study, name in zip(studies, names, strict=True)
    ]
    if runs:
        rows = [{**run_row(folder), "run": name} for folder, name in zip(runs, unique_folder_names(runs), strict=True)]
        told.append([runs_table(rows)])
        notes += unsealed_warnings(runs)
        notes += [line for folder in runs for line in run_warnings(folder)]
    settings = [[study.setting] for study in studies] + [[read_setting_name(folder) for folder in runs]] * bool(runs)
    ours = [ResultTable(tables[0], frozenset(filter(None, of))) for tables, of in zip(told, settings, strict=True)]
    for path in printed:
        joined, lines = join_printed_rows(ours, path)
        notes += lines
        for tables, table in zip(told, joined, strict=True):
            tables[1:1] = [] if table is None else [table]
    finished = [study for study in studies if study.is_finished]
    together = [studies_table(finished)] if len(finished) > 1 else []
    sections = [section for study in finished for section in figure_sections(study)]
    every = [*together, *(table for tables in told for table in tables)]
    title = ", ".join([*(study.title for study in studies), *(path.resolve().name for path in runs)])[:120]
    publish_report(title, every, notes, output, STUDY if studies else "runs", mark, sections, why=GRADED)


def keyed_tables(study: StudyResults) -> list[KeyedTable]:
    """Returns a study's printed tables with row keys; for an unfinished study, the table of its runs."""
    if not study.is_finished:
        return [replace(runs_table(study.rows), title=study.state)]
    tables = []
    for title, block in study.printed:
        rows = [dict(zip(block.columns, row, strict=True)) for row in ordered_cells(block.columns, block.rows)]
        keys = tuple(key for key in KEYS if key in block.columns) or (block.columns[0],)
        digits = block.digits if isinstance(block.digits, Mapping) else dict.fromkeys(block.columns, block.digits)
        tables.append(KeyedTable("arms", title, tuple(block.columns), tuple(rows), keys, None, digits))
    return tables


def headline_column(table: KeyedTable) -> tuple[str, dict[tuple[Cell, ...], str]]:
    """Returns the column of a table's main metric, and its cells with their intervals by row key.

    Picks the reward, else the validation accuracy, else the first numeric column; "" if there is none.
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


def studies_table(studies: Sequence[StudyResults]) -> KeyedTable:
    """Builds one table of several studies: one row per arm, and one column per study with its main metric."""
    names = unique_folder_names([study.path for study in studies])
    keys = tuple(key for key in KEYS if any(key in study.printed[0][1].columns for study in studies)) or ("arm",)
    by_key: dict[tuple[Cell, ...], dict[str, Cell]] = {}
    columns = list(keys)
    for study, name in zip(studies, names, strict=True):
        table = keyed_tables(study)[0]
        what, cells = headline_column(table)
        column = f"{name}: {what}" if what else name
        columns.append(column)
        for row_key, text in cells.items():
            given = dict(zip(table.keys if table.keys[0] in keys else ("arm",), row_key, strict=True))
            row = by_key.setdefault(tuple(given.get(key) for key in keys), {key: given.get(key) for key in keys})
            row[column] = text
    rows = tuple({column: row.get(column) for column in columns} for row in by_key.values())
    return KeyedTable("studies", "Studies side by side", tuple(columns), rows, keys, None, {})


def unique_folder_names(paths: Sequence[Path]) -> list[str]:
    """Returns a name for each folder: the shortest trailing part of its path that is unique."""
    every = [path.resolve().parts for path in paths]

    def name_of(parts: tuple[str, ...]) -> str:
        alone = (size for size in range(1, len(parts)) if [one[-size:] for one in every].count(parts[-size:]) == 1)
        return "/".join(parts[-next(alone, len(parts)) :])

    return [name_of(parts) for parts in every]


def runs_table(rows: Sequence[Mapping[str, Cell]]) -> KeyedTable:
    """Builds one table of several runs with all columns that occur in any of them, seconds last."""
    columns = sorted(dict.fromkeys(column for row in rows for column in row), key=lambda column: column == "s/run")
    digits = {"beta": 4, "KL": 2, "length": 1, "coverage": 4, "source coverage": 4, "s/run": 1}
    return KeyedTable("runs", "Finished runs", tuple(columns), tuple(rows), RUNS, None, digits)


# ------------------------------------------------------------------------------------------------ printed numbers


def join_printed_rows(ours: Sequence[ResultTable], path: Path) -> tuple[list[KeyedTable | None], list[str]]:
    """Joins the printed rows of a file to our tables with the same setting; returns the joined tables and notes.

    A joined table is None if the file has no rows with the table's setting. A printed row that matches none of our rows
    is shown once, in the first joined table with its setting. Raises UserError if the file has none of the columns that
    identify our rows.
    """
    files = [read_printed_rows(path, one.table) for one in ours]
    mine: list[list[int]] = []
    met: set[tuple[int, int]] = set()
    for number, (file, one) in enumerate(zip(files, ours, strict=True)):
        keys = shared_keys(one.table, file)
        # Settings are compared by letters and digits only. A row without a model can match any setting.
        settings, names = set(map(normalize_name, one.settings)), [row_model(row) for row in file.rows]
        mine.append([place for place, name in enumerate(names) if name is None or normalize_name(name) in settings])
        for place in mine[-1]:
            if any(has_same_keys(row, file.rows[place], keys, fold=True) for row in one.table.rows):
                met.add((number, place))
    every = {place for places in mine for place in places}
    left = every - {place for _, place in met}
    notes = unmatched_row_notes(path, files[0], ours, sorted(left), every)
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


def read_printed_rows(path: Path, table: KeyedTable) -> PublishedTable:
    """Reads a file of printed numbers, keyed by our columns; methods replace arms or runs if the file has none.

    Raises UserError if the file has neither column.
    """
    item = table.keys[-1]
    printed = read_published_table(path, [*table.keys, METHOD, *MODELS])
    if item not in printed.columns:
        printed = read_published_table(path, [*table.keys, *MODELS], {METHOD: item})
    shared_keys(table, printed)
    return printed


def row_model(row: Mapping[str, Cell]) -> str | None:
    """Returns the setting of a printed row, or else the name of its model; None if the row has neither."""
    return next((str(row[name]) for name in MODELS if row.get(name) is not None), None)


def normalize_name(name: str) -> str:
    """Returns the letters and digits of a name in lower case, so that a paper's model name matches our setting's."""
    return "".join(sign for sign in name.casefold() if sign.isalnum())


def unmatched_row_notes(
    path: Path, printed: PublishedTable, ours: Sequence[ResultTable], left: Sequence[int], mine: set[int]
) -> list[str]:
    """Lists notes about a file's rows that belong to another model or have no counterpart in our tables."""
    others = ", ".join(
        dict.fromkeys(str(row_model(row)) for place, row in enumerate(printed.rows) if place not in mine)
    )
    settings = ", ".join(sorted({setting for one in ours for setting in one.settings}))
    here = f"{SETTING} {settings}" if settings else "an unknown setting (no config.yaml names it)"
    if not mine:
        return [
            f"{file_label(path)}: skipped, because its rows are for other models ({others}) and ours are for {here}"
        ]
    lines = [f"{file_label(path)}: skipped rows for other models ({others})"] if others else []
    item = ours[0].table.keys[-1]
    if left and item in printed.columns:
        lacking = dict.fromkeys(str(printed.rows[place][item]) for place in left)
        lines.append(f"{file_label(path)}: printed rows with no matching {item} in our tables: {', '.join(lacking)}")
    return lines


# ------------------------------------------------------------------------------------------------ page


def figure_sections(study: StudyResults) -> list[Section]:
    """Returns page sections with a finished study's figures and the table of all its runs."""
    images = [Image(path, path.stem) for path in list_figures(study)]
    sections = [Section(f"{study.title}: figures", images)] if images else []
    if study.rows:
        sections.append(Section(f"{study.title}: all runs", [TableBlock(list(study.rows[0]), study.rows)]))
    return sections


def list_figures(study: StudyResults) -> list[Path]:
    """Lists the PNG figures named in a study's study.json that still exist."""
    drawn = [study.path / name for name in study.record.get("figures", []) if name.endswith(".png")]
    return [path for path in drawn if path.is_file()]
