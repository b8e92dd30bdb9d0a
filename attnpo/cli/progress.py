"""Shows the progress of long-running work: live on a terminal, or as plain lines in a file or pipe.

Does not import torch, directly or indirectly.
"""

import gc
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from attnpo.cli.terminal import make_printable
from attnpo.system.processes import is_main_process

log = logging.getLogger(__name__)
QUIET_FOR = 9.0  # seconds without a log line after which a command reports its phase; longer as the phase goes on
AT_MOST = 60.0  # seconds between two such reports
WRITTEN_EVERY = 0.5  # seconds between two progress updates of a sweep point
RARELY = 20_000  # new objects between two garbage collections; Python's default is 700
NOTE = ".progress.json"  # in the folder of a sweep point while it trains


@dataclass(frozen=True)
class ProgressRow:
    """Labelled progress row: current step, total steps, last loss, and estimated seconds left if known."""

    label: str
    step: int
    total: int
    loss: float | None = None
    left: float | None = None


def is_interactive_terminal() -> bool:
    """Returns whether this is the main process and stderr is a terminal that can move its cursor."""
    return is_main_process() and sys.stderr.isatty() and not Console(stderr=True).is_dumb_terminal


def format_duration(seconds: float) -> str:
    """Formats seconds for display: 45 s, 2 min 30 s, 12 min, 3.5 h."""
    if seconds < 600:
        return f"{round(seconds) // 60} min {round(seconds) % 60} s" if seconds >= 90 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def render_rows(rows: Sequence[ProgressRow], width: int) -> Table:
    """Renders the rows for a terminal of ``width`` columns; labels may be truncated, numbers never are."""
    table = Table(box=None, pad_edge=False, show_header=False)
    cells = [
        (
            "#" * (filled := round(8 * min(1.0, row.step / row.total if row.total else 0.0))) + "." * (8 - filled),
            f"{row.step}/{row.total}",
            "" if row.loss is None else f"loss {row.loss:.4f}",
            "" if row.left is None else f"{format_duration(row.left)} left",
        )
        for row in rows
    ]
    taken = sum(max(len(line[place]) for line in cells) + 2 for place in range(4)) if cells else 0
    room = max(8, width - taken)
    for row, line in zip(rows, cells, strict=True):
        label = make_printable(row.label)
        label = label if cell_len(label) <= room else f"{set_cell_size(label, room - 3)}..."
        table.add_row(Text(label), *map(Text, line))
    for column in table.columns:
        column.no_wrap = True
    return table


_drawing: list[object] = []  # what is currently drawn at the bottom of the terminal


@contextmanager
def show_progress(rows: Callable[[], Sequence[ProgressRow]]) -> Iterator[None]:
    """Draws ``rows`` at the bottom of the terminal, below log lines, twice a second while the context is open.

    Does nothing without a terminal or inside another display.
    """
    if _drawing or not is_interactive_terminal():
        yield
        return
    streams = [(handler, handler.stream) for handler in _handlers()]
    console = Console(stderr=True)
    with Live(
        get_renderable=lambda: render_rows(rows(), console.width), console=console, refresh_per_second=2, transient=True
    ) as live:
        _drawing.append(live)
        for handler, _ in streams:  # Live replaced sys.stderr by a stream that writes above the rows
            handler.setStream(sys.stderr)
        try:
            yield
        finally:
            _drawing.remove(live)
            for handler, stream in streams:
                handler.setStream(stream)


def _handlers() -> list["logging.StreamHandler[TextIO]"]:
    return [one for one in logging.getLogger().handlers if type(one) is logging.StreamHandler]


@contextmanager
def hide_info_on_terminal() -> Iterator[None]:
    """Limits the terminal to warnings inside the context if progress rows are shown there; log files get all lines."""
    levels = [(handler, handler.level) for handler in _handlers()] if _drawing else []
    for handler, _ in levels:
        handler.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for handler, level in levels:
            handler.setLevel(level)


class _LastLogTime(logging.Handler):
    """Log handler that records the time of the last log line."""

    def __init__(self) -> None:
        super().__init__()
        self.at = time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        """Records the time."""
        self.at = time.monotonic()


_phases: list[tuple[str, float]] = []  # open phases, the innermost last, with their start times


@contextmanager
def phase(what: str) -> Iterator[None]:
    """Marks a phase that ``heartbeat`` reports as ``what``; usable as a context manager or a decorator."""
    this = (what, time.monotonic())
    _phases.append(this)
    try:
        yield
    finally:
        _phases.remove(this)


@contextmanager
def import_phase(what: str) -> Iterator[None]:
    """Opens a ``phase`` for importing packages, during which garbage collection runs rarely.

    Imported objects stay alive, and scanning hundreds of thousands of them would take a quarter of the import time.
    """
    usual = gc.get_threshold()
    gc.set_threshold(RARELY, *usual[1:])
    try:
        with phase(what):
            yield
    finally:
        gc.set_threshold(*usual)


@contextmanager
def heartbeat(what: str) -> Iterator[None]:
    """Logs the current ``phase`` (``what`` if there is none) if no line was logged for a while.

    Stays silent while progress is shown on the terminal, and in all processes but the main one.
    """
    if not is_main_process():
        yield
        return
    over, last = threading.Event(), _LastLogTime()

    def beat() -> None:
        while not over.wait(min(1.0, QUIET_FOR)):
            (now, began), time_now = _phases[-1], time.monotonic()
            if time_now - last.at >= max(QUIET_FOR, min((time_now - began) / 2, AT_MOST)) and not _drawing:
                log.info("%s: running for %s", now, format_duration(time_now - began))

    root = logging.getLogger("attnpo")
    root.addHandler(last)
    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    with phase(what):
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            root.removeHandler(last)


@contextmanager
def show_waiting(what: str) -> Iterator[None]:
    """Opens a ``phase`` and announces it at once; a terminal shows it until it ends, other outputs get a log line."""
    if not is_interactive_terminal():
        log.info(what)
        with phase(what):
            yield
        return
    sys.stderr.write(f"{what} ...")
    sys.stderr.flush()
    _drawing.append(what)
    try:
        yield
    finally:
        _drawing.remove(what)
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


# ------------------------------------------------------------------------------------------------ points of a study


_notes: list[Path] = []


@contextmanager
def publish_progress_to(folder: Path) -> Iterator[None]:
    """Makes ``publish_progress`` write to ``folder`` inside the context, so another process can display it."""
    path = folder / NOTE
    _notes.append(path)
    try:
        yield
    finally:
        _notes.remove(path)
        path.unlink(missing_ok=True)


def is_progress_published() -> bool:
    """Returns whether another process displays this process's progress."""
    return bool(_notes)


def publish_progress(row: ProgressRow) -> None:
    """Writes the row atomically to the folder given to ``publish_progress_to``."""
    for path in _notes:
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(row)), encoding="utf-8")
        part.replace(path)


def read_progress(folder: Path) -> ProgressRow | None:
    """Reads the latest progress row from a folder; None if there is none."""
    try:
        return ProgressRow(**json.loads((folder / NOTE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
