"""Statistics of weight rows, with numbers derived by hand."""

import csv
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnpo.lab.reports.weight_report import (
    SINK,
    mean_statistics,
    response_statistics,
    sink_row,
    statistics_row,
    token_means,
    token_rows,
)
from attnpo.schema import UserError
from attnpo.weights.postprocess import effective_token_count


def test_statistics_by_hand() -> None:
    # (1/2, 1/4, 1/8, 1/8): sum of squares 11/32; entropy (1/2 + 2/4 + 3/8 + 3/8) ln 2; mean 1/4, squared deviations
    # 4/64 + 0 + 1/64 + 1/64 over 4.
    stats = response_statistics(torch.tensor([0.5, 0.25, 0.125, 0.125]), length=5)
    assert stats["effective"] == pytest.approx(32 / 11)
    assert stats["effective_share"] == pytest.approx(8 / 11)
    assert stats["entropy"] == pytest.approx(1.75 * math.log(2))
    assert stats["std"] == pytest.approx(math.sqrt(6 / 64 / 4))
    assert (stats["max"], stats["mass"], stats["uniform"], stats["mean_length"]) == (0.5, 1.0, 1 / 4, 5.0)
    assert stats["top10_share"] == 0.5  # a tenth of 4, rounded up, is one token
    assert [stats[place] for place in SINK] == [0.5, 0.25, 0.125]


def test_top_share_counts_a_tenth_rounded_up() -> None:
    weights = torch.full((30,), 1.0)
    weights[[3, 7, 20, 29]] = torch.tensor([5.0, 4.0, 3.0, 2.0])
    assert response_statistics(weights)["top10_share"] == pytest.approx(12 / 40)  # 3 of 30, mass 26 + 14
    assert response_statistics(torch.cat([weights, torch.ones(1)]))["top10_share"] == pytest.approx(14 / 41)  # 4 of 31


def test_extremes() -> None:
    uniform = response_statistics(torch.full((8,), 1 / 8))
    assert uniform["effective"] == pytest.approx(8) and uniform["entropy"] == pytest.approx(math.log(8))
    single = response_statistics(torch.tensor([0.0, 1.0]))
    assert (single["effective"], single["entropy"]) == (1.0, 0.0)
    assert [single[place] for place in SINK] == [0.0, 1.0, 0.0]
    assert math.copysign(1, single["entropy"]) == 1
    empty = response_statistics(torch.zeros(3))
    assert [empty[name] for name in ("effective", "effective_share", "entropy", "top10_share")] == [0.0] * 4


def test_factors_and_signed_rows_are_read_by_size() -> None:
    assert effective_token_count(torch.tensor([2.0, -2.0, 2.0])) == pytest.approx(3)
    assert response_statistics(torch.tensor([2.0, -2.0]))["mass"] == 0.0


@given(st.lists(st.floats(0.0, 1e3), min_size=1, max_size=20).filter(lambda row: sum(row) > 1e-3), st.floats(0.01, 100))
def test_shares_ignore_scale_and_stay_in_bounds(row: list[float], scale: float) -> None:
    weights = torch.tensor(row, dtype=torch.float64)
    one, other = response_statistics(weights), response_statistics(scale * weights)
    for name in ("effective", "entropy", "top10_share", *SINK):
        assert one[name] == pytest.approx(other[name], rel=1e-9, abs=1e-12)
    assert 1 - 1e-9 <= one["effective"] <= len(row) * (1 + 1e-9)
    assert one["effective"] <= math.exp(one["entropy"]) * (1 + 1e-9)  # order 2 below order 1 (Renyi)


def test_refuses_what_has_no_statistics() -> None:
    with pytest.raises(UserError, match="empty"):
        response_statistics(torch.zeros(0))
    with pytest.raises(UserError, match="1 of 2"):
        response_statistics(torch.tensor([1.0, math.nan]))
    with pytest.raises(UserError, match="at least one response"):
        mean_statistics([])


def test_the_printed_columns_are_those_of_the_paper(paper_tables: Path) -> None:
    """The heads of the paper's files, so that they can stand beside ours."""
    summary = mean_statistics([response_statistics(torch.ones(4))])
    (token,) = token_rows(token_means([[1]], [torch.ones(1)], [1]), str)
    ours = {
        "weight_statistics": statistics_row("m", "chosen", summary),
        "sink_share": sink_row("m", summary),
        "top_tokens": ["model", "side", *token],
    }
    for name, columns in ours.items():
        with (paper_tables / f"{name}.csv").open(encoding="utf-8") as lines:
            assert set(next(csv.reader(lines))) <= set(columns)


def test_token_means_by_hand() -> None:
    weights = [torch.tensor([0.75, 0.25]), torch.tensor([0.5, 0.0, 0.5, 0.0])]
    means = token_means([[7, 3], [3, 3, 5, 7]], weights, [2, 5])
    assert means["relative"].to_dict() == pytest.approx({5: 2.5, 7: (1.5 + 0) / 2, 3: (0.5 + 2.5 + 0) / 3})
    assert means.loc[7, "weight"] == pytest.approx(0.375) and means["count"].to_dict() == {5: 1, 7: 2, 3: 3}
    assert means.index.tolist() == [5, 7, 3], "by weight; by weight times |y|, 3 is before 7"


def test_token_means_edges() -> None:
    assert token_means([], [], []).empty
    tie = token_means([[9, 2]], [torch.tensor([0.5, 0.5])], [2])
    assert tie.index.tolist() == [2, 9]
    assert token_rows(tie, lambda token: f"<{token}>")[0] == {
        "rank": 1, "token": "<2>", "weight": 0.5, "relative": 1.0, "count": 1,
    }  # fmt: skip
