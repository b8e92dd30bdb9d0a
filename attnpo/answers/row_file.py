"""A file of rows: JSON lines that a stopped command leaves whole and a repeated one continues.

A file beside it, of the same name but for its ending .json, says what the rows are of and what became of them. Each
process of a job appends to a part of its own; whoever finds all rows there merges.
"""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Generic, TypedDict, TypeVar

from attnpo.files import differences, mend_lines, shortened, write_whole
from attnpo.schema import UserError

log = logging.getLogger(__name__)


SUFFIX = ".jsonl"
KEY = "key"

Name = tuple[str, int]


class Row(TypedDict):
    """A row is named by the id of a prompt and the number of the answer to it."""

    id: str
    draw: int


SomeRow = TypeVar("SomeRow", bound=Row)


@dataclass(frozen=True)
class RowFile(Generic[SomeRow]):
    """The rows at ``path``, and this process's part of them: the file itself when there is only one process.

    A kind of rows says what they are (``noun``), what they must hold (``value``), and what the file beside them says
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
        """Where the account of the rows lies."""
        return self.path.with_suffix(".json")

    @property
    def part(self) -> Path:
        """The file this process appends to."""
        return self.path if self.processes == 1 else self._part(str(self.rank))

    def _part(self, rank: str) -> Path:
        return self.path.with_name(f"{self.path.stem}.part{rank}{SUFFIX}")

    def _files(self) -> list[Path]:
        # The whole file first: it is renamed into place before the parts it was merged from go.
        return [file for file in (self.path, *sorted(self.path.parent.glob(self._part("*").name))) if file.is_file()]

    # ------------------------------------------------------------------------------------------ reading

    def open(self, key: Mapping[str, object]) -> dict[Name, SomeRow]:
        """The rows that are there already, by id and draw; a last line that was cut off is removed.

        ``key`` is everything that decides a row; it is written beside the file.

        Raises:
            UserError: the rows there have another key (the first part that differs is named) or none, or a line
                that is not the last one cannot be read.
        """
        files = self._files()
        stored = read_account(self.sidecar)
        before = stored.get(KEY)
        if files and not isinstance(before, Mapping):
            raise UserError(
                f"{files[0]} has no {self.sidecar.name} beside it that says which model and sampling its answers are "
                f"from: move it away, or give another {self.instead}"
            )
        if isinstance(before, Mapping):
            for name, was, now in differences(before, key):
                raise UserError(
                    f"{self.path} holds {self.noun} with {name} {was}, this command has {now}: {self.noun} of both "
                    f"cannot share a file; give another {self.instead}, or the settings of the first command"
                )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if KEY not in stored:
            self.account(key, {})
        if mend_lines(self.part):
            log.info("%s: its last line was cut off; what it held is computed again", self.part)
        return {(row["id"], row["draw"]): row for file in files for row in self._rows(file)}

    def _rows(self, file: Path) -> list[SomeRow]:
        rows = []
        # A line without its end is still being written, by another process or by one that was stopped.
        lines = file.read_bytes().split(b"\n")[:-1] if file.is_file() else []
        for number, line in enumerate(lines, start=1):
            try:
                row: SomeRow = json.loads(line)
                _ = [row[key] for key in ("id", "draw", self.value)]  # type: ignore[literal-required]
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(
                    f"{file}, line {number}: expected a row of {self.noun}, got "
                    f"{shortened(line.decode(errors='replace'))}; delete the line, its {self.value} is then computed "
                    "again"
                ) from error
            rows.append(row)
        return rows

    # ------------------------------------------------------------------------------------------ writing

    def append(self, rows: Iterable[SomeRow]) -> None:
        """Adds rows to this process's part and waits until they are handed to the system."""
        with self.part.open("a", encoding="utf-8") as file:
            file.writelines(_line(row) for row in rows)

    def merge(self, order: Sequence[Name]) -> list[SomeRow] | None:
        """The rows of ``order``, or None while some are missing.

        Rewrites the file in that order, rows of other prompts after them, and removes the parts. Two processes that
        come here at once write the same file.
        """
        files = self._files()
        rows = {(row["id"], row["draw"]): row for file in files for row in self._rows(file)}
        if any(name not in rows for name in order):
            return None
        asked = [rows.pop(name) for name in order]
        write_whole(self.path, "".join(_line(row) for row in [*asked, *rows.values()]))
        for part in set(files) - {self.path}:
            part.unlink(missing_ok=True)
        if rows:
            log.info("%s also keeps %d %s of other prompts", self.path, len(rows), self.noun)
        return asked

    def account(self, key: Mapping[str, object], facts: Mapping[str, object]) -> None:
        """Writes ``key`` and what became of the prompts beside the file."""
        write_whole(self.sidecar, json.dumps({KEY: key, **facts}, indent=1, ensure_ascii=False) + "\n")


def _line(row: Row) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def read_account(file: Path) -> dict[str, object]:
    """What a file beside rows says; nothing where there is none. UserError for one that cannot be read."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} cannot be read as JSON ({error}): move it and its answers away") from error
    return value if isinstance(value, dict) else {}
