"""Progress of long work: one live display on a terminal, plain lines in a file or a pipe.

Light: neither torch nor anything that loads it.
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
QUIET_FOR = 9.0  # seconds without a line after which a command says what it is at
WRITTEN_EVERY = 0.5  # seconds between two notes of a point
RARELY = 20_000  # new objects between two looks for garbage; Python's own number is 700
NOTE = ".progress.json"  # in the folder of a study's point, while it trains


@dataclass(frozen=True)
class ProgressRow:
    """One labelled row: the step it is at, of how many, the last loss, the seconds left as far as they are known."""

    label: str
    step: int
    total: int
    loss: float | None = None
    left: float | None = None


def is_interactive_terminal() -> bool:
    """Returns whether this process may draw: it reports, to a terminal that can move its cursor."""
    return is_main_process() and sys.stderr.isatty() and not Console(stderr=True).is_dumb_terminal


def format_duration(seconds: float) -> str:
    """Seconds for reading: 45 s, 12 min, 3.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def render_rows(rows: Sequence[ProgressRow], width: int) -> Table:
    """Returns the rows as they stand on a terminal of ``width`` columns: a label may be cut, no number is."""
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


_drawing: list[object] = []  # what stands at the foot of the terminal


@contextmanager
def show_progress(rows: Callable[[], Sequence[ProgressRow]]) -> Iterator[None]:
    """Opens a context in which ``rows`` are drawn at the foot of the terminal twice a second, below log lines.

    Draws on a terminal alone, and once where displays lie within each other.
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
        for handler, _ in streams:  # Live has put its own stream, which writes above the rows, in place of sys.stderr
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
    """Opens a context in which a terminal that rows are drawn on gets warnings alone: a file has the other lines."""
    levels = [(handler, handler.level) for handler in _handlers()] if _drawing else []
    for handler, _ in levels:
        handler.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for handler, level in levels:
            handler.setLevel(level)


class _LastLogTime(logging.Handler):
    """Notes when the last line was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.at = time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        """Notes the time."""
        self.at = time.monotonic()


_phases: list[tuple[str, float]] = []  # what is at work, the innermost last, and since when


@contextmanager
def phase(what: str) -> Iterator[None]:
    """Opens a context, or a function's decorator, that ``heartbeat`` tells of as ``what``."""
    this = (what, time.monotonic())
    _phases.append(this)
    try:
        yield
    finally:
        _phases.remove(this)


@contextmanager
def import_phase(what: str) -> Iterator[None]:
    """Opens a ``phase`` that imports packages, in which garbage is looked for rarely.

    What an import makes stays, and looking through hundreds of thousands of such objects takes a quarter of its time.
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
    """Opens a context that names the innermost ``phase`` (outside any, ``what``) whenever it has long been quiet.

    Quiet: for ``QUIET_FOR`` seconds no line was logged, and nothing is drawn. Only the process that leads a job tells.
    """
    if not is_main_process():
        yield
        return
    over, last = threading.Event(), _LastLogTime()

    def beat() -> None:
        while not over.wait(min(1.0, QUIET_FOR)):
            if time.monotonic() - last.at >= QUIET_FOR and not _drawing:
                now, began = _phases[-1]
                log.info("%s: at work for %s", now, format_duration(time.monotonic() - began))

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
    """Opens a ``phase`` told of at once: on a terminal until it is over, elsewhere by a line of the log."""
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
    """Lets ``publish_progress`` write into ``folder`` inside the context, for another process to display."""
    path = folder / NOTE
    _notes.append(path)
    try:
        yield
    finally:
        _notes.remove(path)
        path.unlink(missing_ok=True)


def is_progress_published() -> bool:
    """Returns whether another one shows the progress of this process."""
    return bool(_notes)


def publish_progress(row: ProgressRow) -> None:
    """Leaves the row in the folder of ``publish_progress_to``, whole or not at all."""
    for path in _notes:
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(row)), encoding="utf-8")
        part.replace(path)


def read_progress(folder: Path) -> ProgressRow | None:
    """Returns the row that was left in a folder last; None where there is none."""
    try:
        return ProgressRow(**json.loads((folder / NOTE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
