"""The whole way of an evaluation with a model that answers by rule and a grader that follows a script."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from attnpo.evaluation.base import (
    BenchmarkScore,
    EvaluatedModel,
    ModelAnswer,
    Question,
    Replies,
    RoundScores,
    UngradedResult,
)
from attnpo.evaluation.chat import ChatModel, ChatRequest, GradingCall, GradingFailure, GradingReply, Price, Reply
from attnpo.evaluation.evaluate_config import EvaluateConfig, GradingRules
from attnpo.evaluation.evaluating import LEFT_OUT, UNANSWERED, evaluate, select_questions_to_regrade
from attnpo.evaluation.result import RESULT, read_result
from attnpo.evaluation.session import GradingLimits
from attnpo.models.spec import ModelSpec
from attnpo.schema import Message, Sampling, UserError
from attnpo.system.files import RECORD, write_record
from tests.evaluation.grading.scripted import ScriptedGrader
from tests.run.worlds import World

Says = Callable[[GradingCall], str | GradingReply | GradingFailure]


@dataclass(frozen=True)
class Marks:
    """A benchmark whose grader gives a mark per question; its one figure is their mean."""

    count: int = 8
    temperature: float = 1.0

    @property
    def name(self) -> str:
        return "marks"

    @property
    def scores(self) -> tuple[str, ...]:
        return ("mark",)

    @property
    def sampling(self) -> Sampling:
        return Sampling(max_new_tokens=4, temperature=self.temperature)

    def questions(self) -> list[Question]:
        return [Question(f"q{number}", (f"question {number}",)) for number in range(self.count)]

    def fingerprint(self) -> dict[str, object]:
        return {"rules": 1}

    def grading_calls(self, answers: Mapping[str, ModelAnswer], round_: int) -> list[GradingCall]:
        return [
            GradingCall("marks", name, "mark", round_, (Message(role="user", content=answer.turns[0]),), max_tokens=4)
            for name, answer in answers.items()
        ]

    def grade(self, answers: Mapping[str, ModelAnswer], replies: Replies) -> RoundScores:
        marks = {call.item: float(reply.text) for call, reply in replies.items()}
        values = np.array([marks.get(name, np.nan) for name in answers])
        return RoundScores(
            tuple(answers),
            {"mark": float(values[np.isfinite(values)].mean()) if np.isfinite(values).any() else float("nan")},
            {"mark": values},
            {"mark": np.isfinite(values).astype(float)},
        )


@dataclass(frozen=True)
class Echo:
    """Answers each question with its text, the seed and whether it was drawn."""

    word: str = "answer"

    def open(self, model: ModelSpec, device: torch.device) -> ChatModel:
        return EchoAnswerer(self.word)


@dataclass
class EchoAnswerer:
    word: str
    chat: None = None
    limit: None = None
    counted_by: str = "words"

    def key(self) -> dict[str, object]:
        return {"word": self.word}

    def answer(self, asked: Sequence[ChatRequest], sampling: Sampling) -> Iterator[Mapping[int, Reply]]:
        for number, one in enumerate(asked):
            yield {number: Reply(f"{self.word} to {one.messages[-1]['content']} by {sampling.seed}", 5, "stop")}


def config(folder: Path, says: Says, benchmark: object = Marks(), **changed: object) -> EvaluateConfig:
    grader = ScriptedGrader(says, price=Price(1.0, 1.0))
    made = EvaluateConfig(
        model=ModelSpec("models/tiny"),
        benchmark=benchmark,  # type: ignore[arg-type]
        answering=Echo(),
        grader=grader,
        grading=GradingRules(rounds=3, again=0.25, again_least=2),
        limits=GradingLimits(),
        trainer={"accelerator": "cpu"},
        output=str(folder),
    )
    return replace(made, **changed)


def mark(call: GradingCall) -> str:
    """5, the round, and 0.5 more where the answer is graded again."""
    return str(5 + call.round + 0.5 * call.repeat)


def result_of(folder: Path) -> BenchmarkScore:
    found = read_result(folder)
    assert found is not None
    return found.scores[0]


def test_from_questions_to_a_score_with_its_spreads(tmp_path: Path) -> None:
    cfg = config(tmp_path, mark)
    assert evaluate(cfg) == 0
    score = result_of(tmp_path)
    assert (score.name, score.mean, score.rounds, score.questions) == ("mark", 6.0, (5.0, 6.0, 7.0), 8)
    assert score.interval == (6.0, 6.0)  # every question has the same mark
    # second grades are .5 higher: sqrt(8 questions * .25 / 2) / 8 for a round, over sqrt(3) for the mean of three
    assert score.grading == pytest.approx((8 * 0.25 / 2) ** 0.5 / 8 / 3**0.5)
    found = read_result(tmp_path)
    assert found is not None and found.label == "models/tiny" and found.grader == "ScriptedGrader"
    assert found.lengths is not None and found.lengths.tokens == 5
    assert found.cost["calls"] == 3 * (8 + 2)
    assert "6.00" in (tmp_path / "evaluation.md").read_text() and (tmp_path / "report.html").is_file()


def test_a_repeated_command_asks_nothing_and_a_lost_result_comes_from_the_store(tmp_path: Path) -> None:
    evaluate(config(tmp_path, mark))
    before = (tmp_path / RESULT).read_bytes()

    def never(call: GradingCall) -> str:
        raise AssertionError("asked again")

    assert evaluate(config(tmp_path, never)) == 0
    assert (tmp_path / RESULT).read_bytes() == before
    (tmp_path / RESULT).unlink()
    assert evaluate(config(tmp_path, never)) == 0
    assert result_of(tmp_path).rounds == (5.0, 6.0, 7.0)


def test_a_page_of_something_else_is_not_replaced(tmp_path: Path) -> None:
    for name in ("report.html", "evaluation.md"):
        (tmp_path / name).write_text("mine", encoding="utf-8")
        with pytest.raises(UserError, match=f"contains {name}, which was not written by an evaluation"):
            evaluate(config(tmp_path, mark))
        assert (tmp_path / name).read_text(encoding="utf-8") == "mine"
        (tmp_path / name).unlink()


def test_second_grades_move_no_figure(tmp_path: Path) -> None:
    evaluate(config(tmp_path / "once", mark, grading=GradingRules(rounds=3, again=0.0)))
    evaluate(config(tmp_path / "twice", mark, grading=GradingRules(rounds=3, again=1.0)))
    once, twice = result_of(tmp_path / "once"), result_of(tmp_path / "twice")
    assert once.rounds == twice.rounds and once.grading is None and twice.grading is not None


def test_another_setting_is_named_and_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    evaluate(config(tmp_path, mark))
    with caplog.at_level(logging.WARNING):
        evaluate(config(tmp_path, mark, grading=GradingRules(rounds=2, again=0.25, again_least=2)))
    assert "grading.rounds 3, but the current value is 2: recomputing" in caplog.text
    assert result_of(tmp_path).rounds == (5.0, 6.0)
    with pytest.raises(UserError, match="word"):  # answers of another model
        evaluate(config(tmp_path, mark, answering=Echo("other")))


def test_calls_without_a_reply_keep_the_result_back_until_they_have_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def sometimes(call: GradingCall) -> str | GradingFailure:
        return GradingFailure("refused") if call.item == "q3" else mark(call)

    assert evaluate(config(tmp_path, sometimes)) == 1
    assert read_result(tmp_path) is None and "run the command again" in caplog.text
    cfg = config(tmp_path, mark)
    assert evaluate(cfg) == 0
    assert isinstance(cfg.grader, ScriptedGrader) and {call.item for call in cfg.grader.asked} == {"q3"}


def test_what_stays_without_a_reply_may_be_allowed_and_is_counted(tmp_path: Path) -> None:
    def never(call: GradingCall) -> str | GradingFailure:
        return GradingFailure("refused") if call.item == "q3" else mark(call)

    rules = GradingRules(rounds=3, again=0.0, missing=3)
    assert evaluate(config(tmp_path, never, grading=rules)) == 0
    found = read_result(tmp_path)
    assert found is not None and found.counts[UNANSWERED] == 3 and found.scores[0].questions == 7


def test_a_dry_run_asks_nothing_and_makes_no_answers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cfg = config(tmp_path, mark, limits=GradingLimits(dry_run=True))
    with caplog.at_level(logging.INFO):
        assert evaluate(cfg) == 0
    assert isinstance(cfg.grader, ScriptedGrader) and not cfg.grader.asked
    assert "30 grading calls" in caplog.text and "upper bound" in caplog.text
    assert not list(tmp_path.glob("answers*")) and read_result(tmp_path) is None


def test_the_budget_keeps_the_result_back(tmp_path: Path) -> None:
    assert evaluate(config(tmp_path, mark, limits=GradingLimits(max_calls=7))) == 1
    assert read_result(tmp_path) is None
    assert len((tmp_path / "grades.jsonl").read_text().splitlines()) == 7
    assert evaluate(config(tmp_path, mark)) == 0


def test_a_trial_on_the_first_questions_says_so(tmp_path: Path) -> None:
    evaluate(config(tmp_path, mark, limits=GradingLimits(max_items=3)))
    found = read_result(tmp_path)
    assert found is not None and found.counts[LEFT_OUT] == 5 and found.scores[0].questions == 3


def test_greedy_answers_are_made_once_and_graded_in_every_round(tmp_path: Path) -> None:
    cfg = config(tmp_path, mark, Marks(temperature=0.0))
    evaluate(cfg)
    rows = [json.loads((tmp_path / f"answers-round{number}.jsonl").read_text().splitlines()[0]) for number in range(3)]
    assert len({row["answer"] for row in rows}) == 1
    assert isinstance(cfg.grader, ScriptedGrader) and len({call.round for call in cfg.grader.asked}) == 3


def test_questions_graded_twice_are_others_in_each_round() -> None:
    names = [f"q{number}" for number in range(100)]
    drawn = [select_questions_to_regrade(names, 10, round_) for round_ in range(3)]
    assert all(len(one) == 10 for one in drawn) and drawn[0] != drawn[1] != drawn[2]
    assert drawn[0] == select_questions_to_regrade(names[::-1], 10, 0)
    rules = GradingRules()
    assert (rules.regrade_count(805), rules.regrade_count(80), rules.regrade_count(20), rules.regrade_count(0)) == (
        81,
        50,
        20,
        0,
    )
    assert GradingRules(again=0.0).regrade_count(805) == 0


def test_a_result_of_another_version_is_an_error(tmp_path: Path) -> None:
    cfg = config(tmp_path, mark)
    assert evaluate(cfg) == 0
    values = json.loads((tmp_path / RESULT).read_text())
    del values[RECORD]
    for change in (
        {"lengths": {"words": 3}},
        {"scores": [{"name": "mark"}]},
        {"scores": [1]},
        {"new": 1},
        {"table": None},
    ):
        write_record(tmp_path / RESULT, {**values, **change})
        with pytest.raises(
            UserError, match=r"evaluation\.json was written by another version of attnpo .* run the evaluation"
        ):
            evaluate(cfg)


def test_evaluate_works_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Points to a server instead, whose answers it reads."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"start it without torchrun, .*\(answering=openai"):
        evaluate(config(tmp_path, mark))


def test_a_damaged_result_is_an_error(tmp_path: Path) -> None:
    evaluate(config(tmp_path, mark))
    text = (tmp_path / RESULT).read_text()
    (tmp_path / RESULT).write_text(text.replace("6.0", "9.0", 1))
    with pytest.raises(UserError, match="damaged or was edited"):
        evaluate(config(tmp_path, mark))


# ------------------------------------------------------------------------------------------------ measures


@dataclass(frozen=True)
class Size:
    """A measure that needs no grader."""

    factor: float = 2.0
    found: tuple[float, ...] = field(default=(1.0,))

    @property
    def name(self) -> str:
        return "size"

    @property
    def scores(self) -> tuple[str, ...]:
        return ("size",)

    def fingerprint(self) -> dict[str, object]:
        return {}

    def measure(self, subject: EvaluatedModel) -> UngradedResult:
        assert subject.folder.is_dir()
        return UngradedResult(
            tuple(BenchmarkScore("size", self.factor * value) for value in self.found), {"left out": 1}
        )


def test_a_measure_is_kept_and_another_setting_makes_it_anew(world: World, tmp_path: Path) -> None:
    model = ModelSpec(str(world.model))
    evaluate(config(tmp_path, mark, Size(), model=model))
    assert result_of(tmp_path).mean == 2
    evaluate(config(tmp_path, mark, Size(3.0), model=model))
    found = read_result(tmp_path)
    assert found is not None and found.scores[0].mean == 3 and found.counts == {"left out": 1} and found.grader is None
    with pytest.raises(UserError, match="no score"):
        evaluate(config(tmp_path, mark, Size(found=()), model=model))


def test_keys_of_grading_have_no_effect_on_a_measure(tmp_path: Path) -> None:
    assert "grader" in config(tmp_path, mark, Size()).unused_keys()
    assert config(tmp_path, mark).unused_keys() == {}


def test_a_grader_without_a_verdict_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(config(tmp_path, lambda call: "nan")) == 0
    assert "no reply from ScriptedGrader contains a verdict, so marks has no score" in caplog.text
    assert "nan" not in capsys.readouterr().out
