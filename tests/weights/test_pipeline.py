"""From stored rows to training tokens, worked out by hand."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnpo.schema import EncodedResponse, JudgeRound, Kind, PairWeights, PreferencePair, TokenWeights, UserError
from attnpo.text.alignment import AlignMethod
from attnpo.weights.base import is_neutral
from attnpo.weights.pipeline import compute_source_weights, fit_transforms_in_order, training_weights
from attnpo.weights.postprocess import EndToken, Postprocess, RoundOrder
from attnpo.weights.sources.attention import Attention
from attnpo.weights.sources.uniform import Uniform
from attnpo.weights.sources.verbalized import Verbalized
from attnpo.weights.transforms import PositionProfile, WeightRow

EOS = 99
PLAIN = Postprocess(sink_tokens=0)


def side(ids: Sequence[int], rows: Sequence[Sequence[float]], dtype: torch.dtype = torch.float64) -> TokenWeights:
    """Tokens of two characters each."""
    offsets = torch.tensor([(2 * place, 2 * place + 2) for place in range(len(ids))]).reshape(-1, 2)
    return TokenWeights(torch.tensor(ids), offsets, torch.tensor(rows, dtype=dtype))


def encoded(ids: Sequence[int], end: bool = True) -> EncodedResponse:
    offsets = [(2 * place, 2 * place + 2) for place in range(len(ids))]
    last = 2 * len(ids)
    return EncodedResponse([1], [*ids, *([EOS] if end else [])], offsets + ([(last, last)] if end else []))


def captured(
    one: Sequence[Sequence[float]], two: Sequence[Sequence[float]], ids: Sequence[int] = (10, 11, 12)
) -> PairWeights:
    other = side([20], [[1.0]] * len(one))
    return PairWeights("p1", (JudgeRound(True, side(ids, one), other), JudgeRound(False, side(ids, two), other)))


BOTH = {"chosen": encoded([10, 11, 12]), "rejected": encoded([20])}
PAIR = PreferencePair.from_texts([{"role": "user", "content": "letters"}], "aabbcc", "xx")


def test_select_average_normalise_align_and_the_end_of_turn() -> None:
    stored = captured([[9.0, 9.0, 9.0], [3.0, 1.0, 0.0]], [[9.0, 9.0, 9.0], [0.0, 0.0, 1.0]])
    source = Attention(2, postprocess=PLAIN)
    found = training_weights(source, stored, BOTH, layers=(1, 2))
    # Layer 2: (3 + 0, 1 + 0, 0 + 1) / 2, sum 2.5.
    torch.testing.assert_close(found.chosen, torch.tensor([0.6, 0.2, 0.2, 0.0], dtype=torch.float64))
    torch.testing.assert_close(found.rejected, torch.tensor([1.0, 0.0], dtype=torch.float64))
    assert (found.lengths, found.coverage) == ((3.0, 1.0), (1.0, 1.0))
    assert (found.content, found.unmatched, found.realigned) == ((3, 1), (0, 0), 0)

    first = replace(source, postprocess=replace(PLAIN, round_order=RoundOrder.NORMALIZE_THEN_MEAN))
    row = training_weights(first, stored, BOTH, layers=(1, 2)).chosen
    torch.testing.assert_close(row, torch.tensor([0.375, 0.125, 0.5, 0.0], dtype=torch.float64))


def test_the_end_token_may_get_the_mean_weight() -> None:
    stored = captured([[3.0, 1.0, 0.0]], [[3.0, 1.0, 0.0]])
    source = Attention(1, postprocess=replace(PLAIN, end_token=EndToken.MEAN))
    row = training_weights(source, stored, BOTH, layers=(1,)).chosen
    torch.testing.assert_close(row, torch.tensor([0.75, 0.25, 0.0, 1 / 3], dtype=torch.float64))


def test_the_sink_rule_comes_before_alignment() -> None:
    ids = (10, 11, 12, 13, 14)
    stored = captured([[6.0, 1.0, 1.0, 1.0, 1.0]], [[6.0, 1.0, 1.0, 1.0, 1.0]], ids)
    # The training side lacks the sink token: the others keep what the rule gave them.
    both = {**BOTH, "chosen": encoded(ids[1:])}
    found = training_weights(Attention(1), stored, both, layers=(1,))
    torch.testing.assert_close(found.chosen, torch.tensor([0.2] * 4 + [0.0], dtype=torch.float64))
    assert found.lengths[0] == 5.0


def test_a_truncated_response_keeps_its_weights_as_they_are() -> None:
    stored = captured([[3.0, 1.0, 1.0]], [[3.0, 1.0, 1.0]])
    both = {**BOTH, "chosen": encoded([10, 11], end=False)}
    for method in AlignMethod:
        found = training_weights(Attention(1, postprocess=PLAIN), stored, both, method, layers=(1,))
        torch.testing.assert_close(found.chosen, torch.tensor([0.6, 0.2], dtype=torch.float64))
        assert (found.lengths[0], found.coverage[0], found.content[0]) == (3.0, 1.0, 2)


def test_a_training_token_without_a_partner_is_counted() -> None:
    stored = captured([[3.0, 1.0, 1.0]], [[3.0, 1.0, 1.0]])
    both = {**BOTH, "chosen": encoded([10, 11, 77])}
    found = training_weights(Attention(1, postprocess=PLAIN), stored, both, AlignMethod.LEVENSHTEIN, layers=(1,))
    torch.testing.assert_close(found.chosen, torch.tensor([0.6, 0.2, 0.0, 0.0], dtype=torch.float64))
    assert found.coverage[0] == pytest.approx(2 / 3)
    assert (found.unmatched, found.content) == ((1, 0), (3, 1))


def test_rounds_cut_into_different_tokens_meet_on_the_first_rounds_tokens() -> None:
    # Round 2 has one token over the characters of the last two tokens of round 1.
    other = side([20], [[1.0]])
    merged = TokenWeights(torch.tensor([10, 55]), torch.tensor([[0, 2], [2, 6]]), torch.tensor([[1.0, 4.0]]).double())
    stored = PairWeights(
        "p1", (JudgeRound(True, side([10, 11, 12], [[1.0, 2.0, 2.0]]), other), JudgeRound(False, merged, other))
    )
    found = training_weights(Attention(1, postprocess=PLAIN), stored, BOTH, layers=(1,))
    assert found.realigned == 1
    torch.testing.assert_close(found.chosen, torch.tensor([0.2, 0.4, 0.4, 0.0], dtype=torch.float64))


def test_stored_float32_rows_stay_float32() -> None:
    stored = captured([[3.0, 1.0, 0.0]], [[3.0, 1.0, 0.0]])
    rounds = tuple(replace(item, chosen=side([10, 11, 12], [[3.0, 1.0, 0.0]], torch.float32)) for item in stored.rounds)
    found = training_weights(Attention(1), replace(stored, rounds=rounds), BOTH, layers=(1,))
    assert found.chosen.dtype == torch.float32


@settings(max_examples=20)
@given(st.integers(1, 64), st.integers(1, 64))
def test_uniform_times_its_length_is_one_on_every_token(chosen: int, rejected: int) -> None:
    both = {"chosen": encoded(range(chosen)), "rejected": encoded(range(rejected), end=False)}
    found = training_weights(Uniform(), None, both, pair=PAIR)
    assert found.lengths == (chosen + 1.0, float(rejected))
    torch.testing.assert_close(found.chosen * found.lengths[0], torch.ones(chosen + 1), rtol=2e-7, atol=0)
    torch.testing.assert_close(found.rejected * found.lengths[1], torch.ones(rejected), rtol=2e-7, atol=0)
    assert (found.content, found.unmatched) == ((chosen, rejected), (0, 0))


@dataclass(frozen=True)
class Reverse:
    """Turns rows round and remembers whose they were."""

    seen: list[tuple[str, str, int]]

    needs_fit: ClassVar[bool] = False

    def fit(self, rows: Iterable[WeightRow]) -> "Reverse":
        return self

    def __call__(self, row: WeightRow) -> torch.Tensor:
        self.seen.append((row.pair_id, row.side, row.other))
        return row.weights.flip(-1)


def test_transforms_see_finished_rows_with_pair_and_side() -> None:
    reverse = Reverse([])
    stored = captured([[9.0, 9.0, 9.0], [3.0, 1.0, 0.0]], [[9.0, 9.0, 9.0], [3.0, 1.0, 0.0]])
    found = training_weights(Attention(2, postprocess=PLAIN), stored, BOTH, transforms=[reverse], layers=(1, 2))
    torch.testing.assert_close(found.chosen, torch.tensor([0.0, 0.25, 0.75, 0.0], dtype=torch.float64))
    assert reverse.seen == [("p1", "chosen", 1), ("p1", "rejected", 3)]


def test_each_transform_is_fitted_on_what_those_before_it_leave() -> None:
    """A profile fitted after a reversal is the reversed profile."""
    source = Attention(1, postprocess=PLAIN)
    stored = captured([[3.0, 1.0, 0.0]], [[3.0, 1.0, 0.0]])
    finished = {"p1": compute_source_weights(source, stored, BOTH, layers=(1,))}
    for before, expected in (((), [0.75, 0.25, 0.0]), ((Reverse([]),), [0.0, 0.25, 0.75])):
        *_, profile = fit_transforms_in_order([*before, PositionProfile(3)], finished)
        assert isinstance(profile, PositionProfile)
        # The rejected response is a single token, which spreads evenly.
        assert list(profile.profile) == pytest.approx([(value + 1 / 3) / 2 for value in expected])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_broken_rows_name_pair_and_side(bad: float) -> None:
    with pytest.raises(UserError, match="pair p1, chosen: expected"):
        training_weights(Attention(1), captured([[1.0, bad, 0.0]], [[1.0, 1.0, 1.0]]), BOTH, layers=(1,))


def test_a_source_that_captures_needs_captured_weights() -> None:
    with pytest.raises(UserError, match=r"pair p9: expected captured weights for Attention; run attnpo\.weigh"):
        training_weights(Attention(1), None, BOTH, pair=replace(PAIR, pair_id="p9"))


@dataclass(frozen=True)
class Native(Uniform):
    """A captured factor on training ids, signed or not, optionally with a forbidden post-processing."""

    kind: ClassVar[Kind] = Kind.FACTOR

    def layers_to_store(self, num_layers: int) -> tuple[int, ...]:
        return (0,)


class Signed(Native):
    signed: ClassVar[bool] = True


class Processed(Native):
    postprocess: ClassVar[Postprocess | None] = Postprocess()


def factor(values: Sequence[float], ids: Sequence[int] = (10, 11, 12, EOS)) -> PairWeights:
    rejected = side([20, EOS], [[1.0, 1.0]])
    return PairWeights("p1", (JudgeRound(True, side(ids, [values]), rejected),))


def test_a_factor_on_training_tokens_is_used_as_it_is() -> None:
    values = [2.0, 0.5, 0.0, 3.0]
    found = training_weights(Native(), factor(values), BOTH, layers=(0,))
    assert found.chosen.tolist() == values  # the end token is the source's to weigh
    assert found.lengths == (4.0, 2.0)
    short = {**BOTH, "chosen": encoded([10, 11], end=False)}
    assert training_weights(Native(), factor(values), short, layers=(0,)).chosen.tolist() == [2.0, 0.5]


def test_sign_and_ids_of_a_factor_are_checked() -> None:
    assert training_weights(Signed(), factor([1.0, -1.0, 0.0, 0.0]), BOTH).chosen.tolist()[1] == -1.0
    with pytest.raises(UserError, match="pair p1, chosen: Native is declared unsigned"):
        training_weights(Native(), factor([1.0, -1.0, 0.0, 0.0]), BOTH)
    with pytest.raises(UserError, match="captured for different training token ids"):
        training_weights(Native(), factor([1.0, 1.0, 0.0, 0.0], (10, 11, 13, EOS)), BOTH)
    with pytest.raises(UserError, match="kind factor"):
        training_weights(Processed(), factor([1.0, 1.0, 0.0, 0.0]), BOTH)


@dataclass(frozen=True)
class Own(Uniform):
    """A source that gives what it is told for the chosen response and equal weights for the other."""

    values: tuple[float, ...] = ()
    neutral: ClassVar[bool] = False

    def weigh(self, pair: PreferencePair, side: str, encoded: EncodedResponse) -> torch.Tensor:
        if side == "chosen":
            return torch.tensor(self.values)
        return super().weigh(pair, side, encoded)


def test_a_native_source_sees_the_pair_and_its_weights_are_used_as_they_are() -> None:
    @dataclass(frozen=True)
    class Reading(Own):
        def weigh(self, pair: PreferencePair, side: str, encoded: EncodedResponse) -> torch.Tensor:
            text = pair.response(side)
            return torch.tensor([float(text[start:end] in ("bb", "xx")) for start, end in encoded.offsets])

    assert training_weights(Reading(), None, BOTH, pair=PAIR).chosen.tolist() == [0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ((1.0, float("nan"), 0.0, 0.0), "expected finite weights, got nan at token 1 of 4"),
        ((1.0, -1.0, 0.0, 0.0), "Own is declared unsigned, but has a weight of -1"),
        ((0.0, 0.0, 0.0, 0.0), "Own is declared as a distribution, but all 4 weights are 0"),
        ((0.5, 0.5), r"expected 4 weights from Own, one for each training token, got shape \(2,\)"),
    ],
)
def test_broken_weights_of_a_native_source_name_pair_and_side(values: tuple[float, ...], said: str) -> None:
    with pytest.raises(UserError, match=f"^pair {PAIR.pair_id}, chosen: {said}"):
        training_weights(Own(values), None, BOTH, pair=PAIR)


def test_a_source_of_ones_own_is_no_neutral_one() -> None:
    assert not is_neutral(Own())


def scored(chosen: Sequence[float], rejected: Sequence[float] = (3.0,)) -> PairWeights:
    one = JudgeRound(True, side([10, 11, 12], [chosen]), side([20], [rejected]))
    return PairWeights("p1", (one,))


def test_tokens_without_a_score_count_against_coverage() -> None:
    found = training_weights(Verbalized(), scored([3.0, 0.0, 1.0]), BOTH, layers=(0,))
    assert found.chosen.tolist() == [0.75, 0.0, 0.25, 0.0]
    assert (found.content, found.unmatched, found.flat) == ((3, 1), (1, 0), ())
    assert found.coverage == (2 / 3, 1.0)
    # An attention row with a zero covers every token all the same.
    stored = captured([[3.0, 0.0, 1.0]], [[3.0, 0.0, 1.0]])
    assert training_weights(Attention(1), stored, BOTH, layers=(1,)).coverage == (1.0, 1.0)


def test_coverage_is_that_of_the_source_whatever_a_transform_does() -> None:
    everywhere = PositionProfile(bins=1).fit([WeightRow(torch.ones(2), torch.tensor([1, 2]), "p0", "chosen", 1)])
    found = training_weights(Verbalized(), scored([3.0, 0.0, 0.0]), BOTH, transforms=[everywhere], layers=(0,))
    assert bool((found.chosen[:3] > 0).all())
    assert found.coverage[0] == pytest.approx(1 / 3)


def test_a_response_without_any_score_has_no_coverage_and_is_not_called_flat() -> None:
    found = training_weights(Verbalized(), scored([0.0, 0.0, 0.0]), BOTH, layers=(0,))
    assert (found.coverage, found.flat) == ((0.0, 1.0), ())


def test_spans_without_mass_are_reported_as_made_uniform() -> None:
    zero, some = [0.0, 0.0, 0.0], [1.0, 0.0, 0.0]
    assert training_weights(Attention(1), captured([zero], [zero]), BOTH, layers=(1,)).flat == ("chosen",)
    assert training_weights(Attention(1), captured([zero], [some]), BOTH, layers=(1,)).flat == ()
    each = Attention(1, postprocess=Postprocess(RoundOrder.NORMALIZE_THEN_MEAN))
    assert training_weights(each, captured([zero], [some]), BOTH, layers=(1,)).flat == ("chosen",)
