"""Rows of the pretraining tasks, the judge's measure, and blocks of a tiny base; the real one is in real_base.py."""

import logging
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from attnpo.lab.testbed import pretrain, words
from attnpo.lab.testbed.grammar import Grammar, ReviewPrompt
from attnpo.lab.testbed.pretrain import TaskRow, TaskSampler, build_base, judge_accuracy, pad_rows
from attnpo.lab.testbed.recipes import BaseRecipe
from attnpo.lab.testbed.tokenizer import build_tokenizer

Loaded = tuple[LlamaForCausalLM, PreTrainedTokenizerFast]
GRAMMAR = Grammar()
TOKENIZER = build_tokenizer(GRAMMAR)


def sampler() -> TaskSampler:
    return TaskSampler(GRAMMAR, TOKENIZER, random.Random(0))


def test_answer_targets_are_the_review_and_the_end() -> None:
    rows = pad_rows(sampler().answer_rows(6))
    for index in range(6):
        targets = rows.targets[rows.row == index]
        review = TOKENIZER.decode(targets[:-1])
        content = TOKENIZER.decode(rows.ids[index], skip_special_tokens=True)
        assert targets[-1] == TOKENIZER.eos_token_id
        assert review and content.endswith(review)
        start = int(rows.column[rows.row == index][0])
        assert TOKENIZER.convert_ids_to_tokens(int(rows.ids[index, start])) == "<assistant>"


def test_judge_targets_name_the_better_review() -> None:
    rows = pad_rows(sampler().judge_rows(20, min_gap=0.5))
    assert rows.row.tolist() == list(range(20))
    for ids, column, target in zip(rows.ids, rows.column, rows.targets, strict=True):
        assert TOKENIZER.convert_ids_to_tokens(int(ids[column])) == "<assistant>"
        text = TOKENIZER.decode(ids[:column])
        question, rest = text.split("\nreview A :\n")
        first, rest = rest.split("\nreview B :\n")
        second = rest.split("\nwhich is better")[0]
        topic = GRAMMAR.parse_prompt(question.split("reviews of ")[1]).topic
        gap = GRAMMAR.true_reward(first, topic).reward - GRAMMAR.true_reward(second, topic).reward
        assert abs(gap) >= 0.5
        assert TOKENIZER.decode([int(target)]) == ("A" if gap > 0 else "B")
    assert {int(target) for target in rows.targets} == set(TOKENIZER.convert_tokens_to_ids(["A", "B"]))


def test_judge_rows_show_both_assemblies() -> None:
    merged = TOKENIZER.convert_tokens_to_ids(".\n")
    counts = {row.ids.count(merged) for row in sampler().judge_rows(30)}
    assert counts == {1, 3}  # the question always merges, the reviews only under text assembly


def test_damage_breaks_about_its_share_of_the_clauses() -> None:
    """Some damage still parses (a lost "really"), so the broken share lies somewhat below the damaged one."""
    tasks = TaskSampler(GRAMMAR, TOKENIZER, random.Random(0), damage=0.2)
    broken = clauses = 0
    for prompt in GRAMMAR.prompts("train")[:150]:
        review = GRAMMAR.sample_review(tasks.rng, prompt)
        scored = GRAMMAR.true_reward(tasks._with_slips(prompt, review), prompt.topic)
        broken, clauses = broken + scored.broken, clauses + scored.clauses
    assert 0.1 < broken / clauses < 0.2


def test_short_reviews_leave_out_fillers_first() -> None:
    """At a quarter of the length as many clauses judge; at a tenth there is no room for them, nor for any filler."""
    long = Grammar(p_sentiment=0.2, p_neutral=0.1, min_clauses=24, max_clauses=32)
    tasks = TaskSampler(long, TOKENIZER, random.Random(0))
    clauses, judging, fillers = {}, {}, {}
    for scale in (1.0, 0.25, 0.1):
        tasks.shorten(scale)
        parsed = [long.parse(review, prompt.topic) for prompt, review in (tasks._review() for _ in range(300))]
        clauses[scale] = {len(review) for review in parsed}
        kinds = [clause.kind for review in parsed for clause in review]
        judging[scale] = kinds.count("sentiment") / 300
        fillers[scale] = kinds.count("filler")
    assert clauses == {1.0: set(range(24, 33)), 0.25: {6, 7, 8}, 0.1: {2, 3}}
    assert judging[1.0] == pytest.approx(5.6, abs=0.5) and judging[0.25] == pytest.approx(5.6, abs=0.5)
    assert fillers[0.25] and not fillers[0.1]
    tasks.shorten(1.0)
    assert tasks.drawn == long


def test_reviews_grow_to_full_length_while_the_judge_has_it_easy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short for half of the easy part, long when it ends; as many more rows as they are shorter."""
    recipe = BaseRecipe(
        layers=1, width=16, heads=2, mlp=16, steps=20, answer_rows=2, judge_rows=3, score_rows=1, easy_share=0.8,
        easy_length=0.25,
    )  # fmt: skip
    tasks = sampler()
    drawn: list[tuple[float, int, bool]] = []

    def judge_rows(count: int, min_gap: float = 0.0) -> list[TaskRow]:
        drawn.append((tasks.scale, count, min_gap > 0))
        return TaskSampler.judge_rows(tasks, count, min_gap)

    monkeypatch.setattr(tasks, "judge_rows", judge_rows)
    trainer = pretrain._Trainer(pretrain.new_model(recipe, TOKENIZER, 0), recipe, tasks)
    trainer.block(20, 1e-3, 2, recipe.easy_length)
    scales, counts, easy = zip(*drawn, strict=True)
    assert easy == (True,) * 16 + (False,) * 4
    assert scales[:9] == (0.25,) * 9 and scales[16:] == (1.0,) * 4
    assert list(scales[8:17]) == sorted(set(scales)) and scales[12] == pytest.approx(0.5)
    assert (counts[0], counts[12], counts[16]) == (12, 6, 3)
    drawn.clear()
    trainer.block(5, 1e-3, 2)  # a later block goes on at full length
    assert {scale for scale, _, _ in drawn} == {1.0}


@pytest.mark.parametrize("share", [0.0, 1.5])
def test_a_length_that_is_no_share_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match=r"base\.easy_length is a share and must lie in \(0, 1\], got"):
        BaseRecipe(easy_length=share)


def test_score_targets_are_the_digits_and_what_follows() -> None:
    rows = pad_rows(sampler().score_rows(8))
    tokens = TOKENIZER.convert_ids_to_tokens(rows.targets.tolist())
    assert set(tokens[::2]) <= set(words.PART_SCORES) and set(tokens[1::2]) <= {"|", "<end>"}


def test_judge_accuracy_counts_both_orders(monkeypatch: pytest.MonkeyPatch, loaded_base: Loaded) -> None:
    """A judge that always says A is right in one order of every pair and never consistent."""
    prompt = ReviewPrompt("soup", "the twins", "today")
    pairs = [(prompt, "the broth was fine .", "the broth was poor .", 1.0), (prompt, "it .", "the .", -1.0)]
    model, tokenizer = loaded_base
    verdicts = torch.ones(4, dtype=torch.bool)
    monkeypatch.setattr(pretrain, "_prefers_first", lambda model, tokenizer, ids: verdicts)
    found = judge_accuracy(model, tokenizer, pairs, spliced=False)
    assert found == (0.5, 0.0)
    verdicts = torch.tensor([True, False, False, True])
    found = judge_accuracy(model, tokenizer, pairs, spliced=True)
    assert found == (1.0, 1.0)


def test_a_judge_under_its_gate_trains_on_in_blocks(scratch: Path, caplog: pytest.LogCaptureFixture) -> None:
    recipe = BaseRecipe(
        layers=1, width=16, heads=2, mlp=16, steps=2, answer_rows=1, judge_rows=1, score_rows=1, judge_pairs=2,
        judge_gate=1.01, extra_steps=2, max_steps=5,
    )  # fmt: skip
    with caplog.at_level(logging.INFO, logger="attnpo.lab.testbed"):
        report = build_base(GRAMMAR, recipe, scratch)
    assert report["steps"] == 5 and not report["gate_passed"]
    assert "under its gate" in caplog.text
    done = build_base(GRAMMAR, replace(recipe, judge_gate=0.0), scratch)
    assert done["steps"] == 2 and done["gate_passed"]
