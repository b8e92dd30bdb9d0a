"""Weights from positions, edits and lengths: numbers by hand, edges, and what objectives get of them."""

import pytest
import torch
from torch import Tensor

from attnpo.data.collate import collate
from attnpo.data.prepare import VOID, EncodedSet, Tally, make_example, prepare_examples
from attnpo.data.rules import AlignRules
from attnpo.models.layouts import padded_layout
from attnpo.models.scored import ScoredLM
from attnpo.objectives.ipo import IPO
from attnpo.objectives.twdpo import OTPO, TwDPO
from attnpo.schema import SIDES, EncodedResponse, PreferenceBatch, TokenStats
from attnpo.text.alignment import mark_differing_tokens
from attnpo.training.module import PreferenceModule
from attnpo.training.optimizer import Optimizer
from attnpo.weights.pipeline import training_weights
from attnpo.weights.sources.decay import Decay
from attnpo.weights.sources.edits import Edits
from attnpo.weights.sources.lengths import LengthRule, Lengths
from tests.objectives.inputs import make_batch, make_rows
from tests.training.tiny import make_examples, tiny_model
from tests.weights.fakes import make_pair

EOS = 99
PAIR = make_pair(0)


def encoded(*ids: int, end: bool = True) -> EncodedResponse:
    """Tokens of one character each, and an end token without one."""
    count = len(ids)
    places = [(place, place + 1) for place in range(count)]
    return EncodedResponse([1], [*ids, *[EOS] * end], places + [(count, count)] * end)


def both(chosen: EncodedResponse, rejected: EncodedResponse) -> dict[str, EncodedResponse]:
    return {"chosen": chosen, "rejected": rejected}


# ------------------------------------------------------------------------------------------------ decay


def test_decay_is_a_power_of_the_position_under_both_conventions() -> None:
    row = encoded(5, 6, 7)
    assert Decay(0.5).weigh(PAIR, "chosen", row).tolist() == [0.5, 0.25, 0.125, 0.0625]
    assert Decay(0.5, 0).weigh(PAIR, "chosen", row).tolist() == [1.0, 0.5, 0.25, 0.125]
    assert Decay(0.5).weigh(PAIR, "chosen", encoded(5, end=False)).tolist() == [0.5]
    assert Decay(1.0).weigh(PAIR, "rejected", row).tolist() == [1.0] * 4


def test_decay_far_out_underflows_to_zero_and_nothing_else() -> None:
    row = Decay(0.5).weigh(PAIR, "chosen", encoded(*range(400)))
    assert bool(row.isfinite().all()) and row[-1] == 0.0 and row[100] == 0.5**101


# ------------------------------------------------------------------------------------------------ edits


def marks(first: str, second: str, least: int = 1) -> tuple[str, str]:
    """The two texts, a token per letter, with a star on each that differs."""
    found = mark_differing_tokens([ord(letter) for letter in first], [ord(letter) for letter in second], least)
    one, two = (
        "".join("*" if star else letter for letter, star in zip(text, row.tolist(), strict=True))
        for text, row in zip((first, second), found, strict=True)
    )
    return one, two


def test_tokens_that_differ_by_hand() -> None:
    assert marks("abcdef", "abxdef") == ("ab*def", "ab*def")
    assert marks("abcdef", "abdef") == ("ab*def", "abdef")
    assert marks("abc", "abc") == ("abc", "abc")
    assert marks("abc", "xyz") == ("***", "***")
    assert marks("abc", "") == ("***", "")
    assert marks("", "") == ("", "")


def test_short_matches_count_as_changed() -> None:
    assert marks("abcdXfgh", "abcdYfgh", 3) == ("abcd*fgh", "abcd*fgh")
    assert marks("abcdXfg", "abcdYfg", 3) == ("abcd***", "abcd***")
    # Neighbours in one text alone are two runs of two, not one of four.
    assert marks("abcd", "abXcd", 3) == ("****", "*****")
    assert marks("abcd", "abXcd", 2) == ("abcd", "ab*cd")


def test_edits_weigh_changed_and_shared_tokens() -> None:
    sides = both(encoded(1, 2, 3, 4, 5), encoded(1, 2, 3, 9, 8, 5))
    found = training_weights(Edits(), None, sides, pair=PAIR)
    # 1 2 3 is a run of three; the single 5 is a run of one, below min_match; the end of turn counts as shared.
    assert found.chosen.tolist() == [1, 1, 1, 3, 3, 1]
    assert found.rejected.tolist() == [1, 1, 1, 3, 3, 3, 1]
    assert found.factors and found.lengths == (6.0, 7.0) and found.coverage == (1.0, 1.0)
    finer = training_weights(Edits(changed=2.0, same=0.5, min_match=1), None, sides, pair=PAIR)
    assert finer.chosen.tolist() == [0.5, 0.5, 0.5, 2, 0.5, 0.5]
    mean = training_weights(Edits(average=True), None, sides, pair=PAIR)
    torch.testing.assert_close(mean.chosen, torch.tensor([0.1, 0.1, 0.1, 0.3, 0.3, 0.1]))
    torch.testing.assert_close(mean.rejected.sum(), torch.tensor(1.0))


def test_edits_at_the_edges() -> None:
    alone = training_weights(Edits(), None, both(encoded(1), encoded(2)), pair=PAIR)
    assert (alone.chosen.tolist(), alone.rejected.tolist()) == ([3, 1], [3, 1])
    equal = training_weights(Edits(), None, both(encoded(1, 2, 3), encoded(1, 2, 3)), pair=PAIR)
    assert equal.chosen.tolist() == equal.rejected.tolist() == [1, 1, 1, 1]
    cut = training_weights(Edits(), None, both(encoded(1, 2, 3, end=False), encoded(1, 2, 3, 4)), pair=PAIR)
    assert (cut.chosen.tolist(), cut.rejected.tolist()) == ([1, 1, 1], [1, 1, 1, 3, 1])
    empty = training_weights(Edits(), None, both(encoded(), encoded(4)), pair=PAIR)
    assert (empty.chosen.tolist(), empty.rejected.tolist()) == ([1], [3, 1])


def test_answers_without_a_changed_token_count_for_nothing_and_are_counted() -> None:
    for average in (False, True):
        source = Edits(same=0.0, average=average)
        sides = both(encoded(1, 2, 3), encoded(1, 2, 3))
        example = make_example("p", sides, training_weights(source, None, sides, pair=PAIR))
        assert example.pair_weight == 0.0 and not example.weights[0].any() and bool(example.weights[0].isfinite().all())
        made = prepare_examples(EncodedSet([PAIR], [sides], Tally(), 1), source, {}, AlignRules())
        unweighted = {f"no weighted token in the {side} response": 1 for side in SIDES}
        assert made.tally.counts == {**unweighted, VOID: 1}


# ------------------------------------------------------------------------------------------------ lengths


def lengths_batch(counts: tuple[int, ...], step: int | None = 0, names: tuple[str, ...] = ()) -> PreferenceBatch:
    return make_batch(make_rows(counts), step=step, pair_ids=names or tuple(map(str, range(len(counts) // 2))))


def weighed(source: Lengths, batch: PreferenceBatch) -> Tensor:
    return source.weights(TokenStats(torch.zeros(batch.main.response_mask.shape)), None, batch)


def test_the_tail_by_hand() -> None:
    batch = lengths_batch((4, 1, 2, 2, 3, 2))  # pairs (4, 2), (1, 3), (2, 2)
    expected = [[1, 1, 0.25, 0.25], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0], [1, 0.25, 0.25, 0], [1, 1, 0, 0]]
    assert weighed(Lengths(alpha=0.25), batch).tolist() == expected
    poet = weighed(Lengths(alpha=0.0), batch)
    assert poet.sum(-1).tolist() == [2, 1, 2, 2, 1, 2]
    whole = weighed(Lengths(alpha=1.0), batch)
    assert torch.equal(whole, batch.main.response_mask.float())


def subsample(seed: int = 0) -> Lengths:
    return Lengths(LengthRule.SUBSAMPLE, seed=seed)


def test_a_subsample_keeps_as_many_tokens_of_either_side() -> None:
    batch = lengths_batch((7, 1, 3, 2, 5, 3))
    found = weighed(subsample(), batch)
    assert found.sum(-1).tolist() == [2, 1, 3, 2, 1, 3] and set(found.flatten().tolist()) == {0.0, 1.0}
    assert not found[~batch.main.response_mask].any()
    assert torch.equal(found[[1, 3, 2, 5]], batch.main.response_mask[[1, 3, 2, 5]].float()), "shorter sides are whole"


def test_a_draw_depends_on_seed_step_pair_and_nothing_else() -> None:
    counts, names = (30, 25, 5, 6), ("first", "second")
    found = weighed(subsample(), lengths_batch(counts, 3, names))
    assert torch.equal(found, weighed(subsample(), lengths_batch(counts, 3, names)))
    torch.manual_seed(5)
    alone = weighed(subsample(), lengths_batch((25, 6), 3, ("second",)))
    assert torch.equal(alone[0], found[1, :25]), "the same in another micro-batch, with other padding"
    others = (
        weighed(subsample(), lengths_batch(counts, 4, names)),
        weighed(subsample(1), lengths_batch(counts, 3, names)),
        weighed(subsample(), lengths_batch(counts, 3, ("other", "second"))),
        weighed(subsample(), lengths_batch(counts, None, names)),
    )
    assert all(not torch.equal(other[0], found[0]) for other in others)


def test_every_token_of_the_longer_side_is_drawn_alike() -> None:
    """2 of 6: each place a third of the time; 800 draws have a standard deviation of 0.017."""
    batch = lengths_batch((6,) * 800 + (2,) * 800)
    share = weighed(subsample(), batch)[:800].mean(0)
    assert (share - 1 / 3).abs().max() < 0.04


def test_lengths_have_the_precision_of_training() -> None:
    batch = lengths_batch((3, 2))
    for given, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        stats = TokenStats(torch.zeros(batch.main.response_mask.shape, dtype=given))
        assert Lengths().weights(stats, None, batch).dtype == expected


def test_settings_of_lengths() -> None:
    assert Lengths().unused_keys().keys() == {"seed"} and subsample().unused_keys().keys() == {"alpha"}


def test_training_draws_by_step_and_validation_always_alike() -> None:
    batch = collate(make_examples(6), padded_layout, 0, 6)
    models = [ScoredLM(tiny_model()) for _ in range(3)]
    one, two = (PreferenceModule(model, models[2], OTPO(0.5), Optimizer(), 3, subsample()) for model in models[:2])
    drawn = {}
    for name, made, training in (("first", one, True), ("again", two, True), ("validation", one, False)):
        made.train(training)
        scored = made.score(batch)[0]
        assert scored.step == (0 if training else None) and scored.main.factors
        drawn[name] = scored.main.token_weights["reward"]
    assert torch.equal(drawn["first"], drawn["again"]) and not torch.equal(drawn["first"], drawn["validation"])


# ------------------------------------------------------------------------------------------------ as sources


def test_offline_factors_reach_the_objective_as_factors() -> None:
    """A sum takes them as they are, a mean over n; a distribution would be multiplied by |y|."""
    sides = both(encoded(5, 6), encoded(7))
    found = training_weights(Decay(0.5, 0), None, sides, pair=PAIR)
    batch = collate([make_example("p", sides, found)], padded_layout, 0, 1)
    assert batch.main.factors
    ratio = torch.where(batch.main.response_mask, torch.tensor([[1.0, 2.0, 4.0], [3.0, 5.0, 0.0]]), 0.0)
    policy, reference = TokenStats(ratio), TokenStats(torch.zeros_like(ratio))
    summed = TwDPO(beta=1.0)(policy, reference, batch)
    assert (summed.chosen_rewards.item(), summed.rejected_rewards.item()) == (1 + 1 + 1, 3 + 2.5)
    mean = IPO(beta=1.0)(policy, reference, batch)
    assert mean.chosen_rewards.item() == pytest.approx(3 / 3) and mean.rejected_rewards.item() == 5.5 / 2
