"""True importance as weights, on both kinds of tokens and where there is nothing decisive."""

import pytest
import torch

from attnpo.lab.testbed.grammar import Grammar
from attnpo.lab.testbed.importance import TrueImportance, mark_decisive_tokens
from attnpo.lab.testbed.tokenizer import build_tokenizer
from attnpo.schema import EncodedResponse, PreferencePair, UserError
from attnpo.text.chat import ChatFormat
from attnpo.weights.base import TextSource, is_neutral
from attnpo.weights.pipeline import training_weights

GRAMMAR = Grammar(negation=0.4)
SOURCE = TrueImportance(GRAMMAR)
PROMPT = next(prompt for prompt in GRAMMAR.prompts("train") if prompt.topic == "soup")
CHOSEN = "the broth was really good . we went there yesterday . the bread was not awful ."
REJECTED = "the broth was large . we went there yesterday ."


def make_pair(question: str = PROMPT.text) -> PreferencePair:
    return PreferencePair.from_texts([{"role": "user", "content": question}], CHOSEN, REJECTED)


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    return ChatFormat(build_tokenizer(GRAMMAR))


def words(encoded: EncodedResponse, text: str, row: torch.Tensor) -> dict[str, float]:
    """The words with weight, and their weights."""
    return {
        text[start:end]: weight for (start, end), weight in zip(encoded.offsets, row.tolist(), strict=True) if weight
    }


def test_it_is_a_source_that_needs_no_capture_but_says_something() -> None:
    assert isinstance(SOURCE, TextSource)
    assert not SOURCE.requires and not is_neutral(SOURCE)
    with pytest.raises(UserError, match="are computed in each run and never stored"):
        SOURCE.capture([], None, ())


def test_the_decisive_words_share_the_weight(chat: ChatFormat) -> None:
    pair = make_pair()
    encoded = chat.encode(pair.prompt, pair.chosen)
    row = SOURCE.weigh(pair, "chosen", encoded)
    assert words(encoded, pair.chosen, row) == pytest.approx({"good": 1 / 3, "not": 1 / 3, "awful": 1 / 3})
    assert row[-1] == 0, "the end of the turn decides nothing"


def test_a_token_that_holds_part_of_a_decisive_word_counts() -> None:
    pair = make_pair()
    place = CHOSEN.index("good")
    encoded = EncodedResponse([1], [5, 6, 7], [(place - 1, place + 2), (place + 2, place + 4), (place + 4, place + 5)])
    assert SOURCE.weigh(pair, "chosen", encoded).tolist() == [0.5, 0.5, 0.0]


def test_without_a_decisive_word_the_content_is_weighed_alike(chat: ChatFormat) -> None:
    pair = make_pair()
    encoded = chat.encode(pair.prompt, pair.rejected)
    row = SOURCE.weigh(pair, "rejected", encoded)
    count = len(encoded.response_ids) - 1
    assert row.tolist() == pytest.approx([1 / count] * count + [0.0])
    bare = EncodedResponse([1], [5], [(len(REJECTED), len(REJECTED))])
    assert SOURCE.weigh(pair, "rejected", bare).tolist() == [1.0]


def test_it_goes_the_way_of_every_source(chat: ChatFormat) -> None:
    pair = make_pair()
    both = {side: chat.encode(pair.prompt, pair.response(side)) for side in ("chosen", "rejected")}
    found = training_weights(SOURCE, None, both, pair=pair)
    assert (found.coverage, found.flat) == ((1.0, 1.0), ())
    assert found.lengths == tuple(float(len(both[side].response_ids)) for side in both)
    assert float(found.chosen.sum()) == pytest.approx(1.0)


def test_a_prompt_of_another_kind_names_the_pair(chat: ChatFormat) -> None:
    pair = make_pair("who are you ?")
    with pytest.raises(
        UserError, match=f"^pair {pair.pair_id}: true importance is .*got 'who are you \\?'.*truth=null"
    ):
        SOURCE.weigh(pair, "chosen", chat.encode(pair.prompt, pair.chosen))


def test_the_prompt_is_one_question(chat: ChatFormat) -> None:
    """A prompt with a turn before the question has another topic in view, for the weights as for the measure of it."""
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    pair = PreferencePair.from_texts([*turns, {"role": "user", "content": PROMPT.text}], CHOSEN, REJECTED)
    for read in (
        lambda: mark_decisive_tokens(pair, "chosen", [(0, 3)], GRAMMAR),
        lambda: SOURCE.weigh(pair, "chosen", chat.encode(pair.prompt, pair.chosen)),
    ):
        with pytest.raises(UserError, match="only for prompts of the testbed"):
            read()


def test_what_is_decisive_goes_by_characters() -> None:
    places = [(CHOSEN.index(word), CHOSEN.index(word) + len(word)) for word in ("the", "good", "bread", "awful")]
    assert mark_decisive_tokens(make_pair(), "chosen", places, GRAMMAR) == [False, True, False, True]
    place = CHOSEN.index("good")
    assert mark_decisive_tokens(make_pair(), "chosen", [(place - 3, place), (place, place)], GRAMMAR) == [False, False]
