"""Token-weighted implicit-reward accuracy with the weights of a run, against sums over the run's own examples."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM

from attnpo.config import CONFIG_DIR, as_yaml
from attnpo.data.rules import LengthRules
from attnpo.evaluation.base import Measure, Subject
from attnpo.evaluation.pair_set import UnseenPairs
from attnpo.models.loading import load_tokenizer
from attnpo.models.spec import ModelSpec
from attnpo.runs.implicit_reward import WeightedImplicitReward
from attnpo.runs.inputs import make_inputs
from attnpo.schema import EncodedResponse, UserError
from attnpo.testbed.pretrain import new_model
from attnpo.testbed.tokenizer import build_tokenizer
from attnpo.text.chat import ChatFormat
from tests.runs.worlds import GRAMMAR, RECIPE, World, build_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    made = build_world(tmp_path_factory.mktemp("world"))
    policy = made.model.parent / "policy"
    new_model(RECIPE, build_tokenizer(GRAMMAR), seed=9).save_pretrained(policy)
    build_tokenizer(GRAMMAR).save_pretrained(policy)
    return made


def run_folder(world: World, folder: Path, *overrides: str) -> Path:
    """The folder of a run as far as its weights are concerned: its configuration."""
    folder.mkdir()
    (folder / "config.yaml").write_text(as_yaml(world.config("experiment=none", *overrides).values), encoding="utf-8")
    return folder


def subject(world: World, folder: Path) -> Subject:
    policy = world.model.parent / "policy"
    return Subject(ModelSpec(str(policy)), ChatFormat(load_tokenizer(policy)), torch.device("cpu"), folder)


def measure(world: World, run: Path, split: str = "test") -> WeightedImplicitReward:
    return WeightedImplicitReward(UnseenPairs(str(world.data), split=split), str(world.model), run=str(run))


@pytest.mark.parametrize("scale", ["true", "false"])
def test_the_weighted_reward_is_that_of_the_objective(world: World, tmp_path: Path, scale: str) -> None:
    """The run's validation pairs as unseen ones: their weights stand in its examples, the sums are taken here."""
    run = run_folder(world, tmp_path / "run", "weights.layer=1", f"objective.length_scale={scale}")
    asked = measure(world, run)
    assert isinstance(asked, Measure)
    found = asked.measure(subject(world, tmp_path))
    inputs = make_inputs(world.config("experiment=none", "weights.layer=1"))
    models = [AutoModelForCausalLM.from_pretrained(world.model.parent / name) for name in ("policy", "model")]

    def logps(model: torch.nn.Module, side: EncodedResponse) -> torch.Tensor:
        ids = torch.tensor([[*side.prompt_ids, *side.response_ids]])
        with torch.no_grad():
            every = model(ids).logits[0, :-1].double().log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        return every[len(side.prompt_ids) - 1 :]

    right, plain = [], []
    for example in inputs.examples["val"].examples:
        rewards = []
        for side, weights, length in zip(example.sides, example.weights, example.lengths, strict=True):
            ratios = logps(models[0], side) - logps(models[1], side)
            factors = weights.double() * (length if scale == "true" else 1.0)
            rewards.append((float((factors * ratios).sum()), float(ratios.sum())))
        right.append(rewards[0][0] > rewards[1][0])
        plain.append(rewards[0][1] > rewards[1][1])
    figures = {score.name: score.mean for score in found.scores}
    assert figures["accuracy_weighted"] == pytest.approx(np.mean(right))
    assert figures["accuracy"] == pytest.approx(np.mean(plain))
    assert tuple(figures) == asked.scores and asked.scores[0] == "accuracy_weighted"
    assert figures["gain_weighted"] == pytest.approx(figures["accuracy_weighted"] - figures["reference_alone"])


def test_weights_and_plain_sums_differ_in_what_they_order(world: World, tmp_path: Path) -> None:
    """On the training split, so that the test above is not one of equal figures."""
    run = run_folder(world, tmp_path / "run", "weights.layer=1")
    found = measure(world, run, "train").measure(subject(world, tmp_path))
    rewards = {score.name: score for score in found.scores}
    assert rewards["accuracy_weighted"].questions == rewards["accuracy"].questions == 12


def test_versions_follow_the_run(world: World, tmp_path: Path) -> None:
    one = measure(world, run_folder(world, tmp_path / "one", "weights.layer=1"))
    two = measure(world, run_folder(world, tmp_path / "two", "weights.layer=2"))
    assert one.versions() != two.versions()
    assert replace(one, lengths=LengthRules(100, 50)).versions() == one.versions()  # the run's lengths hold
    json.dumps(one.versions())


def test_what_is_no_run_with_weights_is_refused(world: World, tmp_path: Path) -> None:
    good = run_folder(world, tmp_path / "good", "weights.layer=1")
    plain = run_folder(world, tmp_path / "plain", "objective=dpo", "weights=uniform")
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "config.yaml").write_text("[1, 2]\n", encoding="utf-8")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "config.yaml").write_text("a: [1, 2\n", encoding="utf-8")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.yaml").write_text("a: 1\n", encoding="utf-8")
    here = subject(world, tmp_path)
    for run, message in (
        (Path("???"), r"benchmark\.run: required"),
        (tmp_path / "gone", "no run lies there"),
        (tmp_path / "list", "it holds a list"),
        (tmp_path / "torn", "is no configuration: "),
        (tmp_path / "other", "is no configuration of this version"),
        (plain, r"its objective leaves no token weights"),
    ):
        with pytest.raises(UserError, match=message):
            measure(world, run).measure(here)
    with pytest.raises(UserError, match="there is no log-ratio to weigh"):
        replace(measure(world, good), reference=None).measure(here)


def test_the_config_is_the_plain_one_with_a_run() -> None:
    plain, weighted = (
        OmegaConf.load(CONFIG_DIR / "benchmark" / f"{name}.yaml")
        for name in ("implicit_reward", "implicit_reward_weighted")
    )
    assert weighted.defaults == ["implicit_reward", "_self_"]
    assert OmegaConf.missing_keys(weighted) == {"run"} and OmegaConf.missing_keys(plain) == {"reference", "data.path"}
