"""The table of bad inputs: what each one was answered with, and what it cost. Printed after the test run.

Rows are the values (case, message, lost) of the property "bad input" that a test reports through ``record_property``;
the fixture ``record`` of this folder does so, and tests elsewhere may. They travel with the reports, also under xdist,
whose controlling process loads only the conftest files near the root: the hook has to be imported there.
"""

from collections.abc import Iterable
from textwrap import shorten
from typing import Any

import pytest

PROPERTY = "bad input"
HEAD = (PROPERTY, "message it got", "lost")
WIDTH = 150  # characters of a message in the table

_PRINTED = pytest.StashKey[bool]()


def table_lines(rows: Iterable[tuple[str, str, str]]) -> list[str]:
    """The rows under their heads in aligned columns, sorted, each once; long messages are cut."""
    short = {(case, shorten(message, WIDTH, placeholder=" ..."), lost) for case, message, lost in rows}
    table = [tuple(cell.encode("ascii", "backslashreplace").decode() for cell in row) for row in (HEAD, *sorted(short))]
    widths = [max(len(row[column]) for row in table) for column in range(2)]
    return [f"{case:<{widths[0]}} | {message:<{widths[1]}} | {lost}".rstrip() for case, message, lost in table]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Prints the table of all tests that passed, once."""
    rows = [
        (str(value[0]), str(value[1]), str(value[2]))
        for report in terminalreporter.stats.get("passed", [])
        for name, value in report.user_properties
        if name == PROPERTY and report.when == "call"
    ]
    if not rows or config.stash.get(_PRINTED, False):
        return
    config.stash[_PRINTED] = True
    lines = table_lines(rows)
    terminalreporter.section(f"{len(lines) - 1} bad inputs")
    for line in lines:
        terminalreporter.write_line(line)
