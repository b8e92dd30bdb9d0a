"""Faithfulness with a judge that counts known words, so that every number is known by hand."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from attnpo.judge.base import JudgePrompt, JudgeReading, LoadedJudge
from attnpo.schema import PreferencePair, UserError
from attnpo.weights.faithfulness import (
    EMPTIED,
    REFUSED,
    Rankings,
    RemovalMode,
    RemovalSettings,
    TokenRanking,
    count_tokens,
    draw_matched_tokens,
    make_ranking,
    measure_token_removal,
    position_bins,
    rank_tokens,
    remaining_text,
    top_tokens,
)
from attnpo.weights.sources.attention import Attention
from tests.weights.fakes import LABELS, FakeJudge, FakePrompts, make_pair, word_id, words

GOOD, BIAS = "good", 0.7


@dataclass
class CountingJudge:
    """Two nats for every "good" of an answer, and a liking for answer A; remembers what it was asked for."""

    num_layers: int = 1
    prompts: list[list[int]] = field(default_factory=list)
    layers: set[tuple[int, ...]] = field(default_factory=set)

    def fingerprint(self) -> dict[str, Any]:
        return {}

    def read(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        layers: Sequence[int],
        per_head: bool = False,
        rollout: bool = False,
        verdict: bool = True,
        label_ids: tuple[int, int] | None = None,
    ) -> list[JudgeReading]:
        assert verdict and label_ids == LABELS
        self.layers.add(tuple(layers))
        self.prompts += map(list, prompts)
        return [self._one(list(ids)) for ids in prompts]

    def _one(self, ids: list[int]) -> JudgeReading:
        cut = ids.index(3)
        first, second = (part.count(word_id(GOOD)) for part in (ids[:cut], ids[cut:]))
        logits = torch.tensor([2.0 * first + BIAS, 2.0 * second])
        return JudgeReading(torch.zeros(0, len(ids)), None, logits, LABELS[0])


def response(good: Sequence[int], length: int = 20) -> str:
    return " ".join(GOOD if place in good else f"w{place}" for place in range(length))


def pair(number: int = 0, chosen: Sequence[int] = (4, 12), rejected: Sequence[int] = ()) -> PreferencePair:
    return make_pair(number, response(chosen), response(rejected))


def ranked(pairs: Sequence[PreferencePair], weigh: Any) -> Rankings:
    """A ranking by what ``weigh`` says of a word and its place."""
    found = {}
    for item in pairs:
        sides = {}
        for side in ("chosen", "rejected"):
            text = item.response(side)
            places = words(text)
            sides[side] = make_ranking(places, [weigh(text[a:b].strip(), n) for n, (a, b) in enumerate(places)])
        found[item.pair_id] = sides
    return found


def right(word: str, place: int) -> float:
    return 1.0 if word == GOOD else 0.0


def wrong(word: str, place: int) -> float:
    return 0.0 if word == GOOD else 1.0 + place


# ------------------------------------------------------------------------------------------------ text


WORDS = ((0, 3), (4, 9), (10, 13), (14, 18), (19, 20))  # of "the broth was poor ."
BLANKS = ((0, 3), (3, 9), (9, 13), (13, 18), (18, 20))  # the same, each word with the blank before it


@pytest.mark.parametrize("offsets", [WORDS, BLANKS])
@pytest.mark.parametrize(
    ("kept", "left"),
    [
        ({0, 1, 2, 4}, "the broth was ."),
        ({1, 2, 3, 4}, "broth was poor ."),
        ({0, 1, 2, 3}, "the broth was poor"),
        ({0, 4}, "the ."),
        ({0, 2, 4}, "the was ."),
        ({0, 1, 2, 3, 4}, "the broth was poor ."),
        (set(), ""),
    ],
)
def test_words_go_with_their_blank(offsets: tuple[tuple[int, int], ...], kept: set[int], left: str) -> None:
    assert remaining_text("the broth was poor .", offsets, kept) == left


@pytest.mark.parametrize(
    ("text", "offsets", "kept", "left"),
    [
        ("not unhappy", ((0, 3), (3, 6), (6, 11)), {0, 2}, "not happy"),  # a piece of a word with the blank before it
        ("unhappily", ((0, 2), (2, 7), (7, 9)), {0, 2}, "unly"),  # a piece inside a word
        ("one.\n\nTwo", ((0, 3), (3, 6), (6, 9)), {0, 2}, "one\n\nTwo"),  # a paragraph stays one
        ("a\n- b", ((0, 1), (2, 3), (4, 5)), {0, 2}, "a\nb"),
        ("one two, cut off", ((0, 3), (4, 7), (7, 8)), {0, 1, 2}, "one two,"),  # what the judge did not see
        ("  one  two  ", ((2, 5), (7, 10)), {0, 1}, "one  two"),
        ("x\U0001f600y", ((0, 1), (1, 2), (1, 2), (2, 3)), {0, 1, 3}, "xy"),  # half a character is none
    ],
)
def test_what_is_left_is_tidy(text: str, offsets: tuple[tuple[int, int], ...], kept: set[int], left: str) -> None:
    assert remaining_text(text, offsets, kept) == left


# ------------------------------------------------------------------------------------------------ tokens


def test_shares_are_whole_tokens() -> None:
    assert [count_tokens(0.1, n) for n in (1, 4, 14, 15, 25, 26)] == [1, 1, 1, 2, 3, 3]
    assert count_tokens(0.4, 26) == 10


def test_random_tokens_match_in_count_and_position() -> None:
    chosen = {0, 1, 2, 7, 25}
    bins = position_bins(26)
    assert sorted(set(bins)) == [0, 1, 2]
    drawn = [draw_matched_tokens(chosen, 26, Random(f"key{draw}")) for draw in range(50)]
    for found in drawn:
        assert len(found) == len(chosen)
        assert Counter(bins[place] for place in found) == Counter(bins[place] for place in chosen)
    assert len({frozenset(found) for found in drawn}) > 40
    assert set().union(*drawn) == set(range(9)) | set(range(18, 26))  # every token of their bins, none of the middle
    assert draw_matched_tokens(chosen, 26, Random("key3")) == drawn[3]


def test_bins_are_as_fine_as_the_response_allows() -> None:
    assert [max(position_bins(count)) + 1 for count in (1, 15, 16, 79, 80, 3000)] == [1, 1, 2, 9, 10, 10]


def test_ties_favour_no_place() -> None:
    row = TokenRanking(tuple((n, n + 1) for n in range(20)), (1.0,) * 20)
    found = Counter(place for key in range(400) for place in top_tokens(row, 2, Random(str(key))))
    assert len(found) == 20 and max(found.values()) < 4 * min(found.values())
    weighed = TokenRanking(row.offsets, (0.0,) * 19 + (1.0,))
    assert 19 in top_tokens(weighed, 2, Random("any"))


# ------------------------------------------------------------------------------------------------ measuring


def test_the_right_tokens_are_found_and_others_are_not() -> None:
    pairs = [pair(number) for number in range(12)]
    judge, removal = CountingJudge(), RemovalSettings(shares=(0.1, 0.2), draws=4)
    sources = {"right": ranked(pairs, right), "wrong": ranked(pairs, wrong)}
    found = measure_token_removal(pairs, sources, judge, FakePrompts(), removal)
    np.testing.assert_allclose(found.full, 4.0)  # both orders averaged: the liking for A is gone
    for share in (0.1, 0.2):
        np.testing.assert_allclose(found.log_odds_drop("right", share), 4.0)
        np.testing.assert_allclose(found.log_odds_drop("wrong", share), 0.0, atol=1e-6)
        np.testing.assert_allclose(found.changes["right"][RemovalMode.KEEP, share].top, 4.0)
        np.testing.assert_allclose(found.changes["wrong"][RemovalMode.KEEP, share].top, 0.0, atol=1e-6)
    # Four of twenty words fall at random: of the two that count about a fifth each, of four nats 0.8.
    assert 0.2 < (found.full - found.changes["right"][RemovalMode.REMOVE, 0.2].random).mean() < 1.8
    assert found.mean_advantages("right").mean() > 2.5 > -0.01 > found.mean_advantages("wrong").mean()
    each = [found.advantage_over_random("right", RemovalMode.REMOVE, share) for share in (0.1, 0.2)]
    np.testing.assert_allclose(found.mean_advantages("right"), (each[0] + each[1]) / 2)
    assert found.mean_advantages("right").shape == (12,)
    assert found.advantage_over_random("right", RemovalMode.KEEP, 0.1).mean() > 2.5
    assert judge.layers == {()}
    assert found.prompts == len(judge.prompts)


def test_every_prompt_is_read_once() -> None:
    pairs = [pair(number) for number in range(3)]
    rows = ranked(pairs, right)
    judge, twice = CountingJudge(), CountingJudge()
    removal = RemovalSettings(shares=(0.1,), draws=3)
    one = measure_token_removal(pairs, {"a": rows}, judge, FakePrompts(), removal)
    two = measure_token_removal(pairs, {"a": rows, "b": rows}, twice, FakePrompts(), removal)
    assert two.prompts == one.prompts == len(twice.prompts)  # the same top tokens meet the same random ones
    np.testing.assert_array_equal(
        two.changes["b"][RemovalMode.REMOVE, 0.1].random, one.changes["a"][RemovalMode.REMOVE, 0.1].random
    )


def test_random_tokens_depend_on_the_seed_alone() -> None:
    pairs = [pair(number) for number in range(6)]

    def falls(seed: int, order: list[PreferencePair]) -> dict[str, float]:
        removal = RemovalSettings(shares=(0.4,), draws=1, seed=seed, modes=(RemovalMode.REMOVE,))
        found = measure_token_removal(order, {"right": ranked(order, right)}, NoBias(), FakePrompts(), removal)
        return dict(
            zip(found.pair_ids, found.changes["right"][RemovalMode.REMOVE, 0.4].random.round(4).tolist(), strict=True)
        )

    assert falls(0, pairs) == falls(0, pairs[::-1])
    assert falls(0, pairs) != falls(1, pairs)


@dataclass
class NoBias(CountingJudge):
    """The same without a liking for answer A, so that a prompt says the same in both orders."""

    def _one(self, ids: list[int]) -> JudgeReading:
        reading = super()._one(ids)
        assert reading.verdict_logits is not None
        return JudgeReading(reading.rows, None, reading.verdict_logits - torch.tensor([BIAS, 0.0]), LABELS[0])


def test_log_odds_are_towards_the_judges_own_verdict_not_the_label() -> None:
    """In the second pair the judge prefers the rejected response."""
    pairs = [pair(0), pair(1, chosen=(), rejected=(3, 9, 11))]
    removal = RemovalSettings(shares=(0.2,), draws=1)
    found = measure_token_removal(pairs, {"right": ranked(pairs, right)}, CountingJudge(), FakePrompts(), removal)
    np.testing.assert_allclose(found.full, [4.0, 6.0], atol=1e-6)
    np.testing.assert_allclose(found.log_odds_drop("right", 0.2), found.full, atol=1e-6)


def test_a_response_that_loses_its_last_token_is_counted() -> None:
    short = make_pair(0, GOOD, response(()))
    removal = RemovalSettings(shares=(0.1,), draws=1, modes=(RemovalMode.REMOVE,))
    found = measure_token_removal([short], {"right": ranked([short], right)}, CountingJudge(), FakePrompts(), removal)
    assert found.counts[EMPTIED] > 0
    whole = measure_token_removal([pair()], {"right": ranked([pair()], right)}, CountingJudge(), FakePrompts(), removal)
    assert whole.counts == {EMPTIED: 0, REFUSED: 0}


class Choosy(FakePrompts):
    """Refuses texts in which two words have met."""

    def build(self, pair: PreferencePair) -> tuple[JudgePrompt, JudgePrompt]:
        if "w3 w5" in pair.chosen:
            raise UserError("these two may not meet")
        return super().build(pair)


def test_a_pair_that_cannot_be_shown_any_more_is_left_out_and_counted() -> None:
    pairs = [pair(0), pair(1, chosen=(6, 12)), pair(2, chosen=(7, 12))]  # without word 4 in the first alone
    removal = RemovalSettings(shares=(0.1,), draws=1, modes=(RemovalMode.REMOVE,), seed=3)
    found = measure_token_removal(pairs, {"right": ranked(pairs, right)}, CountingJudge(), Choosy(), removal)
    assert pairs[0].pair_id not in found.pair_ids
    assert found.counts[REFUSED] == len(pairs) - len(found.pair_ids) >= 1
    assert len(found.full) == len(found.pair_ids) == len(found.log_odds_drop("right", 0.1))
    with pytest.raises(UserError, match="none of the 1 pairs can be judged"):
        measure_token_removal(pairs[:1], {"right": ranked(pairs, right)}, CountingJudge(), Choosy(), removal)


@pytest.mark.parametrize("wrong_rules", [{"shares": ()}, {"shares": (1.0,)}, {"draws": 0}, {"modes": ()}])
def test_rules_that_cannot_be_are_refused(wrong_rules: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="expected"):
        RemovalSettings(**wrong_rules)


def test_rankings_are_the_finished_weights_of_a_layer() -> None:
    pairs = [make_pair(0, "a b c d e f", "g h")]
    source = Attention(layer=2)
    captured = {item.pair_id: item for item in source.capture(pairs, LoadedJudge(FakeJudge(), FakePrompts()), (1, 2))}
    found = rank_tokens(source, captured, (1, 2))[pairs[0].pair_id]["chosen"]
    assert found.offsets == tuple(words("a b c d e f"))
    assert sum(found.weights) == pytest.approx(1.0)
    assert found.weights[0] == pytest.approx(1 / 6)  # the sink rule
