"""Rules of the true reward and importance, with values derived by hand, and the prompt parts."""

import random
from dataclasses import replace

import pytest

from attnpo.lab.testbed import words
from attnpo.lab.testbed.grammar import SPLITS, Grammar

GRAMMAR = Grammar()


@pytest.mark.parametrize(
    ("text", "reward", "polarity", "broken", "clauses"),
    [
        ("the broth was superb .", 1.0, 1.0, 0, 1),
        ("the broth was nice .", 0.5, 0.5, 0, 1),
        ("it had a dreadful portion .", -1.0, -1.0, 0, 1),
        # (1 - 0.5) / 2; the filler and the neutral clause do not count.
        ("the broth was superb . my uncle paid in cash . it had a large portion . the bread was poor .",
         0.25, 0.25, 0, 4),
        ("my sister called the flavour really good .", -1.0, 0.0, 1, 1),  # no such clause
        ("the broth was superb . the plot was superb .", 0.0, 1.0, 1, 2),  # the plot belongs to films
        ("the broth was superb . yesterday the bread seemed", 0.0, 1.0, 1, 2),  # cut
        ("the broth was superb . .", 0.0, 1.0, 1, 2),  # an empty clause
        ("my boss came with us today .", 0.0, 0.0, 0, 1),
        ("", 0.0, 0.0, 0, 0),
        ("the broth was really awful . the twins called the broth awful . after lunch the bread seemed fine .",
         -0.5, -0.5, 0, 3),
        ("the broth was not good .", -1.0, 0.0, 1, 1),  # this grammar has no negation
    ],
)  # fmt: skip
def test_reward_by_hand(text: str, reward: float, polarity: float, broken: int, clauses: int) -> None:
    scored = GRAMMAR.true_reward(text, "soup")
    assert (scored.reward, scored.polarity, scored.broken, scored.clauses) == (reward, polarity, broken, clauses)


def test_repetition_and_length_change_nothing(rng: random.Random) -> None:
    for prompt in GRAMMAR.prompts("train")[:40]:
        review = GRAMMAR.sample_review(rng, prompt)
        before = GRAMMAR.true_reward(review, prompt.topic).reward
        first = review.split(" . ")[0].removesuffix(" .") + " ."
        assert GRAMMAR.true_reward(f"{review} {first} {first}", prompt.topic).reward == before
        assert GRAMMAR.true_reward(f"{review} it was raining today .", prompt.topic).reward == before


@pytest.mark.parametrize("grammar", [GRAMMAR, Grammar(style=True, p_sentiment=0.5), Grammar(negation=0.4)])
def test_own_reviews_parse_without_a_broken_clause(grammar: Grammar, rng: random.Random) -> None:
    vocabulary = set(grammar.vocabulary())
    kinds: dict[str, int] = {}
    for prompt in grammar.prompts("train")[:200]:
        review = grammar.sample_review(rng, prompt)
        assert vocabulary.issuperset(review.split())
        clauses = grammar.parse(review, prompt.topic)
        assert grammar.min_clauses <= len(clauses) <= grammar.max_clauses
        assert "".join(review[c.start : c.end] + " " for c in clauses).rstrip() == review
        for clause in clauses:
            kinds[clause.kind] = kinds.get(clause.kind, 0) + 1
    total = sum(kinds.values())
    assert kinds.get("broken", 0) == 0
    assert kinds["sentiment"] / total == pytest.approx(grammar.p_sentiment, abs=0.06)


def test_negation_turns_the_polarity_and_is_decisive() -> None:
    grammar = Grammar(negation=0.4)
    text = "the broth was not superb . the bread was not poor ."
    assert grammar.true_reward(text, "soup").reward == -0.25  # (-1 + 0.5) / 2
    assert [text[a:b] for a, b in grammar.importance(text, "soup")] == ["not", "superb", "not", "poor"]


def test_importance_marks_polar_adjectives_of_valid_clauses_only() -> None:
    text = "on monday the broth seemed  decent . it had a old portion . superb superb . the bread was really bland ."
    assert [text[a:b] for a, b in GRAMMAR.importance(text, "soup")] == ["decent", "bland"]
    parts = GRAMMAR.part_scores(text, "soup")
    assert [score for _, score in parts] == [4, 2, 3, 4]
    assert parts[1][0] == "it had a old portion ."


def test_prompt_parts_are_disjoint_and_large_enough() -> None:
    sets = {split: {prompt.text for prompt in GRAMMAR.prompts(split)} for split in SPLITS}
    total = len(words.TOPICS) * len(words.SLOTS["who"]) * len(words.SLOTS["when"])
    assert sum(len(texts) for texts in sets.values()) == len(set.union(*sets.values())) == total
    assert len(sets["test"]) >= 384 and len(sets["train"]) >= 700
    for split in SPLITS:  # every part shows every topic, already in its beginning
        assert {prompt.topic for prompt in GRAMMAR.prompts(split)[:100]} == set(words.TOPICS)


def test_parse_prompt_inverts_text() -> None:
    for prompt in GRAMMAR.prompts("validation")[:20]:
        assert GRAMMAR.parse_prompt(prompt.text) == prompt
    with pytest.raises(ValueError, match="not a prompt"):
        GRAMMAR.parse_prompt("review the weather .")


def test_sampling_is_deterministic() -> None:
    prompt = GRAMMAR.prompts("train")[0]
    one, two = ([GRAMMAR.sample_review(rng, prompt) for _ in range(5)] for rng in (random.Random(1), random.Random(1)))
    assert one == two and len(set(one)) == 5


@pytest.mark.parametrize(
    "change",
    [{"p_sentiment": 0.5}, {"p_neutral": 0.2}, {"min_clauses": 2}, {"max_clauses": 6}, {"style": True},
     {"negation": 0.1}, {"p_echo": 0.0}, {"validation_share": 0.1}, {"test_share": 0.2}],
)  # fmt: skip
def test_every_knob_changes_the_digest(change: dict[str, float]) -> None:
    assert replace(GRAMMAR, **change).digest() != GRAMMAR.digest()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "bad", [{"p_sentiment": 1.5}, {"p_sentiment": 0.8, "p_neutral": 0.4}, {"min_clauses": 6}, {"test_share": 0.9}]
)
def test_impossible_knobs_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="grammar"):
        Grammar(**bad)  # type: ignore[arg-type]
