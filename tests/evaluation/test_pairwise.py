"""Comparisons by label logits: what the two orders say together, and what becomes of replies that say nothing."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from attnpo.config.compose import CONFIG_DIR, compose, instantiate
from attnpo.evaluation import pairwise
from attnpo.evaluation.base import Benchmark, ModelAnswer, Question, Replies, RoundScores
from attnpo.evaluation.chat import GradingCall, GradingReply
from attnpo.evaluation.local_chat import LocalGrader
from attnpo.evaluation.pairwise import MODEL_FIRST, MODEL_SECOND, Comparison, PairwiseBenchmark, PairwiseRules
from attnpo.judge.prompts import JudgeTemplate
from attnpo.schema import Sampling, UserError
from tests.evaluation.checkouts import answers_to, arena_hard_auto
from tests.run.worlds import GRAMMAR, World

RULES = PairwiseRules("judge/short.txt")
CONTESTS = [Comparison("q1", "why ?", " yes ", "no"), Comparison("q2", "how ?", "so", "{answer_a}")]
WORLD_RULES = PairwiseRules("judge/testbed.txt")


def said(first: float, second: float, **more: float) -> GradingReply:
    """A reply with the probabilities of A and B, and of further texts."""
    probabilities = {"A": first, "B": second, **more}
    return GradingReply("", logprobs={text: math.log(value) for text, value in probabilities.items() if value > 0})


def preferences(*replies: GradingReply | None) -> pairwise.Preferences:
    """Of one item per two replies, in the order of the calls."""
    contests = [Comparison(f"q{place}", "?", "a", "b") for place in range(len(replies) // 2)]
    calls = RULES.grading_calls("bench", 0, contests)
    found = {call: reply for call, reply in zip(calls, replies, strict=True) if reply is not None}
    return RULES.preferences([contest.item for contest in contests], found)


# ------------------------------------------------------------------------------------------------ calls


def test_both_orders_are_asked_in_the_wording() -> None:
    calls = RULES.grading_calls("bench", 2, CONTESTS)
    template = JudgeTemplate.from_file(CONFIG_DIR / "judge" / "short.txt")
    expected = [
        template.render("why ?", "yes", "no"),
        template.render("why ?", "no", "yes"),
        template.render("how ?", "so", "{answer_a}"),
        template.render("how ?", "{answer_a}", "so"),
    ]
    assert [call.messages for call in calls] == [({"role": "user", "content": shown.text},) for shown in expected]
    assert [(call.item, call.part) for call in calls] == [
        (item, part) for item in ("q1", "q2") for part in (MODEL_FIRST, MODEL_SECOND)
    ]
    assert {(call.benchmark, call.round, call.labels, call.max_tokens) for call in calls} == {
        ("bench", 2, ("A", "B"), 1)
    }
    kept = replace(RULES, strip=False).grading_calls("bench", 0, CONTESTS)
    assert kept[0].messages[0]["content"] == template.render("why ?", " yes ", "no").text


def test_an_empty_answer_is_a_blank() -> None:
    first, second = RULES.grading_calls("bench", 0, [Comparison("q", "?", "", "b")])
    template = JudgeTemplate.from_file(CONFIG_DIR / "judge" / "short.txt")
    assert first.messages[0]["content"] == template.render("?", " ", "b").text
    assert second.messages[0]["content"] == template.render("?", "b", " ").text


# ------------------------------------------------------------------------------------------------ verdicts


def test_the_value_is_the_mean_probability_of_both_orders() -> None:
    found = preferences(said(0.6, 0.2), said(0.1, 0.3), said(0.5, 0.5), said(0.2, 0.8))
    # P(A) / (P(A) + P(B)) = 0.75 first, P(B) / (P(A) + P(B)) = 0.75 in the other order; then 0.5 and 0.8.
    assert found.values == pytest.approx([0.75, 0.65])
    assert found.win_rate == pytest.approx(70.0)
    assert list(found.weights) == [1.0, 1.0] and found.counts == {}


def test_a_label_that_is_not_among_the_likeliest_is_impossible() -> None:
    found = preferences(said(0.6, 0), said(0, 0.6), said(0, 0.6), said(0.1, 0.3))
    assert found.values == pytest.approx([1.0, 0.375])


def test_ties_and_place_bias_are_counted() -> None:
    found = preferences(
        *(said(0.5, 0.5), said(0.5, 0.5)),  # equal
        *(said(0.9, 0.1), said(0.9, 0.1)),  # the first twice, as much: a tie too
        *(said(0.9, 0.1), said(0.6, 0.4)),  # the first twice, the model's more
        *(said(0.4, 0.6), said(0.2, 0.8)),  # the second twice
    )
    assert found.values == pytest.approx([0.5, 0.5, 0.65, 0.6])
    assert found.counts == {pairwise.TIES: 2, pairwise.FIRST_TWICE: 2, pairwise.SECOND_TWICE: 1}


def test_replies_without_a_verdict_take_their_question_out() -> None:
    found = preferences(
        *(said(0.6, 0.2), said(0, 0, C=0.9)),
        *(None, said(0.1, 0.3)),
        *(said(0.1, 0.3, the=0.6), said(0.3, 0.1)),  # another token is likelier: counted, and read all the same
    )
    assert np.isnan(found.values[:2]).all() and found.values[2] == pytest.approx(0.25)
    assert list(found.weights) == [0.0, 0.0, 1.0] and found.win_rate == pytest.approx(25.0)
    assert found.counts == {pairwise.MISSING: 1, pairwise.NO_VERDICT: 1, pairwise.OTHER_TOKEN: 2}


def test_a_judge_without_log_probabilities_is_read_by_its_word() -> None:
    found = preferences(GradingReply(" A\n"), GradingReply("B"), GradingReply("A"), GradingReply("neither"))
    assert found.values[0] == 1.0 and math.isnan(found.values[1])
    assert found.counts == {pairwise.NO_VERDICT: 1, pairwise.OTHER_TOKEN: 1}


def test_labels_with_blanks_around_them_are_labels() -> None:
    reply = GradingReply("", logprobs={" A": math.log(0.6), "B": math.log(0.2), "A\n": math.log(0.1)})
    assert preferences(reply, said(0.25, 0.75)).values == pytest.approx([0.75])


def test_no_reply_at_all_gives_no_figure() -> None:
    found = preferences(None, None)
    assert math.isnan(found.win_rate) and found.counts == {pairwise.MISSING: 2}
    assert math.isnan(RULES.preferences([], {}).win_rate)


def test_exchanged_answers_mirror_the_result(world: World) -> None:
    """The calls of a pair and of its mirror image are the same texts, so a judge's values add up to one."""
    rng = np.random.default_rng(0)
    prompts = GRAMMAR.prompts("test")[:6]
    words = ["the broth was nice .", "it had a poor bread .", "my uncle called the room superb .", ""]
    pairs = [(str(rng.choice(words)), str(rng.choice(words))) for _ in prompts]
    straight = [Comparison(p.text, p.text, a, b) for p, (a, b) in zip(prompts, pairs, strict=True)]
    mirrored = [Comparison(p.text, p.text, b, a) for p, (a, b) in zip(prompts, pairs, strict=True)]
    calls, mirror = (WORLD_RULES.grading_calls("bench", 0, contests) for contests in (straight, mirrored))
    assert [call.messages for call in calls[::2]] == [call.messages for call in mirror[1::2]]
    assert [call.messages for call in calls[1::2]] == [call.messages for call in mirror[::2]]
    grader = LocalGrader(str(world.model), accelerator="cpu", batch_size=1)
    items = [contest.item for contest in straight]
    one, other = (WORLD_RULES.preferences(items, asked(grader, some)) for some in (calls, mirror))
    assert one.values + other.values == pytest.approx(np.ones(len(items)), abs=1e-15)
    assert one.win_rate + other.win_rate == pytest.approx(100.0, abs=1e-12)
    same = np.array([a == b for a, b in pairs])
    assert same.any() and (one.values[same] == 0.5).all() and (one.values[~same] != 0.5).all()
    assert one.counts == other.counts


def asked(grader: LocalGrader, calls: Sequence[GradingCall]) -> dict[GradingCall, GradingReply]:
    return {call: reply for call, reply in grader.ask(calls) if isinstance(reply, GradingReply)}


def test_settings_out_of_range() -> None:
    with pytest.raises(UserError, match=r"benchmark\.pairwise\.labels must be two different labels"):
        PairwiseRules(labels=("A", "A"))
    with pytest.raises(UserError, match=r"benchmark\.pairwise\.top_logprobs must be at least 1"):
        PairwiseRules(top_logprobs=0)


def test_a_template_that_is_not_there_is_named(tmp_path: Path) -> None:
    rules = PairwiseRules(str(tmp_path / "none.txt"))
    with pytest.raises(UserError, match=r"benchmark\.pairwise\.template_file=.*no such file"):
        rules.grading_calls("bench", 0, CONTESTS)


# ------------------------------------------------------------------------------------------------ any benchmark


@dataclass(frozen=True)
class Two:
    """A benchmark of two questions with a baseline."""

    turns: int = 1
    rivals: tuple[str, ...] = ("q1", "q2")
    name: str = "two"
    sampling: Sampling = field(default_factory=Sampling)
    scores: tuple[str, ...] = ("own",)

    def grading_calls(self, answers: Mapping[str, ModelAnswer], round_: int) -> Sequence[GradingCall]:
        raise NotImplementedError

    def grade(self, answers: Mapping[str, ModelAnswer], replies: Replies) -> RoundScores:
        raise NotImplementedError

    def questions(self) -> Sequence[Question]:
        return [Question("q1", ("why ?",) * self.turns), Question("q2", ("how ?",), system="be brief")]

    def fingerprint(self) -> dict[str, object]:
        return {"questions": "1"}

    def baseline_answers(self) -> Mapping[str, str]:
        return {name: f"rival {name}" for name in self.rivals}


ANSWERS = {name: ModelAnswer(name, (f"model {name}",)) for name in ("q1", "q2")}


def test_the_questions_of_any_benchmark_with_a_baseline_can_be_judged() -> None:
    bench = PairwiseBenchmark(Two(), RULES)
    assert isinstance(bench, Benchmark) and (bench.name, bench.scores) == ("two_labels", ("win_rate",))
    calls = bench.grading_calls(ANSWERS, 1)
    contests = [
        Comparison("q1", "why ?", "model q1", "rival q1"),
        Comparison("q2", "system: be brief\n\nuser: how ?", "model q2", "rival q2"),
    ]
    assert calls == RULES.grading_calls("two_labels", 1, contests)
    graded = bench.grade(ANSWERS, dict(zip(calls, [said(0.9, 0.1), said(0.4, 0.6), said(1, 0)], strict=False)))
    assert isinstance(graded, RoundScores)
    assert (graded.questions, graded.scores["win_rate"]) == (("q1", "q2"), pytest.approx(75.0))
    assert graded.values["win_rate"][0] == pytest.approx(75.0) and list(graded.weights["win_rate"]) == [1.0, 0.0]
    assert graded.counts == {pairwise.MISSING: 1}
    assert bench.fingerprint() != replace(bench, pairwise=WORLD_RULES).fingerprint()


def test_a_shipped_benchmark_is_judged_by_labels(tmp_path: Path) -> None:
    overrides = ["benchmark=arena_hard_labels", f"benchmark.of.path={arena_hard_auto(tmp_path)}"]
    bench = instantiate(compose("evaluate", overrides).benchmark)
    assert isinstance(bench, PairwiseBenchmark) and bench.name == "arena_hard_labels"
    answers = answers_to(bench.questions())
    calls = bench.grading_calls(answers, 0)
    assert [call.item for call in calls] == ["a1", "a1", "a2", "a2", "a3", "a3"]
    rival = bench.of.baseline_answers()["a2"]
    assert all(rival in call.messages[0]["content"] for call in calls[2:4])
    graded = bench.grade(answers, {call: said(0.8, 0.2) for call in calls})
    assert graded.scores["win_rate"] == pytest.approx(50.0)  # always the first place


def test_what_cannot_be_compared_is_named() -> None:
    for bench, answers, words in (
        (Two(turns=2), ANSWERS, "question q1 has several turns"),
        (Two(), {"q1": ANSWERS["q1"]}, r"the 2 questions of .*: 1 without an answer \(q2\)"),
        (Two(rivals=("q2",)), ANSWERS, r"the baseline has no answers to 1 of 2 questions \(first: q1\)"),
    ):
        with pytest.raises(UserError, match=words):
            PairwiseBenchmark(bench, RULES).grading_calls(answers, 0)
