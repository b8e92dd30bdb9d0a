"""Shares of a source's weights that arrive on the training tokens and that are lost on the way.

Kept mass is the share of a response's absolute weights, on the source's own tokens after transforms, that arrives on
training tokens with characters. Lost is what stands on source tokens without a partner there: cut differently by the
other tokenisation, or cut off by training's length rules. What the source never saw has no weight to lose.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

KEPT, SIDES_APART, SOURCE = 0.9, 0.1, 0.95
"""Least kept mass of a side, most that the two sides may differ by, least source coverage: a warning beyond these."""

KEPT_MASS = ("kept_mass_chosen", "kept_mass_rejected")
COLUMNS = {"source_coverage": "source coverage", **dict(zip(KEPT_MASS, ("kept chosen", "kept rejected"), strict=True))}
"""Heads of the columns beside coverage in tables, by the names in a run's result; older results lack them."""


def shares_that_arrived(weights: Float[Tensor, " n"], arrived: Float[Tensor, " n"]) -> tuple[float, float]:
    """Returns source coverage and kept mass of one response; ``arrived`` is the share of each weight that does.

    Source coverage is the share of the tokens of whose weight anything arrives. Both are 1 where there is nothing to
    lose: no tokens, or weights that are all 0.
    """
    tokens = int(arrived.count_nonzero()) / arrived.numel() if arrived.numel() else 1.0
    return tokens, kept_share(weights.abs(), arrived)


def kept_share(mass: Float[Tensor, " n"], arrived: Float[Tensor, " n"]) -> float:
    """Returns the share of ``mass`` that arrives, 1 where there is none."""
    total = float(mass.sum())
    # Copies, as a dot product of rows that begin at another address has other last bits.
    return float(mass.clone() @ arrived.clone()) / total if total else 1.0


@runtime_checkable
class Weighted(Protocol):
    """Pair on its training tokens; tuples are (chosen, rejected)."""

    @property
    def coverage(self) -> tuple[float, float]:
        """Shares of the training tokens with a partner."""

    @property
    def source_coverage(self) -> tuple[float, float]:
        """Shares of the source's tokens that arrived."""

    @property
    def kept_mass(self) -> tuple[float, float]:
        """Shares of the weights that arrived."""


@dataclass(frozen=True)
class Arrival:
    """Coverage of both sides and kept mass of each, means over responses; NaN throughout without a pair."""

    coverage: float
    source_coverage: float
    kept_mass_chosen: float
    kept_mass_rejected: float

    @classmethod
    def of(cls, pairs: Sequence[Weighted]) -> "Arrival":
        """Returns the means over ``pairs``, rounded as a run's result holds them."""
        count = len(pairs)
        if not count:
            return cls(*[math.nan] * 4)
        return cls(
            round(sum(sum(pair.coverage) / 2 for pair in pairs) / count, 5),
            round(sum(sum(pair.source_coverage) / 2 for pair in pairs) / count, 5),
            *(round(sum(pair.kept_mass[side] for pair in pairs) / count, 5) for side in (0, 1)),
        )

    def text(self) -> str:
        """Formats coverage and kept mass for a log line."""
        return (
            f"coverage {self.coverage:.4f}, source coverage {self.source_coverage:.4f}, kept mass "
            f"{self.kept_mass_chosen:.3f} (chosen) and {self.kept_mass_rejected:.3f} (rejected)"
        )

    @property
    def is_low(self) -> bool:
        """Tells whether enough weight is lost to warn about."""
        kept = self.kept_mass_chosen, self.kept_mass_rejected
        return min(kept) < KEPT or abs(kept[0] - kept[1]) > SIDES_APART or self.source_coverage < SOURCE
