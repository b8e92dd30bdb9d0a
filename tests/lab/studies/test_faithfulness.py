"""The faithfulness analysis of a study: measured in a tiny world, shown beside points made up by hand."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from attnpo.data.prepare import EncodedSet, select_calibration_pairs
from attnpo.data.prepared import read_pairs
from attnpo.display.page import Image, TableBlock, report_page
from attnpo.lab.studies.faithfulness import EQUAL, ROLLOUT, TRUTH, Faithfulness, decisive_mass
from attnpo.lab.studies.outcome import Outcome
from attnpo.lab.studies.study import Arm, Point, Study, StudyAnalysis
from attnpo.lab.testbed.importance import mark_decisive_tokens
from attnpo.lab.testbed.scoring import TruthScorer
from attnpo.run.inputs import encode_splits
from attnpo.run.resolve import Readers, resolve
from attnpo.run.result import RunResult, TruthScores
from attnpo.schema import PreferencePair, UserError
from attnpo.weights.base import WeightSource
from attnpo.weights.faithfulness import TokenRanking, rank_tokens
from tests.run.worlds import GRAMMAR, World

RULES = Faithfulness(pairs=14, shares=(0.2, 0.4), draws=1)


KNOWN = TruthScorer(grammar=GRAMMAR)


def made(world: World, *overrides: str) -> tuple[WeightSource, Readers, dict[str, EncodedSet]]:
    """The weights of a configuration, what they are read with, and the encoded pairs."""
    cfg, base, readers, _ = resolve(world.config(*overrides))
    return cfg.weights, readers, encode_splits(read_pairs(cfg.data, cfg.weights, base.store), base, cfg.lengths).encoded


@pytest.fixture(scope="module")
def measured(world: World) -> dict[str, Any]:
    source, readers, encoded = made(world, "weights=attention", "weights.layer=1")
    return RULES.measure(source, readers, KNOWN, encoded, world.store)


def test_every_layer_and_every_reference_is_measured(measured: dict[str, Any]) -> None:
    values = measured
    assert isinstance(RULES, StudyAnalysis)
    assert list(values["weights"]) == ["layer 1", "layer 2", ROLLOUT, EQUAL, TRUTH]
    assert values["pairs"] == 14  # 12 training pairs, then validation pairs
    for name, found in values["weights"].items():
        assert found["layer"] == (int(name[-1]) if name.startswith("layer") else None)
        assert {len(row) for mode in ("remove", "keep") for row in found[mode].values()} == {14}
        assert all(math.isfinite(value) for row in found["remove"].values() for value in row)
    assert values["weights"][TRUTH]["mass"] == 1.0
    assert 0 < values["weights"][EQUAL]["mass"] < 0.5
    assert json.loads(json.dumps(values)) == values


def test_the_weights_measured_are_those_that_the_study_trains(world: World) -> None:
    """What a user sets of the weights changes the rows of the layers, and of the rollout where it has the setting."""
    rules = Faithfulness(pairs=4, shares=(0.4,), draws=1)

    def masses(*overrides: str) -> dict[str, float]:
        source, readers, encoded = made(world, *overrides)
        values = rules.measure(source, readers, KNOWN, encoded, world.store)
        return {name: found["mass"] for name, found in values["weights"].items()}

    plain = masses("weights=attention", "weights.layer=1")
    sink = masses("weights=attention", "weights.layer=1", "weights.postprocess.sink_tokens=3")
    heads = masses("weights=attention", "weights.layer=1", "weights.heads=[2]")
    layers = ["layer 1", "layer 2"]
    assert all(sink[name] != plain[name] for name in [*layers, ROLLOUT])
    assert all(heads[name] != plain[name] for name in layers) and heads[ROLLOUT] == plain[ROLLOUT]
    assert all(found[name] == plain[name] for found in (sink, heads) for name in (EQUAL, TRUTH))
    assert masses("weights=uniform") == plain, "attention as it is by default where the weights read no layer"
    source, readers, encoded = made(world, "weights=attention", "weights.layer=2", "weights.postprocess.sink_tokens=3")
    sample = select_calibration_pairs(encoded["train"].pairs, 4)
    weighed = readers.weigh(source, encoded)
    rows = rank_tokens(weighed.source, weighed.captured, weighed.layers)
    assert decisive_mass(sample, rows, GRAMMAR) == sink["layer 2"]


def test_a_setting_without_truth_has_no_mass(world: World) -> None:
    source, readers, encoded = made(world, "weights=attention", "weights.layer=1")
    rules = Faithfulness(pairs=3, shares=(0.2,), draws=1, layers=("last",))
    values = rules.measure(source, readers, None, encoded, Path("."))
    assert list(values["weights"]) == ["layer 2", ROLLOUT, EQUAL]
    assert {found["mass"] for found in values["weights"].values()} == {None}


def test_mass_is_the_share_on_decisive_words() -> None:
    prompt = GRAMMAR.prompts("train")[0]
    topic = prompt.topic
    texts = [f"the {word} was superb ." for word in aspects(topic)[:1]]
    pair = PreferencePair.from_texts([{"role": "user", "content": prompt.text}], texts[0], "we went there yesterday .")
    edges, at = [], 0
    for word in texts[0].split():
        edges.append((at, at + len(word)))
        at += len(word) + 1
    row = TokenRanking(tuple(edges), tuple(4.0 if texts[0][a:b] == "superb" else 1.0 for a, b in edges))
    assert mark_decisive_tokens(pair, "chosen", row.offsets, GRAMMAR) == [texts[0][a:b] == "superb" for a, b in edges]
    nothing = TokenRanking(((0, 2),), (1.0,))
    rows = {pair.pair_id: {"chosen": row, "rejected": nothing}}
    assert decisive_mass([pair], rows, GRAMMAR) == pytest.approx(4 / (4 + len(edges) - 1), abs=1e-4)
    foreign = PreferencePair.from_texts([{"role": "user", "content": "hello"}], texts[0], "no")
    with pytest.raises(UserError, match="truth=null"):
        decisive_mass([foreign], {foreign.pair_id: {"chosen": row, "rejected": nothing}}, GRAMMAR)


def aspects(topic: str) -> tuple[str, ...]:
    from attnpo.lab.testbed import words

    return tuple(words.TOPICS[topic])


# ------------------------------------------------------------------------------------------------ sections


def values(scores: dict[int, float], masses: dict[int, float] | None, pairs: int = 6) -> dict[str, Any]:
    """Plain data of a measurement with these scores by layer."""
    weights = {
        f"layer {layer}": {
            "layer": layer,
            "mass": None if masses is None else masses[layer],
            "fall": {"0.2": score + 0.5, "0.4": score + 0.5},
            "remove": {"0.2": [score - 0.1, score + 0.1] * (pairs // 2), "0.4": [score] * pairs},
            "keep": {"0.2": [0.0] * pairs, "0.4": [0.0] * pairs},
        }
        for layer, score in scores.items()
    }
    counts = {"responses left empty": 2}
    return {"pairs": pairs, "full": 3.0, "counts": counts, "prompts": 99, "seconds": 1.0, "weights": weights}


def outcome(folder: Path, rewards: dict[int, dict[int, list[tuple[float, float]]]]) -> Outcome:
    """Points by seed and layer, each with (KL, test reward) per grid value; the validation reward is the same."""
    arms = {layer: Arm(f"attention L{layer}", (), layer) for found in rewards.values() for layer in found}
    points = []
    for seed, found in rewards.items():
        for layer, grid in found.items():
            for number, (kl, reward) in enumerate(grid):
                scores = TruthScores({"reward": reward, "kl": kl}, [reward] * 3)
                result = RunResult(seed, 1, {}, {}, {}, {}, {"validation": scores, "test": scores})
                points.append((Point(arms[layer], (f"objective.beta={number}",), seed), result))
    study = Study("faithfulness", {"uniform": ["weights=uniform"], "attention": ["weights=attention"]})
    return Outcome(study, list(arms.values()), points, [], {}, folder, 1.0)


def table(sections: list[Any], title: str) -> list[dict[str, Any]]:
    (section,) = [section for section in sections if section.title == title]
    return [dict(row) for block in section.blocks if isinstance(block, TableBlock) for row in block.rows]


def test_scores_truth_and_reward_are_set_side_by_side(tmp_path: Path) -> None:
    scores = {1: 2.0, 2: 1.0, 3: 0.5, 4: -0.2}
    by_place = {
        ("", 0): values(scores, {1: 0.8, 2: 0.3, 3: 0.1, 4: 0.05}),
        ("", 1): values(scores, {1: 0.1, 2: 0.2, 3: 0.5, 4: 0.7}, pairs=8),
    }
    rewards = {
        0: {1: [(1.0, 0.4), (3.0, 0.9)], 2: [(1.0, 0.3)], 3: [(1.0, 0.2)], 4: [(2.0, 0.9)]},  # layer 4: KL too high
        1: {1: [(1.0, 0.1)], 2: [(1.0, 0.2)], 3: [(1.0, 0.3)], 4: [(1.0, 0.4)]},
    }
    rules = Faithfulness(shares=(0.2, 0.4))
    sections = rules.sections(outcome(tmp_path, rewards), by_place)
    over = table(sections, "Faithfulness of token weights")
    assert over[0]["weights"] == "layer 1" and over[0]["without 40 %"].startswith("2.00 [2.00")
    assert [row["score"] for row in over] == [2.0, 1.0, 0.5, -0.2]
    assert over[0]["reward at KL 1"] == "0.250"
    assert over[3]["reward at KL 1"] == "0.400 (1 of 2 seeds)"
    ranks = table(sections, "Rank correlation over layers")
    first, second, mean, spread = ranks
    assert first["faithfulness and true mass"] == pytest.approx(1.0)
    assert second["faithfulness and true mass"] == pytest.approx(-1.0)
    assert first["faithfulness and reward"] == pytest.approx(1.0) and first["with reward"] == 3
    assert second["faithfulness and reward"] == pytest.approx(-1.0)
    assert mean["faithfulness and reward"] == pytest.approx(0.0)
    assert spread["faithfulness and reward"] == pytest.approx(math.sqrt(2))
    assert (first["most faithful"], first["best reward"], second["best reward"]) == (1, 1, 4)
    (image,) = [block for section in sections for block in section.blocks if isinstance(block, Image)]
    assert image.source == tmp_path / "faithfulness.png" and image.source.stat().st_size > 5000
    page = report_page("study", sections)
    assert "responses left empty: 2" in page


def test_worlds_and_settings_without_truth_have_their_own_sections(tmp_path: Path) -> None:
    by_place = {("a b", 0): values({1: 1.0, 2: 0.5}, None), ("c", 0): values({1: 1.0, 2: 0.5}, None)}
    sections = Faithfulness(shares=(0.2, 0.4)).sections(outcome(tmp_path, {0: {}}), by_place)
    assert [section.title for section in sections[::3]] == [f"Faithfulness of token weights, {w}" for w in ("a b", "c")]
    assert "true mass" not in table(sections, "Faithfulness of token weights, c")[0]
    assert len(list(tmp_path.glob("faithfulness-*.png"))) == 2


def test_a_single_layer_is_not_ranked_and_has_no_figure_over_layers(tmp_path: Path) -> None:
    sections = Faithfulness(shares=(0.2, 0.4)).sections(outcome(tmp_path, {0: {}}), {("", 0): values({1: 1.0}, None)})
    assert [section.title for section in sections] == ["Faithfulness of token weights", "Faithfulness by seed"]
    assert not list(tmp_path.glob("*.png"))
