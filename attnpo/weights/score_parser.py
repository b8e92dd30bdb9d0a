"""Parser for verbalised importance: reads scored parts from an answer and locates the parts in the response.

Works on plain text only, without a model or tokens. The paper describes the method (split the response into parts,
score each from 1 to 5) but specifies neither a prompt nor a parser; both are ours.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

LOWEST, HIGHEST = 1, 5


@dataclass(frozen=True)
class ScoredSpan:
    """Characters ``start`` to ``end`` (half-open) of the response and their score."""

    start: int
    end: int
    score: float


@dataclass(frozen=True)
class ParsedScores:
    """Usable spans of one answer in order, and the number of unusable parts by reason."""

    spans: list[ScoredSpan]
    problems: Counter[str] = field(default_factory=Counter)

    def coverage(self, length: int) -> float:
        """Returns the share of the response's ``length`` characters that have a score."""
        return sum(span.end - span.start for span in self.spans) / max(1, length)


NO_PARTS = "no part with a score found"
OUT_OF_SCALE = f"score outside {LOWEST} to {HIGHEST}"
NOT_IN_RESPONSE = "part is not in the response"
EMPTY_PART = "part without text"


def parse_scores(answer: str, response: str) -> ParsedScores:
    """Parses the scored spans of ``response`` in ``answer``.

    Accepts JSON objects, pairs and lists of them, nested to any depth (even in a code fence, truncated, or with
    trailing commas), and lines or table rows with a part and a score. If both can be parsed, the result that covers
    more of the response is used. A part may be quoted with different whitespace, quotation marks or case; a part that
    occurs several times is matched to the first unused occurrence after the previous part.
    """
    readings = [_parse_parts(parts, response) for parts in (_json_parts(answer), _line_parts(answer)) if parts]
    if not readings:
        return ParsedScores([], Counter({NO_PARTS: 1}))
    return max(readings, key=lambda reading: reading.coverage(len(response)))  # of equal ones the first: JSON


def _parse_parts(parts: Sequence[tuple[str, float | None]], response: str) -> ParsedScores:
    problems: Counter[str] = Counter()
    return ParsedScores(_locate_parts(_usable_parts(parts, problems), response, problems), problems)


def _usable_parts(parts: Sequence[tuple[str, float | None]], problems: Counter[str]) -> Iterator[tuple[str, float]]:
    """Yields the parts that have text and a score on the scale; counts the others in ``problems``."""
    for text, score in parts:
        if not text.strip():
            problems[EMPTY_PART] += 1
        elif score is None or not LOWEST <= score <= HIGHEST:
            problems[OUT_OF_SCALE] += 1
        else:
            yield text.strip(), score


# ------------------------------------------------------------------------------------------------ reading

_STRING = r'"(?:[^"\\]|\\.)*"'
_LOOSE = re.compile(rf"\{{(?:[^{{}}\"]|{_STRING})*\}}|\{{[^{{}}]*\}}|\[\s*{_STRING}\s*,\s*[^\[\]]*?\]", re.DOTALL)
_STRING_OR_COMMA = re.compile(rf"({_STRING})|,\s*(?=[}}\]])", re.DOTALL)
_JSON = json.JSONDecoder(strict=False, object_pairs_hook=tuple)  # an object is a tuple: it may have a key twice
_SCORE = r"(?P<score>-?\d+(?:\.\d+)?)(?:\s*(?:/|out of)\s*(?P<of>\d+))?"
_PART_THEN_SCORE = re.compile(
    rf"^\W{{0,3}}(?:\d+[.)]\s+)?(?P<text>.+?)\s*(?:\||->|=>|\u2192|:|\u2014|\u2013|\t|-|\(|\[|=)\s*\**(?:score\s*[:=]?\s*)?{_SCORE}\**\s*[\])|.]*\s*$",
    re.IGNORECASE,
)
_SCORE_THEN_PART = re.compile(
    rf"^\s*[-*]?\s*[\[(|]?\s*(?:score\s*[:=]?\s*)?{_SCORE}\s*[\])|:.\-\u2013\u2014\t]+\s*(?P<text>\S.*?)\s*\|?\s*$",
    re.IGNORECASE,
)
_OPENING = re.compile(r"[{\[]")
_TEXT_KEYS = ("part", "text", "segment", "phrase", "sentence", "span", "content")
_SCORE_KEYS = ("score", "rating", "importance", "value", "weight")
_HUGE = 10**9  # far outside any scale; a JSON integer can be too large for a float


def _json_parts(answer: str) -> list[tuple[str, float | None]]:
    """Returns the parts and scores of all JSON in ``answer``, in order; None for a score that is not a number."""
    parts: list[tuple[str, float | None]] = []
    place = 0
    while (start := _OPENING.search(answer, place)) is not None:
        value, place = _decode_json(answer, start.start())
        parts += _parts_in_value(value)
    return parts


def _line_parts(answer: str) -> list[tuple[str, float | None]]:
    """Returns the parts and scores of lines that start or end with a score."""
    return [item for line in answer.splitlines() if (item := _part_in_line(line)) is not None]


def _decode_json(answer: str, start: int) -> tuple[object, int]:
    """Decodes the JSON value at ``start``; returns value and end position, or None and the next position if invalid."""
    try:
        return _JSON.raw_decode(answer, start)
    except (ValueError, RecursionError):
        pass
    match = _LOOSE.match(answer, start)
    if match is None:
        return None, start + 1
    try:
        return _JSON.decode(_STRING_OR_COMMA.sub(lambda piece: piece[1] or "", match[0])), match.end()
    except (ValueError, RecursionError):
        return None, start + 1


def _parts_in_value(value: object) -> Iterator[tuple[str, float | None]]:
    """Yields the parts in a decoded JSON value, in which objects are tuples of members."""
    if isinstance(value, tuple):
        yield from _parts_in_object(value)
    elif isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and _is_scalar(value[1]):
        yield value[0], _read_number(value[1])
    elif isinstance(value, list):
        for item in value:
            yield from _parts_in_value(item)


def _parts_in_object(members: tuple[tuple[str, object], ...]) -> Iterator[tuple[str, float | None]]:
    lowered = {key.lower(): item for key, item in reversed(members)}
    part = next((item for key in _TEXT_KEYS if isinstance(item := lowered.get(key), str)), None)
    score = next((lowered[key] for key in _SCORE_KEYS if key in lowered), None)
    if part is not None and score is not None:
        yield part, _read_number(score)
        return
    nested = [part for _, item in members if not _is_scalar(item) for part in _parts_in_value(item)]
    if nested:
        yield from nested
    elif part is not None:
        yield part, None
    elif score is None and (len(members) == 1 or any(_read_number(item) is not None for _, item in members)):
        for key, item in members:  # {"one part": 4, "another": 2}
            yield key, _read_number(item)


def _is_scalar(value: object) -> bool:
    return not isinstance(value, list | tuple)


def _read_number(value: object) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value) if abs(value) < _HUGE else None
    match = re.fullmatch(rf"\s*{_SCORE}\s*", value) if isinstance(value, str) else None
    return None if match is None else _score_value(match)


def _score_value(match: re.Match[str]) -> float | None:
    """Returns the score; None if it is on a different scale ("8/10")."""
    return None if match["of"] not in (None, str(HIGHEST)) else float(match["score"])


def _part_in_line(line: str) -> tuple[str, float | None] | None:
    match = _PART_THEN_SCORE.match(line) or _SCORE_THEN_PART.match(line)
    return None if match is None else (_strip_quotes(match["text"]), _score_value(match))


def _strip_quotes(text: str) -> str:
    text = text.strip().strip("|").strip().removeprefix("**").removesuffix("**")
    for left, right in (('"', '"'), ("'", "'"), ("“", "”"), ("«", "»"), ("`", "`")):
        if len(text) > 1 and text.startswith(left) and text.endswith(right):
            return text[1:-1]
    return text


# ------------------------------------------------------------------------------------------------ locating

_SAME = str.maketrans({"\u201c": '"', "\u201d": '"', "\u2018": "'", "\u2019": "'", "\u2013": "-", "\u2014": "-"})


def _fold_text(text: str) -> tuple[str, list[int]]:
    """Returns the text with normalised whitespace, quotation marks and case, and the source index of each character."""
    letters: list[str] = []
    places: list[int] = []
    for place, letter in enumerate(text):
        if letter.isspace():
            if letters and letters[-1] != " ":
                letters.append(" ")
                places.append(place)
            continue
        for folded in letter.translate(_SAME).casefold():
            letters.append(folded)
            places.append(place)
    return "".join(letters), places


def _locate_parts(parts: Iterable[tuple[str, float]], response: str, problems: Counter[str]) -> list[ScoredSpan]:
    """Locates the parts in the response, without overlaps and in order of position."""
    text, places = _fold_text(response)
    taken = [False] * len(text)
    spans, cursor = [], 0
    for quoted, score in parts:
        wanted = _fold_text(quoted)[0].strip()
        start = next(
            (place for place in _occurrences(text, wanted, cursor) if not any(taken[place : place + len(wanted)])), None
        )
        if start is None:
            problems[NOT_IN_RESPONSE] += 1
            continue
        end = start + len(wanted)
        taken[start:end] = [True] * len(wanted)
        cursor = end
        spans.append(ScoredSpan(places[start], places[end - 1] + 1, score))
    return sorted(spans, key=lambda span: span.start)


def _occurrences(text: str, wanted: str, cursor: int) -> Iterator[int]:
    """Yields the positions of ``wanted`` after the cursor, then those before it."""
    if not wanted:
        return
    for begin, stop in ((cursor, len(text)), (0, cursor + len(wanted) - 1)):
        place = text.find(wanted, begin, stop)
        while place >= 0:
            yield place
            place = text.find(wanted, place + 1, stop)
