"""Rank correlations of numbers known before training with the gain, and predictions across worlds.

``cases`` is a frame with one row per training run: ``world``, ``seed``, ``group`` (alternatives among which a user
would choose, such as the layers of one judge), ``gain``, and one column per number, NaN if unknown. Cases of one world
share data and judge, and cases of one seed are related across worlds, so both are resampled as a whole. Predictions
leave out whole worlds.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import pandas
from jaxtyping import Bool, Float, Int

from attnpo.evaluation.intervals import LEVEL, Interval, t_quantile, tied_ranks

DRAWS = 2000
WORLDS_TO_FIT = 3  # minimum for leaving one out: a line through a single world says nothing about worlds

Rows = Int[np.ndarray, "_"]


@dataclass(frozen=True)
class HeldOut:
    """Quality of predictions of every world from the others.

    ``right``: share of gains with the right sign. ``majority``: the same share with one sign for all cases.
    ``correlation``: Spearman's, between predicted and measured gains.
    """

    right: float
    majority: float
    correlation: float

    @property
    def beats_majority(self) -> bool:
        """Returns whether the predicted signs are right more often than one sign for all."""
        return self.right > self.majority


def cases_with_numbers(cases: pandas.DataFrame, *names: str) -> pandas.DataFrame:
    """Returns the cases in which all the named numbers are known."""
    return cases[np.isfinite(cases[[*names]]).all(axis=1)]


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Returns Spearman's correlation of the pairs finite in both; NaN for fewer than three, or if one is constant."""
    both = [pair for pair in zip(first, second, strict=True) if all(map(math.isfinite, pair))]
    if len(both) < 3:
        return math.nan
    one, two = (tied_ranks(np.array(column, dtype=float)) for column in zip(*both, strict=True))
    if one.std() == 0 or two.std() == 0:
        return math.nan
    return float(np.corrcoef(one, two)[0, 1])


def correlation_over_worlds(cases: pandas.DataFrame, name: str) -> Interval:
    """Returns Spearman's correlation of a number with the gain over all cases; see ``cluster_bootstrap``."""
    cases = cases_with_numbers(cases, name)
    values, gains = cases[name].to_numpy(float), cases["gain"].to_numpy(float)
    return cluster_bootstrap(
        _rows_by_world(cases), lambda rows: rank_correlation(values[rows].tolist(), gains[rows].tolist())
    )


def correlation_within_groups(cases: pandas.DataFrame, name: str) -> Interval:
    """Returns the mean over groups of Spearman's correlation within each; skips groups where it is undefined."""
    groups = cases_with_numbers(cases, name).groupby("group", sort=False)
    found = [rank_correlation(one[name].tolist(), one["gain"].tolist()) for _, one in groups]
    first = groups.head(1).assign(within=found).dropna(subset="within")
    means = first["within"].to_numpy(float)
    return cluster_bootstrap(_rows_by_world(first), lambda rows: float(means[rows].mean()) if len(rows) else math.nan)


def widened_tail(freedom: int) -> float:
    """Returns the tail probability that makes a percentile interval over few units as wide as a t interval.

    Resampling n units underestimates their variance by (n - 1) / n (Hesterberg, The American Statistician 69, 2015).
    """
    reach = math.sqrt((freedom + 1) / freedom) * t_quantile((1 + LEVEL) / 2, freedom)
    return NormalDist().cdf(-reach)


def cluster_bootstrap(nested: Sequence[Mapping[int, Rows]], statistic: Callable[[Rows], float]) -> Interval:
    """Computes ``statistic`` with a percentile interval from resampling worlds, and seeds jointly for all worlds.

    ``nested``: row numbers by world and seed, which stay together. In the result, ``seeds`` counts the world-seeds and
    ``prompts`` the rows. The percentiles are widened for few worlds. A resample with an undefined (NaN) statistic
    counts as 0.
    """
    seeds = [rows for world in nested for rows in world.values()]
    every = np.concatenate(seeds) if seeds else np.array([], dtype=int)
    value, counts = statistic(every), (len(seeds), len(every))
    if len(nested) < 2 or math.isnan(value):
        return Interval(value, math.nan, math.nan, *counts)
    random = np.random.default_rng(0)
    known = sorted({seed for world in nested for seed in world})
    values = []
    for _ in range(DRAWS):
        worlds = [nested[place] for place in random.integers(len(nested), size=len(nested))]
        drawn = [known[place] for place in random.integers(len(known), size=len(known))]
        rows = [world[seed] for world in worlds for seed in drawn if seed in world]
        values.append(statistic(np.concatenate(rows)) if rows else math.nan)
    tail = widened_tail(len(nested) - 1)
    low, high = np.quantile(np.nan_to_num(values), (tail, 1 - tail))
    return Interval(value, float(low), float(high), *counts)


def _rows_by_world(cases: pandas.DataFrame) -> list[dict[int, Rows]]:
    """Returns the row numbers of the cases by world, then seed."""
    worlds = cases.reset_index(drop=True).groupby("world", sort=False)
    return [{int(seed): rows.index.to_numpy() for seed, rows in world.groupby("seed")} for _, world in worlds]


def predict_held_out(cases: pandas.DataFrame, *names: str) -> HeldOut | None:
    """Predicts every world from the others, by a least-squares line in the ranks of the named numbers.

    Returns None if fewer than three worlds have the numbers, or if one of them is constant.
    """
    cases = cases_with_numbers(cases, *names)
    worlds, gains = cases["world"].to_numpy(), cases["gain"].to_numpy(float)
    columns = [cases[name].to_numpy(float) for name in names]
    if len(set(worlds)) < WORLDS_TO_FIT or any(np.ptp(column) == 0 for column in columns):
        return None
    ranks, signs = np.zeros(len(cases)), np.zeros(len(cases), dtype=bool)
    for world in dict.fromkeys(worlds):
        out = worlds == world
        ranks[out], signs[out] = _predict(columns, gains, out)
    positive = gains > 0
    right, above, below = (float(what.mean()) for what in (signs == positive, positive, ~positive))
    return HeldOut(right, max(above, below), rank_correlation(ranks.tolist(), gains.tolist()))


def _predict(
    columns: Sequence[Float[np.ndarray, " cases"]], gains: Float[np.ndarray, " cases"], out: Bool[np.ndarray, " cases"]
) -> tuple[Float[np.ndarray, " held"], Bool[np.ndarray, " held"]]:
    """Returns the predicted ranks (0 to 1) of the gains left ``out``, and whether each predicted gain is above 0.

    Ranks are relative to the other cases, so that they are comparable whatever is left out.
    """
    others = gains[~out]
    known, asked = (
        np.stack([np.ones(int(here.sum())), *(_midranks(one[~out], one[here]) - 0.5 for one in columns)], axis=1)
        for here in (~out, out)
    )  # centred, so that a number that is constant in the others has no slope
    line, *_ = np.linalg.lstsq(known, _midranks(others, others), rcond=None)
    ranks = np.round(asked @ line, 9)  # keeps ties: predictions that differ only by rounding stay equal
    ordered = np.sort(others)
    return ranks, np.interp(ranks, _midranks(others, ordered), ordered) > 0


def _midranks(
    reference: Float[np.ndarray, " others"], values: Float[np.ndarray, " held"]
) -> Float[np.ndarray, " held"]:
    """Returns the share of ``reference`` below each value; ties count one half."""
    ordered = np.sort(reference)
    ends = np.searchsorted(ordered, values, "left") + np.searchsorted(ordered, values, "right")
    return np.asarray(ends / (2 * len(ordered)), dtype=float)
