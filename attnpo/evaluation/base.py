"""Questions, answers, benchmark interfaces, and scores with their spread."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float

from attnpo.evaluation.chat import GradingCall, GradingReply
from attnpo.models.spec import ModelSpec
from attnpo.schema import Message, Sampling, UserError
from attnpo.text.chat import ChatFormat


@dataclass(frozen=True)
class Question:
    """Question for a model, with one or more user turns; each is answered before the next is asked.

    ``temperature`` overrides the sampling temperature if a protocol sets one per category (MT-Bench).
    """

    id: str
    turns: tuple[str, ...]
    system: str | None = None
    category: str = ""
    temperature: float | None = None


def first_turn(question: Question) -> list[Message]:
    """Returns the prompt for a question's first answer: its system message, if any, and its first turn."""
    turns = [] if question.system is None else [Message(role="system", content=question.system)]
    return [*turns, Message(role="user", content=question.turns[0])]


@dataclass(frozen=True)
class ModelAnswer:
    """One model's answers to a question; ``tokens`` and ``finish_reasons`` (stop or length) have one entry per turn."""

    question: str
    turns: tuple[str, ...]
    tokens: tuple[int, ...] = ()
    finish_reasons: tuple[str, ...] = ()


Replies = Mapping[GradingCall, GradingReply]


@dataclass(frozen=True)
class RoundScores:
    """Scores of one round of answers, computed from the grader's replies.

    ``scores``: the benchmark's scores by name. ``values``: for each score, one value per question (NaN if missing).
    ``weights``: the weights of these values in the mean (0 for NaN). A score with per-question values is their weighted
    mean. ``counts``: number of missing or replaced verdicts, by reason. ``errors``: standard errors over questions as
    reported by the benchmark's own library.
    """

    questions: tuple[str, ...]
    scores: Mapping[str, float]
    values: Mapping[str, Float[np.ndarray, " questions"]]
    weights: Mapping[str, Float[np.ndarray, " questions"]]
    counts: Mapping[str, int] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class Benchmark(Protocol):
    """Benchmark in which a model's answers are generated and then graded.

    ``name`` is used for folders and table columns. ``scores`` lists the names of its scores, the main one first.
    """

    @property
    def name(self) -> str:
        """Returns the benchmark's name, for example mt_bench."""

    @property
    def scores(self) -> tuple[str, ...]:
        """Returns the names of the scores, for example ("lc_win_rate", "win_rate")."""

    @property
    def sampling(self) -> Sampling:
        """Returns the sampling settings for answers; a round's seed is ``sampling.seed`` plus the round number."""

    def questions(self) -> Sequence[Question]:
        """Returns the questions in the benchmark's own order.

        Raises:
            UserError: a file is missing; the message says how to get it.
        """

    def fingerprint(self) -> dict[str, object]:
        """Returns everything that affects calls and scores except the answers: file digests, versions and rules."""

    def grading_calls(self, answers: Mapping[str, ModelAnswer], round_: int) -> Sequence[GradingCall]:
        """Returns all calls needed to grade one round's answers, which are keyed by question id.

        Raises:
            UserError: answers are missing.
        """

    def grade(self, answers: Mapping[str, ModelAnswer], replies: Replies) -> RoundScores:
        """Returns the scores of one round. Replies without a verdict are counted and handled as the protocol specifies.

        ``replies`` may cover only some questions (``limits.max_items``, failed calls): missing replies are counted but
        excluded from all means.
        """


@dataclass(frozen=True)
class BenchmarkScore:
    """Score with three kinds of spread, each of which is None if unknown.

    ``rounds``: the score of each round of generation; ``mean``: their mean. ``interval``: 95 % confidence interval of
    the mean over questions. ``grading``: standard deviation of the mean if the same answers are graded again.
    ``questions``: number of questions. ``higher_is_better``: the score's direction; None if the benchmark's library
    does not state it, in which case the score is not used to rank models.
    """

    name: str
    mean: float
    rounds: tuple[float, ...] = ()
    interval: tuple[float, float] | None = None
    grading: float | None = None
    questions: int = 0
    higher_is_better: bool | None = True

    @classmethod
    def read(cls, values: Mapping[str, object]) -> "BenchmarkScore":
        """Builds a score from its ``asdict`` fields after a round trip through JSON."""
        fields: Any = values
        interval = None if fields["interval"] is None else tuple(fields["interval"])
        return cls(**{**fields, "rounds": tuple(fields["rounds"]), "interval": interval})


@dataclass(frozen=True)
class UngradedResult:
    """Result of a benchmark without a grader: scores, counts of excluded items by reason, and table rows."""

    scores: tuple[BenchmarkScore, ...]
    counts: Mapping[str, int] = field(default_factory=dict)
    table: tuple[Mapping[str, object], ...] = ()


@dataclass(frozen=True)
class EvaluatedModel:
    """Model under evaluation, with its device and the folder in which a benchmark may store files."""

    model: ModelSpec
    chat: ChatFormat
    device: torch.device
    folder: Path


@runtime_checkable
class UngradedBenchmark(Protocol):
    """Benchmark that needs no grader, such as implicit-reward accuracy or lm-eval tasks."""

    @property
    def name(self) -> str:
        """Returns the benchmark's name, for example ifeval."""

    @property
    def scores(self) -> tuple[str, ...]:
        """Returns the names of the scores, the main one first; empty if they are known only after the evaluation."""

    def fingerprint(self) -> dict[str, object]:
        """Returns everything that affects the scores, apart from the model."""

    def measure(self, model: EvaluatedModel) -> UngradedResult:
        """Evaluates a model.

        Raises:
            UserError: data are missing; the message says how to get them.
        """


SHOWN = 5  # ids listed in an error


def match_answers(
    benchmark: str, questions: Sequence[Question], answers: Mapping[str, ModelAnswer]
) -> list[ModelAnswer]:
    """Returns the answers in the order of the questions.

    Raises:
        UserError: an answer is missing, belongs to an unknown question or a different one, or has the wrong number of
            turns.
    """
    asked = {question.id: question for question in questions}
    problems = {
        "without an answer": [name for name in asked if name not in answers],
        "answered but not part of the benchmark": [name for name in answers if name not in asked],
        "with the answer to a different question": [
            name for name, answer in answers.items() if answer.question != name
        ],
        "with the wrong number of answered turns": [
            name for name, answer in answers.items() if name in asked and len(answer.turns) != len(asked[name].turns)
        ],
    }
    found = [f"{len(names)} {problem} ({_list_names(names)})" for problem, names in problems.items() if names]
    if found:
        raise UserError(
            f"the answers do not match the {len(asked)} questions of {benchmark}: {'; '.join(found)}. Delete the file "
            "with these answers and run the command again, or use the benchmark files they were generated with"
        )
    return [answers[question.id] for question in questions]


def select_answered_questions(questions: Sequence[Question], answers: Mapping[str, ModelAnswer]) -> list[Question]:
    """Returns the questions that have an answer, in the benchmark's order."""
    return [question for question in questions if question.id in answers]


def weighted_mean(values: Float[np.ndarray, " questions"], weights: Float[np.ndarray, " questions"]) -> float:
    """Returns sum(w v) / sum(w) over the questions with a positive weight; NaN if no question has one."""
    counted = weights > 0
    mass = float(weights[counted].sum())
    return float(values[counted] @ weights[counted]) / mass if mass else float("nan")


def _list_names(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
