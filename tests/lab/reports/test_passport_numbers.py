"""A judge's accuracy, bias, calibration and the verdict on it, worked out by hand."""

import math

import numpy as np
import pytest
import torch

from attnpo.judge.verdicts import JudgeStatistics, judge_statistics, judge_summary_lines, wilson_interval
from attnpo.lab.reports.passport import (
    CHANCE,
    DOUBTFUL,
    READING,
    Estimate,
    assess_judge,
    bonferroni_level,
    estimate_mean,
    estimate_proportion,
    measure_calibration,
    verdict_accuracy,
    verdict_margins,
)
from attnpo.schema import JudgeRound, PairWeights, TokenWeights, UserError

A, B = 5, 6
EMPTY = TokenWeights(torch.zeros(0, dtype=torch.long), torch.zeros(0, 2, dtype=torch.long), torch.zeros(1, 0))
# Margins with the chosen answer first, and second: right twice; right on average, drawn to the first answer by 3;
# wrong twice; a tie.
FOUND = np.array([[1.0, 3.0], [4.0, -2.0], [-1.0, -2.0], [1.0, -1.0]])


def pair(name: str, first: float, second: float) -> PairWeights:
    """Margins as logits of the labels (A, B), the round with the chosen answer second coming first."""
    return PairWeights(name, (
        JudgeRound(False, EMPTY, EMPTY, torch.tensor([0.0, second]), A),
        JudgeRound(True, EMPTY, EMPTY, torch.tensor([first, 0.0]), B),
    ))  # fmt: skip


def stats(accuracy: float, pairs: int, other: float = 0.0) -> JudgeStatistics:
    return JudgeStatistics(accuracy, accuracy, 0.5, other, pairs, accuracy, accuracy, 0.5)


def test_margins_are_ordered_by_the_chosen_answers_place() -> None:
    silent = PairWeights("silent", (JudgeRound(True, EMPTY, EMPTY), JudgeRound(False, EMPTY, EMPTY)))
    captured = [*(pair(str(row), *row) for row in FOUND.tolist()), silent, PairWeights("unreadable", ())]
    assert verdict_margins(captured).tolist() == FOUND.tolist()
    assert verdict_margins([silent]).shape == (0, 2)


def test_accuracy_and_bias_by_hand() -> None:
    found = verdict_accuracy(FOUND)
    assert found["chosen_first"].value == 3 / 4 and found["chosen_second"].value == 1 / 4
    assert found["averaged"].value == 2.5 / 4  # means 2, 1, -1.5 and 0, which is half
    assert (found["averaged"].low, found["averaged"].high) == wilson_interval(2.5 / 4, 4)
    # The first answer is picked in 1, 2, 1 and 2 of the two verdicts of each pair.
    assert found["first_picked"].value == 0.75
    assert found["pull"].value == pytest.approx((-1 + 3 + 0.5 + 1) / 4)  # half the difference of the margins
    assert found["agree"].value == 2 / 4 and found["agree"].count == 4


def test_fits_lines_and_the_passport_say_the_same_numbers() -> None:
    captured = [pair(str(row), *row) for row in FOUND.tolist()]
    statistics, found = judge_statistics(captured, (A, B)), verdict_accuracy(FOUND)
    assert statistics.chosen_first == found["chosen_first"].value
    assert statistics.chosen_second == found["chosen_second"].value
    assert statistics.first_picked == found["first_picked"].value
    assert statistics.pair_accuracy == found["averaged"].value
    assert statistics.consistency == found["agree"].value
    assert judge_summary_lines(statistics) == (
        "judge too few pairs to say: right in 62.5 % of 4 pairs, averaged over both orders; 75.0 % if the chosen "
        "answer comes first, 25.0 % if it comes second",
        "judge picks the first answer in 75.0 % of its verdicts; the two orders agree in 50.0 % of the pairs; "
        "0.0 % of verdicts are neither label",
    )


def test_the_first_line_has_the_interval() -> None:
    assert judge_summary_lines(stats(0.75, 400))[0].startswith(
        "judge above chance: right in 75.0 % of 400 pairs, averaged over both orders (95 % interval 70.5 to 79.0);"
    )


def test_the_mean_has_students_interval() -> None:
    found = estimate_mean(np.array([1.0, 2.0, 3.0]))
    reach = 4.302653 / math.sqrt(3)  # 97.5 % of t with 2 degrees, the deviation is 1
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 2 - reach, 2 + reach), abs=1e-5)
    assert math.isnan(estimate_mean(np.array([1.0])).low) and math.isnan(estimate_proportion(np.array([])).value)


# ------------------------------------------------------------------------------------------------ calibration


def logit(probability: float) -> float:
    return math.log(probability / (1 - probability))


def test_calibration_by_hand() -> None:
    """Ten bins of a twentieth: four pairs at 0.62, of which three are right, and two at 0.98, of which one is."""
    sure, nearly = logit(0.98), logit(0.62)
    verdicts = [nearly, nearly, nearly, -nearly, sure, -sure]
    found = measure_calibration(np.array([[value + 1, value - 1] for value in verdicts]))
    low, high = found["bins"]
    assert (low["low"], low["high"]) == pytest.approx((0.6, 0.65))
    assert (high["low"], high["high"]) == pytest.approx((0.95, 1.0))
    right, other = low["accuracy"], high["accuracy"]
    assert (low["confidence"], right.value, right.count) == pytest.approx((0.62, 0.75, 4))
    assert (high["confidence"], other.value, other.count) == pytest.approx((0.98, 0.5, 2))
    assert (right.low, right.high) == wilson_interval(0.75, 4)
    assert found["error"] == pytest.approx((4 * 0.13 + 2 * 0.48) / 6)
    assert found["excess"] == pytest.approx((4 * 0.62 + 2 * 0.98) / 6 - 4 / 6)


def test_a_perfect_judge_shows_what_chance_leaves() -> None:
    """One pair at confidence 0.7: it is right, 0.3 away, in 70 %, and 0.7 away else; the mean distance is 0.42."""
    assert measure_calibration(np.array([[logit(0.7)] * 2]))["ideal"] == pytest.approx(0.42, abs=0.03)
    random = np.random.default_rng(3)
    confidence = random.uniform(0.5, 1, 4000)
    verdict = np.where(random.random(4000) < confidence, 1, -1) * np.log(confidence / (1 - confidence))
    found = measure_calibration(np.stack([verdict, verdict], axis=1))
    assert found["error"] < 0.03 and found["error"] == pytest.approx(found["ideal"], abs=0.01)
    assert len(found["bins"]) == 10 and sum(one["accuracy"].count for one in found["bins"]) == 4000


def test_even_and_certain_verdicts_have_a_bin() -> None:
    found = measure_calibration(np.array([[0.0, 0.0], [90.0, 90.0]]), bins=2)
    assert [(one["confidence"], one["accuracy"].value) for one in found["bins"]] == [(0.5, 0.5), (1.0, 1.0)]
    assert found["error"] == 0.0


def test_calibration_refuses_no_bins_and_no_pairs() -> None:
    with pytest.raises(UserError, match="at least 1 bin, got 0"):
        measure_calibration(FOUND, bins=0)
    with pytest.raises(UserError, match="at least one pair"):
        measure_calibration(np.zeros((0, 2)))


# ------------------------------------------------------------------------------------------------ verdict

HANGS, NOT = Estimate(0.5, 0.1, 0.9, 64), Estimate(0.1, -0.1, 0.3, 64)


@pytest.mark.parametrize(
    ("statistics", "gains", "worth", "reason"),
    [
        (stats(0.75, 256), {1: NOT, 2: HANGS}, READING, "in 1 of 2 layers (2)"),
        (stats(0.75, 256), {}, READING, "was not measured"),
        (stats(0.75, 256), {1: NOT}, DOUBTFUL, "in none of the 1 layers"),
        (stats(0.75, 256, other=0.6), {1: HANGS}, DOUBTFUL, "60 % of its verdicts name no label"),
        (stats(0.25, 256), {1: HANGS}, DOUBTFUL, "below chance: right in 25.0 %"),
        (stats(0.9, 19), {1: HANGS}, DOUBTFUL, "too few pairs to say: right in 90.0 %"),
        (stats(0.55, 256), {1: HANGS}, CHANCE, "at chance: right in 55.0 %"),
        (stats(0.5, 256, other=1.0), {1: NOT}, CHANCE, "100 % of its verdicts name no label"),
    ],
)
def test_the_rule(statistics: JudgeStatistics, gains: dict[int, Estimate], worth: str, reason: str) -> None:
    found = assess_judge(statistics, gains)
    assert found.worth == worth and reason in "\n".join(found.reasons)
    assert found.advice, "whatever it is, there is something to do"


def test_advice_names_the_layer_and_the_pairs_left() -> None:
    gains = {1: HANGS, 2: Estimate(0.9, 0.2, 1.6, 64), 3: Estimate(2.0, -0.1, 4.1, 64)}
    assert "start with weights.layer=2" in assess_judge(stats(0.75, 256), gains).advice[0]
    assert any(
        "judge more pairs (passport.pairs): 744 have not been judged yet" in line
        for line in assess_judge(stats(0.5, 256), {}, 744).advice
    )
    assert not any("are left" in line for line in assess_judge(stats(0.5, 256), {}, 0).advice)


def test_layers_share_the_level() -> None:
    assert bonferroni_level(1) == pytest.approx(0.95) and bonferroni_level(5) == pytest.approx(0.99)
