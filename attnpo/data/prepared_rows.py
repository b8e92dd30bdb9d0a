"""Prepared rows of a run's data in the store: made once, memory-mapped by every process and run that has the same.

Under ``<store>/examples/`` a set of rows is ``<kind>-<digest of what made it>.arrow`` beside a record of the same name
(``.json``): what made it, the digest of the file, and the account of how the rows came about. The record is written
last, so that rows without one are no rows. One process makes them and the others wait for its lock, which the system
gives back when that process ends, in whichever way.
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

from attnpo.models.kept_digests import cached_digest
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
"""Account of rows, as JSON gives it back."""


@dataclass(frozen=True)
class PreparedRows:
    """Rows of a set, memory-mapped, with the account of how they came about; ``anew``: this process made them."""

    table: pa.Table
    account: Account
    anew: bool


def prepared_rows(
    store: Path, kind: str, facts: Mapping[str, object], about: int, make: Callable[[Write], dict[str, object]]
) -> PreparedRows:
    """Returns the rows of ``kind`` that ``facts`` name: those in the store, or what ``make`` gives to its ``Write``.

    Args:
        store: the store's folder.
        kind: the kind of rows, in a word.
        facts: everything that decides what the rows are, for JSON.
        about: their size in bytes, for whoever waits for them.
        make: writes the rows' batches, one at least, and returns their account, for JSON.

    Raises:
        UserError: nothing can be written there. Those of ``make`` leave nothing behind.
    """
    folder = store / FOLDER
    file = folder / f"{kind}-{digest(facts)[:20]}.arrow"
    found = _read(file, facts)
    if found is not None:
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(file):
            found = _read(file, facts, say=True)
            if found is None:
                log.info("%s rows are prepared: about %s in %s", kind, format_bytes(about), folder)
                began = time.perf_counter()
                found = _made(file, facts, make)
                log.info("%s rows: prepared in %.1f s", kind, time.perf_counter() - began)
            return found
    except OSError as error:
        raise UserError(
            f"store: prepared rows cannot be written to {folder} ({error}); make room there, or name another folder "
            "with store=FOLDER"
        ) from error


@contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Holds a context that one process at a time is in; the others wait and say so."""
    lock = FileLock(file.with_name(f".{file.stem}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        log.info("%s: another process prepares these rows: waiting for them", file.stem)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _read(file: Path, facts: Mapping[str, object], *, say: bool = False) -> PreparedRows | None:
    """Opens the rows in ``file``; None where there are none, or (which ``say`` logs) not those written for it."""
    path = file.with_suffix(".json")
    if not file.is_file() and not path.is_file():
        return None
    record, problem = read_record(path), "has no record that can be read"
    if record is not None:
        problem = "is that of other data or settings"
        if record["of"] == _plain(facts):
            problem = "is not as it was written"
            with suppress(OSError, pa.ArrowException):
                if cached_digest(file) == record["sha256"]:
                    os.utime(path)  # what ``prune`` goes by
                    log.info("%s: prepared before", file.name)
                    return PreparedRows(_map(file), record["account"], anew=False)
    if say and path.is_file():  # without a record its maker was stopped
        log.warning("%s %s: its rows are prepared anew", file, problem)
    return None


def _plain(facts: Mapping[str, object]) -> dict[str, str]:
    """Describes what made rows: each part by its digest."""
    return {name: digest(value)[:20] for name, value in facts.items()}


def _map(file: Path) -> pa.Table:
    with pa.memory_map(str(file)) as source:
        return pa.ipc.open_stream(source).read_all()


def _made(file: Path, facts: Mapping[str, object], make: Callable[[Write], dict[str, object]]) -> PreparedRows:
    for left in file.parent.glob(f"{WRITING}{file.stem}-*"):  # of a process that was killed
        left.unlink(missing_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f"{WRITING}{file.stem}-")
    temporary = Path(name)
    often = gc.get_threshold()
    gc.set_threshold(100_000, 50, 1000)  # a row's many small objects hold no cycles: a quarter of the time
    try:
        with os.fdopen(handle, "wb") as sink:
            writer = _Writer(sink)
            account = make(writer)
            writer.close()
        apply_umask(temporary)
        fsync_path(temporary)
        record = {"of": _plain(facts), "sha256": file_digest(temporary), "account": account}
        file.with_suffix(".json").unlink(missing_ok=True)
        os.replace(temporary, file)
        write_record(file.with_suffix(".json"), record)
    finally:
        gc.set_threshold(*often)
        temporary.unlink(missing_ok=True)
    stored = read_record(file.with_suffix(".json"))
    assert stored is not None
    return PreparedRows(_map(file), stored["account"], anew=True)


def prune(store: Path, days: float) -> None:
    """Removes prepared rows that no run has opened for so many days; a run that has them open keeps them."""
    removed, size, folder = 0, 0, store / FOLDER
    for file in sorted(folder.glob("*.arrow")):
        record = file.with_suffix(".json")
        if time.time() - (record if record.is_file() else file).stat().st_mtime >= 86400 * days:
            removed, size = removed + 1, size + file.stat().st_size
            record.unlink(missing_ok=True)
            file.unlink(missing_ok=True)
    log.info("%s: %d sets of prepared rows removed, %s", folder, removed, format_bytes(size))


class _Writer:
    """Writes record batches to a file as an Arrow stream, whose schema is that of the first."""

    def __init__(self, sink: IO[bytes]) -> None:
        self._sink = sink
        self._stream: pa.RecordBatchStreamWriter | None = None

    def __call__(self, batch: pa.RecordBatch) -> None:
        if self._stream is None:
            self._stream = pa.ipc.new_stream(self._sink, batch.schema)
        self._stream.write_batch(batch)

    def close(self) -> None:
        """Ends the stream."""
        assert self._stream is not None
        self._stream.close()


# ------------------------------------------------------------------------------------------------ log lines


class _Recorder(logging.Handler):
    """Keeps lines from INFO on ``into`` a list; hands those from the level ``shown`` on to the logger ``above``."""

    def __init__(self, into: list[tuple[str, int, str]], above: logging.Logger | None, shown: int) -> None:
        super().__init__()
        self._into, self._above, self.shown = into, above, shown

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps a line with its logger and level."""
        if record.levelno >= logging.INFO and record.name != LIVE:  # how long it took is no part of it
            self._into.append((record.name, record.levelno, record.getMessage()))
        if self._above is not None and record.levelno >= self.shown:
            self._above.handle(record)


@contextmanager
def record_lines() -> Iterator[list[tuple[str, int, str]]]:
    """Keeps this package's log lines of its context in the list that it gives, for ``repeat_lines``.

    Lines that are not shown here, as those of a job's further processes are not, are kept as well.
    """
    package, root = logging.getLogger("attnpo"), logging.getLogger()
    lines: list[tuple[str, int, str]] = []
    level, above = package.level, package.propagate
    handler = _Recorder(lines, root if above else None, package.getEffectiveLevel())
    package.addHandler(handler)
    package.propagate = False
    package.setLevel(min(logging.INFO, handler.shown))
    try:
        yield lines
    finally:
        package.setLevel(level)
        package.propagate = above
        package.removeHandler(handler)


def repeat_lines(lines: Iterable[tuple[str, int, str]]) -> None:
    """Logs what was said when rows were made, which is as true of them now."""
    for name, level, text in lines:
        logging.getLogger(name).log(level, "%s", text)
