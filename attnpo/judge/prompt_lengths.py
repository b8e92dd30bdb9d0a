"""What a judge prompt that is too long keeps: shares of the room, and cuts that never split a character."""

from collections.abc import Sequence

from attnpo.text.ranges import Range


def share_room(room: int, question: int, sizes: Sequence[int], max_response: int) -> tuple[int, list[int]]:
    """Returns how many tokens the question and the two responses keep of ``room`` tokens.

    Responses keep at most ``max_response`` tokens each, the question what is left (decision 10). Where that would leave
    the question less than an eighth of the room (a small judge.max_length), it keeps an eighth, or all of a shorter
    question, and the responses share the rest evenly; what a short response does not need goes to the other.
    """
    caps = [min(size, max_response) for size in sizes]
    keep = min(question, max(room // 8, room - sum(caps)))
    left = room - keep
    if sum(caps) > left:
        half = left // 2
        caps = [min(cap, max(half, left - other)) for cap, other in zip(caps, reversed(caps), strict=True)]
    return keep, caps


def last_tokens(places: Sequence[Range], keep: int, length: int) -> int:
    """Character at which the last ``keep`` tokens begin, moved on to where no earlier token holds it.

    ``places`` are the tokens' half-open character ranges in a text of ``length`` characters.
    """
    if keep >= len(places):
        return 0
    for index in range(len(places) - max(0, keep), len(places)):
        if places[index][0] >= places[index - 1][1]:
            return places[index][0]
    return length


def first_tokens(places: Sequence[Range], keep: int) -> int:
    """Number of tokens, at most ``keep``, that end with a whole character; the first whole character at least."""
    if keep >= len(places):
        return len(places)
    for count in range(keep, 0, -1):
        if places[count][0] >= places[count - 1][1]:
            return count
    return next((n for n in range(keep + 1, len(places)) if n and places[n][0] >= places[n - 1][1]), len(places))
