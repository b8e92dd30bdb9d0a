"""A message's content within the text that a chat template writes around it."""

from attnpo.schema import UserError

SENTINEL = "ATTNPOPLACEHOLDER"
"""Stands for a message's content where only the text around it is wanted."""


def split_frame(rendered: str) -> tuple[str, str]:
    """Returns the text before and after the sentinel. Raises UserError unless the sentinel stands there
    exactly once.
    """
    before, sentinel, after = rendered.partition(SENTINEL)
    if not sentinel or SENTINEL in after:
        raise UserError(
            f"the chat template writes a message's content {rendered.count(SENTINEL)} times, expected exactly once: "
            "give another template as model.chat_template"
        )
    return before, after


def place_in_frame(rendered: str, frame: tuple[str, str], content: str) -> tuple[int, int, int] | None:
    """Returns how ``content`` stands between the two texts of ``frame``; None when ``rendered`` is anything else.

    The leading characters of the content that were trimmed away, and the half-open range of what is left in
    ``rendered``. Only blanks at either end may be missing.
    """
    head, tail = frame
    body = rendered[len(head) : len(rendered) - len(tail)]
    if rendered != head + body + tail:
        return None
    trimmed = 0
    if body != content:
        if body.strip() != content.strip():
            return None
        trimmed = (len(content) - len(content.lstrip())) - (len(body) - len(body.lstrip()))
        if trimmed < 0 or content[trimmed : trimmed + len(body)] != body:
            return None
    return trimmed, len(head), len(head) + len(body)
