"""The table itself: every recorded row once, aligned, cut, in plain characters, whole under two workers."""

import subprocess
import sys
from pathlib import Path

from tests.bad_input.table import WIDTH, table_lines

CASE = """
import pytest

@pytest.mark.parametrize("number", range(4))
def test_one(record_property, number):
    record_property("bad input", (f"case {number}", "what it was told", "nothing"))

def test_that_fails(record_property):
    record_property("bad input", ("broken case", "a message it never got", "nothing"))
    assert False
"""


def test_rows_are_sorted_aligned_and_cut() -> None:
    rows = [("b", "word " * 100, "nothing"), ("a long case", "m", "1 of 2"), ("b", "word " * 100, "nothing")]
    head, first, second = table_lines(rows)
    assert head.startswith("bad input   | message it got ") and head.endswith("| lost")
    assert first.startswith("a long case | m ") and first.endswith("| 1 of 2")
    assert second.startswith("b           | word word") and second.endswith(" ... | nothing")
    assert len(second.split(" | ")[1].rstrip()) <= WIDTH
    assert len({line.rindex(" | ") for line in (head, first, second)}) == 1


def test_any_character_can_be_printed_anywhere() -> None:
    assert table_lines([("\u202e", "\ud800 é", "x")])[1].startswith("\\u202e    | \\ud800 \\xe9")


def test_the_table_is_whole_in_two_processes(tmp_path: Path) -> None:
    """Only what passed is in it: a test that failed has not shown that the message comes."""
    root = Path(__file__).resolve().parents[2]
    (tmp_path / "conftest.py").write_text("from tests.bad_input.table import pytest_terminal_summary  # noqa: F401\n")
    (tmp_path / "test_cases.py").write_text(CASE)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "-n", "2", str(tmp_path)],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "4 bad inputs" in done.stdout, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.endswith("| nothing")]
    assert [row.partition(" |")[0].strip() for row in rows] == [f"case {number}" for number in range(4)]
