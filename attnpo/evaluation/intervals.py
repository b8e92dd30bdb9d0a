"""Statistics of studies: intervals over seeds and prompts, paired differences, tied ranks.

Pure NumPy, without file access. Seeds and held-out prompts are the two sources of randomness; arms are compared on the
same seeds and prompts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from attnpo.system.errors import UserError

Scores = Float[np.ndarray, "seeds prompts"]

LEVEL = 0.95  # nominal coverage of the intervals
QUANTILE = (1 + LEVEL) / 2


@dataclass(frozen=True)
class MeanSquares:
    """Mean squares of a two-way random-effects ANOVA: seeds crossed with prompts, one score per cell."""

    seed: float
    prompt: float
    residual: float
    seeds: int
    prompts: int

    @classmethod
    def from_scores(cls, scores: Scores) -> "MeanSquares":
        """Computes the mean squares of a table with at least two seeds and two prompts."""
        seeds, prompts = scores.shape
        by_seed, by_prompt = scores.mean(axis=1, keepdims=True), scores.mean(axis=0, keepdims=True)
        residuals = scores - by_seed - by_prompt + scores.mean()
        return cls(
            prompts * float(by_seed.var(ddof=1)),
            seeds * float(by_prompt.var(ddof=1)),
            float((residuals**2).sum()) / ((seeds - 1) * (prompts - 1)),
            seeds,
            prompts,
        )

    @classmethod
    def from_spreads(cls, spreads: Sequence[float], seeds: int, prompts: int) -> "MeanSquares":
        """Computes the expected mean squares from the standard deviations of seeds, prompts and residuals."""
        seed, prompt, residual = (spread**2 for spread in spreads)
        return cls(prompts * seed + residual, seeds * prompt + residual, residual, seeds, prompts)

    @property
    def variances(self) -> tuple[float, float, float]:
        """Returns the estimated variances of seeds, prompts and residuals."""
        seed, prompt = max(0.0, self.seed - self.residual), max(0.0, self.prompt - self.residual)
        return seed / self.prompts, prompt / self.seeds, self.residual

    def _estimates(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Returns two estimates of the mean's variance with their degrees of freedom: crossed, and over seed means.

        Crossed: (MS_seed + MS_prompt - MS_residual) / (S P), or MS_residual / (S P) if that is not positive, with
        Satterthwaite's degrees of freedom, but at least S - 1.
        """
        rows, columns, cells = float(self.seeds - 1), self.prompts - 1, self.seeds * self.prompts
        total, freedom = self.seed + self.prompt - self.residual, rows * columns
        if total > 0:
            freedom = total**2 / (self.seed**2 / rows + self.prompt**2 / columns + self.residual**2 / freedom)
        crossed = (total if total > 0 else self.residual) / cells
        return (crossed, max(freedom, rows)), (self.seed / cells, rows)

    def half_width(self) -> float:
        """Returns half the width of the mean's 95 % interval: the wider of the two estimates' Student's t intervals."""
        return max(t_quantile(QUANTILE, freedom) * math.sqrt(variance) for variance, freedom in self._estimates())

    def p_value(self, mean: float) -> float:
        """Returns the two-sided p-value of a mean against 0: the larger of the two estimates' p-values."""
        from scipy.special import stdtr

        known = [(variance, freedom) for variance, freedom in self._estimates() if variance > 0]
        p_values = (2 * float(stdtr(freedom, -abs(mean) / math.sqrt(variance))) for variance, freedom in known)
        return max(p_values, default=float(mean == 0))  # all scores are equal


@dataclass(frozen=True)
class Interval:
    """Mean with its 95 % interval, and the numbers of seeds and prompts.

    ``low`` and ``high`` are NaN for a single value, which has no interval. ``squares``: mean squares from which the
    width was computed; None unless several seeds share their prompts.
    """

    mean: float
    low: float
    high: float
    seeds: int
    prompts: int
    squares: MeanSquares | None = None

    @property
    def excludes_zero(self) -> bool:
        """Returns whether 0 is outside the interval; False if there is no interval."""
        return self.low > 0 or self.high < 0

    def text(self, digits: int = 3) -> str:
        """Formats mean and interval as "0.123 [0.100, 0.150]", or "0.123 [no interval]"."""
        if math.isnan(self.low):
            return f"{self.mean:.{digits}f} [no interval]"
        return f"{self.mean:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


# ------------------------------------------------------------------------------------------------ intervals


def mean_interval(values: Scores, *, same_prompts: bool = True) -> Interval:
    """Returns the mean of ``values`` with a 95 % interval over seeds and prompts.

    Args:
        values: one row per training seed, one column per held-out prompt; all finite. With one row, the interval is
            over prompts only and does not include training noise.
        same_prompts: True if all seeds use the same prompts (see ``MeanSquares.half_width``). If False, a Student's t
            interval over the seed means is used.
    """
    scores = _check_scores(values, "values")
    mean, squares, (seeds, width) = float(scores.mean()), None, scores.shape
    units = scores[0] if len(scores) == 1 else scores.mean(axis=1)
    if scores.size == 1:
        reach = math.nan
    elif 1 in scores.shape or not same_prompts:
        reach = t_quantile(QUANTILE, len(units) - 1) * float(units.std(ddof=1)) / math.sqrt(len(units))
    else:
        squares = MeanSquares.from_scores(scores)
        reach = squares.half_width()
    return Interval(mean, mean - reach, mean + reach, seeds, width, squares)


def smallest_effect(expected: MeanSquares, power: float = 0.8, draws: int = 2000) -> float:
    """Returns the smallest true mean whose interval excludes 0 in a fraction ``power`` of studies.

    Simulates tables with these expected mean squares: a table's mean is independent of its mean squares, which follow
    scaled chi-squared distributions.
    """
    from scipy.special import ndtr

    random, rows, columns = np.random.default_rng(0), expected.seeds - 1, expected.prompts - 1
    means = (expected.seed, expected.prompt, expected.residual)
    freedoms = (rows, columns, rows * columns)
    drawn = (mean / free * random.chisquare(free, draws) for mean, free in zip(means, freedoms, strict=True))
    tables = (MeanSquares(a, b, c, expected.seeds, expected.prompts) for a, b, c in zip(*drawn, strict=True))
    reach = np.array([table.half_width() for table in tables])
    spread = math.sqrt((means[0] + means[1] - means[2]) / (expected.seeds * expected.prompts))
    low, high = 0.0, float(reach.max()) + 5 * spread
    for _ in range(40):
        effect = (low + high) / 2
        detected = ndtr((effect - reach) / spread).mean()
        low, high = (low, effect) if detected >= power else (effect, high)
    return high


def paired_difference(first: Scores, second: Float[np.ndarray, "other_seeds other_prompts"]) -> Interval:
    """Returns the mean of ``first - second``, paired by seed and prompt, with its ``mean_interval``.

    In both arrays, row i belongs to the same seed (base model, data, order) and column j to the same held-out prompt.

    Raises:
        UserError: the shapes differ.
    """
    one, two = _check_scores(first, "first arm"), _check_scores(second, "second arm")
    if one.shape != two.shape:
        raise UserError(
            f"paired difference: both arms must have the same seeds and prompts, got {one.shape[0]} seeds x "
            f"{one.shape[1]} prompts and {two.shape[0]} x {two.shape[1]}; keep only those that both arms have"
        )
    return mean_interval(one - two)


def correct_by_holm(p_values: Sequence[float]) -> list[float]:
    """Corrects p-values for multiple testing by Holm's step-down method."""
    order = sorted(range(len(p_values)), key=lambda place: p_values[place])
    corrected, least = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(order):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = least
    return corrected


def t_quantile(probability: float, freedom: int | float) -> float:
    """Returns a quantile of Student's t; ``freedom`` need not be an integer."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, probability))


# ------------------------------------------------------------------------------------------------ ranks


def tied_ranks(scores: Float[np.ndarray, " methods"]) -> Float[np.ndarray, " methods"]:
    """Returns each score's rank, with 1 for the highest score; tied scores share the mean of their ranks."""
    if scores.ndim != 1 or not np.isfinite(scores).all():
        raise UserError(f"ranks need one row of finite scores, got shape {scores.shape}: {scores.tolist()}")
    above = (scores > scores[:, None]).sum(axis=1)
    return np.asarray(above + ((scores == scores[:, None]).sum(axis=1) + 1) / 2, dtype=np.float64)


def average_ranks(
    scores: Float[np.ndarray, "methods metrics"], higher: Sequence[bool] | None = None
) -> Float[np.ndarray, " methods"]:
    """Returns each method's tied rank averaged over metrics (the AttentionPO paper's Avg Rank; 1 is best).

    ``higher``: whether higher scores are better, for each metric (default: all True).
    """
    if scores.ndim != 2 or 0 in scores.shape:
        raise UserError(f"average ranks need a table of methods x metrics, got shape {scores.shape}")
    directions = [True] * scores.shape[1] if higher is None else higher
    columns = [tied_ranks(column if up else -column) for column, up in zip(scores.T, directions, strict=True)]
    return np.asarray(np.mean(columns, axis=0), dtype=np.float64)


# ------------------------------------------------------------------------------------------------ checks


def _check_scores(values: Scores, name: str) -> Scores:
    scores = np.asarray(values, dtype=np.float64)
    if scores.ndim != 2 or 0 in scores.shape:
        raise UserError(f"{name}: scores must have shape (seeds, prompts), at least 1 x 1, got {scores.shape}")
    bad = int((~np.isfinite(scores)).sum())
    if bad:
        raise UserError(
            f"{name}: {bad} of {scores.size} scores are not finite; exclude these prompts for all arms, or repeat "
            "the runs"
        )
    return scores
