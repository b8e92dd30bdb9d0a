"""The word-level tokenizer: round trips, offsets, the merged full stop, chat and judge texts."""

import random
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from attnpo.testbed.grammar import Grammar
from attnpo.testbed.tokenizer import JUDGE_TEMPLATE, build_tokenizer, judge_prompts

GRAMMAR = Grammar()
TOKENIZER = build_tokenizer(GRAMMAR)


def test_reviews_survive_the_round_trip_and_offsets_name_the_words(rng: random.Random) -> None:
    for prompt in GRAMMAR.prompts("train")[:50]:
        review = GRAMMAR.sample_review(rng, prompt)
        encoded = TOKENIZER(review, return_offsets_mapping=True)
        assert TOKENIZER.unk_token_id not in encoded["input_ids"]
        assert TOKENIZER.decode(encoded["input_ids"]) == review
        assert [review[a:b] for a, b in encoded["offset_mapping"]] == review.split()


def test_full_stop_and_newline_merge_only_when_adjacent() -> None:
    def tokens(text: str) -> list[str]:
        return list(TOKENIZER.convert_ids_to_tokens(TOKENIZER(text)["input_ids"]))

    assert tokens("the broth .\nreview") == ["the", "broth", ".\n", "review"]
    assert tokens("the broth . \nreview") == ["the", "broth", ".", "\n", "review"]
    assert tokens("review A :\nthe broth .") == ["review", "A", ":", "\n", "the", "broth", "."]
    encoded = TOKENIZER("the broth .\nreview", return_offsets_mapping=True)
    assert encoded["offset_mapping"] == [(0, 3), (4, 9), (10, 12), (12, 18)]


def test_chat_template_starts_once_and_ends_with_the_end_token() -> None:
    messages = [
        {"role": "user", "content": "review the soup for the twins today ."},
        {"role": "assistant", "content": "the broth was superb ."},
    ]
    whole = TOKENIZER.apply_chat_template(messages, tokenize=False)
    assert whole == "<bos><user> review the soup for the twins today .<assistant> the broth was superb .<end>"
    ids = TOKENIZER(whole)["input_ids"]
    assert ids.count(TOKENIZER.bos_token_id) == 1 and ids[-1] == TOKENIZER.eos_token_id
    opening = TOKENIZER.apply_chat_template(messages[:1], add_generation_prompt=True)["input_ids"]
    assert ids[: len(opening)] == opening
    with pytest.raises(Exception, match="user and assistant"):
        TOKENIZER.apply_chat_template([{"role": "system", "content": "judge"}])


def test_judge_prompt_equals_the_rendered_template_and_assemblies_differ_by_the_merge(rng: random.Random) -> None:
    prompt = GRAMMAR.prompts("train")[0]
    first, second = GRAMMAR.sample_review(rng, prompt), GRAMMAR.sample_review(rng, prompt)
    rendered = JUDGE_TEMPLATE.format(question=prompt.text, answer_a=first, answer_b=second)
    whole = TOKENIZER.apply_chat_template([{"role": "user", "content": rendered}], add_generation_prompt=True)
    row = (prompt.text, first, second)
    text, spliced = judge_prompts(TOKENIZER, [row, row], [False, True])
    assert text == whole["input_ids"]
    assert len(spliced) == len(text) + 2
    own = TOKENIZER(first)["input_ids"]
    assert any(spliced[i : i + len(own)] == own for i in range(len(spliced)))
    assert not any(text[i : i + len(own)] == own for i in range(len(text)))
    assert TOKENIZER.unk_token_id not in spliced
    assert TOKENIZER.decode(text) == TOKENIZER.decode(spliced)


def test_saved_tokenizer_behaves_the_same(scratch: Path) -> None:
    TOKENIZER.save_pretrained(scratch)
    again = AutoTokenizer.from_pretrained(scratch)
    text = JUDGE_TEMPLATE.format(question="review the soup .", answer_a="the broth was fine .", answer_b="it .")
    assert again(text)["input_ids"] == TOKENIZER(text)["input_ids"]
    assert again.chat_template == TOKENIZER.chat_template
    assert (again.eos_token, again.pad_token, again.bos_token) == ("<end>", "<pad>", "<bos>")
