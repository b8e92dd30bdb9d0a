"""Where a trained policy moved from its base: KL by class of token, by weight and by place, and what became of answers.

Arithmetic alone: the numbers of each response come from ``lab.drift``. Classes by weight mean something else in every
arm; to compare arms, look at the decisive tokens, which are the same for all.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from attnpo.schema import Json

Row = Float[np.ndarray, "_"]  # the tokens of one response
Flags = Bool[np.ndarray, "_"]

END, NO_WEIGHT, BELOW, WEIGHTED, OTHER = "end_of_turn", "no_weight", "below_uniform", "weighted", "other"
DECISIVE = "decisive"
DECILES = 10
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
    rows = [one.weights for one in responses if one.weights is not None]
    flags = [one.decisive for one in responses if one.decisive is not None]
    places = [(np.arange(len(one.kl)) + 0.5) / max(1, len(one.kl)) for one in responses]
    out: dict[str, Json] = {
        "responses": len(responses),
        "tokens": int(kl.size),
        "kl": _over(float(kl.sum()), float(len(responses))),
    }
    weights = np.concatenate(rows) if len(rows) == len(responses) else None
    out["classes"] = shares(kl, {END: ends, OTHER: ~ends} if weights is None else weight_classes(weights, ends))
    if len(flags) == len(responses):
        decisive = np.concatenate(flags)
        out["truth"] = shares(kl, {DECISIVE: decisive, OTHER: ~decisive})
    if kl.size < DECILES:
        return out
    if weights is not None and np.ptp(weights) > ROUNDING:
        out["deciles"] = dict(decile_means(weights, {"weight": weights, "kl": kl}))
    out["position"] = dict(decile_means(np.concatenate(places), {"kl": kl}))
    return out


def decile_means(order: Row, values: Mapping[str, Row]) -> dict[str, dict[str, Json]]:
    """Returns the means of ``values`` over tenths of the tokens by rising ``order``, by the tenth's number.

    Tokens of equal ``order`` are split between tenths by chance.
    """
    tokens = np.lexsort((np.random.default_rng(0).random(order.size), order))
    groups = np.split(tokens, [-(-number * order.size // DECILES) for number in range(1, DECILES)])
    return {
        name: {str(number): _rounded(float(row[group].mean())) for number, group in enumerate(groups, start=1)}
        for name, row in values.items()
    }


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


def _over(top: float, under: float) -> float | None:
    return _rounded(top / under) if under > 0 else None


def _rounded(value: float) -> float | None:
    """Returns a number as result.json holds it; None for one that is not finite."""
    return round(value, 6) if math.isfinite(value) else None
