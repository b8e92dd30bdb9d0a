"""Token-weighted implicit-reward accuracy with the weights of a run, against sums over the run's own examples."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM

from attnpo.config.compose import CONFIG_DIR, load, to_yaml
from attnpo.data.rules import LengthRules
from attnpo.evaluate import main
from attnpo.evaluation.base import EvaluatedModel, UngradedBenchmark
from attnpo.evaluation.implicit_reward import UnseenPairs, WeightedImplicitReward
from attnpo.lab.testbed.pretrain import new_model
from attnpo.lab.testbed.tokenizer import build_tokenizer
from attnpo.models.loading import load_tokenizer
from attnpo.models.spec import ModelSpec
from attnpo.run.folders import load_saved_config
from attnpo.run.run import run as make_run
from attnpo.schema import EncodedResponse, UserError
from attnpo.text.chat import ChatFormat
from tests.run.made import make_inputs
from tests.run.worlds import GRAMMAR, RECIPE, World, build_world


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
    (folder / "config.yaml").write_text(to_yaml(world.config("experiment=none", *overrides).values), encoding="utf-8")
    return folder


def subject(world: World, folder: Path) -> EvaluatedModel:
    policy = world.model.parent / "policy"
    return EvaluatedModel(ModelSpec(str(policy)), ChatFormat(load_tokenizer(policy)), torch.device("cpu"), folder)


def measure(world: World, run: Path, split: str = "test") -> WeightedImplicitReward:
    return WeightedImplicitReward(UnseenPairs(str(world.data), split=split), str(world.model), run=str(run))


@pytest.mark.parametrize("scale", ["true", "false"])
def test_the_weighted_reward_is_that_of_the_objective(world: World, tmp_path: Path, scale: str) -> None:
    """The run's validation pairs as unseen ones: their weights stand in its examples, the sums are taken here."""
    run = run_folder(world, tmp_path / "run", "weights.layer=1", f"objective.length_scale={scale}")
    asked = measure(world, run)
    assert isinstance(asked, UngradedBenchmark)
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


def test_versions_follow_the_run(world: World, tmp_path: Path) -> None:
    one = measure(world, run_folder(world, tmp_path / "one", "weights.layer=1"))
    two = measure(world, run_folder(world, tmp_path / "two", "weights.layer=2"))
    assert one.fingerprint() != two.fingerprint()
    assert replace(one, lengths=LengthRules(100, 50)).fingerprint() == one.fingerprint()  # the run's lengths hold
    json.dumps(one.fingerprint())


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
        (Path("auto"), r"benchmark\.run is required"),
        (tmp_path / "gone", "this is not a run folder"),
        (tmp_path / "list", "expected a mapping, got a list"),
        (tmp_path / "torn", "is not a valid config: "),
        (tmp_path / "other", "is not a valid config for this version"),
        (plain, r"has no token weights to reuse, because of its objective"),
    ):
        with pytest.raises(UserError, match=message):
            measure(world, run).measure(here)
    with pytest.raises(UserError, match="leaves no log-ratio to weight"):
        replace(measure(world, good), reference=None).measure(here)


def test_the_config_is_the_plain_one_with_a_run() -> None:
    plain, weighted = (
        OmegaConf.load(CONFIG_DIR / "benchmark" / f"{name}.yaml")
        for name in ("implicit_reward", "implicit_reward_weighted")
    )
    assert weighted.defaults == ["implicit_reward", "_self_"]
    assert weighted.run == plain.reference == plain.data.path == "auto"


@pytest.fixture(scope="module")
def trained_run(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a run's folder."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    of_run = ["data.val_split=null", "data.val_share=0.5", "lengths.max_length=30", "lengths.max_prompt_length=14"]
    make_run(world.config(*of_run, "weights.layer=1", "callbacks.samples=0", "callbacks.report=false"), folder)
    return folder


@pytest.mark.parametrize("name", ["implicit_reward", "implicit_reward_weighted"])
def test_what_is_not_given_is_taken_from_the_run_that_trained_the_model(
    world: World, trained_run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Its start, its validation pairs (here a share of one split) and its lengths; what is given holds."""

    def scores(place: str, *more: str) -> tuple[dict[str, Any], dict[str, Any]]:
        words = [f"benchmark={name}", f"model.path={trained_run / 'best'}", f"output={tmp_path / place}", *more]
        assert main(load("evaluate", [*words, "trainer.accelerator=cpu"])) == 0
        found = json.loads((tmp_path / place / "evaluation.json").read_text())
        return found["scores"], found["key"]["benchmark"]

    with caplog.at_level("INFO", "attnpo"):
        taken, key = scores("taken")
    said = [
        record.getMessage() for record in caplog.records if "uses these settings from the run" in record.getMessage()
    ]
    assert len(said) == 1 and f"reference {world.model}; validation pairs of {world.data}; lengths max_le" in said[0]
    assert key["lengths"] == {"max_length": 30, "max_prompt_length": 14, "overlong": "drop", "keep": "start"}
    validation = write_jsonl_of(load_rows(world, trained_run), tmp_path / "val.jsonl")
    given, same = scores(
        "given",
        f"benchmark.reference={world.model}",
        f"benchmark.data.path={validation}",
        "benchmark.lengths.keep=start",
    )
    assert taken == given and (key["pairs"], key["reference"]) == (same["pairs"], same["reference"])
    shorter = ["benchmark.lengths.max_length=29", "benchmark.lengths.max_prompt_length=14"]
    other = scores("other", *shorter, f"benchmark.reference={trained_run / 'last'}")[1]
    longest = 29 if name == "implicit_reward" else 30  # token weights are on tokens that the run's lengths cut
    assert other["lengths"] == {**key["lengths"], "max_length": longest} and other["reference"] != key["reference"]


def load_rows(world: World, folder: Path) -> list[dict[str, Any]]:
    """Reads the rows of the run's validation pairs."""
    pairs = load_saved_config(folder, "run").data.load("val").pairs
    rows = map(json.loads, (world.data / "train.jsonl").read_text(encoding="utf-8").splitlines())
    chosen = {(str(pair.prompt[0]["content"]), pair.chosen) for pair in pairs}
    return [row for row in rows if (row["prompt"], row["chosen"][-1]["content"]) in chosen]


def write_jsonl_of(rows: list[dict[str, Any]], path: Path) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_what_cannot_be_taken_is_asked_for(world: World, tmp_path: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"benchmark\.data\.path is required in a study, and if the model is not a run's best/ or last/",
    ):
        main(load("evaluate", ["benchmark=implicit_reward", f"model.path={world.model}", f"output={tmp_path}"]))
