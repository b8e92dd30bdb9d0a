"""``attnpo.train`` and ``attnpo.run_study``: the command ``fit`` from Python."""

import ast
import json
import logging
from pathlib import Path

import pytest

import attnpo
from attnpo.config.compose import load
from attnpo.schema import UserError
from tests.lab.studied import STUDY
from tests.run.worlds import World, build_world

PAGE = (Path(__file__).parents[1] / "docs" / "python_api.md").read_text(encoding="utf-8")
ONE = ("experiment=none", "weights=uniform", "callbacks=none", "trainer.max_steps=1")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return build_world(tmp_path_factory.mktemp("world"))


def test_a_run_is_the_commands(world: World, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In a folder named by the clock, with the learning rate that was asked for, and without a word."""
    run = attnpo.train(world.overrides(*ONE, f"output={tmp_path}", "optimizer.lr=1.0e-3"))
    assert run.path.parent == tmp_path and run.result.steps == 1
    assert json.loads((run.path / "result.json").read_text(encoding="utf-8"))["steps"] == 1
    assert run.config["optimizer"]["lr"] == 1e-3  # type: ignore[index,call-overload]
    assert capfd.readouterr().out == ""


def test_log_lines_come_when_asked_for(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And logging is left as it was."""
    words = world.overrides(*ONE, f"output={tmp_path}")
    ours, root = logging.getLogger("attnpo"), logging.getLogger()
    monkeypatch.setattr(ours, "level", logging.ERROR)
    before = [*root.handlers]
    attnpo.train([*words, "name=one"])
    assert caplog.records == []
    attnpo.train([*words, "name=two"], progress=True)
    assert any(record.message.startswith("fit ") for record in caplog.records)
    assert (ours.level, root.handlers) == (logging.ERROR, before)


def test_a_study_is_the_commands_and_goes_on(world: World, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own" / "experiment").mkdir(parents=True)
    (tmp_path / "own" / "experiment" / "tiny.yaml").write_text(STUDY)
    words = world.overrides("experiment=tiny", "~study.arms.broken", "study.layers=[2]", f"output={tmp_path}")
    study = attnpo.run_study([*words, "study.grid.beta=[0.2]"], config_dir=tmp_path / "own")
    assert study.is_finished and list(study.points["arm"]) == ["uniform", "attention L2"]
    stamps = [path.stat().st_mtime_ns for path in study.path.glob("points/*/result.json")]
    again = attnpo.run_study([*words, "study.grid.beta=[0.2]"], config_dir=str(tmp_path / "own"))
    assert again.path == study.path and len(stamps) == 2
    assert [path.stat().st_mtime_ns for path in study.path.glob("points/*/result.json")] == stamps
    assert capfd.readouterr().out == ""


def test_each_refuses_what_the_other_does(world: World) -> None:
    with pytest.raises(UserError, match="is for the study quickstart; pass experiment=none"):
        attnpo.train(["setting=testbed"])
    with pytest.raises(UserError, match="is for a single run; pass experiment=NAME"):
        attnpo.run_study(world.overrides("experiment=none"))


def test_the_pages_words_compose() -> None:
    calls = [
        node
        for block in PAGE.split("```python\n")[1:]
        if "attnpo.train(" in block
        for node in ast.walk(ast.parse(block.partition("```")[0]))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("attnpo.train", "attnpo.run_study")
    ]
    made = {ast.unparse(call.func): load("fit", ast.literal_eval(call.args[0])).study for call in calls}
    assert made["attnpo.train"] is None and made["attnpo.run_study"].name == "layer_sweep"
