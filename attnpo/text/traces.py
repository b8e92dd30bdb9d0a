"""Reasoning traces: what a model wrote for itself, as ``<think>...</think>``, in front of its answer."""

import re
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np

from attnpo.schema import PreferencePair
from attnpo.text.ranges import Places, Range

OPEN, CLOSE = "<think>", "</think>"
_TRACED = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)


class Traces(Enum):
    """Treatment of a reasoning trace in a response: trained on with its answer, or taken out of the data.

    WEIGH_APART: trained on, at its share of the tokens; judges read, and weights are spread over, the answer alone.
    """

    KEEP = "keep"
    STRIP = "strip"
    WEIGH_APART = "weigh_apart"


class Piece(NamedTuple):
    """Stretch of a rendered text, half open, and where its first character stands in the response."""

    start: int
    end: int
    place: int


def has_trace(response: str) -> bool:
    """Returns whether a closed trace begins the response."""
    return _TRACED.match(response) is not None


def trace_of(response: str) -> str | None:
    """Returns the text of the trace that begins the response, without blanks around it; None without one."""
    found = _TRACED.match(response)
    return None if found is None else found[1].strip()


def is_unclosed(response: str) -> bool:
    """Returns whether the response begins with a trace that never ends."""
    return response.lstrip().startswith(OPEN) and CLOSE not in response


def with_trace(trace: str, answer: str) -> str:
    """Returns the trace and answer as one response."""
    return f"{OPEN}\n{trace.strip()}\n{CLOSE}\n\n{answer}"


def answer_start(response: str) -> int:
    """Returns the answer's first character, after the trace and blanks behind it; 0 without a trace."""
    found = _TRACED.match(response)
    return 0 if found is None else len(response) - len(response[found.end() :].lstrip())


def without_trace(response: str) -> str:
    """Returns the answer alone; a response without a trace as it is."""
    return response[answer_start(response) :]


def start_apart(pair: PreferencePair, side: str) -> int:
    """Returns the first weighed character: the answer's where a trace is weighed apart, else 0."""
    return answer_start(pair.response(side)) if pair.apart else 0


def judged_text(pair: PreferencePair, side: str) -> str:
    """Returns what a judge reads of a response: all of it, or its answer where a trace is weighed apart."""
    return pair.response(side)[start_apart(pair, side) :]


def before(start: int, offsets: Sequence[Sequence[int]]) -> int:
    """Returns how many tokens precede the first that holds a character of the response from ``start`` on."""
    if not start:
        return 0
    return next((place for place, (first, end) in enumerate(offsets) if end > max(first, start)), len(offsets))


def place_traced(body: str, response: str) -> list[Piece] | None:
    """Returns where the tags, the trace and the answer of ``response`` stand in ``body``, what a template made of it.

    The template may have changed the blanks around trace and answer, and may have the opening tag in its prompt. None
    for a response without a trace, and where the template did more than that.
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
    return [Piece(*span, place) for span, place in zip(spans, places, strict=True) if span[1] > span[0]]


def all_in_response(places: Places, pieces: list[Piece], last: int) -> Places:
    """Returns ``in_response`` of many ranges; most lie within the longest piece."""
    begin, stop, place = max(pieces, key=lambda piece: piece.end - piece.start)
    starts, ends = places.T
    inside = (starts >= begin) & (starts < stop) & (ends > begin) & (ends <= stop)
    found = places + (place - begin)
    for row in np.flatnonzero(~inside).tolist():
        found[row] = in_response(int(starts[row]), int(ends[row]), pieces, last)
    return found


def in_response(start: int, end: int, pieces: list[Piece], last: int) -> Range:
    """Returns the characters of the response that [start, end) of the rendered text holds; (last, last) for none."""
    held = [piece for piece in pieces if start < piece.end and end > piece.start]
    if not held:
        return last, last
    first, final = held[0], held[-1]
    return max(start, first.start) - first.start + first.place, min(end, final.end) - final.start + final.place
