"""TDPO1 and TDPO2: golden records with gradients, numbers by hand, stop-gradients, token weights, bad input."""

import json
import math
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attnpo.objectives.base import LengthFrom, PreferenceObjective
from attnpo.objectives.dpo import DPO
from attnpo.objectives.tdpo import TDPO1, TDPO2, kl_of
from attnpo.objectives.twdpo import TwDPO
from attnpo.schema import ObjectiveOutput, PreferenceBatch, RowGroup, TokenStats, UserError
from tests.conformance import distributions
from tests.conformance.fields import Record
from tests.conformance.records import Comparison, compare_expected

PAIRS, WIDTH = 3, 7
COUNTS = torch.tensor([7, 3, 1, 4, 7, 2])
MASK = torch.arange(WIDTH) < COUNTS[:, None]
NAMES = ("tdpo1", "tdpo2")


@dataclass(frozen=True)
class Case:
    """Policy and reference log-probabilities and the KL at each token; ratios are policy less reference."""

    policy: Tensor
    reference: Tensor
    kl: Tensor

    def stats(self) -> tuple[TokenStats, TokenStats]:
        return TokenStats(self.policy, joint={"kl_ref_policy": self.kl}), TokenStats(self.reference)


@pytest.fixture
def case() -> Case:
    generator = torch.Generator().manual_seed(3)
    policy, reference, kl = (torch.rand(2 * PAIRS, WIDTH, generator=generator, dtype=torch.float64) for _ in range(3))
    return Case(-3 * policy, -3 * reference, 0.4 * kl)


def make_batch(weights: Tensor | None = None, mask: Tensor = MASK, lengths: Tensor | None = None) -> PreferenceBatch:
    """A batch with uniform weights where none are given."""
    counts = mask.sum(-1).double()
    rows = RowGroup(
        response_ids=torch.zeros(mask.shape, dtype=torch.long),
        response_mask=mask,
        token_weights={"reward": mask / counts[:, None] if weights is None else weights},
        source_lengths=counts if lengths is None else lengths,
        reference_logps=None,
    )
    pairs = mask.shape[0] // 2
    return PreferenceBatch({"main": rows}, torch.ones(pairs), tuple(map(str, range(pairs))), step_pairs=pairs)


def result(
    objective: PreferenceObjective, case: Case, batch: PreferenceBatch
) -> tuple[ObjectiveOutput, Tensor, Tensor]:
    """The output and the gradients of the summed losses with respect to log-probabilities and KLs."""
    leaves = replace(case, policy=case.policy.clone().requires_grad_(), kl=case.kl.clone().requires_grad_())
    out = objective(*leaves.stats(), batch)
    out.losses.sum().backward()
    assert leaves.policy.grad is not None and leaves.kl.grad is not None
    return out, leaves.policy.grad, leaves.kl.grad


def random_weights() -> Tensor:
    raw = torch.rand(MASK.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64) * MASK
    return raw / raw.sum(-1, keepdim=True)


# ------------------------------------------------------------------------------------------------ golden records


def golden(vectors: Path, name: str) -> list[dict[str, Any]]:
    records = json.loads((vectors / "losses.json").read_text())["records"]
    found = [record for record in records if record["name"] == name]
    assert len(found) == 4
    return found


@pytest.mark.parametrize("name", NAMES)
def test_golden_records_agree_to_the_gradient_of_the_logits(vectors: Path, name: str) -> None:
    for record in golden(vectors, name):
        comparison = Comparison()
        distributions.recompute(Record.read(record), comparison)
        assert not comparison.problems and not comparison.variant and 0 < comparison.absolute < 1e-13


@pytest.mark.parametrize("way", list(distributions.WAYS))
def test_only_the_gradients_tell_a_stop_gradient_apart(vectors: Path, way: str) -> None:
    """TDPO1's formula with both K passing gradient is TDPO2's at alpha 1 in all but the chosen side's gradient."""
    record = Record.read(golden(vectors, "tdpo2")[3])
    assert record.hyperparameters.values == {"beta": 0.5, "alpha": 1.0}
    results = distributions.evaluate(TDPO1(0.5), 0.5, record.inputs, way)
    comparison = Comparison()
    compare_expected(record, comparison, lambda filling: results, way)
    assert [problem.partition(" ")[0] for problem in comparison.problems] == ["grad_chosen_policy_logits"]


@pytest.mark.parametrize(
    "quantity", ["loss", "chosen_seq_kl", "rejected_rewards_logged", "grad_rejected_policy_logits"]
)
def test_a_record_with_another_number_fails(vectors: Path, quantity: str) -> None:
    record = deepcopy(golden(vectors, "tdpo2")[0])
    values = torch.tensor(record["expected"][quantity], dtype=torch.float64)
    values.view(-1)[0] += 1e-8
    record["expected"][quantity] = values.tolist()
    comparison = Comparison()
    distributions.recompute(Record.read(record), comparison)
    assert {problem.split("[")[0].partition(" ")[0] for problem in comparison.problems} == {quantity}


# ------------------------------------------------------------------------------------------------ by hand


def by_hand() -> tuple[Case, PreferenceBatch]:
    # One pair, two tokens a side: S(d_w) = 1 - 0.5 = 0.5, S(d_l) = -1 + 0.25 = -0.75, K_w = 0.3, K_l = 0.7.
    ratios = torch.tensor([[1.0, -0.5], [-1.0, 0.25]], dtype=torch.float64)
    kl = torch.tensor([[0.1, 0.2], [0.3, 0.4]], dtype=torch.float64)
    return Case(ratios, torch.zeros_like(ratios), kl), make_batch(mask=torch.ones(2, 2, dtype=torch.bool))


def test_both_by_hand() -> None:
    case, batch = by_hand()
    first, second = TDPO1(0.4)(*case.stats(), batch), TDPO2(0.4, 0.25)(*case.stats(), batch)
    assert first.losses.item() == pytest.approx(math.log(1 + math.exp(-0.4 * (1.25 - 0.4))), abs=1e-12)
    assert second.losses.item() == pytest.approx(math.log(1 + math.exp(-0.4 * (1.25 - 0.25 * 0.4))), abs=1e-12)
    for out in (first, second):  # logged rewards know no alpha
        assert out.chosen_rewards.item() == pytest.approx(0.4 * 0.8)
        assert out.rejected_rewards.item() == pytest.approx(0.4 * -0.05)
        assert out.extras["seq_kl/chosen"].item() == pytest.approx(0.3)
        assert out.extras["seq_kl/rejected"].item() == pytest.approx(0.7)


def test_weights_multiply_the_log_ratios_and_not_the_kl() -> None:
    # a_w = (.75, .25), |y_w| = 2 -> 2 (.75 - .125) = 1.25; a_l = (.5, .5), |y_l| = 3 -> 3 (-.375) = -1.125.
    case, batch = by_hand()
    weights = torch.tensor([[0.75, 0.25], [0.5, 0.5]], dtype=torch.float64)
    batch = make_batch(weights, batch.main.response_mask, torch.tensor([2.0, 3.0], dtype=torch.float64))
    for objective, margin in (
        (TDPO1(0.4), 2.375 - 0.4),
        (TDPO1(0.4, length_scale=False), 1.0 - 0.4),
        (TDPO2(0.4, 0.25), 2.375 - 0.1),
        (TDPO2(0.4, 0.25, length_from=LengthFrom.TRAIN), 2.0 - 0.1),
    ):
        out = objective(*case.stats(), batch)
        assert out.losses.item() == pytest.approx(math.log(1 + math.exp(-0.4 * margin)), abs=1e-12)
        assert out.extras["seq_kl/rejected"].item() == pytest.approx(0.7)


# ------------------------------------------------------------------------------------------------ identities


def test_the_kl_passes_gradient_on_both_sides_of_tdpo1_and_the_rejected_side_of_tdpo2(case: Case) -> None:
    batch = make_batch()
    _, _, first = result(TDPO1(0.3), case, batch)
    _, _, second = result(TDPO2(0.3, 0.5), case, batch)
    assert bool((first[:PAIRS][MASK[:PAIRS]] < 0).all()) and bool((first[PAIRS:][MASK[PAIRS:]] > 0).all())
    assert not second[:PAIRS].any() and bool((second[PAIRS:][MASK[PAIRS:]] > 0).all())


def test_without_kl_they_are_dpo_and_with_weights_twdpo(case: Case) -> None:
    none, weights = replace(case, kl=torch.zeros_like(case.kl)), random_weights()
    for batch, plain in ((make_batch(), DPO(0.3)), (make_batch(weights), TwDPO(0.3))):
        expected, expected_gradient = plain_result(plain, none, batch)
        for objective, given in ((TDPO1(0.3), none), (TDPO2(0.3, 0.5), none), (TDPO2(0.3, 0.0), case)):
            out, gradient, _ = result(objective, given, batch)
            torch.testing.assert_close(out.losses, expected, rtol=0, atol=1e-14)
            torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-14)


def plain_result(objective: PreferenceObjective, case: Case, batch: PreferenceBatch) -> tuple[Tensor, Tensor]:
    """Losses of an objective that reads no KL, and their gradient."""
    leaf = case.policy.clone().requires_grad_()
    losses = objective(TokenStats(leaf), TokenStats(case.reference), batch).losses
    (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    return losses.detach(), gradient


def test_a_token_without_weight_gets_no_gradient_but_its_kl_counts(case: Case) -> None:
    weights = random_weights()
    weights[[0, 3], 1] = 0.0
    _, gradient, of_kl = result(TDPO1(0.3), case, make_batch(weights))
    assert not gradient[[0, 3], 1].any() and of_kl[[0, 3], 1].all() and gradient[[0, 3], 0].all()


@pytest.mark.parametrize("objective", [TDPO1(0.3), TDPO2(0.3, 0.5)])
def test_swapping_the_sides_negates_the_margin(objective: PreferenceObjective, case: Case) -> None:
    swap = torch.tensor([3, 4, 5, 0, 1, 2])
    other = Case(case.policy[swap], case.reference[swap], case.kl[swap])
    there = objective(*case.stats(), make_batch())
    back = objective(*other.stats(), make_batch(mask=MASK[swap]))
    # loss(z) - loss(-z) = -z, so the two margins are each other's negative where the losses differ by it.
    margin = torch.log(torch.expm1(there.losses)).neg()
    torch.testing.assert_close(torch.log(torch.expm1(back.losses)), margin, rtol=0, atol=1e-12)
    torch.testing.assert_close(back.chosen_rewards, there.rejected_rewards, rtol=0, atol=0)


@pytest.mark.parametrize("objective", [TDPO1(0.3), TDPO2(0.3, 0.5)])
@pytest.mark.parametrize("garbage", [float("inf"), -float("inf"), float("nan")])
def test_values_under_the_mask_never_matter(objective: PreferenceObjective, garbage: float, case: Case) -> None:
    dirty = Case(*(values.masked_fill(~MASK, garbage) for values in (case.policy, case.reference, case.kl)))
    weights = random_weights()
    clean, found = result(objective, case, make_batch(weights)), result(objective, dirty, make_batch(weights))
    assert torch.equal(clean[0].losses, found[0].losses) and torch.equal(clean[1], found[1])
    assert torch.equal(clean[2], found[2]) and torch.equal(clean[0].chosen_rewards, found[0].chosen_rewards)
    assert not found[2][~MASK].any()


@pytest.mark.parametrize("objective", [TDPO1(1.0), TDPO2(1.0, 0.5)])
def test_margins_of_several_hundred_keep_loss_and_gradient(objective: PreferenceObjective, case: Case) -> None:
    far = replace(case, policy=case.policy - 300.0 * torch.tensor([1, 0, 0, 0, 1, 1])[:, None])
    out, gradient, of_kl = result(objective, far, make_batch())
    assert bool(out.losses.isfinite().all()) and out.losses[0] > 1000 and 0 <= out.losses[1] < 1e-100
    assert gradient[0][MASK[0]].tolist() == pytest.approx([-1.0] * 7) and bool(of_kl.isfinite().all())


def test_rewards_and_extras_are_detached(case: Case) -> None:
    leaves = replace(case, policy=case.policy.requires_grad_(), kl=case.kl.requires_grad_())
    for objective in (TDPO1(), TDPO2()):
        out = objective(*leaves.stats(), make_batch())
        assert out.losses.requires_grad
        read = (out.chosen_rewards, out.rejected_rewards, *out.extras.values())
        assert not any(value.requires_grad for value in read)


# ------------------------------------------------------------------------------------------------ bad input


def test_a_batch_without_the_statistic_or_a_reference_is_an_error(case: Case) -> None:
    policy, reference = case.stats()
    for objective in (TDPO1(), TDPO2()):
        assert objective.requires == {"reference", "token_weights", "joint:kl_ref_policy"}
        with pytest.raises(ValueError, match="reads joint:kl_ref_policy, and it was not computed"):
            objective(TokenStats(case.policy), reference, make_batch())
        with pytest.raises(ValueError, match="none was computed"):
            objective(policy, None, make_batch())
    with pytest.raises(ValueError, match="kl_ref_policy"):
        kl_of(TokenStats(case.policy, joint={"kl_policy_ref": case.kl}))


@pytest.mark.parametrize("beta", [0.0, -1.0, float("nan"), float("inf")])
def test_beta_outside_its_domain_is_refused(beta: float) -> None:
    for make in (TDPO1, TDPO2):
        with pytest.raises(UserError, match=r"objective.beta must be above 0"):
            make(beta)


@pytest.mark.parametrize("alpha", [-0.1, float("nan"), float("inf")])
def test_alpha_outside_its_domain_is_refused(alpha: float) -> None:
    with pytest.raises(UserError, match=r"objective.alpha must be .*at least 0"):
        TDPO2(0.1, alpha)
    assert TDPO2(0.1, 0.0).alpha == 0.0
