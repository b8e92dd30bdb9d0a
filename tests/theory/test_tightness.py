"""How loose the bounds are, and what they say at the paper's own figures."""

import csv
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from experiments.theory.paper_bounds import Bounded
from experiments.theory.paper_numbers import TABLE, Published
from experiments.theory.study import Study
from experiments.theory.tightness import BETAS, DELTAS, LENGTHS, TightnessRow, exponent

ROOT = Path(__file__).resolve().parents[2]


def test_every_point_is_there_and_the_middle_is_one_problem_seen_twice(study: Study) -> None:
    points = [(row.varied, row.value) for row in study.tightness]
    assert points == [
        *(("delta", value) for value in DELTAS),
        *(("beta", value) for value in BETAS),
        *(("length", float(value)) for value in LENGTHS),
    ]
    by_delta, by_beta = (study.tightness[points.index(point)] for point in (("delta", 0.1), ("beta", 0.5)))
    assert by_delta.paper.theorem == by_beta.paper.theorem
    assert by_delta.ours == pytest.approx(math.sqrt(3) * 0.1 / 0.9)
    for row in study.tightness:
        expected = {"delta": row.value}.get(row.varied, 0.1)
        assert row.paper.delta == pytest.approx(expected)
        assert row.paper.theorem.looseness > row.ours / row.paper.theorem.actual > 1
    lengths = [row for row in study.tightness if row.varied == "length"]
    for row in lengths:  # responses of one length: each policy's mean length is that of the tree
        assert row.paper.lemma_1.bound == pytest.approx(row.paper.delta * row.paper.constant * 2 * row.value)
        assert row.ours == pytest.approx(math.sqrt(row.value) * 0.1 / 0.9)
    betas = [row.paper.constant for row in study.tightness if row.varied == "beta"]
    assert all(more > less for more, less in pairwise(betas))  # the dearer the penalty, the smaller the log-ratios


def test_the_power_of_delta_is_read_off_the_two_smallest(study: Study) -> None:
    def at(delta: float, actual: float) -> TightnessRow:
        row = study.tightness[0]
        return replace(row, value=delta, paper=replace(row.paper, theorem=Bounded(actual, 1.0, 0.1)))

    rows = [at(0.4, 0.7), at(0.01, 0.002), at(0.04, 0.004), replace(at(1e-4, 0.5), varied="beta")]
    assert exponent(rows) == pytest.approx(0.5)
    assert exponent(study.tightness) == pytest.approx(1.0, abs=0.05)


def test_the_printed_weight_statistics_are_the_papers() -> None:
    with (ROOT / "experiments" / "paper" / "weight_statistics" / "printed.csv").open() as lines:
        printed = {(row["model"], row["side"]): row for row in csv.DictReader(lines)}
    assert len(TABLE) == len(printed)
    for one in TABLE:
        row = printed[one.model, one.side]
        assert (one.std, one.largest, one.length) == tuple(float(row[key]) for key in ("std", "max", "mean_length"))


def test_the_bounds_at_the_papers_figures() -> None:
    base, instruct = TABLE[0], TABLE[2]
    assert base.delta == pytest.approx(269.0895 * 0.1242 - 1)
    assert base.delta > 32
    assert round(base.effective) == 11
    assert base.effective / base.length == pytest.approx(0.042, abs=5e-4)
    assert round(instruct.effective) == 17
    assert instruct.effective / instruct.length == pytest.approx(0.047, abs=5e-4)
    assert base.kl_bound(0.01) == pytest.approx(base.delta * 0.01 * (269.0895 + 269.0895))
    assert base.kl_bound(0.01) > 100
    assert base.tv_bound(0.01) == pytest.approx(math.sqrt(base.delta * 0.01 / 2) * 2 * math.sqrt(2 * 269.0895))
    assert base.tv_bound(base.largest_constant) == pytest.approx(1.0)


def test_the_effective_number_counts_tokens_of_equal_weight() -> None:
    # 4 of 16 tokens at 1/4: the variance of the weights is E[a^2] - 1/16^2 = 1/64 - 1/256
    assert Published("-", "-", math.sqrt(1 / 64 - 1 / 256), 0.25, 16.0).effective == pytest.approx(4.0)
    assert Published("-", "-", 0.0, 1 / 16, 16.0).effective == pytest.approx(16.0)
    assert Published("-", "-", 0.0, 1 / 16, 16.0).delta == pytest.approx(0.0)
