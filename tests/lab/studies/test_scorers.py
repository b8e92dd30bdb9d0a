"""Scorers that a study trains for its arms, arms of the user's own sources, and what both cost."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForSequenceClassification

from attnpo.lab.studies.config import FitConfig
from attnpo.lab.studies.outcome import Outcome, SourceCost
from attnpo.lab.studies.page import finish_study
from attnpo.lab.studies.plan import plan_study
from attnpo.lab.studies.runner import run_study
from attnpo.lab.studies.scorers import TrainedScorers, make_scorer_run, needed_scorers, train_scorers
from attnpo.lab.studies.shared_inputs import prepare_shared_inputs
from attnpo.lab.studies.study import Arm, Point, Study
from attnpo.lab.studies.tables import FORWARDS, TRAINING, WEIGHING, cost_sections
from attnpo.lab.testbed.pretrain import new_model
from attnpo.lab.testbed.tokenizer import build_tokenizer
from attnpo.models.loading import load_tokenizer, weights_fingerprint
from attnpo.run import run as runs
from attnpo.run.result import RunResult
from attnpo.schema import UserError
from tests.run.worlds import GRAMMAR, RECIPE, TRAIN, World, build_world

STUDY = """
# @package study
defaults: [_base, _self_]
name: tiny
scorers:
  oracle: [weights=uniform, objective=dpo]
  reward:
    [model=reward, weights=uniform, objective=cpo, objective.beta=1.0, objective.sft_coef=0.0, callbacks.samples=0]
  stranger: [weights=uniform, objective=dpo, model.path=STRANGER]
  lost: [weights=uniform, objective=dpo, data.train_split=nowhere]
  idle: [weights=uniform, objective=dpo, data.train_split=nowhere]
arms:
  SePO: [weights=selection, weights.oracle.path=SCORER.oracle, transform=shuffled]
  uniform: [weights=uniform]
  reward attention: [weights=reward_attention, weights.path=SCORER.reward]
  foreign: [weights=selection, weights.oracle.path=SCORER.stranger]
  orphan: [weights=selection, weights.oracle.path=SCORER.lost]
workers: 1
seeds: 1
costs: true
shared: [callbacks=none, reference=cached, trainer.max_steps=3]
"""
MINE = "defaults: [formula, _self_]\nfunction: my_rules.content_words\n"
CODE = """
def content_words(tokens):
    return [0.0 if not text else 1.0 if len(text.strip()) > 3 else 0.2 for text in tokens.texts]
"""


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FitConfig, World, Path]]:
    """A study with scorers, and a source of the user's own from a folder of configurations."""
    folder = tmp_path_factory.mktemp("rivals")
    world = build_world(folder)
    strange = build_tokenizer(GRAMMAR, merges=20)
    new_model(RECIPE, strange, seed=4).save_pretrained(folder / "stranger")
    strange.save_pretrained(folder / "stranger")
    for name, text in (("experiment/tiny", STUDY), ("weights/mine", MINE)):
        (folder / "configs" / name).parent.mkdir(parents=True)
        (folder / "configs" / f"{name}.yaml").write_text(text.replace("STRANGER", str(folder / "stranger")))
    (folder / "my_rules.py").write_text(CODE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("ATTNPO_ALLOW_TARGETS", "tests,my_rules")
        yield config(world, folder), world, folder
    sys.modules.pop("my_rules", None)


def config(world: World, folder: Path, *more: str) -> FitConfig:
    return world.config("experiment=tiny", "study.sources=[mine]", *more, config_dir=folder / "configs")


@pytest.fixture(scope="module")
def outcome(study: tuple[FitConfig, World, Path]) -> Outcome:
    cfg, _, folder = study
    return run_study(cfg, folder / "out")


def scorer(store: Path, name: str) -> Path:
    (place,) = (store / "scorers").glob(f"{name}-seed0-*")
    return place


def test_arms_are_weighed_by_the_scorers_that_were_trained_for_them(
    study: tuple[FitConfig, World, Path], outcome: Outcome
) -> None:
    cfg, world, _ = study
    assert [point.arm.name for point, _ in outcome.points] == ["SePO", "uniform", "reward attention", "mine"]
    basis = prepare_shared_inputs(plan_study(cfg), 0)
    asked = basis.keys["SePO"]["judge"]
    assert isinstance(asked, dict)
    assert asked["first"]["weights"] == weights_fingerprint(scorer(world.store, "oracle") / "last")
    assert asked["second"]["weights"] == weights_fingerprint(world.model) != asked["first"]["weights"]
    reward = scorer(world.store, "reward") / "last"
    assert basis.keys["reward attention"]["judge"]["weights"] == weights_fingerprint(reward)  # type: ignore[index]
    assert AutoModelForSequenceClassification.from_pretrained(reward).config.num_labels == 1
    assert load_tokenizer(reward).get_vocab() == load_tokenizer(world.model).get_vocab()
    assert "A reward model trained" in (reward / "README.md").read_text()
    assert sorted(path.name for path in reward.parent.iterdir() if path.is_dir()) == ["last", "logs"]
    assert not (reward / "state.ckpt").exists()


def test_a_source_of_ones_own_is_an_arm(outcome: Outcome) -> None:
    """The overrides name the option alone; its numbers are those of the function."""
    (result,) = (result for point, result in outcome.points if point.arm.name == "mine")
    assert next(arm for arm in outcome.arms if arm.name == "mine").overrides == ("weights=mine",)
    assert 0.2 < result.input("train", "mass") / result.input("train", "lengths.p50") < 1


def test_a_scorer_that_fails_or_cannot_be_read_loses_its_arms_alone(outcome: Outcome) -> None:
    lost = {point.arm.name: error for point, error in outcome.failed}
    assert lost.keys() == {"foreign", "orphan"}
    assert "has a different vocabulary from" in lost["foreign"] and "weights.oracle.path=" in lost["foreign"]
    assert "scorer lost could not be trained: " in lost["orphan"] and "nowhere" in lost["orphan"]
    (line,) = outcome.lost_scorers
    assert line.startswith("FAILED scorer lost, seed 0: ") and "nowhere" in line


def test_scorers_that_no_arm_names_are_not_trained(study: tuple[FitConfig, World, Path], outcome: Outcome) -> None:
    cfg, world, _ = study
    assert needed_scorers(cfg.study, "", truth=False) == ["oracle", "reward", "stranger", "lost"]
    assert not list((world.store / "scorers").glob("idle*"))


def test_the_tables_count_reads_and_judge_the_scorers(outcome: Outcome, capsys: pytest.CaptureFixture[str]) -> None:
    """Three steps of four pairs train once on each of the twelve; the reference is read once."""
    costs, scorers = cost_sections(outcome)
    rows = {row["arm"]: row for row in costs.blocks[0].rows}  # type: ignore[union-attr,index]
    assert rows["uniform"][FORWARDS] == 0 and rows["uniform"]["scorers"] == ""
    sepo = rows["SePO"]
    assert (sepo[FORWARDS], sepo["scorers"]) == (4, "oracle")
    assert (sepo["their forwards/pair"], sepo["their backwards/pair"]) == (4.0, 2.0)
    assert sepo[WEIGHING] > 0 and sepo[TRAINING] > 0 and sepo["their s"] > 0
    assert rows["reward attention"][FORWARDS] == 2 and rows["reward attention"]["their forwards/pair"] == 2.0
    told = {row["scorer"]: row for row in scorers.blocks[1].rows}  # type: ignore[union-attr]
    assert told.keys() == {"oracle", "reward", "stranger"}
    assert told["oracle"]["of arms"] == "SePO" and told["reward"]["pairs"] == TRAIN
    assert 0 <= told["reward"]["val accuracy"] <= 1
    finish_study(outcome)
    table = (outcome.folder / "table.md").read_text()
    assert "What the weights cost" in table and "training of scorers" in table
    assert "FAILED scorer lost" in table and "FAILED scorer lost" in capsys.readouterr().out
    record = json.loads((outcome.folder / "study.json").read_text())
    assert record["scored"]["SePO"] == {"weights.oracle.path": "oracle"}
    assert record["scorers"].keys() == {"oracle", "reward", "stranger", "lost"}


def test_a_repeated_command_trains_no_scorer_again(
    study: tuple[FitConfig, World, Path], outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in another folder either; only the one that failed is tried again."""
    cfg, _, folder = study
    tried: list[str] = []

    def run(config: FitConfig, place: Path, point: bool) -> dict[str, Any]:
        tried.append(place.name.partition("-")[0])
        raise UserError("not again")

    monkeypatch.setattr(runs, "run", run)
    again = run_study(cfg, folder / "out")
    assert tried == ["lost"] and [result for _, result in again.points] == [result for _, result in outcome.points]
    assert again.scorers[("", 0)]["oracle"] == outcome.scorers[("", 0)]["oracle"]
    with pytest.raises(UserError, match="all 6 points failed"):
        run_study(cfg, folder / "elsewhere")
    assert {"oracle", "reward", "stranger"}.isdisjoint(tried)


def test_a_damaged_scorer_is_made_anew_and_another_recipe_is_another_scorer(
    study: tuple[FitConfig, World, Path], outcome: Outcome, tmp_path: Path
) -> None:
    _, world, folder = study
    shutil.copytree(world.store, tmp_path / "store")
    cfg = config(world, folder, f"store={tmp_path / 'store'}")
    plan = plan_study(cfg)
    facts = prepare_shared_inputs(plan, 0).facts
    oracle = scorer(tmp_path / "store", "oracle") / "last"
    before, weights = weights_fingerprint(oracle), oracle / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\1\0")
    runs = {"oracle": plan.scorers["", "oracle"]}
    lying = plan.store, plan.workers
    made = train_scorers("tiny", runs, 0, facts, *lying)
    assert made.model_paths == {"oracle": str(oracle)} and weights_fingerprint(oracle) == before
    other = {"oracle": runs["oracle"].with_values({"objective.beta": 0.7}, ["objective.beta=0.7"])}
    assert train_scorers("tiny", other, 0, facts, *lying).model_paths["oracle"] != str(oracle)
    assert train_scorers("tiny", runs, 0, {**facts, "pairs": "others"}, *lying).model_paths["oracle"] != str(oracle)


# ------------------------------------------------------------------------------------------------ bad input

ORACLE = {"oracle": ["weights=uniform"]}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"scorers": ORACLE, "arms": {"uniform": [], "SePO": ["weights.oracle.path=SCORER.orcale"]}},
            r"arm SePO sets weights\.oracle\.path=SCORER\.orcale, but .* are: oracle; did you mean oracle\?",
        ),
        ({"arms": {"uniform": [], "SePO": ["weights.path=SCORER.a"]}}, r"the scorers in study\.scorers are: none$"),
        (
            {"scorers": ORACLE, "arms": {"uniform": [], "two": ["model.path=SCORER.oracle"]}},
            r"arm two sets model\.path=SCORER\.oracle, but a scorer can only be used for one of these",
        ),
        (
            {"scorers": {"a": ["judge.path=SCORER.b"], "b": []}},
            r"study\.scorers\.a sets judge\.path=SCORER\.b, but scorers",
        ),
        ({"scorers": {"a": ["data.path=elsewhere"]}}, r"study\.scorers\.a sets data\.path"),
        ({"scorers": {"an oracle": []}}, r"study\.scorers has 'an oracle': a scorer's name may only contain letters"),
        ({"sources": ("attention",)}, r"study\.sources lists attention, which is already an arm"),
        ({"sources": ("decay", "decay")}, r"study\.sources lists decay, which is already an arm"),
    ],
)
def test_scorers_that_make_no_sense_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Study(**{"name": "s", "arms": {"uniform": [], "attention": []}, **keys})


def test_an_arm_whose_source_needs_a_scorer_and_has_none_is_named(study: tuple[FitConfig, World, Path]) -> None:
    _, world, folder = study
    cfg = config(world, folder, '+study.arms.bare=["weights=selection"]')
    with pytest.raises(UserError, match=r"study tiny, arm bare: .*weights\.oracle\.path"):
        run_study(cfg, folder / "bare")


def test_a_source_that_is_no_option_is_named(study: tuple[FitConfig, World, Path]) -> None:
    _, world, folder = study
    cfg = world.config("experiment=tiny", "study.sources=[decya]", config_dir=folder / "configs")
    with pytest.raises(UserError, match="decay"):
        run_study(cfg, folder / "none")


# ------------------------------------------------------------------------------------------------ counts


def result(steps: int, pairs: int, seconds: float) -> RunResult:
    spent = {"train": seconds, "all": 2 * seconds}
    return RunResult(0, steps, spent, {}, {"train": {"pairs": pairs}}, {}, None)


def test_weights_made_in_every_step_are_counted_by_the_steps() -> None:
    """48 steps of 16 pairs on 384: twice each. A further forward and backward of both responses each time."""
    arms = [Arm("uniform", ()), Arm("gradient", ())]
    points = [(Point(arm, (), 0), result(48, 384, 7.68)) for arm in arms]
    study = Study("s", {"uniform": [], "gradient": []}, costs=True)
    reads = {("", 0, "uniform"): SourceCost(step_pairs=16), ("", 0, "gradient"): SourceCost(again=2, step_pairs=16)}
    (section,) = cost_sections(Outcome(study, arms, points, [], {}, Path(), 0.0, reads=reads))
    first, second = section.blocks[0].rows  # type: ignore[union-attr]
    assert (second[FORWARDS], second["backwards/pair"]) == (4.0, 4.0)
    assert (first[FORWARDS], first[WEIGHING], first[TRAINING]) == (0.0, None, pytest.approx(10.0))


def test_a_live_reference_is_read_as_often_as_pairs_are_trained_on(study: tuple[FitConfig, World, Path]) -> None:
    _, world, _ = study
    made = result(6, 12, 1.0)  # of four pairs: twice each
    cfgs = (world.config(word) for word in ("reference=live", "reference=cached", "objective=simpo"))
    counts = [
        make_scorer_run(Path(), made, cfg.batch.pairs, cfg.objective.requires, cfg.reference).forwards for cfg in cfgs
    ]
    assert counts == [8.0, 6.0, 4.0]
    assert TrainedScorers().training_seconds is None
