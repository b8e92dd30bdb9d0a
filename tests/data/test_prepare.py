"""From pairs to examples: every cut and every dropped pair is counted."""

from collections import Counter
from cProfile import Profile
from typing import Any

import pytest
import torch

from attnpo.data.prepare import (
    APART,
    SILENT,
    UNASKED,
    UNREADABLE,
    VOID,
    EncodedSet,
    ExampleSet,
    Tally,
    encode_pairs,
    fit_transforms,
    percentiles,
    prepare_examples,
    unknown_token_share,
)
from attnpo.data.rules import AlignRules, KeepSide, LengthRules, OverlongAction
from attnpo.lab.testbed.grammar import Grammar
from attnpo.lab.testbed.tokenizer import build_tokenizer
from attnpo.schema import SIDES, EncodedResponse, JudgeRound, PairWeights, PreferencePair, TokenWeights, UserError
from attnpo.text.chat import ChatFormat
from attnpo.weights.capture import UnreadablePair
from attnpo.weights.sources.attention import Attention
from attnpo.weights.sources.uniform import Uniform
from attnpo.weights.sources.verbalized import Verbalized
from attnpo.weights.transforms import TokenProfile

GRAMMAR = Grammar()
WORDS = [word for word in GRAMMAR.vocabulary() if word.isalpha()]
FOREIGN = 10**6  # an id that no training token has


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    return ChatFormat(build_tokenizer(GRAMMAR))


def make_pair(chosen: int, rejected: int, shift: int = 0, question: int = 4) -> PreferencePair:
    """A pair whose sides are that many distinct words, one token each."""
    words = WORDS[shift:]
    return PreferencePair.from_texts(
        [{"role": "user", "content": " ".join(words[:question])}],
        " ".join(words[:chosen]),
        " ".join(words[20 : 20 + rejected]),
    )


# Prompts of <bos> <user> 4 words <assistant>: 7 tokens. Responses of n words: n + 1 tokens with the end of turn.
PROMPT = 7


def test_the_share_of_unknown_tokens(chat: ChatFormat) -> None:
    """Of the pair's 7 response tokens, ends of turn among them, the two of foreign words."""
    pair = PreferencePair.from_texts(
        [{"role": "user", "content": WORDS[0]}], f"{WORDS[1]} qwzx qzzx", f"{WORDS[2]} {WORDS[3]}"
    )
    known = encode_pairs([make_pair(3, 6)], chat, LengthRules())
    assert unknown_token_share(known, chat.tokenizer) == 0
    assert unknown_token_share(encode_pairs([pair], chat, LengthRules()), chat.tokenizer) == pytest.approx(2 / 7)
    assert unknown_token_share(EncodedSet([], [], Tally(), 0), chat.tokenizer) == 0


class Calls:
    """Tokenizer that counts the texts that it is asked for one by one, and how often for many."""

    def __init__(self, backend: Any) -> None:
        self.backend, self.single, self.many = backend, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def encode(self, *args: Any, **options: Any) -> Any:
        self.single += 1
        return self.backend.encode(*args, **options)

    def encode_batch(self, *args: Any, **options: Any) -> Any:
        self.many += 1
        return self.backend.encode_batch(*args, **options)


def test_texts_are_tokenised_many_at_once(chat: ChatFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(chat.tokenizer.backend_tokenizer)
    monkeypatch.setattr(type(chat.tokenizer), "backend_tokenizer", calls)
    chat = ChatFormat(chat.tokenizer)
    calls.single = 0
    pairs = [make_pair(2, 3, shift=number) for number in range(12)]
    assert len(encode_pairs(pairs, chat, LengthRules(200, 100)).pairs) == 12
    assert (calls.single, calls.many) == (0, 2), "a batch of all texts, and an empty one at the end"


def test_the_lengths_this_file_counts_with(chat: ChatFormat) -> None:
    encoded = chat.encode(make_pair(3, 6).prompt, make_pair(3, 6).chosen)
    assert (len(encoded.prompt_ids), len(encoded.response_ids)) == (PROMPT, 4)


def test_what_fits_is_left_alone(chat: ChatFormat) -> None:
    pairs = [make_pair(3, 6), make_pair(2, 2, shift=1)]
    found = encode_pairs(pairs, chat, LengthRules(PROMPT + 7, PROMPT))
    assert (found.pairs, found.read, found.tally.counts) == (pairs, 2, Counter())
    assert [[len(sides[side].response_ids) for side in SIDES] for sides in found.encoded] == [[4, 7], [3, 3]]


def test_a_response_keeps_its_beginning_and_the_cut_is_counted(chat: ChatFormat) -> None:
    pairs = [make_pair(3, 6), make_pair(8, 9, shift=1), make_pair(1, 1, shift=2)]
    limit = PROMPT + 5
    found = encode_pairs(pairs, chat, LengthRules(limit, PROMPT))
    assert found.read == len(found.pairs) == 3
    assert found.tally.counts == {
        f"cut: chosen response at lengths.max_length {limit}": 1,
        f"cut: rejected response at lengths.max_length {limit}": 2,
    }
    whole = chat.encode(pairs[0].prompt, pairs[0].rejected)
    assert found.encoded[0]["rejected"].response_ids == whole.response_ids[:5]
    assert found.encoded[0]["chosen"] == chat.encode(pairs[0].prompt, pairs[0].chosen)


def test_a_prompt_keeps_its_end_and_is_counted_once_per_pair(chat: ChatFormat) -> None:
    pair = make_pair(2, 2)
    found = encode_pairs([pair], chat, LengthRules(PROMPT + 20, PROMPT - 2))
    assert found.tally.counts == {f"cut: prompt to its last {PROMPT - 2} tokens": 1}
    for side in SIDES:
        whole = chat.encode(pair.prompt, pair.response(side))
        assert found.encoded[0][side].prompt_ids == whole.prompt_ids[2:]
        assert found.encoded[0][side].response_ids == whole.response_ids


def test_keeping_the_end_cuts_the_prompt_first_and_is_counted(chat: ChatFormat) -> None:
    """The rejected response takes two tokens of the prompt; the long chosen one takes all, and loses three itself."""
    limit = PROMPT + 3
    pair = make_pair(11, 4)
    found = encode_pairs([pair], chat, LengthRules(limit, PROMPT, keep=KeepSide.END))
    assert found.tally.counts == {
        f"cut: beginning of the chosen response, and all of its prompt, at lengths.max_length {limit}": 1,
        f"cut: beginning of the prompt for the rejected response at lengths.max_length {limit}": 1,
    }
    for side in SIDES:
        whole, kept = chat.encode(pair.prompt, pair.response(side)), found.encoded[0][side]
        assert kept.prompt_ids + kept.response_ids == (whole.prompt_ids + whole.response_ids)[-limit:]
        assert kept.offsets == whole.offsets[-len(kept.response_ids) :]
    assert [len(found.encoded[0][side].prompt_ids) for side in SIDES] == [1, PROMPT - 2]
    dropped = make_pair(8, 4, shift=1)
    with pytest.raises(UserError, match=f"dropped: prompt and response longer than lengths.max_length {limit}: 1"):
        encode_pairs([dropped], chat, LengthRules(limit, PROMPT, OverlongAction.DROP, KeepSide.END))


def test_weights_reach_the_end_that_is_kept(chat: ChatFormat) -> None:
    """Each kept token has the weight that it has in the whole response."""
    pair = make_pair(11, 4)
    rows = {}
    for name, rules in (("whole", LengthRules(200, 100)), ("end", LengthRules(PROMPT + 3, PROMPT, keep=KeepSide.END))):
        encoded = encode_pairs([pair], chat, rules)
        whole = {side: chat.encode(pair.prompt, pair.response(side)) for side in SIDES}
        rounds = captured(pair, whole, {"chosen": 11, "rejected": 4})
        first = rounds.rounds[0].chosen.weights
        first.copy_(torch.arange(1, first.shape[-1] + 1) / 100)
        made = prepare_examples(encoded, Attention(1), {pair.pair_id: rounds}, AlignRules(), (1,))
        rows[name] = made.examples[0].weights[0]
    assert len(rows["end"]) == PROMPT + 2 < len(rows["whole"]) == 12
    assert rows["end"].tolist() == pytest.approx(rows["whole"][-len(rows["end"]) :].tolist())


@pytest.mark.parametrize(
    ("max_length", "max_prompt_length", "left", "event"),
    [
        (PROMPT + 5, PROMPT, [0, 2], f"dropped: prompt and response longer than lengths.max_length {PROMPT + 5}"),
        (PROMPT + 20, PROMPT - 1, [2], f"dropped: prompt longer than lengths.max_prompt_length {PROMPT - 1}"),
    ],
    ids=["response", "prompt"],
)
def test_drop_leaves_out_whole_pairs(
    chat: ChatFormat, max_length: int, max_prompt_length: int, left: list[int], event: str
) -> None:
    """By its responses the second pair alone is too long; by the prompt all but the one with a short prompt."""
    pairs = [make_pair(3, 4), make_pair(3, 6, shift=1), make_pair(2, 2, shift=2, question=2)]
    found = encode_pairs(pairs, chat, LengthRules(max_length, max_prompt_length, OverlongAction.DROP))
    assert found.pairs == [pairs[i] for i in left]
    assert found.tally.counts == {event: 3 - len(left)}
    made = prepare_examples(found, Uniform(), {}, AlignRules())
    assert (made.read, made.dropped, len(made.examples)) == (3, 3 - len(left), len(left))
    assert made.tally.counts == found.tally.counts


SAME = "dropped: both responses have the same training tokens"


def test_responses_of_the_same_tokens_are_dropped_and_counted(chat: ChatFormat) -> None:
    """By blanks that the tokenizer does not keep, and by a cut of what tells them apart; others stay."""
    words = " ".join(WORDS[:9])
    turns = make_pair(3, 6).prompt
    trimmed = PreferencePair.from_texts(turns, f"{words} ", words)
    cut = PreferencePair.from_texts(turns, f"{words} {WORDS[20]}", f"{words} {WORDS[21]}")
    good = make_pair(3, 6)
    found = encode_pairs([good, trimmed, cut], chat, LengthRules(PROMPT + 9, PROMPT))
    assert [pair.pair_id for pair in found.pairs] == [good.pair_id]
    assert found.tally.first[SAME] == [trimmed.pair_id[:8], cut.pair_id[:8]]
    assert prepare_examples(found, Uniform(), {}, AlignRules()).dropped == 2
    assert encode_pairs([cut], chat, LengthRules(PROMPT + 10, PROMPT)).pairs == [cut], "a token later they differ"
    with pytest.raises(UserError, match=rf"none of the 2 pairs is usable \({SAME}: 2 \("):
        encode_pairs([trimmed, cut], chat, LengthRules(PROMPT + 9, PROMPT))


@pytest.mark.parametrize(("rendered", "warned"), [(3, True), (2, True), (1, False), (0, False)])
def test_prompts_that_are_rendered_already(
    chat: ChatFormat, caplog: pytest.LogCaptureFixture, rendered: int, warned: bool
) -> None:
    pairs = [make_pair(3, 6, shift) for shift in range(3)]
    written = [chat.render(pair.prompt, add_generation_prompt=True) for pair in pairs[:rendered]]
    asked = [
        PreferencePair.from_texts([{"role": "user", "content": text}], "a good seat", "a bad seat") for text in written
    ]
    found = encode_pairs([*asked, *pairs[rendered:]], chat, LengthRules(200, 100))
    assert found.tally.counts["special token spelled out in the prompt"] == rendered and len(found.pairs) == 3
    assert (f"{rendered} of 3 prompts (first: " in caplog.text) is warned


def captured(pair: PreferencePair, sides: dict[str, EncodedResponse], known: dict[str, int]) -> PairWeights:
    """Two rounds of equal attention on the response's tokens, of which only the first ``known`` have training ids."""
    rows = {}
    for side in SIDES:
        content = len(sides[side].response_ids) - 1
        ids = [*sides[side].response_ids[: known[side]], *[FOREIGN] * (content - known[side])]
        rows[side] = TokenWeights(
            torch.tensor(ids), torch.tensor(sides[side].offsets[:content]), torch.full((1, content), 0.01)
        )
    return PairWeights(
        pair.pair_id, tuple(JudgeRound(first, rows["chosen"], rows["rejected"]) for first in (True, False))
    )


def weighed(chat: ChatFormat, known: list[tuple[int, int]], min_coverage: float) -> tuple[EncodedSet, ExampleSet]:
    """Pairs of 4 and 8 content tokens, as many of them matched as ``known`` says."""
    pairs = [make_pair(4, 8, shift=i) for i in range(len(known))]
    encoded = encode_pairs(pairs, chat, LengthRules(200, 100))
    rows = {
        pair.pair_id: captured(pair, sides, {"chosen": count[0], "rejected": count[1]})
        for pair, sides, count in zip(encoded.pairs, encoded.encoded, known, strict=True)
    }
    align = AlignRules(min_coverage=min_coverage)
    return encoded, prepare_examples(encoded, Attention(layer=1).resolve(1), rows, align, layers=(1,))


def test_pairs_below_the_least_coverage_are_dropped_and_counted(chat: ChatFormat) -> None:
    encoded, made = weighed(chat, [(4, 8), (4, 5), (4, 6), (2, 8)], min_coverage=0.75)
    assert [example.pair_id for example in made.examples] == [encoded.pairs[0].pair_id, encoded.pairs[2].pair_id]
    assert [example.coverage for example in made.examples] == [(1.0, 1.0), (1.0, 0.75)]
    assert made.tally.counts == {"dropped: coverage below align.min_coverage 0.75": 2}
    assert made.tally.first == {
        "dropped: coverage below align.min_coverage 0.75": [encoded.pairs[i].pair_id[:8] for i in (1, 3)]
    }
    assert (made.read, made.dropped, len(made.examples)) == (4, 2, 2)
    assert (made.content_tokens, made.unmatched_tokens) == (4 * 12, 3 + 2 + 2)
    assert made.unmatched_share == pytest.approx(7 / 48)


def test_kept_weights_are_not_rescaled_and_the_end_of_turn_has_none(chat: ChatFormat) -> None:
    _, made = weighed(chat, [(4, 6)], min_coverage=0.0)
    chosen, rejected = made.examples[0].weights
    assert chosen.tolist() == pytest.approx([1 / 4] * 4 + [0.0])
    assert rejected.tolist() == pytest.approx([1 / 8] * 6 + [0.0] * 3)
    assert made.examples[0].lengths == (4.0, 8.0)


def test_a_pair_without_any_weighted_token_counts_for_nothing(chat: ChatFormat) -> None:
    """Its pair weight is 0 and both sides are counted; a pair with one empty side keeps its weight."""
    encoded, made = weighed(chat, [(0, 0), (0, 8), (4, 8)], min_coverage=0.0)
    assert [example.pair_weight for example in made.examples] == [0.0, 1.0, 1.0]
    assert made.tally.counts == {
        "no weighted token in the chosen response": 2,
        "no weighted token in the rejected response": 1,
        VOID: 1,
    }
    assert (made.read, made.dropped) == (3, 0)
    assert f": 1 ({encoded.pairs[0].pair_id[:8]})" in made.tally.format_lines()[1]


def test_pairs_the_judge_could_not_be_shown_are_counted_by_reason(chat: ChatFormat) -> None:
    pairs = [make_pair(4, 8, shift=i) for i in range(4)]
    encoded = encode_pairs(pairs, chat, LengthRules(200, 100))
    rows: dict[str, PairWeights] = {
        pair.pair_id: UnreadablePair(pair.pair_id, (), reason, "its story")
        for pair, reason in zip(pairs, ("too long", "odd", "too long"), strict=False)
    }
    rows[pairs[3].pair_id] = captured(pairs[3], encoded.encoded[3], {"chosen": 4, "rejected": 8})
    made = prepare_examples(encoded, Attention(layer=1).resolve(1), rows, AlignRules(), layers=(1,))
    assert made.tally.first == {
        f"{UNREADABLE}: too long": [pairs[0].pair_id[:8], pairs[2].pair_id[:8]],
        f"{UNREADABLE}: odd": [pairs[1].pair_id[:8]],
    }
    assert (made.tally.counts.total(), made.dropped, len(made.examples)) == (3, 3, 1)


def test_a_response_that_is_tokenised_on_its_own_is_counted_with_its_pair() -> None:
    """The template's prompt ends in the middle of a word; the pair is kept."""
    tokenizer = build_tokenizer(GRAMMAR)
    split = ChatFormat(tokenizer)
    template = str(tokenizer.chat_template)
    tokenizer.chat_template = template.replace("'<assistant> '", "'<assistant>'").replace(
        "<assistant>", "<assistant> x"
    )
    merged = ChatFormat(tokenizer)
    pair = make_pair(2, 3)
    assert encode_pairs([pair], split, LengthRules(200, 100)).tally.counts == Counter()
    found = encode_pairs([pair], merged, LengthRules(200, 100))
    assert found.pairs == [pair]
    assert found.tally.first == {f"{side} response {APART}": [pair.pair_id[:8]] for side in SIDES}


def test_missing_weights_are_an_error(chat: ChatFormat) -> None:
    encoded = encode_pairs([make_pair(4, 8)], chat, LengthRules(200, 100))
    with pytest.raises(UserError, match=r"expected captured weights for Attention; run attnpo\.weigh"):
        prepare_examples(encoded, Attention(layer=1), {}, AlignRules(), layers=(1,))


def test_preparing_does_not_touch_the_account_of_encoding(chat: ChatFormat) -> None:
    """The same encoded pairs serve several sources; their tallies must not add up."""
    encoded, made = weighed(chat, [(0, 0)], min_coverage=0.0)
    assert encoded.tally.counts == Counter() and encoded.tally.first == {}
    assert sum(made.tally.counts.values()) == 3  # a line for each side, and one for the pair


def test_a_tally_counts_all_and_names_three() -> None:
    tally = Tally()
    for i in range(5):
        tally.add("dropped: why", f"{i}" * 32)
    tally.add("cut: what", "a" * 32)
    assert tally.counts == {"dropped: why": 5, "cut: what": 1}
    assert tally.format_lines() == ["cut: what: 1 (aaaaaaaa)", "dropped: why: 5 (00000000, 11111111, 22222222)"]


def test_percentiles_are_places_of_the_rising_list() -> None:
    """Place q * n // 100, counted from 0, and never beyond the last."""
    assert percentiles([17, 11, 15, 13]) == {"p50": 15, "p90": 17, "p99": 17, "max": 17}
    assert percentiles(range(200)) == {"p50": 100, "p90": 180, "p99": 198, "max": 199}
    assert percentiles([]) == {}


def scored(
    chat: ChatFormat, shares: list[tuple[int, int]], **align: float | None
) -> tuple[EncodedSet, ExampleSet, dict[str, PairWeights]]:
    """Pairs of 4 and 10 content tokens; the first so many of them have a score."""
    pairs = [make_pair(4, 10, shift=i) for i in range(len(shares))]
    encoded = encode_pairs(pairs, chat, LengthRules(200, 100))
    rows = {}
    for pair, sides, counts in zip(encoded.pairs, encoded.encoded, shares, strict=True):
        parts = []
        for side, count in zip(SIDES, counts, strict=True):
            content = len(sides[side].response_ids) - 1
            row = torch.tensor([[2.0] * count + [0.0] * (content - count)])
            ids, places = sides[side].response_ids[:content], sides[side].offsets[:content]
            parts.append(TokenWeights(torch.tensor(ids), torch.tensor(places), row))
        rows[pair.pair_id] = PairWeights(pair.pair_id, (JudgeRound(True, *parts),))
    return encoded, prepare_examples(encoded, Verbalized(), rows, AlignRules(**align), layers=(0,)), rows


def test_a_source_that_may_be_silent_brings_its_own_least_coverage(chat: ChatFormat) -> None:
    encoded, made, _ = scored(chat, [(4, 10), (4, 9), (4, 8), (3, 10), (0, 10)])
    assert [example.pair_id for example in made.examples] == [pair.pair_id for pair in encoded.pairs[:2]]
    assert made.tally.counts == {"dropped: coverage below weights.min_coverage 0.9": 2, SILENT: 1}
    assert (made.dropped, made.unmatched_tokens) == (3, 8)
    assert made.examples[1].coverage == (1.0, 0.9)
    _, asked, _ = scored(chat, [(4, 10), (4, 8)], min_coverage=0.9)
    assert asked.tally.counts == {"dropped: coverage below align.min_coverage 0.9": 1}  # the key that was set


def test_the_run_may_ask_for_less_but_silence_never_becomes_uniform(chat: ChatFormat) -> None:
    encoded, made, _ = scored(chat, [(4, 8), (1, 1), (0, 10), (0, 0)], min_coverage=0.0)
    assert [example.pair_id for example in made.examples] == [pair.pair_id for pair in encoded.pairs[:2]]
    assert made.tally.counts == {SILENT: 2}
    assert made.examples[1].weights[0].tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_what_will_be_dropped_for_coverage_teaches_no_transform(chat: ChatFormat) -> None:
    encoded, _, rows = scored(chat, [(4, 10), (0, 10), (4, 5)])
    (profile,) = fit_transforms([TokenProfile()], encoded, Verbalized(), rows, (0,))
    assert isinstance(profile, TokenProfile)
    seen = {token for side in SIDES for token in encoded.encoded[0][side].response_ids[:-1]}
    assert set(profile.words) == seen
    (profile,) = fit_transforms([TokenProfile()], encoded, Verbalized(), rows, (0,), AlignRules(min_coverage=0.5))
    assert isinstance(profile, TokenProfile) and set(profile.words) > seen


def test_a_pair_nobody_could_be_asked_about_is_dropped_with_the_reason(chat: ChatFormat) -> None:
    encoded, _, rows = scored(chat, [(4, 10), (4, 10)])
    first = encoded.pairs[0].pair_id
    rows[first] = UnreadablePair(first, (), "a prompt is too long for the verbalizer", "story")
    made = prepare_examples(encoded, Verbalized(), rows, AlignRules(), layers=(0,))
    assert made.tally.counts == {f"{UNASKED}: a prompt is too long for the verbalizer": 1}
    assert len(made.examples) == 1


def test_weights_that_became_uniform_are_counted_and_named(chat: ChatFormat) -> None:
    encoded = encode_pairs([make_pair(4, 8)], chat, LengthRules(200, 100))
    pair = encoded.pairs[0]
    found = captured(pair, encoded.encoded[0], {"chosen": 4, "rejected": 8})
    silent = tuple(
        JudgeRound(item.chosen_is_a, item.chosen, TokenWeights(item.rejected.token_ids, item.rejected.offsets,
              torch.zeros_like(item.rejected.weights)))
        for item in found.rounds
    )  # fmt: skip
    rows = {pair.pair_id: PairWeights(pair.pair_id, silent)}
    made = prepare_examples(encoded, Attention(layer=1).resolve(1), rows, AlignRules(), layers=(1,))
    event = "all raw weights of the rejected response are 0: uniform weights are used"
    assert (made.tally.counts, made.tally.first[event]) == ({event: 1}, [pair.pair_id[:8]])


def test_many_judged_pairs_take_few_calls_each() -> None:
    """Their weights are computed by arrays over many pairs: a call a token, a protocol's check a pair are not there."""
    encoded, captured = EncodedSet([], [], Tally(), 300), {}
    for number in range(300):
        pair = PreferencePair.from_texts([{"role": "user", "content": str(number)}], "a" * 60, "b" * 60)
        ids, places = list(range(60)), [(at, at + 1) for at in range(60)]
        own = TokenWeights(torch.tensor(ids), torch.tensor(places), torch.rand(1, 60))
        encoded.pairs.append(pair)
        encoded.encoded.append({side: EncodedResponse([1], [*ids, 99], [*places, (60, 60)]) for side in SIDES})
        captured[pair.pair_id] = PairWeights(pair.pair_id, (JudgeRound(True, own, own), JudgeRound(False, own, own)))
    with Profile() as profile:
        made = prepare_examples(encoded, Attention(1), captured, AlignRules(), (1,))
    assert len(made.examples) == 300
    calls = sum(entry.callcount for entry in profile.getstats()) / 300
    assert calls < 350, f"{calls:.0f} calls for a pair"
