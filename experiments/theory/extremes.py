"""Largest and the least of numbers, where one that is no number must not get lost.

``max`` keeps or drops a NaN by its place, so that an error that could not be computed would read as none.
"""

import math
from collections.abc import Iterable


def largest(values: Iterable[float]) -> float:
    """Returns the largest value; NaN where one is NaN."""
    seen = list(values)
    return math.nan if any(math.isnan(one) for one in seen) else max(seen)


def least(values: Iterable[float]) -> float:
    """Returns the least value; NaN where one is NaN."""
    return -largest(-one for one in values)
