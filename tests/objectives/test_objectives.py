"""Objectives one by one: hand-derived numbers, shared terms, options. What holds of all is in test_contract.py."""

import math
from dataclasses import replace
from decimal import Decimal, localcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from attnpo.objectives.base import LengthFrom, PreferenceObjective, Reduction, reduce
from attnpo.objectives.cpo import CPO
from attnpo.objectives.dpo import DPO
from attnpo.objectives.ipo import IPO, LogRatioReduction
from attnpo.objectives.orpo import ORPO
from attnpo.objectives.rdpo import RDPO
from attnpo.objectives.rrhf import RRHF
from attnpo.objectives.simpo import SimPO
from attnpo.objectives.slic_hf import SLiCHF
from attnpo.objectives.terms import LossType, Sft, chosen_nll, log1mexp, log_odds, margin_loss
from attnpo.objectives.twdpo import TwDPO
from attnpo.schema import PreferenceBatch, TokenStats, UserError
from tests.objectives.inputs import Case, make_batch, make_case, make_rows, objective_of, part, with_gradient


@pytest.mark.parametrize("where", list(LengthFrom))
def test_twdpo_with_uniform_weights_is_dpo(where: LengthFrom) -> None:
    case = make_case(DPO())
    uniform = make_rows((7, 3, 1, 4, 7, 2, 5, 1))
    case = case.with_rows(token_weights=uniform.token_weights, source_lengths=uniform.source_lengths)
    for options in ({}, {"loss_type": LossType.ROBUST, "label_smoothing": 0.1, "sft_coef": 0.5}):
        dpo, gradient = with_gradient(DPO(0.3, **options), case)
        tw, tw_gradient = with_gradient(TwDPO(0.3, length_from=where, **options), case)
        torch.testing.assert_close(tw.losses, dpo.losses, rtol=0, atol=1e-14)
        torch.testing.assert_close(tw_gradient, gradient, rtol=0, atol=1e-14)


@pytest.fixture
def pair() -> PreferenceBatch:
    """One pair, two tokens a side; the source counts 2 chosen and 3 rejected ones."""
    weights = torch.tensor([[0.75, 0.25], [0.5, 0.5]], dtype=torch.float64)
    rows = make_rows((2, 2), weights)
    return make_batch(replace(rows, source_lengths=torch.tensor([2.0, 3.0], dtype=torch.float64)))


# log-probs (-1, -2) and (-4, -1): sum_t a_t p_t = -1.25 and -2.5, times |y| as the source counts it -2.5 and -7.5
WEIGHTED: list[tuple[PreferenceObjective, tuple[float, float]]] = [
    *((kind(0.4), (-1.0, -3.0)) for kind in (TwDPO, CPO)),
    (TwDPO(0.4, length_scale=False), (-0.5, -1.0)),
    (CPO(0.4, length_from=LengthFrom.TRAIN), (-1.0, -2.0)),
    (CPO(0.4, length_scale=False), (-0.5, -1.0)),
    (SLiCHF(), (-2.5, -7.5)),
    (SLiCHF(length_scale=False), (-1.25, -2.5)),
    (RDPO(0.4), (-1.0, -3.0)),
    (IPO(0.4, LogRatioReduction.SUM), (-1.0, -3.0)),
    (IPO(0.4, LogRatioReduction.SUM, length_from=LengthFrom.TRAIN), (-1.0, -2.0)),
    (IPO(0.4), (-0.5, -1.0)),
    (SimPO(0.4), (-0.5, -1.0)),
    (ORPO(0.4), (-0.5, -1.0)),
    (RRHF(), (-1.25, -2.5)),
    (RRHF(length_penalty=0.0), (-2.5, -5.0)),
    (RRHF(length_penalty=0.5), (-1.25 * math.sqrt(2), -2.5 * math.sqrt(2))),
]


@pytest.mark.parametrize(("objective", "expected"), WEIGHTED, ids=[str(item[0]) for item in WEIGHTED])
def test_weighted_rewards_by_hand(
    pair: PreferenceBatch, objective: PreferenceObjective, expected: tuple[float, float]
) -> None:
    logps = TokenStats(torch.tensor([[-1.0, -2.0], [-4.0, -1.0]], dtype=torch.float64))
    out = objective(logps, TokenStats(torch.zeros_like(logps.logps)), pair)
    assert (out.chosen_rewards.item(), out.rejected_rewards.item()) == pytest.approx(expected)


def test_a_longer_chosen_response_is_pushed_less_by_rdpo() -> None:
    # Two training tokens against one, log-ratios of 0: the margin is alpha alone, whatever beta and the judge count.
    batch = make_batch(replace(make_rows((2, 1)), source_lengths=torch.tensor([9.0, 9.0], dtype=torch.float64)))
    zero = TokenStats(torch.zeros(2, 2, dtype=torch.float64))
    assert RDPO(0.1, alpha=0.5)(zero, zero, batch).losses.item() == pytest.approx(math.log1p(math.exp(-0.5)))
    assert RDPO(2.0, alpha=0.5)(zero, zero, batch).losses.item() == pytest.approx(math.log1p(math.exp(-0.5)))


# --------------------------------------------------------------------------------------------- losses of a margin


def test_losses_of_a_margin_by_hand() -> None:
    margin = torch.tensor([-2.0, 0.5, 3.0], dtype=torch.float64)
    assert margin_loss(margin, LossType.HINGE).tolist() == [3.0, 0.5, 0.0]
    plus, minus = (torch.log1p(torch.exp(sign * margin)) for sign in (-1, 1))
    torch.testing.assert_close(margin_loss(margin, LossType.SIGMOID), plus)
    torch.testing.assert_close(margin_loss(margin, LossType.SIGMOID, 0.1), 0.9 * plus + 0.1 * minus)
    torch.testing.assert_close(margin_loss(margin, LossType.ROBUST, 0.1), (0.9 * plus - 0.1 * minus) / 0.8)


def test_the_robust_loss_of_flipped_labels_is_the_plain_one_of_true_labels() -> None:
    margin = torch.linspace(-300.0, 300.0, 61, dtype=torch.float64)
    flipped = 0.7 * margin_loss(margin, LossType.ROBUST, 0.3) + 0.3 * margin_loss(-margin, LossType.ROBUST, 0.3)
    torch.testing.assert_close(flipped, margin_loss(margin, LossType.SIGMOID), rtol=1e-10, atol=1e-10)


# --------------------------------------------------------------------------------------------- odds


@pytest.mark.parametrize("x", [-1e-300, -1e-17, -1e-10, -1e-3, -0.5, -0.6931471805, -0.6931471806, -2.0, -40.0, -900.0])
def test_log1mexp_is_exact(x: float) -> None:
    with localcontext() as context:
        context.prec = 60
        kept = min(Decimal(x), -Decimal(torch.finfo(torch.float64).eps))  # a certain response counts as one step short
        expected = float((1 - kept.exp()).ln())
    leaf = torch.tensor([x], dtype=torch.float64, requires_grad=True)
    found = log1mexp(leaf)
    assert found.item() == pytest.approx(expected, rel=1e-14, abs=0)
    found.sum().backward()
    assert leaf.grad is not None and leaf.grad.isfinite().all()


def test_odds_of_even_chances_are_one() -> None:
    half = torch.tensor([math.log(0.5), math.log(0.75)], dtype=torch.float64)
    torch.testing.assert_close(log_odds(half), torch.tensor([0.0, math.log(3.0)], dtype=torch.float64))


def test_orpo_keeps_the_slope_of_a_nearly_certain_response() -> None:
    """``d/dA -log sigmoid(o_w - o_l) = -sigmoid(o_l - o_w) / (1 - exp(A_w))``, at A_w = -1e-9 near -exp(o_l)."""
    batch = make_batch(make_rows((1, 1)))
    policy = TokenStats(torch.tensor([[-1e-9, 0.0], [-2.0, 0.0]], dtype=torch.float64))
    _, gradient = with_gradient(ORPO(1.0), Case(policy, None, batch))
    odds = math.exp(-2.0) / (1 - math.exp(-2.0))
    assert gradient[0, 0].item() == pytest.approx(-1.0 - odds, rel=1e-6)  # SFT and preference
    assert gradient[1, 0].item() == pytest.approx(1e-9 * odds / (1 - math.exp(-2.0)), rel=1e-6)


# --------------------------------------------------------------------------------------------- supervised term


def test_sft_terms_by_hand() -> None:
    # Two chosen responses, of 2 tokens (sum -3) and of 1 (-6); 6 tokens in the step of 3 pairs.
    mask = make_rows((2, 1, 1, 1)).response_mask
    logps = torch.tensor([[-1.0, -2.0], [-6.0, -50.0], [-9.0, 0.0], [-9.0, 0.0]], dtype=torch.float64)
    assert chosen_nll(logps, mask, Sft.SUM).tolist() == [3.0, 6.0]
    assert chosen_nll(logps, mask, Sft.MEAN).tolist() == [1.5, 6.0]
    assert chosen_nll(logps, mask, Sft.BATCH, pairs_per_token=3 / 6).tolist() == [1.5, 3.0]
    batch = make_batch(make_rows((2, 1, 1, 1)), step_pairs=3, step_tokens=(6, 9))
    assert CPO()(TokenStats(logps), None, batch).extras["losses/sft"].tolist() == [1.5, 3.0]


def test_a_token_mean_of_the_step_holds_under_any_splitting_and_with_void_pairs() -> None:
    objective = CPO(0.1, sft_coef=2.0)
    case = make_case(objective)
    weight = torch.tensor([0.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    case = replace(case, batch=replace(case.batch, pair_weight=weight, step_tokens=(3 + 1 + 4, 2 + 5 + 1)))

    def step(parts: list[Case]) -> tuple[Tensor, Tensor]:
        """Sums over the parts as the module forms them: weighted losses over the step's pairs."""
        outs = [(objective(item.policy, None, item.batch), item.batch.pair_weight) for item in parts]
        preference = sum(((out.extras["losses/preference"] * void).sum() / 4 for out, void in outs), torch.tensor(0.0))
        return preference, sum(((out.losses * void).sum() / 4 for out, void in outs), torch.tensor(0.0))

    chosen = case.policy.logps[:4][case.mask[:4] & (weight > 0)[:, None]]
    for parts in ([case], [part(case, [0, 2]), part(case, [1, 3])], [part(case, [i]) for i in range(4)]):
        preference, total = step(parts)
        torch.testing.assert_close(total - preference, 2.0 * -chosen.mean(), rtol=1e-12, atol=1e-12)


def test_a_token_mean_of_an_uncounted_step_is_refused() -> None:
    case = make_case(CPO())
    with pytest.raises(ValueError, match="step_tokens"):
        CPO()(case.policy, None, replace(case.batch, step_tokens=(0, 0)))
    CPO(sft=Sft.SUM)(case.policy, None, replace(case.batch, step_tokens=(0, 0)))


# --------------------------------------------------------------------------------------------- keys


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


# What is below zero or no number is refused for every key: tests/bad_input/test_numbers.py.
BETAS = ("dpo", "twdpo", "ipo", "cpo", "rdpo", "simpo", "kto", "otpo", "tdpo1", "tdpo2", "tidpo", "tis_dpo")
OUTSIDE: list[tuple[str, str, Any]] = [
    *((option, "beta", 0.0) for option in BETAS),
    *((option, "label_smoothing", 0.5) for option in ("dpo", "twdpo", "cpo", "rdpo", "simpo", "otpo", "tis_dpo")),
    *(("kto", key, 0.0) for key in ("desirable_weight", "undesirable_weight")),
    ("orpo", "lam", 0.0),
    ("slic_hf", "delta", 0.0),
]


@pytest.mark.parametrize(("option", "key", "bad"), OUTSIDE)
def test_hyperparameters_outside_their_domain_are_refused(option: str, key: str, bad: float) -> None:
    with pytest.raises(UserError, match=rf"objective\.{key}( must be|: expected) .*got {bad}"):
        objective_of(option, (key, bad))


@pytest.mark.parametrize("option", ["dpo", "twdpo", "cpo", "simpo"])
def test_smoothing_without_effect_is_refused(option: str) -> None:
    with pytest.raises(UserError, match=r"objective\.label_smoothing must be 0 with objective\.loss_type=hinge"):
        objective_of(option, ("loss_type", "hinge"), ("label_smoothing", 0.1))


def test_keys_without_effect_are_named() -> None:
    assert (
        set(IPO().unused_keys()) == {"length_scale", "length_from"}
        and IPO(reduction=LogRatioReduction.SUM).unused_keys() == {}
    )
    for silent, spoken in ((DPO(), DPO(sft_coef=1.0)), (CPO(sft_coef=0.0), CPO()), (SimPO(), SimPO(sft_weight=1.0))):
        assert set(silent.unused_keys()) == {"sft"} and spoken.unused_keys() == {}
