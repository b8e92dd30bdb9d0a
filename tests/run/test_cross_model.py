"""The attention of another model, with the run's vocabulary or its own: settled, refused, told apart, studied."""

import logging
from pathlib import Path

import pytest
import torch
from transformers import CanineTokenizer

from attnpo.config.compose import compose, load, validate
from attnpo.lab.studies.config import FitConfig
from attnpo.lab.studies.plan import plan_study
from attnpo.lab.studies.runner import run_study
from attnpo.lab.studies.shared_inputs import prepare_shared_inputs
from attnpo.lab.testbed.prepare import Testbed
from attnpo.lab.testbed.pretrain import new_model
from attnpo.lab.testbed.tokenizer import build_tokenizer
from attnpo.run.components import BuiltFolders
from attnpo.run.resolve import resolve, resolve_paths
from attnpo.schema import UserError
from tests.run.made import make, make_inputs
from tests.run.worlds import GRAMMAR, RECIPE, World

CARRIED = ("align.method=${other_judge.align}", "objective.length_from=${other_judge.length_from}")
ANOTHER = ("judge=other", "other_judge.template_file=judge/testbed.txt", "other_judge.max_length=512", *CARRIED)
BY_CHARACTERS = ("other_judge.align=characters", "other_judge.length_from=train")


def save_judge(folder: Path, seed: int, merges: int | None = 250) -> Path:
    tokenizer = build_tokenizer(GRAMMAR, merges)
    new_model(RECIPE, tokenizer, seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with another vocabulary than the world's."""
    return save_judge(tmp_path_factory.mktemp("judge"), seed=8)


def tiny_testbed(store: Path) -> list[str]:
    """What makes the second base of the testbed a tiny one."""
    tiny = {"layers": 1, "width": 16, "heads": 2, "mlp": 16, "steps": 2, "max_steps": 2, "judge_rows": 1}
    tiny |= {"answer_rows": 1, "score_rows": 1, "judge_pairs": 2, "judge_gate": 0.0}  # type: ignore[dict-item]
    small = [f"++prepare.second.base.{key}={value}" for key, value in tiny.items()]
    return ["setting=testbed", f"store={store}", *small]


def on_testbed(store: Path, *more: str) -> FitConfig:
    return load("fit", [*tiny_testbed(store), "experiment=none", "judge=other", *more])


@pytest.fixture
def built(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The testbed's own base and pairs are the world's."""
    monkeypatch.setattr(Testbed, "prepare", lambda self, root: BuiltFolders(world.model, world.data, {}, reused=True))


# ---- settling ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("built")
def test_the_testbed_builds_its_second_base_for_the_other_judge(tmp_path: Path) -> None:
    cfg = on_testbed(tmp_path)
    settled, found = resolve_paths(cfg)
    report = found["second"]
    path = Path(settled.judge.path)
    assert path.is_relative_to(tmp_path / "prepared") and (path / "model.safetensors").is_file()
    assert settled.other_judge.path == settled.judge.path and cfg.judge.path is None
    assert report["seed"] == cfg.seed + cfg.prepare.second.seed_offset and not report["reused"]
    again, found = resolve_paths(cfg)
    assert again.judge.path == settled.judge.path and found["second"]["reused"]


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("override", ["judge=testbed", "other_judge.path=FOLDER", "weights=uniform"])
def test_nothing_is_built_for_another_judge_that_is_not_asked_for(tmp_path: Path, override: str) -> None:
    overrides = [] if override.startswith("judge=") else [override]
    cfg = on_testbed(tmp_path, *overrides, "model.path=MODEL", "data.path=PAIRS")
    if not overrides:
        cfg = cfg.with_value("judge.other", False)  # what judge=testbed says
    settled, report = resolve_paths(cfg)
    assert settled == cfg and report == {"reused": True} and not list(tmp_path.iterdir())


@pytest.mark.usefixtures("built")
def test_another_judge_without_a_path_is_refused_before_anything_is_computed(world: World, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"other_judge\.path is null: set other_judge\.path=FOLDER"):
        resolve(world.config("weights=attention", *ANOTHER))
    with pytest.raises(UserError, match=r"prepare\.second is null.* set other_judge\.path"):
        resolve_paths(load("fit", ["setting=testbed", "judge=other", "prepare.second=null", f"store={tmp_path}"]))
    with pytest.raises(UserError, match="a judge other than the run's own model"):
        build_room(world.config("weights=attention").with_value("judge.other", True))


def build_room(cfg: FitConfig) -> None:
    from attnpo.judge.judge import RunJudge

    base = resolve(load("fit", [*cfg.composed.overrides, "weights=uniform"])).base
    RunJudge(cfg.judge, base.spec, base.chat)


def test_a_judge_whose_tokenizer_gives_no_characters_is_refused_before_the_data_are_read(
    world: World, tmp_path: Path
) -> None:
    slow = save_judge(tmp_path / "slow", seed=1)
    for file in slow.glob("token*"):
        file.unlink()
    CanineTokenizer().save_pretrained(slow)
    cfg = world.config("weights=attention", *ANOTHER, f"other_judge.path={slow}", "data.path=/nowhere")
    with pytest.raises(UserError, match=r"judge\.path=.*slow: expected a fast tokenizer.*CanineTokenizer"):
        resolve(cfg)


# ---- tokens ------------------------------------------------------------------------------------------------


def test_weights_of_another_vocabulary_reach_every_training_token(world: World, judge: Path) -> None:
    made = make(world.config("weights=attention", *ANOTHER, *BY_CHARACTERS, f"other_judge.path={judge}"))
    inputs = made.inputs
    own = make_inputs(world.config("weights=attention"))
    assert inputs.weighed.key != own.weighed.key
    for split in ("train", "val"):
        assert len(inputs.examples[split].examples) == len(own.examples[split].examples)
        assert inputs.examples[split].unmatched_tokens == 0
    captured = next(iter(inputs.weighed.captured.values())).rounds[0].chosen
    assert int(captured.token_ids.max()) >= len(made.base.tokenizer)  # ids of the judge, not of the policy


def test_ids_of_two_vocabularies_are_never_matched(world: World, judge: Path) -> None:
    with pytest.raises(UserError, match=r"a different vocabulary.*align\.method=characters"):
        resolve(world.config("weights=attention", *ANOTHER, f"other_judge.path={judge}"))


def test_counting_the_tokens_of_another_vocabulary_is_warned_of_once(
    world: World, judge: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = world.config("weights=attention", *ANOTHER, "other_judge.align=characters", f"other_judge.path={judge}")
    with caplog.at_level(logging.WARNING, logger="attnpo.run.messages"):
        resolve(cfg)
        resolve(cfg)
        resolve(world.config("weights=attention", *ANOTHER, *BY_CHARACTERS, f"other_judge.path={judge}"))
    found = [record.getMessage() for record in caplog.records if "length_from=source" in record.getMessage()]
    assert len(found) == 1 and str(judge) in found[0]


def test_a_judge_of_the_same_vocabulary_is_read_as_the_own_model_is(world: World) -> None:
    """Levenshtein and source lengths, as in the paper; the own model under another name gives its very weights."""
    other = make_inputs(world.config("weights=attention", *ANOTHER, f"other_judge.path={world.model}"))
    own = make_inputs(world.config("weights=attention", "judge.assembly=text"))
    assert other.weighed.captured.keys() == own.weighed.captured.keys()
    for pair, captured in own.weighed.captured.items():
        for one, two in zip(captured.rounds, other.weighed.captured[pair].rounds, strict=True):
            assert torch.equal(one.chosen.weights, two.chosen.weights)


# ---- the study ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["testbed", "llama3_8b_base_sft", "llama3_8b_instruct", "mistral_7b_base_sft"])
def test_the_study_holds_under_every_setting(name: str) -> None:
    given = [f"setting={name}", "experiment=cross_model"]
    cfg = load("fit", given)
    validate(compose("fit", given), complete=cfg.prepare is None)
    arms = cfg.study.arms
    expected = f"align.method={cfg.other_judge.align.value}"
    assert all(expected in arm for label, arm in arms.items() if label.startswith("other judge"))
    validate(compose("fit", [f"setting={name}", "experiment=none", *arms["other judge shuffled"]]), complete=False)


SMALL = """
# @package study
defaults: [cross_model, _self_]
layers: [last]
workers: 1
shared: [reference=cached, callbacks=none, trainer.max_steps=1]
"""


def test_the_study_runs_with_two_vocabularies(world: World, judge: Path, tmp_path: Path) -> None:
    configs = tmp_path / "configs"
    (configs / "experiment").mkdir(parents=True)
    (configs / "experiment" / "small.yaml").write_text(SMALL, encoding="utf-8")
    own = [override for override in world.overrides() if override != "judge=testbed"]  # the arms choose the judge
    more = [
        "experiment=small",
        "seeds=1",
        "grid.lr=[1e-2]",
        "grid.beta=[0.5]",
        f"other_judge.path={judge}",
        *BY_CHARACTERS,
    ]
    asked = ["judge.template_file=judge/testbed.txt", "judge.max_length=512"]
    outcome = run_study(load("fit", [*own, *more, *asked], configs), tmp_path / "study")
    assert not outcome.failed
    names = ["uniform", "attention", "other judge L2", "other judge shuffled"]
    assert [point.arm.name for point, _ in outcome.points] == names
    assert len({result.metrics["val/loss"] for _, result in outcome.points}) == 4


@pytest.mark.usefixtures("built")
def test_a_study_on_the_testbed_settles_its_second_base_while_judging(tmp_path: Path) -> None:
    """An arm's config comes unsettled to the judge pass; the second base is found there."""
    configs = tmp_path / "configs"
    (configs / "experiment").mkdir(parents=True)
    (configs / "experiment" / "small.yaml").write_text(SMALL, encoding="utf-8")
    store = tmp_path / "store"
    words = ("experiment=small", "seeds=1", "data.val_split=test", "trainer.accelerator=cpu", *BY_CHARACTERS)
    basis = prepare_shared_inputs(plan_study(load("fit", [*tiny_testbed(store), *words], configs)), 0)
    assert not basis.lost
    assert basis.depths == {"uniform": 0, "attention": 2, "other judge": 1, "other judge shuffled": 1}
    (second,) = (store / "prepared").glob("base-*")
    assert (second / "model.safetensors").is_file()
    assert basis.keys["other judge"] != basis.keys["attention"] and "judge" in basis.cost
