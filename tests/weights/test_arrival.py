"""Shares of weights that arrive on the training tokens, by hand."""

import math

import pytest
import torch

from attnpo.weights.arrival import Arrival, shares_that_arrived

ARRIVED = torch.tensor([1.0, 0.0, 0.5])


@pytest.mark.parametrize(
    ("weights", "kept"), [([0.5, 0.3, 0.2], 0.6), ([0.5, -0.3, -0.2], 0.6), ([0.0, 0.0, 0.0], 1.0)]
)
def test_tokens_and_weights_are_counted_apart(weights: list[float], kept: float) -> None:
    """Two of three tokens arrive at all; of the weight 0.5 whole and half of 0.2, whatever its sign."""
    assert shares_that_arrived(torch.tensor(weights), ARRIVED) == pytest.approx((2 / 3, kept))


def test_nothing_measured_is_no_number_and_no_warning() -> None:
    none = Arrival.of([])
    assert all(math.isnan(value) for value in vars(none).values()) and not none.is_low
