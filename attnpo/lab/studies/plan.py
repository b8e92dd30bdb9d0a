"""Plans a study before it runs: checks it, composes its arms, and estimates its size and run time."""

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from attnpo.cli.progress import ProgressRow, format_duration, phase, read_progress, show_progress
from attnpo.lab.studies.arms import ComposedConfig, Composer, check_distinct_arms, check_user_overrides, make_composer
from attnpo.lab.studies.benchmark_settings import EvaluationConfigs, check_benchmarks, prepared_grammar
from attnpo.lab.studies.config import FitConfig, require_one_process
from attnpo.lab.studies.scorers import compose_scorers
from attnpo.lab.studies.study import Arm, Study, name_in_world
from attnpo.lab.studies.workers import WorkerSettings
from attnpo.run.folders import store_root
from attnpo.run.identity import flatten_with_classes, make_identity
from attnpo.run.resolve import missing_path_keys
from attnpo.schema import UserError
from attnpo.system.files import read_record, write_record

TIMINGS = "timings.json"  # in the store: seconds per base and per point, by machine, setting and study
UNKNOWN = "time left unknown until the first point has finished"


class TimeEstimate:
    """Estimates a study's run time from its finished points or, if there are none yet, from earlier timings.

    Mean timings of earlier runs are stored in the file ``path``, by machine and ``key``. A point's time is the wall
    time since the previous point finished, so parallel points are not counted twice.
    """

    def __init__(self, path: Path, key: str, points: int, seeds: int = 1) -> None:
        self.points, self.over, self.seeds = points, 0, seeds
        self._prepared, self._preparing, self._ran, self._running = 0, 0.0, 0, 0.0
        self._path, self._key = path, f"{platform.node()}/{key}"
        self._stored = (read_record(self._path) or {}).get(self._key)

    def forecast(self) -> str:
        """Describes the expected total time, before anything has run."""
        if self._stored is None:
            return UNKNOWN
        seconds = self._stored["point"] * self.points + self._stored["base"] * self.seeds
        one = f" ({format_duration(seconds / self.seeds)} with seeds=1)" if self.seeds > 1 else ""
        return (
            f"about {format_duration(seconds)}{one}, based on earlier runs on this machine; "
            "less if points are already finished"
        )

    def add_preparation_time(self, seconds: float) -> None:
        """Records how long it took to prepare one seed: base, pairs and judge pass."""
        self._prepared, self._preparing = self._prepared + 1, self._preparing + seconds

    def add_point_time(self, seconds: float) -> None:
        """Records a point that finished ``seconds`` after the previous one, and stores the mean times."""
        self.over, self._ran, self._running = self.over + 1, self._ran + 1, self._running + seconds
        base = self._preparing / max(1, self._prepared)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_record(
            self._path,
            {**(read_record(self._path) or {}), self._key: {"base": base, "point": self._running / self._ran}},
        )

    @property
    def seconds_left(self) -> float | None:
        """Returns the estimated seconds left; None if no timings are known yet."""
        if not self._ran and self._stored is None:
            return None
        stored = 0.0 if self._stored is None else self._stored["point"]
        point = self._running / self._ran if self._ran else stored
        base = self._preparing / self._prepared if self._prepared else 0.0
        return float(point * max(0, self.points - self.over) + base * max(0, self.seeds - self._prepared))

    def time_left(self) -> str:
        """Describes the estimated time left, for a log line."""
        seconds = self.seconds_left
        return UNKNOWN if seconds is None else f"about {format_duration(seconds)} left"


@contextmanager
def show_points_progress(
    labels: Sequence[str], folders: Sequence[Path], pace: TimeEstimate
) -> Iterator[Callable[[int], None]]:
    """Shows the progress of running points; yields a function that marks a point, by index, as finished."""
    over: set[int] = set()
    last = time.monotonic()

    def count_finished(index: int) -> None:
        nonlocal last
        over.add(index)
        now = time.monotonic()
        pace.add_point_time(now - last)
        last = now

    def progress_rows() -> list[ProgressRow]:
        found = []
        for place, (label, folder) in enumerate(zip(labels, folders, strict=True)):
            row = None if place in over else read_progress(folder)
            if row is not None:
                found.append(ProgressRow(label, row.step, row.total, row.loss, row.left))
        return [*found, ProgressRow("all points", pace.over, pace.points, None, pace.seconds_left)]

    at_work = f"points {labels[0]} ..." if labels else "points"
    with show_progress(progress_rows), phase(at_work):
        yield count_finished


@dataclass(frozen=True)
class StudyPlan:
    """Study that has been checked and is ready to run; ``composed`` and ``scorers`` are keyed by world and name.

    ``analyses``: settings of the analyses, by key. ``store``: cache folder shared by all runs. ``timed``: key for the
    study's timings, built from setting, study and training length.
    """

    composer: Composer
    seeds: list[int]
    composed: dict[tuple[str, str], ComposedConfig]
    scorers: dict[tuple[str, str], ComposedConfig]
    analyses: dict[str, object]
    evaluations: EvaluationConfigs
    workers: WorkerSettings
    store: Path
    timed: str

    @property
    def study(self) -> Study:
        """Returns the study."""
        return self.composer.study

    def describe_size(self) -> str:
        """Describes the numbers of arms, points and seeds; layers that coincide on a shallow model count separately."""
        arms = sum(self._arm_count(name) for _, name in self.composed)
        about = "up to " if self.study.layers else ""
        seeds = f"{len(self.seeds)} seed{'s' * (len(self.seeds) > 1)}"
        return (
            f"{about}{arms} arms, {self.point_count // len(self.seeds)} points per seed, {seeds}: "
            f"{self.point_count} points"
        )

    @property
    def point_count(self) -> int:
        """Returns the maximum number of points, over all seeds."""
        counts = (self._arm_count(name) * len(self.study.grid_of(name).point_overrides()) for _, name in self.composed)
        return len(self.seeds) * sum(counts)

    def _arm_count(self, arm: str) -> int:
        return len(self.study.layers) if self.study.is_split(arm) else 1

    def time_estimate(self) -> TimeEstimate:
        """Returns an estimate of the study's run time."""
        return TimeEstimate(self.store / TIMINGS, self.timed, self.point_count, len(self.seeds))


def plan_study(cfg: FitConfig) -> StudyPlan:
    """Checks ``cfg.study`` and returns its plan; loads no model and writes nothing.

    Raises:
        UserError: the command has several processes, an override conflicts with the study, or an arm's config is
            invalid.
    """
    study, config_dir = cfg.study, cfg.composed.config_dir
    require_one_process(study, cfg.composed.arguments())
    if study is None:
        raise UserError("there is no study to run (experiment=none)")
    composer = make_composer(cfg, study)
    check_user_overrides(composer, make_identity(cfg).result)
    if cfg.resume is not None:
        raise UserError(
            f"study {study.name}: resume={cfg.resume} only applies to single runs: remove it, since a study reuses its "
            "finished points anyway"
        )
    evaluations = EvaluationConfigs(
        study, config_dir, cfg.trainer.accelerator, prepared_grammar(cfg.values.get("prepare"))
    )
    check_benchmarks(evaluations, None if "model.path" in missing_path_keys(cfg.model, cfg.data) else cfg.model)
    composed = composer.compose_all_arms()
    for place, arm in composed.items():
        try:
            _ = arm.config
        except UserError as error:
            raise UserError(f"study {study.name}, arm {name_in_world(*place)}: {error}") from error
    whole = [place for place in composed if not study.layers or place[1] != study.layer_arm]
    named = [Arm(name, (), None, world, study.grid_of(name)) for world, name in whole]
    check_distinct_arms(study, named, composed)
    seeds = [cfg.seed + i for i in range(cfg.seed_count())]
    return StudyPlan(
        composer,
        seeds,
        composed,
        compose_scorers(composer),
        flatten_with_classes({"analyses": cfg.node("study").get("analyses")}),
        evaluations,
        WorkerSettings(study.workers, config_dir, cfg.store, cfg.lock_timeout),
        store_root(cfg.store),
        f"{cfg.composed.choices.get('setting', 'none')}/{study.name}/{cfg.trainer.max_epochs}/{cfg.trainer.max_steps}",
    )
