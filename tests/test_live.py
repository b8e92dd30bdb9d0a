"""What is shown while something works: rows on a terminal, lines in a file, nothing of a library."""

import logging
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from attnpo.cli import progress as live
from attnpo.cli.progress import (
    ProgressRow,
    format_duration,
    heartbeat,
    is_progress_published,
    publish_progress,
    publish_progress_to,
    read_progress,
)

SHOWS = """
import logging, time
from attnpo.cli.progress import ProgressRow, show_progress
logging.basicConfig(level=logging.INFO, format="%(message)s")
with show_progress(lambda: [ProgressRow("attention seed=0", 3, 6, 0.6931, 12.0)]):
    time.sleep(0.7)
    logging.info("one line of the log")
    time.sleep(0.7)
logging.info("after")
"""


def test_a_long_phase_says_that_it_is_at_work(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "QUIET_FOR", 0.01)
    over = live.threading.Event()
    with caplog.at_level(logging.INFO, logger="attnpo"), heartbeat("judging"):
        for _ in range(200):
            if over.wait(0.01) or caplog.messages:
                break
    assert caplog.messages[0] == "judging: running for 0 s"


def test_a_phase_that_goes_on_says_so_less_and_less_often(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "QUIET_FOR", 0.01)
    with caplog.at_level(logging.INFO, logger="attnpo"), heartbeat("judging"):
        live.threading.Event().wait(1.0)
    assert 3 <= len(caplog.messages) <= 20  # a hundred if each pause were as short as the first


def test_a_point_leaves_a_note_while_it_trains(tmp_path: Path) -> None:
    row = ProgressRow("training", 3, 6, 0.5, 2.0)
    assert read_progress(tmp_path) is None and not is_progress_published()
    with publish_progress_to(tmp_path):
        publish_progress(row)
        assert is_progress_published() and read_progress(tmp_path) == row
    assert read_progress(tmp_path) is None and list(tmp_path.iterdir()) == []


def test_times_are_for_readers() -> None:
    assert [format_duration(seconds) for seconds in (4.2, 119.7, 150.0, 720.0, 9000.0)] == [
        "4 s",
        "2 min 0 s",
        "2 min 30 s",
        "12 min",
        "2.5 h",
    ]


def test_a_file_gets_lines_without_any_escape_code() -> None:
    done = subprocess.run([sys.executable, "-c", SHOWS], capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr.splitlines() == ["one line of the log", "after"]


def test_a_terminal_gets_rows_and_whole_lines_of_the_log_above_them() -> None:
    leading, other = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    process = subprocess.Popen([sys.executable, "-c", SHOWS], stderr=other, env=environment)
    os.close(other)
    text = b""
    while True:
        try:
            part = os.read(leading, 4096)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        text += part
    assert process.wait(60) == 0
    os.close(leading)
    shown = text.decode()
    assert "attention seed=0" in shown and "3/6" in shown and "loss 0.6931" in shown and "12 s left" in shown
    assert any(line.endswith("one line of the log") for line in shown.replace("\r", "").split("\n"))
    assert shown.rstrip("\r\n").endswith("after")
