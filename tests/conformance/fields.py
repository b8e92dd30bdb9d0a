"""Golden records as read from their JSON files: every value is read by key and type, and an error says where it is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from jaxtyping import Float64
from torch import Tensor

from attnpo.schema import Json, UserError
from attnpo.system.files import shortened

Value = TypeVar("Value")


@dataclass(frozen=True)
class Fields:
    """A JSON object of a golden file; ``where`` is the file and the keys that lead to it.

    Every accessor raises UserError when the key is missing or holds another type.
    """

    where: str
    values: Mapping[str, Json]

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def number(self, key: str) -> float:
        """A number."""
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._unexpected(key, "a number")
        return float(value)

    def integer(self, key: str) -> int:
        """A whole number."""
        return self._typed(key, int, "a whole number")

    def flag(self, key: str) -> bool:
        """True or false."""
        return self._typed(key, bool, "true or false")

    def text(self, key: str) -> str:
        """A text."""
        return self._typed(key, str, "a text")

    def ids(self, key: str) -> list[int]:
        """A list of whole numbers."""
        return self._items(key, int, "a list of whole numbers")

    def texts(self, key: str) -> list[str]:
        """A list of texts."""
        return self._items(key, str, "a list of texts")

    def span(self, key: str) -> tuple[int, int]:
        """The first place of a range and the one after its last."""
        ids = self.ids(key)
        if len(ids) != 2:
            raise self._unexpected(key, "two whole numbers")
        return ids[0], ids[1]

    def tensor(self, key: str) -> Float64[Tensor, "..."]:
        """A number or nested lists of numbers."""
        try:
            return torch.tensor(self.values.get(key), dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError) as error:
            raise self._unexpected(key, "a number or lists of numbers of equal length") from error

    def at(self, key: str) -> "Fields":
        """The object below ``key``."""
        return Fields(f"{self.where}{key}.", self._typed(key, dict, "an object"))

    def each(self, key: str) -> "list[Fields]":
        """The objects of a list."""
        return [
            Fields(f"{self.where}{key}[{place}].", item)
            for place, item in enumerate(self._items(key, dict, "a list of objects"))
        ]

    def _typed(self, key: str, kind: type[Value], expected: str) -> Value:
        value = self.values.get(key)
        if not isinstance(value, kind) or type(value) is not kind:  # a bool is no whole number
            raise self._unexpected(key, expected)
        return value

    def _items(self, key: str, kind: type[Value], expected: str) -> list[Value]:
        items = self._typed(key, list, expected)
        if any(type(item) is not kind for item in items):
            raise self._unexpected(key, expected)
        return items

    def _unexpected(self, key: str, expected: str) -> UserError:
        got = f"got {shortened(str(self.values[key]))}" if key in self else "it is missing"
        return UserError(f"{self.where}{key}: expected {expected}, {got}; copy the golden files again")


@dataclass(frozen=True)
class Record:
    """A record of a ``losses.json``; quantities are compared within ``rtol``."""

    name: str
    case: str
    rtol: float
    hyperparameters: Fields
    inputs: Fields
    expected: Fields

    @classmethod
    def read(cls, values: Mapping[str, Json], file: str = "losses.json") -> "Record":
        """The record; UserError when a part is missing or of another type."""
        name, case = Fields(f"{file}: a record's ", values).text("name"), str(values.get("case"))
        fields = Fields(f"{file}: {name} {case}: ", values)
        given, inputs, expected = (fields.at(key) for key in ("hyperparameters", "inputs", "expected"))
        return cls(name, case, fields.number("rtol"), given, inputs, expected)

    def without(self, quantities: Sequence[str]) -> "Record":
        """The record less some of the quantities that it expects."""
        kept = {name: value for name, value in self.expected.values.items() if name not in quantities}
        return replace(self, expected=replace(self.expected, values=kept))
