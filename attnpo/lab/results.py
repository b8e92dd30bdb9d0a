"""Finished runs and studies, read from the folders that ``fit`` wrote: for reports, notebooks and scripts alike.

Reads files alone and loads no model. A frame is made when it is first asked for.
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

    ``result``: what it says of itself (seed, steps, seconds, last metrics, inputs, versions, truth, drift). ``config``:
    its configuration as plain values. ``notes``: what must be said of its files, such as that nothing can check them.
    """

    path: Path
    result: RunResult
    config: Mapping[str, Json]
    notes: tuple[str, ...] = ()

    @cached_property
    def metrics(self) -> pandas.DataFrame:
        """Returns a row per optimiser step that logged anything; what was not logged at a step is NaN there."""
        frame = _frame(read_metrics(self.path / METRICS))
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
        return _frame(rows, ["step", "split", "metric", "value"])

    @cached_property
    def samples(self) -> pandas.DataFrame:
        """Answers to validation prompts: prompt, policy, reference; no row for a run that wrote none."""
        return _frame(sample_rows(self.path), ["prompt", "policy", "reference"])

    @cached_property
    def scores(self) -> pandas.DataFrame:
        """Returns true scores, a row per split. UserError in settings without a known truth."""
        if self.result.truth is None:
            raise UserError(
                f"{self.path}: its setting has no known truth, so there are no true scores; see run.metrics"
            )
        return _frame([{"split": split, **scores.numbers} for split, scores in self.result.truth.items()])


def load_run(folder: str | Path) -> Run:
    """Returns the finished run in ``folder``.

    Raises:
        UserError: there is no run, or a study; the run is not finished; its files are damaged, or of a form that this
            version cannot read.
    """
    path = Path(folder).expanduser()
    if not (path / RESULT).is_file() and (path / CONFIG).is_file():
        raise UserError(
            f"{path}: the run is not finished, it has {CONFIG} and no {RESULT}; repeat its command with resume=auto "
            f"name={path.name}"
        )
    if kind_in(path) == "study":
        raise UserError(f"{path}: expected the folder of a run, found that of a study; load_study reads it")
    return _run(path, read_result(path))


def _run(path: Path, result: RunResult) -> Run:
    cfg = config_in(path / CONFIG)
    values = {} if cfg is None else to_container(cfg)
    return Run(path, result, values, tuple(warn_unsealed([path])))


def sample_rows(folder: Path) -> list[dict[str, object]]:
    """Returns the sample answers in a run's folder, prompts as text; none without them."""
    from attnpo.run.report import read_samples

    return [{**row} for row in read_samples(folder)]


# ------------------------------------------------------------------------------------------------ studies


class FinishedPoint(NamedTuple):
    """Point of a finished study: what it is, its result, and its folder."""

    point: Point
    result: RunResult
    folder: Path


@dataclass(frozen=True)
class StudyResults:
    """Study as its folder tells it.

    ``notes``: what stood under its tables, and what must be said of its files: what is left out, not finished or
    unchecked. ``state``: how far it is, empty for one that is finished. ``printed``: the tables it printed, with their
    titles. ``rows``: its runs with their numbers; of one that is not finished those so far, without the grid's values.
    ``record``: its study.json. ``setting``: the one its points were composed with.
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
        """Returns the name of its folder."""
        return self.path.resolve().name

    @property
    def is_finished(self) -> bool:
        """Returns whether it printed its tables; else there are the points that have a result, and nothing on arms."""
        return not self.state

    @cached_property
    def tables(self) -> dict[str, pandas.DataFrame]:
        """Returns every table it printed, by its title, with the numbers in full."""
        found: dict[str, pandas.DataFrame] = {} if self.is_finished else {self.state: self.points}
        for title, block in self.printed:
            again = sum(name == title or name.startswith(f"{title} (") for name in found)
            frame = pandas.DataFrame(ordered_cells(block.columns, block.rows), columns=list(block.columns))
            found[f"{title} ({again + 1})" if again else title] = frame
        return found

    @cached_property
    def arms(self) -> pandas.DataFrame:
        """Returns the table of its arms, each at its chosen point. UserError for a study that is not finished."""
        self._require_finished("arms")
        return next(iter(self.tables.values()))

    @cached_property
    def points(self) -> pandas.DataFrame:
        """Returns a row per run, with the grid's values and all its numbers; of unfinished studies, those so far."""
        return _frame(self.rows)

    @cached_property
    def predictions(self) -> pandas.DataFrame:
        """Returns what was expected before the points ran, with what came of it once the study is finished."""
        if TITLE in self.tables:
            return self.tables[TITLE]
        record = read_record(self.path / FIXED) if (self.path / FIXED).is_file() else None
        claims = (record or {}).get("claims", {}).values()
        return _frame([{"about": claim["about"], "prediction": claim["says"]} for claim in claims], HEADS)

    @cached_property
    def samples(self) -> pandas.DataFrame:
        """Returns the sample answers of all points, each with what tells its run apart."""
        named: list[tuple[dict[str, object], Path]] = [
            (
                {**_name_arm(point.arm.world, point.arm.name), "seed": point.seed}
                | dict(value.split("=", 1) for value in point.values),
                folder,
            )
            for point, _, folder in self.finished_points()
        ]
        if not self.is_finished:
            named = [({"run": folder.name}, folder) for folder in self._sound_folders()]
        return _frame([{**run, **row} for run, folder in named for row in sample_rows(folder)], ANSWERS)

    def runs(self, arm: str | None = None, seed: int | None = None) -> list[Run]:
        """Returns its runs, of one arm or seed where these are given."""
        if not self.is_finished:
            return [_run(folder, read_result(folder)) for folder in self._sound_folders()]
        return [
            _run(folder, result)
            for point, result, folder in self.finished_points()
            if arm in (None, point.arm.name) and seed in (None, point.seed)
        ]

    def finished_points(self, label: str | None = None) -> list[FinishedPoint]:
        """Returns the points that its tables stand on, or those of one arm, by ``Arm.label``, without damaged ones."""
        found = []
        for one in self.record.get("runs", []):
            folder, arm = self.path / one["folder"], Arm(one["arm"], (), one["layer"], one["world"])
            if label in (None, arm.label) and (folder / RESULT).is_file() and damage_of(folder) is None:
                point = Point(arm, tuple(one["values"]), one["seed"])
                found.append(FinishedPoint(point, read_result(folder), folder))
        return found

    @cached_property
    def frontier(self) -> pandas.DataFrame:
        """Returns reward against KL on test prompts, a row per arm and grid point, means over seeds.

        ``low`` and ``high``: the reward's 95 % interval over seeds and prompts. ``chosen``: the point that stands for
        its arm, chosen on validation prompts. UserError for a study without a known truth, or not finished.
        """
        return _frame(
            [
                {
                    **_name_arm(world, arm),
                    "point": point.label,
                    "seeds": len(point.seeds),
                    "kl": point.mean_truth_score("test", "kl"),
                    "reward": point.reward_interval.mean,
                    "low": point.reward_interval.low,
                    "high": point.reward_interval.high,
                    "chosen": point is best,
                }
                for (world, arm), points in self._by_arm().items()
                for best in [best_point(points, float(self.record["kl_limit"]))]
                for point in points
            ]
        )

    def at_kl(self, level: float) -> pandas.DataFrame:
        """Returns the reward of every arm at one KL to the base, in nats, read off its own path over the grid.

        ``mark`` is "" for a value at the level; "<" where the arm's path ends before it, "~" where it has no point near
        it. UserError as for ``frontier``.
        """
        if not level > 0:
            raise UserError(f"at_kl: expected a KL above 0 in nats, got {level}")
        rows = [
            {**_name_arm(*of), "reward": at.mean_reward, "kl": at.kl, "mark": at.mark, "seeds": len(at.seeds)}
            for of, points in self._by_arm().items()
            if (at := rewards_at_kl(points, level)) is not None
        ]
        return _frame(rows, ["arm", "reward", "kl", "mark", "seeds"])

    def _sound_folders(self) -> list[Path]:
        return [folder for folder, damage in point_folders(self.path).items() if damage is None]

    def _by_arm(self) -> dict[tuple[str, str], list[PointResults]]:
        self._require_finished("reward against KL")
        points = group_by_point([(point, result) for point, result, _ in self.finished_points()])
        if not points or not has_truth(points):
            why = "no point that its tables stand on is left" if not points else "its setting has no known truth"
            raise UserError(f"{self.path}: {why}, so there is no reward against KL; see study.points")
        found: dict[tuple[str, str], list[PointResults]] = {}
        for point in points:
            found.setdefault((point.arm.world, point.arm.name), []).append(point)
        return found

    def _require_finished(self, what: str) -> None:
        if not self.is_finished:
            raise UserError(f"{self.path}: there is no table yet, and so no {what}: {self.notes[0]}; see study.points")


def load_study(folder: str | Path) -> StudyResults:
    """Returns the study in ``folder``; one that is not finished has the points that are.

    Raises:
        UserError: there is no study, or a single run; no point has a result; its files are damaged.
    """
    path = Path(folder).expanduser()
    if kind_in(path) == "run":
        raise UserError(f"{path}: expected the folder of a study, found that of a run; load_run reads it")
    return read_study(path)


def read_study(folder: Path) -> StudyResults:
    """Returns the study in a folder.

    A point that is not as it was written is left out and named in a note. UserError when there are neither tables nor a
    finished point, and for files that are damaged.
    """
    expected = [
        name for name in STUDY_FILES if name != TABLES or (folder / TABLES).exists() or TABLES in read_checksums(folder)
    ]
    problem = describe_change(folder, only=expected) if has_checksums(folder) else None
    if problem is not None:
        raise UserError(f"{folder}: {problem}; run the study's command again, which reuses its finished points")
    points = point_folders(folder)
    sound = [place for place, damage in points.items() if damage is None]
    try:
        record = dict(parse_json((folder / RECORD).read_text(encoding="utf-8"))) if (folder / RECORD).is_file() else {}
    except (ValueError, TypeError) as error:
        said = f"expected the record of a study, but it cannot be read ({error})"
        raise UserError(f"{folder / RECORD}: {said}") from error
    state = ""
    printed: list[tuple[str, TableBlock]] = []
    rows: list[dict[str, Cell]] = []
    notes: list[str] = []
    if (folder / TABLES).is_file() and "runs" in record:
        printed, notes = printed_tables(folder / TABLES)
        notes += warn_unsealed([folder])
        rows = read_rows(folder / "results.csv")
    elif sound:
        begun = sum(path.is_dir() for path in (folder / "points").iterdir())
        state = f"not finished, {len(sound)} of {begun} begun points have a result"
        lacking = f"{RECORD} lists no runs" if (folder / TABLES).is_file() else f"there is no {TABLES}"
        notes = [f"{state}, and {lacking}: run the study's command again to finish it"]
        rows = [run_row(place) for place in sound]
    else:
        raise nothing(folder, f"a finished study ({', '.join(STUDY_FILES)}, points/*/{RESULT})")
    notes += [f"left out, {place.name}: {damage}" for place, damage in points.items() if damage is not None]
    notes += warn_unsealed(sound)
    if not state and len(sound) < len(rows):
        notes.append(f"{len(rows) - len(sound)} of {len(rows)} runs in results.csv have no {RESULT} under points/")
    setting = next(filter(None, map(setting_in, sound)), None)
    return StudyResults(folder, state, tuple(notes), tuple(printed), tuple(rows), record, setting)


def point_folders(folder: Path) -> dict[Path, str | None]:
    """Returns the folders of a study's finished points, each with what is damaged there, None where nothing is."""
    return {path.parent: damage_of(path.parent) for path in sorted(folder.glob(f"points/*/{RESULT}"))}


def printed_tables(path: Path) -> tuple[list[tuple[str, TableBlock]], list[str]]:
    """Returns the tables that a study printed, with their titles, and the text around them. UserError without any."""
    blocks = [(section.title, block) for section in read_tables(path) for block in section.blocks]
    tables = [(block.caption or title, block) for title, block in blocks if isinstance(block, TableBlock)]
    if not tables:
        raise UserError(f"{path}: expected the tables of a study, there is none; run the study's command again")
    return tables, [block.text for _, block in blocks if isinstance(block, Paragraph)]


def read_rows(path: Path) -> list[dict[str, Cell]]:
    """Returns every run of a study, from its results.csv; none without that file."""
    if not path.is_file():
        return []
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            rows = list(csv.DictReader(lines, strict=True))
        return [{name: text if name in ("world", "arm") else _cell(text) for name, text in row.items()} for row in rows]
    except (ValueError, TypeError, csv.Error) as problem:  # TypeError: a row that is not as long as the head
        raise UserError(f"{path}: expected the table of a study's runs, but it cannot be read ({problem})") from problem


def _cell(text: str) -> Cell:
    for number in (int, float):
        with suppress(ValueError):
            return number(text)
    return text or None


# ------------------------------------------------------------------------------------------------ folders


def kind_in(folder: Path) -> str:
    """Returns "study" or "run", by what a folder holds. UserError when it is neither, saying what is there."""
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


def damage_of(folder: Path) -> str | None:
    """Returns what is damaged in a finished run's result or config; None for nothing, or nothing to tell by."""
    return describe_change(folder, only=(CONFIG, RESULT)) if has_checksums(folder) else None


def warn_unsealed(folders: Sequence[Path]) -> list[str]:
    """Returns a line that names the first of those folders that hold no digests to compare their files with, if any."""
    unsealed = [folder for folder in folders if not has_checksums(folder)]
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
    """Returns what a finished run warns of: its judge, validation pairs it is trained on, weights that are lost."""
    result = RunResult.read((folder / RESULT).read_text(encoding="utf-8"))
    return [f"WARNING: {folder.resolve().name}: {warning}" for warning in result.warnings]


def settings_in(path: Path) -> dict[str, Cell]:
    """Returns what tells runs apart, from a saved configuration; nothing without one."""
    cfg = config_in(path)
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
        # Beside beta those that the objective was given, as a study's grid gives them.
        **{short_key(key): OmegaConf.select(cfg, key) for key in given if key.startswith("objective.") and key != BETA},
    }
    return {name: value for name, value in settings.items() if value is not None}


def config_in(path: Path) -> DictConfig | None:
    """Returns a saved configuration; None where there is none. UserError for a file that holds none."""
    if not path.is_file():
        return None
    try:
        with wrap_yaml_errors(path):
            cfg = OmegaConf.load(path)
    except Exception as problem:  # YAML's errors, and those of a file that is no text
        words = " ".join(str(problem).split())[:120]
        raise UserError(f"{path}: expected the configuration of a run, but it cannot be read ({words})") from problem
    if not isinstance(cfg, DictConfig):
        raise UserError(f"{path}: expected the configuration of a run, but it holds none")
    saved = cast(dict[str, Json], OmegaConf.to_container(cfg))
    return OmegaConf.create(to_savable(saved))  # nothing of it is read from the environment


def setting_in(folder: Path) -> str | None:
    """Returns the setting that a run was composed with; None when its folder does not say."""
    cfg = config_in(folder / CONFIG)
    setting = None if cfg is None else OmegaConf.select(cfg, "composed.choices.setting")
    return None if setting is None else str(setting)


# ------------------------------------------------------------------------------------------------ frames


def _name_arm(world: str, arm: str) -> dict[str, object]:
    return {**({"world": world} if world else {}), "arm": arm}


def _frame(rows: Sequence[Mapping[str, object]], columns: Sequence[str] = ()) -> pandas.DataFrame:
    """Returns rows as a frame with the columns that any of them has; without rows with ``columns``."""
    return pandas.DataFrame([dict(row) for row in rows], columns=None if rows else list(columns))
