"""Questions, answers and benchmarks, and what comes of one: scores with their spreads."""

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
    """Question to a model: user turns in their order, each answered before the next is asked.

    ``temperature`` replaces that of the sampling where a protocol has one per category (MT-Bench).
    """

    id: str
    turns: tuple[str, ...]
    system: str | None = None
    category: str = ""
    temperature: float | None = None


def first_turn(question: Question) -> list[Message]:
    """Returns the prompt of a question's first answer: its system text, if it has one, and its first turn."""
    turns = [] if question.system is None else [Message(role="system", content=question.system)]
    return [*turns, Message(role="user", content=question.turns[0])]


@dataclass(frozen=True)
class ModelAnswer:
    """Model's answers to the turns of a question; ``tokens`` and ``finish_reasons`` (stop or length) are per turn."""

    question: str
    turns: tuple[str, ...]
    tokens: tuple[int, ...] = ()
    finish_reasons: tuple[str, ...] = ()


Replies = Mapping[GradingCall, GradingReply]


@dataclass(frozen=True)
class Graded:
    """Scores that a grader's replies give the answers to a benchmark's questions.

    ``scores``: the benchmark's figures by name. ``values``: per figure a value of each question, NaN where it has none;
    ``weights``: how much each counts in the mean (0 with NaN). Where a figure has values, it is their weighted mean.
    ``counts``: what was missing or replaced, by reason. ``errors``: standard errors over questions that the benchmark's
    own library states.
    """

    questions: tuple[str, ...]
    scores: Mapping[str, float]
    values: Mapping[str, Float[np.ndarray, " questions"]]
    weights: Mapping[str, Float[np.ndarray, " questions"]]
    counts: Mapping[str, int] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class Benchmark(Protocol):
    """Benchmark whose answers are generated and then graded.

    ``name`` names its folder and its columns, ``scores`` the figures it gives, the first one being the one that counts.
    """

    @property
    def name(self) -> str:
        """Returns the name, for example mt_bench."""

    @property
    def scores(self) -> tuple[str, ...]:
        """Returns names of the figures, for example ("lc_win_rate", "win_rate")."""

    @property
    def sampling(self) -> Sampling:
        """Returns how answers are drawn; ``sampling.seed`` plus the round seeds a round."""

    def questions(self) -> Sequence[Question]:
        """Returns the questions in the benchmark's own order. UserError for a missing file, with the way to get it."""

    def versions(self) -> dict[str, object]:
        """Returns what decides calls and scores beside the answers: digests of files, versions of prompts and rules."""

    def calls(self, answers: Mapping[str, ModelAnswer], round_: int) -> Sequence[GradingCall]:
        """Returns every call that grades one round's answers (by question id).

        UserError names answers that are missing.
        """

    def grade(self, answers: Mapping[str, ModelAnswer], replies: Replies) -> Graded:
        """Returns the scores of one round. A reply without a verdict is counted and follows the protocol's rule.

        ``replies`` may hold only some questions' calls (``limits.max_items``, calls that failed): what is missing is
        counted and left out of every mean.
        """


@dataclass(frozen=True)
class BenchmarkScore:
    """Figure with its three spreads, each apart; None where it is not known.

    ``rounds``: the figure of each round of generation, ``mean`` their mean. ``interval``: 95 % over questions, of the
    mean. ``grading``: the standard deviation of the mean from grading the same answers again. ``questions``: how many
    it stands on. ``higher_is_better``: its direction; None where its library does not say, so that it ranks nobody.
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
        """Returns the score that ``asdict`` made ``values`` of, as JSON has them."""
        told: Any = values
        interval = None if told["interval"] is None else tuple(told["interval"])
        return cls(**{**told, "rounds": tuple(told["rounds"]), "interval": interval})


@dataclass(frozen=True)
class UngradedResult:
    """Result of a measure without generation and grading: scores, what was left out by reason, rows for a table."""

    scores: tuple[BenchmarkScore, ...]
    counts: Mapping[str, int] = field(default_factory=dict)
    table: tuple[Mapping[str, object], ...] = ()


@dataclass(frozen=True)
class Subject:
    """Model that is measured.

    ``device`` is where it runs; ``folder`` is where a measure may keep files of its own.
    """

    model: ModelSpec
    chat: ChatFormat
    device: torch.device
    folder: Path


@runtime_checkable
class Measure(Protocol):
    """Benchmark that needs no grader: implicit-reward accuracy, tasks of lm-eval."""

    @property
    def name(self) -> str:
        """Returns the name, for example ifeval."""

    @property
    def scores(self) -> tuple[str, ...]:
        """Returns names of the figures, the one that counts first; empty where only the run shows them."""

    def versions(self) -> dict[str, object]:
        """Returns what decides the scores beside the model."""

    def measure(self, subject: Subject) -> UngradedResult:
        """Returns the scores. UserError for data that cannot be had, with the way to get them."""


SHOWN = 5  # ids named in an error


def match_answers(
    benchmark: str, questions: Sequence[Question], answers: Mapping[str, ModelAnswer]
) -> list[ModelAnswer]:
    """Returns the answers in the order of the questions, whatever order they came in.

    Raises:
        UserError: answers are missing, answer something else, stand under another question's id, or lack a turn.
    """
    asked = {question.id: question for question in questions}
    problems = {
        "have no answer": [name for name in asked if name not in answers],
        "are answered but not asked": [name for name in answers if name not in asked],
        "have the answer of another question": [name for name, answer in answers.items() if answer.question != name],
        "are not answered turn by turn": [
            name for name, answer in answers.items() if name in asked and len(answer.turns) != len(asked[name].turns)
        ],
    }
    told = [f"{len(names)} {problem} ({_list_names(names)})" for problem, names in problems.items() if names]
    if told:
        raise UserError(
            f"answers to {benchmark}: of its {len(asked)} questions {'; '.join(told)}. Delete the file of these "
            "answers and give the command again, or name the files that its questions were read from"
        )
    return [answers[question.id] for question in questions]


def select_answered(questions: Sequence[Question], answers: Mapping[str, ModelAnswer]) -> list[Question]:
    """Returns the questions that ``answers`` is about, in the benchmark's order."""
    return [question for question in questions if question.id in answers]


def weighted_mean(values: Float[np.ndarray, " questions"], weights: Float[np.ndarray, " questions"]) -> float:
    """Returns sum(w v) / sum(w) over the questions with a weight; NaN where there is none."""
    counted = weights > 0
    mass = float(weights[counted].sum())
    return float(values[counted] @ weights[counted]) / mass if mass else float("nan")


def _list_names(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
