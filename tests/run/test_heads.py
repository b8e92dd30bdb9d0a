"""Runs on chosen heads and on several layers, from the command line's overrides to the training examples."""

from pathlib import Path

import pytest
import torch
from transformers import LagunaConfig

from attnpo.judge.causal_judge import CausalJudge
from attnpo.judge.layers import HeadRow
from attnpo.models.loading import load_model, num_heads
from attnpo.schema import SIDES, UserError
from attnpo.weights.postprocess import Postprocess
from tests.run.made import Made, make, make_inputs
from tests.run.worlds import TRAIN, VAL, World, judge_loads


@pytest.fixture
def world(fresh: World) -> World:
    """The same model and pairs with an empty store."""
    return fresh


def direct_rows(made: Made, world: World) -> dict[str, list[dict[str, torch.Tensor]]]:
    """Rows [layers heads n] of both rounds of every pair, straight from the model."""
    room, pairs = made.readers.make_judge(), made.inputs.pairs
    judge = CausalJudge(load_model(world.model))
    found = {}
    for pair in (*pairs["train"].pairs, *pairs["val"].pairs):
        rounds = []
        for prompt in room.prompts.build(pair):
            (reading,) = judge.read([prompt.input_ids], layers=(1, 2), per_head=True, verdict=False)
            rounds.append({side: reading.rows[..., slice(*prompt.spans[side])] for side in SIDES})
        found[pair.pair_id] = rounds
    return found


def test_chosen_heads_train_on_their_own_rows_and_others_are_a_re_read(world: World) -> None:
    with judge_loads() as loaded:
        made = make(world.config("weights.heads=[1]", "weights.layer=2"))
    first = made.inputs
    assert len(loaded) == 1
    assert first.weighed.report is not None and first.weighed.report.computed == TRAIN + VAL
    direct = direct_rows(made, world)
    checks = [(first, [1], [0])]
    with judge_loads() as loaded:
        other = make_inputs(world.config("weights.heads=[2]", "weights.layer=1"))
        several = make_inputs(world.config("weights.heads=[2,1]", "weights.layers=[1,last]"))
    assert loaded == [], "every head of every layer is stored"
    checks += [(other, [0], [1]), (several, [0, 1], [1, 0])]
    for inputs, layers, heads in checks:
        assert inputs.weighed.layers == tuple(HeadRow(layer + 1, head + 1) for layer in layers for head in heads)
        assert len(inputs.examples["train"].examples) == TRAIN
        for example in inputs.examples["train"].examples:
            for side, weights in zip(SIDES, example.weights, strict=True):
                rounds = [item[side][layers][:, heads].mean(1).mean(0) for item in direct[example.pair_id]]
                expected = Postprocess()([row.double() for row in rounds])
                # The judge's last token (full stop and newline in one) has no partner; the end of the turn follows.
                torch.testing.assert_close(weights[:-2].double(), expected[:-1], rtol=0, atol=2e-6)
                assert not weights[-2:].any()
    a, b = (inputs.examples["train"].examples[0].weights[0] for inputs in (first, other))
    assert float((a - b).abs().max()) > 1e-3, "heads differ"


def test_heads_leave_the_stored_head_means_alone(world: World) -> None:
    make_inputs(world.config())
    with judge_loads() as loaded:
        make_inputs(world.config("weights.heads=[1]"))
        again = make_inputs(world.config("weights.layer=1"))
    assert len(loaded) == 1
    assert again.weighed.report is not None and again.weighed.report.computed == 0


def test_what_is_read_and_written_is_said(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    make_inputs(world.config("weights.heads=[1]"))
    assert any("judge pass: reading 2 layers x 2 heads of" in line for line in caplog.messages)
    caplog.clear()
    make_inputs(world.config("weights.heads=[1]", "weights.store_layers=selected", f"store={world.store}2"))
    assert any("judge pass: reading 1 layer x 2 heads of" in line for line in caplog.messages)
    caplog.clear()
    make_inputs(world.config("weights.layers=[1/4,1]"))
    assert "weights.layers: 1/4, 1 are all the same layer in this model: 1 of 2" in caplog.messages


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("weights.heads=[3]", r"weights\.heads: expected query heads from 1 to 2 for this judge, got 3 in \[3\]"),
        ("weights.heads=[0]", r"weights\.heads: expected distinct query heads numbered from 1.*got \[0\]"),
        ("weights.heads=[1,1]", r"weights\.heads: expected distinct query heads numbered from 1.*got \[1, 1\]"),
        ("weights.heads=[first]", r"weights\.heads"),
        ("weights.heads=2", r"weights\.heads"),
        ("weights.layers=[1,1]", r"weights\.layers: expected each layer once, got 1 twice"),
        ("weights.layers=[1,3]", r"weights\.layers: expected a whole number from 1 to 2.*got 3"),
    ],
)
def test_choices_that_are_none_end_before_the_judge_is_loaded(world: World, override: str, said: str) -> None:
    with judge_loads() as loaded, pytest.raises(UserError, match=said):
        make_inputs(world.config(override))
    assert loaded == []


def test_the_number_of_heads_is_read_from_the_config(world: World, tmp_path: Path) -> None:
    assert num_heads(world.model) == 2
    LagunaConfig(num_hidden_layers=2, num_attention_heads_per_layer=[8, 4]).save_pretrained(tmp_path / "uneven")
    with pytest.raises(
        UserError, match=r"weights\.heads: the layers of .*uneven have different numbers of query heads \(8, 4\)"
    ):
        num_heads(tmp_path / "uneven")
