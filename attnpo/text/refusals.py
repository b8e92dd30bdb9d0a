"""Texts and chat templates that cannot become training ids, and why."""

from attnpo.schema import UserError


class RefusedText(UserError):
    """A text that cannot become training ids; ``reason`` says why in words that fit every such text."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class TokenWithoutRow(RefusedText):
    """Refusal of a text with a token that the model has no embedding for."""


class RunawayTemplate(UserError):
    """Chat template that does not come to an end within its limits."""


def check_text(text: str, what: str) -> None:
    """Raises UserError naming ``what`` when the text holds a lone surrogate, which no encoding can write."""
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        raise RefusedText(
            "its text holds a lone surrogate",
            f"{what} holds the lone surrogate U+{ord(text[problem.start]):04X} at character {problem.start}, which "
            "cannot be encoded: repair the text or drop the row",
        ) from problem
