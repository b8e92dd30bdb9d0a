"""How far a study is: a row per point at work and one for all of them, and how long the rest will take."""

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from attnpo.cli.progress import Row, display, duration, noted, phase
from attnpo.system.files import read_record, write_record

TIMINGS = "timings.json"  # in the store: seconds of a base and of a point, by machine, setting and study
UNKNOWN = "time unknown until the first point has ended"


class Pace:
    """The time that a study of ``points`` points and ``seeds`` seeds takes: as measured, before that as stored.

    It is stored in the file ``path``, by machine and ``key``. A point counts with the wall time between the ends of
    points, so that those that run beside each other count once.
    """

    def __init__(self, path: Path, key: str, points: int, seeds: int = 1) -> None:
        self.points, self.over, self.seeds = points, 0, seeds
        self._prepared, self._preparing, self._ran, self._running = 0, 0.0, 0, 0.0
        self._path, self._key = path, f"{platform.node()}/{key}"
        self._stored = (read_record(self._path) or {}).get(self._key)

    def expected(self) -> str:
        """Returns what can be said of the time before anything has run."""
        if self._stored is None:
            return UNKNOWN
        seconds = self._stored["point"] * self.points + self._stored["base"] * self.seeds
        return f"about {duration(seconds)} as this study took on this machine before, less what is finished already"

    def prepared(self, seconds: float) -> None:
        """Counts the base, pairs and judge pass of one seed."""
        self._prepared, self._preparing = self._prepared + 1, self._preparing + seconds

    def ended(self, seconds: float) -> None:
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

    def left(self) -> str:
        """Returns the time that is left, for a log line."""
        seconds = self.seconds_left
        return UNKNOWN if seconds is None else f"about {duration(seconds)} left"


@contextmanager
def watching(labels: Sequence[str], folders: Sequence[Path], pace: Pace) -> Iterator[Callable[[int], None]]:
    """Opens a context that shows the points at work; the function that it gives counts the one at a place as ended."""
    over: set[int] = set()
    last = time.monotonic()

    def ended(place: int) -> None:
        nonlocal last
        over.add(place)
        now = time.monotonic()
        pace.ended(now - last)
        last = now

    def rows() -> list[Row]:
        found = []
        for place, (label, folder) in enumerate(zip(labels, folders, strict=True)):
            row = None if place in over else noted(folder)
            if row is not None:
                found.append(Row(label, row.step, row.total, row.loss, row.left))
        return [*found, Row("all points", pace.over, pace.points, None, pace.seconds_left)]

    at_work = f"points {labels[0]} ..." if labels else "points"
    with display(rows), phase(at_work):
        yield ended
