"""Intervals, paired differences and ranks: numbers derived by hand, coverage by simulation."""

import csv
import math
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnpo.evaluation.intervals import (
    Interval,
    MeanSquares,
    average_ranks,
    mean_interval,
    paired_difference,
    smallest_effect,
    t_quantile,
    tied_ranks,
)
from attnpo.schema import UserError


def half_width(interval: Interval) -> float:
    return (interval.high - interval.low) / 2


def draw(seed: int, seeds: int = 5, prompts: int = 40, training: float = 0.1, prompt: float = 0.4) -> np.ndarray:
    """Scores with mean 0: noise of training per seed, of prompts shared by all seeds, and of single answers."""
    random = np.random.default_rng(seed)
    return (
        training * random.normal(size=(seeds, 1))
        + prompt * random.normal(size=(1, prompts))
        + 0.3 * random.normal(size=(seeds, prompts))
    )


# ------------------------------------------------------------------------------------------------ t


def test_t_quantile_closed_forms() -> None:
    # One degree: tan(pi (p - 1/2)); two: (2p - 1) sqrt(2 / (1 - (2p - 1)^2)).
    assert t_quantile(0.975, 1) == pytest.approx(math.tan(0.475 * math.pi), rel=1e-10)
    assert t_quantile(0.975, 2) == pytest.approx(0.95 * math.sqrt(2 / (1 - 0.95**2)), rel=1e-10)
    assert t_quantile(0.5, 3) == pytest.approx(0.0, abs=1e-12)
    assert t_quantile(0.1, 4) == pytest.approx(-t_quantile(0.9, 4), rel=1e-12)


def test_t_quantile_printed_table() -> None:
    # Any printed table of Student's t.
    printed = {3: 3.1824, 4: 2.7764, 9: 2.2622, 10: 2.2281, 29: 2.0452, 120: 1.9799}
    for freedom, value in printed.items():
        assert t_quantile(0.975, freedom) == pytest.approx(value, abs=6e-5), freedom


# ------------------------------------------------------------------------------------------------ intervals


def test_single_seed_has_an_interval_over_prompts_alone() -> None:
    scores = draw(0, seeds=1)
    interval = mean_interval(scores)
    assert (interval.seeds, interval.prompts, interval.squares) == (1, 40, None)
    spread = float(scores.std(ddof=1)) / math.sqrt(scores.size)
    assert half_width(interval) == pytest.approx(2.0227 * spread, rel=1e-4)  # t with 39 degrees of freedom


def test_single_value_has_no_interval() -> None:
    interval = mean_interval(np.array([[0.5]]))
    assert interval.mean == 0.5 and math.isnan(interval.low) and not interval.excludes_zero
    assert interval.text(2) == "0.50 [no interval]"


def test_mean_squares_of_a_small_table_by_hand() -> None:
    # Means 2 and 3 by seed, 0.5, 3 and 4 by prompt, 2.5 in all: MS_seed 3 * 0.5, MS_prompt 2 * 3.25; residuals of the
    # first seed 0, 0.5 and -0.5, of the second the negative: MS_residual 1 / 2.
    squares = MeanSquares.from_scores(np.array([[0.0, 3.0, 3.0], [1.0, 3.0, 5.0]]))
    assert (squares.seed, squares.prompt, squares.residual) == pytest.approx((1.5, 6.5, 0.5))
    assert squares.variances == pytest.approx(((1.5 - 0.5) / 3, (6.5 - 0.5) / 2, 0.5))
    freedom = 7.5**2 / (1.5**2 + 6.5**2 / 2 + 0.5**2 / 2)
    crossed, over_seeds = t_quantile(0.975, freedom) * math.sqrt(7.5 / 6), t_quantile(0.975, 1) * math.sqrt(1.5 / 6)
    assert squares.half_width() == pytest.approx(max(crossed, over_seeds))
    again = MeanSquares.from_spreads([math.sqrt(part) for part in squares.variances], 2, 3)
    assert (again.seed, again.prompt, again.residual) == pytest.approx((1.5, 6.5, 0.5))


def test_degrees_of_freedom_are_never_fewer_than_seeds_less_one() -> None:
    # Without the floor they fall to 0 where the variance of the mean is barely positive, and no interval ends.
    barely = MeanSquares(0.5, 0.5 + 1e-9, 1.0, 2, 2)
    none = MeanSquares(0.4, 0.5, 1.0, 2, 2)
    assert barely.half_width() == pytest.approx(12.706 * math.sqrt(0.5 / 4), rel=1e-4)
    assert none.half_width() == pytest.approx(12.706 * math.sqrt(1.0 / 4), rel=1e-4)


def test_interval_is_the_wider_of_two() -> None:
    few = mean_interval(draw(3))
    over_seeds = mean_interval(draw(3), same_prompts=False)
    means = draw(3).mean(axis=1)
    assert half_width(over_seeds) == pytest.approx(2.7764 * means.std(ddof=1) / math.sqrt(5), rel=1e-4)
    assert over_seeds.squares is None and few.squares is not None
    assert half_width(few) == pytest.approx(few.squares.half_width()) and half_width(few) >= half_width(over_seeds)
    assert half_width(mean_interval(means[:, None])) == pytest.approx(half_width(over_seeds))


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_smallest_effect_is_seen_in_the_share_it_says(seeds: int) -> None:
    spreads, prompts, studies = (0.03, 0.10, 0.60), 384, 1000
    effect = smallest_effect(MeanSquares.from_spreads(spreads, seeds, prompts))
    random, seen = np.random.default_rng(seeds), 0
    for _ in range(studies):
        scores = effect + spreads[2] * random.normal(size=(seeds, prompts))
        scores += spreads[0] * random.normal(size=(seeds, 1)) + spreads[1] * random.normal(size=(1, prompts))
        seen += mean_interval(scores).low > 0
    assert seen / studies == pytest.approx(0.8, abs=0.04)


@given(shift=st.floats(-5, 5), scale=st.floats(0.1, 10))
def test_interval_follows_shift_and_scale(shift: float, scale: float) -> None:
    base, moved = mean_interval(draw(1)), mean_interval(scale * draw(1) + shift)
    assert moved.low == pytest.approx(scale * base.low + shift, abs=1e-8)
    assert moved.high == pytest.approx(scale * base.high + shift, abs=1e-8)


def test_equal_scores_have_an_interval_without_width() -> None:
    interval = mean_interval(np.full((3, 4), 0.25))
    assert (interval.low, interval.high) == (0.25, 0.25)


# Standard deviations of seeds, prompts and single answers, as measured in this project's studies at KL 0.5 and 1
# (differences to DPO): the noise of answers is nearly all there is. With eight answers a prompt it is smaller.
MEASURED = [(0.03, 0.00, 0.50), (0.03, 0.10, 0.60), (0.03, 0.15, 0.69)]
STUDIES = [(seed, prompt, noise / math.sqrt(answers)) for answers in (1, 8) for seed, prompt, noise in MEASURED]


@pytest.mark.parametrize("seeds", [2, 3, 5, 10])
@pytest.mark.parametrize("spreads", STUDIES)
def test_intervals_cover_what_they_say(seeds: int, spreads: tuple[float, float, float]) -> None:
    random, hits, widest, prompts, studies = np.random.default_rng(seeds), 0, 0.0, 384, 1000
    of_seed, of_prompt, of_answer = spreads
    for _ in range(studies):
        scores = of_answer * random.normal(size=(seeds, prompts))
        scores += of_seed * random.normal(size=(seeds, 1)) + of_prompt * random.normal(size=(1, prompts))
        interval = mean_interval(scores)
        hits += interval.low <= 0 <= interval.high
        widest = max(widest, interval.high - interval.low)
    assert hits / studies >= 0.93
    if seeds > 2:
        assert hits / studies <= 0.97 and widest < 2


def test_pairing_narrows_the_interval() -> None:
    first = draw(1)
    second = first + 0.05 + 0.02 * np.random.default_rng(9).normal(size=first.shape)
    paired = paired_difference(second, first)
    alone = mean_interval(second)
    assert paired.mean == pytest.approx(float((second - first).mean()))
    assert half_width(paired) < 0.2 * half_width(alone)
    assert paired.excludes_zero and not mean_interval(first).excludes_zero
    back = paired_difference(first, second)
    assert back.mean == pytest.approx(-paired.mean) and back.low == pytest.approx(-paired.high)


def test_errors_say_what_to_do() -> None:
    with pytest.raises(UserError, match="5 seeds x 40 prompts and 4 x 40"):
        paired_difference(draw(0), draw(0, seeds=4))
    with pytest.raises(UserError, match="1 of 4 scores are not finite"):
        mean_interval(np.array([[0.0, 1.0], [math.nan, 2.0]]))
    with pytest.raises(UserError, match="at least 1 x 1"):
        mean_interval(np.zeros((0, 3)))


# ------------------------------------------------------------------------------------------------ reward at KL


# ------------------------------------------------------------------------------------------------ ranks


def test_tied_ranks_by_hand() -> None:
    # 9 first; the two 7s share ranks 2 and 3; the three 1s share 4, 5, 6.
    scores = np.array([7.0, 1.0, 9.0, 1.0, 7.0, 1.0])
    assert tied_ranks(scores).tolist() == [2.5, 5.0, 1.0, 5.0, 2.5, 5.0]


def test_average_ranks_by_hand() -> None:
    table = np.array([[3.0, 30.0], [2.0, 20.0], [2.0, 10.0]])
    assert average_ranks(table).tolist() == [1.0, 2.25, 2.75]
    assert average_ranks(table, [True, False]).tolist() == [2.0, 2.25, 1.75]
    with pytest.raises(UserError, match="finite"):
        average_ranks(np.array([[1.0, math.nan]]))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12))
def test_ranks_sum_as_without_ties(scores: list[int]) -> None:
    count = len(scores)
    assert tied_ranks(np.array(scores, dtype=float)).sum() == pytest.approx(count * (count + 1) / 2)


def test_average_ranks_give_the_papers_column(paper_tables: Path) -> None:
    # The Instruct half of the main table; the other half's printed column is a known misprint (paper_tables/README.md).
    with (paper_tables / "main_results.csv").open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["base_model"] == "llama-3-8b-instruct"]
    metrics = ("alpacaeval_lc", "alpacaeval_wr", "mt_bench", "arena_hard_wr")
    ranks = average_ranks(np.array([[float(row[name]) for name in metrics] for row in rows]))
    printed = [Decimal(row["avg_rank_printed"]) for row in rows]
    assert len(rows) == 14
    assert [Decimal(rank).quantize(Decimal("0.01"), ROUND_HALF_UP) for rank in ranks] == printed
