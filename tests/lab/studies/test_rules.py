"""Rules of runs and studies that keep a command from meaning something else than it says."""

from dataclasses import replace
from pathlib import Path

import pytest

from attnpo.config.compose import compose, load, parse
from attnpo.judge.judge import RunJudge
from attnpo.lab.studies import shared_inputs
from attnpo.lab.studies.arms import check_user_overrides, make_composer
from attnpo.lab.studies.plan import plan_study
from attnpo.lab.studies.shared_inputs import COSTS, SharedInputs, prepare_shared_inputs, save_costs
from attnpo.run.components import PreparedJudge
from attnpo.run.identity import make_identity
from attnpo.run.resolve import resolve
from attnpo.schema import UserError
from tests.run.made import make_inputs
from tests.run.worlds import World

STUDY = "experiment=quickstart"


def test_an_override_that_fits_one_arm_is_left_out_of_the_other(world: World, caplog: pytest.LogCaptureFixture) -> None:
    cfg = world.config(STUDY, "weights.layer=2")
    study = cfg.study
    check_user_overrides(make_composer(cfg, study), make_identity(cfg).result)
    with caplog.at_level("INFO"):
        configs = {
            name: make_composer(cfg, study).compose_arm(overrides).config for name, overrides in study.arms.items()
        }
    assert configs["AttentionPO"].weights.layer == 2
    assert not hasattr(configs["uniform (DPO)"].weights, "layer")
    assert caplog.messages == [
        "arm weights=uniform: ignoring override weights.layer=2, which does not apply to this arm"
    ]


def test_an_override_that_fits_no_arm_is_an_error(world: World) -> None:
    """The setting's own weights have the key."""
    arms = "study.arms={one:['weights=uniform'],two:['weights=verbalized']}"
    cfg = world.config(STUDY, "~study.arms", f"+{arms}", "study.control=null", "weights.layer=2")
    with pytest.raises(UserError, match=r"weights\.layer"):
        check_user_overrides(make_composer(cfg, cfg.study), make_identity(cfg).result)


def test_what_the_arms_choose_cannot_be_overridden(world: World) -> None:
    cfg = world.config(STUDY, "weights=uniform")
    with pytest.raises(
        UserError, match=r"study quickstart sets transform, weights .* weights=uniform would have no effect"
    ):
        check_user_overrides(make_composer(cfg, cfg.study), make_identity(cfg).result)


def test_the_studys_own_keys_do_not_reach_its_points(world: World) -> None:
    cfg = world.config(STUDY, "study.seeds=2", "+study.kl_limit=1.5", "batch.micro=1")
    overrides = make_composer(cfg, cfg.study).compose_arm(["weights=uniform"]).overrides
    assert "batch.micro=1" in overrides and not [item for item in overrides if "study." in item]


MORE = """
# @package _global_
defaults: [layer_sweep, _self_]
batch: {shuffle: false}
seed: 4
"""


def test_an_experiment_that_sets_what_no_point_would_get_is_refused(tmp_path: Path) -> None:
    """Its seed is the study's first; anything else on the command line reaches the points."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "more.yaml").write_text(MORE, encoding="utf-8")
    cfg = load("fit", ["setting=real_smoke", "experiment=more"], tmp_path)
    with pytest.raises(UserError, match=r"experiment sets batch\.shuffle, .*move this setting to study\.shared"):
        check_user_overrides(make_composer(cfg, cfg.study), make_identity(cfg).result)
    cfg = load("fit", ["setting=real_smoke", "experiment=more", "batch.shuffle=false"], tmp_path)
    check_user_overrides(make_composer(cfg, cfg.study), make_identity(cfg).result)
    made = make_composer(cfg, cfg.study).compose_arm(["weights=uniform"]).config
    assert (made.seed, made.batch.shuffle) == (4, False)


OTHER = "+grids.other={beta:[0.7]}"


@pytest.mark.parametrize(
    ("experiment", "more", "idle"),
    [
        ("layer_sweep", [], {"+grids.other.beta=[0.7]": "study layer_sweep does not use it"}),
        ("layer_sweep", ["+study.grids.attention=${grids.other}"], {}),
        ("none", [], {"+grids.other.beta=[0.7]": "there is no study (experiment=none)"}),
    ],
)
def test_a_named_grid_has_an_effect_where_an_arm_gets_it(
    experiment: str, more: list[str], idle: dict[str, str]
) -> None:
    cfg = compose("fit", [f"experiment={experiment}", OTHER, *more])
    cfg.composed.overrides = [*cfg.composed.overrides[:1], "+grids.other.beta=[0.7]"]
    assert parse(cfg).unused_overrides() == idle


def test_facts_follow_the_content_of_the_judges_file(world: World, tmp_path: Path) -> None:
    facts = []
    for wording in ("which is better , A or B ?", "which review is better , A or B ?"):
        path = tmp_path / "judge.txt"
        path.write_text("{question}\n{answer_a}\n{answer_b}\n" + wording, encoding="utf-8")
        cfg = world.config(STUDY, f"judge.template_file={path}")
        facts.append(prepare_shared_inputs(plan_study(cfg), 0))
    assert facts[0].keys["AttentionPO"] != facts[1].keys["AttentionPO"]
    assert facts[0].keys["uniform (DPO)"] == facts[1].keys["uniform (DPO)"] == {}
    assert facts[0].facts == facts[1].facts


def spend(folder: Path, judge: float | None) -> float | None:
    """The cost of the judge as it is told after a command that spent ``judge``."""
    basis = SharedInputs("", 0, cost={"base": 100.0} | ({} if judge is None else {"judge": judge}))
    save_costs(folder, {("", 0): basis})
    assert basis.cost["base"] == 100.0
    return basis.cost.get("judge")


def test_the_seconds_of_all_commands_are_added_up(tmp_path: Path) -> None:
    """A later arm's small pass comes on top of the first one; a command without a pass takes over the sum."""
    assert [spend(tmp_path, judge) for judge in (None, 3600.0, 12.5, None)] == [None, 3600.0, 3612.5, 3612.5]
    assert [path.name for path in tmp_path.iterdir()] == [COSTS]


@pytest.mark.parametrize("broken", ["", "[1]", '{"/0": null}', '{"/0": '])
def test_a_broken_file_of_costs_is_written_anew(broken: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / COSTS).write_text(broken, encoding="utf-8")
    assert spend(tmp_path, 12.0) == 12.0
    assert "costs.json; replacing it, so the times of earlier commands are lost" in caplog.text
    assert spend(tmp_path, None) == 12.0


def test_a_judge_that_missed_its_gate_is_warned_of(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The study's own base and the one that only judges are told apart; a base without a gate says nothing."""
    plan = plan_study(world.config(STUDY))
    assert prepare_shared_inputs(plan, 0).warnings == []
    report = {"base": {"gate_passed": False, "seconds": 1.0}}
    monkeypatch.setattr(shared_inputs, "resolve", lambda cfg: resolve(cfg)._replace(report=report))
    second = PreparedJudge(world.model, {"gate_passed": True}, reused=True)
    monkeypatch.setattr(shared_inputs, "make_judge", lambda *_: second)
    basis = prepare_shared_inputs(plan, 0)
    assert basis.gates == {"this base": False, "the second base": True}
    (line,) = basis.warnings
    assert line.startswith("WARNING seed 0: the judge of this base failed its quality gate, ")
    second = replace(second, report={"gate_passed": False})
    assert [line.partition(" failed")[0] for line in prepare_shared_inputs(plan, 3).warnings] == [
        "WARNING seed 3: the judge of this base",
        "WARNING seed 3: the judge of the second base",
    ]


def test_cut_judge_prompts_are_counted_from_the_store_too(world: World) -> None:
    """Some prompts of this world are longer than this bound; the second reading builds no prompt at all."""
    resolved, base, _, _ = resolve(world.config())
    room = RunJudge(resolved.judge, base.spec, base.chat)
    pairs = resolved.data.load("train").pairs
    lengths = sorted(len(item.input_ids) for pair in pairs for item in room.prompts.build(pair))
    cfg = world.config(f"judge.max_length={lengths[len(lengths) // 2]}")
    counts = []
    for _ in range(2):
        inputs = make_inputs(cfg)
        counts.append(sum(item.cut for pair in inputs.weighed.captured.values() for item in pair.rounds))
    assert inputs.weighed.report is not None and inputs.weighed.report.computed == 0
    assert counts[0] == counts[1] > 0
