"""A run where it is trained: on a GPU the numbers of a CPU, an export that a CPU reads, a run that goes on."""

from pathlib import Path

import pytest
import torch

from attnpo.models.loading import load_model
from attnpo.run.result import RunResult
from attnpo.run.run import run
from attnpo.training.checkpoint_folders import read_checkpoint_info
from attnpo.training.module import PreferenceModule
from tests.run.worlds import World

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
DEVICES = ["cpu", pytest.param("gpu", marks=GPU)]
RUN = ("experiment=none", "trainer.validate_every=1", "callbacks.samples=0", "callbacks.report=false")
LR = 1e-3


class Stop(Exception):
    """Ends a run in its middle."""


def trained(world: World, folder: Path, device: str) -> RunResult:
    return run(world.config(*RUN, f"optimizer.lr={LR}", f"trainer.accelerator={device}", "resume=auto"), folder)


def apart(world: World, folder: Path, other: Path) -> float:
    """How far two exports are apart, relative to how far the second moved from the model that both began with.

    Adam moves a weight by the learning rate whatever its gradient, so a few may go the other way by rounding.
    """
    base, one, two = (load_model(path).state_dict() for path in (world.model, folder / "last", other / "last"))
    moved = torch.cat([(two[name] - value).flatten() for name, value in base.items()])
    assert float(moved.abs().max()) > LR / 10
    return float(torch.cat([(one[name] - two[name]).flatten() for name in base]).norm() / moved.norm())


@pytest.mark.parametrize("device", DEVICES[1:])
def test_a_run_exports_what_a_cpu_trains(world: World, tmp_path: Path, device: str) -> None:
    result, expected = trained(world, tmp_path / "one", device), trained(world, tmp_path / "cpu", "cpu")
    for name in ("train/loss", "val/loss"):
        assert result.metrics[name] == pytest.approx(expected.metrics[name], abs=1e-4)
    assert apart(world, tmp_path / "one", tmp_path / "cpu") < 0.05


@pytest.mark.parametrize("device", DEVICES)
def test_a_run_that_was_stopped_goes_on(
    world: World, tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unbroken = trained(world, tmp_path / "unbroken", device)
    step = PreferenceModule.training_step

    def stopping(self: PreferenceModule, *arguments: object) -> object:
        if self.trainer.global_step == 2:
            raise Stop
        return step(self, *arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(PreferenceModule, "training_step", stopping)
        with pytest.raises(Stop):
            trained(world, tmp_path / "broken", device)
    assert read_checkpoint_info(tmp_path / "broken" / "last")["step"] == 2
    resumed = trained(world, tmp_path / "broken", device)
    assert resumed.steps == unbroken.steps == 3
    assert resumed.metrics["val/loss"] == pytest.approx(unbroken.metrics["val/loss"], abs=1e-5)
    assert apart(world, tmp_path / "broken", tmp_path / "unbroken") < 0.01
