"""Reports of finished folders: each study's tables again, studies side by side, runs row by row, a paper's numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from attnpo.display.page import Image, Section, TableBlock
from attnpo.display.printed import KeyedTable, PrintedTable, beside, label_of, meets, read_printed, shared_keys
from attnpo.display.tables import Cell
from attnpo.lab.reports.finished import (
    StudyFolder,
    column_names,
    kind_in,
    read_study,
    run_row,
    run_warnings,
    runs_table,
    setting_in,
    side_by_side,
    unchecked,
)
from attnpo.lab.reports.output import publish
from attnpo.lab.reports.report_config import RUN, STUDY
from attnpo.system.files import parse_json

METHOD = "method"  # what the paper's tables call the column that names the rows
SETTING = "setting"
MODELS = (SETTING, "base_model", "model")  # columns that say whose numbers a printed row holds, the first that is there
GRADED = "scores of graded answers are no part of a study's folder"


@dataclass(frozen=True)
class Ours:
    """A table that printed rows may meet, and the settings of its numbers; none where its folders do not say."""

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
    told = [named(study, name) for study, name in zip(studies, names, strict=True)]
    if runs:
        rows = [{**run_row(folder), "run": name} for folder, name in zip(runs, column_names(runs), strict=True)]
        told.append([runs_table(rows)])
        notes += unchecked(runs)
        notes += [line for folder in runs for line in run_warnings(folder)]
    settings = [[study.setting] for study in studies] + [[setting_in(folder) for folder in runs]] * bool(runs)
    ours = [Ours(tables[0], frozenset(filter(None, of))) for tables, of in zip(told, settings, strict=True)]
    for path in printed:
        joined, lines = put_beside(ours, path)
        notes += lines
        for tables, table in zip(told, joined, strict=True):
            tables[1:1] = [] if table is None else [table]
    finished = [study for study in studies if study.finished]
    together = [side_by_side(finished)] if len(finished) > 1 else []
    sections = [section for study in studies for section in pictures(study)]
    every = [*together, *(table for tables in told for table in tables)]
    publish(title_of(studies, runs), every, notes, output, STUDY if studies else "runs", mark, sections, why=GRADED)


def named(study: StudyFolder, name: str) -> list[KeyedTable]:
    """Returns the tables of a study under its name."""
    return [
        replace(table, name=name, title=f"{name}: {table.title}" if table.title else name) for table in study.tables
    ]


# ------------------------------------------------------------------------------------------------ printed numbers


def put_beside(ours: Sequence[Ours], path: Path) -> tuple[list[KeyedTable | None], list[str]]:
    """For each of our tables the rows of a file that are of its setting, joined with ours; and what must be said.

    A row without any of ours is shown once, below the first table of its setting. UserError when the file has no column
    that names our rows.
    """
    files = [read_rows(path, one.table) for one in ours]
    mine = [
        [place for place, row in enumerate(file.rows) if is_of(row, one)] for file, one in zip(files, ours, strict=True)
    ]
    met = [
        [place for place in places if met_in(one.table, file, file.rows[place])]
        for file, one, places in zip(files, ours, mine, strict=True)
    ]
    left = {place for places in mine for place in places} - {place for places in met for place in places}
    notes = about_rows(path, files[0], ours, sorted(left), {place for places in mine for place in places})
    tables: list[KeyedTable | None] = []
    for file, one, places, found in zip(files, ours, mine, met, strict=True):
        shown = [place for place in places if place in found or place in left]
        left -= set(shown)
        if not shown:
            tables.append(None)
            continue
        columns = tuple(name for name in file.columns if name != SETTING)
        table = beside(one.table, replace(file, columns=columns, rows=tuple(file.rows[i] for i in shown)), fold=True)
        where = f", {SETTING} {', '.join(sorted(one.settings))}" if one.settings else ""
        tables.append(replace(table, title=f"{one.table.name}: printed numbers of {label_of(path)}{where}"))
    return tables, notes


def read_rows(path: Path, table: KeyedTable) -> PrintedTable:
    """Returns a file with its rows named as ours are: its column of methods stands for one of arms (or runs) where it
    has none.

    UserError when it has neither.
    """
    item = table.keys[-1]
    printed = read_printed(path, [*table.keys, METHOD, *MODELS])
    if item not in printed.columns:
        printed = read_printed(path, [*table.keys, *MODELS], {METHOD: item})
    shared_keys(table, printed)
    return printed


def whose(row: Mapping[str, Cell]) -> str | None:
    """Returns the setting a printed row is of, or the name of its model; None when it does not say."""
    return next((str(row[name]) for name in MODELS if row.get(name) is not None), None)


def is_of(row: Mapping[str, Cell], ours: Ours) -> bool:
    """Returns whether a printed row is of a setting of ours; names are compared by letters and digits alone.

    A row that says nothing of its model may stand beside any.
    """
    name = whose(row)
    return name is None or letters(name) in {letters(setting) for setting in ours.settings}


def letters(name: str) -> str:
    """Returns a name without case and signs: a model's name as the paper writes it is then that of its setting."""
    return "".join(sign for sign in name.casefold() if sign.isalnum())


def met_in(table: KeyedTable, printed: PrintedTable, row: Mapping[str, Cell]) -> bool:
    """Returns whether a printed row has a row of ours."""
    keys = shared_keys(table, printed)
    return any(meets(ours, row, keys, fold=True) for ours in table.rows)


def about_rows(
    path: Path, printed: PrintedTable, ours: Sequence[Ours], left: Sequence[int], mine: set[int]
) -> list[str]:
    """Lines on the rows of a file that are of another model, and on those of which we have no row."""
    others = ", ".join(dict.fromkeys(str(whose(row)) for place, row in enumerate(printed.rows) if place not in mine))
    settings = ", ".join(sorted({setting for one in ours for setting in one.settings}))
    here = f"{SETTING} {settings}" if settings else "an unknown setting (no config.yaml says it)"
    if not mine:
        return [f"{label_of(path)}: left out, its numbers belong to other models ({others}) than these, of {here}"]
    lines = [f"{label_of(path)}: rows of other models left out ({others})"] if others else []
    item = ours[0].table.keys[-1]
    if left and item in printed.columns:
        lacking = dict.fromkeys(str(printed.rows[place][item]) for place in left)
        lines.append(f"{label_of(path)}: printed alone, with no {item} of ours: {', '.join(lacking)}")
    return lines


# ------------------------------------------------------------------------------------------------ page


def pictures(study: StudyFolder) -> list[Section]:
    """Returns a finished study's own figures, and every one of its runs."""
    images = [Image(path, path.stem) for path in figures(study.path)] if study.finished else []
    sections = [Section(f"{study.title}: figures", images)] if images else []
    if study.runs:
        sections.append(Section(f"{study.title}: every run", [TableBlock(list(study.runs[0]), study.runs)]))
    return sections


def figures(folder: Path) -> list[Path]:
    """Lists the figures that a study drew, as its study.json names them, where they are still there."""
    record = folder / "study.json"
    names = parse_json(record.read_text(encoding="utf-8")).get("figures", []) if record.is_file() else []
    return [folder / name for name in names if name.endswith(".png") and (folder / name).is_file()]


def title_of(studies: Sequence[StudyFolder], runs: Sequence[Path]) -> str:
    """Returns a heading for the page."""
    return ", ".join([*(study.title for study in studies), *(path.resolve().name for path in runs)])[:120]
