"""Arena-Hard: what the judge is asked, how verdicts are read and averaged, and files that are not as they should be."""

import json
import math
import random
from collections import Counter
from pathlib import Path

import pytest

from attnpo.evaluation.base import Benchmark, ModelAnswer
from attnpo.evaluation.chat import GradingReply
from attnpo.evaluation.checkout import read_constant
from attnpo.schema import UserError
from tests.evaluation.checkouts import (
    answers_to,
    arena_hard_auto,
    change,
    check_means,
    configured,
    graded_with,
    hold_refusal,
)

GRADER = {"model": "judge"}
ONE, TWO = "game_1", "game_2"
QUESTIONS = "data/arena-hard-v0.1/question.jsonl"
BASELINE = "data/arena-hard-v0.1/model_answer/old.jsonl"
JUDGES = "utils/judge_utils.py"
CONFIG = "config/arena-hard-v0.1.yaml"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "arena-hard-auto"
    folder.mkdir()
    return arena_hard_auto(folder)


@pytest.fixture
def benchmark(checkout: Path) -> Benchmark:
    return configured("arena_hard", path=str(checkout))


# --------------------------------------------------------------------------------------------- questions and calls


def test_what_the_judge_is_asked_in_both_orders(benchmark: Benchmark) -> None:
    assert isinstance(benchmark, Benchmark) and benchmark.sampling.max_new_tokens == 2048
    assert benchmark.sampling.temperature == 0 and benchmark.scores == ("win_rate",)
    questions = benchmark.questions()
    assert [(question.id, question.turns) for question in questions] == [(f"a{n}", (f"ask a{n}",)) for n in (1, 2, 3)]
    answers = answers_to(questions)
    calls = benchmark.grading_calls(dict(reversed(answers.items())), 1)  # their order makes no difference
    assert [(call.item, call.part) for call in calls] == [(f"a{n}", game) for n in (1, 2, 3) for game in (ONE, TWO)]
    assert {(c.benchmark, c.round, c.max_tokens, c.temperature) for c in calls} == {("arena_hard", 1, 16000, 0.0)}
    shown = [[(message["role"], message["content"]) for message in call.messages] for call in calls[2:4]]
    system = ("system", "Be fair.\\d")
    assert shown == [
        [system, ("user", "<ask a2>\nA: old on a2\nB: mine 0 a2")],
        [system, ("user", "<ask a2>\nA: mine 0 a2\nB: old on a2")],
    ]
    assert len({call.key(GRADER) for call in calls}) == 6


def test_each_category_of_the_second_release_has_its_own_baseline_and_prompt(checkout: Path) -> None:
    benchmark = configured("arena_hard_v2", path=str(checkout))
    assert benchmark.scores == ("hard_prompt", "creative_writing")
    calls = benchmark.grading_calls(answers_to(benchmark.questions()), 0)
    assert {(c.item, c.messages[0]["content"], c.messages[1]["content"]) for c in calls if c.part == ONE} == {
        ("h1", "Be fair.\\d Solve it first.", "<ask h1>\nA: old on h1\nB: mine 0 h1"),
        ("h2", "Be fair.\\d Solve it first.", "<ask h2>\nA: old on h2\nB: mine 0 h2"),
        ("w1", "Read it aloud.", "<ask w1>\nA: poet on w1\nB: mine 0 w1"),
    }


def test_a_category_without_a_figure_is_not_asked_and_needs_no_baseline(checkout: Path) -> None:
    (checkout / "data/arena-hard-v2.0/model_answer/poet.jsonl").unlink()
    benchmark = configured("arena_hard_v2", path=str(checkout), figures={"hard_prompt": "hard_prompt"})
    assert [question.id for question in benchmark.questions()] == ["h1", "h2"]


def test_answers_that_do_not_fit_are_refused(benchmark: Benchmark) -> None:
    """In what they may not fit, the tests of MT-Bench say."""
    answers = answers_to(benchmark.questions())
    del answers["a2"]
    with pytest.raises(
        UserError, match=r"the answers do not match the 3 questions of arena_hard: 1 without an answer \(a2\)"
    ):
        benchmark.grading_calls(answers, 0)


# --------------------------------------------------------------------------------------------- verdicts

NONE = "judgments without a verdict"
UNKNOWN = "judgments with an unknown verdict label"
DIFFER = "judgments with contradictory verdicts, counted as no verdict"
LAST_TAKEN = "judgments with contradictory verdicts, last one used"


@pytest.mark.parametrize(
    ("text", "last", "agree"),
    [  # what answer A gets and the weight under both protocols, or the reason there is no verdict
        ("so [[A>>B]]", (1, 3), (1, 3)),
        ("so [[A>B]]", (1, 1), (1, 1)),
        ("so [[A=B]]", (0.5, 1), (0.5, 1)),
        ("so [[B>A]]", (0, 1), (0, 1)),
        ("so [[B>>A]]", (0, 3), (0, 3)),
        ("so [[A>B]], yes: [[A>B]]", (1, 1), (1, 1)),
        ("first [[A>B]], no: [[B>>A]]", (0, 3), DIFFER),
        ("see [A>B] and [B>>A], so [[A=B]]", (0.5, 1), (0.5, 1)),
        ("so [A>B]", (1, 1), NONE),
        ("so [[a>>b]]", (1, 3), NONE),
        ("so [[B<<A]]", (1, 3), UNKNOWN),
        ("so [[A<B]]", (0, 1), UNKNOWN),
        ("so [[B=A]]", (0.5, 1), UNKNOWN),
        ("so [[A]]", UNKNOWN, UNKNOWN),
        ("so [[A>>>B]]", UNKNOWN, UNKNOWN),
        ("so [[ A>B ]] or A>B", NONE, NONE),
        ("", NONE, NONE),
    ],
)
def test_verdicts_under_both_protocols(checkout: Path, text: str, last: object, agree: object) -> None:
    """Game 2 has the model as answer A, so that its value is what A gets; the weight is the verdict's."""
    for verdicts, expected in (("last", last), ("agree", agree)):
        benchmark = configured("arena_hard", path=str(checkout), verdicts=verdicts, missing="game")
        graded = graded_with(benchmark, {("a1", TWO): text})
        counts = {**graded.counts}
        assert counts.pop("games without a judgment") == 5
        if isinstance(expected, str):
            assert counts == {expected: 1} and graded.weights["win_rate"][0] == 0, verdicts
        else:
            found = (graded.values["win_rate"][0] / 100, graded.weights["win_rate"][0])
            assert found == expected, verdicts
            differ = "[[A>B]], no" in text
            assert counts == ({LAST_TAKEN: 1} if differ else {}), verdicts


def test_the_score_is_the_weighted_mean_of_both_games(benchmark: Benchmark) -> None:
    """Lost by far (0 of 3) and won (1 of 1); a tie and a win by far (3.5 of 4): 4.5 of 8."""
    texts = {("a1", ONE): "[[A>>B]]", ("a1", TWO): "[[A>B]]", ("a2", ONE): "[[A=B]]", ("a2", TWO): "[[A>>B]]"}
    graded = graded_with(benchmark, texts)
    assert graded.scores == {"win_rate": 56.25}
    assert list(graded.values["win_rate"][:2]) == [25.0, 87.5] and list(graded.weights["win_rate"]) == [4, 4, 0]
    assert graded.counts == {"games without a judgment": 2}
    check_means(graded)


@pytest.mark.parametrize(("missing", "score", "questions"), [("question", 50.0, 1), ("game", 80.0, 2)])
def test_a_missing_verdict_costs_its_question_or_its_game(
    checkout: Path, missing: str, score: float, questions: int
) -> None:
    """Two ties (1 of 2 battles); one game won by far (3 of 3) beside one without a verdict: 1 / 2 or 4 / 5."""
    benchmark = configured("arena_hard", path=str(checkout), missing=missing)
    tied = {("a2", ONE): "[[A=B]]", ("a2", TWO): "[[A=B]]"}
    won = {("a1", ONE): "nobody knows", ("a1", TWO): "[[A>>B]]"}
    graded = graded_with(benchmark, tied | won)
    assert graded.scores["win_rate"] == score
    assert graded.counts[NONE] == 1
    assert graded.counts.get("questions left out because a game has no verdict", 0) == (missing == "question")
    assert int((graded.weights["win_rate"] > 0).sum()) == questions
    check_means(graded)


def test_a_game_that_was_not_judged_is_as_one_without_a_verdict(benchmark: Benchmark) -> None:
    assert math.isnan(graded_with(benchmark, {}).scores["win_rate"])
    graded = graded_with(benchmark, {("a1", ONE): "[[B>A]]", ("a2", ONE): "[[B>A]]", ("a2", TWO): "[[B>A]]"})
    assert graded.scores["win_rate"] == 50.0 and list(graded.weights["win_rate"]) == [0, 2, 0]
    assert graded.counts["games without a judgment"] == 3
    assert graded.counts["questions left out because a game has no verdict"] == 1


def test_categories_have_scores_of_their_own(checkout: Path) -> None:
    benchmark = configured("arena_hard_v2", path=str(checkout))
    won, lost = {ONE: "[[B>A]]", TWO: "[[A>B]]"}, {ONE: "[[A>B]]", TWO: "[[B>A]]"}
    texts = {
        (name, game): text for name, games in {"h1": won, "h2": won, "w1": lost}.items() for game, text in games.items()
    }
    graded = graded_with(benchmark, texts)
    assert graded.scores == {"hard_prompt": 100.0, "creative_writing": 0.0}
    check_means(graded)


def test_random_verdicts_against_a_list_of_battles(checkout: Path) -> None:
    """An independent account: every game as a list of battles, one or three long, as arena-hard-auto keeps them."""
    ids = [f"q{number}" for number in range(60)]
    path = checkout / QUESTIONS
    path.write_text(
        "".join(json.dumps({"uid": i, "category": "arena-hard-v0.1", "prompt": i}) + "\n" for i in ids),
        encoding="utf-8",
    )
    rows = [{"uid": i, "messages": [{"role": "assistant", "content": {"answer": "x"}}]} for i in ids]
    (checkout / BASELINE).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    rng = random.Random(3)
    labels = ["A>>B", "A>B", "A=B", "B>A", "B>>A", None]
    verdicts = {i: (rng.choice(labels), rng.choice(labels)) for i in ids}
    texts = {(i, game): f"[[{v}]]" if v else "-" for i in ids for game, v in zip((ONE, TWO), verdicts[i], strict=True)}

    def battles(verdict: str | None, model: str) -> list[float]:
        if verdict is None:
            return []
        times = 3 if ">>" in verdict else 1
        return [0.5 if "=" in verdict else float(verdict[0] == model)] * times

    by_game = {i: [battles(first, "B"), battles(second, "A")] for i, (first, second) in verdicts.items()}
    for missing in ("question", "game"):
        kept = [games for games in by_game.values() if missing == "game" or all(games)]
        flat = [value for games in kept for game in games for value in game]
        graded = graded_with(configured("arena_hard", path=str(checkout), missing=missing), texts)
        assert graded.scores["win_rate"] == pytest.approx(100 * sum(flat) / len(flat), abs=1e-9)
        assert graded.weights["win_rate"].sum() == len(flat)
        assert graded.counts[NONE] == Counter(texts.values())["-"]
        check_means(graded)


def test_what_is_odd_about_answers_and_replies_is_counted(benchmark: Benchmark) -> None:
    answers = answers_to(benchmark.questions())
    answers["a3"] = ModelAnswer("a3", (" ",))
    replies = {call: GradingReply("[[A=B]] because", "length") for call in benchmark.grading_calls(answers, 0)}
    graded = benchmark.grade(answers, replies)
    assert graded.counts == {"judgments cut at the judge's token limit": 6}
    part = benchmark.grade({"a2": answers["a2"]}, replies)
    assert part.questions == ("a2",) and part.counts == {"judgments cut at the judge's token limit": 2}


# --------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("name", "old", "new", "same"),
    [
        (CONFIG, "A: {ANSWER_A}", "A. {ANSWER_A}", [False] * 6),
        (JUDGES, '"Be fair"', '"Be kind"', [False] * 6),
        (BASELINE, "old on a2", "new on a2", [True, True, False, False, True, True]),
        (CONFIG, "some-judge", "another", [True] * 6),
    ],
)
def test_a_changed_file_changes_its_calls_and_the_versions(
    checkout: Path, benchmark: Benchmark, name: str, old: str, new: str, same: list[bool]
) -> None:
    answers = answers_to(benchmark.questions())
    before = [call.key(GRADER) for call in benchmark.grading_calls(answers, 0)]
    change(checkout / name, old, new)
    changed = configured("arena_hard", path=str(checkout))
    after = [call.key(GRADER) for call in changed.grading_calls(answers, 0)]
    assert [first == second for first, second in zip(before, after, strict=True)] == same
    assert changed.fingerprint() != benchmark.fingerprint()


def test_versions_say_what_decides(checkout: Path, benchmark: Benchmark) -> None:
    versions = json.loads(json.dumps(benchmark.fingerprint()))
    assert versions["files"].keys() == {QUESTIONS, BASELINE, JUDGES, CONFIG}
    for option, value in (("verdicts", "agree"), ("missing", "game"), ("strong_weight", 2)):
        assert configured("arena_hard", path=str(checkout), **{option: value}).fingerprint() != benchmark.fingerprint()


@pytest.mark.parametrize("name", [QUESTIONS, BASELINE, JUDGES, CONFIG])
def test_a_missing_or_damaged_file_is_named_with_the_way_to_get_it(checkout: Path, name: str) -> None:
    path = checkout / name
    whole = path.read_bytes()
    damaged = {JUDGES: "is not a valid Python file", CONFIG: "is not valid YAML"}
    for content, expected in {None: "is missing", whole[:-4]: damaged.get(name, "is not JSON")}.items():
        path.unlink() if content is None else path.write_bytes(content)
        hold_refusal("arena_hard", checkout, name, expected, "git clone https://github.com/lmarena/arena-hard-auto")


@pytest.mark.parametrize(
    ("name", "old", "new", "expected"),
    [
        (QUESTIONS, '"a2"', '"a1"', "question.jsonl contains uid a1 twice"),
        (
            QUESTIONS,
            '"arena-hard-v0.1"',
            '"other"',
            "has no questions in category arena-hard-v0.1; benchmark.figures can",
        ),
        (BASELINE, '"a2"', '"a9"', "has no baseline answers to 1 questions (a2)"),
        (BASELINE, '{"answer"', '{"text"', "messages[1]: content: answer must be a string, it is missing"),
        (
            JUDGES,
            "JUDGE_SETTINGS",
            "SETTINGS",
            "does not define JUDGE_SETTINGS as a constant that can be read without running",
        ),
        (JUDGES, '"Read it aloud."', "open('x').read()", "that can be read without running"),
        (JUDGES, '"arena-hard-v0.1"', '"v0.1"', "JUDGE_SETTINGS: arena-hard-v0.1 must be an object"),
        (JUDGES, '"old", "system_prompt": FAIR}', '"", "system_prompt": FAIR}', "v0.1: baseline must be a name"),
        (CONFIG, "{ANSWER_B}", "{ANSWER_B} {REFERENCE}", "got {ANSWER_A} {ANSWER_B} {QUESTION} {REFERENCE}"),
        (CONFIG, "prompt_template", "template", "prompt_template must be a string, it is missing"),
        (CONFIG, "]+)", "]+", "regex_patterns has an invalid regular expression"),
        (CONFIG, "([AB<>=]+)", "[AB<>=]+", "must have exactly one group per pattern"),
    ],
)
def test_files_that_are_laid_out_otherwise_are_refused(
    checkout: Path, name: str, old: str, new: str, expected: str
) -> None:
    change(checkout / name, old, new)
    hold_refusal("arena_hard", checkout, expected)


def test_of_a_baseline_that_answers_twice_the_last_answer_is_taken(
    checkout: Path, caplog: pytest.LogCaptureFixture
) -> None:
    row = {"uid": "a1", "messages": [{"role": "assistant", "content": {"answer": "older on a1"}}]}
    with (checkout / BASELINE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    benchmark = configured("arena_hard", path=str(checkout))
    assert "A: older on a1\n" in benchmark.grading_calls(answers_to(benchmark.questions()), 0)[0].messages[1]["content"]
    assert "1 questions have several answers" in caplog.text


def test_options_are_checked() -> None:
    for values, expected in (
        ({"verdicts": "first"}, "benchmark.verdicts must be one of last, agree, got 'first'"),
        ({"missing": "none"}, "benchmark.missing must be one of question, game, got 'none'"),
        ({"strong_weight": 0}, "strong_weight must be at least 1, got 0"),
        ({"figures": {}}, "benchmark.figures is empty: expected at least one score"),
        ({"release": 2.5, "judge_max_tokens": "many"}, "judge_max_tokens: expected int"),
    ):
        with pytest.raises(UserError, match=expected):
            configured("arena_hard", **{"path": "x"} | values)


# --------------------------------------------------------------------------------------------- constants of a file


def test_constants_are_read_and_nothing_is_run() -> None:
    text = 'A = "a" + "b"\nB: dict = {"x": [A, 1, True], "y": {"z": A}}\nA = "c"\nC = A\nraise SystemExit\n'
    assert read_constant(text, "B") == {"x": ["ab", 1, True], "y": {"z": "ab"}}
    assert read_constant(text, "C") == "c"
    assert read_constant("X = {1: 'a', (2, 'b'): None}", "X") == {1: "a", (2, "b"): None}


def test_what_only_running_would_tell_is_refused() -> None:
    others = ["X = open('y')", "X = Y", "X = 'a'\nX = f()", "X = {[]: 'a'}", "X = 'a' + 1", "X = {**{}}", "", "X = ("]
    others += [
        "def f():\n    X = 'a'",
        "X = 'a' * 9**9",
        "X = '\0'",
        "X = " + "(" * 500,
        "X = " + "'a' + " * 9999 + "'a'",
    ]
    for text in others:
        with pytest.raises(ValueError, match=r"is not a valid Python file|that can be read without running"):
            read_constant(text, "X")
