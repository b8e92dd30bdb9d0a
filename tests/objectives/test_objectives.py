"""Objectives: identities that must hold, hand-derived numbers, masks, gradients."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attnpo.objectives.base import PreferenceObjective, Reduction, reduce
from attnpo.objectives.dpo import DPO
from attnpo.objectives.twdpo import LengthFrom, TwDPO
from attnpo.schema import ObjectiveOutput, PreferenceBatch, RowGroup, TokenStats, UserError

PAIRS, WIDTH = 3, 7


def make_batch(weights: Tensor, mask: Tensor, lengths: Tensor) -> PreferenceBatch:
    rows = RowGroup(
        response_ids=torch.zeros(mask.shape, dtype=torch.long),
        response_mask=mask,
        token_weights={"reward": weights},
        source_lengths=lengths,
        reference_logps=None,
    )
    pairs = mask.shape[0] // 2
    return PreferenceBatch({"main": rows}, torch.ones(pairs), tuple(map(str, range(pairs))), step_pairs=pairs)


@pytest.fixture
def case() -> tuple[Tensor, Tensor, Tensor]:
    """Policy and reference log-probs and a mask of responses of 1 to 7 tokens, double precision."""
    generator = torch.Generator().manual_seed(3)
    policy = -3 * torch.rand(2 * PAIRS, WIDTH, generator=generator, dtype=torch.float64)
    reference = -3 * torch.rand(2 * PAIRS, WIDTH, generator=generator, dtype=torch.float64)
    counts = torch.tensor([7, 3, 1, 4, 7, 2])
    return policy, reference, torch.arange(WIDTH) < counts[:, None]


def uniform(mask: Tensor) -> tuple[Tensor, Tensor]:
    counts = mask.sum(-1).double()
    return mask / counts[:, None], counts


def result(
    objective: PreferenceObjective, policy: Tensor, reference: Tensor, mask: Tensor, weights: Tensor, lengths: Tensor
) -> tuple[ObjectiveOutput, Tensor]:
    leaf = policy.clone().requires_grad_()
    out = objective(TokenStats(leaf), TokenStats(reference), make_batch(weights, mask, lengths))
    out.losses.sum().backward()
    assert leaf.grad is not None
    return out, leaf.grad


def test_twdpo_with_uniform_weights_is_dpo(case: tuple[Tensor, Tensor, Tensor]) -> None:
    policy, reference, mask = case
    weights, lengths = uniform(mask)
    dpo, dpo_grad = result(DPO(0.3), policy, reference, mask, weights, lengths)
    for where in LengthFrom:
        tw, tw_grad = result(TwDPO(0.3, length_from=where), policy, reference, mask, weights, lengths)
        torch.testing.assert_close(tw.losses, dpo.losses, rtol=0, atol=1e-14)
        torch.testing.assert_close(tw_grad, dpo_grad, rtol=0, atol=1e-14)


def test_twdpo_by_hand() -> None:
    # one pair, two tokens a side: d_w = (1, -0.5), a_w = (.75, .25), |y_w| = 2 -> 2 * (.75 - .125) = 1.25
    # d_l = (-1, 0.25), a_l = (.5, .5), |y_l| = 3 (the judge saw three tokens)  -> 3 * (-.375) = -1.125
    ratios = torch.tensor([[1.0, -0.5], [-1.0, 0.25]], dtype=torch.float64)
    weights = torch.tensor([[0.75, 0.25], [0.5, 0.5]], dtype=torch.float64)
    mask = torch.ones(2, 2, dtype=torch.bool)
    lengths = torch.tensor([2.0, 3.0], dtype=torch.float64)
    batch = make_batch(weights, mask, lengths)
    zero = TokenStats(torch.zeros_like(ratios))
    out = TwDPO(0.4)(TokenStats(ratios), zero, batch)
    assert out.losses.item() == pytest.approx(math.log(1 + math.exp(-0.4 * (1.25 + 1.125))), abs=1e-12)
    assert out.chosen_rewards.item() == pytest.approx(0.5)
    assert out.rejected_rewards.item() == pytest.approx(-0.45)
    assert out.extras["unweighted/chosen"].item() == pytest.approx(0.4 * 0.5)
    normalised = TwDPO(0.4, length_scale=False)(TokenStats(ratios), zero, batch)
    assert normalised.losses.item() == pytest.approx(math.log(1 + math.exp(-0.4 * (0.625 + 0.375))), abs=1e-12)
    trained = TwDPO(0.4, length_from=LengthFrom.TRAIN)(TokenStats(ratios), zero, batch)
    assert trained.losses.item() == pytest.approx(math.log(1 + math.exp(-0.4 * (1.25 + 0.75))), abs=1e-12)


OBJECTIVES: list[Callable[[], PreferenceObjective]] = [
    lambda: DPO(0.2),
    lambda: DPO(0.2, label_smoothing=0.1),
    lambda: TwDPO(0.2),
    lambda: TwDPO(2.0, length_scale=False),
]


@pytest.fixture(params=range(len(OBJECTIVES)))
def objective(request: pytest.FixtureRequest) -> PreferenceObjective:
    return OBJECTIVES[request.param]()


@pytest.fixture
def weighted(case: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    mask = case[2]
    raw = torch.rand(mask.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64) * mask
    return raw / raw.sum(-1, keepdim=True), mask.sum(-1).double()


def test_swapping_the_sides_negates_the_margin(
    objective: PreferenceObjective, case: tuple[Tensor, Tensor, Tensor], weighted: tuple[Tensor, Tensor]
) -> None:
    policy, reference, mask = case
    swap = torch.cat([torch.arange(PAIRS, 2 * PAIRS), torch.arange(PAIRS)])
    out, _ = result(objective, policy, reference, mask, *weighted)
    back, _ = result(objective, policy[swap], reference[swap], mask[swap], weighted[0][swap], weighted[1][swap])
    margin = out.chosen_rewards - out.rejected_rewards
    torch.testing.assert_close(back.chosen_rewards - back.rejected_rewards, -margin, rtol=0, atol=1e-14)
    assert margin.abs().min() > 1e-3


def test_values_under_the_mask_never_matter(
    objective: PreferenceObjective, case: tuple[Tensor, Tensor, Tensor], weighted: tuple[Tensor, Tensor]
) -> None:
    policy, reference, mask = case
    clean, clean_grad = result(objective, policy, reference, mask, *weighted)
    dirty_policy = torch.where(mask, policy, torch.tensor(float("-inf"), dtype=torch.float64))
    dirty_reference = torch.where(mask, reference, torch.tensor(float("nan"), dtype=torch.float64))
    dirty, dirty_grad = result(objective, dirty_policy, dirty_reference, mask, *weighted)
    torch.testing.assert_close(dirty.losses, clean.losses, rtol=0, atol=0)
    torch.testing.assert_close(dirty_grad, clean_grad, rtol=0, atol=0)
    assert (dirty_grad[~mask] == 0).all()


def test_gradients_push_chosen_up_and_rejected_down(
    objective: PreferenceObjective, case: tuple[Tensor, Tensor, Tensor], weighted: tuple[Tensor, Tensor]
) -> None:
    policy, reference, mask = case
    _, grad = result(objective, policy, reference, mask, *weighted)
    assert (grad[:PAIRS][mask[:PAIRS]] < 0).all()
    assert (grad[PAIRS:][mask[PAIRS:]] > 0).all()


def test_a_token_without_weight_gets_no_gradient(case: tuple[Tensor, Tensor, Tensor]) -> None:
    policy, reference, mask = case
    weights, lengths = uniform(mask)
    weights[0, 2] = 0.0
    _, grad = result(TwDPO(0.2), policy, reference, mask, weights, lengths)
    assert grad[0, 2] == 0 and grad[0, 1] != 0


def test_rewards_carry_no_gradient(
    objective: PreferenceObjective, case: tuple[Tensor, Tensor, Tensor], weighted: tuple[Tensor, Tensor]
) -> None:
    policy, reference, mask = case
    leaf = policy.clone().requires_grad_()
    out = objective(TokenStats(leaf), TokenStats(reference), make_batch(weighted[0], mask, weighted[1]))
    assert out.losses.requires_grad
    for value in (out.chosen_rewards, out.rejected_rewards, *out.extras.values()):
        assert not value.requires_grad


def test_huge_margins_stay_finite(objective: PreferenceObjective) -> None:
    mask = torch.ones(2, 1, dtype=torch.bool)
    weights, lengths = uniform(mask)
    policy = torch.tensor([[-4000.0], [0.0]], dtype=torch.float64)
    out, grad = result(objective, policy, torch.zeros_like(policy), mask, weights, lengths)
    assert torch.isfinite(out.losses).all() and out.losses.item() > 300
    assert grad[0, 0] < -0.1


def test_losses_agree_with_finite_differences(
    objective: PreferenceObjective, case: tuple[Tensor, Tensor, Tensor], weighted: tuple[Tensor, Tensor]
) -> None:
    policy, reference, mask = case
    batch = make_batch(weighted[0], mask, weighted[1])

    def loss(values: Tensor) -> Tensor:
        return objective(TokenStats(values), TokenStats(reference), batch).losses

    assert torch.autograd.gradcheck(loss, (policy.clone().requires_grad_(),))


def test_reductions_by_hand() -> None:
    values = torch.tensor([[1.0, 2.0, 4.0, 100.0]])
    mask = torch.tensor([[True, True, True, False]])
    weights = torch.tensor([[0.5, 0.0, 1.5, 9.0]])
    cases = {Reduction.SUM: (7.0, 6.5), Reduction.MEAN: (7 / 3, 6.5), Reduction.WEIGHT_MEAN: (7 / 3, 3.25)}
    for how, (plain, weighed) in cases.items():
        assert reduce(values, None, mask, how).item() == pytest.approx(plain)
        assert reduce(values, weights, mask, how).item() == pytest.approx(weighed)
    none = torch.zeros_like(weights)
    assert reduce(values, none, mask, Reduction.WEIGHT_MEAN).item() == 0


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: DPO(0.0), "objective.beta"),
        (lambda: TwDPO(-1.0), "objective.beta"),
        (lambda: DPO(0.1, label_smoothing=0.5), "objective.label_smoothing"),
    ],
)
def test_hyperparameters_outside_their_domain_are_refused(make: Callable[[], object], key: str) -> None:
    with pytest.raises(UserError, match=key):
        make()


def test_a_missing_reference_is_refused(case: tuple[Tensor, Tensor, Tensor], weighted: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(ValueError, match="reference"):
        DPO(0.1)(TokenStats(case[0]), None, make_batch(weighted[0], case[2], weighted[1]))
