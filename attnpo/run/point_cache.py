"""In-process cache shared by the grid points of a study, cleared at its end.

Decides when to cache values; callers choose the key, value and size limit.
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
class PointCache:
    """In-process cache of at most ``entries`` values; evicts the least recently used first.

    ``room``: size limit per value, in the unit returned by ``size`` (see ``get_or_make``). Larger values are not
    cached.
    """

    entries: int
    room: int
    kept: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _memories.append(self)

    def get_or_make(
        self, key: Callable[[], dict[str, object]], make: Callable[[], Some], size: Callable[[Some], int]
    ) -> Some:
        """Returns the cached value for ``key``, creating it if missing. Logs reuse under the key's "what" entry."""
        if not _open:
            return make()
        parts = key()
        name = digest(parts)
        if name in self.kept and "what" in parts:
            log.info("%s: reused from an earlier grid point in this process", parts["what"])
        found = cast(Some, self.kept.pop(name)) if name in self.kept else make()
        if size(found) <= self.room:
            self.kept[name] = found
        if len(self.kept) > self.entries:
            del self.kept[next(iter(self.kept))]
        return found


_memories: list[PointCache] = []
_open: list[object] = []


@contextmanager
def cache_between_runs() -> Iterator[None]:
    """Opens a context in which the runs of this process share caches; ``clear_caches`` empties them.

    Files named by the runs' configs must not change inside the context.
    """
    _open.append(None)
    try:
        yield
    finally:
        _open.pop()


def clear_caches() -> None:
    """Empties all caches."""
    for memory in _memories:
        memory.kept.clear()
