"""Study before and while it runs: refused where it cannot run, its arms composed, its size and time told."""

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from attnpo.cli.progress import ProgressRow, format_duration, phase, read_progress, show_progress
from attnpo.lab.studies.arms import Composed, Composer, check_distinct, check_user, composer_of
from attnpo.lab.studies.benchmark_settings import Evaluations, check_benchmarks, grammar_of
from attnpo.lab.studies.config import FitConfig, require_one_process
from attnpo.lab.studies.scorers import compose_scorers
from attnpo.lab.studies.study import Arm, Study, of_world
from attnpo.lab.studies.workers import Workers
from attnpo.run.folders import store_root
from attnpo.run.identity import by_class, identity_of
from attnpo.run.resolve import open_paths
from attnpo.schema import UserError
from attnpo.system.files import read_record, write_record

TIMINGS = "timings.json"  # in the store: seconds of a base and of a point, by machine, setting and study
UNKNOWN = "time unknown until the first point has ended"


class Pace:
    """Time that a study of ``points`` points and ``seeds`` seeds takes: as measured, before that as stored.

    It is stored in the file ``path``, by machine and ``key``. A point counts with the wall time between the ends of
    points, so that those that run beside each other count once.
    """

    def __init__(self, path: Path, key: str, points: int, seeds: int = 1) -> None:
        self.points, self.over, self.seeds = points, 0, seeds
        self._prepared, self._preparing, self._ran, self._running = 0, 0.0, 0, 0.0
        self._path, self._key = path, f"{platform.node()}/{key}"
        self._stored = (read_record(self._path) or {}).get(self._key)

    def forecast(self) -> str:
        """Returns what can be said of the time before anything has run."""
        if self._stored is None:
            return UNKNOWN
        seconds = self._stored["point"] * self.points + self._stored["base"] * self.seeds
        return (
            f"about {format_duration(seconds)} as this study took on this machine before, less what is finished already"
        )

    def count_base(self, seconds: float) -> None:
        """Counts the base, pairs and judge pass of one seed."""
        self._prepared, self._preparing = self._prepared + 1, self._preparing + seconds

    def count_point(self, seconds: float) -> None:
        """Counts a point that ended ``seconds`` after the one before it, and stores the pace."""
        self.over, self._ran, self._running = self.over + 1, self._ran + 1, self._running + seconds
        base = self._preparing / max(1, self._prepared)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_record(
            self._path,
            {**(read_record(self._path) or {}), self._key: {"base": base, "point": self._running / self._ran}},
        )

    @property
    def seconds_left(self) -> float | None:
        """Returns the seconds that are left, None while nothing tells of them."""
        if not self._ran and self._stored is None:
            return None
        stored = 0.0 if self._stored is None else self._stored["point"]
        point = self._running / self._ran if self._ran else stored
        base = self._preparing / self._prepared if self._prepared else 0.0
        return float(point * max(0, self.points - self.over) + base * max(0, self.seeds - self._prepared))

    def time_left(self) -> str:
        """Returns the time that is left, for a log line."""
        seconds = self.seconds_left
        return UNKNOWN if seconds is None else f"about {format_duration(seconds)} left"


@contextmanager
def watching(labels: Sequence[str], folders: Sequence[Path], pace: Pace) -> Iterator[Callable[[int], None]]:
    """Opens a context that shows the points at work; the function that it gives counts the one at a place as ended."""
    over: set[int] = set()
    last = time.monotonic()

    def count_end(place: int) -> None:
        nonlocal last
        over.add(place)
        now = time.monotonic()
        pace.count_point(now - last)
        last = now

    def rows() -> list[ProgressRow]:
        found = []
        for place, (label, folder) in enumerate(zip(labels, folders, strict=True)):
            row = None if place in over else read_progress(folder)
            if row is not None:
                found.append(ProgressRow(label, row.step, row.total, row.loss, row.left))
        return [*found, ProgressRow("all points", pace.over, pace.points, None, pace.seconds_left)]

    at_work = f"points {labels[0]} ..." if labels else "points"
    with show_progress(rows), phase(at_work):
        yield count_end


@dataclass(frozen=True)
class StudyPlan:
    """Study that was found possible: its seeds, the configs of its arms and of its scorers by world and name.

    ``analyses``: settings of its analyses, by key. ``store``: the folder of what all its runs share. ``timed``:
    what the time of its points is known by: setting, study, and how long one trains.
    """

    composer: Composer
    seeds: list[int]
    composed: dict[tuple[str, str], Composed]
    scorers: dict[tuple[str, str], Composed]
    analyses: dict[str, object]
    evaluations: Evaluations
    workers: Workers
    store: Path
    timed: str

    @property
    def study(self) -> Study:
        """Returns the study."""
        return self.composer.study

    def size(self) -> str:
        """Arms, points and seeds in words; arms of layers that coincide on a shallow model are one later."""
        arms = sum(self._layers(name) for _, name in self.composed)
        about = "up to " if self.study.layers else ""
        seeds = f"{len(self.seeds)} seed{'s' * (len(self.seeds) > 1)}"
        return f"{about}{arms} arms, {self.points // len(self.seeds)} points a seed, {seeds}: {self.points} points"

    @property
    def points(self) -> int:
        """Returns how many points there are, at most."""
        each = (self._layers(name) * len(self.study.grid_of(name).overrides()) for _, name in self.composed)
        return len(self.seeds) * sum(each)

    def _layers(self, arm: str) -> int:
        return len(self.study.layers) if self.study.is_split(arm) else 1

    def pace(self) -> Pace:
        """Returns the time that its points take."""
        return Pace(self.store / TIMINGS, self.timed, self.points, len(self.seeds))


def plan_study(cfg: FitConfig) -> StudyPlan:
    """Returns the plan of ``cfg.study``; loads no model and writes nothing.

    Raises:
        UserError: started under several processes, an override that spoils the study, or an arm that cannot be built.
    """
    study, config_dir = cfg.study, cfg.composed.config_dir
    require_one_process(study, cfg.composed.arguments())
    if study is None:
        raise UserError("there is no study to run (experiment=none)")
    composer = composer_of(cfg, study)
    check_user(composer, identity_of(cfg).result)
    if cfg.resume is not None:
        raise UserError(
            f"study {study.name}: resume={cfg.resume} is for single runs; finished points are reused anyway"
        )
    evaluations = Evaluations(study, config_dir, cfg.trainer.accelerator, grammar_of(cfg.values.get("prepare")))
    check_benchmarks(evaluations, None if "model.path" in open_paths(cfg.model, cfg.data) else cfg.model)
    composed = composer.every_arm()
    for place, arm in composed.items():
        try:
            _ = arm.config
        except UserError as error:
            raise UserError(f"study {study.name}, arm {of_world(*place)}: {error}") from error
    whole = [place for place in composed if not study.layers or place[1] != study.layer_arm]
    named = [Arm(name, (), None, world, study.grid_of(name)) for world, name in whole]
    check_distinct(study, named, composed)
    seeds = [cfg.seed + i for i in range(cfg.seed_count())]
    return StudyPlan(
        composer,
        seeds,
        composed,
        compose_scorers(composer),
        by_class({"analyses": cfg.node("study").get("analyses")}),
        evaluations,
        Workers(study.workers, config_dir, cfg.store, cfg.lock_timeout),
        store_root(cfg.store),
        f"{cfg.composed.choices.get('setting', 'none')}/{study.name}/{cfg.trainer.max_epochs}/{cfg.trainer.max_steps}",
    )
