"""Maximum and minimum that propagate NaN.

``max`` keeps or drops a NaN depending on its position, so that an error that could not be computed might go unnoticed.
"""

import math
from collections.abc import Iterable


def largest(values: Iterable[float]) -> float:
    """Returns the largest value; NaN if any value is NaN."""
    seen = list(values)
    return math.nan if any(math.isnan(one) for one in seen) else max(seen)


def least(values: Iterable[float]) -> float:
    """Returns the smallest value; NaN if any value is NaN."""
    return -largest(-one for one in values)
