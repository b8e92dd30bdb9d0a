"""Weights from what two scorers make of a token, worked out by hand; scorers here are rules on token ids."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from attnpo.config.compose import list_groups
from attnpo.schema import SIDES, EncodedResponse, JudgeRound, PairWeights, PreferencePair, TokenWeights, UserError
from attnpo.text.chat import RefusedText
from attnpo.weights.base import ScorerModel, WeightSource
from attnpo.weights.capture import UnreadablePair
from attnpo.weights.pipeline import TrainingWeights, training_weights
from attnpo.weights.sources.contrast import TISDPO, Contrast, CriticalTokens, RewardTransform, TokenGuided
from attnpo.weights.sources.scorers import LoadedScorers, Scorer
from attnpo.weights.sources.selection import Selection
from tests.objectives.inputs import call, make_case, objective_of
from tests.weights.fakes import make_pair

A, B = ScorerModel("a"), ScorerModel("b")
WORDS = torch.tensor([True, True, True, True, False])  # four words and the end of turn
RAW = torch.tensor([0.3, -2.0, 1.204, 0.3, 5.0], dtype=torch.float64)


def near(found: Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(found, torch.tensor(expected, dtype=found.dtype), rtol=1e-6, atol=1e-9)


# ------------------------------------------------------------------------------------------------ forms


def test_scaled_rewards_by_hand() -> None:
    # 0.3 -> (0.3 + 1.5) / 3 of [0.7, 1.3]; -2 is held at -1.5; 1.204 is rounded to 1.20.
    form = TISDPO()
    near(form(RAW, WORDS, "chosen"), [1.06, 0.7, 1.24, 1.06, 0.0])
    near(form(RAW, WORDS, "rejected"), [0.94, 1.3, 0.76, 0.94, 0.0])
    assert not form.signed


def test_ranks_share_ties_and_a_lone_token_is_in_the_middle() -> None:
    form = TISDPO(RewardTransform.RANK, least=0.0, most=3.0)
    near(form(RAW, WORDS, "chosen"), [1.5, 0.0, 3.0, 1.5, 0.0])
    near(form(RAW, WORDS, "rejected"), [1.5, 3.0, 0.0, 1.5, 0.0])
    near(form(RAW[:1], WORDS[:1], "chosen"), [1.5])
    near(form(RAW[4:], WORDS[4:], "chosen"), [0.0])


def test_held_rewards_are_signed() -> None:
    form = TISDPO(RewardTransform.THRESHOLD, low=-1.0, high=1.0)
    near(form(RAW, WORDS, "chosen"), [0.3, -1.0, 1.0, 0.3, 0.0])
    near(form(RAW, WORDS, "rejected"), [-0.3, 1.0, -1.0, -0.3, 0.0])
    assert form.signed and not replace(form, low=0.0).signed


@pytest.mark.parametrize(
    ("percent", "expected"),
    [(100.0, [1, 1, 1, 1, 0]), (50.0, [1, 0, 1, 0, 0]), (49.0, [0, 0, 1, 0, 0]), (20.0, [0] * 5)],
)
def test_the_top_share_is_rounded_down_and_takes_the_earlier_of_equals(percent: float, expected: list[int]) -> None:
    form = TISDPO(RewardTransform.BINARY, top_percent=percent)
    near(form(RAW, WORDS, "chosen"), [float(value) for value in expected])


def test_the_papers_formula_weighs_the_end_of_turn_too() -> None:
    form = TISDPO(RewardTransform.PAPER, low=-0.5, high=1.5, k=2.0, mu=0.5)
    held = [0.3, -0.5, 1.204, 0.3, 1.5]
    near(form(RAW, WORDS, "chosen"), [2 * math.exp(0.5 * value) for value in held])
    near(form(RAW, WORDS, "rejected"), [2 * math.exp(-0.5 * value) for value in held])


def test_critical_tokens_by_hand() -> None:
    raw = torch.tensor([0.25, 0.9, 0.5], dtype=torch.float64).log()
    words = torch.tensor([True, True, False])
    near(CriticalTokens()(raw, words, "chosen"), [1.0, 1.0, 1.0])
    near(CriticalTokens(only_neg=False)(raw, words, "chosen"), [0.25, 0.9, 1.0])
    near(CriticalTokens()(raw, words, "rejected"), [0.75, 0.1, 1.0])


def test_guided_factors_can_be_negative() -> None:
    form = TokenGuided(alpha=2.0, beta=0.5)
    near(form(RAW, WORDS, "chosen"), [1.3, -1.0, 2.204, 1.3, 6.0])
    near(form(RAW, WORDS, "rejected"), [0.7, 3.0, -0.204, 0.7, -4.0])


def test_keys_of_other_transforms_are_named() -> None:
    assert TISDPO(RewardTransform.RANK).unused_keys().keys() == {"low", "high", "top_percent", "k", "mu"}
    assert TISDPO(RewardTransform.BINARY).unused_keys()["k"] == "weights.form.transform=binary"


# ------------------------------------------------------------------------------------------------ capture


@dataclass
class RuleScorer:
    """The log-probability of a token is -(its id) / ``scale``, less 0.5 per prompt token."""

    scale: float
    calls: list[tuple[str, ...]] = field(default_factory=list)

    def scores(
        self, ids: Sequence[EncodedResponse], names: Collection[str], other: Scorer | None = None
    ) -> list[Mapping[str, Tensor]]:
        self.calls.append(tuple(names))
        assert isinstance(other, RuleScorer | None) and (other is None) == ("logps" in names)
        return [
            {
                "logps": torch.tensor([-token / self.scale - 0.5 * len(row.prompt_ids) for token in row.response_ids]),
                "joint:contrast": torch.tensor([-token / 10 for token in row.response_ids]),
            }
            for row in ids
        ]


@dataclass
class Texts:
    """Two prompt tokens and the words of a response by length, then an end token; an instruction is a token a word."""

    def encode(self, pair: PreferencePair) -> Mapping[str, EncodedResponse]:
        if "cannot" in pair.chosen:
            raise RefusedText("cannot be shown", f"pair {pair.pair_id}: cannot be shown")
        found = {}
        for side in SIDES:
            text = pair.response(side)
            ends = [place for place, letter in enumerate(text) if letter == " "] + [len(text)]
            places = list(zip([0, *ends[:-1]], ends, strict=True))
            ids = [end - start for start, end in places]
            found[side] = EncodedResponse([1, 2], [*ids, 9], [*places, (len(text), len(text))])
        return found

    def add_instruction(
        self, pair: PreferencePair, encoded: Mapping[str, EncodedResponse], instruction: str
    ) -> tuple[Mapping[str, EncodedResponse], bool]:
        more = [3] * len(instruction.split())
        return {side: one._replace(prompt_ids=[*one.prompt_ids, *more]) for side, one in encoded.items()}, True


def capture(source: WeightSource, pairs: Sequence[PreferencePair], first: Scorer, second: Scorer) -> list[PairWeights]:
    assert isinstance(source, Contrast | Selection)
    tools = LoadedScorers(scorers=dict(zip(source.scorers, (first, second), strict=True)), texts=Texts())
    return source.capture(pairs, tools, (0,))


def weighed(source: WeightSource, captured: PairWeights, pair: PreferencePair) -> TrainingWeights:
    return training_weights(source, captured, Texts().encode(pair), layers=(0,), pair=pair)


def test_the_log_ratio_stands_on_the_training_tokens_and_no_form_is_stored() -> None:
    # "good words here" has lengths 4, 6, 5 and the end token 9: -id / 4 + id / 2 = id / 4.
    pair = make_pair(0)
    source = Contrast(A, B, TokenGuided(alpha=1.0, beta=1.0))
    (captured,) = capture(source, [pair], RuleScorer(4.0), RuleScorer(2.0))
    near(captured.rounds[0].chosen.weights[0], [1.0, 1.5, 1.25, 2.25])
    assert captured.rounds[0].chosen.token_ids.tolist() == [4, 6, 5, 9] and not captured.rounds[0].cut
    weights = weighed(source, captured, pair)
    near(weights.chosen, [2.0, 2.5, 2.25, 3.25])
    near(weights.rejected, [0.25, -1.25])
    assert weights.factors and weights.coverage == (1.0, 1.0)
    scaled = weighed(replace(source, form=TISDPO(low=-2.0, high=2.0, least=0.0, most=4.0)), captured, pair)
    near(scaled.chosen, [3.0, 3.5, 3.25, 0.0])


def test_distributions_are_compared_in_one_call() -> None:
    pair, first, second = make_pair(0), RuleScorer(4.0), RuleScorer(2.0)
    source = Contrast(A, B, CriticalTokens(only_neg=False))
    (captured,) = capture(source, [pair], first, second)
    assert (first.calls, second.calls) == ([("joint:contrast",)], [])
    near(weighed(source, captured, pair).chosen, [*(math.exp(-token / 10) for token in (4, 6, 5)), 1.0])


def test_one_model_under_two_instructions() -> None:
    """Three words against one: the first prompt is two tokens longer, which costs each token 1 nat."""
    pair, model = make_pair(0), RuleScorer(4.0)
    source = Contrast(ScorerModel(instruction="do it well"), ScorerModel(instruction="badly"), TISDPO())
    (captured,) = capture(source, [pair], model, model)
    near(captured.rounds[0].chosen.weights[0], [-1.0] * 4)
    assert captured.rounds[0].cut


def test_a_pair_that_cannot_be_shown_comes_back_with_the_reason() -> None:
    pairs = [make_pair(0), make_pair(1, "cannot do", "b"), make_pair(2)]
    found = capture(Contrast(A, B, TISDPO()), pairs, RuleScorer(1.0), RuleScorer(2.0))
    assert [one.pair_id for one in found] == [pair.pair_id for pair in pairs]
    assert [len(one.rounds) for one in found] == [1, 0, 1]
    assert isinstance(found[1], UnreadablePair) and found[1].reason == "cannot be shown"
    assert capture(Contrast(A, B, TISDPO()), pairs[1:2], RuleScorer(1.0), RuleScorer(2.0))[0].rounds == ()


def test_missing_scorers_are_named() -> None:
    with pytest.raises(UserError, match=r"weights=contrast compares two models: set weights\.positive\.path and"):
        Contrast(A, B, TISDPO()).capture([make_pair(0)], None, (0,))
    with pytest.raises(UserError, match=r"weights=selection .* weights\.oracle\.path and weights\.reference\.path"):
        Selection(A, B).capture([make_pair(0)], LoadedScorers(scorers={"oracle": RuleScorer(1.0)}, texts=Texts()), (0,))


def test_one_model_asked_in_one_way_is_no_contrast() -> None:
    with pytest.raises(
        UserError, match=r"weights\.positive and weights\.negative are both a with the same instruction"
    ):
        Contrast(A, replace(A, dtype="bfloat16"), TISDPO())
    with pytest.raises(UserError, match=r"weights\.oracle and weights\.reference are both the run's own model"):
        Selection(ScorerModel(), ScorerModel())
    with pytest.raises(UserError, match=r"weights\.negative\.instruction: CriticalTokens compares two models on"):
        Contrast(A, ScorerModel("b", instruction="badly"), CriticalTokens())
    with pytest.raises(UserError, match="a scorer's instruction must contain text"):
        ScorerModel(instruction="  ")


def test_what_is_stored_depends_on_what_is_compared_alone() -> None:
    keys = [
        Contrast(A, B, form).capture_fingerprint()
        for form in (TISDPO(), TISDPO(RewardTransform.PAPER), TokenGuided(), CriticalTokens())
    ]
    assert keys[0] == keys[1] == keys[2] == Selection(A, B).capture_fingerprint() != keys[3]
    asked = Contrast(replace(A, instruction="well"), B, TISDPO()).capture_fingerprint()
    turned = Contrast(A, replace(B, instruction="well"), TISDPO()).capture_fingerprint()
    assert asked != keys[0] and asked != turned


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_score_that_is_not_finite_names_pair_and_side(bad: float) -> None:
    pair = make_pair(0)
    source = Contrast(A, B, TISDPO())
    (captured,) = capture(source, [pair], RuleScorer(1.0), RuleScorer(2.0))
    captured.rounds[0].rejected.weights[0, 0] = bad
    with pytest.raises(UserError, match=rf"^pair {pair.pair_id}, rejected: expected finite scores .*, got {bad}"):
        weighed(source, captured, pair)


# ------------------------------------------------------------------------------------------------ selection


def raw_pair(chosen: list[float], rejected: list[float]) -> tuple[PairWeights, dict[str, EncodedResponse]]:
    encoded = {
        side: EncodedResponse([], list(range(len(row))), [(place, place + 1) for place in range(len(row))])
        for side, row in zip(SIDES, (chosen, rejected), strict=True)
    }
    rows = [
        TokenWeights(torch.tensor(encoded[side].response_ids), torch.tensor(encoded[side].offsets), torch.tensor([row]))
        for side, row in zip(SIDES, (chosen, rejected), strict=True)
    ]
    return PairWeights("by hand", (JudgeRound(True, *rows),)), encoded


def test_the_extremes_are_kept_and_the_first_token_never() -> None:
    """int(0.5 x 4) = 2 of tokens 2 to 5, and int(0.5 x 3) = 1 of tokens 2 to 4."""
    captured, encoded = raw_pair([9.0, 1.0, 3.0, 1.0, -2.0], [-9.0, 0.5, -0.5, 2.0])
    found = training_weights(Selection(A, B, 0.5, as_mean=False), captured, encoded, layers=(0,))
    assert found.chosen.tolist() == [0.0, 1.0, 1.0, 0.0, 0.0]  # the earlier of equal ones
    assert found.rejected.tolist() == [0.0, 0.0, 1.0, 0.0]
    mean = training_weights(Selection(A, B, 0.5), captured, encoded, layers=(0,))
    assert mean.chosen.tolist() == [0.0, 2.5, 2.5, 0.0, 0.0] and mean.rejected.tolist() == [0.0, 0.0, 4.0, 0.0]


@pytest.mark.parametrize("short", [[1.0], [1.0, 2.0, 3.0, 4.0]])
def test_a_side_that_keeps_nothing_silences_the_pair(short: list[float]) -> None:
    """int(0.3 x 3) = 0 tokens of four."""
    captured, encoded = raw_pair([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], short)
    found = training_weights(Selection(A, B), captured, encoded, layers=(0,))
    assert not found.chosen.any() and not found.rejected.any()
    with pytest.raises(UserError, match=r"weights\.top_fraction must be in \(0, 1\], got 0"):
        Selection(A, B, 0.0)


# ------------------------------------------------------------------------------------------------ the grid


@pytest.mark.parametrize("source", [Contrast(A, B, TokenGuided()), Selection(A, B)])  # signed ones, and many zeros
@pytest.mark.parametrize("name", list_groups()["objective"])
def test_every_objective_that_reads_weights_takes_them(name: str, source: WeightSource) -> None:
    """Factors move the loss of every objective that reads weights, of no other, and the loss stays finite."""
    objective = objective_of(name)
    case = make_case(objective)
    generator = torch.Generator().manual_seed(5)
    rows = torch.zeros_like(case.policy.logps)
    half = case.batch.pairs
    for place in range(half):
        raw = [torch.randn(int(case.mask[row].sum()), generator=generator).tolist() for row in (place, place + half)]
        captured, encoded = raw_pair(*raw)
        found = training_weights(source, captured, encoded, layers=(0,))
        for row, weights in ((place, found.chosen), (place + half, found.rejected)):
            rows[row, : len(weights)] = weights.double()
    plain = call(objective, case.with_rows(token_weights={"reward": case.mask.double()}, factors=True))
    moved = call(objective, case.with_rows(token_weights={"reward": rows}, factors=True))
    assert moved.losses.isfinite().all()
    assert bool((moved.losses != plain.losses).any()) == ("token_weights" in objective.requires)
