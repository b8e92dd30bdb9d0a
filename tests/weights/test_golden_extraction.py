"""Judge rows of the reference implementation, through our post-processing and alignment."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from attnpo.schema import SIDES, EncodedResponse, JudgeRound, PairWeights, TokenWeights
from attnpo.text.alignment import AlignMethod
from attnpo.weights.pipeline import training_weights
from attnpo.weights.postprocess import Postprocess, RoundOrder
from attnpo.weights.sources.attention import Attention

OFFICIAL = RoundOrder.NORMALIZE_THEN_MEAN
LAYERS = (1, 4, 8)


@pytest.fixture(scope="module")
def pairs(vectors: Path) -> list[dict[str, Any]]:
    found = json.loads((vectors / "extraction/pairs.json").read_text())["pairs"]
    assert len(found) == 23
    return list(found)


@pytest.fixture(scope="module")
def expected(vectors: Path) -> dict[str, torch.Tensor]:
    return load_file(vectors / "extraction/expected.safetensors")


def stored(pair: dict[str, Any], expected: dict[str, torch.Tensor]) -> PairWeights:
    """The five layers of one pair as a capture stores them; characters are replaced by token numbers."""
    rounds = []
    for order in ("cr", "rc"):
        info = pair["rounds"][order]
        rows = torch.stack([expected[f"{pair['index']:02d}/L{layer:02d}/{order}/row"] for layer in LAYERS])
        sides = {}
        for side in SIDES:
            start, end = info["span_a" if info["answer_a"] == side else "span_b"]
            places = torch.arange(end - start)
            ids = torch.tensor(info["judge_ids"][start:end])
            sides[side] = TokenWeights(ids, torch.stack([places, places + 1], dim=1), rows[:, start:end])
        rounds.append(JudgeRound(order == "cr", sides["chosen"], sides["rejected"]))
    return PairWeights(pair["name"], tuple(rounds))


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(("name", "sink"), [("mean", 0), ("fixed", 1)])
def test_mean_and_sink_fixed_weights(
    pairs: list[dict[str, Any]], expected: dict[str, torch.Tensor], layer: int, name: str, sink: int
) -> None:
    source = Attention(layer, postprocess=Postprocess(OFFICIAL, sink))
    for pair in pairs:
        chosen = source.select(stored(pair, expected), LAYERS)
        for side in SIDES:
            row = source.postprocess([item.side(side).weights[0] for item in chosen.rounds], pair["name"])
            target = expected[f"{pair['index']:02d}/L{layer:02d}/{name}/{side}"].to(row.dtype)
            torch.testing.assert_close(row, target, rtol=0, atol=1e-6)


def test_weights_on_the_training_completions(pairs: list[dict[str, Any]], expected: dict[str, torch.Tensor]) -> None:
    source = Attention("last", postprocess=Postprocess(OFFICIAL)).resolve(8)
    compared = 0
    for pair in pairs:
        encoded = {}
        for side in SIDES:
            ids = pair["training"][side]["completion_ids"]
            encoded[side] = EncodedResponse([], ids, [(place, place + 1) for place in range(len(ids))])
        found = training_weights(source, stored(pair, expected), encoded, AlignMethod.LEVENSHTEIN, layers=LAYERS)
        for row, length, side in zip((found.chosen, found.rejected), found.lengths, SIDES, strict=True):
            target = expected[f"{pair['index']:02d}/aligned/{side}"].to(row.dtype)
            torch.testing.assert_close(
                row * length, target, rtol=0, atol=1e-4, msg=lambda m, p=pair, s=side: f"{p['name']} {s}: {m}"
            )
            compared += 1
    assert compared == 46
