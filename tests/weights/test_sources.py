"""Judge attention over layers and heads, and uniform weights."""

from dataclasses import replace

import pytest
import torch

from attnpo.judge.base import LoadedJudge
from attnpo.judge.layers import HeadRow, StoredRow
from attnpo.schema import PairWeights, UserError
from attnpo.weights.postprocess import Postprocess, RoundOrder
from attnpo.weights.sources.attention import Attention
from tests.weights.fakes import LABELS, FakeJudge, FakePrompts, HeadJudge, head_row, make_pair, word_id


def capture(layers: tuple[int, ...]) -> tuple[list[PairWeights], FakeJudge]:
    judge = FakeJudge()
    pairs = [make_pair(0), make_pair(1, "one", "two words")]
    return Attention().capture(pairs, LoadedJudge(judge, FakePrompts()), layers), judge


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


def test_capture_without_a_judge_names_what_to_set() -> None:
    with pytest.raises(UserError, match=r"judge\.path"):
        Attention().capture([make_pair(0)], None, (1,))


def test_a_span_outside_the_row_names_pair_and_side() -> None:
    class Broken(FakePrompts):
        def build(self, pair):  # type: ignore[no-untyped-def]
            return tuple(replace(one, spans={**one.spans, "rejected": (5, 99)}) for one in super().build(pair))

    with pytest.raises(UserError, match=rf"pair {make_pair(0).pair_id}, rejected: .*\[5, 99\)"):
        Attention().capture([make_pair(0)], LoadedJudge(FakeJudge(), Broken()), (1,))


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
    with pytest.raises(UserError, match=r"layer 4 is not among the stored rows \(L01\)"):
        Attention().resolve(4).select(captured[0], (1,))
    with pytest.raises(UserError, match="'last' is not a number yet"):
        Attention().select(captured[0], (1,))


def test_stored_layers_and_the_capture_fingerprint() -> None:
    assert Attention().layers_to_store(3) == (1, 2, 3)
    assert Attention("1/2", store_layers="selected").layers_to_store(4) == (2,)
    assert Attention(layers=(4, 1), store_layers="selected").layers_to_store(4) == (1, 4)
    process = Postprocess(RoundOrder.NORMALIZE_THEN_MEAN, 0)
    other = Attention(2, layers=(1, 2), postprocess=process, store_layers="selected")
    assert other.capture_fingerprint() == Attention().capture_fingerprint()
    with pytest.raises(UserError, match=r"weights\.store_layers: expected all or selected, got 'some'"):
        Attention(store_layers="some")


def test_layers_are_named_like_the_one_layer() -> None:
    assert Attention(layers=("last", "1/2", 1)).resolve(4).rows_to_read() == (1, 2, 4)
    with pytest.raises(UserError, match=r"^weights\.layers: expected a whole number from 1 to 4.*got 9$"):
        Attention(layers=(1, 9)).resolve(4)
    with pytest.raises(UserError, match="'1/2' is not a number yet"):
        Attention(layers=(1, "1/2")).rows_to_read()


HEAD_ROWS: tuple[StoredRow, ...] = tuple(HeadRow(layer, head) for layer in (1, 2) for head in (1, 2, 3))


def capture_heads(rows: tuple[StoredRow, ...] = HEAD_ROWS) -> tuple[PairWeights, HeadJudge]:
    judge = HeadJudge(num_layers=2)
    source = Attention(heads=(1,)).resolve(2)
    return source.capture([make_pair(0)], LoadedJudge(judge, FakePrompts()), rows)[0], judge


def test_rows_of_single_heads_are_cut_in_the_order_asked() -> None:
    captured, judge = capture_heads()
    assert judge.calls == [(2, (1, 2))]
    assert judge.per_head_calls == [True]
    expected = torch.tensor([head_row(layer, head, (3, 4, 5)) for layer in (1, 2) for head in (1, 2, 3)])
    torch.testing.assert_close(captured.rounds[0].chosen.weights, expected)
    turned, _ = capture_heads((HeadRow(2, 3), HeadRow(1, 1)))
    torch.testing.assert_close(turned.rounds[0].chosen.weights, expected[[5, 0]])
    means = Attention().resolve(2).capture([make_pair(0)], LoadedJudge(judge, FakePrompts()), (1, 2))
    assert judge.per_head_calls == [True, False]
    torch.testing.assert_close(means[0].rounds[0].chosen.weights, expected.view(2, 3, 3).mean(1))


def test_chosen_heads_are_averaged_then_the_layers() -> None:
    captured, _ = capture_heads()
    raw = captured.rounds[1].rejected.weights.view(2, 3, -1)

    def selected(source: Attention) -> torch.Tensor:
        return source.resolve(2).select(captured, HEAD_ROWS).rounds[1].rejected.weights

    torch.testing.assert_close(selected(Attention(1, heads=(2,))), raw[0, 1:2])
    torch.testing.assert_close(selected(Attention("last", heads=(3, 1))), raw[1, [0, 2]].mean(0, keepdim=True))
    both = selected(Attention(layers=(2, 1), heads=(2, 3)))
    torch.testing.assert_close(both, raw[:, 1:].mean(1).mean(0, keepdim=True))
    with pytest.raises(UserError, match=r"head 1 of layer 2 is not among the stored rows \(L01H01\)"):
        Attention(2, heads=(1,)).select(captured, (HeadRow(1, 1),))


def test_stored_heads_and_their_fingerprint() -> None:
    source = Attention("1/2", heads=(3,))
    assert source.heads_to_store(2, 3) == HEAD_ROWS
    selected = replace(source, store_layers="selected")
    assert selected.heads_to_store(2, 3) == HEAD_ROWS[:3], "every head of the wanted layer"
    assert selected.resolve(2).rows_to_read() == (HeadRow(1, 3),)
    assert source.capture_fingerprint() == Attention("last", heads=(1, 2)).capture_fingerprint()
    assert source.capture_fingerprint() == {**Attention().capture_fingerprint(), "heads": "each"}
    assert Attention().capture_fingerprint() == {
        "source": "attention",
        "position": "last_prompt_token",
        "heads": "mean",
    }, "stored head means stay valid"


@pytest.mark.parametrize("heads", [(0,), (-1,), (2, 2)])
def test_heads_that_are_no_choice_are_refused(heads: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=r"weights\.heads: expected distinct query heads numbered from 1 .*got \["):
        Attention(heads=heads)


def test_heads_outside_the_judge_name_the_range() -> None:
    with pytest.raises(UserError, match=r"weights\.heads: expected query heads from 1 to 4 .*got 5 in \[1, 5\]"):
        Attention(heads=(1, 5)).heads_to_store(2, 4)
    with pytest.raises(UserError, match=r"config allows, but the judge's attention has 3 heads"):
        capture_heads((HeadRow(1, 4),))
