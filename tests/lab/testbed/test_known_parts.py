"""Forced decoding of part scores: the rows are those of pretraining, the digits the model's own, one by one."""

import json
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from attnpo.config.compose import CONFIG_DIR
from attnpo.lab.testbed import words
from attnpo.lab.testbed.forced_scores import ForcedScores
from attnpo.lab.testbed.grammar import Grammar
from attnpo.lab.testbed.known_parts import KnownParts
from attnpo.lab.testbed.pretrain import TaskSampler, new_model
from attnpo.lab.testbed.recipes import BaseRecipe
from attnpo.lab.testbed.tokenizer import SCORE_TEMPLATE, build_tokenizer, chat_prompts, encode_all, token_ids
from attnpo.schema import Generator, Sampling, UserError
from attnpo.weights.score_parser import parse_scores

GRAMMAR = Grammar()
GREEDY = Sampling(max_new_tokens=64, temperature=0.0)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(GRAMMAR)


def random_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    recipe = BaseRecipe(layers=2, width=32, heads=2, mlp=32, initializer_range=0.4)
    model = new_model(recipe, tokenizer, seed=1)
    model.train(False)
    return model


def saying(tokenizer: PreTrainedTokenizerFast, logits: Callable[[torch.Tensor], torch.Tensor]) -> LlamaForCausalLM:
    """A model whose logits are ``logits`` of the ids."""
    model = random_model(tokenizer)
    model.forward = lambda input_ids: SimpleNamespace(logits=logits(input_ids))  # type: ignore[assignment, method-assign]
    return model


def test_the_wording_of_the_config_is_that_of_pretraining() -> None:
    text = (CONFIG_DIR / "verbalizer" / "testbed.txt").read_text(encoding="utf-8")
    assert text == SCORE_TEMPLATE


def reviews(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Questions and reviews of different numbers of clauses."""
    rng = random.Random(seed)
    prompts = [rng.choice(GRAMMAR.prompts("train")) for _ in range(count)]
    return [(prompt.text, GRAMMAR.sample_review(rng, prompt)) for prompt in prompts]


def asked(rows: Sequence[tuple[str, str]]) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": SCORE_TEMPLATE.format(question=q, answer=a)}] for q, a in rows]


def one_by_one(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, question: str, review: str
) -> list[tuple[str, int]]:
    """The plain way: one row, one part after the other, each digit fed before the next part."""
    digits = token_ids(tokenizer, words.PART_SCORES)
    (separator,) = token_ids(tokenizer, [words.PART_SEPARATOR])
    (row,) = chat_prompts(tokenizer, [SCORE_TEMPLATE.format(question=question, answer=review)])
    found = []
    for part, _ in GRAMMAR.part_scores(review, GRAMMAR.parse_prompt(question).topic):
        row = [*row, *([separator] if found else []), *encode_all(tokenizer, [part])[0]]
        with torch.no_grad():
            digit = int(model(input_ids=torch.tensor([row])).logits[0, -1, digits].argmax())
        row.append(digits[digit])
        found.append((part, digit + 1))
    return found


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_digits_are_those_of_reading_one_by_one(tokenizer: PreTrainedTokenizerFast, batch_size: int) -> None:
    model = random_model(tokenizer)
    rows = reviews(9)
    generator = KnownParts(GRAMMAR, batch_size).make_generator(model, tokenizer)
    assert isinstance(generator, Generator)
    answers = generator.generate(asked(rows), GREEDY)
    seen = set()
    for (question, review), answer in zip(rows, answers, strict=True):
        expected = one_by_one(model, tokenizer, question, review)
        assert json.loads(answer) == [{"part": part, "score": score} for part, score in expected]
        reading = parse_scores(answer, review)
        assert not reading.problems
        assert [review[span.start : span.end] for span in reading.spans] == [part for part, _ in expected]
        seen |= {score for _, score in expected}
    assert len(seen) > 1, "a model that says one digit only proves little"


def test_a_digit_that_hangs_on_the_one_before_is_read_after_the_models_own(tokenizer: PreTrainedTokenizerFast) -> None:
    """The model says 1, then always one more than the digit before: every pass settles one more of the five."""
    digits = token_ids(tokenizer, words.PART_SCORES)

    def counting(ids: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(*ids.shape, len(tokenizer))
        for index, row in enumerate(ids.tolist()):
            last = -1
            for place, token in enumerate(row):
                last = digits.index(token) if token in digits else last
                logits[index, place, digits[(last + 1) % 5]] = 1.0
        return logits

    question = GRAMMAR.prompts("train")[0].text
    review = " ".join(["we went there yesterday ."] * 5)
    (answer,) = ForcedScores(saying(tokenizer, counting), tokenizer, GRAMMAR).generate(
        asked([(question, review)]), GREEDY
    )
    assert [item["score"] for item in json.loads(answer)] == [1, 2, 3, 4, 5]


def test_rows_are_those_of_pretraining(tokenizer: PreTrainedTokenizerFast) -> None:
    """A model that says what it was taught for rows it knows to the last token gives the true scores."""
    taught = TaskSampler(GRAMMAR, tokenizer, random.Random(3)).score_rows(5)
    again = TaskSampler(GRAMMAR, tokenizer, random.Random(3))
    drawn = [(prompt, again._with_slips(prompt, review)) for prompt, review in (again._review() for _ in range(5))]
    rows = [(prompt.text, review) for prompt, review in drawn]
    shown: list[list[int]] = []

    def teach(ids: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(*ids.shape, len(tokenizer))
        for index, own in enumerate(ids.tolist()):
            shown.append(own)
            row = max((item.ids for item in taught), key=lambda row: sum(map(int.__eq__, row, own)))
            for place, token in enumerate(row[1 : len(own) + 1]):
                logits[index, place, token] = 1.0
        return logits

    answers = ForcedScores(saying(tokenizer, teach), tokenizer, GRAMMAR).generate(asked(rows), GREEDY)
    for (question, review), answer in zip(rows, answers, strict=True):
        topic = GRAMMAR.parse_prompt(question).topic
        assert [(item["part"], item["score"]) for item in json.loads(answer)] == GRAMMAR.part_scores(review, topic)
    last = {tuple(token for token in row if token != tokenizer.pad_token_id) for row in shown[-5:]}
    assert last == {tuple(row.ids[:-1]) for row in taught}, "the rows of pretraining, all but the end token"


def test_what_is_not_the_testbeds_task_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    generator = ForcedScores(random_model(tokenizer), tokenizer, GRAMMAR)
    with pytest.raises(UserError, match=r"set verbalizer\.template_file=verbalizer/testbed\.txt"):
        generator.generate([[{"role": "user", "content": "split this"}]], GREEDY)
    with pytest.raises(UserError, match=r"\[system, user\]: set verbalizer\.system_file=null"):
        generator.generate([[{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]], GREEDY)
    with pytest.raises(UserError, match=r"verbalizer\.known_parts: not a prompt of the testbed grammar"):
        generator.generate(asked([("the moon", "the broth was good .")]), GREEDY)


def test_a_broken_model_is_named(tokenizer: PreTrainedTokenizerFast) -> None:
    broken = saying(tokenizer, lambda ids: torch.full((*ids.shape, len(tokenizer)), float("nan")))
    with pytest.raises(UserError, match="logits that are not finite"):
        ForcedScores(broken, tokenizer, GRAMMAR).generate(asked(reviews(1)), GREEDY)


def test_the_grammar_is_in_the_fingerprint_and_the_batch_is_not() -> None:
    assert KnownParts(GRAMMAR, 1).fingerprint() == KnownParts(GRAMMAR, 2).fingerprint()
    assert KnownParts(GRAMMAR).fingerprint() != KnownParts(Grammar(style=True)).fingerprint()
    with pytest.raises(UserError, match="batch_size must be at least 1"):
        KnownParts(GRAMMAR, 0)
