"""Calls that the tests of this folder ask."""

from attnpo.evaluation.chat import GradingCall
from attnpo.schema import Message


def call(number: int, text: str = "", **more: object) -> GradingCall:
    """A call of its own for each number; ``text`` replaces what it asks."""
    asked = text or f"Rate answer {number} from 1 to 10."
    values: dict[str, object] = {"max_tokens": 8, **more}
    messages = (Message(role="system", content="You grade."), Message(role="user", content=asked))
    named = {"benchmark": "quiz", "item": f"q{number}", "part": "turn1", "round": 0, "messages": messages}
    return GradingCall(**{**named, **values})  # type: ignore[arg-type]
