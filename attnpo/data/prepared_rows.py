"""Stores prepared rows, which are written once and memory-mapped by all processes and runs with the same inputs.

Files in ``<store>/examples/``: ``<kind>-<digest of the inputs>.arrow`` with the rows, and a ``.json`` record of the
same name with the inputs, the digest of the rows and the row counts. The record is written last; rows without a record
are ignored. One process holds a lock and writes while others wait; the system releases the lock when that process
exits.
"""

import gc
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
from filelock import FileLock, Timeout

from attnpo.models.stored_digests import cached_digest
from attnpo.schema import UserError
from attnpo.system.files import (
    WRITING,
    apply_umask,
    digest,
    file_digest,
    format_bytes,
    fsync_path,
    read_record,
    write_record,
)

log = logging.getLogger(__name__)

FOLDER = "examples"
LIVE = "attnpo.cli.progress"
Write = Callable[[pa.RecordBatch], None]
Account = dict[str, Any]
"""Counts and statistics of rows, as parsed from JSON."""


@dataclass(frozen=True)
class PreparedRows:
    """Memory-mapped rows with counts and statistics; ``anew``: whether this process has just written the rows."""

    table: pa.Table
    account: Account
    anew: bool


def load_or_prepare(
    store: Path, kind: str, facts: Mapping[str, object], about: int, make: Callable[[Write], dict[str, object]]
) -> PreparedRows:
    """Loads rows of ``kind`` from the store, or prepares and stores them.

    Args:
        store: the store's folder.
        kind: kind of rows, one word.
        facts: all inputs that determine the rows, serializable to JSON.
        about: approximate size of the rows in bytes, for the log.
        make: writes the batches (at least one) and returns the counts, serializable to JSON.

    Raises:
        UserError: the store cannot be written. Errors from ``make`` leave no files behind.
    """
    folder = store / FOLDER
    file = folder / f"{kind}-{digest(facts)[:20]}.arrow"
    found = _open_rows(file, facts)
    if found is not None:
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _hold_lock(file):
            found = _open_rows(file, facts, say=True)
            if found is None:
                log.info("%s rows: preparing about %s in %s", kind, format_bytes(about), folder)
                began = time.perf_counter()
                found = _write_rows(file, facts, make)
                log.info("%s rows: prepared in %.1f s", kind, time.perf_counter() - began)
            return found
    except OSError as error:
        raise UserError(
            f"store: prepared rows cannot be written to {folder} ({error}); free some space, or choose another "
            "folder with store=FOLDER"
        ) from error


@contextmanager
def _hold_lock(file: Path) -> Iterator[None]:
    """Acquires a lock so that only one process prepares these rows; logs if this process has to wait for it."""
    lock = FileLock(file.with_name(f".{file.stem}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        log.info("%s: waiting for another process that is preparing these rows", file.stem)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _open_rows(file: Path, facts: Mapping[str, object], *, say: bool = False) -> PreparedRows | None:
    """Opens the rows in ``file``; if they are missing or invalid, returns None and, if ``say`` is set, logs why."""
    path = file.with_suffix(".json")
    if not file.is_file() and not path.is_file():
        return None
    record, problem = read_record(path), "has no readable record"
    if record is not None:
        problem = "belongs to other data or settings"
        if record["of"] == _digest_facts(facts):
            problem = "was changed after it was written"
            with suppress(OSError, pa.ArrowException):
                if cached_digest(file) == record["sha256"]:
                    os.utime(path)  # ``prune_rows`` uses this time
                    log.info("%s: already prepared", file.name)
                    return PreparedRows(_map_table(file), record["account"], anew=False)
    if say and path.is_file():  # without a record, its writer was interrupted
        log.warning("%s %s; preparing the rows again", file, problem)
    return None


def _digest_facts(facts: Mapping[str, object]) -> dict[str, str]:
    """Returns the digest of each value in ``facts``."""
    return {name: digest(value)[:20] for name, value in facts.items()}


def _map_table(file: Path) -> pa.Table:
    with pa.memory_map(str(file)) as source:
        return pa.ipc.open_stream(source).read_all()


def _write_rows(file: Path, facts: Mapping[str, object], make: Callable[[Write], dict[str, object]]) -> PreparedRows:
    for left in file.parent.glob(f"{WRITING}{file.stem}-*"):  # left by a process that was killed
        left.unlink(missing_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f"{WRITING}{file.stem}-")
    temporary = Path(name)
    often = gc.get_threshold()
    gc.set_threshold(100_000, 50, 1000)  # rows have many small objects without cycles: saves a quarter of the time
    try:
        with os.fdopen(handle, "wb") as sink:
            writer = _StreamWriter(sink)
            account = make(writer)
            writer.close()
        apply_umask(temporary)
        fsync_path(temporary)
        record = {"of": _digest_facts(facts), "sha256": file_digest(temporary), "account": account}
        file.with_suffix(".json").unlink(missing_ok=True)
        os.replace(temporary, file)
        write_record(file.with_suffix(".json"), record)
    finally:
        gc.set_threshold(*often)
        temporary.unlink(missing_ok=True)
    stored = read_record(file.with_suffix(".json"))
    assert stored is not None
    return PreparedRows(_map_table(file), stored["account"], anew=True)


def prune_rows(store: Path, days: float) -> None:
    """Removes prepared rows that no run has opened for ``days`` days; runs that have them open can still read them."""
    removed, size, folder = 0, 0, store / FOLDER
    for file in sorted(folder.glob("*.arrow")):
        record = file.with_suffix(".json")
        if time.time() - (record if record.is_file() else file).stat().st_mtime >= 86400 * days:
            removed, size = removed + 1, size + file.stat().st_size
            record.unlink(missing_ok=True)
            file.unlink(missing_ok=True)
    log.info("%s: removed %d sets of prepared rows (%s)", folder, removed, format_bytes(size))


class _StreamWriter:
    """Writes record batches to a file as an Arrow stream, with the schema of the first batch."""

    def __init__(self, sink: IO[bytes]) -> None:
        self._sink = sink
        self._stream: pa.RecordBatchStreamWriter | None = None

    def __call__(self, batch: pa.RecordBatch) -> None:
        if self._stream is None:
            self._stream = pa.ipc.new_stream(self._sink, batch.schema)
        self._stream.write_batch(batch)

    def close(self) -> None:
        """Closes the stream."""
        assert self._stream is not None
        self._stream.close()


# ------------------------------------------------------------------------------------------------ log lines


class _LineRecorder(logging.Handler):
    """Log handler that records lines of level INFO or above, and forwards lines of level ``shown`` or above."""

    def __init__(self, into: list[tuple[str, int, str]], above: logging.Logger | None, shown: int) -> None:
        super().__init__()
        self._into, self._above, self.shown = into, above, shown

    def emit(self, record: logging.LogRecord) -> None:
        """Records a log line with logger name and level."""
        if record.levelno >= logging.INFO and record.name != LIVE:  # progress lines are not recorded
            self._into.append((record.name, record.levelno, record.getMessage()))
        if self._above is not None and record.levelno >= self.shown:
            self._above.handle(record)


@contextmanager
def record_log_lines() -> Iterator[list[tuple[str, int, str]]]:
    """Records this package's log lines inside the context, for ``repeat_log_lines``; yields the list of lines.

    Also records lines that are not displayed, e.g. those of all processes of a job except the first.
    """
    package, root = logging.getLogger("attnpo"), logging.getLogger()
    lines: list[tuple[str, int, str]] = []
    level, above = package.level, package.propagate
    handler = _LineRecorder(lines, root if above else None, package.getEffectiveLevel())
    package.addHandler(handler)
    package.propagate = False
    package.setLevel(min(logging.INFO, handler.shown))
    try:
        yield lines
    finally:
        package.setLevel(level)
        package.propagate = above
        package.removeHandler(handler)


def repeat_log_lines(lines: Iterable[tuple[str, int, str]]) -> None:
    """Logs the lines recorded when the rows were prepared."""
    for name, level, text in lines:
        logging.getLogger(name).log(level, "%s", text)
