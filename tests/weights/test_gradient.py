"""TI-DPO's weights: numbers by hand, both scopes, the prior, rows with nothing to go by."""

import math

import pytest
import torch
from torch import Tensor

from attnpo.schema import InputGradient, TokenStats
from attnpo.weights.sources.gradient import Gradient, NormalizationScope, importance_weights, position_prior
from tests.objectives.inputs import make_batch, make_rows


def long(*values: int) -> Tensor:
    return torch.tensor(values)


def bell(count: int, sigma: float) -> list[float]:
    """The prior by its definition, in plain numbers."""
    raw = [math.exp(-0.5 * ((i - (count - 1) / 2) / sigma) ** 2) for i in range(count)]
    return [value / sum(raw) for value in raw]


def test_the_prior_by_its_definition() -> None:
    """Sigma is n over the divisor, at least 1; a response after a prompt of three gets the rest of the bell."""
    found = position_prior(long(16, 6), long(0, 3), 16, 4.0, torch.float64)
    torch.testing.assert_close(found[0], torch.tensor(bell(16, 4.0), dtype=torch.float64), rtol=1e-12, atol=0)
    torch.testing.assert_close(found[1, :3], torch.tensor(bell(6, 1.5)[3:], dtype=torch.float64), rtol=1e-12, atol=0)
    narrow = position_prior(long(3), long(0), 3, 8.0, torch.float64)[0]
    torch.testing.assert_close(narrow, torch.tensor(bell(3, 1.0), dtype=torch.float64), rtol=1e-12, atol=0)


def test_weights_by_hand() -> None:
    """Two prompt tokens (scores 1 + 2) and two response tokens (3, 2): n = 4, the scores' sum 8, lam 3/4."""
    scores = torch.tensor([[3.0, 2.0, 99.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False]])
    prior = bell(4, 1.0)
    found = importance_weights(scores, mask, torch.tensor([3.0]).double(), long(2), 0.75, 4.0)[0]
    assert found[0].item() == pytest.approx(4 * (0.75 * 3 / 8 + 0.25 * prior[2]), rel=1e-12)
    assert found[1].item() == pytest.approx(4 * (0.75 * 2 / 8 + 0.25 * prior[3]), rel=1e-12)
    assert found[2].item() == 0.0
    alone = importance_weights(scores, mask, torch.zeros(1).double(), long(0), 0.75, 4.0)[0]
    assert alone.tolist() == pytest.approx([2 * (0.75 * 0.6 + 0.125), 2 * (0.75 * 0.4 + 0.125), 0.0], rel=1e-12)


def test_the_mean_over_all_tokens_that_count_is_one() -> None:
    generator = torch.Generator().manual_seed(2)
    scores = torch.rand(5, 12, generator=generator, dtype=torch.float64)
    counts = long(2, 5, 12, 7, 9)
    mask = torch.arange(12) < counts[:, None]
    zero = torch.zeros(5, dtype=torch.float64)
    for lam in (0.0, 0.3, 1.0):
        found = importance_weights(scores, mask, zero, long(0, 0, 0, 0, 0), lam, 8.0)
        torch.testing.assert_close(found.sum(-1), counts.double(), rtol=1e-12, atol=0)
        assert not found[~mask].any() and bool((found >= 0).all())


def test_without_a_positive_score_the_prior_stands_alone() -> None:
    mask = torch.ones(1, 6, dtype=torch.bool)
    found = importance_weights(torch.zeros(1, 6).double(), mask, torch.zeros(1).double(), long(0), 0.7, 4.0)
    torch.testing.assert_close(found[0] / 6, torch.tensor(bell(6, 1.5), dtype=torch.float64), rtol=1e-12, atol=0)


def test_a_single_token_and_an_empty_response_weigh_nothing() -> None:
    mask = torch.tensor([[True, False], [False, False]])
    scores = torch.full((2, 2), 3.0)
    found = importance_weights(scores, mask, torch.zeros(2), long(0, 0), 0.7, 8.0)
    assert not found.any() and bool(found.isfinite().all())
    after = importance_weights(scores, mask, torch.ones(2), long(1, 1), 0.7, 8.0)
    assert after[0, 0] > 0 and not after[1].any()


def test_values_under_the_mask_never_matter_and_bad_scores_show() -> None:
    mask = torch.tensor([[True, True, False]])
    zero = torch.zeros(1)
    clean = importance_weights(torch.tensor([[1.0, 2.0, 0.0]]), mask, zero, long(0), 0.7, 8.0)
    dirty = importance_weights(torch.tensor([[1.0, 2.0, float("inf")]]), mask, zero, long(0), 0.7, 8.0)
    assert torch.equal(clean, dirty)
    bad = importance_weights(torch.tensor([[1.0, float("nan"), 0.0]]), mask, zero, long(0), 0.7, 8.0)
    assert bool(bad[0, :2].isnan().all()), "a gradient that is no number must not become a weight"


def test_the_scope_decides_whether_the_prompt_counts() -> None:
    found = InputGradient(torch.tensor([[3.0, 1.0], [2.0, 0.0]]), torch.tensor([4.0, 6.0]), long(2, 2))
    policy = TokenStats(torch.zeros(2, 2), input_gradient=found)
    by_scope = {
        scope: Gradient(1.0, 8.0, scope).weights(policy, None, make_batch(make_rows((2, 1))))
        for scope in NormalizationScope
    }
    torch.testing.assert_close(by_scope[NormalizationScope.RESPONSE], torch.tensor([[1.5, 0.5], [0.0, 0.0]]))
    torch.testing.assert_close(by_scope[NormalizationScope.SEQUENCE], torch.tensor([[1.5, 0.5], [0.75, 0.0]]))


def test_without_gradients_there_are_no_weights() -> None:
    with pytest.raises(ValueError, match="needs the statistic input_gradient"):
        Gradient().weights(TokenStats(torch.zeros(2, 1)), None, make_batch(make_rows((1, 1))))
