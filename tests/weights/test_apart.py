"""Reasoning traces weighed apart, worked out by hand: mass by share of tokens, the source's weights on the answer."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from attnpo.data.prepare import EncodedSet, Tally, fit_transforms
from attnpo.schema import EncodedResponse, JudgeRound, Kind, PairWeights, PreferencePair, TokenWeights, UserError
from attnpo.text.alignment import AlignMethod
from attnpo.weights.pipeline import check_trace_weighting, join_trace_and_answer, training_weights
from attnpo.weights.postprocess import EndToken, Postprocess, RoundOrder
from attnpo.weights.sources.attention import Attention
from attnpo.weights.sources.column import Column
from attnpo.weights.sources.decay import Decay
from attnpo.weights.sources.pair_strength import WPO
from attnpo.weights.sources.transport import Transport
from attnpo.weights.sources.uniform import Uniform
from attnpo.weights.sources.verbalized import Verbalized
from attnpo.weights.transforms import Inverse, PositionProfile

PLAIN = Postprocess(sink_tokens=0)
EOS = 99
# An answer of two characters per token behind its trace.
TRACE = "<think>b</think>\n"
AT = len(TRACE)
PAIR = PreferencePair.from_texts([{"role": "user", "content": "letters"}], TRACE + "aabbcc", "xx", apart=True)
KEPT = PreferencePair.from_texts(PAIR.prompt, PAIR.chosen, PAIR.rejected)
# <think>, b, </think>, the line break; then the answer, and the end of the turn.
CHOSEN = EncodedResponse(
    [1],
    [50, 51, 52, 53, 10, 11, 12, EOS],
    [(0, 7), (7, 8), (8, 16), (16, 17), (AT, AT + 2), (AT + 2, AT + 4), (AT + 4, AT + 6), (AT + 6, AT + 6)],
)
BOTH = {"chosen": CHOSEN, "rejected": EncodedResponse([1], [20, EOS], [(0, 2), (2, 2)])}


def judge_row(*weights: float, ids: tuple[int, ...] = (10, 11, 12)) -> TokenWeights:
    """What a judge that read "aabbcc" gave, with characters of the whole response."""
    width = 6 // len(ids)
    offsets = torch.tensor([(AT + width * place, AT + width * (place + 1)) for place in range(len(ids))])
    return TokenWeights(torch.tensor(ids), offsets, torch.tensor([weights]))


def captured(*rounds: TokenWeights) -> PairWeights:
    other = TokenWeights(torch.tensor([20]), torch.tensor([(0, 2)]), torch.tensor([[3.0]]))
    return PairWeights(PAIR.pair_id, tuple(JudgeRound(not place, row, other) for place, row in enumerate(rounds)))


def test_the_trace_has_its_share_and_the_judge_the_rest() -> None:
    stored = captured(judge_row(6.0, 1.0, 0.0), judge_row(0.0, 1.0, 2.0))
    found = training_weights(Attention(1, postprocess=PLAIN), stored, BOTH, layers=(1,), pair=PAIR)
    # 7 source tokens, 4 of them the trace's: 1/7 each. The answer: (3, 1, 1) / 5 of 3/7. The end of turn: 0.
    expected = torch.tensor([5, 5, 5, 5, 9, 3, 3, 0]) / 35
    torch.testing.assert_close(found.chosen, expected)
    assert found.lengths == (7.0, 1.0)
    # The rejected response has no trace and is weighed as ever.
    assert found.rejected.tolist() == [1.0, 0.0]
    assert (found.content, found.unmatched, found.coverage) == ((3, 1), (0, 0), (1.0, 1.0))

    first = Postprocess(RoundOrder.NORMALIZE_THEN_MEAN, sink_tokens=0, end_token=EndToken.MEAN)
    found = training_weights(Attention(1, postprocess=first), stored, BOTH, layers=(1,), pair=PAIR)
    # ((6, 1, 0) / 7 + (0, 1, 2) / 3) / 2 = (18, 10, 14) / 42, of 3/7; the end of turn 1/7.
    expected = torch.tensor([1, 1, 1, 1, 54 / 42, 30 / 42, 1.0, 1]) / 7
    torch.testing.assert_close(found.chosen, expected)


def test_the_sink_rule_is_about_the_answers_own_first_token() -> None:
    ids = (60, 61, 62, 63, 64, 65)
    encoded = EncodedResponse(
        [1], [*CHOSEN.response_ids[:4], *ids], CHOSEN.offsets[:4] + [(AT + i, AT + i + 1) for i in range(6)]
    )
    stored = captured(judge_row(90.0, 4.0, 1.0, 1.0, 2.0, 2.0, ids=ids))
    found = training_weights(Attention(1), stored, {**BOTH, "chosen": encoded}, layers=(1,), pair=PAIR)
    # Within the answer the first of six becomes 1/6, the others (4, 1, 1, 2, 2) / 10 of 5/6; the answer has 6/10.
    answer = torch.tensor([1 / 6, 1 / 3, 1 / 12, 1 / 12, 1 / 6, 1 / 6])
    torch.testing.assert_close(found.chosen, torch.cat([torch.full((4,), 0.1), 0.6 * answer]))
    # An answer of three tokens is shorter than K' = 5, and the trace's four do not count.
    short = captured(judge_row(7.0, 1.0, 1.0, ids=(10, 11, 12)))
    kept = training_weights(Attention(1), short, BOTH, layers=(1,), pair=PAIR).chosen
    torch.testing.assert_close(kept[4:7], torch.tensor([7.0, 1.0, 1.0]) / 9 * 3 / 7)


@pytest.mark.parametrize("method", AlignMethod)
def test_a_judge_that_cuts_the_answer_otherwise_leaves_the_trace_whole(method: AlignMethod) -> None:
    stored = captured(judge_row(3.0, 1.0, ids=(10, 77)))  # aab, bcc
    found = training_weights(Attention(1, postprocess=PLAIN), stored, BOTH, method, layers=(1,), pair=PAIR)
    torch.testing.assert_close(found.chosen[:4], torch.full((4,), 1 / 6))
    # Three characters each: aa has two thirds of the first token, bb a third of each, cc two thirds of the second.
    parts = [2 / 3 * 3, 1 / 3 * 3 + 1 / 3 * 1, 2 / 3 * 1] if method is AlignMethod.CHARACTERS else [3.0, 0.0, 0.0]
    torch.testing.assert_close(found.chosen[4:7], torch.tensor(parts) / 4 * 2 / 6)
    assert found.lengths[0] == 6.0 and found.content[0] == 3


@pytest.mark.parametrize("trace", [1, 3, 22, 977])
@pytest.mark.parametrize("answer", [1, 2, 13, 1021])
def test_uniform_weights_stay_uniform_to_the_last_bit(trace: int, answer: int) -> None:
    text = "<think>" + "t" * trace + "</think>" + "a" * answer
    offsets = [(0, 7 + trace), (7 + trace, 15 + trace), *((15 + trace + i, 16 + trace + i) for i in range(answer))]
    encoded = EncodedResponse([1], list(range(answer + 3)), [*offsets, (len(text), len(text))])
    pair = PreferencePair.from_texts(PAIR.prompt, text, "xx", apart=True)
    both = {**BOTH, "chosen": encoded}
    apart, kept = (training_weights(Uniform(), None, both, pair=one) for one in (pair, KEPT))
    assert torch.equal(apart.chosen, kept.chosen) and apart.lengths == kept.lengths
    assert torch.equal(apart.rejected, kept.rejected) and len(set(apart.chosen.tolist())) == 1


def test_weights_that_lie_on_the_training_tokens_are_those_of_the_answer() -> None:
    column = Column(kind=Kind.DISTRIBUTION, end_token=2.0)
    values = {"chosen_weights": [8.0, 8.0, 8.0, 8.0, 3.0, 0.0, 1.0], "rejected_weights": [1.0]}
    pair = PreferencePair.from_texts(PAIR.prompt, PAIR.chosen, PAIR.rejected, values, apart=True)
    found = training_weights(column, None, BOTH, pair=pair).chosen
    # 8 tokens; (3, 0, 1, 2) / 6 of 4/8.
    torch.testing.assert_close(found, torch.tensor([1, 1, 1, 1, 2.0, 0.0, 2 / 3, 4 / 3]) / 8)
    silent = PreferencePair.from_texts(
        pair.prompt, pair.chosen, pair.rejected, {**values, "chosen_weights": [8.0, 8, 8, 8, 0, 0, 0]}, apart=True
    )
    column = Column(kind=Kind.DISTRIBUTION)
    torch.testing.assert_close(training_weights(column, None, BOTH, pair=silent).chosen, torch.full((8,), 1 / 8))


def test_transforms_change_the_answer_alone() -> None:
    stored = captured(judge_row(3.0, 2.0, 0.0))
    source = Attention(1, postprocess=PLAIN)
    turned = training_weights(source, stored, BOTH, transforms=[Inverse()], layers=(1,), pair=PAIR).chosen
    torch.testing.assert_close(turned, torch.tensor([5, 5, 5, 5, 0, 6, 9, 0]) / 35)
    held = EncodedSet([PAIR], [BOTH], Tally(), 1)
    (profile,) = fit_transforms([PositionProfile(bins=3)], held, source, {PAIR.pair_id: stored}, (1,))
    # The chosen answer's own thirds and the even ones of the rejected answer's single token.
    assert isinstance(profile, PositionProfile)
    assert profile.profile == pytest.approx([(0.6 + 1 / 3) / 2, (0.4 + 1 / 3) / 2, (0.0 + 1 / 3) / 2])


def test_coverage_is_the_answers() -> None:
    stored = PairWeights(
        PAIR.pair_id,
        (JudgeRound(True, judge_row(3.0, 0.0, 1.0), captured(judge_row(1.0, 1.0, 1.0)).rounds[0].rejected),),
    )
    found = training_weights(Verbalized(), stored, BOTH, layers=(0,), pair=PAIR)
    assert found.coverage == (2 / 3, 1.0) and found.content == (3, 1)


def test_a_response_that_was_cut_within_its_trace_or_behind_it() -> None:
    source = Attention(1, postprocess=PLAIN)
    stored = captured(judge_row(3.0, 2.0, 0.0))
    inside = EncodedResponse([1], CHOSEN.response_ids[:2], CHOSEN.offsets[:2])
    found = training_weights(source, stored, {**BOTH, "chosen": inside}, layers=(1,), pair=PAIR)
    torch.testing.assert_close(found.chosen, torch.full((2,), 1 / 5))  # two tokens of trace, three that the judge read
    assert found.lengths[0] == 5.0 and found.content[0] == 0
    behind = EncodedResponse([1], CHOSEN.response_ids[5:], CHOSEN.offsets[5:])
    found = training_weights(source, stored, {**BOTH, "chosen": behind}, layers=(1,), pair=PAIR)
    torch.testing.assert_close(found.chosen, torch.tensor([0.4, 0.0, 0.0]))
    assert join_trace_and_answer(torch.zeros(0), 2).tolist() == [0.5, 0.5]


@dataclass(frozen=True)
class Signed(Uniform):
    signed: ClassVar[bool] = True


def test_factors_signed_rows_and_online_weights_are_refused() -> None:
    for source, what in [(Decay(), "yields factors"), (Signed(), "signed rows"), (Transport(), "in every step")]:
        with pytest.raises(UserError, match=rf"traces=weigh_apart .*{what}.*traces=keep or strip"):
            check_trace_weighting(source)
    with pytest.raises(UserError, match="weigh_apart"):
        training_weights(Decay(), None, BOTH, pair=PAIR)
    training_weights(Decay(), None, BOTH, pair=KEPT)
    check_trace_weighting(WPO())  # weights of whole pairs, their tokens alike
