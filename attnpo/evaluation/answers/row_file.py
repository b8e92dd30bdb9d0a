"""A file of rows: JSON lines that a stopped command leaves whole and a repeated one continues.

A file beside it, of the same name but for its ending .json, says what the rows are of and what became of them. Each
process of a job appends to a part of its own; whoever finds all rows there merges. Every row has a digest of itself and
of what the rows are of, which is compared when it is read; the file beside finished rows has one of them all.
"""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Generic, TypedDict, TypeVar

from attnpo.schema import UserError, digest
from attnpo.system.credentials import identify
from attnpo.system.files import (
    differences,
    file_digest,
    mend_lines,
    naming,
    parse_json,
    seal_row,
    shortened,
    take_seal,
    write_whole,
)

log = logging.getLogger(__name__)


SUFFIX = ".jsonl"
KEY = "key"
DIGEST = "digest"

Name = tuple[str, int]


class Row(TypedDict):
    """A row is named by the id of a prompt and the number of the answer to it."""

    id: str
    draw: int


SomeRow = TypeVar("SomeRow", bound=Row)


@dataclass(frozen=True)
class RowFile(Generic[SomeRow]):
    """The rows at ``path``, and this process's part of them: the file itself when there is only one process.

    A kind of rows says what they are (``noun``), what they hold (``value``), and what the file beside them says
    (``origin``).

    ``instead`` is what names another place, for messages.

    Raises UserError for a path that does not end in .jsonl.
    """

    noun: ClassVar[str]
    value: ClassVar[str]
    origin: ClassVar[str]

    path: Path
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
                f"{self.path} has no {self.sidecar.name} beside it that says {self.origin}: move {there} away, or give "
                f"another {self.instead}"
            )
        if isinstance(before, Mapping):
            for name, was, now in differences(identify(before), key):
                raise UserError(
                    f"{self.path} holds {self.noun} with {name} {was}, this command has {now}: {self.noun} of both "
                    f"cannot share a file; give another {self.instead}, or the settings of the first command"
                )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if KEY not in stored:
            self.account(key, {})
        if mend_lines(self.part):
            log.info("%s: its last line was cut off; what it held is computed again", self.part)
        rows = {(row["id"], row["draw"]): row for file in files for row in self._rows(file)}
        if not self._is_as_finished(stored):
            log.warning(
                "%s has lines more, less or in another order than when it was finished: each is as it was written, and "
                "%s that lack are made again",
                *(self.path, self.noun),
            )
        return rows

    def require_finished(self) -> None:
        """Raises UserError where the rows are not those that the file beside them was written for."""
        self._rows(self.path)
        if not self._is_as_finished(read_account(self.sidecar)):
            raise UserError(
                f"{self.path} has lines more, less or in another order than {self.sidecar.name} says: give the command "
                "that wrote it again"
            )

    def _is_as_finished(self, account: Mapping[str, object]) -> bool:
        return DIGEST not in account or not self.path.is_file() or account[DIGEST] == file_digest(self.path)

    def _rows(self, file: Path) -> list[SomeRow]:
        rows: list[SomeRow] = []
        asked: set[str] = set()
        of = self._of()
        # A line without its end is still being written, by another process or by one that was stopped.
        lines = file.read_bytes().split(b"\n")[:-1] if file.is_file() else []
        for number, line in enumerate(lines, start=1):
            try:
                row = parse_json(line)
                # Under one name a later row counts where it answers another prompt: its earlier turns came anew.
                if not take_seal(row, of) or (name := digest([row["id"], row["draw"], row.get("prompt")])) in asked:
                    raise ValueError("changed")
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(
                    f"{file}, line {number}: expected a row of {self.noun} as it was written, once, got one that was "
                    f"edited, is damaged, repeated or without a digest: {shortened(line.decode(errors='replace'))}; "
                    f"delete the line, its {self.value} is then made again; in a file of an earlier version, where no "
                    "line has a digest, move the file away"
                ) from error
            asked.add(name)
            rows.append(row)
        return rows

    # ------------------------------------------------------------------------------------------ writing

    def append(self, rows: Iterable[SomeRow]) -> None:
        """Adds rows to this process's part and waits until they are handed to the system."""
        with naming(self.part), self.part.open("a", encoding="utf-8") as file:
            file.write(self._lines(rows))

    def merge(self, order: Sequence[Name]) -> list[SomeRow] | None:
        """Returns the rows of ``order``, or None while some are missing.

        Rewrites the file in that order, rows of other prompts after them, and removes the parts. Two processes that
        come here at once write the same file.
        """
        files = self._files()
        rows = {(row["id"], row["draw"]): row for file in files for row in self._rows(file)}
        if any(name not in rows for name in order):
            return None
        asked = [rows.pop(name) for name in order]
        write_whole(self.path, self._lines([*asked, *rows.values()]))
        for part in set(files) - {self.path}:
            part.unlink(missing_ok=True)
        if rows:
            log.info("%s also keeps %d %s of other prompts", self.path, len(rows), self.noun)
        return asked

    def account(self, key: Mapping[str, object], facts: Mapping[str, object]) -> None:
        """Writes ``key`` and, once all rows are there, what became of the prompts beside the file."""
        finished = {DIGEST: file_digest(self.path)} if facts else {}
        stored = read_account(self.sidecar).get(KEY, identify(key))  # the same, as the rows' digests have it
        write_whole(self.sidecar, json.dumps({KEY: stored, **facts, **finished}, indent=1, ensure_ascii=False) + "\n")

    def _lines(self, rows: Iterable[SomeRow]) -> str:
        of = self._of()
        return "".join(json.dumps(seal_row(row, of), ensure_ascii=False) + "\n" for row in rows)

    def _of(self) -> str:
        return digest(read_account(self.sidecar)[KEY])


def read_account(file: Path) -> dict[str, object]:
    """Returns what a file beside rows says; nothing where there is none. UserError for one that cannot be read."""
    if not file.is_file():
        return {}
    try:
        value = parse_json(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} cannot be read as JSON ({error}): move it and its answers away") from error
    return value if isinstance(value, dict) else {}
