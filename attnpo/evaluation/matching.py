"""Answers held against the questions they answer, and the figures that judgments of them give."""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

from attnpo.evaluation.answers.questions import ModelAnswer, Question
from attnpo.schema import UserError

SHOWN = 5  # ids named in an error


def matched(benchmark: str, questions: Sequence[Question], answers: Mapping[str, ModelAnswer]) -> list[ModelAnswer]:
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
    told = [f"{len(names)} {problem} ({_listed(names)})" for problem, names in problems.items() if names]
    if told:
        raise UserError(
            f"answers to {benchmark}: of its {len(asked)} questions {'; '.join(told)}. Delete the file of these "
            "answers and give the command again, or name the files that its questions were read from"
        )
    return [answers[question.id] for question in questions]


def answered(questions: Sequence[Question], answers: Mapping[str, ModelAnswer]) -> list[Question]:
    """Returns the questions that ``answers`` is about, in the benchmark's order."""
    return [question for question in questions if question.id in answers]


def weighted_mean(values: Float[np.ndarray, " questions"], weights: Float[np.ndarray, " questions"]) -> float:
    """sum(w v) / sum(w) over the questions with a weight; NaN where there is none."""
    counted = weights > 0
    mass = float(weights[counted].sum())
    return float(values[counted] @ weights[counted]) / mass if mass else float("nan")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
