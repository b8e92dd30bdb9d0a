"""The wording of a judge: a text with places for the question and both answers."""

import re
from pathlib import Path
from typing import NamedTuple

from attnpo.schema import UserError
from attnpo.text.ranges import Range

PLACEHOLDERS = ("question", "answer_a", "answer_b")


class Rendered(NamedTuple):
    """A filled template and the half-open character range of each placeholder's text in it."""

    text: str
    spans: dict[str, Range]


def file_text(path: str | Path, key: str) -> str:
    """Returns a UTF-8 text file as it is. Raises UserError naming the ``key`` of the file when it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise UserError(f"{key}: cannot read {str(path)!r} as UTF-8 text ({problem})") from problem


class JudgeTemplate:
    """A text with {question}, {answer_a} and {answer_b}, each exactly once; other braces are plain text."""

    def __init__(self, text: str) -> None:
        pieces = re.split(r"\{(" + "|".join(PLACEHOLDERS) + r")\}", text)
        self.text, self.literals, self.order = text, pieces[::2], pieces[1::2]
        if sorted(self.order) != sorted(PLACEHOLDERS):
            slots = ", ".join("{" + name + "}" for name in self.order) or "none"
            expected = ", ".join("{" + name + "}" for name in PLACEHOLDERS)
            raise UserError(
                f"judge template: expected the placeholders {expected}, each exactly once; found {slots}: "
                "correct the file named by judge.template_file"
            )

    @classmethod
    def from_file(cls, path: str | Path) -> "JudgeTemplate":
        """Returns the template in a UTF-8 text file, as it is. Raises UserError when it cannot be read."""
        return cls(file_text(path, "judge.template_file"))

    def render(self, question: str, answer_a: str, answer_b: str) -> Rendered:
        """Returns the text with all three values put in at once (a placeholder inside a value stays as it is)."""
        values = {"question": question, "answer_a": answer_a, "answer_b": answer_b}
        parts, spans, position = [self.literals[0]], {}, len(self.literals[0])
        for name, literal in zip(self.order, self.literals[1:], strict=True):
            spans[name] = (position, position + len(values[name]))
            position = spans[name][1] + len(literal)
            parts += [values[name], literal]
        return Rendered("".join(parts), spans)

    def closing(self, name: str, text: str | None) -> int | None:
        """Characters from a placeholder to ``text`` (None: to the next visible one); None where it does not follow."""
        literal = self.literals[self.order.index(name) + 1]
        if text is None:
            return len(literal) - len(literal.lstrip()) if literal.strip() else None
        place = literal.find(text)
        return place if place >= 0 else None
