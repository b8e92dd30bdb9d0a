"""W&B sweep files: every combination, expanded as the agent would, is a command that composes and checks."""

import itertools
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from attnpo.config import check, compose

SWEEPS = sorted((Path(__file__).resolve().parents[1] / "experiments" / "sweeps").glob("*.yaml"))


def expanded(path: Path) -> list[list[str]]:
    """The overrides of every run, as an agent renders ``${args_no_hyphens}`` (values through Python's str)."""
    text = path.read_text(encoding="utf-8").replace("${", "<").replace("}", ">")
    sweep = OmegaConf.to_container(OmegaConf.create(text))
    assert isinstance(sweep, dict) and sweep["program"] == "attnpo.fit"
    fixed = [word for word in sweep["command"] if "=" in word]
    assert sweep["command"][-1] == "<args_no_hyphens>"
    axes = [[f"{key}={value}" for value in axis["values"]] for key, axis in sweep["parameters"].items()]
    return [[*fixed, *values] for values in itertools.product(*axes)]


def test_there_is_a_sweep() -> None:
    assert len(SWEEPS) >= 1


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_every_combination_is_a_sound_command(path: Path) -> None:
    commands = expanded(path)
    assert len(commands) == len({tuple(command) for command in commands}) > 1
    layers = set()
    for command in commands:
        cfg = compose("fit", command)
        check(cfg, complete=False)
        assert cfg.study is None and cfg.logger.wandb is not None
        layers.add(str(cfg.weights.layer))
    assert len(layers) > 1
