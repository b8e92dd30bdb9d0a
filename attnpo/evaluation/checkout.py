"""Files of a benchmark's own repository, read from a checkout that the user names; nothing in it is executed."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from attnpo.schema import Json, UserError
from attnpo.system.files import parse_json


@dataclass(frozen=True)
class Checkout:
    """A folder with a benchmark's files.

    ``key`` and ``given`` are the config key and its value, ``source`` says how to get the folder; errors name them.
    ``digests`` collects the SHA-256 of every file as it was read, by its path in the folder.
    """

    folder: Path
    key: str
    given: str
    source: str
    digests: dict[str, str] = field(default_factory=dict)

    def text(self, name: str) -> str:
        """Returns the UTF-8 text of the file ``name``. UserError where it is missing, empty or no such text."""
        path = self.folder / name
        try:
            content = path.read_bytes()
            text = content.decode("utf-8-sig")
        except FileNotFoundError:
            self.refuse(name, "is missing")
        except (OSError, UnicodeDecodeError) as error:
            self.refuse(name, f"cannot be read as UTF-8 text ({error})")
        if not text.strip():
            self.refuse(name, "is empty")
        self.digests[name] = hashlib.sha256(content).hexdigest()
        return text

    def rows(self, name: str) -> "list[Row]":
        """Returns the objects of the JSON lines file ``name``. UserError names the line that is damaged."""
        return list(self._rows(name))

    def _rows(self, name: str) -> Iterator["Row"]:
        for number, line in enumerate(self.text(name).split("\n"), 1):  # not splitlines: U+2028 stands in real prompts
            if not line.strip():
                continue
            where = f"{name}, line {number}"
            try:
                values = parse_json(line)
            except ValueError as error:
                self.refuse(where, f"is not JSON ({error}); the file is damaged or half-written")
            if not isinstance(values, dict):
                self.refuse(where, f"holds {str(values)[:40]!r}, expected a JSON object")
            yield Row(self, where, values)

    def refuse(self, where: str, problem: str) -> NoReturn:
        """Raises a UserError about the place ``where`` in the folder, with the way to get the folder anew."""
        raise UserError(f"{self.key}={self.given}: {where} {problem} (looked in {self.folder}). {self.source}")


@dataclass(frozen=True)
class Row:
    """A JSON object of a file; every accessor raises UserError where the key is missing or holds another type."""

    checkout: Checkout
    where: str
    values: Mapping[str, Json]

    def text(self, key: str) -> str:
        """Returns a text."""
        value = self.values.get(key)
        return value if isinstance(value, str) else self._unexpected(key, "a text")

    def id(self, key: str) -> str:
        """Returns a name: a text, or a whole number as text."""
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
            self._unexpected(key, "a name or a whole number")
        return str(value)

    def texts(self, key: str) -> tuple[str, ...]:
        """Returns a list of texts, not empty."""
        value = self.values.get(key)
        if not isinstance(value, list) or not value:
            self._unexpected(key, "a list of texts")
        texts = tuple(item for item in value if isinstance(item, str))
        return texts if len(texts) == len(value) else self._unexpected(key, "a list of texts")

    def item(self, key: str, place: int) -> "Row":
        """Returns the object at ``place`` of a list: 0 is the first, -1 the last."""
        value = self.values.get(key)
        item = value[place] if isinstance(value, list) and value else None
        if not isinstance(item, dict):
            self._unexpected(key, "a list of objects")
        return Row(self.checkout, f"{self.where}: {key}[{place}]", item)

    def within(self, key: str) -> "Row":
        """Returns the object below ``key``."""
        value = self.values.get(key)
        if not isinstance(value, dict):
            self._unexpected(key, "an object")
        return Row(self.checkout, f"{self.where}: {key}", value)

    def _unexpected(self, key: str, expected: str) -> NoReturn:
        got = f"got {str(self.values[key])[:40]!r}" if key in self.values else "it is missing"
        self.checkout.refuse(f"{self.where}: {key}", f"has to be {expected}, {got}")


def once(rows: Sequence[Row], key: str) -> dict[str, Row]:
    """Rows by the name in ``key``. UserError for a name that stands twice, or a file without rows."""
    found: dict[str, Row] = {}
    for row in rows:
        name = row.id(key)
        if name in found:
            row.checkout.refuse(row.where, f"has {key} {name} again, which {found[name].where} has already")
        found[name] = row
    return found
