"""Arms, grids and points; and a study run to its end, repeated, and with a point that fails."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from attnpo import fit
from attnpo.config.compose import load
from attnpo.lab.studies import shared_inputs
from attnpo.lab.studies.arms import make_composer, merge_overrides, point_config, point_folder
from attnpo.lab.studies.config import FitConfig
from attnpo.lab.studies.outcome import Outcome
from attnpo.lab.studies.page import finish_study
from attnpo.lab.studies.plan import plan_study
from attnpo.lab.studies.runner import run_study
from attnpo.lab.studies.shared_inputs import prepare_shared_inputs
from attnpo.lab.studies.study import Arm, Grid, Point, Study, expand_arms, make_points, settings_record
from attnpo.run import run as runs
from attnpo.run.folders import run_folder
from attnpo.run.identity import make_identity
from attnpo.schema import UserError
from tests.corruption.damages import DAMAGES
from tests.lab.studied import Finished
from tests.run import probe
from tests.run.worlds import World, build_world, judge_loads

SWEEP = Study(
    "sweep",
    {"uniform": ["weights=uniform"], "attention": ["weights=attention", "align.method=characters"]},
    grid=Grid(lr=(1e-4, 5e-5), beta=(0.1, 1.0)),
    layers=(1, "1/4", "1/2", "3/4", "last"),
)


# ------------------------------------------------------------------------------------------------ arms and points


def test_each_layer_is_an_arm_of_its_own() -> None:
    """Of 32 layers: 1, 8, 16, 24, 32, as in the paper's figure."""
    arms = expand_arms(SWEEP, 32)
    assert [(arm.name, arm.layer) for arm in arms] == [
        ("uniform", None),
        ("attention L1", 1),
        ("attention L8", 8),
        ("attention L16", 16),
        ("attention L24", 24),
        ("attention L32", 32),
    ]
    assert arms[0].overrides == ("weights=uniform",)
    assert arms[2].overrides == ("weights=attention", "align.method=characters", "weights.layer=8")


def test_layers_that_coincide_are_one_arm_and_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        arms = expand_arms(SWEEP, 2)
    assert [arm.layer for arm in arms] == [None, 1, 2]
    assert caplog.messages == ["study.layers: 1, 1/4, 1/2, 3/4 are all the same layer in this model: 1 of 2"]
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert [arm.layer for arm in expand_arms(SWEEP, 4)] == [None, 1, 2, 3, 4]
    assert caplog.messages == ["study.layers: 1, 1/4 are all the same layer in this model: 1 of 4"]


def test_the_grid_is_a_product_with_nothing_for_an_empty_axis() -> None:
    assert Grid(lr=(1e-4, 5e-5), beta=(0.1, 1.0)).point_overrides() == [
        ("optimizer.lr=0.0001", "objective.beta=0.1"),
        ("optimizer.lr=0.0001", "objective.beta=1.0"),
        ("optimizer.lr=5e-05", "objective.beta=0.1"),
        ("optimizer.lr=5e-05", "objective.beta=1.0"),
    ]
    assert Grid(beta=(0.3,)).point_overrides() == [("objective.beta=0.3",)]
    assert Grid().point_overrides() == [()]


def test_a_grid_has_axes_of_any_key() -> None:
    """Behind the two named ones; one value sets a key at every point, none leaves it as it is."""
    keys = {"objective.lam": (0.1, 1.0), "batch.pairs": (64,), "objective.alpha": ()}
    grid = Grid(lr=(1e-4,), keys=keys, origin="as published")
    assert grid.point_overrides() == [
        ("optimizer.lr=0.0001", "objective.lam=0.1", "batch.pairs=64"),
        ("optimizer.lr=0.0001", "objective.lam=1.0", "batch.pairs=64"),
    ]
    assert str(grid) == "lr [0.0001], lam [0.1, 1.0], pairs [64]"
    assert str(Grid(beta=(0.3,), keys={"objective.alpha": (0.5,)})) == "lr as set, beta [0.3], alpha [0.5]"
    assert grid.to_dict() == {"lr": [1e-4], "beta": [], "keys": {"objective.lam": [0.1, 1.0], "batch.pairs": [64]}}
    assert Grid(lr=(1e-4,)).to_dict() == {"lr": [1e-4], "beta": []}, "as ever, so that digests of older studies hold"
    assert len({Arm("one", (), None, "", grid), Arm("one", (), None, "", grid)}) == 1


@pytest.mark.parametrize(("key", "axis"), [("optimizer.lr", "lr"), ("objective.beta", "beta")])
def test_a_named_axis_is_not_given_as_a_key(key: str, axis: str) -> None:
    with pytest.raises(UserError, match=rf"grid\.keys has {key}, .* set its values in grid\.{axis}"):
        Grid(keys={key: (0.1,)})


def test_every_arm_gets_every_point_of_the_grid_and_every_seed() -> None:
    arms = expand_arms(SWEEP, 32)
    points = make_points(SWEEP, arms, [3, 4])
    assert len(points) == 2 * 4 * 6
    by_arm = {arm.name: {(p.values, p.seed) for p in points if p.arm == arm} for arm in arms}
    assert all(found == by_arm["uniform"] and len(found) == 8 for found in by_arm.values())
    assert [point.arm.name for point in points[:6]] == [arm.name for arm in arms]
    assert [point.seed for point in points] == [3] * 24 + [4] * 24


def test_arms_of_the_truth_are_there_where_the_truth_is_known() -> None:
    study = Study("s", {"uniform": [], "attention": []}, truth_arms={"true importance": ["weights=true_importance"]})
    assert [arm.name for arm in expand_arms(study, 4)] == ["uniform", "attention"]
    (*_, last) = expand_arms(study, 4, truth=True)
    assert (last.name, last.overrides) == ("true importance", ("weights=true_importance",))


def test_an_arm_may_have_a_grid_of_its_own() -> None:
    """Every layer of the layer arm gets that of the layer arm."""
    study = Study(
        "s", {"uniform": [], "attention": []}, grid=Grid(beta=(0.1,)), grids={"attention": Grid(beta=(2.0, 4.0))},
        layers=(1, 2),
    )  # fmt: skip
    points = make_points(study, expand_arms(study, 2), [0])
    assert [(point.arm.name, *point.values) for point in points] == [
        ("uniform", "objective.beta=0.1"),
        ("attention L1", "objective.beta=2.0"),
        ("attention L2", "objective.beta=2.0"),
        ("attention L1", "objective.beta=4.0"),
        ("attention L2", "objective.beta=4.0"),
    ]
    record = settings_record(study, {}, None)
    assert record["grids"] == {"attention": {"lr": [], "beta": [2.0, 4.0]}}


def test_every_arm_runs_in_every_world_one_world_at_a_time() -> None:
    study = Study("s", {"uniform": [], "attention": []}, grid=Grid(beta=(0.1, 1.0)), worlds={"calm": [], "noisy": []})
    arms = [arm for world in study.worlds for arm in expand_arms(study, 2, world=world)]
    points = make_points(study, arms, [0, 1])
    assert [(point.seed, point.arm.world) for point in points[::4]] == [
        (0, "calm"), (0, "noisy"), (1, "calm"), (1, "noisy"),
    ]  # fmt: skip
    assert len(set(points)) == len(points) == 16
    assert points[5].label == "noisy: attention objective.beta=0.1 seed=0"


def test_later_layers_of_overrides_win_whatever_their_mark() -> None:
    shared, user, mine = ["callbacks=none", "a.b=1"], ["+a.b=2", "seed=1", "callbacks.samples=4"], ["seed=9"]
    assert merge_overrides(shared, user, mine) == ["callbacks=none", "+a.b=2", "callbacks.samples=4", "seed=9"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"arms": {}}, r"study\.arms is empty"),
        ({"control": "dpo"}, r"study\.control=dpo is not an arm; the arms are uniform, attention"),
        (
            {"layers": (1,), "layer_arm": "attn"},
            r"layer_arm=attn is not an arm; the arms are uniform, attention",
        ),
        ({"seeds": 0}, r"study\.seeds and study\.workers must be at least 1"),
        ({"workers": 0}, r"study\.seeds and study\.workers must be at least 1"),
        ({"layers": (2, "1/2", 2, 1)}, r"study\.layers lists 2 more than once"),
        ({"layers": (1, "1/2", "1/2")}, r"study\.layers lists 1/2 more than once"),
        ({"layers": (1,), "control": "attention"}, r"study\.control=attention is split into layers"),
        ({"truth_arms": {"uniform": []}}, r"uniform is in both study\.arms and study\.truth_arms"),
        ({"grids": {"attn": Grid()}}, r"study\.grids has attn, which is not an arm; the arms are uniform, attention"),
        ({"kl_levels": (0.5, 0.0)}, r"study\.kl_limit and study\.kl_levels must be above 0"),
    ],
)
def test_a_study_that_makes_no_sense_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Study(**{"name": "s", "arms": {"uniform": [], "attention": []}, **keys})


def test_the_record_changes_with_what_was_fixed() -> None:
    arms: dict[str, dict[str, object]] = {"uniform": {"beta": 0.1}}
    record = settings_record(SWEEP, arms, "w")
    assert record["grid"] == {"lr": [1e-4, 5e-5], "beta": [0.1, 1.0]}
    assert (record["world"], record["arms"]) == ("w", arms)

    def digest(study: Study, beta: float, world: str) -> str:
        return Outcome(
            study, [], [], [], settings_record(study, {"uniform": {"beta": beta}}, world), Path(), 0.0
        ).digest

    first = digest(SWEEP, 0.1, "w")
    other = Study("sweep", SWEEP.arms, grid=Grid(lr=(1e-4,), beta=(0.1, 1.0)), layers=SWEEP.layers)
    assert digest(SWEEP, 0.1, "w") == first
    assert len({first, digest(other, 0.1, "w"), digest(SWEEP, 0.2, "w"), digest(SWEEP, 0.1, "v")}) == 4


# ------------------------------------------------------------------------------------------------ a study run


def test_a_failed_point_is_named_and_the_others_are_run(plain_study: Finished) -> None:
    found = plain_study.outcome
    assert [point.arm.name for point, _ in found.points] == ["uniform", "attention"]
    assert len(plain_study.judges) == 1, "one judge pass for the whole study"
    ((point, error),) = found.failed
    assert point.arm.name == "broken" and "data.val_split=nowhere" in error
    for _, result in found.points:
        assert result.steps == 1
    assert [result.inputs.get("weights") for _, result in found.points] == [None, {"from_store": 18, "computed": 0}]


def test_a_point_is_what_its_overrides_say(plain_study: Finished) -> None:
    """Shared overrides, then the user's, then the point's own; its folder is named after it."""
    cfg, study, folder = plain_study.cfg, plain_study.outcome, plain_study.folder
    point, result = study.points[1]
    made = point_config(make_composer(cfg, study.study).compose_arm(point.arm.overrides), point)
    config, overrides = made.config, made.overrides
    assert (config.optimizer.lr, config.objective.beta, config.batch.eval_micro) == (1e-3, 0.2, 4)
    assert (config.study, config.callbacks.checkpoints, config.trainer.max_steps) == (None, False, 1)
    assert "experiment=tiny" not in overrides and "weights=attention" in overrides
    (place,) = (folder / "points").glob("attention-lr=0.001-beta=0.2-seed0-*")
    assert json.loads((place / "result.json").read_text()) == result.to_json()
    assert "before the first step" in (place / "log.txt").read_text()


def test_a_points_folder_changes_with_its_numbers_and_not_with_its_paths(plain_study: Finished) -> None:
    cfg, study, folder = plain_study.cfg, plain_study.outcome, plain_study.folder
    point = study.points[1][0]
    arm = make_composer(cfg, study.study).compose_arm(point.arm.overrides)
    config = point_config(arm, point).config
    other = point_config(arm, Point(point.arm, ("optimizer.lr=0.001", "objective.beta=0.3"), 0)).config
    place = point_folder(folder, point, make_identity(config).result, {"model": "m"})
    assert point_folder(folder, point, make_identity(other).result, {"model": "m"}) != place
    assert point_folder(folder, point, make_identity(config).result, {"model": "n"}) != place
    moved = config
    for key, value in (("model.path", "a"), ("data.path", "b"), ("store", "c"), ("output", "d")):
        moved = moved.with_value(key, value)
    assert point_folder(folder, point, make_identity(moved).result, {"model": "m"}) == place


def test_a_repeated_command_trains_nothing_again(plain_study: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    """The finished points are reused; only the one that failed is tried again."""
    cfg, folder = plain_study.cfg, plain_study.folder
    tried: list[str] = []

    def run(config: FitConfig, place: Path, point: bool) -> dict[str, Any]:
        tried.append(place.name)
        raise UserError("not again")

    monkeypatch.setattr(runs, "run", run)
    with judge_loads() as loaded:
        again = run_study(cfg, folder)
    assert len(tried) == 1 and tried[0].startswith("broken")
    assert loaded == []
    assert [result for _, result in again.points] == [result for _, result in plain_study.outcome.points]
    assert [error for _, error in again.failed] == ["not again"]
    assert again.digest == plain_study.outcome.digest


@pytest.mark.parametrize("changed", ["code", "seed"])
def test_changed_code_or_another_setting_runs_every_point_again(
    changed: str, plain_study: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same folder, with what the store has; that every point fails is an error."""
    world, folder, cfg = plain_study.world, plain_study.folder, plain_study.cfg
    if changed == "seed":
        cfg = world.config("experiment=tiny", "batch.eval_micro=4", "seed=1", config_dir=folder.parent / "configs")
    else:
        monkeypatch.setattr(shared_inputs, "source_digest", lambda *given: "another version")
    tried: list[str] = []

    def run(config: FitConfig, place: Path, point: bool) -> dict[str, Any]:
        tried.append(place.name)
        raise RuntimeError("out of luck")

    monkeypatch.setattr(runs, "run", run)
    with (
        judge_loads() as loaded,
        pytest.raises(UserError, match=r"study tiny: all 3 points failed; first error: (.|\n)*out of luck"),
    ):
        run_study(cfg, folder)
    assert [name.partition("-")[0] for name in tried] == ["uniform", "broken", "attention"] and loaded == []
    assert "out of luck" in (folder / "points" / tried[0] / "error.txt").read_text()


@pytest.mark.parametrize(
    ("variables", "name", "instead"),
    [
        ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}, "torchrun or a similar launcher", "`python"),
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, "SLURM", "`srun --ntasks=1 python"),
        ({"WORLD_SIZE": "2"}, "a launcher that sets WORLD_SIZE", "`env -u WORLD_SIZE -u RANK python"),
    ],
)
def test_several_processes_are_refused_with_the_name_of_what_started_them(
    variables: dict[str, str], name: str, instead: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for known in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "SLURM_NTASKS", "SLURM_PROCID"):
        monkeypatch.delenv(known, raising=False)
    cfg = load("fit", ["experiment=layer_sweep", "seeds=1"])
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    expected = f"started with 2 processes by {name}.*{re.escape(instead)} -m attnpo.fit experiment=layer_sweep seeds=1`"
    with pytest.raises(UserError, match=expected):
        fit.main(cfg)
    with pytest.raises(UserError, match=expected):
        run_study(cfg, tmp_path / "out")
    single = load("fit", ["experiment=none", "name=x"])
    assert run_folder(single).name == "x"


# ------------------------------------------------------------------------------------------------ worlds, analyses


WIDE = """
# @package study
_target_: attnpo.lab.studies.study.Study
name: wide
arms:
  uniform: [weights=uniform]
  elsewhere: [weights=attention, judge.path=/there/is/no/such/judge]
  attention: [weights=attention]
truth_arms:
  true importance: [weights=uniform]
grid:
  _target_: attnpo.lab.studies.study.Grid
  beta: [0.2]
grids:
  attention:
    _target_: attnpo.lab.studies.study.Grid
    beta: [0.1, 0.4]
worlds:
  lost: [data.val_split=nowhere]
  short: [lengths.max_length=420]
analyses:
  probe: {_target_: tests.run.probe.Probe, value: 1.5}
  broken: {_target_: tests.run.probe.Probe, fails: true}
seeds: 1
workers: 1
shared: [callbacks=none, reference=cached, trainer.max_steps=1]
"""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[World, Path, Outcome]:
    """A study of two worlds, one of which has no pairs to validate on, and of an arm whose judge is not there."""
    folder = tmp_path_factory.mktemp("wide")
    (folder / "configs" / "experiment").mkdir(parents=True)
    (folder / "configs" / "experiment" / "wide.yaml").write_text(WIDE)
    world = build_world(folder)
    probe.asked.clear()
    return world, folder, run_study(world.config("experiment=wide", config_dir=folder / "configs"), folder / "out")


def test_a_world_and_an_arm_that_cannot_be_had_are_lost_alone(wide: tuple[World, Path, Outcome]) -> None:
    outcome = wide[2]
    assert [(point.arm.world, point.arm.name, *point.values) for point, _ in outcome.points] == [
        ("short", "uniform", "objective.beta=0.2"),
        ("short", "attention", "objective.beta=0.1"),
        ("short", "attention", "objective.beta=0.4"),
    ]
    lost = {(point.arm.world, point.arm.name): error for point, error in outcome.failed}
    assert lost.keys() == {("lost", "uniform"), ("lost", "elsewhere"), ("lost", "attention"), ("short", "elsewhere")}
    assert "data.val_split=nowhere" in lost["lost", "uniform"] == lost["lost", "attention"]
    assert "/there/is/no/such/judge" in lost["short", "elsewhere"]
    assert outcome.worlds == ["lost", "short"]
    assert outcome.warnings == []


def test_the_points_of_a_world_are_named_after_it(wide: tuple[World, Path, Outcome]) -> None:
    (place,) = (wide[1] / "out" / "points").glob("short-attention-beta=0.4-seed0-*")
    assert "max_length: 420" in (place / "config.yaml").read_text()


def test_analyses_are_measured_once_and_one_that_fails_is_named(wide: tuple[World, Path, Outcome]) -> None:
    """In the world that can be had, under the study's own weights; the result is as a file holds it."""
    world, folder, outcome = wide
    assert probe.asked == ["Attention"] * 2
    assert outcome.measured == {"probe": {("short", 0): {"pairs": 12, "value": 1.5, "1": [2, 3]}}, "broken": {}}
    assert outcome.unmeasured == ["FAILED analysis broken, world short, seed 0: RuntimeError: nothing to see"]
    probe.asked.clear()
    again = run_study(world.config("experiment=wide", config_dir=folder / "configs"), folder / "out")
    assert len(probe.asked) == 1, "only the one that failed is tried again"
    assert again.measured == outcome.measured
    assert [result for _, result in again.points] == [result for _, result in outcome.points]
    probe.asked.clear()
    other = world.config("experiment=wide", "study.analyses.probe.value=2.0", config_dir=folder / "configs")
    assert run_study(other, folder / "out").measured["probe"]["short", 0]["value"] == 2.0
    assert len(probe.asked) == 2


@pytest.mark.parametrize("name", ["a digit", "empty"])
def test_a_damaged_record_of_an_analysis_is_measured_anew(
    name: str, wide: tuple[World, Path, Outcome], caplog: pytest.LogCaptureFixture
) -> None:
    world, folder, outcome = wide
    cfg = world.config("experiment=wide", config_dir=folder / "configs")
    (record,) = (
        path for path in (folder / "out" / "analyses").glob("probe-short-*.json") if "1.5" in path.read_text("utf-8")
    )
    sound = record.read_bytes()
    if name == "a digit":
        record.write_bytes(sound.replace(b"1.5", b"1.6"))
    else:
        DAMAGES[name](record)
    basis = prepare_shared_inputs(plan_study(cfg), 0, "short", folder / "out")
    assert basis.measured["probe"] == outcome.measured["probe"]["short", 0]
    assert record.read_bytes() == sound
    assert [record.name in line for line in caplog.messages if "has changed or is damaged" in line] == [True]


def test_what_is_lost_and_what_is_measured_stand_in_every_table(
    wide: tuple[World, Path, Outcome], capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = wide[2]
    finish_study(outcome)
    page = (outcome.folder / "report.html").read_text()
    printed, table = capsys.readouterr().out, (outcome.folder / "table.md").read_text()
    assert printed.splitlines()[0].startswith("  Result: ") and "Result: " in page
    for text in (printed, table, page):
        assert text.count("NOT RUN") == 4
        assert "WARNING: the control uniform has no results in world lost" in text
        assert "FAILED world lost, seed 0, 4 points of uniform, elsewhere, attention: not run" in text
        assert "FAILED short: elsewhere objective.beta=0.2 seed=0: not run" in text
        assert "FAILED analysis broken" in text
    for text in (table, page):
        assert "grid of attention, whose beta has a different unit: lr as set, beta [0.1, 0.4]" in text
        assert "pairs that were counted" in text


def test_a_study_whose_every_base_is_lost_says_why(wide: tuple[World, Path, Outcome]) -> None:
    world, folder, _ = wide
    cfg = world.config("experiment=wide", "~study.worlds.short", config_dir=folder / "configs")
    with pytest.raises(UserError, match=r"data\.val_split=nowhere"):
        run_study(cfg, folder / "other")
