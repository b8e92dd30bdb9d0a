"""Handles reasoning traces, i.e. ``<think>...</think>`` at the beginning of a response."""

import re
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np

from attnpo.schema import PreferencePair
from attnpo.text.ranges import Places, Range

OPEN, CLOSE = "<think>", "</think>"
_TRACED = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)


class TraceHandling(Enum):
    """Handling of reasoning traces in responses: keep them, or remove them from the data.

    WEIGH_APART: traces are trained on. A trace's share of the weight equals its share of the tokens, and the rest of
    the weight goes to the answer. Judges read only the answer.
    """

    KEEP = "keep"
    STRIP = "strip"
    WEIGH_APART = "weigh_apart"


class TextSpan(NamedTuple):
    """Half-open span of rendered text, and the position in the response of the span's first character."""

    start: int
    end: int
    place: int


def has_trace(response: str) -> bool:
    """Returns whether the response begins with a closed trace."""
    return _TRACED.match(response) is not None


def get_trace(response: str) -> str | None:
    """Returns the trace at the beginning of the response, without surrounding whitespace; None without a trace."""
    found = _TRACED.match(response)
    return None if found is None else found[1].strip()


def is_unclosed(response: str) -> bool:
    """Returns whether the response begins with a trace that is never closed."""
    return response.lstrip().startswith(OPEN) and CLOSE not in response


def add_trace(trace: str, answer: str) -> str:
    """Returns the response that consists of the trace and the answer."""
    return f"{OPEN}\n{trace.strip()}\n{CLOSE}\n\n{answer}"


def answer_start(response: str) -> int:
    """Returns the position of the answer, after the trace and whitespace; 0 without a trace."""
    found = _TRACED.match(response)
    return 0 if found is None else len(response) - len(response[found.end() :].lstrip())


def strip_trace(response: str) -> str:
    """Returns the response without its trace, if it has one."""
    return response[answer_start(response) :]


def weighted_start(pair: PreferencePair, side: str) -> int:
    """Returns the position of the first weighted character: the answer's start if traces are excluded, otherwise 0."""
    return answer_start(pair.response(side)) if pair.apart else 0


def judged_text(pair: PreferencePair, side: str) -> str:
    """Returns the part of a response that a judge reads: all of it, or only the answer if traces are excluded."""
    return pair.response(side)[weighted_start(pair, side) :]


def count_tokens_before(start: int, offsets: Sequence[Sequence[int]]) -> int:
    """Counts the tokens before the first one that covers a character at or after ``start``."""
    if not start:
        return 0
    return next((place for place, (first, end) in enumerate(offsets) if end > max(first, start)), len(offsets))


def locate_trace(body: str, response: str) -> list[TextSpan] | None:
    """Locates the tags, trace and answer of ``response`` in ``body``, which a template has rendered.

    The template may change whitespace around trace and answer, and may write the opening tag in the prompt. Returns
    None if the response has no trace, or if the template made other changes.
    """
    given = _TRACED.match(response)
    if given is None:
        return None
    trace, answer = given[1].strip(), response[given.end() :].lstrip()
    whole, trimmed = re.escape(answer), re.escape(answer.rstrip())
    pattern = rf"\s*({OPEN})?\s*({re.escape(trace)})\s*({CLOSE})\s*({whole}|{trimmed})\s*"
    found = re.fullmatch(pattern, body)
    if found is None:
        return None
    places = [
        response.index(OPEN),
        given.start(1) + len(given[1]) - len(given[1].lstrip()),
        given.end() - len(CLOSE),
        len(response) - len(response[given.end() :].lstrip()),
    ]
    spans = [found.span(group) for group in range(1, 5)]
    return [TextSpan(*span, place) for span, place in zip(spans, places, strict=True) if span[1] > span[0]]


def to_response_ranges(places: Places, pieces: list[TextSpan], last: int) -> Places:
    """Applies ``to_response_range`` to many ranges; ranges within the longest span take a fast path."""
    begin, stop, place = max(pieces, key=lambda piece: piece.end - piece.start)
    starts, ends = places.T
    inside = (starts >= begin) & (starts < stop) & (ends > begin) & (ends <= stop)
    found = places + (place - begin)
    for row in np.flatnonzero(~inside).tolist():
        found[row] = to_response_range(int(starts[row]), int(ends[row]), pieces, last)
    return found


def to_response_range(start: int, end: int, pieces: list[TextSpan], last: int) -> Range:
    """Maps the rendered range [start, end) to a range in the response; (last, last) if it covers no response text."""
    held = [piece for piece in pieces if start < piece.end and end > piece.start]
    if not held:
        return last, last
    first, final = held[0], held[-1]
    return max(start, first.start) - first.start + first.place, min(end, final.end) - final.start + final.place
