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
    PromptSampling,
    _resampled_means,
    average_ranks,
    hierarchical_bootstrap,
    paired_difference,
    t_quantile,
    tied_ranks,
)
from attnpo.schema import UserError


def half_width(interval: Interval) -> float:
    return (interval.high - interval.low) / 2


def plain_percentiles(
    scores: np.ndarray,
    level: float = 0.95,
    draws: int = 10_000,
    seed: int = 0,
    prompts: PromptSampling = PromptSampling.SHARED,
) -> tuple[float, float]:
    """Returns the interval without its widening for few units."""
    low, high = np.quantile(_resampled_means(scores, draws, seed, prompts), ((1 - level) / 2, (1 + level) / 2))
    return float(low), float(high)


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
    assert t_quantile(0.1, 4) == -t_quantile(0.9, 4)


def test_t_quantile_printed_table() -> None:
    # Any printed table of Student's t.
    printed = {3: 3.1824, 4: 2.7764, 9: 2.2622, 10: 2.2281, 29: 2.0452, 120: 1.9799}
    for freedom, value in printed.items():
        assert t_quantile(0.975, freedom) == pytest.approx(value, abs=6e-5), freedom


@pytest.mark.parametrize(("probability", "freedom"), [(0.0, 3), (1.0, 3), (0.9, 0)])
def test_t_quantile_refuses(probability: float, freedom: int) -> None:
    with pytest.raises(UserError, match="expected"):
        t_quantile(probability, freedom)


# ------------------------------------------------------------------------------------------------ intervals


def test_single_seed_says_that_only_prompts_were_drawn() -> None:
    scores = draw(0, seeds=1)
    interval = hierarchical_bootstrap(scores)
    assert (interval.seeds, interval.prompts) == (1, 40)
    assert interval.low < interval.mean < interval.high
    spread = float(scores.std(ddof=1)) / math.sqrt(scores.size)
    assert half_width(interval) == pytest.approx(2.02 * spread, rel=0.1)  # t with 39 degrees of freedom


def test_single_value_has_no_interval() -> None:
    interval = hierarchical_bootstrap(np.array([[0.5]]))
    assert interval.mean == 0.5 and math.isnan(interval.low) and not interval.excludes_zero
    assert interval.text(2) == "0.50 [no interval]"


def test_bootstrap_of_two_values_by_hand() -> None:
    # Seeds 0 and 1: a resample's mean is 0, 1/2, 1 with chances 1/4, 1/2, 1/4; one prompt changes nothing.
    scores = np.array([[0.0], [1.0]])
    assert hierarchical_bootstrap(scores).mean == 0.5
    assert plain_percentiles(scores, 0.4) == (0.5, 0.5)  # the 30 and 70 percent points
    assert plain_percentiles(scores, 0.6) == (0.0, 1.0)  # the 20 and 80 percent points


def test_bootstrap_variance_by_hand() -> None:
    # For a sum of a seed effect a and a prompt effect b the variance of a resampled mean is var(a)/S + var(b)/P
    # (ddof 0) when prompts are shared; per seed the prompts' part shrinks to about var(b)/(S P).
    seeds, prompts = np.arange(4.0)[:, None], np.arange(10.0)[None, :]
    scores = seeds + prompts
    sixteen = 0.6826894921  # one standard deviation on each side
    low, high = plain_percentiles(scores, sixteen, draws=40_000)
    assert (high - low) / 2 == pytest.approx(math.sqrt(1.25 / 4 + 8.25 / 10), rel=0.02)
    low, high = plain_percentiles(scores, sixteen, draws=40_000, prompts=PromptSampling.PER_SEED)
    assert (high - low) / 2 == pytest.approx(math.sqrt(1.25 / 4 + 8.25 / 40), rel=0.02)


def test_bootstrap_is_deterministic_in_its_seed() -> None:
    scores = draw(3)
    assert hierarchical_bootstrap(scores, seed=1) == hierarchical_bootstrap(scores, seed=1)
    assert hierarchical_bootstrap(scores, seed=1) != hierarchical_bootstrap(scores, seed=2)


def test_bootstrap_does_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnpo.evaluation.intervals._DRAWS_AT_ONCE", 7 * 40)
    chunked = hierarchical_bootstrap(draw(3), draws=1000)
    assert chunked.low < chunked.mean < chunked.high
    assert half_width(chunked) == pytest.approx(half_width(hierarchical_bootstrap(draw(3), draws=4000)), rel=0.15)


@given(shift=st.floats(-5, 5), scale=st.floats(0.1, 10))
def test_bootstrap_follows_shift_and_scale(shift: float, scale: float) -> None:
    base = hierarchical_bootstrap(draw(1), draws=200)
    moved = hierarchical_bootstrap(scale * draw(1) + shift, draws=200)
    assert moved.low == pytest.approx(scale * base.low + shift, abs=1e-8)
    assert moved.high == pytest.approx(scale * base.high + shift, abs=1e-8)


@pytest.mark.parametrize(("training", "prompt"), [(0.3, 0.0), (0.1, 0.4), (0.0, 0.4)])
def test_coverage_of_the_widened_bootstrap(training: float, prompt: float) -> None:
    hits = 0
    for seed in range(200):
        interval = hierarchical_bootstrap(draw(seed, training=training, prompt=prompt), draws=500, seed=seed)
        hits += interval.low <= 0 <= interval.high
    # The nominal 95 percent with four standard errors of 200 draws below; never trivially wide (see the next test).
    assert 0.885 <= hits / 200 <= 1.0


def test_plain_percentiles_over_five_seeds_cover_too_little() -> None:
    plain = widened = 0
    for seed in range(300):
        scores = np.random.default_rng(seed).normal(size=(5, 1))
        low, high = plain_percentiles(scores, draws=500, seed=seed)
        interval = hierarchical_bootstrap(scores, draws=500, seed=seed)
        plain += low <= 0 <= high
        widened += interval.low <= 0 <= interval.high
    assert 0.76 <= plain / 300 <= 0.89  # about 83 percent
    assert widened / 300 >= 0.90  # at most about 94


def test_widening_fades_where_prompts_rule() -> None:
    scores = draw(0, training=0.0, prompt=2.0, prompts=200)
    low, high = plain_percentiles(scores)
    assert half_width(hierarchical_bootstrap(scores)) == pytest.approx((high - low) / 2, rel=0.05)
    seeds_only = np.random.default_rng(0).normal(size=(5, 1))
    low, high = plain_percentiles(seeds_only)
    assert half_width(hierarchical_bootstrap(seeds_only)) > 1.2 * (high - low) / 2


def test_pairing_narrows_the_interval() -> None:
    first = draw(1)
    second = first + 0.05 + 0.02 * np.random.default_rng(9).normal(size=first.shape)
    paired = paired_difference(second, first)
    alone = hierarchical_bootstrap(second)
    assert paired.mean == pytest.approx(float((second - first).mean()))
    assert half_width(paired) < 0.2 * half_width(alone)
    assert paired.excludes_zero and not hierarchical_bootstrap(first).excludes_zero
    back = paired_difference(first, second)
    assert back.mean == pytest.approx(-paired.mean) and back.low == pytest.approx(-paired.high, rel=0.1)


def test_errors_say_what_to_do() -> None:
    with pytest.raises(UserError, match="5 seeds x 40 prompts and 4 x 40"):
        paired_difference(draw(0), draw(0, seeds=4))
    with pytest.raises(UserError, match="1 of 4 scores are not finite"):
        hierarchical_bootstrap(np.array([[0.0, 1.0], [math.nan, 2.0]]))
    with pytest.raises(UserError, match="draws"):
        hierarchical_bootstrap(draw(0), draws=0)
    with pytest.raises(UserError, match="at least 1 x 1"):
        hierarchical_bootstrap(np.zeros((0, 3)))


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
