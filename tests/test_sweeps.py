"""W&B sweep files: every run, rendered as the agent would, is a sound command, to be had without an account too."""

import itertools
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from attnpo.config.compose import expand_sweep, load
from attnpo.lab.studies.arms import parse_yaml_value
from attnpo.lab.studies.config import FitConfig
from attnpo.lab.studies.study import Study
from attnpo.run import combinations as settings
from attnpo.run.identity import flatten, make_identity

FOLDER = Path(__file__).resolve().parents[1] / "experiments" / "sweeps"
SWEEPS = sorted(FOLDER.glob("*.yaml"))
ACCOUNT = "logger=wandb"
COMMAND = re.compile(r"#\s+python -m attnpo\.fit (.*)")
AXES = {
    "layer": {"weights.layer"},
    "beta": {"weights", "objective.beta"},
    "beta_x_layer": {"weights.layer", "objective.beta"},
    "rrhf": {"objective.sft_coef", "optimizer.lr"},
    "slic_hf": {"objective.sft_coef", "objective.delta", "optimizer.lr"},
    "ipo": {"objective.beta", "optimizer.lr"},
    "cpo": {"objective.beta", "optimizer.lr"},
    "kto": {"objective.beta", "optimizer.lr"},
    "orpo": {"objective.lam", "optimizer.lr"},
    "rdpo": {"objective.beta", "objective.alpha", "optimizer.lr"},
    "tdpo": {"objective.beta"},
    "tidpo": {"objective.beta", "optimizer.lr", "trainer.precision"},
}
METHODS = {
    **{"rrhf": "RRHF", "slic_hf": "SLiC-HF", "ipo": "IPO", "cpo": "CPO", "kto": "KTO", "orpo": "ORPO"},
    **{"rdpo": "R-DPO", "tdpo": "TDPO", "tidpo": "TI-DPO"},
}
OVER_LAYERS = [path for path in SWEEPS if path.stem not in METHODS]
LLAMAS = ("llama3_8b_base_sft", "llama3_8b_instruct")


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
def test_every_run_is_a_sound_command(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a method's long search the first and the last run are composed: both ends of every axis."""
    monkeypatch.setattr(settings, "find_spec", lambda package: package)  # torchao is an extra
    commands = expanded(path)
    assert len(commands) == len({tuple(command) for command in commands}) > 1
    for command in [commands[0], commands[-1]] if path.stem in METHODS else commands:
        cfg = load("fit", command)
        assert cfg.study is None and cfg.logger.wandb is not None


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_a_sweep_runs_locally_as_the_same_grid(path: Path) -> None:
    """The header's ``-m`` line gives exactly the sweep's runs, without W&B."""
    grid, _ = said(path)
    axes = {key for key, _, values in (word.partition("=") for word in grid) if "," in values}
    assert axes == AXES[path.stem]
    local = {frozenset(job) for job in expand_sweep(grid)}
    assert local == {frozenset(command) - {ACCOUNT} for command in expanded(path)}
    assert not any(word.startswith("logger") for word in grid)


@pytest.mark.parametrize("path", OVER_LAYERS, ids=lambda path: path.stem)
def test_a_sweep_names_the_study_of_the_same_axes(path: Path) -> None:
    """The study's arms hold every layer and weight source of the sweep, its grids every beta."""
    _, overrides = said(path)
    cfg = load("fit", overrides)
    study = cfg.study
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


# ------------------------------------------------------------------------------------------------ searches of methods


@cache
def main_results(setting: str) -> Study:
    """The study of all methods on a setting."""
    made = load("fit", ["experiment=main_results", f"setting={setting}"]).study
    assert isinstance(made, Study)
    return made


@pytest.mark.parametrize("name", METHODS)
def test_a_methods_row_is_one_run_of_its_search(name: str) -> None:
    """In both Llama settings: the same training as the sweep's run with the row's values, which are in its ranges."""
    study, other = map(main_results, LLAMAS)
    assert study.grid_of(METHODS[name]) == other.grid_of(METHODS[name])
    (values,) = study.grid_of(METHODS[name]).point_overrides()
    shared = ["experiment=none", *(word for word in study.shared if not word.startswith(("trainer.", "truth.")))]
    row = load("fit", [f"setting={LLAMAS[0]}", *shared, *study.arms[METHODS[name]], *values])
    found = [run for run in expanded(FOLDER / f"{name}.yaml") if all(_set(row, word) for word in run if "." in word)]
    assert len(found) == 1
    machine = ("setting=", "hardware=", "optimizer=adamw8bit")  # what lets it run somewhere
    words = [word for word in found[0] if word != ACCOUNT and not word.startswith(machine)]
    assert make_identity(load("fit", [f"setting={LLAMAS[0]}", *words])).numbers == make_identity(row).numbers


def _set(cfg: FitConfig, word: str) -> bool:
    """Whether a configuration has what an override sets."""
    key, _, text = word.partition("=")
    return bool(dict(flatten(cfg.values)).get(key) == parse_yaml_value(text))


@pytest.mark.parametrize("setting", LLAMAS)
def test_rows_without_a_published_value_are_marked_and_have_a_sweep(setting: str) -> None:
    """A marked default is the second value of every axis of its sweep."""
    study = main_results(setting)
    grids = {name: study.grid_of(arm) for name, arm in METHODS.items()}
    marked = {name for name, grid in grids.items() if grid.origin == "default of a search range"}
    assert marked == METHODS.keys() - {"tdpo", "tidpo"}
    assert all(
        "as published" in study.grid_of(arm).origin for arm in study.arms if arm not in {METHODS[n] for n in marked}
    )
    for name in marked:
        sweep = OmegaConf.load(FOLDER / f"{name}.yaml")
        for key, axis in sweep.parameters.items():
            assert grids[name].axes[str(key)] == (axis["values"][1],)
