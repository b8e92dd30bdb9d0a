"""JSON lines files for answers, scores and grader replies, which survive interruptions and can be resumed.

Each line includes its own digest, which is verified on reading. A ``JsonlStore`` has a sidecar with the same name and
the suffix .json, which contains a summary and a key: the settings that produced the rows. The key is part of every
row's digest. A ``ReplyStore`` stores each grader reply under the key of its call.
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
    """Row identified by a prompt's id and the index of one of the prompt's answers."""

    id: str
    draw: int


SomeRow = TypeVar("SomeRow", bound=KeyedRow)


def read_lines(file: Path, noun: str, of: str = "", row_name: Callable[[Any], object] | None = None) -> list[Any]:
    """Reads and verifies the rows of a file; returns an empty list if there is no file.

    A last line without a newline is ignored, because it is still being written or its writer was stopped.

    Raises:
        UserError: a line is damaged, was edited, or repeats the ``row_name`` of an earlier one.
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
    """Builds the error for a line that was changed after it was written."""
    return UserError(
        f"{file}, line {number}: one of the {noun} is damaged, was edited, occurs twice or has no digest: "
        f"{shorten(line)}; delete the line and rerun the command to replace it. If no line has a digest, the file "
        "is from an earlier version: move it elsewhere"
    )


def seal_lines(rows: Iterable[Mapping[str, object]], of: str = "", ascii_only: bool = False) -> str:
    """Serializes rows to JSON lines with digests."""
    return "".join(json.dumps(add_row_digest(row, of), ensure_ascii=ascii_only) + "\n" for row in rows)


@dataclass(frozen=True)
class JsonlStore(Generic[SomeRow]):
    """File of rows at ``path`` that several processes can write to.

    Each process appends to its own part (the file itself if there is only one process), and the first process that
    finds no row missing merges the parts. Messages use ``noun`` as the word for the rows, and ``instead`` as the option
    that sets a different path.

    Raises:
        UserError: the path does not end in .jsonl.
    """

    path: Path
    noun: str
    rank: int = 0
    processes: int = 1
    instead: str = "output=FILE.jsonl"

    def __post_init__(self) -> None:
        if self.path.suffix != SUFFIX:
            raise UserError(f"output={self.path} must end in {SUFFIX}")

    @property
    def sidecar(self) -> Path:
        """Returns the path of the JSON file that describes the rows."""
        return self.path.with_suffix(".json")

    @property
    def part(self) -> Path:
        """Returns the file this process appends to."""
        return self.path if self.processes == 1 else self._part_path(str(self.rank))

    def _part_path(self, rank: str) -> Path:
        return self.path.with_name(f"{self.path.stem}.part{rank}{SUFFIX}")

    def _existing_files(self) -> list[Path]:
        # The merged file first: it is renamed into place before its parts are deleted.
        return [
            file
            for file in (self.path, *sorted(self.path.parent.glob(self._part_path("[0-9]*").name)))
            if file.is_file()
        ]

    # ------------------------------------------------------------------------------------------ reading

    def open(self, key: Mapping[str, object]) -> dict[Name, SomeRow]:
        """Returns existing rows by id and draw, and removes an incomplete last line.

        ``key``: all settings that determine a row; written to the sidecar.

        Raises:
            UserError: existing rows have a different key (the message names the first difference) or no key, or a
                complete line is damaged or was edited.
        """
        files = self._existing_files()
        stored = read_sidecar(self.sidecar)
        before, key = stored.get(KEY), identify(key)
        if (files or self.sidecar.exists()) and not isinstance(before, Mapping):
            there = files[0] if files else self.sidecar
            raise UserError(
                f"{self.path} has no file {self.sidecar.name} describing its {self.noun}: move {there} elsewhere, or "
                f"set a different {self.instead}"
            )
        if isinstance(before, Mapping):
            for name, was, now in find_differences(identify(before), key):
                raise UserError(
                    f"{self.path} contains {self.noun} with {name} {was}, but this command has {now}; they cannot "
                    f"share a file: set a different {self.instead}, or use the earlier settings"
                )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if KEY not in stored:
            self.write_sidecar(key, {})
        if remove_partial_line(self.part):
            log.info("%s: removed an incomplete last line; its row will be computed again", self.part)
        rows = self._read_rows(files)
        if not self._matches_sidecar(stored):
            log.warning(
                "%s: lines were added, removed or reordered after the file was finished; all lines are intact, and "
                "missing %s will be computed again",
                *(self.path, self.noun),
            )
        return rows

    def require_finished(self) -> None:
        """Checks that the file still has the digest recorded in its sidecar.

        Raises:
            UserError: the file was changed.
        """
        self._read_rows([self.path])
        if not self._matches_sidecar(read_sidecar(self.sidecar)):
            raise UserError(
                f"{self.path}: lines were added, removed or reordered after {self.sidecar.name} was written: rerun the "
                "command that wrote it"
            )

    def _matches_sidecar(self, sidecar: Mapping[str, object]) -> bool:
        return DIGEST not in sidecar or not self.path.is_file() or sidecar[DIGEST] == file_digest(self.path)

    def _read_rows(self, files: Iterable[Path]) -> dict[Name, SomeRow]:
        # Of two rows with one name the later counts: its prompt changed because an earlier turn was answered again.
        of = self._key_digest()
        rows = (row for file in files for row in read_lines(file, self.noun, of, _name_with_prompt))
        return {(row["id"], row["draw"]): row for row in rows}

    # ------------------------------------------------------------------------------------------ writing

    def append(self, rows: Iterable[SomeRow]) -> None:
        """Appends rows to this process's part and flushes them to the operating system."""
        with name_file_in_errors(self.part), self.part.open("a", encoding="utf-8") as file:
            file.write(seal_lines(rows, self._key_digest()))

    def merge(self, order: Sequence[Name]) -> list[SomeRow] | None:
        """Merges all parts into one file and returns its rows in ``order``; returns None while rows are missing.

        The file contains these rows in that order, followed by rows for other prompts. Parts are deleted. Two processes
        may merge at the same time, since they write identical files.
        """
        files = self._existing_files()
        rows = self._read_rows(files)
        if any(name not in rows for name in order):
            return None
        asked = [rows.pop(name) for name in order]
        write_atomically(self.path, seal_lines([*asked, *rows.values()], self._key_digest()))
        for part in set(files) - {self.path}:
            part.unlink(missing_ok=True)
        if rows:
            log.info("%s also contains %d %s for other prompts", self.path, len(rows), self.noun)
        return asked

    def write_sidecar(self, key: Mapping[str, object], facts: Mapping[str, object]) -> None:
        """Writes the sidecar: ``key`` and, once all rows exist, a summary (``facts``) and the file's digest."""
        finished = {DIGEST: file_digest(self.path)} if facts else {}
        stored = read_sidecar(self.sidecar).get(KEY, identify(key))  # keeps the form that rows are sealed with
        write_atomically(
            self.sidecar, json.dumps({KEY: stored, **facts, **finished}, indent=1, ensure_ascii=False) + "\n"
        )

    def _key_digest(self) -> str:
        return digest(read_sidecar(self.sidecar)[KEY])


def _name_with_prompt(row: Mapping[str, object]) -> str:
    return digest([row["id"], row["draw"], row.get("prompt")])


def read_sidecar(file: Path) -> dict[str, object]:
    """Reads the sidecar of a rows file; returns an empty dict if there is none.

    Raises:
        UserError: the sidecar is not valid JSON.
    """
    if not file.is_file():
        return {}
    try:
        value = parse_json(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(
            f"{file} cannot be read as JSON ({error}): move it and the file it describes elsewhere"
        ) from error
    return value if isinstance(value, dict) else {}


GRADES = "grades.jsonl"


@dataclass
class ReplyStore:
    """Store of grader replies in ``folder``; if a key has several replies, the last one counts.

    Reading takes no lock and creates no file. Replies with invalid fields, which some endpoints send, are ignored.

    Raises:
        UserError: a line is damaged or was edited; an incomplete last line is ignored.
    """

    folder: Path
    _replies: dict[str, tuple[GradingReply, str]] = field(init=False)  # with the digest of its grader's identity
    _is_open: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._replies = _read_replies(self.path)

    @property
    def path(self) -> Path:
        """Returns the path of the replies file."""
        return self.folder / GRADES

    def reply(self, call: GradingCall, grader: Mapping[str, object]) -> GradingReply | None:
        """Returns the stored reply to a call from a grader with this identity; None if nothing is stored."""
        # An earlier version keyed replies by the identity including its secrets.
        found = self._replies.get(call.key(identify(grader))) or self._replies.get(call.key(grader))
        return None if found is None else found[0]

    def replies(self, grader: Mapping[str, object]) -> list[GradingReply]:
        """Returns all stored replies of a grader with this identity."""
        wanted = digest(identify(grader))
        return [reply for reply, by in self._replies.values() if by == wanted]

    def __len__(self) -> int:
        return len(self._replies)

    @contextmanager
    def open_for_writing(self) -> Iterator[None]:
        """Locks the store so that only this process can add replies.

        Reloads replies that other processes have written, and removes an incomplete last line.

        Raises:
            UserError: another process is writing to the store.
        """
        with folder_lock(self.folder, file=GRADES, instead="output=FOLDER"):
            if remove_partial_line(self.path):
                log.info("%s: removed an incomplete last line; its call will be sent again", self.path)
            self._replies = _read_replies(self.path)
            self._is_open = True
            try:
                yield
            finally:
                self._is_open = False

    def add(self, call: GradingCall, grader: Mapping[str, object], reply: GradingReply) -> None:
        """Appends a reply and flushes it to the operating system, so that it survives if this process is killed."""
        if not self._is_open:
            raise RuntimeError(f"{self.path} is not open for writing: use `with store.open_for_writing()`")
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
            file.write(seal_lines([line], ascii_only=True))  # graders may send text that is not valid Unicode
        self._replies[key] = reply, digest(grader)


def _read_replies(path: Path) -> dict[str, tuple[GradingReply, str]]:
    replies: dict[str, tuple[GradingReply, str]] = {}
    unusable: set[str] = set()
    for number, line in enumerate(read_lines(path, "replies"), start=1):
        try:
            key, reply = line["key"], GradingReply(**line["reply"])
            if reply.find_problem() is not None:
                unusable.add(key)
            else:
                replies[key] = reply, digest(identify(line["grader"]))
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise damaged_line(path, number, "replies", line) from problem
    unusable -= replies.keys()
    if unusable:
        log.warning("%s: %d replies have invalid fields; their calls will be sent again", path, len(unusable))
    return replies
