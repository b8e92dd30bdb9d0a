"""Implicit-reward accuracy against a plain computation with transformers, RewardBench's arithmetic, and bad input."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from pandas import DataFrame
from transformers import AutoModelForCausalLM, AutoTokenizer

from attnpo.config.compose import CONFIG_DIR, instantiate
from attnpo.data.rules import LengthRules, OverlongAction
from attnpo.evaluation.base import EvaluatedModel, UngradedBenchmark, UngradedResult
from attnpo.evaluation.implicit_reward import (
    SECTION_OF,
    SECTIONS,
    ImplicitReward,
    RankingAccuracy,
    Ties,
    UnseenPairs,
    accuracy_interval,
)
from attnpo.lab.testbed.pretrain import new_model
from attnpo.lab.testbed.tokenizer import build_tokenizer
from attnpo.models.loading import load_tokenizer
from attnpo.models.spec import ModelSpec
from attnpo.schema import UserError
from attnpo.text.chat import ChatFormat
from tests.run.worlds import GRAMMAR, RECIPE, World, build_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A world with twelve training pairs, a policy, and the reference ``other`` with other weights."""
    made = build_world(tmp_path_factory.mktemp("world"))
    tokenizer = build_tokenizer(GRAMMAR)
    new_model(RECIPE, tokenizer, seed=4).save_pretrained(made.model.parent / "other")
    tokenizer.save_pretrained(made.model.parent / "other")
    return made


def subject_of(model: Path, folder: Path, template: str | None = None) -> EvaluatedModel:
    spec = ModelSpec(str(model), chat_template=template)
    return EvaluatedModel(spec, ChatFormat(load_tokenizer(model), template), torch.device("cpu"), folder)


def measure(
    world: World, folder: Path, reference: Path | None, data: UnseenPairs | None = None, **more: Any
) -> UngradedResult:
    lengths = more.pop("lengths", LengthRules(256, 128))
    pairs = data or UnseenPairs(str(world.data), split="train")
    asked = ImplicitReward(pairs, None if reference is None else str(reference), lengths=lengths, **more)
    assert isinstance(asked, UngradedBenchmark)
    return asked.measure(subject_of(world.model, folder))


def figures(measured: UngradedResult) -> dict[str, float]:
    return {score.name: score.mean for score in measured.scores}


@cache
def loaded(folder: Path) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def plain_ids(folder: Path, row: Mapping[str, Any], side: str) -> tuple[int, list[int]]:
    """Tokens of the prompt, and the ids of prompt and response up to the end of the turn."""
    tokenizer = loaded(folder)[1]
    answer = row[side][-1:] if isinstance(row[side], list) else [{"role": "assistant", "content": row[side]}]
    prompt = row[side][:-1] if isinstance(row[side], list) else [{"role": "user", "content": row["prompt"]}]
    texts = (
        tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False),
        tokenizer.apply_chat_template([*prompt, *answer], tokenize=False),
    )
    before, whole = (tokenizer(text, add_special_tokens=False).input_ids for text in texts)
    while whole[-1] not in tokenizer.all_special_ids:
        whole = whole[:-1]
    return len(before), whole


def plain_logps(folder: Path, row: Mapping[str, Any], side: str) -> tuple[float, int]:
    """Summed log-probability of a response and its tokens, with nothing of ours: one sequence, log_softmax, gather."""
    before, whole = plain_ids(folder, row, side)
    ids = torch.tensor([whole])
    with torch.no_grad():
        logps = loaded(folder)[0](ids).logits[0, :-1].double().log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    response = logps[before - 1 :]
    return float(response.sum()), len(response)


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def rows_of(world: World) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (world.data / "train.jsonl").read_text(encoding="utf-8").splitlines()]


# ------------------------------------------------------------------------------------------------ the numbers


def test_accuracies_are_those_of_a_plain_computation(world: World, tmp_path: Path) -> None:
    other = world.model.parent / "other"
    found = figures(measure(world, tmp_path, other))
    expected: dict[str, list[bool]] = {}
    for row in rows_of(world):
        sides = {
            (which, side): plain_logps(folder, row, side)
            for which, folder in (("policy", world.model), ("reference", other))
            for side in ("chosen", "rejected")
        }
        total = {key: value for key, (value, _) in sides.items()}
        mean = {key: value / count for key, (value, count) in sides.items()}
        for end, numbers in (("", total), ("_normalised", mean)):
            ratio = {side: numbers["policy", side] - numbers["reference", side] for side in ("chosen", "rejected")}
            expected.setdefault(f"accuracy{end}", []).append(ratio["chosen"] > ratio["rejected"])
            for which in ("policy", "reference"):
                right = numbers[which, "chosen"] > numbers[which, "rejected"]
                expected.setdefault(f"{which}_alone{end}", []).append(right)
    for name, right in expected.items():
        assert found[name] == pytest.approx(np.mean(right)), name
    assert len(set(found.values())) > 3  # the figures tell these rewards apart
    assert found["gain"] == pytest.approx(found["accuracy"] - found["reference_alone"])
    assert tuple(found) == ImplicitReward(UnseenPairs(""), "x").scores


def test_the_same_weights_are_ties_and_said_to_be(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        measured = measure(world, tmp_path, world.model)
    assert figures(measured)["accuracy"] == 0.5 and figures(measured)["accuracy_normalised"] == 0.5
    assert measured.scores[0].interval is None
    assert "has the same weights as model.path" in caplog.text
    assert measured.counts["ties in accuracy, counted as half"] == 12
    assert figures(measure(world, tmp_path, world.model, ties=Ties.WRONG))["accuracy"] == 0.0


def test_without_a_reference_log_pi_orders_alone(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        alone = figures(measure(world, tmp_path, None))
    with_one = figures(measure(world, tmp_path, world.model.parent / "other"))
    assert alone == {name: with_one[name] for name in ("policy_alone", "policy_alone_normalised")}
    assert "log pi alone, which is not DPO's reward" in caplog.text


def test_subsets_repeated_rows_and_dropped_rows_are_accounted_for(world: World, tmp_path: Path) -> None:
    rows = rows_of(world)[:4]
    rows = [{**row, "subset": name} for row, name in zip(rows, ("b", "a", "b", None), strict=True)]
    rows += [rows[0], {**rows[1], "rejected": rows[1]["chosen"]}]
    path = write(tmp_path / "pairs.jsonl", rows)
    other = world.model.parent / "other"
    measured = measure(world, tmp_path, other, UnseenPairs(str(path)))
    single = [figures(measure(world, tmp_path, other, UnseenPairs(str(path), rows=f"{n}:{n + 1}"))) for n in range(4)]
    right = [found["accuracy"] for found in single]
    assert [row["subset"] for row in measured.table] == ["a", "b"]
    assert [row["pairs"] for row in measured.table] == [1, 3]
    assert [row["accuracy"] for row in measured.table] == [right[1], pytest.approx((2 * right[0] + right[2]) / 3)]
    assert figures(measured)["accuracy"] == pytest.approx((2 * right[0] + right[1] + right[2] + right[3]) / 5)
    assert measured.counts["pairs without a subset"] == 1
    assert measured.counts["duplicate pair kept"] == 1 and measured.counts["identical responses"] == 1
    assert measured.scores[0].questions == 5


def test_cut_pairs_are_counted(world: World, tmp_path: Path) -> None:
    other = world.model.parent / "other"
    measured = measure(world, tmp_path, other, lengths=LengthRules(24, 16))
    assert any(reason.startswith("cut: chosen response") for reason in measured.counts)
    with pytest.raises(UserError, match=r"implicit reward: none of the 12 pairs .* benchmark\.lengths\.max_length"):
        measure(world, tmp_path, other, lengths=LengthRules(2, 1, overlong=OverlongAction.DROP))


def test_versions_follow_pairs_reference_and_rules(world: World, tmp_path: Path) -> None:
    other = world.model.parent / "other"
    base = ImplicitReward(UnseenPairs(str(world.data), split="train"), str(other))
    seen = [base.fingerprint()]
    for changed in (
        replace(base, reference=str(world.model)),
        replace(base, reference=None),
        replace(base, ties=Ties.WRONG),
        replace(base, lengths=LengthRules(100, 50)),
        replace(base, data=replace(base.data, rows="3")),
    ):
        assert changed.fingerprint() not in seen
        seen.append(changed.fingerprint())
    assert base.fingerprint() == seen[0]
    json.dumps(seen)


# ------------------------------------------------------------------------------------------------ RewardBench's sums


def test_sections_are_weighted_as_reward_bench_does() -> None:
    """Against ``calculate_scores_per_section``: counts of its EXAMPLE_COUNTS, four sections alike."""
    rng = np.random.default_rng(5)
    groups = [subset for subset in SECTION_OF for _ in range(rng.integers(2, 9))]
    gaps = rng.normal(size=len(groups))
    found = {score.name: score for score in RankingAccuracy(DataFrame({"accuracy": gaps}), groups).scores()}
    accuracy = {
        name: np.mean([gap > 0 for gap, g in zip(gaps, groups, strict=True) if g == name]) for name in SECTION_OF
    }
    sections = []
    for section, counts in SECTIONS.items():
        total = sum(accuracy[name] * count for name, count in counts.items())
        sections.append(total / sum(counts.values()))
        assert found[f"rewardbench_{section}"].mean == pytest.approx(sections[-1])
    assert found["rewardbench"].mean == pytest.approx(np.mean(sections))
    assert sum(sum(counts.values()) for counts in SECTIONS.values()) == 2985 + (984 - 447)  # pairs of the data set


def test_the_interval_of_a_section_is_that_of_its_strata() -> None:
    """That of a stratified mean: its standard error is sqrt(sum_k s_k^2 var_k / n_k). Shares are far from the sizes."""
    rng = np.random.default_rng(2)
    sizes = dict(zip(SECTIONS["reasoning"], (400, 60, 60, 60, 60, 60, 60), strict=True))
    groups = [name for name, size in sizes.items() for _ in range(size)]
    gaps = np.concatenate([rng.random(size) - 0.2 * k / 2 for k, size in enumerate(sizes.values())])
    orders = RankingAccuracy(DataFrame({"accuracy": gaps}), groups)
    score = next(score for score in orders.scores() if score.name == "rewardbench_reasoning")
    right, total, error = (gaps > 0).astype(float), sum(SECTIONS["reasoning"].values()), 0.0
    for name, size in sizes.items():
        part = right[[group == name for group in groups]]
        error += (SECTIONS["reasoning"][name] / total) ** 2 * part.var(ddof=1) / size
    assert score.interval is not None
    half = (score.interval[1] - score.interval[0]) / 2
    assert half == pytest.approx(1.96 * error**0.5, rel=0.08)
    assert orders.counts() == {"RewardBench subsets without pairs": 16}


def test_ties_and_rewards_that_are_missing() -> None:
    orders = RankingAccuracy(DataFrame({"accuracy": [1.0, 0.0, -1.0, np.nan]}), [None] * 4)
    assert orders.scores()[0].mean == pytest.approx(0.5) and orders.scores()[0].questions == 3
    assert orders.counts() == {"ties in accuracy, counted as half": 1}
    assert replace(orders, ties=Ties.WRONG).scores()[0].mean == pytest.approx(1 / 3)
    assert accuracy_interval(np.ones(9)) is None and accuracy_interval(np.zeros(0)) is None
    bounds = accuracy_interval(np.array([0.0, 1.0] * 200))
    assert bounds is not None and bounds[1] - bounds[0] == pytest.approx(2 * 1.96 * 0.5 / 20, rel=0.08)


# ------------------------------------------------------------------------------------------------ bad input


def test_what_the_user_can_mend_is_said(world: World, tmp_path: Path) -> None:
    other = world.model.parent / "other"
    fits = LengthRules(256, 128)
    for message, data, reference, lengths in (
        (r"data\.path=nowhere/x\.jsonl: no such file", UnseenPairs("nowhere/x.jsonl"), other, fits),
        (r"data\.split=gone", UnseenPairs(str(world.data), split="gone"), other, fits),
        (r"data\.rows=\"99:\" selects no rows", UnseenPairs(str(world.data), rows="99:"), other, fits),
        (r"lengths\.max_length=99999 is too long: .* positions; set", None, other, LengthRules(99999, 100)),
        (r"reference is required", None, Path("auto"), LengthRules()),
    ):
        with pytest.raises(UserError, match=r"benchmark\." + message):
            measure(world, tmp_path, reference, data, lengths=lengths)
    write(tmp_path / "bad.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "b"}])
    with pytest.raises(UserError, match=r"benchmark\.data\.path=.*has no usable pairs: .*identical responses"):
        measure(world, tmp_path, other, UnseenPairs(str(tmp_path / "bad.jsonl")))


def test_a_reference_of_another_vocabulary_is_refused(world: World, tmp_path: Path, babbler: Path) -> None:
    with pytest.raises(UserError, match=rf"benchmark\.reference=.*{babbler.name} has a different vocabulary from"):
        measure(world, tmp_path, babbler)


def test_a_broken_model_is_named(world: World, tmp_path: Path) -> None:
    broken = new_model(RECIPE, build_tokenizer(GRAMMAR), seed=5)
    broken.model.norm.weight.data.fill_(float("nan"))
    broken.save_pretrained(tmp_path / "broken")
    build_tokenizer(GRAMMAR).save_pretrained(tmp_path / "broken")
    with pytest.raises(UserError, match=r"the reference .*broken returns non-finite log-probabilities for 12 of"):
        measure(world, tmp_path, tmp_path / "broken")


def test_the_config_takes_pairs_and_reference_from_the_run() -> None:
    node = OmegaConf.load(CONFIG_DIR / "benchmark" / "implicit_reward.yaml")
    assert instantiate(node) == ImplicitReward(UnseenPairs("auto"), "auto")
    node.reference, node.data.path = None, "x.jsonl"
    assert instantiate(node) == ImplicitReward(UnseenPairs("x.jsonl"), None)
