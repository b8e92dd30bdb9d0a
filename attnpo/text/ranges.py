"""Character ranges of tokens, made whole where a tokenizer's normaliser left characters out."""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import overload

import numpy as np
from numpy.typing import NDArray

Range = tuple[int, int]
Places = NDArray[np.int64]
"""Ranges as rows of two."""


class Offsets(Sequence[Range]):
    """Ranges of tokens in an array, each of which becomes a tuple when it is read."""

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


def as_places(ranges: Sequence[Range]) -> Places:
    """Returns ranges as an array."""
    if isinstance(ranges, Offsets):
        return ranges.places
    return np.fromiter(chain.from_iterable(ranges), np.int64, 2 * len(ranges)).reshape(-1, 2)


def as_ranges(places: Places) -> list[Range]:
    """Returns ranges as tuples."""
    return list(zip(places[:, 0].tolist(), places[:, 1].tolist(), strict=True))


def hold_every_character(places: Places, text: str, begin: int, end: int) -> Places:
    """Returns the tokens' ranges so that every visible character of ``text[begin:end]`` lies in one.

    A tokenizer that composes, strips or removes characters (e and an accent to é) gives the token the first of them
    alone. A character that no range holds belongs to the tokens that end before it; in front of the first token of
    ``text[begin:end]``, to the tokens that begin there. Blanks are left out: some tokenizers drop them, and some leave
    the blank in front of a word out of the word's range, so that they say nothing of its owner. Ranges come in order.
    """
    gaps = {} if _covers(places, begin, end) else _find_gaps(as_ranges(places), text, begin, end)
    if not gaps:
        return places
    grown = places.copy()
    for row, (start, stop) in enumerate(as_ranges(places)):
        if begin < stop and start < end and start < stop:
            grown[row] = gaps.get((start, True), start), gaps.get((stop, False), stop)
    return grown


def _covers(places: Places, begin: int, end: int) -> bool:
    """Tells whether every character from ``begin`` to ``end`` lies in a range, blanks too."""
    starts, stops = places.T
    held = (stops > np.maximum(starts, begin)) & (starts <= end)
    reach = np.maximum.accumulate(np.concatenate(([begin], stops[held])))
    return bool((starts[held] <= reach[:-1]).all() and end <= reach[-1])


def _find_gaps(places: Sequence[Range], text: str, begin: int, end: int) -> dict[tuple[int, bool], int]:
    """Returns where tokens that begin (True) or end (False) at a character begin or end instead."""
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
