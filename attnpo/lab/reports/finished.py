"""Finished folders read back: a study's tables and runs, a single run's row. Reads files alone, loads no model."""

import csv
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from omegaconf import DictConfig, OmegaConf

from attnpo.config.compose import readable
from attnpo.display.output import read_tables
from attnpo.display.page import Paragraph, TableBlock
from attnpo.display.printed import KeyedTable
from attnpo.display.tables import DEFAULT_DIGITS, Cell, cell_texts, format_cell
from attnpo.lab.studies.study import BETA, LR, Arm, Point, short
from attnpo.run.folders import CONFIG, STUDY_FILES, TABLES
from attnpo.run.result import RunResult
from attnpo.schema import UserError
from attnpo.system.credentials import to_savable
from attnpo.system.files import SEAL, Json, changed, clean, is_sealed, sealed
from attnpo.weights.arrival import COLUMNS as ARRIVED

RESULT, ANALYSES = "result.json", "analyses"
KEYS = ("world", "arm")
RUNS = ("run",)
HEADLINES = ("reward", "val accuracy")
_NUMBER = re.compile(r"[-+]?\d+(\.\d+)?(e[-+]?\d+)?")


@dataclass(frozen=True)
class StudyFolder:
    """A study as its folder tells it.

    ``tables`` are those it printed, the first with its arms; ``notes`` what stood under them; ``runs`` the rows of its
    results.csv; ``setting`` the one its points were composed with. One that is not ``finished`` has a table of the
    points it has.
    """

    path: Path
    title: str
    tables: tuple[KeyedTable, ...]
    notes: tuple[str, ...]
    runs: tuple[Mapping[str, Cell], ...]
    setting: str | None
    finished: bool


def kind_in(folder: Path) -> str:
    """ "study" or "run", by what a folder holds. UserError when it is neither, saying what is there."""
    if any((folder / name).is_file() for name in STUDY_FILES) or (folder / "points").is_dir():
        return "study"
    if (folder / RESULT).is_file():
        return "run"
    raise nothing(folder, f"a finished study ({', '.join(STUDY_FILES)}) or run ({RESULT})")


def nothing(folder: Path, expected: str) -> UserError:
    """Returns the error for a folder that does not hold what was expected."""
    if not folder.is_dir():
        return UserError(
            f"{folder}: expected the folder of {expected}, there is {'a file' if folder.exists() else 'none'}"
        )
    held = sorted(path.name + "/" * path.is_dir() for path in folder.iterdir())
    there = ", ".join(held[:8]) + (", ..." if len(held) > 8 else "") if held else "nothing"
    below = sorted(path.parent.name for name in ("study.json", RESULT) for path in folder.glob(f"*/{name}"))
    hint = f"; folders below it that hold one: {', '.join(below[:5])}" if below else ""
    return UserError(f"{folder}: expected the folder of {expected}, found {there}{hint}")


# ------------------------------------------------------------------------------------------------ studies


def read_study(folder: Path) -> StudyFolder:
    """Returns the study in a folder; a row for each finished point where there is no tables.json: not finished, or
    older.

    A point that is not as it was written is left out and named in a note. UserError when there are neither tables nor a
    finished point, and for files that are damaged.
    """
    older = is_older(folder)
    expected = [name for name in STUDY_FILES if not (older and name == TABLES)]
    problem = changed(folder, only=expected) if is_sealed(folder) else None
    if problem is not None:
        raise UserError(f"{folder}: {problem}; run the study's command again, which reuses its finished points")
    points = point_folders(folder)
    results = [place / RESULT for place, damage in points.items() if damage is None]
    finished = (folder / TABLES).is_file()
    if finished:
        tables, notes = printed_tables(folder / TABLES)
        notes += unchecked([folder])
    elif results:
        begun = sum(path.is_dir() for path in (folder / "points").iterdir())
        state = "of an older version" if older else "not finished"
        title = f"{state}, {len(results)} of {begun} begun points have a result"
        mend = "write it" if older else "finish it"
        tables = [replace(runs_table([run_row(path.parent) for path in results]), title=title)]
        notes = [f"{title}, and there is no {TABLES}: run the study's command again to {mend}"]
    else:
        raise nothing(folder, f"a finished study ({', '.join(STUDY_FILES)}, points/*/{RESULT})")
    notes += [f"left out, {place.name}: {damage}" for place, damage in points.items() if damage is not None]
    notes += unchecked([path.parent for path in results])
    runs = read_runs(folder / "results.csv") if finished else []
    if runs and len(results) < len(runs):
        notes.append(f"{len(runs) - len(results)} of {len(runs)} runs in results.csv have no {RESULT} under points/")
    setting = next(filter(None, (setting_in(path.parent) for path in results)), None)
    return StudyFolder(folder, folder.resolve().name, tuple(tables), tuple(notes), tuple(runs), setting, finished)


def point_folders(folder: Path) -> dict[Path, str | None]:
    """Returns the folders of a study's finished points, each with what is damaged there, None where nothing is."""
    return {path.parent: damage_of(path.parent) for path in sorted(folder.glob(f"points/*/{RESULT}"))}


def is_older(folder: Path) -> bool:
    """Returns whether a study was finished by a version that kept its tables in Markdown alone."""
    return not (folder / TABLES).exists() and (folder / "table.md").is_file() and TABLES not in sealed(folder)


@dataclass(frozen=True)
class FinishedPoint:
    """A point of a finished study: what it is, its result, and its folder."""

    point: Point
    result: RunResult
    folder: Path


def finished_points(study: StudyFolder, label: str | None = None) -> list[FinishedPoint]:
    """Returns the points that a study's tables stand on, by its results.csv; damaged ones are left out.

    ``label``: those of one arm, by ``Arm.label``.
    """
    found = []
    for row in study.runs:
        arm = Arm(str(row["arm"]), (), world="" if row.get("world") is None else str(row["world"]))
        if label is not None and arm.label != label:
            continue
        named = [arm.world, arm.name] if arm.world else [arm.name]
        values = {key: value for key, value in row.items() if "." in key and "/" not in key and value is not None}
        stem = clean("-".join([*named, *(f"{short(key)}={value}" for key, value in values.items())]))
        for path in sorted(study.path.glob(f"points/{stem}-seed{row['seed']}-????????/{RESULT}")):
            result = RunResult.read(path.read_text(encoding="utf-8")) if damage_of(path.parent) is None else None
            if result is not None and result.seconds["all"] == row["seconds"] and result.steps == row["steps"]:
                point = Point(arm, tuple(f"{key}={value}" for key, value in values.items()), result.seed)
                found.append(FinishedPoint(point, result, path.parent))
                break
    return found


def printed_tables(path: Path) -> tuple[list[KeyedTable], list[str]]:
    """Returns the tables that a study printed, with the text around them line by line. UserError where
    there is none.
    """
    blocks = [(section.title, block) for section in read_tables(path) for block in section.blocks]
    tables = [keyed(block, block.caption or title) for title, block in blocks if isinstance(block, TableBlock)]
    if not tables:
        raise UserError(f"{path}: expected the tables of a study, there is none; run the study's command again")
    return tables, [block.text for _, block in blocks if isinstance(block, Paragraph)]


def read_runs(path: Path) -> list[dict[str, Cell]]:
    """Returns every run of a study, from its results.csv; none without that file."""
    if not path.is_file():
        return []
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            return [{name: value_of(text or "") for name, text in row.items()} for row in csv.DictReader(lines)]
    except (ValueError, AttributeError, csv.Error) as problem:  # AttributeError: a row longer than the header
        raise UserError(f"{path}: expected the table of a study's runs, but it cannot be read ({problem})") from problem


def keyed(table: TableBlock, title: str) -> KeyedTable:
    """Returns a table of a study as it was printed: numbers with the decimals shown, in columns of numbers alone."""
    texts, numeric = cell_texts(table.columns, table.rows, table.digits)
    digits = {
        name: max((len(line[place].partition(".")[2]) for line in texts if "e" not in line[place]), default=0)
        for place, name in enumerate(table.columns)
        if numeric[place]
    }
    rows = [
        {name: value_of(text) if name in digits else text for name, text in zip(table.columns, line, strict=True)}
        for line in texts
    ]
    keys = tuple(key for key in KEYS if key in table.columns) or (table.columns[0],)
    return KeyedTable("arms", title, tuple(table.columns), tuple(rows), keys, None, digits)


def value_of(text: str) -> Cell:
    """Returns a number where the text is one, None for an empty text."""
    if not text.strip():
        return None
    if text.strip() == "nan":
        return float("nan")
    if not _NUMBER.fullmatch(text.strip()):
        return text
    return float(text) if any(letter in text for letter in ".e") else int(text)


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


def side_by_side(studies: Sequence[StudyFolder]) -> KeyedTable:
    """Returns one table of several studies: a row per arm of any of them, a column per study with its
    headline number.
    """
    names = column_names([study.path for study in studies])
    keys = tuple(key for key in KEYS if any(key in study.tables[0].columns for study in studies)) or ("arm",)
    by_key: dict[tuple[Cell, ...], dict[str, Cell]] = {}
    columns = list(keys)
    for study, name in zip(studies, names, strict=True):
        table = study.tables[0]
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


# ------------------------------------------------------------------------------------------------ runs


def damage_of(folder: Path) -> str | None:
    """Returns what is damaged in a finished run's result or config; None where nothing is, and where
    nothing can tell.
    """
    return changed(folder, only=(CONFIG, RESULT)) if is_sealed(folder) else None


def unchecked(folders: Sequence[Path]) -> list[str]:
    """Returns a line that names the first of those folders that hold no digests to compare their files with, if any."""
    unsealed = [folder for folder in folders if not is_sealed(folder)]
    more = f" (and {len(unsealed) - 1} more)" if len(unsealed) > 1 else ""
    return [f"{unsealed[0].resolve().name}: it has no {SEAL}, so its files are not checked{more}"] if unsealed else []


def read_result(folder: Path) -> RunResult:
    """Returns the result of the finished run in a folder. UserError when there is none, or it cannot be read."""
    path = folder / RESULT
    if not path.is_file():
        raise nothing(folder, f"a finished run ({RESULT})")
    if (damage := damage_of(folder)) is not None:
        raise UserError(f"{folder}: {damage}; run it again (resume=auto makes its result anew from its last step)")
    try:
        return RunResult.read(path.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise UserError(f"{path}: expected the result of a run, but it cannot be read ({problem})") from problem


def run_row(folder: Path) -> dict[str, Cell]:
    """Returns one row for the finished run in a folder. UserError when there is none, or its result cannot be read."""
    result = read_result(folder)
    row: dict[str, Cell] = {
        "run": folder.resolve().name,
        **settings_in(folder / CONFIG),
        "seed": result.seed,
        "steps": result.steps,
        "val loss": result.metrics.get("val/loss"),
        "val accuracy": result.metrics.get("val/rewards/accuracies"),
        "val margin": result.metrics.get("val/rewards/margins"),
        "eff. weights/n": _known(result.input("train", "effective_share")),
        "coverage": _known(result.input("train", "coverage")),
        **{head: value for name, head in ARRIVED.items() if not math.isnan(value := result.input("train", name))},
    }
    scores = {} if result.truth is None else result.truth["test"].numbers
    names = {"reward": "reward", "win rate": "win_rate", "KL": "kl", "length": "length"}
    row |= {name: scores[key] for name, key in names.items() if key in scores}
    return {**row, "s/run": result.seconds["all"]}


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def run_warnings(folder: Path) -> list[str]:
    """Returns what a finished run warns of: its judge, validation pairs it is trained on, weights that are lost."""
    result = RunResult.read((folder / RESULT).read_text(encoding="utf-8"))
    return [f"WARNING: {folder.resolve().name}: {warning}" for warning in result.warnings]


def settings_in(path: Path) -> dict[str, Cell]:
    """Returns what tells runs apart, from a saved configuration; nothing without one."""
    cfg = config_in(path)
    if cfg is None:
        return {}
    choices = OmegaConf.select(cfg, "composed.choices") or {}
    weights = " ".join([str(choices.get("weights", "")), *rows_in(cfg)])
    settings = {
        "weights": " + ".join([weights, *map(str, OmegaConf.select(cfg, "transforms") or {})]),
        "objective": choices.get("objective"),
        "beta": OmegaConf.select(cfg, BETA),
        "lr": OmegaConf.select(cfg, LR),
        **{short(key): OmegaConf.select(cfg, key) for key in objective_keys(cfg)},
    }
    return {name: value for name, value in settings.items() if value is not None}


def config_in(path: Path) -> DictConfig | None:
    """Returns a saved configuration; None where there is none. UserError for a file that holds none."""
    if not path.is_file():
        return None
    try:
        with readable(path):
            cfg = OmegaConf.load(path)
    except Exception as problem:  # YAML's errors, and those of a file that is no text
        words = " ".join(str(problem).split())[:120]
        raise UserError(f"{path}: expected the configuration of a run, but it cannot be read ({words})") from problem
    if not isinstance(cfg, DictConfig):
        raise UserError(f"{path}: expected the configuration of a run, but it holds none")
    saved = cast(dict[str, Json], OmegaConf.to_container(cfg))
    return OmegaConf.create(to_savable(saved))  # nothing of it is read from the environment


def objective_keys(cfg: DictConfig) -> list[str]:
    """Returns the keys of its objective that a saved configuration was given beside beta, such as a study's grid gives
    them.
    """
    given = OmegaConf.select(cfg, "composed.overrides") or []
    keys = dict.fromkeys(str(override).partition("=")[0].lstrip("+~") for override in given)
    return [key for key in keys if key.startswith("objective.") and key != BETA]


def rows_in(cfg: DictConfig) -> list[str]:
    """Returns which layers and heads of the judge a saved configuration weighs by, in words; none for weights without
    any.
    """
    layers, heads = (list(OmegaConf.select(cfg, f"weights.{name}") or []) for name in ("layers", "heads"))
    layers = layers or [layer for layer in [OmegaConf.select(cfg, "weights.layer")] if layer is not None]
    return [mark + "+".join(map(str, rows)) for mark, rows in (("L", layers), ("H", heads)) if rows]


def setting_in(folder: Path) -> str | None:
    """Returns the setting that a run was composed with; None when its folder does not say."""
    cfg = config_in(folder / CONFIG)
    setting = None if cfg is None else OmegaConf.select(cfg, "composed.choices.setting")
    return None if setting is None else str(setting)


def runs_table(rows: Sequence[Mapping[str, Cell]]) -> KeyedTable:
    """Returns the rows of several runs as one table, with the columns that any of them has, the seconds last."""
    columns = sorted(dict.fromkeys(column for row in rows for column in row), key=lambda column: column == "s/run")
    digits = {"beta": 4, "KL": 2, "length": 1, "coverage": 4, "source coverage": 4, "s/run": 1}
    return KeyedTable("runs", "Finished runs", tuple(columns), tuple(rows), RUNS, None, digits)
