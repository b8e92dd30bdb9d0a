"""Statistics of studies: intervals over seeds and prompts, paired differences, tied ranks.

Pure numpy, no files. Seeds and held-out prompts are the two sources of randomness; arms are compared in pairs with the
same seed and prompt.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from jaxtyping import Float, Int

from attnpo.schema import UserError

Scores = Float[np.ndarray, "seeds prompts"]

LEVEL = 0.95  # nominal coverage of the intervals
_DRAWS_AT_ONCE = 4_000_000  # numbers in one chunk of resamples (32 MB)


class PromptSampling(Enum):
    """Resampling of held-out prompts: one sample shared by all seeds, or a separate one per seed."""

    SHARED = "shared"
    PER_SEED = "per_seed"


@dataclass(frozen=True)
class Interval:
    """Mean with its 95 % interval, and the numbers of seeds and prompts.

    ``low`` and ``high`` are NaN for a single value, which has no interval.
    """

    mean: float
    low: float
    high: float
    seeds: int
    prompts: int

    @property
    def excludes_zero(self) -> bool:
        """Returns whether 0 is outside the interval; False if there is no interval."""
        return self.low > 0 or self.high < 0

    def text(self, digits: int = 3) -> str:
        """Formats mean and interval as "0.123 [0.100, 0.150]", or "0.123 [no interval]"."""
        if math.isnan(self.low):
            return f"{self.mean:.{digits}f} [no interval]"
        return f"{self.mean:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


# ------------------------------------------------------------------------------------------------ bootstrap


def hierarchical_bootstrap(
    values: Scores, *, draws: int = 10_000, seed: int = 0, prompts: PromptSampling = PromptSampling.SHARED
) -> Interval:
    """Returns the mean of ``values`` with a percentile interval from resampling seeds, then prompts.

    The percentiles are widened for small samples (Hesterberg, The American Statistician 69, 2015): a bootstrap over n
    units underestimates their variance by (n - 1) / n and misses heavy tails, so that plain percentiles over 5 seeds
    cover about 83 instead of 95 percent. The effective number of units follows Satterthwaite's rule from the variances
    over seeds and over prompts. If training noise dominates, it is close to the number of seeds (and the widening is
    large); if the choice of prompts dominates, it is close to the number of prompts.

    Args:
        values: one row per training seed, one column per held-out prompt; all finite. With one row, only prompts are
            resampled.
        draws: number of resamples.
        seed: seed of the resampling; equal arguments give equal intervals.
        prompts: SHARED resamples one set of prompts for all seeds, which is correct if all seeds answer the same
            prompts (a prompt's peculiarities do not average out over seeds). PER_SEED resamples prompts for each seed
            separately.

    An interval over S seeds extends beyond the range of the S seed means only because of the noise from prompts. If
    seeds dominate, it cannot cover more than about 94 percent with 5 seeds, or 75 percent with 3.
    """
    scores = _check_scores(values, "values")
    if draws < 1:
        raise UserError(f"the number of bootstrap draws must be at least 1, got {draws}")
    seeds, width = scores.shape
    mean = float(scores.mean())
    if scores.size == 1:
        return Interval(mean, math.nan, math.nan, 1, 1)
    tail = widened_tail(_degrees_of_freedom(scores))
    low, high = np.quantile(_resampled_means(scores, draws, seed, prompts), (tail, 1 - tail))
    return Interval(mean, float(low), float(high), seeds, width)


def paired_difference(first: Scores, second: Float[np.ndarray, "other_seeds other_prompts"]) -> Interval:
    """Returns the mean of ``first - second``, paired by seed and prompt, with a ``hierarchical_bootstrap`` interval.

    In both, row i belongs to the same seed (base model, data, order) and column j to the same held-out prompt.

    Raises:
        UserError: the shapes differ.
    """
    one, two = _check_scores(first, "first arm"), _check_scores(second, "second arm")
    if one.shape != two.shape:
        raise UserError(
            f"paired difference: both arms must have the same seeds and prompts, got {one.shape[0]} seeds x "
            f"{one.shape[1]} prompts and {two.shape[0]} x {two.shape[1]}; keep only seeds and prompts that both have"
        )
    return hierarchical_bootstrap(one - two)


def _resampled_means(scores: Scores, draws: int, seed: int, prompts: PromptSampling) -> Float[np.ndarray, " draws"]:
    """Returns the means of bootstrap resamples, which are represented as counts per seed and per prompt."""
    seeds, width = scores.shape
    if prompts is PromptSampling.SHARED and draws * width <= _DRAWS_AT_ONCE:
        chosen, drawn = _shared_draws(seeds, width, draws, seed)
        return np.asarray(((chosen @ scores) * drawn).sum(axis=1) / (seeds * width), dtype=np.float64)
    random = np.random.default_rng(seed)
    per_draw = width if prompts is PromptSampling.SHARED else seeds * width
    chunk = max(1, _DRAWS_AT_ONCE // per_draw)
    even_seeds, even_prompts = np.full(seeds, 1 / seeds), np.full(width, 1 / width)
    out = []
    for start in range(0, draws, chunk):
        count = min(chunk, draws - start)
        chosen = random.multinomial(seeds, even_seeds, size=count)
        if prompts is PromptSampling.SHARED:
            drawn = random.multinomial(width, even_prompts, size=count)
            sums = ((chosen @ scores) * drawn).sum(axis=1)
        else:
            nested = random.multinomial(chosen * width, even_prompts)  # a seed drawn twice draws its prompts twice
            sums = np.einsum("bsp,sp->b", nested, scores, optimize=True)
        out.append(sums / (seeds * width))
    return np.concatenate(out)


@lru_cache(maxsize=4)
def _shared_draws(
    seeds: int, width: int, draws: int, seed: int
) -> tuple[Int[np.ndarray, "draws seeds"], Int[np.ndarray, "draws width"]]:
    """Returns seed and prompt counts of ``draws`` resamples; independent of the scores, so a study can reuse them."""
    random = np.random.default_rng(seed)
    chosen = random.multinomial(seeds, np.full(seeds, 1 / seeds), size=draws)
    return chosen, random.multinomial(width, np.full(width, 1 / width), size=draws)


def _degrees_of_freedom(scores: Scores) -> int:
    """Returns Satterthwaite's degrees of freedom of the grand mean, rounded down but at least 1."""
    parts = [
        (float(means.var(ddof=1)) / len(means), len(means) - 1)
        for means in (scores.mean(axis=1), scores.mean(axis=0))
        if len(means) > 1
    ]
    total = sum(part for part, _ in parts)
    if total == 0:
        return max(freedom for _, freedom in parts)
    return max(1, math.floor(1 / sum((part / total) ** 2 / freedom for part, freedom in parts) + 1e-9))


def widened_tail(freedom: int) -> float:
    """Returns the tail probability that makes a percentile interval over few units as wide as a t interval."""
    reach = math.sqrt((freedom + 1) / freedom) * t_quantile((1 + LEVEL) / 2, freedom)
    return NormalDist().cdf(-reach)


def t_quantile(probability: float, freedom: int) -> float:
    """Returns a quantile of Student's t with an integer number of degrees of freedom, accurate to about 1e-12.

    Uses bisection on the angle atan(t / sqrt(freedom)), because the distribution function is a finite sum of powers of
    the angle's sine and cosine (Abramowitz and Stegun 26.7.3 and 26.7.4).
    """
    if not 0 < probability < 1:
        raise UserError(f"quantile: expected a probability between 0 and 1, got {probability}")
    if freedom < 1:
        raise UserError(f"Student's t: expected at least 1 degree of freedom, got {freedom}")
    if probability < 0.5:
        return -t_quantile(1 - probability, freedom)
    low, high = 0.0, math.pi / 2
    factors = _t_series_coefficients(freedom)
    for _ in range(60):
        middle = (low + high) / 2
        if 0.5 + 0.5 * _central_t_probability(middle, freedom, factors) < probability:
            low = middle
        else:
            high = middle
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def _t_series_coefficients(freedom: int) -> Float[np.ndarray, " terms"]:
    """Returns coefficients of the cosine's even powers: 1, 2/3, 2*4/(3*5)... (odd) or 1, 1/2, 1*3/(2*4)... (even)."""
    terms = freedom // 2
    step = np.arange(1, terms, dtype=np.float64)
    ratios = (2 * step) / (2 * step + 1) if freedom % 2 else (2 * step - 1) / (2 * step)
    return np.concatenate([np.ones(min(terms, 1)), np.cumprod(ratios)])


def _central_t_probability(angle: float, freedom: int, factors: Float[np.ndarray, " terms"]) -> float:
    """Returns the probability that |t| stays below sqrt(freedom) * tan(angle)."""
    cosine = math.cos(angle)
    series = float(factors @ cosine ** (2.0 * np.arange(len(factors)))) * math.sin(angle)
    if freedom % 2 == 0:
        return series
    return (2 / math.pi) * (angle + series * cosine)


# ------------------------------------------------------------------------------------------------ ranks


def tied_ranks(scores: Float[np.ndarray, " methods"]) -> Float[np.ndarray, " methods"]:
    """Returns the rank of each score, with 1 for the highest; equal scores share the mean of their ranks."""
    if scores.ndim != 1 or not np.isfinite(scores).all():
        raise UserError(f"ranks need one row of finite scores, got shape {scores.shape}: {scores.tolist()}")
    above = (scores > scores[:, None]).sum(axis=1)
    return np.asarray(above + ((scores == scores[:, None]).sum(axis=1) + 1) / 2, dtype=np.float64)


def average_ranks(
    scores: Float[np.ndarray, "methods metrics"], higher: Sequence[bool] | None = None
) -> Float[np.ndarray, " methods"]:
    """Returns each method's tied rank averaged over metrics (the paper's Avg Rank, best = 1).

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
            f"{name}: {bad} of {scores.size} scores are not finite; leave these prompts out for all arms, or repeat "
            "the runs"
        )
    return scores
