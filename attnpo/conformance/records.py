"""What a golden record came to: comparison of numbers, status, one line; and the configured objects they come from."""

import logging
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor

from attnpo.config import build, compose, groups
from attnpo.schema import UserError

log = logging.getLogger(__name__)


# What a broken product object may raise; the record then fails instead of the whole command.
PRODUCT_ERRORS = (
    UserError,
    OmegaConfBaseException,
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


class Status(Enum):
    """Outcome of a record. VARIANT: documented behaviour differs on purpose, and ours was checked to be what it is."""

    OK = "ok"
    FAIL = "FAIL"
    VARIANT = "variant"
    NOT_BUILT = "not built"


@dataclass(frozen=True)
class Record:
    """One line of output. The errors are the largest over everything the record compares."""

    name: str
    case: str
    status: Status
    absolute: float = 0.0
    relative: float = 0.0
    note: str = ""

    def line(self) -> str:
        """Name, case, absolute error, relative error, status and, in brackets, why."""
        errors = (
            f"{self.absolute:9.1e} {self.relative:9.1e}" if self.status is not Status.NOT_BUILT else f"{'-':>9} " * 2
        )
        note = f"  ({self.note})" if self.note else ""
        return f"{self.name:<24} {self.case:<34} {errors.rstrip():>19}  {self.status.value}{note}"


@dataclass
class Comparison:
    """Errors of one record, collected quantity by quantity.

    ``problems`` say what failed. ``variant`` says why the record has no counterpart here, or is empty.
    """

    absolute: float = 0.0
    relative: float = 0.0
    problems: list[str] = field(default_factory=list)
    variant: str = ""

    def numbers(self, what: str, found: Any, expected: Any, *, rtol: float = 0.0, atol: float = 0.0) -> None:
        """Nothing; notes a problem unless ``|found - expected| <= atol + rtol |expected|`` everywhere.

        The relative error is taken over the elements larger than ``atol``.
        """
        ours, theirs = as_double(found), as_double(expected)
        if ours.shape != theirs.shape:
            self.mismatch(f"{what}: expected shape {tuple(theirs.shape)}, got {tuple(ours.shape)}")
            return
        error, size = (ours - theirs).abs(), theirs.abs()
        inside = error <= atol + rtol * size  # false for NaN
        finite = error.nan_to_num(nan=torch.inf)
        large = size > atol
        self.absolute = max(self.absolute, float(finite.max()) if finite.numel() else 0.0)
        self.relative = max(self.relative, float((finite[large] / size[large]).max()) if large.any() else 0.0)
        if not bool(inside.all()):
            worst = int((finite - atol - rtol * size).argmax())
            place = f"[{worst}]" if ours.numel() > 1 else ""
            want, got = float(theirs.flatten()[worst]), float(ours.flatten()[worst])
            self.problems.append(f"{what}{place}: expected {want:.10g}, got {got:.10g}")

    def same(self, what: str, found: Any, expected: Any) -> None:
        """Nothing; notes a problem unless both are equal. A difference counts as an infinite error."""
        if found != expected:
            self.mismatch(
                f"{what}: expected {_short(expected)}, got {_short(found)}{_first_difference(found, expected)}"
            )

    def require(self, holds: bool, problem: str) -> None:
        """Nothing; notes ``problem`` unless ``holds``."""
        if not holds:
            self.mismatch(problem)

    def vary(self, why: str) -> None:
        """Notes a documented difference beside those noted before."""
        self.variant = f"{self.variant}; {why}" if self.variant else why

    def mismatch(self, problem: str) -> None:
        """Nothing; notes a difference that has no size."""
        self.absolute = self.relative = torch.inf
        self.problems.append(problem)


@dataclass(frozen=True)
class Check:
    """A golden record that can be recomputed: ``compare`` does it."""

    name: str
    case: str
    compare: Callable[[Comparison], None]

    def run(self) -> Record:
        """The record, FAIL when a number differs or something in the way raised."""
        found = Comparison()
        try:
            self.compare(found)
        except PRODUCT_ERRORS as error:
            log.debug("%s %s", self.name, self.case, exc_info=True)
            first = (str(error).splitlines() or [""])[0]
            found.mismatch(f"{type(error).__name__}: {first}")
        status = Status.FAIL if found.problems else Status.VARIANT if found.variant else Status.OK
        note = "; ".join(found.problems[:3]) if found.problems else found.variant
        if len(found.problems) > 3:
            note += f"; and {len(found.problems) - 3} more"
        return Record(self.name, self.case, status, found.absolute, found.relative, note)


@dataclass(frozen=True)
class Absent:
    """A golden record of something that has no config option (``group``/``option``) yet."""

    name: str
    case: str
    group: str
    option: str

    def run(self) -> Record:
        """NOT_BUILT; FAIL once the option exists, because then these numbers have to be compared."""
        if has_option(self.group, self.option):
            note = f"configs/{self.group}/{self.option}.yaml exists, but nothing here compares these records with it"
            return Record(self.name, self.case, Status.FAIL, torch.inf, torch.inf, note)
        return Record(self.name, self.case, Status.NOT_BUILT, note=f"no configs/{self.group}/{self.option}.yaml")


Item = Check | Absent


def as_double(values: Any) -> Tensor:
    """A number, nested list or tensor as a float64 tensor on the CPU."""
    if isinstance(values, Tensor):
        return values.detach().to("cpu", torch.float64)
    return torch.tensor(values, dtype=torch.float64)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _first_difference(found: Any, expected: Any) -> str:
    if not isinstance(found, Sequence) or not isinstance(expected, Sequence) or len(expected) < 8:
        return ""
    if len(found) != len(expected):
        return f" (lengths {len(expected)} and {len(found)})"
    place = next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
    return f" (first at {place}: {expected[place]!r}, {found[place]!r})"


# --------------------------------------------------------------------------------------------- configured objects


@cache
def _composed(choices: tuple[str, ...]) -> DictConfig:
    # model.path and data.path are mandatory in every run; no record reads data, and a model is named where one is read.
    return compose("fit", ["setting=real_smoke", "model.path=unset", "data.path=unset", *choices])


@cache
def _options() -> dict[str, list[str]]:
    return groups()


def has_option(group: str, option: str) -> bool:
    """Whether ``group=option`` can be written on the command line of ``fit``."""
    return option in _options().get(group, [])


def built(component: str, choices: Sequence[str] = (), **values: Any) -> Any:
    """The object that ``attnpo.fit`` builds from the node ``component`` under the given group choices and values.

    ``values`` are keys below the node, with ``__`` for the dot. Raises UserError or OmegaConf's errors for what the
    node does not know.
    """
    cfg = deepcopy(_composed(tuple(choices)))
    for key, value in values.items():
        OmegaConf.update(cfg, f"{component}.{key.replace('__', '.')}", value)
    return build(cfg[component])
