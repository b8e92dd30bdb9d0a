"""JSON lines that a stopped command leaves whole and a repeated one continues: answers, scores, replies of graders.

Every line has a digest of itself, which is compared when it is read. A file beside the rows of a ``JsonlStore``, of the
same name but for its ending .json, says what they are of and what became of them; their digests hold that too. A
``ReplyStore`` holds a grader's replies under the keys of their calls.
"""

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypedDict, TypeVar

from attnpo.evaluation.chat import GradingCall, GradingReply
from attnpo.schema import UserError, digest
from attnpo.system.credentials import identify
from attnpo.system.files import (
    add_row_digest,
    file_digest,
    find_differences,
    name_file_in_errors,
    parse_json,
    pop_row_digest,
    remove_partial_line,
    shorten,
    write_atomically,
)
from attnpo.system.locks import folder_lock

log = logging.getLogger(__name__)

SUFFIX = ".jsonl"
KEY = "key"
DIGEST = "digest"

Name = tuple[str, int]


class KeyedRow(TypedDict):
    """Row is named by the id of a prompt and the number of the answer to it."""

    id: str
    draw: int


SomeRow = TypeVar("SomeRow", bound=KeyedRow)


def read_lines(file: Path, noun: str, of: str = "", row_name: Callable[[Any], object] | None = None) -> list[Any]:
    """Returns the rows of a file, each as it was written; none where there is no file.

    A line without its end is still being written, by another process or by one that was stopped, and is left out.

    Raises:
        UserError: a line is damaged, was edited, or has the ``row_name`` of an earlier one.
    """
    rows: list[Any] = []
    names: set[object] = set()
    lines = file.read_bytes().split(b"\n")[:-1] if file.is_file() else []
    for number, line in enumerate(lines, start=1):
        try:
            row = parse_json(line)
            if not pop_row_digest(row, of) or (name := number if row_name is None else row_name(row)) in names:
                raise ValueError("changed")
        except (ValueError, KeyError, TypeError) as error:
            raise damaged_line(file, number, noun, line.decode(errors="replace")) from error
        names.add(name)
        rows.append(row)
    return rows


def damaged_line(file: Path, number: int, noun: str, line: object) -> UserError:
    """Returns the error for a line that is not as it was written."""
    return UserError(
        f"{file}, line {number}: expected one of the {noun} as it was written, once, got a line that was edited, is "
        f"damaged, repeated or without a digest: {shorten(line)}; delete the line, what it held is then asked for "
        "again; in a file of an earlier version, where no line has a digest, move the file away"
    )


def seal_lines(rows: Iterable[Mapping[str, object]], of: str = "", ascii_only: bool = False) -> str:
    """Returns rows as lines with their digests."""
    return "".join(json.dumps(add_row_digest(row, of), ensure_ascii=ascii_only) + "\n" for row in rows)


@dataclass(frozen=True)
class JsonlStore(Generic[SomeRow]):
    """Rows at ``path`` (``noun``: what they are), and this process's part of them.

    Each process of a job appends to a part of its own, which is the file itself when there is only one; whoever finds
    all rows there merges. ``instead`` is what names another place, for messages.

    Raises UserError for a path that does not end in .jsonl.
    """

    path: Path
    noun: str
    rank: int = 0
    processes: int = 1
    instead: str = "output=FILE.jsonl"

    def __post_init__(self) -> None:
        if self.path.suffix != SUFFIX:
            raise UserError(f"output={self.path}: expected a file name that ends in {SUFFIX}")

    @property
    def sidecar(self) -> Path:
        """Returns where the account of the rows lies."""
        return self.path.with_suffix(".json")

    @property
    def part(self) -> Path:
        """Returns the file this process appends to."""
        return self.path if self.processes == 1 else self._part(str(self.rank))

    def _part(self, rank: str) -> Path:
        return self.path.with_name(f"{self.path.stem}.part{rank}{SUFFIX}")

    def _files(self) -> list[Path]:
        # The whole file first: it is renamed into place before the parts it was merged from go.
        return [
            file for file in (self.path, *sorted(self.path.parent.glob(self._part("[0-9]*").name))) if file.is_file()
        ]

    # ------------------------------------------------------------------------------------------ reading

    def open(self, key: Mapping[str, object]) -> dict[Name, SomeRow]:
        """Returns the rows that are there already, by id and draw; a last line that was cut off is removed.

        ``key`` is everything that decides a row; it is written beside the file.

        Raises:
            UserError: the rows there have another key (the first part that differs is named) or none, or a line
                that is not the last one is damaged or was edited.
        """
        files = self._files()
        stored = read_account(self.sidecar)
        before, key = stored.get(KEY), identify(key)
        if (files or self.sidecar.exists()) and not isinstance(before, Mapping):
            there = files[0] if files else self.sidecar
            raise UserError(
                f"{self.path} has no {self.sidecar.name} beside it that says what its {self.noun} are of: move {there} "
                f"away, or give another {self.instead}"
            )
        if isinstance(before, Mapping):
            for name, was, now in find_differences(identify(before), key):
                raise UserError(
                    f"{self.path} holds {self.noun} with {name} {was}, this command has {now}: {self.noun} of both "
                    f"cannot share a file; give another {self.instead}, or the settings of the first command"
                )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if KEY not in stored:
            self.account(key, {})
        if remove_partial_line(self.part):
            log.info("%s: its last line was cut off; what it held is computed again", self.part)
        rows = self._rows(files)
        if not self._is_as_finished(stored):
            log.warning(
                "%s has lines more, less or in another order than when it was finished: each is as it was written, and "
                "%s that lack are made again",
                *(self.path, self.noun),
            )
        return rows

    def require_finished(self) -> None:
        """Raises UserError where the rows are not those that the file beside them was written for."""
        self._rows([self.path])
        if not self._is_as_finished(read_account(self.sidecar)):
            raise UserError(
                f"{self.path} has lines more, less or in another order than {self.sidecar.name} says: give the command "
                "that wrote it again"
            )

    def _is_as_finished(self, account: Mapping[str, object]) -> bool:
        return DIGEST not in account or not self.path.is_file() or account[DIGEST] == file_digest(self.path)

    def _rows(self, files: Iterable[Path]) -> dict[Name, SomeRow]:
        # Under one name a later row counts where it answers another prompt: its earlier turns came anew.
        of = self._of()
        rows = (row for file in files for row in read_lines(file, self.noun, of, _name_with_prompt))
        return {(row["id"], row["draw"]): row for row in rows}

    # ------------------------------------------------------------------------------------------ writing

    def append(self, rows: Iterable[SomeRow]) -> None:
        """Adds rows to this process's part and waits until they are handed to the system."""
        with name_file_in_errors(self.part), self.part.open("a", encoding="utf-8") as file:
            file.write(seal_lines(rows, self._of()))

    def merge(self, order: Sequence[Name]) -> list[SomeRow] | None:
        """Returns the rows of ``order``, or None while some are missing.

        Rewrites the file in that order, rows of other prompts after them, and removes the parts. Two processes that
        come here at once write the same file.
        """
        files = self._files()
        rows = self._rows(files)
        if any(name not in rows for name in order):
            return None
        asked = [rows.pop(name) for name in order]
        write_atomically(self.path, seal_lines([*asked, *rows.values()], self._of()))
        for part in set(files) - {self.path}:
            part.unlink(missing_ok=True)
        if rows:
            log.info("%s also keeps %d %s of other prompts", self.path, len(rows), self.noun)
        return asked

    def account(self, key: Mapping[str, object], facts: Mapping[str, object]) -> None:
        """Writes ``key`` and, once all rows are there, what became of the prompts beside the file."""
        finished = {DIGEST: file_digest(self.path)} if facts else {}
        stored = read_account(self.sidecar).get(KEY, identify(key))  # the same, as the rows' digests have it
        write_atomically(
            self.sidecar, json.dumps({KEY: stored, **facts, **finished}, indent=1, ensure_ascii=False) + "\n"
        )

    def _of(self) -> str:
        return digest(read_account(self.sidecar)[KEY])


def _name_with_prompt(row: Mapping[str, object]) -> str:
    return digest([row["id"], row["draw"], row.get("prompt")])


def read_account(file: Path) -> dict[str, object]:
    """Returns what a file beside rows says; nothing where there is none. UserError for one that cannot be read."""
    if not file.is_file():
        return {}
    try:
        value = parse_json(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} cannot be read as JSON ({error}): move it and its answers away") from error
    return value if isinstance(value, dict) else {}


GRADES = "grades.jsonl"


@dataclass
class ReplyStore:
    """Opens the replies in ``folder``; of several under one key the last counts.

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
        with folder_lock(self.folder, file=GRADES, instead="output=FOLDER"):
            if remove_partial_line(self.path):
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
        with name_file_in_errors(self.path), self.path.open("a", encoding="utf-8") as file:
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
