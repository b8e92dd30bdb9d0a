"""Coverage and kept mass: how much of a source's weight reaches the training tokens.

Kept mass is the share of a response's absolute weights (on the source's own tokens, after transforms) that reaches
training tokens containing text. The rest is lost because the training tokenizer splits the text differently or because
training truncates it. Text that the source never saw has no weight, so nothing is lost there.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

KEPT, SIDES_APART, SOURCE = 0.9, 0.1, 0.95
"""Thresholds for a warning: minimum kept mass of a side, maximum gap between the sides, minimum source coverage."""

KEPT_MASS = ("kept_mass_chosen", "kept_mass_rejected")
COLUMNS = {"source_coverage": "source coverage", **dict(zip(KEPT_MASS, ("kept chosen", "kept rejected"), strict=True))}
"""Headers of the table columns next to coverage, by field name in a run's result; older results lack these fields."""


def coverage_and_kept_mass(weights: Float[Tensor, " n"], arrived: Float[Tensor, " n"]) -> tuple[float, float]:
    """Returns the source coverage and kept mass of a response. ``arrived``: share of each token's weight that is kept.

    Source coverage is the share of source tokens that keep any weight. Both are 1 if there is nothing to lose (no
    tokens, or only zero weights).
    """
    tokens = int(arrived.count_nonzero()) / arrived.numel() if arrived.numel() else 1.0
    return tokens, kept_share(weights.abs(), arrived)


def kept_share(mass: Float[Tensor, " n"], arrived: Float[Tensor, " n"]) -> float:
    """Returns the share of ``mass`` that is kept; 1 if there is no mass."""
    total = float(mass.sum())
    # Copies, because the last bits of a dot product depend on the memory alignment of its rows.
    return float(mass.clone() @ arrived.clone()) / total if total else 1.0


@runtime_checkable
class PairCoverage(Protocol):
    """Coverage of one pair on its training tokens; tuples are (chosen, rejected)."""

    @property
    def coverage(self) -> tuple[float, float]:
        """Returns the share of each side's training tokens that are aligned with one of the source's tokens."""

    @property
    def source_coverage(self) -> tuple[float, float]:
        """Returns the share of each side's source tokens that are aligned with a training token."""

    @property
    def kept_mass(self) -> tuple[float, float]:
        """Returns the share of each side's total absolute weight that is kept."""


@dataclass(frozen=True)
class WeightCoverage:
    """Coverage, source coverage and kept mass, averaged over responses; all are NaN if there are no pairs."""

    coverage: float
    source_coverage: float
    kept_mass_chosen: float
    kept_mass_rejected: float

    @classmethod
    def mean_over(cls, pairs: Sequence[PairCoverage]) -> "WeightCoverage":
        """Averages the coverage of ``pairs`` and rounds it as in a run's result."""
        count = len(pairs)
        if not count:
            return cls(*[math.nan] * 4)
        return cls(
            round(sum(sum(pair.coverage) / 2 for pair in pairs) / count, 5),
            round(sum(sum(pair.source_coverage) / 2 for pair in pairs) / count, 5),
            *(round(sum(pair.kept_mass[side] for pair in pairs) / count, 5) for side in (0, 1)),
        )

    def describe(self) -> str:
        """Formats coverage and kept mass for a log line."""
        return (
            f"coverage {self.coverage:.4f}, source coverage {self.source_coverage:.4f}, kept mass "
            f"{self.kept_mass_chosen:.3f} (chosen) and {self.kept_mass_rejected:.3f} (rejected)"
        )

    @property
    def is_low(self) -> bool:
        """Returns whether enough weight is lost to justify a warning."""
        kept = self.kept_mass_chosen, self.kept_mass_rejected
        return min(kept) < KEPT or abs(kept[0] - kept[1]) > SIDES_APART or self.source_coverage < SOURCE
