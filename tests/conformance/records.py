"""Comparison of a golden record with recomputed numbers, its outcome in one line, and the objects built from config."""

import logging
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor

from attnpo.config.compose import compose, instantiate, list_groups
from attnpo.schema import UserError
from attnpo.system.files import shorten
from tests.conformance.fields import Record

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
# Below this share of a record's rtol, relative to numbers of size 1, a difference is rounding of a sum near 0.
FLOOR = 1e-3
GARBAGE = 1234.5  # put where the mask is 0; finite, so that an objective may also multiply by its mask

Numbers = Tensor | Sequence[float] | float


class Status(Enum):
    """Outcome of a record. VARIANT: documented behaviour differs on purpose, and ours was checked to be what it is."""

    OK = "ok"
    FAIL = "FAIL"
    VARIANT = "variant"
    NOT_BUILT = "not built"


@dataclass(frozen=True)
class Outcome:
    """What a record came to, one line of output. The errors are the largest over everything that was compared."""

    name: str
    case: str
    status: Status
    absolute: float = 0.0
    relative: float = 0.0
    note: str = ""

    def line(self) -> str:
        """Name, case, absolute error, relative error, status and, in brackets, why."""
        errors = (
            f"{self.absolute:7.1e} {self.relative:7.1e}" if self.status is not Status.NOT_BUILT else f"{'-':>7} " * 2
        )
        note = f"  ({self.note})" if self.note else ""
        return f"{self.name:<22} {self.case:<30} {errors.rstrip():>15}  {self.status.value}{note}"


@dataclass
class Comparison:
    """Errors of one record, collected quantity by quantity.

    ``problems`` say what failed. ``variant`` says why the record has no counterpart here, or is empty.
    """

    absolute: float = 0.0
    relative: float = 0.0
    problems: list[str] = field(default_factory=list)
    variant: str = ""

    def numbers(self, what: str, ours: Numbers, expected: Numbers, *, rtol: float = 0.0, atol: float = 0.0) -> None:
        """Notes a problem unless ``|ours - expected| <= atol + rtol |expected|`` everywhere.

        The relative error is taken over the elements larger than ``atol``.
        """
        got, want = _as_double(ours), _as_double(expected)
        if got.shape != want.shape:
            self.mismatch(f"{what}: expected shape {tuple(want.shape)}, got {tuple(got.shape)}")
            return
        error, size = (got - want).abs(), want.abs()
        inside = error <= atol + rtol * size  # false for NaN
        finite = error.nan_to_num(nan=torch.inf)
        large = size > atol
        self.absolute = max(self.absolute, float(finite.max()) if finite.numel() else 0.0)
        self.relative = max(self.relative, float((finite[large] / size[large]).max()) if large.any() else 0.0)
        if not bool(inside.all()):
            worst = int((finite - atol - rtol * size).argmax())
            place = f"[{worst}]" if got.numel() > 1 else ""
            numbers = f"expected {float(want.flatten()[worst]):.10g}, got {float(got.flatten()[worst]):.10g}"
            self.problems.append(f"{what}{place}: {numbers}")

    def same(self, what: str, ours: object, expected: object) -> None:
        """Notes a problem unless both are equal. A difference counts as an infinite error."""
        if ours != expected:
            texts = f"expected {shorten(str(expected))}, got {shorten(str(ours))}"
            self.mismatch(f"{what}: {texts}{_first_difference(ours, expected)}")

    def require(self, holds: bool, problem: str) -> None:
        """Notes ``problem`` unless ``holds``."""
        if not holds:
            self.mismatch(problem)

    def vary(self, why: str) -> None:
        """Notes a documented difference."""
        self.variant = f"{self.variant}; {why}" if self.variant else why

    def mismatch(self, problem: str) -> None:
        """Notes a difference that has no size."""
        self.absolute = self.relative = torch.inf
        self.problems.append(problem)


@dataclass(frozen=True)
class Check:
    """A golden record that can be recomputed: ``compare`` does it."""

    name: str
    case: str
    compare: Callable[[Comparison], None]

    def run(self) -> Outcome:
        """The outcome, FAIL when a number differs or an error prevents the comparison."""
        comparison = Comparison()
        try:
            self.compare(comparison)
        except PRODUCT_ERRORS as error:
            log.debug("%s %s", self.name, self.case, exc_info=True)
            first = (str(error).splitlines() or [""])[0]
            comparison.mismatch(f"{type(error).__name__}: {first}")
        problems = comparison.problems
        status = Status.FAIL if problems else Status.VARIANT if comparison.variant else Status.OK
        note = "; ".join(problems[:3]) if problems else comparison.variant
        if len(problems) > 3:
            note += f"; and {len(problems) - 3} more"
        return Outcome(self.name, self.case, status, comparison.absolute, comparison.relative, note)


@dataclass(frozen=True)
class Absent:
    """A golden record of something that has no config option (``group``/``option``) yet."""

    name: str
    case: str
    group: str
    option: str

    def run(self) -> Outcome:
        """NOT_BUILT; FAIL once the option exists, because then these numbers have to be compared."""
        if has_option(self.group, self.option):
            note = f"configs/{self.group}/{self.option}.yaml exists, but nothing here compares these records with it"
            return Outcome(self.name, self.case, Status.FAIL, torch.inf, torch.inf, note)
        return Outcome(self.name, self.case, Status.NOT_BUILT, note=f"no configs/{self.group}/{self.option}.yaml")


Item = Check | Absent


def compare_expected(
    record: Record,
    comparison: Comparison,
    evaluate: Callable[[float], Mapping[str, Tensor]],
    way: str = "",
    rtols: Mapping[str, float] | None = None,
) -> None:
    """Compares every quantity that the record expects with ``evaluate``, by its name there.

    ``evaluate`` gets the value that stands where the mask is 0; a second call with another value must give the same to
    the bit. ``way`` says how the numbers were computed. ``rtols``: quantities held to another tolerance.
    """
    results, garbage = evaluate(0.0), evaluate(GARBAGE)
    comparison.require(bool(record.expected), "the record expects nothing")
    for name in record.expected:
        if name not in results:
            comparison.mismatch(f"{name}: expected by the record, but nothing here computes it for {record.name}")
            continue
        what = f"{name} ({way})" if way else name
        expected, rtol = record.expected.tensor(name), (rtols or {}).get(name, record.rtol)
        if name.endswith("accuracy"):  # a float32 mean in the reference
            comparison.numbers(what, results[name].float(), expected.float())
        else:
            size = max(1.0, float(expected.abs().max()))
            comparison.numbers(what, results[name], expected, rtol=rtol, atol=FLOOR * rtol * size)
        comparison.require(torch.equal(results[name], garbage[name]), f"{what} changes with values under mask 0")


def _as_double(values: Numbers) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64, device="cpu").detach()


def _first_difference(ours: object, expected: object) -> str:
    if not isinstance(ours, Sequence) or not isinstance(expected, Sequence) or len(expected) < 8:
        return ""
    if len(ours) != len(expected):
        return f" (lengths {len(expected)} and {len(ours)})"
    place = next(i for i, (a, b) in enumerate(zip(ours, expected, strict=True)) if a != b)
    return f" (first at {place}: {expected[place]!r}, {ours[place]!r})"


# --------------------------------------------------------------------------------------------- configured objects


@cache
def _composed(choice: str) -> DictConfig:
    # Without a setting: what a setting says of one objective's keys is no part of another's.
    return compose("fit", ["~setting", *[choice] * bool(choice)])


@cache
def _options() -> dict[str, list[str]]:
    return list_groups()


def has_option(group: str, option: str) -> bool:
    """Whether ``group=option`` can be written on the command line of ``fit``."""
    return option in _options().get(group, [])


def built(component: str, choice: str = "", **values: object) -> Any:
    """The object that ``attnpo.fit`` builds from the node ``component`` under the given group choice and values.

    ``values`` are keys below the node, with ``__`` for the dot. Raises UserError or OmegaConf's errors for what the
    node does not know.
    """
    cfg = deepcopy(_composed(choice))
    for key, value in values.items():
        OmegaConf.update(cfg, f"{component}.{key.replace('__', '.')}", value)
    return instantiate(cfg[component])
