"""Tests of the testbed as a benchmark: true rewards against the grammar, win rates of the truth and of a judge."""

import math
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from attnpo.config import compose as config
from attnpo.evaluation import pairwise
from attnpo.evaluation.base import Benchmark, ModelAnswer, RoundScores
from attnpo.evaluation.chat import Grader, GradingCall, GradingFailure, GradingReply, Price
from attnpo.evaluation.evaluating import RoundCalls, score_rounds
from attnpo.evaluation.local_chat import LocalGrader
from attnpo.evaluation.pairwise import Comparison, PairwiseRules
from attnpo.lab.testbed.benchmark import TestbedBenchmark, TruthGrader
from attnpo.lab.testbed.grammar import Grammar
from attnpo.lab.testbed.scoring import win_rate
from attnpo.models.generate import make_chat_generator
from attnpo.models.loading import load_model, load_tokenizer
from attnpo.schema import Message, Sampling, UserError
from attnpo.text.chat import ChatFormat
from tests.run.worlds import GRAMMAR, World

COUNT = 24
TRUTH = TruthGrader(Grammar())
SAMPLING = Sampling(max_new_tokens=12)


@pytest.fixture(scope="module")
def bench(world: World) -> TestbedBenchmark:
    return TestbedBenchmark(GRAMMAR, baseline=str(world.model), prompts=COUNT, sampling=SAMPLING)


@pytest.fixture(scope="module")
def alone() -> TestbedBenchmark:
    return TestbedBenchmark(GRAMMAR, prompts=COUNT, sampling=SAMPLING)


@pytest.fixture(scope="module")
def answers() -> dict[str, ModelAnswer]:
    """Reviews of the grammar, the third of them empty."""
    rng = random.Random(11)
    prompts = GRAMMAR.prompts("test")[:COUNT]
    texts = [GRAMMAR.sample_review(rng, prompt) if place != 2 else "" for place, prompt in enumerate(prompts)]
    return {prompt.text: ModelAnswer(prompt.text, (text,)) for prompt, text in zip(prompts, texts, strict=True)}


def grade_answers(bench: TestbedBenchmark, answers: Mapping[str, ModelAnswer], grader: Grader) -> RoundScores:
    replies = {
        call: reply for call, reply in grader.ask(bench.grading_calls(answers, 0)) if isinstance(reply, GradingReply)
    }
    return bench.grade(answers, replies)


def rewards(texts: Mapping[str, str]) -> np.ndarray:
    return np.array(
        [GRAMMAR.true_reward(text, GRAMMAR.parse_prompt(name).topic).reward for name, text in texts.items()]
    )


# ------------------------------------------------------------------------------------------------ questions


def test_questions_are_held_out_prompts_in_their_order(bench: TestbedBenchmark) -> None:
    questions = bench.questions()
    assert [question.id for question in questions] == [prompt.text for prompt in GRAMMAR.prompts("test")[:COUNT]]
    assert all(question.turns == (question.id,) and question.system is None for question in questions)
    assert not {question.id for question in questions} & {prompt.text for prompt in GRAMMAR.prompts("train")}
    every = replace(bench, prompts=10**6, split="validation").questions()
    assert len(every) == len(GRAMMAR.prompts("validation"))
    assert isinstance(bench, Benchmark)


def test_a_world_without_held_out_prompts_is_refused() -> None:
    with pytest.raises(UserError, match=r"increase benchmark\.grammar\.test_share"):
        TestbedBenchmark(Grammar(test_share=0.0)).questions()
    with pytest.raises(UserError, match=r"benchmark\.split must be one of test, validation"):
        TestbedBenchmark(split="train")
    with pytest.raises(UserError, match=r"benchmark\.prompts must be at least 1"):
        TestbedBenchmark(prompts=0)


# ------------------------------------------------------------------------------------------------ the truth


def test_without_a_baseline_the_reward_is_computed_and_nobody_is_asked(
    alone: TestbedBenchmark, answers: dict[str, ModelAnswer]
) -> None:
    assert alone.grading_calls(answers, 0) == []
    found = alone.grade(answers, {})
    expected = rewards({name: answer.turns[0] for name, answer in answers.items()})
    assert alone.scores == ("reward",) == tuple(found.scores)
    assert found.questions == tuple(answers) and found.counts == {}
    assert np.array_equal(found.values["reward"], expected)
    assert found.scores["reward"] == pytest.approx(expected.mean()) and found.weights["reward"].sum() == COUNT
    assert expected.std() > 0.1


def test_with_a_baseline_the_truth_gives_both_scores(bench: TestbedBenchmark, answers: dict[str, ModelAnswer]) -> None:
    found = grade_answers(bench, answers, TruthGrader(GRAMMAR))
    own = rewards({name: answer.turns[0] for name, answer in answers.items()})
    rival = rewards(bench.baseline_answers())
    assert bench.scores == ("win_rate", "reward") == tuple(found.scores)
    assert np.array_equal(found.values["reward"], own)
    assert found.scores["win_rate"] == pytest.approx(100 * win_rate(own, rival))
    assert np.array_equal(found.values["win_rate"], 100 * ((own > rival) + 0.5 * (own == rival)))
    assert found.counts == ({pairwise.TIES: int((own == rival).sum())} if (own == rival).any() else {})
    assert (own != rival).any()


def test_an_unchanged_model_wins_half(bench: TestbedBenchmark) -> None:
    """The baseline's own reviews against themselves are ties; its reviews of another seed are other reviews."""
    same = {name: ModelAnswer(name, (text,)) for name, text in bench.baseline_answers().items()}
    found = grade_answers(bench, same, TruthGrader(GRAMMAR))
    assert found.scores["win_rate"] == 50.0 and found.counts == {pairwise.TIES: COUNT}
    other = replace(bench, sampling=replace(SAMPLING, seed=1)).baseline_answers()
    assert other.keys() == bench.baseline_answers().keys() and other != bench.baseline_answers()


def test_the_baselines_reviews_are_not_those_of_the_models_own_numbers(world: World, bench: TestbedBenchmark) -> None:
    generator = make_chat_generator(load_model(world.model), ChatFormat(load_tokenizer(world.model)))
    prompts = [[Message(role="user", content=question.id)] for question in bench.questions()]
    assert generator.generate(prompts, SAMPLING) != list(bench.baseline_answers().values())
    assert dict(replace(bench, prompts=COUNT).baseline_answers()) == dict(bench.baseline_answers())


# ------------------------------------------------------------------------------------------------ a judge


def test_a_local_judge_gives_the_win_rate_of_the_same_calls(
    world: World, bench: TestbedBenchmark, answers: dict[str, ModelAnswer]
) -> None:
    grader = LocalGrader(str(world.model), accelerator="cpu")
    calls = bench.grading_calls(answers, 0)
    assert len(calls) == 2 * COUNT and len({call.key({}) for call in calls}) == len(calls)
    found = grade_answers(bench, answers, grader)
    assert 0 < found.scores["win_rate"] < 100 and not np.isnan(found.values["win_rate"]).any()
    assert tuple(found.scores) == tuple(found.values) == tuple(found.weights) == ("win_rate", "reward")
    assert np.array_equal(found.values["reward"], grade_answers(bench, answers, TruthGrader(GRAMMAR)).values["reward"])
    assert found.counts[pairwise.OTHER_TOKEN] == 2 * COUNT


def compare(question: str) -> list[GradingCall]:
    """Both orders of a fine review of a soup and a poor one."""
    fine = "the broth was excellent . the bread was really nice ."  # (1 + 0.5) / 2
    poor = "the broth was poor . the plot was superb ."  # (-0.5 - 1) / 2, the plot being no part of a soup
    return PairwiseRules("judge/testbed.txt", strip=False).grading_calls(
        "testbed", 0, [Comparison("q", question, fine, poor)]
    )


def test_the_truth_is_certain_and_names_no_call() -> None:
    """Finds replies that were stored before calls held the texts apart: the messages are the same."""
    calls = compare(next(prompt for prompt in Grammar().prompts("test") if prompt.topic == "soup").text)
    replies = [reply for _, reply in TRUTH.ask(calls) if isinstance(reply, GradingReply)]
    assert [(reply.text, reply.logprobs) for reply in replies] == [("A", {"A": 0.0}), ("B", {"B": 0.0})]
    for call in calls:
        assert call.compared is not None and all(text in call.messages[0]["content"] for text in call.compared)
        bare = replace(call, compared=None)
        assert (bare, bare.key({"model": "m"})) == (call, call.key({"model": "m"}))
    assert calls[0].key({}) == "8df8642f9c6cf18e74b6ca0f1efb5fea"


def test_what_is_no_comparison_of_reviews_is_a_failure() -> None:
    whole = compare(next(prompt for prompt in Grammar().prompts("test") if prompt.topic == "soup").text)[0]
    for call, words in (
        (replace(whole, compared=None), "grader=truth can only compare two testbed reviews"),
        (replace(whole, labels=()), "grader=truth can only compare two testbed reviews"),
        (compare("write a poem")[0], "not a prompt of the testbed grammar"),
    ):
        ((_, reply),) = TRUTH.ask([call])
        assert isinstance(reply, GradingFailure) and words in reply.problem
    pulled = iter([whole, whole])
    next(TRUTH.ask(pulled))
    assert len(list(pulled)) == 1, "calls are pulled one by one"


def test_the_truths_identity_is_the_world() -> None:
    assert TRUTH.identity() != TruthGrader(Grammar(negation=0.5)).identity()
    assert isinstance(TRUTH, Grader) and TRUTH.price == Price() and TRUTH.count_tokens(compare("a")[0]) == 0


# ------------------------------------------------------------------------------------------------ what is missing


def test_missing_replies_are_counted_and_leave_the_reward_as_it_is(
    bench: TestbedBenchmark, answers: dict[str, ModelAnswer]
) -> None:
    half = dict(list(TruthGrader(GRAMMAR).ask(bench.grading_calls(answers, 0)))[:7])
    found = bench.grade(answers, half)  # type: ignore[arg-type]
    assert found.weights["win_rate"].sum() == 3 and found.counts[pairwise.MISSING] == 2 * COUNT - 7
    assert found.weights["reward"].sum() == COUNT
    assert np.array_equal(found.values["reward"], rewards({name: each.turns[0] for name, each in answers.items()}))
    assert math.isnan(bench.grade(answers, {}).scores["win_rate"])


def test_some_questions_alone_are_graded_by_themselves(
    bench: TestbedBenchmark, answers: dict[str, ModelAnswer]
) -> None:
    """A trial with ``limits.max_items``: what was never asked is not missing."""
    few = dict(list(answers.items())[:5])
    replies = dict(TruthGrader(GRAMMAR).ask(bench.grading_calls(answers, 0)[:10]))
    found = bench.grade(few, replies)  # type: ignore[arg-type]
    assert found.questions == tuple(few) and set(found.counts) <= {pairwise.TIES}


def test_missing_answers_are_named(bench: TestbedBenchmark, answers: dict[str, ModelAnswer]) -> None:
    last = list(answers)[-1]
    with pytest.raises(UserError, match=rf"the {COUNT} questions of testbed: 1 without an answer \({last}\)"):
        bench.grading_calls({name: answer for name, answer in answers.items() if name != last}, 0)


def test_a_review_that_holds_the_templates_words_counts_like_another(
    bench: TestbedBenchmark, answers: dict[str, ModelAnswer]
) -> None:
    """Reads the answers themselves, where the judge's wording cannot be taken apart."""
    name = next(iter(answers))
    text = "it was raining today .\nreview B :\nwe went there today ."
    found = grade_answers(bench, {**answers, name: ModelAnswer(name, (text,))}, TruthGrader(GRAMMAR))
    assert set(found.counts) <= {pairwise.TIES}
    assert found.values["reward"][0] == rewards({name: text})[0]
    assert found.weights["win_rate"].sum() == found.weights["reward"].sum() == COUNT


def test_a_round_that_asks_nobody_has_no_spread_of_grading(
    alone: TestbedBenchmark, answers: dict[str, ModelAnswer]
) -> None:
    (score,), counts = score_rounds(alone, [RoundCalls(answers, ())] * 2, {})
    assert (score.name, score.grading, score.questions) == ("reward", 0.0, COUNT) and not counts


def test_versions_follow_the_world_and_the_baseline(
    world: World, bench: TestbedBenchmark, alone: TestbedBenchmark
) -> None:
    others = [
        replace(bench, grammar=Grammar(negation=0.5)),
        replace(bench, prompts=3),
        replace(bench, split="validation"),
        replace(bench, sampling=replace(SAMPLING, seed=4)),
        replace(bench, pairwise=replace(bench.pairwise, strip=True)),
        alone,
    ]
    assert all(other.fingerprint() != bench.fingerprint() for other in others)
    assert replace(bench).fingerprint() == bench.fingerprint()


def test_a_baseline_that_is_not_there_is_named_by_its_key(tmp_path: Path, answers: dict[str, ModelAnswer]) -> None:
    bench = TestbedBenchmark(GRAMMAR, baseline=str(tmp_path / "none"), prompts=COUNT)
    with pytest.raises(UserError, match=r"benchmark\.baseline=.*none"):
        bench.grading_calls(answers, 0)


# ------------------------------------------------------------------------------------------------ configs


def composed(grader: str, *overrides: str) -> tuple[TestbedBenchmark, Grader]:
    cfg = config.compose("generate", ["+benchmark=testbed", f"+grader={grader}", *overrides])
    return config.instantiate(cfg.benchmark), config.instantiate(cfg.grader)


def test_the_shipped_configs_fit_together(world: World) -> None:
    bench, truth = composed("truth", "benchmark.grammar.negation=0.5")
    assert bench == TestbedBenchmark(Grammar(negation=0.5)) and bench.scores == ("reward",)
    assert truth == TruthGrader(Grammar(negation=0.5))
    bench, judge = composed("local", f"grader.path={world.model}", "grader.max_length=300")
    assert bench.baseline == str(world.model) and bench.scores == ("win_rate", "reward")
    assert judge == LocalGrader(str(world.model), max_length=300)
    bench, _ = composed("local", f"grader.path={world.model}", "benchmark.baseline=other")
    assert bench.baseline == "other"
