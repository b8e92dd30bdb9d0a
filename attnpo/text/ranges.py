"""Character ranges of tokens, made whole where a tokenizer's normaliser left characters out."""

from collections.abc import Sequence

Range = tuple[int, int]


def hold_every_character(places: Sequence[Range], text: str, begin: int, end: int) -> list[Range]:
    """Returns the tokens' ranges so that every visible character of ``text[begin:end]`` lies in one.

    A tokenizer that composes, strips or removes characters (e and an accent to é) gives the token the first of them
    alone. A character that no range holds belongs to the tokens that end before it; in front of the first token of
    ``text[begin:end]``, to the tokens that begin there. Blanks are left out: some tokenizers drop them, and some leave
    the blank in front of a word out of the word's range, so that they say nothing of its owner. Ranges come in order.
    """
    gaps = {} if _touch(places[:-1], begin, end) else _find_gaps(places, text, begin, end)
    if not gaps:
        return list(places)
    grown = []
    for start, stop in places:
        inside = begin < stop and start < end and start < stop
        first, last = gaps.get((start, True), start), gaps.get((stop, False), stop)
        grown.append((first, last) if inside else (start, stop))
    return grown


def _touch(places: Sequence[Range], begin: int, end: int) -> bool:
    """Tells whether each range begins where the one before ends, from ``begin`` or before to ``end`` or after."""
    starts, stops = zip(*places, strict=True) if places else ((end,), (begin,))
    return starts[0] <= begin and stops[-1] >= end and starts[1:] == stops[:-1]


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
