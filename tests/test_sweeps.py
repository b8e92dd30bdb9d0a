"""W&B sweep files: every run, rendered as the agent would, is a sound command, to be had without an account too."""

import itertools
import re
import shlex
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from attnpo.config import build, check, compose, expand

FOLDER = Path(__file__).resolve().parents[1] / "experiments" / "sweeps"
SWEEPS = sorted(FOLDER.glob("*.yaml"))
ACCOUNT = "logger=wandb"
COMMAND = re.compile(r"#\s+python -m attnpo\.fit (.*)")
AXES = {
    "layer": {"weights.layer"},
    "beta": {"weights", "objective.beta"},
    "beta_x_layer": {"weights.layer", "objective.beta"},
}


def expanded(path: Path) -> list[list[str]]:
    """The overrides of every run, as an agent renders ``${args_no_hyphens}`` (values through Python's str)."""
    text = path.read_text(encoding="utf-8").replace("${", "<").replace("}", ">")
    sweep = OmegaConf.to_container(OmegaConf.create(text))
    assert isinstance(sweep, dict) and sweep["program"] == "attnpo.fit"
    fixed = [word for word in sweep["command"] if "=" in word]
    assert sweep["command"][-1] == "<args_no_hyphens>"
    axes = [[f"{key}={value}" for value in axis["values"]] for key, axis in sweep["parameters"].items()]
    return [[*fixed, *values] for values in itertools.product(*axes)]


def said(path: Path) -> tuple[list[str], list[str]]:
    """The overrides of the two local commands in a sweep's header: the grid (without its -m) and the study."""
    lines = path.read_text(encoding="utf-8").splitlines()
    commands = [shlex.split(found[1]) for line in lines if (found := COMMAND.match(line))]
    grid, study = commands
    assert grid[-1] == "-m" and "-m" not in study
    return grid[:-1], study


def test_the_sweeps_are_these() -> None:
    assert {path.stem for path in SWEEPS} == AXES.keys()


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_every_combination_is_a_sound_command(path: Path) -> None:
    commands = expanded(path)
    assert len(commands) == len({tuple(command) for command in commands}) > 1
    for command in commands:
        cfg = compose("fit", command)
        check(cfg, complete=False)
        assert cfg.study is None and cfg.logger.wandb is not None


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_a_sweep_runs_locally_as_the_same_grid(path: Path) -> None:
    """The header's ``-m`` line gives exactly the sweep's runs, without W&B."""
    grid, _ = said(path)
    axes = {key for key, _, values in (word.partition("=") for word in grid) if "," in values}
    assert axes == AXES[path.stem]
    local = {frozenset(job) for job in expand(grid)}
    assert local == {frozenset(command) - {ACCOUNT} for command in expanded(path)}
    assert not any(word.startswith("logger") for word in grid)


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_a_sweep_names_the_study_of_the_same_axes(path: Path) -> None:
    """The study's arms hold every layer and weight source of the sweep, its grids every beta."""
    _, overrides = said(path)
    cfg = compose("fit", overrides)
    check(cfg, complete=False)
    study = build(cfg.study)
    betas = {beta for grid in (study.grid, *study.grids.values()) for beta in grid.beta}
    choices = {override for arm in study.arms.values() for override in arm}
    layers = {f"weights.layer={layer}" for layer in study.layers}
    for command in expanded(path):
        for key, _, value in (word.partition("=") for word in command):
            if key == "objective.beta":
                assert float(value) in betas
            elif key == "weights.layer":
                assert f"{key}={value}" in layers
            elif key == "weights":
                assert f"{key}={value}" in choices
