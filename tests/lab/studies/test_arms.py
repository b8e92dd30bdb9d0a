"""Arms that differ as their names say, overrides that cannot spoil that, and what tells a study's points apart."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from attnpo.config.compose import list_groups, load
from attnpo.lab.studies.arms import (
    ComposedConfig,
    arm_identity,
    check_distinct_arms,
    check_user_overrides,
    make_composer,
    point_folder,
)
from attnpo.lab.studies.config import FitConfig
from attnpo.lab.studies.runner import run_study
from attnpo.lab.studies.study import ONLY, Arm, Grid, Point, Study, expand_arms
from attnpo.run.identity import make_identity
from attnpo.schema import UserError
from tests.run.worlds import World

STUDIES = [name for name in list_groups()["experiment"] if name != "none"]
DEPTH = 4  # layers of the testbed's base


@cache
def composed(*overrides: str) -> FitConfig:
    """A composed configuration, which must not be changed."""
    return load("fit", list(overrides))


def expand_study(cfg: FitConfig, study: Study) -> tuple[list[Arm], dict[tuple[str, str], ComposedConfig]]:
    """All arms of a study, layers told apart, and their configs as the runner composes them."""
    composer = make_composer(cfg, study)
    whole = composer.compose_all_arms()
    arms = [
        arm
        for world in study.worlds or [ONLY]
        for arm in expand_arms(study, DEPTH, truth=cfg.truth is not None, world=world)
    ]
    made = {
        (arm.world, arm.name): whole[arm.world, arm.name]
        if arm.layer is None
        else composer.compose_arm(arm.overrides, arm.world)
        for arm in arms
    }
    return arms, made


@pytest.mark.parametrize("name", STUDIES)
def test_the_arms_of_a_shipped_study_are_different_runs(name: str) -> None:
    """In the first of its worlds; what the others set is set by no arm (tests/test_experiments.py)."""
    cfg = composed(f"experiment={name}", "setting=testbed")
    whole: Study = cfg.study
    first = dict(list(whole.worlds.items())[:1])
    left = [arm for arm, worlds in whole.only_in.items() if not first.keys() & set(worlds)]
    study = replace(
        whole,
        worlds=first,
        arms={arm: overrides for arm, overrides in whole.arms.items() if arm not in left},
        only_in={},
        world_axis=None,
        predictions=None,
        grids={arm: grid for arm, grid in whole.grids.items() if arm not in left},
    )
    arms, made = expand_study(cfg, study)
    check_user_overrides(make_composer(cfg, study), make_identity(cfg).result)
    check_distinct_arms(study, arms, made, dict.fromkeys(made, DEPTH))
    values = [str(arm_identity(make_identity(arm.config).result)) for arm in made.values()]
    assert len(set(values)) == len(values) >= 2


# ------------------------------------------------------------------------------------------------ overrides


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("layer_sweep weights.layers=[1,2]", r"read the same layers: use study\.layers=\[1,2\]"),
        ("length_norm objective.length_scale=false", r"the arms differ in objective\.length_scale"),
        ("attention_sink weights.postprocess.sink_tokens=2", r"the arms differ in weights\.postprocess\.sink_tokens"),
        ("attention_sink weights.postprocess={sink_tokens:4}", r"the arms differ in weights\.postprocess, "),
        ("weight_sources weights.layers=[1,2]", r"the arms differ in weights\.layers"),
        ("cross_model judge.path=/x", r"would make all arms use the same one: set other_judge\.path"),
        (
            "regimes prepare.pairs={train:8}",
            r"for each of its worlds, so prepare\.pairs={train:8} would have no",
        ),
        (
            "layer_sweep objective.beta=0.7",
            r"beta=0\.7 would have no effect, .*sets this key: use grid\.beta=\[0\.7\]",
        ),
        ("layer_sweep optimizer.lr=1e-3", r"the study's grid sets this key: use grid\.lr=\[1e-3\]"),
        ("beta_sweep optimizer.lr=1e-3", r"sets this key: use grids\.beta_sweep\.lr=\[1e-3\]"),
        ("regimes objective.beta=0.7", r"sets this key: use study\.grid\.beta=\[0\.7\]"),
        (
            "length_norm objective.beta=0.7",
            r"this key: use grid\.beta=\[0\.7\] grids\.length_norm\.beta=\[0\.7\]",
        ),
    ],
)
def test_an_override_that_spoils_a_study_is_refused(given: str, message: str) -> None:
    experiment, override = given.split()
    cfg = composed(f"experiment={experiment}", override)
    with pytest.raises(UserError, match=message) as refused:
        check_user_overrides(make_composer(cfg, cfg.study), make_identity(cfg).result)
    assert "experiment=none" in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "given",
    [
        "experiment=quickstart objective.beta=0.1 optimizer.lr=1e-3",  # a study without a grid
        "experiment=layer_sweep weights.layer=2",  # goes to `shuffled`; arms of a layer keep theirs
        "experiment=layer_sweep grid.beta=[0.7] weights.heads=[1]",
        "experiment=layer_sweep grid.lr=[] optimizer.lr=1e-3",  # the grid has no such axis any more
        "experiment=controls weights.layers=[1,2]",
        "experiment=weight_sources trainer.max_epochs=1",  # verbalized takes verbalized_epochs
        "experiment=cross_model align.method=characters other_judge.path=/x",
    ],
)
def test_an_override_that_arms_can_take_is_not_refused(given: str) -> None:
    cfg = composed(*given.split())
    check_user_overrides(make_composer(cfg, cfg.study), make_identity(cfg).result)


# ------------------------------------------------------------------------------------------------ equal arms


def distinct(arms: dict[str, list[str]], depth: int = 0, grids: dict[str, Grid] | None = None) -> None:
    """Checks a study of these arms."""
    cfg = composed("setting=testbed", "experiment=quickstart")
    study = Study("twins", arms, grid=Grid(beta=(0.1, 0.3)), grids=grids or {}, control=None)
    made = {(ONLY, name): make_composer(cfg, study).compose_arm(overrides) for name, overrides in arms.items()}
    depths = dict.fromkeys(made, depth) if depth else None
    check_distinct_arms(study, expand_arms(study, DEPTH), made, depths)


@pytest.mark.parametrize(
    "second",
    [
        ["weights=attention"],
        ["weights=attention", "weights.layer=1"],  # the setting's default layer
        ["weights=attention", "weights.store_layers=selected", "batch.micro=8", "verbalizer.max_length=64"],
        ["weights=attention", "objective.beta=0.2"],  # the grid sets it
    ],
)
def test_two_arms_of_one_run_are_refused(second: list[str]) -> None:
    with pytest.raises(UserError, match=r"study twins: arms one and two would train identical runs"):
        distinct({"one": ["weights=attention"], "two": second})


def test_layers_are_compared_as_numbers_where_the_depth_is_known() -> None:
    arms = {"one": ["weights=attention", "weights.layer=last"], "two": ["weights=attention", "weights.layer=4"]}
    distinct(arms)
    distinct(arms, depth=8)
    with pytest.raises(UserError, match="identical runs"):
        distinct(arms, depth=4)


def test_a_layer_beside_layers_does_not_count() -> None:
    """With ``weights.layers`` given, ``weights.layer`` is not read."""
    both = ["weights=attention", "weights.layers=[1,2]"]
    with pytest.raises(UserError, match="identical runs"):
        distinct({"one": both, "two": [*both, "weights.layer=3"]})


def test_another_judge_or_another_grid_is_another_run() -> None:
    distinct({"one": ["weights=attention"], "two": ["weights=attention", "judge.path=/another"]})
    distinct({"one": ["weights=attention"], "two": ["weights=attention"]}, grids={"two": Grid(beta=(3.0,))})


TWINS = """
# @package study
_target_: attnpo.lab.studies.study.Study
name: twins
arms:
  uniform: [weights=uniform]
  same again: [weights=uniform, judge.max_length=300]
seeds: 1
"""


def test_a_study_with_equal_arms_ends_before_anything_is_computed(world: World, tmp_path: Path) -> None:
    (tmp_path / "configs" / "experiment").mkdir(parents=True)
    (tmp_path / "configs" / "experiment" / "twins.yaml").write_text(TWINS, encoding="utf-8")
    cfg = world.config("experiment=twins", f"store={tmp_path / 'store'}", config_dir=tmp_path / "configs")
    with pytest.raises(UserError, match="arms uniform and same again would train identical runs"):
        run_study(cfg, tmp_path / "out")
    assert not (tmp_path / "store").exists() and not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------------ points


ARMS = {
    "uniform": ("weights=uniform",),
    "attention": ("weights=attention",),
    "verbalized": ("weights=verbalized",),
}


def point_of(arm: str, *overrides: str) -> FitConfig:
    """The config of a point of an arm of weight_sources under further overrides."""
    return composed("setting=testbed", "experiment=none", "callbacks=none", *overrides, *ARMS[arm])


def folder_of(cfg: FitConfig) -> Path:
    return point_folder(Path(), Point(Arm("arm", ()), (), 0), make_identity(cfg).result, {})


EVERYWHERE = (
    "other_judge.path=/x",
    "batch.micro=8",
    "batch.eval_micro=8",
    "judge.token_budget=1000",
    "verbalizer.batch_size=2",
    "trainer.progress=false",
    "trainer.log_every_n_steps=10",
    "trainer.accelerator=auto",
)


@pytest.mark.parametrize(
    ("arm", "overrides"),
    [
        ("uniform", (*EVERYWHERE, "default_layer=2", "verbalized_epochs=3", "verbalizer.max_length=300")),
        ("uniform", ("auto_layer.pairs=9", "judge.max_length=300", "judge.template_file=judge/short.txt")),
        ("attention", (*EVERYWHERE, "verbalizer.max_length=300", "verbalized_epochs=3", "judge.path=/x")),
        ("verbalized", (*EVERYWHERE, "judge.max_length=300", "auto_layer.pairs=9", "default_layer=2")),
    ],
)
def test_a_finished_point_is_found_again_whatever_it_does_not_read(arm: str, overrides: tuple[str, ...]) -> None:
    cfg, other = point_of(arm), point_of(arm, *overrides)
    assert make_identity(other).result == make_identity(cfg).result
    assert folder_of(other) == folder_of(cfg)


@pytest.mark.parametrize(
    ("arm", "overrides"),
    [
        ("uniform", ("batch.pairs=8", "lengths.max_length=300", "truth.prompts=8", "callbacks=default")),
        ("uniform", ("trainer.validate_every=5", "trainer.precision=bf16-mixed", "prepare.pairs.train=96")),
        ("attention", ("default_layer=2", "judge.max_length=300", "weights.heads=[1]", "auto_layer.pairs=9")),
        ("verbalized", ("trainer.max_epochs=3", "verbalizer.max_length=300", "verbalizer.sampling.temperature=1.0")),
    ],
)
def test_a_point_that_would_differ_is_run(arm: str, overrides: tuple[str, ...]) -> None:
    known = folder_of(point_of(arm))
    assert [override for override in overrides if folder_of(point_of(arm, override)) == known] == []


def test_what_is_done_beside_the_training_counts_for_results_alone() -> None:
    cfg = composed("setting=testbed", "experiment=none")
    assert {"truth.prompts", "callbacks.samples", "trainer.validate_every"} <= make_identity(cfg).result.keys()
    assert not {"truth.prompts", "callbacks.samples", "trainer.validate_every"} & make_identity(cfg).numbers.keys()
    assert make_identity(cfg).numbers.items() <= make_identity(cfg).result.items()
