"""Prepared rows on the disk: what is damaged, foreign, cut short or made twice at once is noticed or finished."""

import json
import logging
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from attnpo.data.prepared_rows import (
    FOLDER,
    PreparedRows,
    load_or_prepare,
    prune_rows,
    record_log_lines,
    repeat_log_lines,
)
from attnpo.models import stored_digests
from attnpo.schema import UserError
from attnpo.system.files import WRITING

BATCH = pa.RecordBatch.from_pydict({"number": list(range(1000))})


@pytest.fixture(autouse=True)
def read_every_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_digests, "_places", [])


def open_or_make(store: Path, made: list[str] | None = None, of: int = 0) -> PreparedRows:
    def make(write: Callable[[pa.RecordBatch], None]) -> dict[str, object]:
        if made is not None:
            made.append("made")
        write(BATCH)
        return {"rows": BATCH.num_rows, "mean": float("nan")}

    return load_or_prepare(store, "numbers", {"of": of}, 8000, make)


def files(store: Path) -> tuple[Path, Path]:
    (rows,) = (store / FOLDER).glob("*.arrow")
    return rows, rows.with_suffix(".json")


def cut(rows: Path, record: Path, other: Path) -> None:
    rows.write_bytes(rows.read_bytes()[:-100])


def turn_a_bit(rows: Path, record: Path, other: Path) -> None:
    content = bytearray(rows.read_bytes())
    content[2000] ^= 1
    rows.write_bytes(content)


def empty(rows: Path, record: Path, other: Path) -> None:
    rows.write_bytes(b"")


def remove_rows(rows: Path, record: Path, other: Path) -> None:
    rows.unlink()


def exchange(rows: Path, record: Path, other: Path) -> None:
    rows_of_other, record_of_other = files(other)
    shutil.copy(rows_of_other, rows)
    shutil.copy(record_of_other, record)


def edit_account(rows: Path, record: Path, other: Path) -> None:
    record.write_text(record.read_text().replace('"rows": 1000', '"rows": 999'))


def cut_record(rows: Path, record: Path, other: Path) -> None:
    record.write_text(record.read_text()[:-9])


DAMAGES = (cut, turn_a_bit, empty, remove_rows, exchange, edit_account, cut_record)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_rows_that_are_not_as_written_are_named_and_made_anew(
    damage: Callable[[Path, Path, Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[str] = []
    store, other = tmp_path / "store", tmp_path / "other"
    open_or_make(store, made)
    open_or_make(other, of=1)
    damage(*files(store), other)
    with caplog.at_level(logging.WARNING, "attnpo"):
        found = open_or_make(store, made)
    assert found.anew and found.table.num_rows == 1000 and found.account["rows"] == 1000
    assert made == ["made", "made"] and "preparing the rows again" in caplog.text
    assert not open_or_make(store, made).anew and len(made) == 2


def test_rows_without_a_record_are_none(tmp_path: Path) -> None:
    """A process was stopped between the two."""
    open_or_make(tmp_path)
    files(tmp_path)[1].unlink()
    assert open_or_make(tmp_path).anew


def test_an_error_leaves_nothing_behind(tmp_path: Path) -> None:
    def make(write: Callable[[pa.RecordBatch], None]) -> dict[str, object]:
        write(BATCH)
        raise UserError("row 7 cannot be used")

    with pytest.raises(UserError, match="row 7"):
        load_or_prepare(tmp_path, "numbers", {"of": 0}, 0, make)
    assert not [path for path in (tmp_path / FOLDER).iterdir() if not path.name.endswith(".lock")]


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("a file")
    with pytest.raises(UserError, match=r"store: prepared rows cannot be written .* store=FOLDER"):
        open_or_make(tmp_path)


def _make_slowly(store: Path, seconds: float) -> None:
    def make(write: Callable[[pa.RecordBatch], None]) -> dict[str, object]:
        write(BATCH)
        (store / "began").touch()
        time.sleep(seconds)
        with (store / "makers").open("a") as log:
            log.write("made\n")
        return {}

    load_or_prepare(store, "numbers", {"of": 0}, 0, make)


def started(store: Path, seconds: float) -> multiprocessing.Process:
    process = multiprocessing.get_context("spawn").Process(target=_make_slowly, args=(store, seconds))
    process.start()
    return process


def wait_for(path: Path) -> None:
    for _ in range(600):
        if path.exists():
            return
        time.sleep(0.1)
    raise AssertionError(f"{path} did not appear")


def test_of_two_at_once_one_makes_the_rows(tmp_path: Path) -> None:
    both = [started(tmp_path, 1.0) for _ in range(2)]
    for process in both:
        process.join(60)
    assert [process.exitcode for process in both] == [0, 0]
    assert (tmp_path / "makers").read_text() == "made\n"


def test_who_follows_a_killed_process_does_not_wait_and_tidies_up(tmp_path: Path) -> None:
    process = started(tmp_path, 600.0)
    wait_for(tmp_path / "began")
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    assert list((tmp_path / FOLDER).glob(f"{WRITING}*"))
    assert open_or_make(tmp_path).anew
    assert not list((tmp_path / FOLDER).glob(f"{WRITING}*"))


def test_rows_that_nobody_opens_are_removed(tmp_path: Path) -> None:
    open_or_make(tmp_path)
    open_or_make(tmp_path, of=1)
    rows = sorted((tmp_path / FOLDER).glob("*.arrow"))
    os.utime(rows[0].with_suffix(".json"), (0, 0))
    prune_rows(tmp_path, 30)
    assert sorted((tmp_path / FOLDER).glob("*.arrow")) == rows[1:]
    prune_rows(tmp_path, 0)
    assert not list((tmp_path / FOLDER).glob("*.arrow")) and not list((tmp_path / FOLDER).glob("*.json"))


@pytest.mark.parametrize("shown", [logging.INFO, logging.ERROR], ids=["leading process", "another"])
def test_lines_are_kept_whoever_shows_them(
    shown: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = logging.getLogger("attnpo")
    monkeypatch.setattr(package, "level", shown)
    room = logging.getLogger("attnpo.data.base")
    with record_log_lines() as lines:
        room.info("%d rows", 3)
        room.debug("never kept")
    assert lines == [("attnpo.data.base", logging.INFO, "3 rows")]
    assert ("3 rows" in caplog.text) is (shown == logging.INFO)
    package.setLevel(logging.INFO)
    caplog.clear()
    repeat_log_lines(json.loads(json.dumps(lines)))
    assert [record.getMessage() for record in caplog.records] == ["3 rows"]
