"""Stores character ranges of tokens and extends them over characters that a tokenizer's normaliser dropped."""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import overload

import numpy as np
from numpy.typing import NDArray

Range = tuple[int, int]
Places = NDArray[np.int64]
"""Ranges as an array with two columns."""


class Offsets(Sequence[Range]):
    """Character ranges in an array, converted to tuples on access."""

    def __init__(self, places: Places) -> None:
        self.places = places

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, place: int) -> Range: ...
    @overload
    def __getitem__(self, place: slice) -> "Offsets": ...
    def __getitem__(self, place: int | slice) -> "Range | Offsets":
        if isinstance(place, slice):
            return Offsets(self.places[place])
        start, end = self.places[place].tolist()
        return start, end

    def __iter__(self) -> Iterator[Range]:
        return iter(as_ranges(self.places))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __repr__(self) -> str:
        return repr(list(self))


def as_array(ranges: Sequence[Range]) -> Places:
    """Converts ranges to an array with two columns."""
    if isinstance(ranges, Offsets):
        return ranges.places
    return np.fromiter(chain.from_iterable(ranges), np.int64, 2 * len(ranges)).reshape(-1, 2)


def as_ranges(places: Places) -> list[Range]:
    """Converts an array of ranges to a list of tuples."""
    return list(zip(places[:, 0].tolist(), places[:, 1].tolist(), strict=True))


def extend_over_gaps(places: Places, text: str, begin: int, end: int) -> Places:
    """Extends token ranges so that together they cover every visible character of ``text[begin:end]``.

    If a tokenizer composes, strips or removes characters (e.g. combines e and an accent into é), the token's range
    covers only the first of them. An uncovered character is added to the closest tokens that end before it or, if
    ``text[begin:end]`` has no such token, to the closest tokens that start after it. Whitespace is not added: some
    tokenizers drop it and others exclude the space before a word from the word's range, so it does not clearly belong
    to any token. Ranges must be in order.
    """
    gaps = {} if _covers_all(places, begin, end) else _find_gaps(as_ranges(places), text, begin, end)
    if not gaps:
        return places
    grown = places.copy()
    for row, (start, stop) in enumerate(as_ranges(places)):
        if begin < stop and start < end and start < stop:
            grown[row] = gaps.get((start, True), start), gaps.get((stop, False), stop)
    return grown


def _covers_all(places: Places, begin: int, end: int) -> bool:
    """Returns whether the ranges cover every character from ``begin`` to ``end``, including whitespace."""
    starts, stops = places.T
    held = (stops > np.maximum(starts, begin)) & (starts <= end)
    reach = np.maximum.accumulate(np.concatenate(([begin], stops[held])))
    return bool((starts[held] <= reach[:-1]).all() and end <= reach[-1])


def _find_gaps(places: Sequence[Range], text: str, begin: int, end: int) -> dict[tuple[int, bool], int]:
    """Maps (start, True) and (end, False) of the ranges next to gaps to new starts and ends."""
    found, reach, holds = {}, begin, False
    for start, stop in (*places, (end, end + 1)):
        if stop <= max(begin, start) or start > end:
            continue
        gap = text[reach:start] if start > reach else ""
        if gap and not gap.isspace():
            if holds:
                found[reach, False] = reach + len(gap.rstrip())
            elif start < end:
                found[start, True] = start - len(gap.lstrip())
        reach, holds = max(reach, stop), True
    return found
