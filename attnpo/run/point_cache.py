"""In-process cache shared by the points of a study: made once, kept for the next, dropped at the end.

Owns when something is kept. What it is, by which key it is known and how large it may be, its user says.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar, cast

from attnpo.schema import digest

log = logging.getLogger(__name__)
Some = TypeVar("Some")


@dataclass
class Memory:
    """In-process cache by key; of more than ``entries`` the one used longest ago gives way.

    ``room``: what is larger, by the measure that ``recall`` is given, is not kept.
    """

    entries: int
    room: int
    kept: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _memories.append(self)

    def recall(
        self, key: Callable[[], dict[str, object]], make: Callable[[], Some], size: Callable[[Some], int]
    ) -> Some:
        """Returns what ``make`` gives, or gave for the same ``key``; a "what" in the key is its name in the log."""
        if not _open:
            return make()
        parts = key()
        name = digest(parts)
        if name in self.kept and "what" in parts:
            log.info("%s: as for an earlier point of this process", parts["what"])
        found = cast(Some, self.kept.pop(name)) if name in self.kept else make()
        if size(found) <= self.room:
            self.kept[name] = found
        if len(self.kept) > self.entries:
            del self.kept[next(iter(self.kept))]
        return found


_memories: list[Memory] = []
_open: list[object] = []


@contextmanager
def remembering() -> Iterator[None]:
    """Opens a context in which what is made is kept for further runs of this process; ``forget`` lets go of it.

    What the paths of the configs hold must not change meanwhile.
    """
    _open.append(None)
    try:
        yield
    finally:
        _open.pop()


def forget() -> None:
    """Lets go of all that is kept."""
    for memory in _memories:
        memory.kept.clear()
