"""Replies of graders as they came: one append-only file in an evaluation's folder, asked for nothing twice.

Each line holds one reply under the key of its call and grader, what the call was about, and a digest of the line. A
process that is killed loses the replies that were on their way, no other.
"""

import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO

from attnpo.evaluation.grading.base import GradingCall, GradingReply
from attnpo.schema import UserError, digest
from attnpo.system.credentials import identify
from attnpo.system.files import mend_lines, naming, parse_json, seal_row, shortened, take_seal
from attnpo.system.locks import locked

log = logging.getLogger(__name__)

GRADES = "grades.jsonl"


@dataclass(frozen=True)
class StoredReply:
    """A reply in the store with a digest of the identity of the grader that gave it."""

    reply: GradingReply
    grader: str


@dataclass
class ReplyStore:
    """The replies in ``folder``; of several under one key the last counts.

    Reading takes no lock and makes no file. A reply of another type, as endpoints may send it, counts as none. Raises
    UserError for a line that cannot be read or was changed, unless it is the last one and was cut off.
    """

    folder: Path
    _replies: dict[str, StoredReply] = field(init=False, default_factory=dict)
    _file: TextIO | None = field(init=False, default=None)

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
        return None if found is None else found.reply

    def replies(self, grader: Mapping[str, object]) -> list[GradingReply]:
        """Returns all replies of a grader with this identity, whatever was asked."""
        wanted = digest(identify(grader))
        return [stored.reply for stored in self._replies.values() if stored.grader == wanted]

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
            with self.path.open("a", encoding="utf-8") as self._file:
                try:
                    yield
                finally:
                    self._file = None

    def add(self, call: GradingCall, grader: Mapping[str, object], reply: GradingReply) -> None:
        """Appends a reply and hands it to the system, so that it outlives this process."""
        if self._file is None:
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
        with naming(self.path):
            self._file.write(json.dumps(seal_row(line)) + "\n")
            self._file.flush()
        self._replies[key] = StoredReply(reply, digest(grader))


def _read(path: Path) -> dict[str, StoredReply]:
    replies: dict[str, StoredReply] = {}
    unusable: set[str] = set()
    # A line without its end is being written by another process, or was by one that is gone.
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    for number, text in enumerate(lines, start=1):
        try:
            line = parse_json(text)
            if not take_seal(line):
                raise ValueError("changed")
            reply = GradingReply(**line["reply"])
            if reply.problem() is not None:
                unusable.add(line["key"])
            else:
                replies[line["key"]] = StoredReply(reply, digest(identify(line["grader"])))
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise UserError(
                f"{path}, line {number}: expected a reply as it was written, got one that is damaged or was edited: "
                f"{shortened(text.decode(errors='replace'))}; delete the line, its call is then asked again"
            ) from problem
    unusable -= replies.keys()
    if unusable:
        log.warning("%s: %d replies are of another type than replies can be: they are asked again", path, len(unusable))
    return replies
