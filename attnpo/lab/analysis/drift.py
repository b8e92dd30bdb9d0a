"""Where a trained policy moved from its base: KL by class of token, by weight and by place, and what became of answers.

Arithmetic alone: the numbers of each response come from ``lab.drift``. Classes by weight mean something else in every
arm; to compare arms, look at the decisive tokens, which are the same for all.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from attnpo.lab.analysis.freedom import DECILES, Freedom, freedom
from attnpo.schema import Json

Row = Float[np.ndarray, "_"]  # the tokens of one response
Flags = Bool[np.ndarray, "_"]

END, NO_WEIGHT, BELOW, WEIGHTED, OTHER = "end_of_turn", "no_weight", "below_uniform", "weighted", "other"
DECISIVE = "decisive"
ROUNDING = 1e-6  # |y| w of uniform weights is 1 up to rounding
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


@dataclass(frozen=True)
class Moved:
    """One response: how far the policy moved at each of its tokens.

    ``kl``: KL(policy || base) over the whole vocabulary, in nats. ``gain``: log-probability of the response under the
    policy minus that under the base, in nats. ``ends``: the tokens of the end of the turn. ``weights``: relative to
    uniform (|y| w), None where they are not known. ``decisive``: the tokens that decide the true reward, None where it
    is not known.
    """

    kl: Row
    gain: float
    ends: Flags
    weights: Row | None = None
    decisive: Flags | None = None


def by_token(responses: Sequence[Moved]) -> dict[str, Json]:
    """Returns the KL of the responses by class of token, by decile of weight and by tenth of the response.

    Deciles are left out where all weights are equal, classes by weight where a response has none.
    """
    kl, ends = (np.concatenate([getattr(one, name) for one in responses]) for name in ("kl", "ends"))
    weights = [one.weights for one in responses if one.weights is not None]
    flags = [one.decisive for one in responses if one.decisive is not None]
    places = [(np.arange(len(one.kl)) + 0.5) / max(1, len(one.kl)) for one in responses]
    rows = [one.kl for one in responses]
    out: dict[str, Json] = {
        "responses": len(responses),
        "tokens": int(kl.size),
        "kl": _over(float(kl.sum()), float(len(rows))),
    }
    known = len(weights) == len(responses)
    classes = weight_classes(np.concatenate(weights), ends) if known else {END: ends, OTHER: ~ends}
    out["classes"] = shares(kl, classes)
    if len(flags) == len(responses):
        decisive = np.concatenate(flags)
        out["truth"] = shares(kl, {DECISIVE: decisive, OTHER: ~decisive})
    if kl.size < DECILES:
        return out
    if known and np.ptp(np.concatenate(weights)) > ROUNDING:
        # The weights go in as a second "policy", whose means over each decile are what is wanted of them.
        groups = freedom(weights, {"kl": rows, "weight": weights}, draws=1)
        out["deciles"] = {"weight": _means(groups, "weight"), "kl": _means(groups, "kl")}
    out["position"] = {"kl": _means(freedom(places, {"kl": rows}, draws=1), "kl")}
    return out


def weight_classes(weights: Row, ends: Flags) -> dict[str, Flags]:
    """Returns which tokens belong to which class; every token to one.

    The end of the turn; of all others those without a weight (no partner on the judge's side, or nothing was said), of
    less than a uniform weight, and of as much or more.
    """
    low = weights < 1 - ROUNDING
    none = np.abs(weights) <= ROUNDING
    return {END: ends, NO_WEIGHT: ~ends & none, BELOW: ~ends & low & ~none, WEIGHTED: ~ends & ~low & ~none}


def shares(kl: Row, classes: Mapping[str, Flags]) -> dict[str, Json]:
    """Of each class its share of the tokens and of the KL, and its KL per token; None where that is not defined."""
    every, total = float(kl.size), float(kl.sum())
    counts = {name: (float(flags.sum()), float(kl[flags].sum())) for name, flags in classes.items()}
    return {
        name: {"tokens": _over(tokens, every), "kl": _over(moved, total), "kl_per_token": _over(moved, tokens)}
        for name, (tokens, moved) in counts.items()
    }


def ranking_accuracy(chosen: Sequence[Moved], rejected: Sequence[Moved]) -> float | None:
    """Returns the share of pairs whose chosen response gained more than the rejected one; ties count one half. None for
    none.

    Sums of log-ratios without weights: what DPO calls the accuracy of its rewards.
    """
    if not chosen:
        return None
    ahead = [one.gain - other.gain for one, other in zip(chosen, rejected, strict=True)]
    return _rounded(float(np.mean([0.5 + 0.5 * np.sign(gap) for gap in ahead])))


def mean_gain(responses: Sequence[Moved]) -> float | None:
    """Returns the mean change of log-probability per response, in nats; None for no response."""
    return _rounded(float(np.mean([one.gain for one in responses]))) if responses else None


def quantiles(values: Row) -> dict[str, Json]:
    """Returns the median, the 90th and the 99th percentile and the largest of ``values``; empty for none."""
    if not values.size:
        return {}
    return {name: _rounded(float(np.quantile(values, level))) for name, level in QUANTILES.items()}


def _means(groups: Freedom, name: str) -> dict[str, Json]:
    """Returns the mean per group by its number."""
    return {str(one.number): _rounded(one.kl[name].mean) for one in groups.deciles}


def _over(top: float, under: float) -> float | None:
    return _rounded(top / under) if under > 0 else None


def _rounded(value: float) -> float | None:
    """Returns a number as result.json holds it; None for one that is not finite."""
    return round(value, 6) if math.isfinite(value) else None
