"""A file of answers, which a stopped command leaves whole and a repeated one continues.

``answers.jsonl`` has a row per answer, ``answers.json`` beside it says what they are answers of (model, sampling) and
what became of every prompt.
"""

from dataclasses import dataclass
from typing import NotRequired

from attnpo.evaluation.answers.row_file import Row, RowFile
from attnpo.schema import Message


class AnswerRow(Row):
    """One answer. ``draw`` counts the answers to one prompt, or the turns of a question from 0.

    ``finish_reason`` is stop or length, or a server's other word. ``refused``: why it is empty and could not be made.
    ``temperature``: that of the question, where it has one of its own.
    """

    prompt: list[Message]
    answer: str
    finish_reason: str
    tokens: int
    refused: NotRequired[str]
    temperature: NotRequired[float]


@dataclass(frozen=True)
class AnswerFile(RowFile[AnswerRow]):
    """The answers at ``path``, as ``RowFile`` keeps them."""

    noun = "answers"
    value = "answer"
    origin = "which model and sampling its answers are from"
