"""Preference pairs: margin, direction, convention of the rows, noise, and nested sizes."""

from dataclasses import replace

import pytest
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from attnpo.lab.testbed.grammar import Grammar
from attnpo.lab.testbed.pairs import build_pairs, match_answers
from attnpo.lab.testbed.recipes import PairRecipe
from attnpo.schema import UserError

Loaded = tuple[LlamaForCausalLM, PreTrainedTokenizerFast]
GRAMMAR = Grammar(min_clauses=1, max_clauses=2, p_sentiment=0.8)  # that of the tiny base
RECIPE = PairRecipe(train=30, validation=10, margin=0.25)


def test_rows_keep_the_margin_and_the_truth(loaded_base: Loaded) -> None:
    rows = build_pairs(*loaded_base, GRAMMAR, RECIPE, "train")
    assert len(rows) == 30
    train = {prompt.text for prompt in GRAMMAR.prompts("train")}
    for row in rows:
        assert row["score_chosen"] - row["score_rejected"] >= RECIPE.margin  # type: ignore[operator]
        assert row["prompt"] in train
        for side in ("chosen", "rejected"):
            user, assistant = row[side]  # type: ignore[misc]
            assert (user["role"], user["content"], assistant["role"]) == ("user", row["prompt"], "assistant")
            reward = GRAMMAR.true_reward(assistant["content"], str(row["topic"])).reward
            assert reward == row[f"score_{side}"]
            assert len(assistant["content"].split()) >= RECIPE.min_tokens
        assert row["messages"] == row["chosen"]
        assert len(str(row["prompt_id"])) == 64


def test_pairs_are_deterministic_nested_and_split(loaded_base: Loaded) -> None:
    rows = build_pairs(*loaded_base, GRAMMAR, RECIPE, "train")
    assert rows == build_pairs(*loaded_base, GRAMMAR, RECIPE, "train")
    assert rows[:12] == build_pairs(*loaded_base, GRAMMAR, replace(RECIPE, train=12), "train")
    assert rows != build_pairs(*loaded_base, GRAMMAR, replace(RECIPE, seed=1), "train")
    held_out = {row["prompt"] for row in build_pairs(*loaded_base, GRAMMAR, RECIPE, "validation")}
    assert held_out.isdisjoint({row["prompt"] for row in rows})


def test_label_noise_flips_exactly_its_share_of_the_training_pairs(loaded_base: Loaded) -> None:
    clean = build_pairs(*loaded_base, GRAMMAR, RECIPE, "train")
    noisy = build_pairs(*loaded_base, GRAMMAR, replace(RECIPE, label_noise=0.3), "train")
    flipped = [one != two for one, two in zip(clean, noisy, strict=True)]
    assert sum(flipped) == 9
    for one, two, changed in zip(clean, noisy, flipped, strict=True):
        if changed:
            assert (one["chosen"], one["score_chosen"]) == (two["rejected"], two["score_rejected"])
            assert two["messages"] == two["chosen"] == one["rejected"]
    validation = build_pairs(*loaded_base, GRAMMAR, replace(RECIPE, label_noise=0.3), "validation")
    assert validation == build_pairs(*loaded_base, GRAMMAR, RECIPE, "validation")


def test_matching_uses_every_answer_once() -> None:
    pairs = match_answers([("a", 0.0), ("b", 0.2), ("c", 1.0), ("d", -1.0), ("e", 0.4)], 0.5)
    assert pairs == [(("c", 1.0), ("a", 0.0)), (("b", 0.2), ("d", -1.0))]


def test_an_unreachable_margin_is_an_error(loaded_base: Loaded) -> None:
    recipe = replace(RECIPE, margin=2.5, max_rounds=1, answers_per_prompt=2, max_new_tokens=6)
    with pytest.raises(UserError, match=r"lower pairs\.margin"):
        build_pairs(*loaded_base, GRAMMAR, recipe, "validation")


@pytest.mark.parametrize(
    "bad", [{"margin": 0.0}, {"label_noise": 1.2}, {"answers_per_prompt": 1}, {"train": 0}, {"temperature": -1.0}]
)
def test_impossible_recipes_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="pairs"):
        PairRecipe(**bad)  # type: ignore[arg-type]
