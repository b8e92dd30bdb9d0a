"""The three spreads of a figure against values computed another way, and against simulated truth."""

import math

import numpy as np
import pytest

from attnpo.evaluation.base import RoundScores
from attnpo.evaluation.spreads import grading_spread, question_interval, summarize_rounds

NAMES = tuple(f"q{index}" for index in range(400))


def graded(
    values: np.ndarray, weights: np.ndarray | None = None, names: tuple[str, ...] | None = None, own: bool = True
) -> RoundScores:
    weights = np.ones(len(values)) if weights is None else weights
    names = NAMES[: len(values)] if names is None else names
    held = {"f": values} if own else {}
    figure = float(np.nansum(values * weights) / weights[np.isfinite(values)].sum())
    return RoundScores(names, {"f": figure}, held, {"f": weights} if own else {})


def test_the_interval_over_questions_is_that_of_the_mean() -> None:
    values = np.random.default_rng(1).normal(5, 2, 400)
    low, high = question_interval("f", [graded(values)]) or (0.0, 0.0)
    half = 1.96 * values.std(ddof=1) / math.sqrt(400)
    assert (high - low) / 2 == pytest.approx(half, rel=0.06)
    assert (high + low) / 2 == pytest.approx(values.mean(), abs=0.1 * half)


def test_rounds_share_their_questions() -> None:
    """Three rounds with the same values are no more certain than one; three independent ones are."""
    draws = np.random.default_rng(2)
    same = draws.normal(0, 1, 400)
    one = question_interval("f", [graded(same)]) or (0.0, 0.0)
    three = question_interval("f", [graded(same)] * 3) or (0.0, 0.0)
    assert three == pytest.approx(one)
    other = question_interval("f", [graded(draws.normal(0, 1, 400)) for _ in range(3)]) or (0.0, 0.0)
    assert (other[1] - other[0]) / (one[1] - one[0]) == pytest.approx(1 / math.sqrt(3), rel=0.1)


def test_the_rows_of_a_question_are_drawn_together() -> None:
    """A question with two equal verdicts counts as one source of chance: weights do not narrow the interval."""
    values = np.random.default_rng(3).normal(0, 1, 200)
    single = question_interval("f", [graded(values)]) or (0.0, 0.0)
    double = question_interval("f", [graded(values, np.full(200, 2.0))]) or (0.0, 0.0)
    assert double == pytest.approx(single)


def test_a_question_without_a_value_is_left_out() -> None:
    values = np.array([1.0, 2.0, 3.0, math.nan])
    weights = np.array([1.0, 1.0, 1.0, 0.0])
    score = summarize_rounds("f", [graded(values, weights)], None)
    assert score.mean == 2 and score.questions == 3
    assert score.interval is not None and 1 <= score.interval[0] < score.interval[1] <= 3


def test_where_the_library_states_an_error_it_is_used_and_otherwise_nothing_is_made_up() -> None:
    stated = RoundScores(("a", "b"), {"lc": 50.0}, {}, {}, errors={"lc": 1.5})
    assert question_interval("lc", [stated]) == pytest.approx((50 - 1.96 * 1.5, 50 + 1.96 * 1.5))
    assert question_interval("lc", [RoundScores(("a", "b"), {"lc": 50.0}, {}, {})]) is None
    assert question_interval("f", [graded(np.array([1.0]))]) is None


# ------------------------------------------------------------------------------------------------ grading again


def simulated(noise: float, share: float, seed: int, own: bool = True) -> tuple[float, float]:
    """The spread that is estimated from a share graded twice, and the true one: sd / sqrt(N)."""
    draws = np.random.default_rng(seed)
    quality = draws.normal(5, 3, 400)
    one, two = (quality + draws.normal(0, noise, 400) for _ in range(2))
    count = int(400 * share)

    def exchange(questions: frozenset[str]) -> RoundScores:
        chosen = np.array([name in questions for name in NAMES])
        return graded(np.where(chosen, two, one), own=own)

    found = grading_spread("f", graded(one, own=own), graded(two[:count], own=own), exchange)
    assert found is not None
    return found, noise / math.sqrt(400)


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_grading_a_share_again_gives_the_noise_of_the_whole(share: float) -> None:
    runs = [simulated(0.7, share, seed) for seed in range(20)]
    assert np.mean([found for found, _ in runs]) == pytest.approx(runs[0][1], rel=0.05)


def test_exchanging_replies_gives_the_same_for_a_figure_without_values() -> None:
    runs = [simulated(0.7, 0.25, seed, own=False) for seed in range(20)]
    assert np.mean([found for found, _ in runs]) == pytest.approx(runs[0][1], rel=0.1)


def test_a_verdict_that_changes_its_weight_is_noise_too() -> None:
    """Arena-Hard: 3 for a clear win and 1 for a slight one. Values that stay 1 and 0 move the mean by weights alone."""
    draws = np.random.default_rng(5)
    values = (draws.random(400) < 0.4).astype(float)

    def weights() -> np.ndarray:
        return np.where(draws.random(400) < 0.5, 3.0, 1.0)

    figures, spreads = [], []
    for _ in range(200):
        first = graded(values, weights())
        figures.append(first.scores["f"])
        spreads.append(grading_spread("f", first, graded(values, weights())) or 0.0)
    assert np.mean(spreads) == pytest.approx(np.std(figures), rel=0.1)


def test_equal_grades_have_no_noise_and_one_question_tells_nothing() -> None:
    values = np.arange(10.0)
    assert grading_spread("f", graded(values), graded(values[:5])) == 0
    assert grading_spread("f", graded(values), graded(values[:1])) is None
    assert grading_spread("f", graded(values, own=False), graded(values, own=False)) is None
