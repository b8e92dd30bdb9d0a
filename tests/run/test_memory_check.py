"""What a run says of memory before a model is loaded: its own estimate, and the hardware that would hold it."""

import logging
from pathlib import Path

import pytest

from attnpo.models.loading import load_config
from attnpo.run import memory_check
from attnpo.run.context import make_context
from attnpo.run.memory_check import alternatives, log_memory, training_estimate
from tests.run.worlds import World, build_world

ALONE = ("hardware=1x141gb", "hardware=1x24gb", "hardware=1x80gb")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return build_world(tmp_path_factory.mktemp("world"))


def test_the_estimates_of_other_hardware_are_those_of_the_same_command_there(world: World) -> None:
    """Two GPUs are left out: there is one device here at most. An option that was given is not added to."""
    config = load_config(str(world.model))
    for given in ([], ["hardware=2x80gb"]):
        others = dict(alternatives(world.config("weights=uniform", *given), config))
        assert tuple(others) == ALONE
        for option in ALONE[:2]:
            assert others[option] == training_estimate(world.config("weights=uniform", option), config)
        # The third takes 8-bit moments, whose package need not be there for the estimate.
        assert others[ALONE[2]].total < others[ALONE[0]].total


def test_hardware_that_would_hold_the_run_is_named_where_this_does_not(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    context = make_context(world.config("weights=uniform"))
    config = load_config(str(world.model))
    totals = {option: estimate.total for option, estimate in alternatives(context.cfg, config)}
    room = sorted({*totals.values(), training_estimate(context.cfg, config).total})[1] * 1.1  # the two least fit
    monkeypatch.setattr(memory_check, "capacity_of", lambda cfg: int(room))
    caplog.set_level(logging.INFO)
    log_memory(context)
    fitting = [option for option, total in totals.items() if total * 1.06 < room]
    assert len(fitting) == 2
    assert any("does not fit" in line and f"these would: {', '.join(fitting)}" in line for line in caplog.messages)


def test_hardware_that_cannot_be_read_is_none(world: World, tmp_path: Path) -> None:
    (tmp_path / "hardware").mkdir()
    for name, key in {
        "unknown": "model: {nowhere: 1}",
        "absent": "optimizer: {_target_: attnpo.nowhere.Optimizer}",
    }.items():
        (tmp_path / "hardware" / f"{name}.yaml").write_text(f"# @package _global_\n{key}\n")
    cfg = world.config("weights=uniform", config_dir=tmp_path)
    assert tuple(option for option, _ in alternatives(cfg, load_config(str(world.model)))) == ALONE
