"""Both tokenizers, words and byte-level BPE: round trips, offsets, the merged full stop, chat and judge texts."""

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from attnpo.config.compose import CONFIG_DIR
from attnpo.judge.prompts import JudgePromptBuilder
from attnpo.judge.settings import Assembly, JudgeRules
from attnpo.lab.testbed import words
from attnpo.lab.testbed.grammar import Grammar
from attnpo.lab.testbed.tokenizer import (
    END,
    JUDGE_TEMPLATE,
    SPECIALS,
    VERDICTS,
    build_tokenizer,
    chat_prompts,
    encode_all,
    judge_prompts,
    token_ids,
)
from attnpo.schema import Message, PreferencePair
from attnpo.text.alignment import AlignMethod, align
from attnpo.text.chat import ChatFormat

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


# ---- byte-level BPE ----------------------------------------------------------------------------------------

BPE = build_tokenizer(GRAMMAR, 400)


def test_bpe_reviews_survive_the_round_trip_and_offsets_tile_the_words(rng: random.Random) -> None:
    split = 0
    for prompt in GRAMMAR.prompts("train")[:50]:
        review = GRAMMAR.sample_review(rng, prompt)
        encoded = BPE(review, return_offsets_mapping=True)
        assert BPE.decode(encoded["input_ids"]) == review
        pieces = [review[a:b] for a, b in encoded["offset_mapping"]]
        assert "".join(pieces) == review.replace(" ", "") and " " not in "".join(pieces)
        split += len(pieces) - len(review.split())
    assert split > 20  # some words are several tokens, so alignment has work to do


def test_bpe_merges_are_learnt_the_same_way_twice() -> None:
    again = build_tokenizer(GRAMMAR, 400)
    assert again.backend_tokenizer.to_str() == BPE.backend_tokenizer.to_str()
    assert len(BPE) == 6 + 256 + 400
    assert build_tokenizer(GRAMMAR, 0).tokenize("it") == ["i", "t"]
    assert [BPE.convert_ids_to_tokens(index) for index in range(6)] == list(SPECIALS)


@pytest.mark.parametrize("tokenizer", [TOKENIZER, BPE], ids=["words", "bytes"])
def test_verdicts_digits_and_separator_are_one_token_each(tokenizer: PreTrainedTokenizerFast) -> None:
    single = [*VERDICTS, *words.PART_SCORES, words.PART_SEPARATOR, END]
    ids = token_ids(tokenizer, single)
    assert len(set(ids)) == len(single) and tokenizer.unk_token_id not in ids
    for text, index in zip(single, ids, strict=True):
        assert tokenizer(text)["input_ids"] == [index]


@pytest.mark.parametrize("tokenizer", [TOKENIZER, BPE], ids=["words", "bytes"])
@pytest.mark.parametrize("assembly", list(Assembly))
def test_the_base_learns_the_very_prompts_and_labels_that_the_judge_reads(
    tokenizer: PreTrainedTokenizerFast, assembly: Assembly, rng: random.Random
) -> None:
    """Taught prompts and verdicts equal those of the judge's prompt builder, which knows nothing of the testbed."""
    prompts = JudgePromptBuilder(
        JudgeRules(str(CONFIG_DIR / "judge" / "testbed.txt"), assembly=assembly, max_length=512), ChatFormat(tokenizer)
    )
    assert list(prompts.label_ids) == token_ids(tokenizer, VERDICTS)
    prompt = GRAMMAR.prompts("train")[3]
    first, second = GRAMMAR.sample_review(rng, prompt), GRAMMAR.sample_review(rng, prompt)
    pair = PreferencePair.from_texts([Message(role="user", content=prompt.text)], first, second)
    forward, backward = prompts.build(pair)
    rows = [(prompt.text, first, second), (prompt.text, second, first)]
    taught = judge_prompts(tokenizer, rows, [assembly is Assembly.IDS] * 2)
    assert [forward.input_ids, backward.input_ids] == taught


@pytest.mark.parametrize("tokenizer", [TOKENIZER, BPE], ids=["words", "bytes"])
def test_answers_are_trained_on_the_tokens_they_are_learnt_with(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random
) -> None:
    chat, prompt = ChatFormat(tokenizer), GRAMMAR.prompts("train")[5]
    review = GRAMMAR.sample_review(rng, prompt)
    encoded = chat.encode([Message(role="user", content=prompt.text)], review)
    assert encoded.prompt_ids == chat_prompts(tokenizer, [prompt.text])[0]
    assert encoded.response_ids == [*encode_all(tokenizer, [review])[0], tokenizer.eos_token_id]
    assert not chat.counts


def test_bpe_full_stop_and_newline_merge_only_when_adjacent() -> None:
    assert BPE.tokenize("the broth .\nreview") == ["the", "Ġbroth", "Ġ.Ċ", "review"]
    assert BPE.tokenize("the broth . \nreview")[2:4] == ["Ġ.", "ĠĊ"] or BPE.tokenize("the broth .")[2] == "Ġ."
    text, spliced = judge_prompts(BPE, [("review it .", "the broth .", "the bread .")] * 2, [False, True])
    assert len(spliced) == len(text) + 2


@pytest.mark.parametrize("tokenizer", [TOKENIZER, BPE], ids=["words", "bytes"])
def test_a_saved_tokenizer_behaves_the_same(tokenizer: PreTrainedTokenizerFast, scratch: Path) -> None:
    tokenizer.save_pretrained(scratch)
    again = AutoTokenizer.from_pretrained(scratch)
    rendered = JUDGE_TEMPLATE.format(question="review the soup .", answer_a="the wooden broth .", answer_b="it .")
    text = tokenizer.apply_chat_template([{"role": "user", "content": rendered}], tokenize=False)
    one, two = (item(text, return_offsets_mapping=True) for item in (again, tokenizer))
    assert one["input_ids"] == two["input_ids"] and one["offset_mapping"] == two["offset_mapping"]
    assert again.chat_template == tokenizer.chat_template
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert (again.eos_token, again.pad_token, again.bos_token) == ("<end>", "<pad>", "<bos>")


def test_weights_on_bytes_reach_the_words_by_characters(rng: random.Random) -> None:
    """Every word gets the sum of its pieces' weights and nothing is lost on the blanks between them."""
    prompt = GRAMMAR.prompts("train")[7]
    review = "the room was wooden . " + GRAMMAR.sample_review(rng, prompt)
    source, target = (item(review, return_offsets_mapping=True) for item in (BPE, TOKENIZER))
    weights = torch.arange(1.0, len(source["input_ids"]) + 1)
    found = align(
        source["input_ids"], source["offset_mapping"], weights, target["input_ids"], target["offset_mapping"],
        AlignMethod.CHARACTERS,
    )  # fmt: skip
    assert len(source["input_ids"]) > len(target["input_ids"])
    assert found.coverage == found.source_coverage == 1.0
    summed = [
        sum(float(w) for w, (a, b) in zip(weights, source["offset_mapping"], strict=True) if start <= a and b <= end)
        for start, end in target["offset_mapping"]
    ]
    assert found.weights.tolist() == pytest.approx(summed)
