"""Layer names, judge attention and uniform weights."""

from dataclasses import replace

import pytest
import torch
from omegaconf import OmegaConf, ValidationError

from attnpo.schema import EncodedResponse, PairWeights, UserError
from attnpo.weights.base import NativeSource, Tools, WeightSource, resolve_layer
from attnpo.weights.postprocess import Postprocess, RoundOrder
from attnpo.weights.sources.attention import Attention
from attnpo.weights.sources.uniform import Uniform
from tests.weights.fakes import LABELS, FakeJudge, FakePrompts, make_pair, word_id

PAPER_LAYERS = [(1, 1), ("1/4", 8), ("1/2", 16), ("3/4", 24), ("last", 32), ("12", 12), (32, 32), ("1/1", 32)]


@pytest.mark.parametrize(("name", "number"), PAPER_LAYERS)
def test_layer_names_of_the_paper_in_32_layers(name: int | str, number: int) -> None:
    assert resolve_layer(name, 32) == number


@pytest.mark.parametrize(("layers", "numbers"), [(2, [1, 1, 1, 2]), (6, [1, 3, 4, 6]), (1, [1, 1, 1, 1])])
def test_fractions_of_shallow_models_round_down_but_not_to_zero(layers: int, numbers: list[int]) -> None:
    assert [resolve_layer(name, layers) for name in ("1/4", "1/2", "3/4", "last")] == numbers


@pytest.mark.parametrize("name", [0, -1, 33, "0", "33", "auto", "", "first", "5/4", "0/4", "1/0", "1.5", True])
def test_other_layers_are_refused_with_the_range(name: int | str) -> None:
    with pytest.raises(UserError, match=r"weights\.layer: expected a whole number from 1 to 32"):
        resolve_layer(name, 32)


def capture(layers: tuple[int, ...], verdict: bool = True) -> tuple[list[PairWeights], FakeJudge]:
    judge = FakeJudge()
    pairs = [make_pair(0), make_pair(1, "one", "two words")]
    return Attention().capture(pairs, Tools(judge, FakePrompts(), verdict), layers), judge


def test_capture_cuts_both_spans_out_of_both_rounds_in_one_call() -> None:
    captured, judge = capture((1, 3))
    assert judge.calls == [(4, (1, 3))]
    pair = make_pair(0)
    assert [one.pair_id for one in captured] == [pair.pair_id, make_pair(1, "one", "two words").pair_id]
    first, second = captured[0].rounds
    assert (first.chosen_is_a, second.chosen_is_a) == (True, False)
    # Round 0: instruction at 1..2, chosen (3 words) at positions 3..5. Round 1: rejected at 3, separator, chosen 5..7.
    expected = torch.tensor([[(layer + 1 / place) / 3 for place in (3, 4, 5)] for layer in (1, 3)])
    torch.testing.assert_close(first.chosen.weights, expected)
    expected = torch.tensor([[(layer + 1 / place) / 3 for place in (5, 6, 7)] for layer in (1, 3)])
    torch.testing.assert_close(second.chosen.weights, expected)
    torch.testing.assert_close(second.rejected.weights, torch.tensor([[(1 + 1 / 3) / 3], [(3 + 1 / 3) / 3]]))
    assert first.chosen.token_ids.tolist() == [word_id(word) for word in ("good", "words", "here")]
    assert first.chosen.offsets.tolist() == [[0, 4], [4, 10], [10, 15]]
    assert first.verdict_token == LABELS[0]
    assert first.verdict_logits is not None


def test_verdicts_are_left_out_on_request() -> None:
    captured, _ = capture((1,), verdict=False)
    assert all(item.verdict_logits is None and item.verdict_token is None for one in captured for item in one.rounds)


def test_capture_without_a_judge_names_what_to_set() -> None:
    with pytest.raises(UserError, match=r"judge\.path"):
        Attention().capture([make_pair(0)], Tools(), (1,))


def test_a_span_outside_the_row_names_pair_and_side() -> None:
    class Broken(FakePrompts):
        def build(self, pair):  # type: ignore[no-untyped-def]
            return tuple(replace(one, spans={**one.spans, "rejected": (5, 5)}) for one in super().build(pair))

    with pytest.raises(UserError, match=rf"pair {make_pair(0).pair_id}, rejected: .*\[5, 5\)"):
        Attention().capture([make_pair(0)], Tools(FakeJudge(), Broken()), (1,))


def test_select_leaves_the_wanted_layer_or_the_mean_of_several() -> None:
    captured, _ = capture((1, 2, 4))
    full = captured[0].rounds[1].chosen.weights
    one = Attention("last").resolve(4).select(captured[0], (1, 2, 4)).rounds[1].chosen
    assert torch.equal(one.weights, full[2:])
    assert one.token_ids.tolist() == captured[0].rounds[1].chosen.token_ids.tolist()
    several = Attention(layers=(2, 1)).resolve(4).select(captured[0], (1, 2, 4)).rounds[1].chosen
    torch.testing.assert_close(several.weights, (full[:1] + full[1:2]) / 2)


def test_select_refuses_a_layer_that_was_not_stored_and_one_not_resolved() -> None:
    captured, _ = capture((1,))
    with pytest.raises(UserError, match=r"layer 4 is not among the layers at hand \[1\]"):
        Attention().resolve(4).select(captured[0], (1,))
    with pytest.raises(UserError, match="'last' is not yet a number"):
        Attention().select(captured[0], (1,))


def test_stored_layers_and_the_capture_fingerprint() -> None:
    assert Attention().capture_layers(3) == (1, 2, 3)
    assert Attention("1/2", store_layers="selected").capture_layers(4) == (2,)
    assert Attention(layers=(4, 1), store_layers="selected").capture_layers(4) == (1, 4)
    other = Attention(2, (1, 2), Postprocess(RoundOrder.NORMALIZE_THEN_MEAN, 0), "selected")
    assert other.capture_fingerprint() == Attention().capture_fingerprint()
    with pytest.raises(UserError, match=r"weights\.store_layers: expected all or selected, got 'some'"):
        Attention(store_layers="some")


def test_uniform_is_one_over_the_training_tokens() -> None:
    row = Uniform().weigh("p", "chosen", EncodedResponse([1], [5, 6, 7, 8], [(0, 1), (1, 2), (2, 3), (3, 3)]))
    assert row.tolist() == [0.25, 0.25, 0.25, 0.25]
    with pytest.raises(UserError, match="needs no capture"):
        Uniform().capture([make_pair(0)], Tools(), ())


def test_sources_keep_the_interface() -> None:
    sources: list[WeightSource] = [Attention(), Uniform()]
    assert all(isinstance(source, WeightSource) for source in sources)
    assert [isinstance(source, NativeSource) for source in sources] == [False, True]
    assert [source.tokens for source in sources] == ["source", "train"]


def test_a_configuration_may_hold_the_components() -> None:
    node = OmegaConf.structured(Attention)
    for part in (node, node.postprocess):  # frozen dataclasses give read-only nodes
        OmegaConf.set_readonly(part, False)
    node.merge_with({"layer": "1/4", "postprocess": {"round_order": "NORMALIZE_THEN_MEAN", "end_token": "MEAN"}})
    node.layers = (1, 2)
    assert OmegaConf.to_container(node)["layers"] == [1, 2]
    with pytest.raises(ValidationError):
        node.postprocess.sink_tokens = "many"
    assert node.layer == "1/4"
    assert node.postprocess.round_order is RoundOrder.NORMALIZE_THEN_MEAN
