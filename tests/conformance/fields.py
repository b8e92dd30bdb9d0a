"""Golden records as read from their JSON files. A missing key is a KeyError, with which the record fails."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from attnpo.schema import Json


class Fields(dict[str, Any]):
    """JSON object of a golden file."""

    def tensor(self, key: str) -> Float64[Tensor, "..."]:
        """Returns a number or nested lists of numbers."""
        return torch.tensor(self[key], dtype=torch.float64)

    def at(self, key: str) -> "Fields":
        """Returns the object below ``key``."""
        return Fields(self[key])


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
    def read(cls, values: Mapping[str, Json]) -> "Record":
        """Reads a record; KeyError for a part that is missing."""
        held = Fields(values)
        parts = (held.at(key) for key in ("hyperparameters", "inputs", "expected"))
        return cls(held["name"], str(held["case"]), held["rtol"], *parts)

    def without(self, quantities: Sequence[str]) -> "Record":
        """The record less some of the quantities that it expects."""
        kept = {name: value for name, value in self.expected.items() if name not in quantities}
        return replace(self, expected=Fields(kept))
