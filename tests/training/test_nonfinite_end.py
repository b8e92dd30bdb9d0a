"""A run ends well only with finite weights and a finite last validation; else it says so, and exports nothing."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from attnpo.cli.entry import run_entry
from attnpo.fit import main
from attnpo.training.checkpoint_folders import read_checkpoint_info
from attnpo.training.module import PreferenceModule
from tests.run.worlds import World, build_world

STEPS = 3
Overrides = tuple[str, ...]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return build_world(tmp_path_factory.mktemp("world"))


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, float]]:
    """By optimiser step, the value that the update of that step leaves in one trained weight."""
    found: dict[str, float] = {}
    original = PreferenceModule.optimizer_step

    def spoiled(self: PreferenceModule, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        value = found.get(str(self.trainer.global_step + 1))
        if value is not None:
            trained = [p for p in self.policy.parameters() if p.requires_grad]
            with torch.no_grad():
                trained[1].view(-1)[0] = value

    monkeypatch.setattr(PreferenceModule, "optimizer_step", spoiled)
    yield found


def run(world: World, output: Path, *more: str) -> int:
    quick = ("experiment=none", f"output={output}", "name=run", "callbacks.samples=0", "callbacks.report=false")
    return run_entry(main, "fit", world.overrides(*quick, *more), "", "")


def refused(status: int, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a run that was refused."""
    assert status == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]


def test_a_rate_that_throws_the_last_step_out_of_range(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = refused(run(world, tmp_path, "optimizer.lr=1e38", "trainer.max_steps=1"), capsys)
    assert "the weights are not finite after optimiser step 1: 20 of 20 trained parameters (first: model.embed" in text
    assert "no checkpoint was saved" in text and "optimizer.lr (now 1e+38)" in text
    assert {path.name for path in (tmp_path / "run").iterdir()}.isdisjoint({"result.json", "last", "best"})


@pytest.mark.parametrize(
    ("value", "more"),
    [
        (float("nan"), ()),
        (float("-inf"), ("callbacks=none",)),
        (float("-inf"), ("trainer.precision=bf16-mixed", "model=lora")),
    ],
    ids=["plain", "no checkpoints", "lora in bf16-mixed"],
)
def test_a_last_update_that_leaves_no_number(
    world: World,
    poison: dict[str, float],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    value: float,
    more: Overrides,
) -> None:
    poison[str(STEPS)] = value
    if "callbacks=none" not in more:
        more = (*more, "callbacks.save_every=1")
    text = refused(run(world, tmp_path, *more), capsys)
    assert f"the weights are not finite after optimiser step {STEPS}: 1 of " in text and "(first: " in text
    assert "optimizer.lr (now " in text
    folder = tmp_path / "run"
    assert not (folder / "result.json").exists() and not (folder / "best").exists()
    if "callbacks=none" in more:
        assert "no checkpoint was saved" in text and not (folder / "last").exists()
        return
    assert f"the last saved step is {STEPS - 1}, in {folder / 'last'}" in text
    assert read_checkpoint_info(folder / "last")["step"] == STEPS - 1
    state = torch.load(folder / "last" / "state.ckpt", weights_only=True)["state_dict"]
    assert all(bool(weight.isfinite().all()) for weight in state.values())


def test_no_checkpoint_of_such_weights_takes_the_place_of_a_sound_one(
    world: World, poison: dict[str, float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Within training too: a state saved then would be what the run is resumed from."""
    poison["2"] = float("nan")
    text = refused(run(world, tmp_path, "callbacks.save_every=1"), capsys)
    assert "the weights are not finite after optimiser step 2: " in text
    assert read_checkpoint_info(tmp_path / "run" / "last")["step"] == 1
    poison.clear()
    assert run(world, tmp_path, "callbacks.save_every=1", "resume=auto") == 0
    weights = load_file(tmp_path / "run" / "last" / "model.safetensors")
    assert all(bool(weight.isfinite().all()) for weight in weights.values())
    metrics = json.loads((tmp_path / "run" / "result.json").read_text())["metrics"]
    assert metrics["val/loss"] == pytest.approx(metrics["val/loss"]) and os.listdir(tmp_path / "run" / "best")


@pytest.mark.parametrize(
    ("stage", "told"),
    [
        ("fit", f"validation metrics after optimiser step {STEPS} are not finite (val/loss nan"),
        ("validate", "validation metrics before the first step are not finite (val/loss nan"),
    ],
)
def test_a_validation_that_is_no_number(
    world: World,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    told: str,
) -> None:
    """Before training it ends the run, whose end would be refused: better before the hours between."""
    score = PreferenceModule.score

    def spoiled(self: PreferenceModule, batch: Any) -> Any:
        batch, policy, reference, output = score(self, batch)
        if not self.training and self.trainer.state.fn == stage:
            output.losses[0] = float("nan")
        return batch, policy, reference, output

    monkeypatch.setattr(PreferenceModule, "score", spoiled)
    assert told in refused(run(world, tmp_path), capsys)
    assert {path.name for path in (tmp_path / "run").iterdir()}.isdisjoint({"result.json", "last", "best"})
