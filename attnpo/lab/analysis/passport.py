"""What a judge's verdicts on labelled pairs say of it, and whether its attention is worth reading.

Margins are log-odds in nats of the chosen answer's label over the rejected one's: a row per pair, the first column with
the chosen answer shown first, the second with it shown second. A verdict of a pair is the mean of its two margins.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from jaxtyping import Float

from attnpo.evaluation.intervals import t_quantile
from attnpo.judge.verdicts import (
    ENOUGH,
    JudgeStatistics,
    Standing,
    accuracy_in_words,
    is_silent,
    judge_standing,
    margin_of,
    wilson,
    with_verdicts,
)
from attnpo.schema import PairWeights, UserError

Margins = Float[np.ndarray, "pairs 2"]
LEVEL = 0.95
IDEAL_DRAWS = 500  # of the outcomes of a perfectly calibrated judge: the mean over them is good to a few percent


@dataclass(frozen=True)
class Estimate:
    """A number with its interval and the units it stands on; NaN at both ends where nothing gives an interval."""

    value: float
    low: float
    high: float
    count: int


@dataclass(frozen=True)
class Bin:
    """Pairs whose verdict is as sure as ``low`` to ``high``: their mean confidence, and the share that is right."""

    low: float
    high: float
    confidence: float
    accuracy: Estimate


@dataclass(frozen=True)
class Calibration:
    """Whether the judge is right as often as it is sure.

    ``bins``: those that hold pairs. ``error``: the expected calibration error, the mean over pairs of the distance of
    their bin's accuracy from its confidence (Guo et al. 2017, section 2). ``ideal``: what a judge of the same
    confidences that is perfectly calibrated shows on as many pairs, which is above 0 by chance alone. ``excess``: mean
    confidence minus accuracy; above 0 the judge is too sure.
    """

    bins: tuple[Bin, ...]
    error: float
    ideal: float
    excess: float


@dataclass(frozen=True)
class Accuracy:
    """Shares of verdicts that pick the chosen answer (a tie counts as half), and what place the judge is drawn to.

    ``first_picked``: verdicts that pick the answer shown first; one half for a judge without a liking for a place.
    ``pull``: the mean log-odds of the first answer over both orders, in nats. ``agree``: pairs whose orders pick the
    same answer.
    """

    chosen_first: Estimate
    chosen_second: Estimate
    averaged: Estimate
    first_picked: Estimate
    pull: Estimate
    agree: Estimate


def margins(captured: Sequence[PairWeights]) -> Margins:
    """Returns the margins of the pairs with a verdict in each of two orders."""
    rows = [
        [margin_of(item) for item in sorted(pair.rounds, key=lambda item: not item.chosen_is_a)]
        for pair in with_verdicts(captured)
        if [item.chosen_is_a for item in pair.rounds].count(True) == 1 and len(pair.rounds) == 2
    ]
    return np.array(rows, dtype=np.float64).reshape(-1, 2)


def share(values: Float[np.ndarray, " cases"]) -> Estimate:
    """Returns the mean of values from 0 to 1 with Wilson's 95 % interval."""
    if not values.size:
        return Estimate(math.nan, math.nan, math.nan, 0)
    value = float(values.mean())
    return Estimate(value, *wilson(value, values.size), values.size)


def mean(values: Float[np.ndarray, " cases"], level: float = LEVEL) -> Estimate:
    """Returns the mean of any values with Student's t interval; without one for fewer than two values."""
    if values.size < 2:
        return Estimate(float(values.mean()) if values.size else math.nan, math.nan, math.nan, values.size)
    value, error = float(values.mean()), float(values.std(ddof=1)) / math.sqrt(values.size)
    reach = t_quantile((1 + level) / 2, values.size - 1) * error
    return Estimate(value, value - reach, value + reach, values.size)


def won(values: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    """1 for a margin above 0, 0 below, one half for a tie."""
    return np.asarray((np.sign(values) + 1) / 2)


def accuracy(found: Margins) -> Accuracy:
    """Accuracy by order and over both, and position bias; intervals are over pairs."""
    picked = won(found)
    towards_first = (picked[:, 0] + 1 - picked[:, 1]) / 2
    same = (found[:, 0] * found[:, 1] > 0).astype(np.float64)
    return Accuracy(
        chosen_first=share(picked[:, 0]),
        chosen_second=share(picked[:, 1]),
        averaged=share(won(found.mean(axis=1))),
        first_picked=mean(towards_first),
        pull=mean((found[:, 0] - found[:, 1]) / 2),
        agree=share(same),
    )


def calibration(found: Margins, bins: int = 10, seed: int = 0) -> Calibration:
    """Confidence of the averaged verdicts against accuracy, in ``bins`` equal bins from one half to 1.

    Confidence is the probability that the logits give to the answer they pick, of the two labels alone. ``seed`` draws
    the outcomes of the perfectly calibrated judge. UserError for fewer than one bin, or no pair.
    """
    if bins < 1:
        raise UserError(f"calibration: expected at least 1 bin, got {bins}")
    if not len(found):
        raise UserError("calibration: expected at least one pair with verdicts, got none")
    verdict = found.mean(axis=1)
    sure = 1 / (1 + np.exp(-np.abs(verdict)))
    right = won(verdict)
    place = np.minimum(((sure - 0.5) * 2 * bins).astype(int), bins - 1)
    drawn = np.random.default_rng(seed).random((IDEAL_DRAWS, len(sure))) < sure
    error, ideal, shown = 0.0, 0.0, []
    for number in range(bins):
        inside = place == number
        if not inside.any():
            continue
        confidence, part = float(sure[inside].mean()), inside.mean()
        shown.append(Bin(0.5 + number / (2 * bins), 0.5 + (number + 1) / (2 * bins), confidence, share(right[inside])))
        error += part * abs(float(right[inside].mean()) - confidence)
        ideal += part * float(np.abs(drawn[:, inside].mean(axis=1) - confidence).mean())
    return Calibration(tuple(shown), float(error), float(ideal), float(sure.mean() - right.mean()))


# ------------------------------------------------------------------------------------------------ verdict


class Worth(Enum):
    """The answer to the passport's question."""

    READING = "worth reading"
    CHANCE = "at chance"
    DOUBTFUL = "doubtful"


RULE = (
    "worth reading: the 95 % interval (Wilson) of the accuracy over both orders lies above one half, at most half of "
    "the verdicts name no label, and in at least one layer the verdict falls more without the top-weighted tokens than "
    "without random ones of the same places (95 % interval over all layers together above 0). At chance: the interval "
    "of the accuracy holds one half. Doubtful: anything else"
)


@dataclass(frozen=True)
class Judgement:
    """The verdict on a judge, why, and what to do next, in words."""

    worth: Worth
    reasons: tuple[str, ...]
    advice: tuple[str, ...]


def layer_level(layers: int) -> float:
    """Returns the level of each layer's interval at which all of them together hold at 95 % (Bonferroni)."""
    return 1 - (1 - LEVEL) / max(1, layers)


def judge_the_judge(verdicts: JudgeStatistics, gains: Mapping[int, Estimate], left: int = 0) -> Judgement:
    """Returns the verdict by ``RULE``.

    ``gains``: by layer how much more the verdict falls without top-weighted than without random tokens, at
    ``layer_level``; empty where that was not measured, which is said and does not count against the judge. ``left``:
    labelled pairs that are not in the sample.
    """
    standing, silent = judge_standing(verdicts), is_silent(verdicts)
    reasons, advice = [accuracy_in_words(verdicts)], []
    advice += _STANDING_ADVICE.get(standing, [])
    if standing in (Standing.CHANCE, Standing.FEW) and left:
        advice.append(f"judge more pairs: {left} are left (passport.pairs)")
    if silent:
        reasons.append(f"{100 * verdicts.other_tokens:.0f} % of its verdicts name no label")
        advice.append(
            "try another wording or labels (judge=..., judge.template_file, judge.labels): it does not answer as it is "
            "asked to"
        )
    tied = [layer for layer, gain in gains.items() if gain.low > 0]
    if gains:
        reasons.append(_layers_in_words(tied, gains))
    else:
        reasons.append("whether its verdict hangs on what it looks at was not measured (passport.removal_pairs=0)")
    if standing is Standing.CHANCE:
        worth = Worth.CHANCE
    elif standing is Standing.ABOVE and not silent and (tied or not gains):
        worth = Worth.READING
        advice.append(_reading_advice(gains, tied))
    else:
        worth = Worth.DOUBTFUL
        if standing is Standing.ABOVE and gains and not tied:
            advice.append(
                "more pairs may show a layer that counts (passport.removal_pairs); until then compare with "
                "transform=shuffled, or take weights=uniform"
            )
    return Judgement(worth, tuple(reasons), tuple(advice))


_STANDING_ADVICE = {
    Standing.CHANCE: [
        "take another judge or wording (judge=..., other_judge.path with judge=other); until one is above chance, "
        "train with weights=uniform",
    ],
    Standing.BELOW: ["check which column of the data holds the preferred answer, and judge.labels"],
    Standing.FEW: [f"give at least {ENOUGH} labelled pairs"],
}


def _layers_in_words(tied: Sequence[int], gains: Mapping[int, Estimate]) -> str:
    if not tied:
        return (
            f"in none of {len(gains)} layers does its verdict hang on the top-weighted tokens more than on random ones"
        )
    return (
        f"its verdict hangs on the top-weighted tokens more than on random ones in {len(tied)} of {len(gains)} layers "
        f"({', '.join(map(str, tied))})"
    )


def _reading_advice(gains: Mapping[int, Estimate], tied: Sequence[int]) -> str:
    compare = "train beside weights=uniform and transform=shuffled, since a good judge does not promise a gain"
    if not tied:
        return compare
    best = max(tied, key=lambda layer: (gains[layer].value, layer))
    return f"begin with weights.layer={best}, whose top-weighted tokens the verdict hangs on most; {compare}"
