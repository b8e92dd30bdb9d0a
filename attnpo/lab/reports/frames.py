"""Finished runs and studies for notebooks and scripts, as pandas frames: ``load_run`` and ``load_study``.

What the files hold is read by ``reports.finished``, as for reports. A frame is made when it is first asked for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, cast

from attnpo.config.compose import plain
from attnpo.display.output import read_tables
from attnpo.display.page import TableBlock
from attnpo.display.tables import ordered_cells
from attnpo.lab.reports.finished import (
    RESULT,
    FinishedPoint,
    StudyFolder,
    config_in,
    finished_points,
    kind_in,
    point_folders,
    read_result,
    read_study,
    unchecked,
)
from attnpo.lab.studies.frontier import at_kl
from attnpo.lab.studies.predictions import HEADS, TITLE
from attnpo.lab.studies.selection import PointResults, best_point, gather, has_truth
from attnpo.run.folders import CONFIG, FIXED, TABLES
from attnpo.run.result import RunResult
from attnpo.schema import UserError
from attnpo.system.files import Json, parse_json, read_record
from attnpo.training.metrics_file import METRICS, read_metrics

if TYPE_CHECKING:
    import pandas

COUNTERS = ("step", "epoch")


# ------------------------------------------------------------------------------------------------ runs


@dataclass(frozen=True)
class Run:
    """A finished run.

    ``result``: what it says of itself (seed, steps, seconds, last metrics, inputs, versions, truth, drift). ``config``:
    its configuration as plain values. ``notes``: what must be said of its files, such as that nothing can check them.
    """

    path: Path
    result: RunResult
    config: Mapping[str, Json]
    notes: tuple[str, ...] = ()

    @cached_property
    def metrics(self) -> "pandas.DataFrame":
        """Returns a row per optimiser step that logged anything; what was not logged at a step is NaN there."""
        frame = _frame(read_metrics(self.path / METRICS))
        return frame.astype({name: "Int64" for name in COUNTERS if name in frame.columns})

    @cached_property
    def curves(self) -> "pandas.DataFrame":
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
    def samples(self) -> "pandas.DataFrame":
        """Answers to validation prompts: prompt, policy, reference; no row for a run that wrote none."""
        return _frame(sample_rows(self.path), ["prompt", "policy", "reference"])

    @cached_property
    def scores(self) -> "pandas.DataFrame":
        """True scores, a row per split. UserError in settings without a known truth."""
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
    values = {} if cfg is None else plain(cfg)
    return Run(path, result, values, tuple(unchecked([path])))


def sample_rows(folder: Path) -> list[dict[str, object]]:
    """Returns the sample answers in a run's folder, prompts as text; none without them."""
    from attnpo.run.report import read_samples

    return [{**row} for row in read_samples(folder)]


# ------------------------------------------------------------------------------------------------ studies


@dataclass(frozen=True)
class StudyResults:
    """A study as its folder tells it; ``folder.notes`` say what is left out, not finished or unchecked."""

    folder: StudyFolder

    @property
    def path(self) -> Path:
        """Its folder."""
        return self.folder.path

    @property
    def finished(self) -> bool:
        """Returns whether it printed its tables; else there are the points that have a result, and nothing on arms."""
        return self.folder.finished

    @property
    def notes(self) -> tuple[str, ...]:
        """Returns what stood under its tables, and what must be said of its files."""
        return self.folder.notes

    @cached_property
    def tables(self) -> "dict[str, pandas.DataFrame]":
        """Returns every table it printed, by its title, with the numbers in full."""
        if not self.finished:
            return {table.title: _frame(table.rows, table.columns) for table in self.folder.tables}
        found: dict[str, pandas.DataFrame] = {}
        for section in read_tables(self.path / TABLES):
            for block in section.blocks:
                if isinstance(block, TableBlock):
                    title = block.caption or section.title
                    again = sum(name == title or name.startswith(f"{title} (") for name in found)
                    rows = [
                        dict(zip(block.columns, row, strict=True)) for row in ordered_cells(block.columns, block.rows)
                    ]
                    found[f"{title} ({again + 1})" if again else title] = _frame(rows, block.columns)
        return found

    @cached_property
    def arms(self) -> "pandas.DataFrame":
        """Returns the table of its arms, each at its chosen point. UserError for a study that is not finished."""
        self._require_finished("arms")
        return next(iter(self.tables.values()))

    @cached_property
    def points(self) -> "pandas.DataFrame":
        """Returns a row per run, with the grid's values and all its numbers; of a study that is not finished, those so
        far.
        """
        rows = self.folder.runs if self.finished else self.folder.tables[0].rows
        return _frame(rows, _names(rows))

    @cached_property
    def predictions(self) -> "pandas.DataFrame":
        """Returns what was expected before the points ran, and once the study is finished what came of it;
        else no row.
        """
        if self.finished and TITLE in self.tables:
            return self.tables[TITLE]
        record = read_record(self.path / FIXED) if (self.path / FIXED).is_file() else None
        claims = (record or {}).get("claims", {}).values()
        return _frame([{"about": claim["about"], "prediction": claim["says"]} for claim in claims], HEADS)

    @cached_property
    def samples(self) -> "pandas.DataFrame":
        """Returns the sample answers of all points, with arm, seed and grid values; of unfinished studies, the run's
        folder.
        """
        rows = [{**named, **row} for named, folder in self._places() for row in sample_rows(folder)]
        return _frame(rows, _names(rows) or ["prompt", "policy", "reference"])

    def runs(self, arm: str | None = None, seed: int | None = None) -> list[Run]:
        """Its runs, of one arm or seed where these are given."""
        if not self.finished:
            return [_run(place, read_result(place)) for place, damage in point_folders(self.path).items() if not damage]
        return [
            _run(one.folder, one.result)
            for one in self._points
            if arm in (None, one.point.arm.name) and seed in (None, one.point.seed)
        ]

    @cached_property
    def frontier(self) -> "pandas.DataFrame":
        """Reward against KL on test prompts, a row per arm and grid point, means over seeds.

        ``low`` and ``high``: the reward's 95 % interval over seeds and prompts. ``chosen``: the point that stands for
        its arm, chosen on validation prompts. UserError for a study without a known truth, or not finished.
        """
        by_arm = self._by_arm()
        limit = float(parse_json((self.path / "study.json").read_text(encoding="utf-8"))["kl_limit"])
        rows: list[dict[str, object]] = []
        for (world, arm), points in by_arm.items():
            best = best_point(points, limit)
            rows += [
                {
                    **_named(world, arm),
                    "point": point.label,
                    "seeds": len(point.seeds),
                    "kl": point.truth("test", "kl"),
                    "reward": point.interval.mean,
                    "low": point.interval.low,
                    "high": point.interval.high,
                    "chosen": point is best,
                }
                for point in points
            ]
        return _frame(rows)

    def at_kl(self, level: float) -> "pandas.DataFrame":
        """Returns the reward of every arm at one KL to the base, in nats, read off its own path over the grid.

        ``mark`` is "" for a value at the level; "<" where the arm's path ends before it, "~" where it has no point near
        it. UserError as for ``frontier``.
        """
        if not level > 0:
            raise UserError(f"at_kl: expected a KL above 0 in nats, got {level}")
        rows: list[dict[str, object]] = []
        for (world, arm), points in self._by_arm().items():
            place = at_kl(points, level)
            if place is not None:
                numbers = {"reward": place.reward, "kl": place.kl, "mark": place.mark, "seeds": len(place.seeds)}
                rows.append({**_named(world, arm), **numbers})
        return _frame(rows, _names(rows) or ["arm", "reward", "kl", "mark", "seeds"])

    @cached_property
    def _points(self) -> list[FinishedPoint]:
        return finished_points(self.folder)

    def _places(self) -> list[tuple[dict[str, object], Path]]:
        """Returns what tells each run apart, and its folder."""
        if not self.finished:
            return [({"run": place.name}, place) for place, damage in point_folders(self.path).items() if not damage]
        return [
            (
                {
                    **_named(one.point.arm.world, one.point.arm.name),
                    "seed": one.point.seed,
                    **dict(value.split("=", 1) for value in one.point.values),
                },
                one.folder,
            )
            for one in self._points
        ]

    def _by_arm(self) -> dict[tuple[str, str], list[PointResults]]:
        self._require_finished("reward against KL")
        points = gather([(one.point, one.result) for one in self._points])
        if not points or not has_truth(points):
            why = "no point that its tables stand on is left" if not points else "its setting has no known truth"
            raise UserError(f"{self.path}: {why}, so there is no reward against KL; see study.points")
        found: dict[tuple[str, str], list[PointResults]] = {}
        for point in points:
            found.setdefault((point.arm.world, point.arm.name), []).append(point)
        return found

    def _require_finished(self, what: str) -> None:
        if not self.finished:
            raise UserError(f"{self.path}: there is no table yet, and so no {what}: {self.notes[0]}; see study.points")


def load_study(folder: str | Path) -> StudyResults:
    """Returns the study in ``folder``; one that is not finished, or of an older version, has the points that are.

    Raises:
        UserError: there is no study, or a single run; no point has a result; its files are damaged.
    """
    path = Path(folder).expanduser()
    if kind_in(path) == "run":
        raise UserError(f"{path}: expected the folder of a study, found that of a run; load_run reads it")
    return StudyResults(read_study(path))


# ------------------------------------------------------------------------------------------------ frames


def _named(world: str, arm: str) -> dict[str, object]:
    return {**({"world": world} if world else {}), "arm": arm}


def _names(rows: Sequence[Mapping[str, object]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _frame(rows: Sequence[Mapping[str, object]], columns: Sequence[str] | None = None) -> "pandas.DataFrame":
    frame: pandas.DataFrame = _pandas().DataFrame([dict(row) for row in rows], columns=columns)
    return frame


def _pandas() -> ModuleType:
    try:
        import pandas
    except ImportError as problem:
        raise UserError(
            f"frames need pandas, which comes with the package datasets, and it cannot be imported ({problem}); "
            "install it again: pip install pandas"
        ) from problem
    return cast(ModuleType, pandas)
