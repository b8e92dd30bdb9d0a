"""Scores of policies against the true reward."""

import numpy as np
import pytest
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from attnpo.lab.testbed.grammar import Grammar
from attnpo.lab.testbed.scoring import TruthScorer, win_rate

Loaded = tuple[LlamaForCausalLM, PreTrainedTokenizerFast]


def test_the_base_scores_even_against_itself(loaded_base: Loaded) -> None:
    model, tokenizer = loaded_base
    scorer = TruthScorer(prompts=60, samples_per_prompt=2)
    score = scorer.score(model, model, tokenizer)
    numbers = score.scalars()
    assert numbers["kl"] == pytest.approx(0.0, abs=1e-9)
    assert numbers["win_rate"] == pytest.approx(0.5, abs=0.15)
    assert score.rewards.shape == score.base_rewards.shape == score.kls.shape == (60, 2)
    assert numbers["reward"] == pytest.approx(float(score.rewards.mean()))
    grammar = Grammar()
    first = grammar.true_reward(score.answers[0], grammar.parse_prompt(score.prompts[0]).topic)
    assert score.rewards[0, 0] == first.reward
    assert score.prompts[0] == score.prompts[1] != score.prompts[2]
    assert set(numbers) >= {"reward", "win_rate", "kl", "length", "polarity", "broken"}
    validation = scorer.score(model, model, tokenizer, split="validation")
    assert validation.rewards.shape == (60, 1), "validation only chooses a point: one answer a prompt"


def test_base_answers_can_be_given_and_change_nothing(loaded_base: Loaded) -> None:
    model, tokenizer = loaded_base
    scorer = TruthScorer(prompts=20)
    answers = scorer.base_answers(model, tokenizer)
    fresh, given = scorer.score(model, model, tokenizer), scorer.score(model, model, tokenizer, base_answers=answers)
    assert fresh.scalars() == given.scalars()
    with pytest.raises(ValueError, match="same split"):
        TruthScorer(prompts=30).score(model, model, tokenizer, base_answers=answers)


def test_splits_are_disjoint_and_training_prompts_are_refused() -> None:
    scorer = TruthScorer(prompts=200)
    test, validation = set(scorer.prompt_set("test")), set(scorer.prompt_set("validation"))
    assert len(test) == len(validation) == 200 and test.isdisjoint(validation)
    with pytest.raises(ValueError, match="held-out"):
        scorer.prompt_set("train")


def test_win_rate_counts_ties_half() -> None:
    assert win_rate(np.array([1.0, 0.0, 0.5, 0.5]), np.array([0.0, 1.0, 0.5, 0.0])) == 0.625
