"""MT-Bench: what the judge is asked, how ratings are read and averaged, and files that are not as they should be."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from attnpo.evaluation.base import Benchmark, ModelAnswer
from attnpo.evaluation.chat import GradingReply
from attnpo.evaluation.mt_bench import parse_rating
from attnpo.schema import UserError
from tests.evaluation.checkouts import (
    FASTCHAT,
    MT_QUESTIONS,
    answers_to,
    change,
    check_means,
    configured,
    fastchat,
    graded_with,
    hold_refusal,
)

GRADER = {"model": "judge"}
ANSWERS = "mt_bench/reference_answer/gpt-4.jsonl"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return fastchat(tmp_path / "FastChat")


@pytest.fixture
def benchmark(checkout: Path) -> Benchmark:
    return configured("mt_bench", path=str(checkout))


# --------------------------------------------------------------------------------------------- questions and calls


@pytest.mark.parametrize("below", [".", "fastchat/llm_judge", "fastchat/llm_judge/data"])
def test_the_checkout_may_be_named_at_three_depths(checkout: Path, below: str) -> None:
    benchmark = configured("mt_bench", path=str(checkout / below))
    assert isinstance(benchmark, Benchmark) and benchmark.sampling.max_new_tokens == 1024
    questions = benchmark.questions()
    assert [question.id for question in questions] == list(MT_QUESTIONS)
    assert [question.temperature for question in questions] == [0.7, 0.0, 0.0]
    assert questions[0].turns == ("ask\u2028\x38\x31", "more 81")


def test_temperatures_are_those_of_the_protocol() -> None:
    by_category = configured("mt_bench", path="x").temperatures  # type: ignore[attr-defined]
    protocol = {0.7: ["roleplay", "writing"], 0.1: ["humanities", "stem"]}
    protocol[0.0] = ["coding", "extraction", "math", "reasoning"]
    found = {value: sorted(c for c, t in by_category.items() if t == value) for value in set(by_category.values())}
    assert found == protocol


def test_what_the_judge_is_asked(benchmark: Benchmark) -> None:
    answers = answers_to(benchmark.questions())
    calls = benchmark.grading_calls(dict(reversed(answers.items())), 2)  # their order makes no difference
    assert [(call.item, call.part) for call in calls] == [(q, t) for q in MT_QUESTIONS for t in ("turn_1", "turn_2")]
    assert {(c.benchmark, c.round, c.repeat, c.max_tokens, c.temperature) for c in calls} == {
        ("mt_bench", 2, 0, 2048, 0.0)
    }
    shown = [[(message["role"], message["content"]) for message in call.messages] for call in calls]
    assert shown[0] == [("system", "Be fair."), ("user", "Rate mine 0 81 to ask\u202881 as [[n]].")]
    assert shown[1] == [
        ("system", "Be fair twice."),
        ("user", "Rate mine 1 81 to more 81 after ask\u202881 mine 0 81."),
    ]
    assert shown[2] == [("system", "Be fair."), ("user", "Rate mine 0 101 to ask\u2028101, right is right 101.")]
    conversation = "ask\u2028101 {} 101 more 101 {} 101"
    asked = f"{conversation.format('right', 'also right')} | {conversation.format('mine 0', 'mine 1')}"
    assert shown[3] == [("user", asked)]  # an empty system prompt is no message
    assert len({call.key(GRADER) for call in calls}) == len(calls)


def test_braces_in_answers_stay_as_they_are(benchmark: Benchmark) -> None:
    answers = answers_to(benchmark.questions())
    answers["101"] = ModelAnswer("101", ("{ref_answer_1} {{x}} {", "}{0.__class__}"))
    texts = [call.messages[-1]["content"] for call in benchmark.grading_calls(answers, 0) if call.item == "101"]
    assert texts[0] == "Rate {ref_answer_1} {{x}} { to ask\u2028101, right is right 101."
    assert texts[1].endswith("ask\u2028101 {ref_answer_1} {{x}} { more 101 }{0.__class__}")


def test_a_doubled_brace_of_a_template_is_one(checkout: Path) -> None:
    change(checkout / FASTCHAT / "judge_prompts.jsonl", "as [[n]]", "as {{n}}")
    benchmark = configured("mt_bench", path=str(checkout))
    assert benchmark.grading_calls(answers_to(benchmark.questions()), 0)[0].messages[-1]["content"].endswith("as {n}.")


def test_answers_that_do_not_fit_are_refused(benchmark: Benchmark) -> None:
    whole = answers_to(benchmark.questions())
    for answers, expected in (
        ({name: whole[name] for name in ("81", "111")}, "1 without an answer (101)"),
        (whole | {"7": ModelAnswer("7", ("x", "y"))}, "1 answered but not part of the benchmark (7)"),
        (whole | {"81": whole["111"], "111": whole["81"]}, "2 with the answer to a different question (81, 111)"),
        (whole | {"81": ModelAnswer("81", ("x",))}, "1 with the wrong number of answered turns (81)"),
        ({}, "3 without an answer (81, 101, 111)"),
    ):
        with pytest.raises(UserError) as refused:
            benchmark.grading_calls(answers, 0)
        assert expected in str(refused.value) and "the answers do not match the 3 questions of mt_bench: " in str(
            refused.value
        )


# --------------------------------------------------------------------------------------------- ratings


def test_ratings_are_read() -> None:
    """Double brackets first, wherever they stand."""
    read = {"Rating: [[7]]": 7.0, "Rating: [[7.5]] then [[9]]": 7.5, "see [1] and then [[4]]": 4.0, "Rating: [6]": 6.0}
    read |= {"[[10.]]": 10.0, "[[07]]": 7.0, "[[0]]": 0.0, "[[11]]": 11.0}
    none = ["[[rating]]", "[[-3]]", "[[7/10]]", "[[5, 6]]", "Rating: 7", f"[[{'9' * 400}]]", ""]
    assert {text: parse_rating(text) for text in (*read, *none)} == read | dict.fromkeys(none)


def test_the_score_is_the_mean_of_all_valid_judgments(benchmark: Benchmark) -> None:
    """Not of turn means: (2 + 4 + 9) / 3 = 5, where the turns' means 2 and 6.5 would give 4.25."""
    ratings = {
        ("81", "turn_1"): "[[2]]",
        ("81", "turn_2"): "[[4]]",
        ("101", "turn_1"): "I would rather not.",
        ("101", "turn_2"): "[[9]]",
    }
    graded = graded_with(benchmark, ratings)
    assert graded.questions == ("81", "101", "111") and tuple(graded.scores) == benchmark.scores
    assert {name: graded.scores[name] for name in ("score", "turn_1", "turn_2", "writing", "reasoning")} == {
        "score": 5.0,
        "turn_1": 2.0,
        "turn_2": 6.5,
        "writing": 3.0,
        "reasoning": 9.0,
    }
    assert math.isnan(graded.scores["math"]) and math.isnan(graded.scores["stem"])
    assert list(graded.weights["score"]) == [2, 1, 0] and list(graded.values["score"][:2]) == [3, 9]
    assert graded.counts == {"judgments without a rating, left out": 1, "turns without a judgment": 2}
    check_means(graded)


def test_ratings_off_the_scale_count_and_are_counted(benchmark: Benchmark) -> None:
    assert math.isnan(graded_with(benchmark, {}).scores["score"])
    graded = graded_with(benchmark, {("81", "turn_1"): "[[0]]", ("81", "turn_2"): "[[100]]"})
    assert graded.scores["score"] == 50.0
    assert graded.counts["ratings outside 1 to 10, used unchanged"] == 2


def test_what_is_odd_about_answers_and_replies_is_counted(benchmark: Benchmark) -> None:
    answers = answers_to(benchmark.questions())
    answers["81"] = ModelAnswer("81", ("", " \n"))
    calls = benchmark.grading_calls(answers, 0)
    graded = benchmark.grade(answers, {call: GradingReply("[[3]] because", "length") for call in calls})
    assert graded.counts == {"judgments cut at the judge's token limit": 6}
    assert graded.scores["score"] == 3.0


def test_a_part_of_the_answers_is_graded_alone_and_repeats_all_count(benchmark: Benchmark) -> None:
    answers = answers_to(benchmark.questions())
    calls = benchmark.grading_calls(answers, 0)
    replies = {call: GradingReply("[[4]]") for call in calls}
    replies[replace(calls[0], repeat=1)] = GradingReply("[[7]]")
    graded = benchmark.grade({"81": answers["81"]}, replies)
    assert graded.questions == ("81",) and graded.scores["score"] == 5.0  # (4 + 4 + 7) / 3
    assert graded.counts == {}


# --------------------------------------------------------------------------------------------- files


def test_a_changed_prompt_changes_its_calls_and_the_versions(checkout: Path, benchmark: Benchmark) -> None:
    answers = answers_to(benchmark.questions())
    before = [call.key(GRADER) for call in benchmark.grading_calls(answers, 0)]
    change(checkout / FASTCHAT / "judge_prompts.jsonl", "as [[n]].", "as [[n]]!")
    changed = configured("mt_bench", path=str(checkout))
    after = [call.key(GRADER) for call in changed.grading_calls(answers, 0)]
    assert [old == new for old, new in zip(before, after, strict=True)] == [False, *[True] * 5]
    assert benchmark.fingerprint() != changed.fingerprint()
    again = configured("mt_bench", path=str(checkout / FASTCHAT))
    assert again.fingerprint() == changed.fingerprint()  # the same files under another path


def test_references_may_be_another_file(checkout: Path, tmp_path: Path, benchmark: Benchmark) -> None:
    first = checkout / FASTCHAT / ANSWERS
    own = tmp_path / "mine.jsonl"
    own.write_text(first.read_text(encoding="utf-8").replace("right", "surely"), encoding="utf-8")
    other = configured("mt_bench", path=str(checkout), references=str(own))
    answers = answers_to(other.questions())
    assert "right is surely 101" in other.grading_calls(answers, 0)[2].messages[-1]["content"]
    assert other.fingerprint() != benchmark.fingerprint()
    first.write_text(own.read_text(encoding="utf-8"), encoding="utf-8")
    assert configured("mt_bench", path=str(checkout)).fingerprint() == other.fingerprint()


@pytest.mark.parametrize("name", ["mt_bench/question.jsonl", "judge_prompts.jsonl", ANSWERS])
def test_a_missing_or_damaged_file_is_named_with_the_way_to_get_it(checkout: Path, name: str) -> None:
    path = checkout / FASTCHAT / name
    whole = path.read_bytes()
    for content, expected in {
        None: "is missing",
        b"": "is empty",
        whole[:-9]: "is not JSON",
        b"\xff" + whole: "cannot be read as UTF-8 text",
        whole + b"[1]\n": "must be an object, got '[1]'",
    }.items():
        path.unlink() if content is None else path.write_bytes(content)
        way = ("git clone https://github.com/lm-sys/FastChat", "benchmark.path=")
        hold_refusal("mt_bench", checkout, path.name, expected, *way)


@pytest.mark.parametrize(
    ("name", "old", "new", "expected"),
    [
        ("judge_prompts.jsonl", "Rate {answer} to {question} as", "Rate {question} as", "got {question}"),
        ("judge_prompts.jsonl", "as [[n]].", "{answer.__class__}", "got {answer} {answer.__class__} {question}"),
        ("judge_prompts.jsonl", "as [[n]].", "{answer!r}", "{answer!r}"),
        ("judge_prompts.jsonl", "as [[n]].", "{", "judge_prompts.jsonl, single-v1, is not a valid template"),
        ("judge_prompts.jsonl", "[[rating]]", "[[A]]", "single-v1, asks for the format [[A]], expected [[rating]]"),
        ("judge_prompts.jsonl", '"single-math-v1"', '"other"', "has no prompt called single-math-v1"),
        ("judge_prompts.jsonl", '"Be fair."', "3", "line 1: system_prompt must be a string, got '3'"),
        ("mt_bench/question.jsonl", "101,", "81,", "question.jsonl contains question_id 81 twice"),
        (
            "mt_bench/question.jsonl",
            '"writing"',
            '"law"',
            "question 81 in category law; benchmark.temperatures only has",
        ),
        ("mt_bench/question.jsonl", ', "more 81"', "", "has 1 turns for question 81, expected 2"),
        ("mt_bench/question.jsonl", '"more 81"', "null", "line 1: turns[1] must be a string, got 'None'"),
        ("mt_bench/question.jsonl", '"category"', '"kind"', "line 1: category must be a string, it is missing"),
        (ANSWERS, "111,", "112,", "has no reference answer to question 111"),
        (ANSWERS, ', "also right 111"', "", "only one turn of the reference answer"),
        (ANSWERS, '"choices"', '"picks"', "choices must be a list, it is missing"),
    ],
)
def test_files_that_are_laid_out_otherwise_are_refused(
    checkout: Path, name: str, old: str, new: str, expected: str
) -> None:
    change(checkout / FASTCHAT / name, old, new)
    hold_refusal("mt_bench", checkout, expected)


def test_references_that_are_nowhere_are_told_with_those_there_are(checkout: Path) -> None:
    with pytest.raises(UserError, match=r"benchmark.references=gpt-5.jsonl must be .* \(found there: gpt-4.jsonl\)"):
        configured("mt_bench", path=str(checkout), references="gpt-5.jsonl").questions()


def test_without_categories_that_need_references_none_is_read(checkout: Path) -> None:
    (checkout / FASTCHAT / ANSWERS).unlink()
    benchmark = configured("mt_bench", path=str(checkout), with_reference=[])
    assert len(benchmark.grading_calls(answers_to(benchmark.questions()), 0)) == 6


def test_options_are_checked() -> None:
    for values, expected in (
        ({"judge_max_tokens": 0}, "judge_max_tokens must be at least 1, got 0"),
        ({"judge_temperature": -1.0}, "judge_temperature must be at least 0"),
        ({"temperatures": {"math": "hot"}}, "temperatures.math: expected float"),
        ({"temperatures": {"math": -0.1}, "with_reference": []}, "temperatures.math must be at least 0, got -0.1"),
        ({"with_reference": ["maths"]}, "maths is not a category in benchmark.temperatures"),
        ({"pathh": "x"}, "pathh: unknown key"),
    ):
        with pytest.raises(UserError, match=expected):
            configured("mt_bench", **{"path": "x"} | values)


def test_versions_say_what_decides(benchmark: Benchmark) -> None:
    assert json.loads(json.dumps(benchmark.fingerprint()))["files"].keys() == {
        "mt_bench/question.jsonl",
        "judge_prompts.jsonl",
        "references",
    }
