"""Reports of finished folders: each study's tables again, studies side by side, runs row by row, printed numbers."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from attnpo.analysis.page import Image, Section, TableBlock
from attnpo.analysis.printed import KeyedTable, beside, read_printed
from attnpo.studies.finished import (
    StudyFolder,
    column_names,
    kind_in,
    read_study,
    run_row,
    runs_table,
    side_by_side,
)
from attnpo.studies.report_output import publish
from attnpo.studies.reporting import RUN, STUDY

# What the paper's tables call the column that names the rows.
METHOD = "method"
GRADED = "scores of graded answers are no part of a study's folder"


def folder_report(folders: Sequence[Path], kind: str, printed: Sequence[Path], output: Path, mark: str) -> None:
    """Nothing; prints the tables of finished folders and writes them, with the studies' figures, to ``output``.

    ``kind``: study or run; empty goes by what each folder holds. ``printed``: CSV files, put beside the studies side by
    side if there are several, else beside the only one (or beside the runs when there is none). UserError for a folder
    that holds nothing of the kind.
    """
    kinds = [kind or kind_in(folder) for folder in folders]
    studies = [read_study(folder) for folder, one in zip(folders, kinds, strict=True) if one == STUDY]
    rows = [folder for folder, one in zip(folders, kinds, strict=True) if one == RUN]
    tables = [table for study in studies for table in named(study, [one.path for one in studies])]
    if len(studies) > 1:
        tables.insert(0, side_by_side(studies))
    if rows:
        names = column_names(rows)
        tables.append(runs_table([{**run_row(folder), "run": name} for folder, name in zip(rows, names, strict=True)]))
    for path in printed:
        tables[0] = joined(tables[0], path)
    notes = [f"{study.title}: {line}" if len(studies) > 1 else line for study in studies for line in study.notes]
    sections = [section for study in studies for section in pictures(study)]
    publish(title_of(studies, rows), tables, notes, output, STUDY if studies else "runs", mark, sections, why=GRADED)


def named(study: StudyFolder, others: Sequence[Path]) -> list[KeyedTable]:
    """The tables of a study under its name."""
    name = column_names(others)[list(others).index(study.path)]
    return [
        replace(table, name=name, title=f"{name}: {table.title}" if table.title else name) for table in study.tables
    ]


def joined(table: KeyedTable, path: Path) -> KeyedTable:
    """``table`` with the printed numbers of a file. UserError when it has no column that names our rows.

    Its column of methods meets our arms; a file that calls them otherwise can have a column of arms beside it.
    """
    item = table.keys[-1]
    printed = read_printed(path, [*table.keys, METHOD])
    if item not in printed.columns:
        printed = read_printed(path, table.keys, {METHOD: item})
    return beside(table, printed, fold=True)


def pictures(study: StudyFolder) -> list[Section]:
    """A study's figures, and every one of its runs."""
    images = [Image(path, path.stem) for path in sorted(study.path.glob("*.png"))]
    found = [Section(f"{study.title}: figures", images)] if images else []
    if study.runs:
        columns = list(study.runs[0])
        found.append(Section(f"{study.title}: every run", [TableBlock(columns, study.runs)]))
    return found


def title_of(studies: Sequence[StudyFolder], runs: Sequence[Path]) -> str:
    """A heading for the page."""
    return ", ".join([*(study.title for study in studies), *(path.resolve().name for path in runs)])[:120]
