"""Which checkpoint ``best/`` keeps: the direction follows from ``callbacks.monitor``, and cannot contradict it."""

import csv
from pathlib import Path

import pytest

from attnpo import fit
from attnpo.cli.entry import run_entry
from attnpo.run.identity import make_identity
from attnpo.schema import UserError
from attnpo.training.checkpoint_folders import read_checkpoint_info
from attnpo.training.settings import CallbackSettings
from tests.run.worlds import World

LOUD = (
    "callbacks=default",
    "callbacks.report=false",
    "callbacks.samples=0",
    "optimizer.lr=0.3",
    "trainer.max_epochs=2",
)


def validated(folder: Path, name: str) -> dict[int, float]:
    """The values of a metric after each optimiser step."""
    with (folder / "metrics.csv").open(encoding="utf-8") as lines:
        rows = [(int(row["step"]), row.get(name)) for row in csv.DictReader(lines)]
    return {step: float(value) for step, value in rows if value and step > 0}


@pytest.mark.parametrize(
    ("metric", "pick"), [("val/rewards/margins", max), ("val/logps/rejected", min)], ids=["highest", "lowest"]
)
def test_best_is_the_best_in_the_direction_of_its_metric(
    world: World, tmp_path: Path, metric: str, pick: type[max]
) -> None:
    argv = world.overrides(*LOUD, "experiment=none", "name=run", f"output={tmp_path}", "trainer.validate_every=1")
    assert run_entry(fit.main, "fit", [*argv, f"callbacks.monitor={metric}"], "", "") == 0
    values, kept = validated(tmp_path / "run", metric), read_checkpoint_info(tmp_path / "run" / "best")
    assert len(set(values.values())) == 6, values
    assert kept["step"] == pick(values, key=lambda step: values[step]), values
    assert kept[metric] == pytest.approx(pick(values.values()))


LESS = ("loss", "losses/sft", "rewards/kl", "rewards/rejected", "rewards/unweighted/rejected", "logps/rejected")
MORE = ("rewards/margins", "rewards/accuracies", "rewards/chosen", "rewards/unweighted/chosen", "logps/chosen")


@pytest.mark.parametrize(
    ("metric", "mode"), [*((f"val/{name}", "min") for name in LESS), *((f"val/{name}", "max") for name in MORE)]
)
def test_the_direction_follows_from_the_metric_and_a_contradiction_is_refused(metric: str, mode: str) -> None:
    assert CallbackSettings(monitor=metric).monitor_mode == mode
    assert CallbackSettings(monitor=metric, mode=mode).monitor_mode == mode
    other = {"min": "max", "max": "min"}[mode]
    with pytest.raises(
        UserError, match=rf"callbacks\.mode={other} would keep the worst.*{metric}.*callbacks\.mode=null"
    ):
        CallbackSettings(monitor=metric, mode=other)


@pytest.mark.parametrize("metric", ["val/weights/max", "val/los"])
def test_a_metric_without_a_direction_asks_for_one(metric: str) -> None:
    with pytest.raises(UserError, match=rf"callbacks\.monitor={metric}.*loss.*callbacks\.mode=min or max"):
        CallbackSettings(monitor=metric)
    assert CallbackSettings(monitor=metric, mode="max").monitor_mode == "max"


@pytest.mark.parametrize("metric", ["train/loss", "train/lr", "loss"])
@pytest.mark.parametrize("mode", [None, "min"])
def test_a_metric_that_is_not_of_validation_is_refused(metric: str, mode: str | None) -> None:
    with pytest.raises(UserError, match=rf"callbacks\.monitor={metric} is not a validation metric.*val/NAME.*margins"):
        CallbackSettings(monitor=metric, mode=mode)
    assert CallbackSettings(checkpoints=False, monitor=metric).monitor == metric


def test_a_mode_that_is_written_out_is_the_one_that_follows(world: World) -> None:
    name, more = "callbacks.mode", "callbacks.monitor=val/rewards/margins"
    assert make_identity(world.config("callbacks=default")).numbers[name] == "min"
    assert make_identity(world.config("callbacks=default", more)).numbers[name] == "max"
    assert make_identity(world.config("callbacks=default", more, f"{name}=max")).numbers[name] == "max"
