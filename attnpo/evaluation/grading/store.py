"""Replies of graders as they came: one append-only file in an evaluation's folder, asked for nothing twice.

Each line holds one reply under the key of its call and grader, and what the call was about. A process that is killed
loses the replies that were on their way, no other.
"""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from attnpo.evaluation.grading.base import GradingCall, GradingReply
from attnpo.evaluation.jsonl_store import damaged_line, read_lines, seal_lines
from attnpo.schema import digest
from attnpo.system.credentials import identify
from attnpo.system.files import mend_lines, naming
from attnpo.system.locks import locked

log = logging.getLogger(__name__)

GRADES = "grades.jsonl"


@dataclass
class ReplyStore:
    """The replies in ``folder``; of several under one key the last counts.

    Reading takes no lock and makes no file. A reply of another type, as endpoints may send it, counts as none. Raises
    UserError for a line that cannot be read or was changed, unless it is the last one and was cut off.
    """

    folder: Path
    _replies: dict[str, tuple[GradingReply, str]] = field(init=False)  # with the digest of its grader's identity
    _is_open: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._replies = _read(self.path)

    @property
    def path(self) -> Path:
        """Returns the file."""
        return self.folder / GRADES

    def reply(self, call: GradingCall, grader: Mapping[str, object]) -> GradingReply | None:
        """Returns the reply to a call of a grader with this identity; None where it has to be asked for."""
        # An earlier version named replies by the identity with its secrets.
        found = self._replies.get(call.key(identify(grader))) or self._replies.get(call.key(grader))
        return None if found is None else found[0]

    def replies(self, grader: Mapping[str, object]) -> list[GradingReply]:
        """Returns all replies of a grader with this identity, whatever was asked."""
        wanted = digest(identify(grader))
        return [reply for reply, by in self._replies.values() if by == wanted]

    def __len__(self) -> int:
        return len(self._replies)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Opens a context in which replies can be added and no other process adds any.

        What another process has written since is read; a last line that was cut off is removed.

        Raises:
            UserError: another process is at it.
        """
        with locked(self.folder, file=GRADES, instead="output=FOLDER"):
            if mend_lines(self.path):
                log.info("%s: its last line was cut off; that call is asked again", self.path)
            self._replies = _read(self.path)
            self._is_open = True
            try:
                yield
            finally:
                self._is_open = False

    def add(self, call: GradingCall, grader: Mapping[str, object], reply: GradingReply) -> None:
        """Appends a reply and hands it to the system, so that it outlives this process."""
        if not self._is_open:
            raise RuntimeError(f"{self.path} is not open for writing: use `with store.writing()`")
        grader = identify(grader)
        key = call.key(grader)
        line = {
            "key": key,
            "benchmark": call.benchmark,
            "item": call.item,
            "part": call.part,
            "round": call.round,
            "repeat": call.repeat,
            "messages": digest(call.messages),
            "grader": grader,
            "reply": asdict(reply),
            "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        with naming(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(seal_lines([line], ascii_only=True))  # graders may send text that is no Unicode
        self._replies[key] = reply, digest(grader)


def _read(path: Path) -> dict[str, tuple[GradingReply, str]]:
    replies: dict[str, tuple[GradingReply, str]] = {}
    unusable: set[str] = set()
    for number, line in enumerate(read_lines(path, "replies"), start=1):
        try:
            key, reply = line["key"], GradingReply(**line["reply"])
            if reply.problem() is not None:
                unusable.add(key)
            else:
                replies[key] = reply, digest(identify(line["grader"]))
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise damaged_line(path, number, "replies", line) from problem
    unusable -= replies.keys()
    if unusable:
        log.warning("%s: %d replies are of another type than replies can be: they are asked again", path, len(unusable))
    return replies
