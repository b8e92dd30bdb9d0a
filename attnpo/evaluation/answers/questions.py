"""Questions of one or more turns, and a model's answers to them."""

from dataclasses import dataclass

from attnpo.schema import Message


@dataclass(frozen=True)
class Question:
    """What a model is asked: user turns in their order, each answered before the next is asked.

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
    """A model's answers to the turns of a question; ``tokens`` and ``finish_reasons`` (stop or length) are per turn."""

    question: str
    turns: tuple[str, ...]
    tokens: tuple[int, ...] = ()
    finish_reasons: tuple[str, ...] = ()
