"""Reads finished runs and studies from their folders, for reports, notebooks and scripts.

Only files are read; no model is loaded. Data frames are built on first access.
"""

import csv
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

import pandas
from omegaconf import DictConfig, OmegaConf

from attnpo.config.compose import to_container, wrap_yaml_errors
from attnpo.display.output import read_tables
from attnpo.display.page import Paragraph, TableBlock
from attnpo.display.tables import Cell, ordered_cells
from attnpo.lab.studies.outcome import PointResults, best_point, group_by_point, has_truth, rewards_at_kl
from attnpo.lab.studies.predictions import HEADS, TITLE
from attnpo.lab.studies.study import BETA, LR, Arm, Point, short_key
from attnpo.run.folders import CONFIG, FIXED, STUDY_FILES, TABLES
from attnpo.run.result import RunResult
from attnpo.schema import UserError
from attnpo.system.credentials import to_savable
from attnpo.system.files import SEAL, Json, describe_change, has_checksums, parse_json, read_checksums, read_record
from attnpo.training.metrics_file import METRICS, read_metrics
from attnpo.weights.arrival import COLUMNS as ARRIVED

RESULT, RECORD, ANALYSES = "result.json", "study.json", "analyses"
COUNTERS = ("step", "epoch")
ANSWERS = ("prompt", "policy", "reference")


# ------------------------------------------------------------------------------------------------ runs


@dataclass(frozen=True)
class Run:
    """Finished run.

    ``result``: content of result.json (seed, steps, seconds, last metrics, inputs, versions, truth, drift). ``config``:
    configuration of the run as plain values. ``notes``: remarks about the run's files, e.g. missing checksums.
    """

    path: Path
    result: RunResult
    config: Mapping[str, Json]
    notes: tuple[str, ...] = ()

    @cached_property
    def metrics(self) -> pandas.DataFrame:
        """Returns one row per optimizer step that logged anything; NaN for metrics not logged at that step."""
        frame = _make_frame(read_metrics(self.path / METRICS))
        return frame.astype({name: "Int64" for name in COUNTERS if name in frame.columns})

    @cached_property
    def curves(self) -> pandas.DataFrame:
        """Returns the metrics in long form, for plotting: step, split (train, val), metric, value."""
        rows = [
            {"step": int(row["step"]), "split": split, "metric": metric, "value": value}
            for row in read_metrics(self.path / METRICS)
            for name, value in row.items()
            for split, _, metric in [name.partition("/")]
            if metric
        ]
        return _make_frame(rows, ["step", "split", "metric", "value"])

    @cached_property
    def samples(self) -> pandas.DataFrame:
        """Returns sample answers to validation prompts: prompt, policy, reference. Empty if the run saved none."""
        return _make_frame(read_sample_answers(self.path), ["prompt", "policy", "reference"])

    @cached_property
    def scores(self) -> pandas.DataFrame:
        """Returns the true scores, one row per split. Raises UserError in settings without a known reward."""
        if self.result.truth is None:
            raise UserError(
                f"{self.path}: the run's setting has no known reward, so there are no true scores; see run.metrics"
            )
        return _make_frame([{"split": split, **scores.numbers} for split, scores in self.result.truth.items()])


def load_run(folder: str | Path) -> Run:
    """Loads the finished run in ``folder``.

    Raises:
        UserError: the folder contains no run, or contains a study; the run is not finished; or its files are damaged or
            in a format that this version cannot read.
    """
    path = Path(folder).expanduser()
    if not (path / RESULT).is_file() and (path / CONFIG).is_file():
        raise UserError(
            f"{path}: the run is not finished: it has {CONFIG} but no {RESULT}; run its command again with resume=auto "
            f"name={path.name}"
        )
    if folder_kind(path) == "study":
        raise UserError(f"{path}: expected the folder of a run, found a study; use load_study")
    return _make_run(path, read_result(path))


def _make_run(path: Path, result: RunResult) -> Run:
    cfg = read_run_config(path / CONFIG)
    values = {} if cfg is None else to_container(cfg)
    return Run(path, result, values, tuple(unsealed_warnings([path])))


def read_sample_answers(folder: Path) -> list[dict[str, object]]:
    """Reads the sample answers in a run's folder, with prompts as text; empty if there are none."""
    from attnpo.run.report import read_samples

    return [{**row} for row in read_samples(folder)]


# ------------------------------------------------------------------------------------------------ studies


class FinishedPoint(NamedTuple):
    """Finished sweep point of a study with its result and folder."""

    point: Point
    result: RunResult
    folder: Path


@dataclass(frozen=True)
class StudyResults:
    """Study loaded from its folder.

    ``state``: progress of an unfinished study; empty for a finished one. ``notes``: notes below the tables, and remarks
    about files that are skipped, unfinished or unchecked. ``printed``: printed tables with titles. ``rows``: runs with
    metrics; for an unfinished study, the runs so far, without grid values. ``record``: content of study.json.
    ``setting``: setting used to compose the points.
    """

    path: Path
    state: str
    notes: tuple[str, ...]
    printed: tuple[tuple[str, TableBlock], ...]
    rows: tuple[Mapping[str, Cell], ...]
    record: Mapping[str, Any]
    setting: str | None

    @property
    def title(self) -> str:
        """Returns the name of the study's folder."""
        return self.path.resolve().name

    @property
    def is_finished(self) -> bool:
        """Returns whether the study has its tables. An unfinished study has only the points finished so far."""
        return not self.state

    @cached_property
    def tables(self) -> dict[str, pandas.DataFrame]:
        """Returns all printed tables by title, with unrounded numbers."""
        found: dict[str, pandas.DataFrame] = {} if self.is_finished else {self.state: self.points}
        for title, block in self.printed:
            again = sum(name == title or name.startswith(f"{title} (") for name in found)
            frame = pandas.DataFrame(ordered_cells(block.columns, block.rows), columns=list(block.columns))
            found[f"{title} ({again + 1})" if again else title] = frame
        return found

    @cached_property
    def arms(self) -> pandas.DataFrame:
        """Returns the table of arms, each at its selected point. Raises UserError for an unfinished study."""
        self._require_finished("arms")
        return next(iter(self.tables.values()))

    @cached_property
    def points(self) -> pandas.DataFrame:
        """Returns one row per run with its grid values and metrics; for an unfinished study, one row per run so far."""
        return _make_frame(self.rows)

    @cached_property
    def predictions(self) -> pandas.DataFrame:
        """Returns the predictions made before the points ran, with their outcomes once the study is finished."""
        if TITLE in self.tables:
            return self.tables[TITLE]
        record = read_record(self.path / FIXED) if (self.path / FIXED).is_file() else None
        claims = (record or {}).get("claims", {}).values()
        return _make_frame([{"about": claim["about"], "prediction": claim["says"]} for claim in claims], HEADS)

    @cached_property
    def samples(self) -> pandas.DataFrame:
        """Returns the sample answers of all points, with columns that identify the run."""
        named: list[tuple[dict[str, object], Path]] = [
            (
                {**_arm_columns(point.arm.world, point.arm.name), "seed": point.seed}
                | dict(value.split("=", 1) for value in point.values),
                folder,
            )
            for point, _, folder in self.finished_points()
        ]
        if not self.is_finished:
            named = [({"run": folder.name}, folder) for folder in self._undamaged_folders()]
        return _make_frame([{**run, **row} for run, folder in named for row in read_sample_answers(folder)], ANSWERS)

    def runs(self, arm: str | None = None, seed: int | None = None) -> list[Run]:
        """Loads the study's runs, optionally only those of one arm or one seed."""
        if not self.is_finished:
            return [_make_run(folder, read_result(folder)) for folder in self._undamaged_folders()]
        return [
            _make_run(folder, result)
            for point, result, folder in self.finished_points()
            if arm in (None, point.arm.name) and seed in (None, point.seed)
        ]

    def finished_points(self, label: str | None = None) -> list[FinishedPoint]:
        """Returns the undamaged points that the tables are based on; with ``label``, only those of one arm."""
        found = []
        for one in self.record.get("runs", []):
            folder, arm = self.path / one["folder"], Arm(one["arm"], (), one["layer"], one["world"])
            if label in (None, arm.label) and (folder / RESULT).is_file() and find_damage(folder) is None:
                point = Point(arm, tuple(one["values"]), one["seed"])
                found.append(FinishedPoint(point, read_result(folder), folder))
        return found

    @cached_property
    def frontier(self) -> pandas.DataFrame:
        """Returns reward and KL on test prompts, one row per arm and grid point, as means over seeds.

        ``low`` and ``high``: the reward's 95 % interval over seeds and prompts. ``chosen``: whether this point
        represents its arm; selected on validation prompts. Raises UserError for an unfinished study or one without a
        known reward.
        """
        return _make_frame(
            [
                {
                    **_arm_columns(world, arm),
                    "point": point.label,
                    "seeds": len(point.seeds),
                    "kl": point.mean_truth_score("test", "kl"),
                    "reward": point.reward_interval.mean,
                    "low": point.reward_interval.low,
                    "high": point.reward_interval.high,
                    "chosen": point is best,
                }
                for (world, arm), points in self._points_by_arm().items()
                for best in [best_point(points, float(self.record["kl_limit"]))]
                for point in points
            ]
        )

    def at_kl(self, level: float) -> pandas.DataFrame:
        """Returns each arm's reward at a given KL to the base (nats), interpolated along the arm's grid points.

        ``mark`` is "" for a value at the level, "<" if the arm's points end before it, and "~" if no point is near it.
        Raises UserError in the same cases as ``frontier``.
        """
        if not level > 0:
            raise UserError(f"at_kl: expected a KL above 0 in nats, got {level}")
        rows = [
            {**_arm_columns(*of), "reward": at.mean_reward, "kl": at.kl, "mark": at.mark, "seeds": len(at.seeds)}
            for of, points in self._points_by_arm().items()
            if (at := rewards_at_kl(points, level)) is not None
        ]
        return _make_frame(rows, ["arm", "reward", "kl", "mark", "seeds"])

    def _undamaged_folders(self) -> list[Path]:
        return [folder for folder, damage in check_point_folders(self.path).items() if damage is None]

    def _points_by_arm(self) -> dict[tuple[str, str], list[PointResults]]:
        self._require_finished("reward against KL")
        points = group_by_point([(point, result) for point, result, _ in self.finished_points()])
        if not points or not has_truth(points):
            why = "all of its points are damaged or missing" if not points else "its setting has no known reward"
            raise UserError(f"{self.path}: {why}, so there are no rewards to compare with KL; see study.points")
        found: dict[tuple[str, str], list[PointResults]] = {}
        for point in points:
            found.setdefault((point.arm.world, point.arm.name), []).append(point)
        return found

    def _require_finished(self, what: str) -> None:
        if not self.is_finished:
            raise UserError(
                f"{self.path}: the study has no tables yet, so there is no {what} ({self.notes[0]}); see study.points"
            )


def load_study(folder: str | Path) -> StudyResults:
    """Loads the study in ``folder``; an unfinished study has the points finished so far.

    Raises:
        UserError: the folder contains no study, or contains a single run; no point has a result; or its files are
            damaged.
    """
    path = Path(folder).expanduser()
    if folder_kind(path) == "run":
        raise UserError(f"{path}: expected the folder of a study, found a run; use load_run")
    return read_study(path)


def read_study(folder: Path) -> StudyResults:
    """Reads the study in a folder.

    Damaged points are skipped and named in a note. Raises UserError if there are neither tables nor finished points, or
    if the study's own files are damaged.
    """
    expected = [
        name for name in STUDY_FILES if name != TABLES or (folder / TABLES).exists() or TABLES in read_checksums(folder)
    ]
    problem = describe_change(folder, only=expected) if has_checksums(folder) else None
    if problem is not None:
        raise UserError(f"{folder}: {problem}; run the study's command again, which reuses its finished points")
    points = check_point_folders(folder)
    sound = [place for place, damage in points.items() if damage is None]
    try:
        record = dict(parse_json((folder / RECORD).read_text(encoding="utf-8"))) if (folder / RECORD).is_file() else {}
    except (ValueError, TypeError) as error:
        said = f"expected a study's record, but the file cannot be read ({error})"
        raise UserError(f"{folder / RECORD}: {said}") from error
    state = ""
    printed: list[tuple[str, TableBlock]] = []
    rows: list[dict[str, Cell]] = []
    notes: list[str] = []
    if (folder / TABLES).is_file() and "runs" in record:
        printed, notes = read_printed_tables(folder / TABLES)
        notes += unsealed_warnings([folder])
        rows = read_run_rows(folder / "results.csv")
    elif sound:
        begun = sum(path.is_dir() for path in (folder / "points").iterdir())
        state = f"not finished, {len(sound)} of {begun} started points have a result"
        lacking = f"{RECORD} lists no runs" if (folder / TABLES).is_file() else f"there is no {TABLES}"
        notes = [f"{state}, and {lacking}: run the study's command again to finish it"]
        rows = [run_row(place) for place in sound]
    else:
        raise missing_folder_error(folder, f"a finished study ({', '.join(STUDY_FILES)}, points/*/{RESULT})")
    notes += [f"skipped {place.name}: {damage}" for place, damage in points.items() if damage is not None]
    notes += unsealed_warnings(sound)
    if not state and len(sound) < len(rows):
        notes.append(f"{len(rows) - len(sound)} of {len(rows)} runs in results.csv have no {RESULT} under points/")
    setting = next(filter(None, map(read_setting_name, sound)), None)
    return StudyResults(folder, state, tuple(notes), tuple(printed), tuple(rows), record, setting)


def check_point_folders(folder: Path) -> dict[Path, str | None]:
    """Checks the folders of a study's finished points; returns a description of the damage for each, None if intact."""
    return {path.parent: find_damage(path.parent) for path in sorted(folder.glob(f"points/*/{RESULT}"))}


def read_printed_tables(path: Path) -> tuple[list[tuple[str, TableBlock]], list[str]]:
    """Reads a study's printed tables with titles, and the surrounding text. Raises UserError if there is no table."""
    blocks = [(section.title, block) for section in read_tables(path) for block in section.blocks]
    tables = [(block.caption or title, block) for title, block in blocks if isinstance(block, TableBlock)]
    if not tables:
        raise UserError(f"{path}: expected the tables of a study, found none; run the study's command again")
    return tables, [block.text for _, block in blocks if isinstance(block, Paragraph)]


def read_run_rows(path: Path) -> list[dict[str, Cell]]:
    """Reads all runs of a study from its results.csv; empty if there is no such file."""
    if not path.is_file():
        return []
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            rows = list(csv.DictReader(lines, strict=True))
        return [
            {name: text if name in ("world", "arm") else _parse_cell(text) for name, text in row.items()}
            for row in rows
        ]
    except (ValueError, TypeError, csv.Error) as problem:  # TypeError: a row that is not as long as the head
        raise UserError(f"{path}: expected the table of a study's runs, but it cannot be read ({problem})") from problem


def _parse_cell(text: str) -> Cell:
    for number in (int, float):
        with suppress(ValueError):
            return number(text)
    return text or None


# ------------------------------------------------------------------------------------------------ folders


def folder_kind(folder: Path) -> str:
    """Returns "study" or "run", depending on the folder's files. Raises UserError for a folder that is neither."""
    if any((folder / name).is_file() for name in STUDY_FILES) or (folder / "points").is_dir():
        return "study"
    if (folder / RESULT).is_file():
        return "run"
    raise missing_folder_error(folder, f"a finished study ({', '.join(STUDY_FILES)}) or run ({RESULT})")


def missing_folder_error(folder: Path, expected: str) -> UserError:
    """Builds the error for a folder that is not of the expected kind; the message lists the files found there."""
    if not folder.is_dir():
        return UserError(
            f"{folder}: expected the folder of {expected}, but it "
            f"{'is a file' if folder.exists() else 'does not exist'}"
        )
    held = sorted(path.name + "/" * path.is_dir() for path in folder.iterdir())
    there = ", ".join(held[:8]) + (", ..." if len(held) > 8 else "") if held else "nothing"
    below = sorted(path.parent.name for name in ("study.json", RESULT) for path in folder.glob(f"*/{name}"))
    hint = f"; subfolders that contain one: {', '.join(below[:5])}" if below else ""
    return UserError(f"{folder}: expected the folder of {expected}, found {there}{hint}")


def find_damage(folder: Path) -> str | None:
    """Describes damage in a finished run's result or config; None if they are intact or have no checksums."""
    return describe_change(folder, only=(CONFIG, RESULT)) if has_checksums(folder) else None


def unsealed_warnings(folders: Sequence[Path]) -> list[str]:
    """Returns a warning that names the first folder without checksums and counts the others, if any."""
    unsealed = [folder for folder in folders if not has_checksums(folder)]
    more = f" (and {len(unsealed) - 1} more)" if len(unsealed) > 1 else ""
    return [f"{unsealed[0].resolve().name}: it has no {SEAL}, so its files are not checked{more}"] if unsealed else []


def read_result(folder: Path) -> RunResult:
    """Reads the result of a finished run. Raises UserError if it is missing, damaged or unreadable."""
    path = folder / RESULT
    if not path.is_file():
        raise missing_folder_error(folder, f"a finished run ({RESULT})")
    if (damage := find_damage(folder)) is not None:
        raise UserError(
            f"{folder}: {damage}; run its command again (resume=auto rebuilds the result from its last step)"
        )
    try:
        return RunResult.read(path.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise UserError(f"{path}: cannot be read as a run result ({problem})") from problem


def run_row(folder: Path) -> dict[str, Cell]:
    """Builds the table row of a finished run. Raises UserError if its result is missing or unreadable."""
    result = read_result(folder)
    row: dict[str, Cell] = {
        "run": folder.resolve().name,
        **read_run_settings(folder / CONFIG),
        "seed": result.seed,
        "steps": result.steps,
        "val loss": result.metrics.get("val/loss"),
        "val accuracy": result.metrics.get("val/rewards/accuracies"),
        "val margin": result.metrics.get("val/rewards/margins"),
        "eff. weights/n": None,
        "coverage": None,
    }
    inputs = {"effective_share": "eff. weights/n", "coverage": "coverage", **ARRIVED}
    row |= {head: value for name, head in inputs.items() if not math.isnan(value := result.input("train", name))}
    scores = {} if result.truth is None else result.truth["test"].numbers
    names = {"reward": "reward", "win rate": "win_rate", "KL": "kl", "length": "length"}
    row |= {name: scores[key] for name, key in names.items() if key in scores}
    return {**row, "s/run": result.seconds["all"]}


def run_warnings(folder: Path) -> list[str]:
    """Returns a finished run's warnings: about its judge, validation pairs seen in training, and lost weights."""
    result = RunResult.read((folder / RESULT).read_text(encoding="utf-8"))
    return [f"WARNING: {folder.resolve().name}: {warning}" for warning in result.warnings]


def read_run_settings(path: Path) -> dict[str, Cell]:
    """Reads the settings that distinguish runs (weights, objective, ...) from a saved config; empty if missing."""
    cfg = read_run_config(path)
    if cfg is None:
        return {}
    choices = OmegaConf.select(cfg, "composed.choices") or {}
    layers, heads = (list(OmegaConf.select(cfg, f"weights.{name}") or []) for name in ("layers", "heads"))
    layers = layers or [layer for layer in [OmegaConf.select(cfg, "weights.layer")] if layer is not None]
    read = [mark + "+".join(map(str, rows)) for mark, rows in (("L", layers), ("H", heads)) if rows]
    weights = " ".join([str(choices.get("weights", "")), *read])
    given = (str(item).partition("=")[0].lstrip("+~") for item in OmegaConf.select(cfg, "composed.overrides") or [])
    settings = {
        "weights": " + ".join([weights, *map(str, OmegaConf.select(cfg, "transforms") or {})]),
        "objective": choices.get("objective"),
        "beta": OmegaConf.select(cfg, BETA),
        "lr": OmegaConf.select(cfg, LR),
        # Objective keys that were overridden, besides beta.
        **{short_key(key): OmegaConf.select(cfg, key) for key in given if key.startswith("objective.") and key != BETA},
    }
    return {name: value for name, value in settings.items() if value is not None}


def read_run_config(path: Path) -> DictConfig | None:
    """Reads a saved configuration; None if missing. Raises UserError for a file that is not a configuration."""
    if not path.is_file():
        return None
    try:
        with wrap_yaml_errors(path):
            cfg = OmegaConf.load(path)
    except Exception as problem:  # YAML errors, and those of a file that is not text
        words = " ".join(str(problem).split())[:120]
        raise UserError(f"{path}: expected the configuration of a run, but it cannot be read ({words})") from problem
    if not isinstance(cfg, DictConfig):
        raise UserError(f"{path}: expected the configuration of a run, but the file contains something else")
    saved = cast(dict[str, Json], OmegaConf.to_container(cfg))
    return OmegaConf.create(to_savable(saved))  # resolves nothing from the environment


def read_setting_name(folder: Path) -> str | None:
    """Reads the name of a run's setting from its config; None if unknown."""
    cfg = read_run_config(folder / CONFIG)
    setting = None if cfg is None else OmegaConf.select(cfg, "composed.choices.setting")
    return None if setting is None else str(setting)


# ------------------------------------------------------------------------------------------------ frames


def _arm_columns(world: str, arm: str) -> dict[str, object]:
    return {**({"world": world} if world else {}), "arm": arm}


def _make_frame(rows: Sequence[Mapping[str, object]], columns: Sequence[str] = ()) -> pandas.DataFrame:
    """Builds a frame with all columns that occur in any row, or with ``columns`` if there are no rows."""
    return pandas.DataFrame([dict(row) for row in rows], columns=None if rows else list(columns))
