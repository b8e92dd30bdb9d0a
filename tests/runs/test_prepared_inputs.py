"""Prepared rows: a run that maps them computes and says what one that holds everything in memory does."""

import logging
import re
from pathlib import Path

import pytest

from attnpo.runs import prepared_inputs
from attnpo.runs.prepared_rows import FOLDER
from attnpo.runs.run import run
from tests.runs.worlds import build_world

BARE = ("callbacks=none", "trainer.max_steps=2", "judge.low_label_mass=warn")
# Some responses are cut, which is counted.
CUT = ("lengths.max_length=26", "lengths.max_prompt_length=20", "lengths.overlong=cut")
SETUPS = {
    "uniform": ("weights=uniform", "reference=live", *CUT),
    "attention": ("weights=attention", "reference=cached"),
    "fitted transform": ("weights=attention", "transform=position_profile", "reference=first_epoch"),
    "column": ("weights=uniform", "reference=cached", "batch.tokens=512", "batch.micro=null"),
}


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What a run said of its inputs, without times and without what it says of the store."""
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("attnpo")]
    caplog.clear()
    kept = [line for line in lines if re.match(r"(train|val|data\.path|steps|row 0|judge )", line)]
    return [re.sub(r"\d+(\.\d+)? s\b", "S", line) for line in kept]


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_a_run_on_prepared_rows_is_the_run_in_memory(
    setup: tuple[str, ...],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = build_world(tmp_path)
    results, lines = [], []
    with caplog.at_level(logging.INFO, "attnpo"):
        for number in range(4):  # the store filled; in memory, prepared now, prepared before
            if number == 2:
                monkeypatch.setattr(prepared_inputs, "BYTES", 0)
                monkeypatch.setattr(prepared_inputs, "PAIRS_HELD", 0)
            results.append(run(world.config(*setup, *BARE), tmp_path / f"run{number}"))
            lines.append(told(caplog))
    _, held, now, before = results
    assert held is not None and now is not None and before is not None
    assert held.metrics == now.metrics == before.metrics
    assert lines[1] and lines[1] == lines[2] == lines[3]
    stored = {path.name.partition("-")[0] for path in (world.store / FOLDER).glob("*.arrow")}
    assert {"pairs", "encoded", "weighed"} <= stored
