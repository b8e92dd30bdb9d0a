"""Prepared rows: a run that maps them computes and says what one that holds everything in memory does."""

import json
import logging
import multiprocessing
import os
import re
from pathlib import Path

import pytest

from attnpo.config.compose import load
from attnpo.data import prepared as prepared_inputs
from attnpo.data.prepared_rows import FOLDER
from attnpo.lab.studies.config import FitConfig
from attnpo.run.run import run
from tests.run.made import make_inputs
from tests.run.worlds import World, build_world

BARE = ("callbacks=none", "trainer.max_steps=2", "judge.low_label_mass=warn")
# Some responses are cut, which is counted.
CUT = ("lengths.max_length=26", "lengths.max_prompt_length=20", "lengths.overlong=cut")
SETUPS = {
    "attention": ("weights=attention", "reference=cached"),
    "fitted transform": ("weights=attention", "transform=position_profile", "reference=first_epoch"),
    "uniform": ("weights=uniform", "reference=cached", "batch.tokens=512", "batch.micro=null", *CUT),
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


def _prepare(overrides: list[str], into: Path) -> None:
    prepared_inputs.BYTES = prepared_inputs.PAIRS_HELD = 0
    lines: list[str] = []
    logging.getLogger("attnpo").setLevel(logging.INFO)
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("attnpo").addHandler(handler)
    config: FitConfig = load("fit", overrides)
    made = make_inputs(config)
    examples = [str(one) for split in ("train", "val") for one in made.examples[split].examples]
    (into / str(os.getpid())).write_text(json.dumps({"examples": examples, "lines": lines}))


def test_two_processes_share_what_one_of_them_prepares(tmp_path: Path) -> None:
    world = build_world(tmp_path)
    (tmp_path / "found").mkdir()
    arguments = (world.overrides("weights=uniform", "reference=live", *CUT), tmp_path / "found")
    spawned = [multiprocessing.get_context("spawn").Process(target=_prepare, args=arguments) for _ in range(2)]
    for process in spawned:
        process.start()
    for process in spawned:
        process.join(120)
    first, second = (json.loads(path.read_text()) for path in (tmp_path / "found").iterdir())
    assert first["examples"] == second["examples"] and first["examples"]
    made = [line for one in (first, second) for line in one["lines"] if "rows: preparing" in line]
    assert sorted(line.split()[0] for line in made) == ["encoded", "pairs", "weighed"]
    told = [{line for line in one["lines"] if line.startswith("data.path")} for one in (first, second)]
    assert told[0] == told[1] and len(told[0]) == 2


OTHERS = {
    "lengths": ("lengths.max_length=24", "lengths.max_prompt_length=20", "lengths.overlong=cut"),
    "alignment": ("align.method=characters",),
    "rows": ("data.train_rows=0:10",),
    "template": ("model.chat_template=model/plain_chat.jinja",),
    "layer": ("weights.layer=1",),
    "transform": ("transform=shuffled",),
}


def test_other_settings_are_never_served_the_same_rows(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = ("weights=attention", "judge.low_label_mass=warn")
    plain = {name: make_inputs(world.config(*setup, *other)) for name, other in OTHERS.items()}
    monkeypatch.setattr(prepared_inputs, "BYTES", 0)
    monkeypatch.setattr(prepared_inputs, "PAIRS_HELD", 0)
    make_inputs(world.config(*setup))
    for name, other in OTHERS.items():
        made = make_inputs(world.config(*setup, *other))
        for split in ("train", "val"):
            expected, found = plain[name].examples[split].examples, made.examples[split].examples
            assert [str(one) for one in found] == [str(one) for one in expected], name


def test_data_that_was_changed_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = build_world(tmp_path)
    monkeypatch.setattr(prepared_inputs, "BYTES", 0)
    monkeypatch.setattr(prepared_inputs, "PAIRS_HELD", 0)
    before = make_inputs(world.config("weights=uniform")).pairs["train"]
    file = world.data / "train.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0].replace("the ", "a "), *lines[1:]]) + "\n")
    after = make_inputs(world.config("weights=uniform")).pairs["train"]
    assert before.fingerprint != after.fingerprint
    assert list(before.pairs)[1:] == list(after.pairs)[1:] and before.pairs[0] != after.pairs[0]
