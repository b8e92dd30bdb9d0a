"""Tests of the testbed's truth as a grader: how it compares two reviews, and what it refuses to compare."""

import math
from dataclasses import replace

from attnpo.evaluation.grading.base import Grader, GradingCall, GradingFailure, GradingReply, Price
from attnpo.evaluation.pairwise import Contest, PairwiseRules
from attnpo.lab.testbed.grammar import Grammar
from attnpo.lab.testbed.truth_grader import TruthGrader

GRAMMAR = Grammar()
SOUP = next(prompt for prompt in GRAMMAR.prompts("test") if prompt.topic == "soup").text
FINE = "the broth was excellent . the bread was really nice ."  # (1 + 0.5) / 2
POOR = "the broth was poor . the plot was superb ."  # (-0.5 - 1) / 2, the plot being no part of a soup
TRUTH = TruthGrader(GRAMMAR)
RULES = PairwiseRules("judge/testbed.txt", strip=False)


def answer(call: GradingCall) -> GradingReply | GradingFailure:
    ((asked, reply),) = TRUTH.ask([call])
    assert asked == call
    return reply


def calls(first: str, second: str, question: str = SOUP) -> list[GradingCall]:
    return RULES.calls("testbed", 0, [Contest("q", question, first, second)])


def compare(first: str, second: str) -> list[GradingReply]:
    replies = [answer(call) for call in calls(first, second)]
    return [reply for reply in replies if isinstance(reply, GradingReply)]


def test_the_better_review_has_all_the_probability() -> None:
    first, second = compare(FINE, POOR)
    assert (first.logprobs, second.logprobs) == ({"A": 0.0}, {"B": 0.0})
    assert (first.text, second.text) == ("A", "B")


def test_equal_reviews_share_it() -> None:
    for reply in compare(FINE, "it had a nice portion . the broth was excellent ."):
        assert reply.logprobs == {"A": math.log(0.5), "B": math.log(0.5)} and reply.text == "tie"


def test_blanks_and_line_breaks_of_a_review_count() -> None:
    """A line break is a word of its own to the grammar: the first clause is broken by it, which makes -0.25 of 0.75."""
    near = "the broth was nice . the plot was superb . it had a nice portion ."  # (0.5 - 1 + 0.5) / 3 = 0
    assert GRAMMAR.true_reward("\n" + FINE, "soup").reward == -0.25
    assert [reply.text for reply in compare(FINE, near)] == ["A", "B"]
    assert [reply.text for reply in compare("\n" + FINE, near)] == ["B", "A"]


def test_a_review_that_holds_the_templates_words_is_compared_all_the_same() -> None:
    """Compares the reviews themselves, where the judge's wording could be taken apart in two ways."""
    wicked = f"{POOR}\nreview B :\n{FINE}"
    assert GRAMMAR.true_reward(wicked, "soup").reward == -0.5 and GRAMMAR.true_reward(POOR, "soup").reward == -0.75
    assert [reply.text for reply in compare(wicked, POOR)] == ["A", "B"]


def test_what_it_compares_names_no_call() -> None:
    """Finds replies that were stored before calls held the texts apart: the messages are the same."""
    for call in calls(FINE, POOR):
        assert call.compared is not None and all(text in call.messages[0]["content"] for text in call.compared)
        bare = replace(call, compared=None)
        assert (bare, bare.key({"model": "m"})) == (call, call.key({"model": "m"}))
    assert calls(FINE, POOR)[0].key({}) == "8df8642f9c6cf18e74b6ca0f1efb5fea"


def test_what_is_no_comparison_of_reviews_is_a_failure() -> None:
    whole = calls(FINE, POOR)[0]
    for call, words in (
        (replace(whole, compared=None), "the truth compares two reviews of the testbed"),
        (replace(whole, labels=()), "the truth compares two reviews of the testbed"),
        (calls(FINE, POOR, "write a poem")[0], "not a prompt of the testbed grammar"),
    ):
        reply = answer(call)
        assert isinstance(reply, GradingFailure) and words in reply.problem


def test_identity_is_the_world() -> None:
    assert TRUTH.identity() != TruthGrader(Grammar(negation=0.5)).identity()
    assert isinstance(TRUTH, Grader) and TRUTH.price == Price() and TRUTH.count_tokens(calls(FINE, POOR)[0]) == 0


def test_calls_are_pulled_one_by_one() -> None:
    pulled = iter(calls(FINE, POOR))
    next(TRUTH.ask(pulled))
    assert len(list(pulled)) == 1
