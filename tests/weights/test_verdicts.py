"""Judge statistics worked out by hand."""

import math

import pytest
import torch

from attnpo.schema import PairWeights, Round, TokenWeights
from attnpo.weights.verdicts import judge_statistics

A, B, OTHER = 5, 6, 7
EMPTY = TokenWeights(torch.zeros(0, dtype=torch.long), torch.zeros(0, 2, dtype=torch.long), torch.zeros(1, 0))


def pair(
    name: str, first: tuple[float, float], second: tuple[float, float], tokens: tuple[int, int] = (A, B)
) -> PairWeights:
    """Label logits (A, B) with the chosen response as A, then as B."""
    return PairWeights(name, (
        Round(True, EMPTY, EMPTY, torch.tensor(first), tokens[0]),
        Round(False, EMPTY, EMPTY, torch.tensor(second), tokens[1]),
    ))  # fmt: skip


def test_shares_by_hand() -> None:
    captured = [
        pair("right twice", (2.0, 1.0), (0.0, 3.0)),
        pair("always A, right on average", (5.0, 1.0), (2.0, 1.0), (A, A)),
        pair("wrong twice", (0.0, 1.0), (1.0, 0.0), (B, OTHER)),
        pair("a tie, then wrong", (1.0, 1.0), (2.0, 0.0), (A, A)),
    ]
    found = judge_statistics(captured, (A, B))
    # Rounds that pick the chosen one: 1 1 | 1 0 | 0 0 | half 0.
    assert found.agreement == pytest.approx(3.5 / 8)
    # Mean margins: +2, (4 - 1)/2, -1, -1.
    assert found.pair_accuracy == pytest.approx(2 / 4)
    assert found.consistency == pytest.approx(2 / 4)
    assert found.other_tokens == pytest.approx(1 / 8)
    assert found.pairs == 4


def test_pairs_without_verdicts_are_left_out() -> None:
    silent = PairWeights("silent", (Round(True, EMPTY, EMPTY), Round(False, EMPTY, EMPTY)))
    assert judge_statistics([silent, pair("p", (1.0, 0.0), (0.0, 1.0))], (A, B)).pairs == 1
    nothing = judge_statistics([silent], (A, B))
    assert nothing.pairs == 0
    assert all(math.isnan(value) for value in (nothing.agreement, nothing.pair_accuracy, nothing.consistency))
