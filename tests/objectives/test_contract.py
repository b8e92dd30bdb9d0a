"""What holds of every objective in configs/objective, built as training builds it; a new option is tested unasked."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attnpo.config.compose import list_groups
from attnpo.objectives.base import PreferenceObjective, Reduction, StepObjective, reduce
from tests.objectives.inputs import (
    COUNTS,
    Case,
    call,
    each,
    garbled,
    make_case,
    make_rows,
    objective_of,
    part,
    single,
    swapped,
    wider,
    with_gradient,
)

OPTIONS = list_groups()["objective"]
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("dpo", {"beta": 0.2, "label_smoothing": 0.1}),
    ("dpo", {"beta": 0.2, "loss_type": "hinge", "sft_coef": 0.3}),
    ("dpo", {"beta": 0.2, "loss_type": "robust", "label_smoothing": 0.1}),
    ("dpo", {"beta": 0.2, "sft_coef": 0.3, "sft": "batch"}),
    ("twdpo", {"beta": 2.0, "length_scale": False}),
    ("twdpo", {"beta": 0.2, "length_from": "train", "loss_type": "hinge"}),
    ("twdpo", {"beta": 0.2, "loss_type": "robust", "label_smoothing": 0.2, "sft_coef": 0.3, "sft": "sum"}),
    ("dpo", {"anchor": 0.05}),
    ("twdpo", {"anchor": 0.05, "anchor_on": "low", "sft_coef": 0.3}),
    ("ipo", {"reduction": "sum"}),
    ("cpo", {"sft": "sum", "loss_type": "hinge"}),
    ("cpo", {"sft": "mean", "label_smoothing": 0.1}),
    ("cpo", {"sft_coef": 0.0}),
    ("orpo", {"sft": "batch", "lam": 0.5}),
    ("rdpo", {"alpha": 0.5, "label_smoothing": 0.1}),
    ("simpo", {"loss_type": "hinge", "sft_weight": 0.5}),
    ("simpo", {"label_smoothing": 0.1}),
    ("rrhf", {"length_penalty": 0.5, "sft": "batch"}),
    ("slic_hf", {"delta": 10.0, "sft": "mean"}),
    ("tis_dpo", {"token_level": True}),
]
KEYS = [(option, ()) for option in OPTIONS] + [(option, tuple(values.items())) for option, values in VARIANTS]
INPUTS = {"reference", "token_weights", "factors", "hidden", "input_gradient", "several_pairs"}


@pytest.fixture(params=KEYS, ids=[" ".join([name, *(f"{k}={v}" for k, v in values)]) for name, values in KEYS])
def objective(request: pytest.FixtureRequest) -> PreferenceObjective:
    option, values = request.param
    return objective_of(option, *values)


@pytest.fixture
def case(objective: PreferenceObjective) -> Case:
    return make_case(objective)


def close(found: Tensor, expected: Tensor, size: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, rtol=size, atol=size)


def test_what_it_reads_is_an_input_that_training_knows(objective: PreferenceObjective) -> None:
    plain = {name for name in objective.requires if ":" not in name}
    assert plain <= INPUTS
    assert {name.partition(":")[0] for name in objective.requires - plain} <= {"vocab", "joint", "group", "ahead"}
    assert isinstance(objective, StepObjective) == any(name.startswith("ahead:") for name in objective.requires)


def test_a_reference_is_read_exactly_where_it_is_named(objective: PreferenceObjective, case: Case) -> None:
    if "reference" not in objective.requires:
        assert case.reference is None and call(objective, case).losses.isfinite().all()
        return
    with pytest.raises(ValueError, match="reference"):
        objective(case.policy, None, case.batch)


def test_values_under_the_masks_never_matter(objective: PreferenceObjective, case: Case) -> None:
    clean, gradient = with_gradient(objective, case)
    dirty, dirty_gradient = with_gradient(objective, garbled(case))
    close(dirty.losses, clean.losses, 0.0)
    close(dirty.chosen_rewards, clean.chosen_rewards, 0.0)
    close(dirty_gradient, gradient, 0.0)
    assert (dirty_gradient[~case.mask] == 0).all()
    assert dirty.extras.keys() == clean.extras.keys()
    for name, value in clean.extras.items():
        close(dirty.extras[name], value, 0.0)


def test_padding_never_matters(objective: PreferenceObjective, case: Case) -> None:
    found, gradient = with_gradient(objective, wider(case))
    expected, narrow = with_gradient(objective, case)
    close(found.losses, expected.losses)
    close(gradient[:, : narrow.shape[1]], narrow)


def test_swapping_the_sides_swaps_the_rewards(objective: PreferenceObjective, case: Case) -> None:
    out, back = call(objective, case), call(objective, swapped(case))
    close(back.chosen_rewards, out.rejected_rewards)
    close(back.rejected_rewards, out.chosen_rewards)
    assert (out.chosen_rewards - out.rejected_rewards).abs().min() > 1e-4


def test_gradients_push_chosen_up_and_rejected_down(objective: PreferenceObjective) -> None:
    losing = make_case(objective, losing=True)
    out, gradient = with_gradient(objective, losing)
    pairs = losing.batch.pairs
    assert (out.chosen_rewards < out.rejected_rewards).all()
    assert (gradient[:pairs][losing.mask[:pairs]] < 0).all()
    assert (gradient[pairs:][losing.mask[pairs:]] > 0).all()


def test_rewards_and_extras_carry_no_gradient(objective: PreferenceObjective, case: Case) -> None:
    policy = each(case.policy, lambda _, value: value.clone().requires_grad_(value.is_floating_point()))
    out = call(objective, replace(case, policy=policy))
    assert out.losses.requires_grad
    for name, value in {"chosen": out.chosen_rewards, "rejected": out.rejected_rewards, **out.extras}.items():
        assert not value.requires_grad, name


def test_splitting_the_step_changes_no_loss(objective: PreferenceObjective, case: Case) -> None:
    whole, gradient = with_gradient(objective, case)
    for pairs in ([3], [0, 2], [1]):
        found, share = with_gradient(objective, part(case, pairs))
        close(found.losses, whole.losses[pairs])
        close(share, gradient[pairs + [index + case.batch.pairs for index in pairs]])


def test_a_pair_never_moves_the_loss_of_another(objective: PreferenceObjective, case: Case) -> None:
    """So that a void pair, whose loss counts nothing, is as if it were not there."""
    first = torch.zeros_like(case.mask)
    first[[0, case.batch.pairs]] = True
    moved = torch.where(first, 3 * case.policy.logps, case.policy.logps)
    out, other = call(objective, case), call(objective, case.with_policy(moved * case.mask))
    close(other.losses[1:], out.losses[1:], 0.0)
    assert other.losses[0] != out.losses[0]


def test_a_step_of_void_pairs_has_a_loss(objective: PreferenceObjective, case: Case) -> None:
    weight = torch.zeros_like(case.batch.pair_weight)
    void = replace(case, batch=replace(case.batch, pair_weight=weight, step_tokens=(0, 0)))
    void = void.with_rows(token_weights={"reward": torch.zeros_like(case.policy.logps)})
    out, gradient = with_gradient(objective, void)
    assert out.losses.isfinite().all() and gradient.isfinite().all()


def test_losses_agree_with_finite_differences(objective: PreferenceObjective, case: Case) -> None:
    def losses(logps: Tensor) -> Tensor:
        return call(objective, case.with_policy(logps)).losses

    assert torch.autograd.gradcheck(losses, (case.policy.logps.clone().requires_grad_(),))


def test_uniform_weights_are_no_weights(objective: PreferenceObjective, case: Case) -> None:
    uniform = make_rows(COUNTS[0] + COUNTS[1])
    ones = {"reward": case.mask.double()}
    if (
        "factors" in objective.requires
    ):  # takes no distribution; its rewards with factors of 1 are those without weights
        out = call(objective, case.with_rows(token_weights=ones))
        drift = vars(objective)["beta"] * out.extras.get("seq_kl/chosen", torch.zeros_like(out.chosen_rewards))
        close(out.chosen_rewards - drift, out.extras["unweighted/chosen"])
        assert (call(objective, case).chosen_rewards - drift != out.extras["unweighted/chosen"]).all()
        return
    scaled = case.with_rows(token_weights=uniform.token_weights, source_lengths=uniform.source_lengths)
    plain = case.with_rows(token_weights=ones, source_lengths=uniform.source_lengths, factors=True)
    if getattr(objective, "length_scale", True):
        close(call(objective, scaled).losses, call(objective, plain).losses)
    else:  # the sum without |y| is the mean
        close(call(objective, scaled).chosen_rewards * torch.tensor(COUNTS[0]), call(objective, plain).chosen_rewards)


# What the reward is made of: log-ratios or log-probs, which reduction over the tokens, the factor's name.
PLAIN = {
    "dpo": ("ratios", Reduction.SUM, "beta"),
    "twdpo": ("ratios", Reduction.SUM, "beta"),
    "ipo": ("ratios", Reduction.MEAN, "beta"),
    "kto": ("ratios", Reduction.SUM, "beta"),
    "rdpo": ("ratios", Reduction.SUM, "beta"),
    "cpo": ("logps", Reduction.SUM, "beta"),
    "orpo": ("logps", Reduction.MEAN, "lam"),
    "simpo": ("logps", Reduction.MEAN, "beta"),
    "rrhf": ("logps", Reduction.MEAN, ""),
    "slic_hf": ("logps", Reduction.SUM, ""),
}


@pytest.mark.parametrize("option", PLAIN)
def test_rewards_under_uniform_weights_are_sums_and_means_without_weights(option: str) -> None:
    objective, (kind, how, factor) = objective_of(option), PLAIN[option]
    uniform = make_rows(COUNTS[0] + COUNTS[1])
    case = make_case(objective).with_rows(token_weights=uniform.token_weights, source_lengths=uniform.source_lengths)
    values = case.policy.logps
    if kind == "ratios":
        assert case.reference is not None
        values = values - case.reference.logps
    plain = reduce(values, None, case.mask, how) * getattr(objective, factor, 1.0)
    out = call(objective, case)
    close(torch.cat([out.chosen_rewards, out.rejected_rewards]), plain)


def test_weights_are_read_exactly_where_they_are_named(objective: PreferenceObjective, case: Case) -> None:
    doubled = case.with_rows(token_weights={"reward": 2 * case.batch.main.token_weights["reward"]})
    out, other = call(objective, case), call(objective, doubled)
    if "token_weights" in objective.requires:
        assert (out.chosen_rewards != other.chosen_rewards).all()
        for name in out.extras.keys() & {"losses/sft", "kl", "seq_kl/chosen", "seq_kl/rejected"}:
            close(other.extras[name], out.extras[name], 0.0)
    else:
        close(other.losses, out.losses, 0.0)


def test_a_token_without_weight_is_not_pushed(objective: PreferenceObjective) -> None:
    """On the rejected side, where no SFT term reads the token."""
    case = make_case(objective, losing=True)
    weights = case.batch.main.token_weights["reward"].clone()
    row = case.batch.pairs
    weights[row, 2] = 0.0
    _, gradient = with_gradient(objective, case.with_rows(token_weights={"reward": weights}))
    assert (gradient[row, 2] == 0) == ("token_weights" in objective.requires)
    assert gradient[row, 1] != 0


@pytest.mark.parametrize("losing", [True, False])
def test_margins_of_several_hundred_keep_loss_and_gradient(objective: PreferenceObjective, losing: bool) -> None:
    case = make_case(objective, losing=True)
    case = case if losing else swapped(case)
    base = torch.zeros_like(case.policy.logps) if case.reference is None else case.reference.logps
    step = case.policy.logps - base
    out = call(objective, case)
    size = float(500 / (out.chosen_rewards - out.rejected_rewards).abs().min())

    def loss(scale: float) -> Tensor:
        return call(objective, case.with_policy(base + scale * step)).losses.sum()

    far, gradient = with_gradient(objective, case.with_policy(base + size * step))
    assert far.losses.isfinite().all() and gradient.isfinite().all()
    h = 1e-5 * size
    slope = (loss(size + h) - loss(size - h)) / (2 * h)
    close((gradient * step).sum(), slope, 1e-5)
    small, gradient32 = with_gradient(objective, single(case.with_policy(base + size * step)))
    torch.testing.assert_close(small.losses.double(), far.losses, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(gradient32.double(), gradient, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("sure", [0.0, -1e-9])
def test_certain_and_one_token_responses_stay_finite(objective: PreferenceObjective, sure: float) -> None:
    case = make_case(objective)
    pairs = case.batch.pairs
    for rows in (slice(0, pairs), slice(pairs, None), slice(None)):
        logps = case.policy.logps.clone()
        logps[rows] = sure
        for made in (case.with_policy(logps * case.mask), single(case.with_policy(logps * case.mask))):
            out, gradient = with_gradient(objective, made)
            assert out.losses.isfinite().all() and gradient.isfinite().all()
            assert out.chosen_rewards.isfinite().all() and out.rejected_rewards.isfinite().all()


def test_the_sums_ahead_of_a_step_add_up(objective: PreferenceObjective, case: Case) -> None:
    if not isinstance(objective, StepObjective):
        assert case.ahead == {}
        return
    assert case.ahead
    for policy, reference, rows in case.ahead.values():
        alone = Case(policy, reference, replace(case.batch, groups={"main": rows}))
        dirty = garbled(alone)
        whole = objective.step_sums(policy, reference, rows)
        spoiled = objective.step_sums(dirty.policy, dirty.reference, dirty.batch.main)
        assert whole and whole.keys() == spoiled.keys()
        for name, value in whole.items():
            close(spoiled[name], value, 0.0)
            assert not value.requires_grad
