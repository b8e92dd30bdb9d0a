"""``weights.layer=auto`` in a tiny world: found once, stored, deeper of equal ones, refused where it is not read."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from attnpo.data.prepare import EncodedSet, select_calibration_pairs
from attnpo.data.prepared import read_pairs
from attnpo.judge.layers import resolve_layer
from attnpo.lab.auto_layer import LayerChoice, best_layer, standard_error
from attnpo.lab.measures import AutoLayer
from attnpo.run.combinations import CHOICE, needs_layer_search
from attnpo.run.inputs import encode_splits
from attnpo.run.resolve import Readers, ResolvedRun, resolve
from attnpo.run.run import run
from attnpo.schema import UserError
from attnpo.weights.sources.attention import Attention
from tests.run.worlds import World, build_world, judge_loads

Made = tuple[World, ResolvedRun[Any], EncodedSet]
QUICK = AutoLayer(pairs=4, shares=(0.2,), draws=1)


@dataclass(frozen=True)
class Asked:
    """Weights whose layer is to be found, by some rules, with what they are read with on which pairs."""

    rules: AutoLayer
    source: Attention
    readers: Readers
    train: EncodedSet

    def settle(self) -> tuple[Attention, Mapping[str, Any] | None]:
        return self.rules.resolve_layer(self.source, self.readers, self.train)

    def record(self) -> Mapping[str, Any]:
        """What is recorded of the layer that is found."""
        record = self.settle()[1]
        assert record is not None
        return record


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    world = build_world(tmp_path_factory.mktemp("world"))
    found = resolve(world.config("weights=attention", "weights.layer=1"))
    pairs = read_pairs(found.cfg.data, found.cfg.weights, found.base.store)
    return world, found, encode_splits(pairs, found.base, found.cfg.lengths).encoded["train"]


def asking(made: Made, store: Path, **changes: Any) -> Asked:
    """The world's weights with an own store and ``weights.layer=auto``."""
    _, found, train = made
    base = replace(found.base, store=type(found.base.store)(store))
    source = replace(found.cfg.weights, layer="auto")
    return Asked(replace(QUICK, **changes), source, replace(found.readers, base=base), train)


def test_the_layer_is_found_once_and_recorded(made: Made, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    asked = asking(made, tmp_path)
    with judge_loads() as loads:
        found, record = asked.settle()
        assert loads
        layer = found.layer
        assert layer in (1, 2) and asked.source.layer == "auto"
        loads.clear()
        again, repeated = asking(made, tmp_path).settle()
        assert not loads
    assert again.layer == layer and record is not None
    assert set(record["scores"]) == {"1", "2"}
    assert record["layer"] == layer == int(max(record["scores"], key=record["scores"].__getitem__))
    assert (record["pairs"], record["left_out"]) == (4, 0) and record["emptied"] >= 0
    assert set(record["errors"]) == {"1", "2"} - {str(layer)} and record["error"] > 0
    (stored,) = (tmp_path / CHOICE).glob("*.json")
    assert json.loads(stored.read_text(encoding="utf-8"))["scores"] == record["scores"]
    lines = [line for line in caplog.messages if f"auto selected layer {layer} of 2" in line]
    assert len(lines) == 2 and "from the store" in lines[1]
    assert repeated == record


def test_four_pairs_are_too_few_and_every_run_warns(
    made: Made, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Judge of random weights: no layer matters. The record holds the warning, also when it comes from the store."""
    record = asking(made, tmp_path).record()
    warned = [line.getMessage() for line in caplog.records if line.levelno == logging.WARNING]
    said = [line for line in warned if line.startswith("weights.layer=auto: ")]
    assert said == [f"weights.layer=auto: {doubt}" for doubt in record["doubts"]]
    assert "the sample of 4 pairs is too small to tell layers 1 and 2 apart" in "".join(said)
    assert said[-1].endswith("increase auto_layer.pairs")
    caplog.clear()
    asking(made, tmp_path).settle()
    assert [line.getMessage() for line in caplog.records if line.levelno == logging.WARNING] == said


def choice(scores: dict[int, float], error: float | None, errors: dict[int, float | None], **more: Any) -> LayerChoice:
    values = {"full": 2.0, "pairs": 60, "left_out": 4, "emptied": 0, "prompts": 9, "seconds": 1.0} | more
    return LayerChoice(best_layer(scores), scores, error, errors, rules=AutoLayer(pairs=64), **values)


@pytest.mark.parametrize(
    ("scores", "error", "errors", "said"),
    [
        ({1: 0.1, 2: 0.9, 3: 0.5}, 0.2, {1: 0.3, 3: 0.1}, []),
        ({1: 0.1, 2: 0.9, 3: 0.5}, 0.2, {1: 0.3, 3: 0.2}, ["layers 2 and 3 apart"]),
        ({1: 0.1, 2: 0.9, 3: 0.5}, 0.2, {1: 0.4, 3: 0.2}, ["layers 1, 2 and 3 apart"]),
        ({1: 0.1, 2: 0.9, 3: 0.5}, 0.45, {1: 0.3, 3: 0.1}, ["is too small to tell layer 2 apart from random tokens"]),
        ({1: -0.4, 2: -0.3}, 0.01, {1: 0.01}, ["is too small to tell layer 2 apart from random tokens"]),
        ({1: 0.5, 2: 0.5}, 0.1, {1: 0.0}, ["layers 1 and 2 apart"]),
        ({1: 0.5, 2: 0.9}, None, {1: None}, ["layer 2 apart from random tokens", "layers 1 and 2 apart"]),
        ({1: 0.5}, 0.1, {}, []),
    ],
)
def test_a_lead_of_two_standard_errors_or_less_is_doubted(
    scores: dict[int, float], error: float | None, errors: dict[int, float | None], said: list[str]
) -> None:
    doubts = choice(scores, error, errors).caveats()
    assert len(doubts) == len(said)
    for doubt, words in zip(doubts, said, strict=True):
        assert words in doubt and doubt.startswith("the sample of 60 pairs is too small to tell")
        assert doubt.endswith(": increase auto_layer.pairs")


def test_no_more_pairs_are_asked_for_than_there_are() -> None:
    (doubt,) = choice({1: 0.1, 2: 0.2}, 0.05, {1: 0.1}, pairs=12, left_out=0).caveats()
    assert doubt.endswith("there are no more training pairs, so set weights.layer to a number")


def test_the_standard_error_is_that_of_a_mean() -> None:
    assert standard_error([1.0, 2.0, 3.0, 6.0]) == pytest.approx(1.080123)  # sqrt(14 / 3) / 2
    assert standard_error([1.0]) is None and standard_error([]) is None


def test_the_rules_are_those_of_the_configuration_or_none(made: Made) -> None:
    with pytest.raises(UserError, match=r"^auto_layer: required"):
        made[0].config("weights=attention", "weights.layer=auto", "~auto_layer")


def test_other_rules_are_another_choice(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so are rows that are captured another way."""
    first = asking(made, tmp_path).record()
    second = asking(made, tmp_path, pairs=6).record()
    sink = asking(made, tmp_path)
    without = replace(sink.source, postprocess=replace(sink.source.postprocess, sink_tokens=0))
    replace(sink, source=without).settle()
    monkeypatch.setattr("attnpo.lab.auto_layer.CAPTURE_VERSION", "a later one")
    asking(made, tmp_path).settle()
    assert len(list((tmp_path / CHOICE).glob("*.json"))) == 4
    assert (first["pairs"], second["pairs"]) == (4, 6)


def test_several_processes_do_not_each_look_for_it(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="2 processes"):
        asking(made, tmp_path).settle()
    monkeypatch.delenv("WORLD_SIZE")
    alone, _ = asking(made, tmp_path).settle()
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert asking(made, tmp_path).settle()[0].layer == alone.layer


def test_a_number_and_weights_without_layers_are_left_alone(made: Made) -> None:
    world, found, train = made
    source = found.cfg.weights
    settled, record = found.cfg.auto_layer.resolve_layer(source, found.readers, train)
    assert settled is source and record is None
    assert not needs_layer_search(world.config("weights=uniform").weights)


def test_several_layers_and_auto_contradict_each_other(made: Made) -> None:
    cfg = made[1].cfg.with_value("weights.layer", "auto").with_value("weights.layers", (1, 2))
    with pytest.raises(UserError, match=r"weights\.layer=auto searches for one layer.*\[1, 2\]"):
        needs_layer_search(cfg.weights)


def test_of_equal_layers_the_deepest_is_taken() -> None:
    assert best_layer({1: 0.5, 2: 0.7, 3: 0.7, 4: -1.0}) == 3


def test_the_sample_does_not_depend_on_the_order_of_a_file(made: Made) -> None:
    pairs = made[2].pairs
    sample = select_calibration_pairs(pairs, 5)
    assert sample == select_calibration_pairs([*pairs[::-1], *pairs], 5)
    assert [pair.pair_id for pair in sample] == sorted(pair.pair_id for pair in pairs)[:5]


@pytest.mark.parametrize("wrong", [{"pairs": 0}, {"draws": 0}, {"shares": ()}, {"shares": (0.0,)}])
def test_rules_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="auto_layer"):
        AutoLayer(**wrong)


def test_a_run_with_auto_is_the_run_of_the_layer_found(tmp_path: Path) -> None:
    world = build_world(tmp_path)
    quick = ["weights=attention", "auto_layer.pairs=4", "auto_layer.draws=1", "callbacks=none", "trainer.max_epochs=1"]
    cfg = world.config(*quick, "weights.layer=auto", "resume=auto")
    result = run(cfg, tmp_path / "auto")
    layer = result.inputs[CHOICE]["layer"]
    kept = OmegaConf.load(tmp_path / "auto" / "config.yaml")
    assert kept.weights.layer == layer
    by_hand = run(world.config(*quick, f"weights.layer={layer}"), tmp_path / "number")
    assert by_hand.metrics["val/loss"] == result.metrics["val/loss"]
    with judge_loads() as loads:
        assert run(cfg, tmp_path / "auto") == result  # finished: nothing is looked for again
    assert not loads
    with pytest.raises(UserError, match=r"had a fixed weights\.layer"):
        run(cfg, tmp_path / "number")


def test_auto_where_a_study_names_layers_is_refused() -> None:
    with pytest.raises(UserError, match=r"study\.layers.*auto is allowed only for weights\.layer"):
        resolve_layer("auto", 4, "study.layers")
