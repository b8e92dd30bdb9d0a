"""KTO: hand-derived numbers, what z is and is not, weights, gradients."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attnpo.objectives.base import LengthFrom, PreferenceObjective, StepObjective
from attnpo.objectives.kto import KTO
from attnpo.schema import ObjectiveOutput, PreferenceBatch, RowGroup, TokenStats, UserError
from tests.conformance.fields import Record
from tests.conformance.records import Comparison
from tests.conformance.unpaired import recompute

PAIRS, WIDTH = 3, 7


def rows_of(mask: Tensor, weights: Tensor | None = None, lengths: Tensor | None = None) -> RowGroup:
    counts = mask.sum(-1).double()
    return RowGroup(
        response_ids=torch.zeros(mask.shape, dtype=torch.long),
        response_mask=mask,
        token_weights={"reward": mask / counts[:, None] if weights is None else weights},
        source_lengths=counts if lengths is None else lengths,
        reference_logps=None,
    )


def state_of(kl: float) -> dict[str, Tensor]:
    """The sums of four mismatched rows whose mean is ``kl``."""
    return {"kl_sum": torch.tensor(4 * kl, dtype=torch.float64), "kl_rows": torch.tensor(4.0, dtype=torch.float64)}


def batch_of(rows: RowGroup, kl: float) -> PreferenceBatch:
    pairs = rows.response_mask.shape[0] // 2
    ids = tuple(map(str, range(pairs)))
    return PreferenceBatch({"main": rows}, torch.ones(pairs), ids, step_pairs=pairs, state=state_of(kl))


def result(objective: KTO, ratios: Tensor, batch: PreferenceBatch) -> tuple[ObjectiveOutput, Tensor]:
    """Output and gradient for a policy that differs from a reference of zeros by ``ratios``."""
    leaf = ratios.clone().requires_grad_()
    out = objective(TokenStats(leaf), TokenStats(torch.zeros_like(ratios)), batch)
    out.losses.sum().backward()
    assert leaf.grad is not None
    return out, leaf.grad


@pytest.fixture
def case() -> tuple[Tensor, Tensor]:
    """Log-ratios and a mask of responses of 1 to 7 tokens, double precision."""
    generator = torch.Generator().manual_seed(3)
    ratios = torch.randn(2 * PAIRS, WIDTH, generator=generator, dtype=torch.float64)
    return ratios, torch.arange(WIDTH) < torch.tensor([7, 3, 1, 4, 7, 2])[:, None]


def one_pair(chosen: float, rejected: float) -> tuple[Tensor, RowGroup]:
    """A pair of single tokens with these log-ratios."""
    return torch.tensor([[chosen], [rejected]], dtype=torch.float64), rows_of(torch.ones(2, 1, dtype=torch.bool))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_loss_by_hand() -> None:
    """beta multiplies z too; each side has its own weight; a pair's loss is the mean of its two examples."""
    ratios, rows = one_pair(1.5, -0.5)
    out, gradient = result(KTO(0.2, 3.0, 5.0), ratios, batch_of(rows, 0.7))
    desirable, undesirable = 0.2 * (1.5 - 0.7), 0.2 * (0.7 + 0.5)
    assert out.losses.item() == pytest.approx(0.5 * (3 * (1 - sigmoid(desirable)) + 5 * (1 - sigmoid(undesirable))))
    assert out.chosen_rewards.item() == pytest.approx(0.3) and out.rejected_rewards.item() == pytest.approx(-0.1)
    slope = [sigmoid(x) * (1 - sigmoid(x)) for x in (desirable, undesirable)]
    assert gradient.flatten().tolist() == pytest.approx([-0.5 * 3 * 0.2 * slope[0], 0.5 * 5 * 0.2 * slope[1]])


def test_policy_equal_to_reference_gives_a_half() -> None:
    ratios, rows = one_pair(0.0, 0.0)
    assert result(KTO(0.3), ratios, batch_of(rows, 0.0))[0].losses.item() == pytest.approx(0.5)


def test_a_negative_mean_counts_as_none_and_is_clamped_after_averaging() -> None:
    objective = KTO(0.2)
    ratios, rows = one_pair(1.5, -0.5)
    plain, negative = (result(objective, ratios, batch_of(rows, kl))[0] for kl in (0.0, -3.0))
    assert torch.equal(plain.losses, negative.losses) and negative.extras["kl"].tolist() == [0.0]
    # Rows of +2 and -1: clamped one by one their mean would be 1.
    mask = torch.ones(2, 1, dtype=torch.bool)
    zero = TokenStats(torch.zeros(2, 1))
    state = objective.sums(TokenStats(torch.tensor([[2.0], [-1.0]])), zero, rows_of(mask))
    assert objective.mismatched_mean(state).item() == 0.5
    batch = replace(batch_of(rows, 0.0), state=state)
    assert result(objective, ratios, batch)[0].extras["kl"].tolist() == [0.5]


def test_z_is_the_mean_of_all_rows_however_they_are_cut(case: tuple[Tensor, Tensor]) -> None:
    """Sums of parts of one and of five rows add up; a mean of means would not."""
    ratios, mask = case
    objective, zeros = KTO(), torch.zeros_like(ratios)

    def sums(start: int, stop: int) -> dict[str, Tensor]:
        part = rows_of(mask[start:stop])
        return objective.sums(TokenStats(ratios[start:stop]), TokenStats(zeros[start:stop]), part)

    parts = sums(0, 1), sums(1, 6)
    added = {name: parts[0][name] + parts[1][name] for name in parts[0]}
    expected = torch.where(mask, ratios, 0.0).sum(-1).mean()
    assert objective.mismatched_mean(added).item() == pytest.approx(expected.item(), rel=1e-12)
    means = [objective.mismatched_mean(part).item() for part in parts]
    assert sum(means) / 2 != pytest.approx(expected.item(), rel=1e-3), "the case must tell the two apart"


def test_z_carries_no_gradient(case: tuple[Tensor, Tensor]) -> None:
    ratios, mask = case
    leaf = ratios.clone().requires_grad_()
    state = KTO().sums(TokenStats(leaf), TokenStats(torch.zeros_like(ratios)), rows_of(mask))
    assert not any(value.requires_grad for value in state.values())
    grown = {name: value.requires_grad_() for name, value in state_of(0.7).items()}
    one, rows = one_pair(1.5, -0.5)
    result(KTO(), one, replace(batch_of(rows, 0.7), state=grown))
    assert all(value.grad is None for value in grown.values())


@pytest.mark.parametrize("garbage", [1234.5, math.inf, -math.inf, math.nan])
def test_what_lies_under_the_mask_does_not_matter(case: tuple[Tensor, Tensor], garbage: float) -> None:
    ratios, mask = case
    dirty = torch.where(mask, ratios, garbage)
    batch = batch_of(rows_of(mask), 0.4)
    clean, clean_gradient = result(KTO(), ratios, batch)
    found, gradient = result(KTO(), dirty, batch)
    assert torch.equal(found.losses, clean.losses)
    assert torch.equal(gradient, clean_gradient) and not gradient[~mask].any()
    zeros = TokenStats(torch.zeros_like(ratios))
    sums = [KTO().sums(TokenStats(values), zeros, rows_of(mask)) for values in (ratios, dirty)]
    assert sums[0] == sums[1]


def test_weights_weigh_the_pair_and_not_z(case: tuple[Tensor, Tensor]) -> None:
    """The reward is b |y| sum a d, with |y| of the source or of the mask, or without it."""
    ratios, mask = case
    generator = torch.Generator().manual_seed(5)
    weights = torch.where(mask, torch.rand(mask.shape, generator=generator, dtype=torch.float64), 0.0)
    lengths = torch.tensor([9.0, 3.0, 2.0, 4.0, 5.0, 6.0], dtype=torch.float64)
    batch = batch_of(rows_of(mask, weights, lengths), 0.4)
    sums = torch.where(mask, weights * ratios, 0.0).sum(-1)
    expected = {
        KTO(0.3): lengths * sums,
        KTO(0.3, length_from=LengthFrom.TRAIN): mask.sum(-1) * sums,
        KTO(0.3, length_scale=False): sums,
    }
    for objective, scores in expected.items():
        out, gradient = result(objective, ratios, batch)
        rewards = torch.cat([out.chosen_rewards, out.rejected_rewards])
        assert torch.allclose(rewards, 0.3 * scores, rtol=1e-12), objective
        by_hand = torch.sigmoid(-0.3 * (scores[:PAIRS] - 0.4)) + torch.sigmoid(-0.3 * (0.4 - scores[PAIRS:]))
        assert torch.allclose(out.losses, 0.5 * by_hand, rtol=1e-12), objective
        assert not gradient[weights == 0].any()
    zeros = torch.zeros_like(ratios)
    bare, weighed = (
        KTO().sums(TokenStats(ratios), TokenStats(zeros), rows_of(mask, made))
        for made in (torch.zeros_like(weights), weights)
    )
    assert bare == weighed and bare["kl_sum"] != 0


def test_gradient_agrees_with_finite_differences(case: tuple[Tensor, Tensor]) -> None:
    ratios, mask = case
    batch = batch_of(rows_of(mask), 0.4)

    def losses(values: Tensor) -> Tensor:
        return KTO(0.5, 1.0, 1.5)(TokenStats(values), TokenStats(torch.zeros_like(values)), batch).losses

    assert torch.autograd.gradcheck(losses, ratios.clone().requires_grad_())


@pytest.mark.parametrize("margin", [500.0, -500.0])
def test_large_margins_stay_finite_and_keep_their_gradient(margin: float) -> None:
    """A gradient of sigmoid(x)(1 - sigmoid(x)) as written would be exactly 0 on the side that rounds to 1."""
    ratios, rows = one_pair(margin, -margin)
    out, gradient = result(KTO(0.1), ratios, batch_of(rows, 0.0))
    assert out.losses.item() == pytest.approx(0.0 if margin > 0 else 1.0, abs=1e-12)
    expected = 0.5 * 0.1 * math.exp(-0.1 * 500)
    assert gradient.flatten().tolist() == pytest.approx([-expected, expected], rel=1e-9)


def test_rewards_and_extras_are_detached_and_z_is_told_for_every_pair(case: tuple[Tensor, Tensor]) -> None:
    ratios, mask = case
    out, _ = result(KTO(), ratios, batch_of(rows_of(mask), 0.4))
    assert out.extras["kl"].tolist() == pytest.approx([0.4] * PAIRS)
    detached = [out.chosen_rewards, out.rejected_rewards, *out.extras.values()]
    assert out.losses.requires_grad and not any(value.requires_grad for value in detached)


def test_what_is_missing_is_told() -> None:
    ratios, rows = one_pair(1.0, 0.0)
    stats = TokenStats(ratios)
    with pytest.raises(ValueError, match="sums over the step's mismatched rows"):
        KTO()(stats, stats, replace(batch_of(rows, 0.0), state={}))
    with pytest.raises(ValueError, match="mismatched rows"):
        KTO().sums(stats, None, rows)
    with pytest.raises(ValueError, match="compares with a reference"):
        KTO()(stats, None, batch_of(rows, 0.0))


def test_it_is_a_step_objective_that_asks_for_its_inputs() -> None:
    assert isinstance(KTO(), PreferenceObjective) and isinstance(KTO(), StepObjective)
    assert KTO().requires == {"reference", "token_weights", "ahead:mismatched", "several_pairs"}


@pytest.mark.parametrize("key", ["beta", "desirable_weight", "undesirable_weight"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_hyperparameters_outside_their_domain(key: str, value: float) -> None:
    with pytest.raises(UserError, match=rf"^objective\.{key} must be above 0 and finite, got {value}"):
        KTO(**{key: value})


def test_golden_records(vectors: Path) -> None:
    """And the comparison can fail: with one number of the record changed it does."""
    records = [r for r in json.loads((vectors / "losses.json").read_text())["records"] if r["name"] == "kto"]
    assert len(records) == 4
    for record in records:
        comparison = Comparison()
        recompute(Record.read(record), comparison)
        assert comparison.problems == [] and comparison.absolute > 0
    for name in records[0]["expected"]:
        changed = {
            **records[0],
            "expected": {name: (torch.tensor(records[0]["expected"][name]).double() + 1e-6).tolist()},
        }
        comparison = Comparison()
        recompute(Record.read(changed), comparison)
        assert len(comparison.problems) == 1 and comparison.problems[0].startswith(name), name
