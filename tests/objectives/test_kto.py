"""KTO: what z is and is not, weights, gradients, golden records; test_contract.py has what holds of every objective."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attnpo.objectives.base import LengthFrom
from attnpo.objectives.kto import KTO
from attnpo.schema import ObjectiveOutput, PreferenceBatch, RowGroup, TokenStats
from tests.conformance.fields import Record
from tests.conformance.records import Comparison
from tests.conformance.unpaired import recompute
from tests.objectives.inputs import make_batch, make_rows

PAIRS, COUNTS = 3, (7, 3, 1, 4, 7, 2)


def batch_of(rows: RowGroup, kl: float) -> PreferenceBatch:
    """Returns a step whose four mismatched rows have the mean ``kl``."""
    state = {"kl_sum": torch.tensor(4 * kl, dtype=torch.float64), "kl_rows": torch.tensor(4.0, dtype=torch.float64)}
    return make_batch(rows, state=state)


def result(objective: KTO, ratios: Tensor, batch: PreferenceBatch) -> tuple[ObjectiveOutput, Tensor]:
    """Output and gradient for a policy that differs from a reference of zeros by ``ratios``."""
    leaf = ratios.clone().requires_grad_()
    out = objective(TokenStats(leaf), TokenStats(torch.zeros_like(ratios)), batch)
    out.losses.sum().backward()
    assert leaf.grad is not None
    return out, leaf.grad


@pytest.fixture
def ratios() -> Tensor:
    """Log-ratios of responses of 1 to 7 tokens, double precision."""
    return torch.randn(2 * PAIRS, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def one_pair(chosen: float, rejected: float) -> tuple[Tensor, RowGroup]:
    """A pair of single tokens with these log-ratios."""
    return torch.tensor([[chosen, 0.0], [rejected, 0.0]], dtype=torch.float64), make_rows((1, 1))


def test_a_negative_mean_counts_as_none_and_is_clamped_after_averaging() -> None:
    objective = KTO(0.2)
    ratios, rows = one_pair(1.5, -0.5)
    plain, negative = (result(objective, ratios, batch_of(rows, kl))[0] for kl in (0.0, -3.0))
    assert torch.equal(plain.losses, negative.losses) and negative.extras["kl"].tolist() == [0.0]
    # Rows of +2 and -1: clamped one by one their mean would be 1.
    state = objective.step_sums(TokenStats(one_pair(2.0, -1.0)[0]), TokenStats(torch.zeros(2, 2)), rows)
    assert objective.mismatched_mean(state).item() == 0.5
    assert result(objective, ratios, replace(batch_of(rows, 0.0), state=state))[0].extras["kl"].tolist() == [0.5]


def test_z_is_the_mean_of_all_rows_however_they_are_cut(ratios: Tensor) -> None:
    """Sums of parts of one and of five rows add up; a mean of means would not."""
    objective, zeros = KTO(), torch.zeros_like(ratios)

    def sums(start: int, stop: int) -> dict[str, Tensor]:
        columns = slice(max(*COUNTS[start:stop], 2))
        part = (TokenStats(values[start:stop, columns]) for values in (ratios, zeros))
        return objective.step_sums(*part, make_rows(COUNTS[start:stop]))

    parts = sums(0, 1), sums(1, 6)
    added = {name: parts[0][name] + parts[1][name] for name in parts[0]}
    expected = torch.where(make_rows(COUNTS).response_mask, ratios, 0.0).sum(-1).mean()
    assert objective.mismatched_mean(added).item() == pytest.approx(expected.item(), rel=1e-12)
    means = [objective.mismatched_mean(part).item() for part in parts]
    assert sum(means) / 2 != pytest.approx(expected.item(), rel=1e-3), "the case must tell the two apart"


def test_z_carries_no_gradient(ratios: Tensor) -> None:
    state = KTO().step_sums(
        TokenStats(ratios.requires_grad_()), TokenStats(torch.zeros_like(ratios)), make_rows(COUNTS)
    )
    assert not any(value.requires_grad for value in state.values())
    one, rows = one_pair(1.5, -0.5)
    batch = batch_of(rows, 0.7)
    grown = {name: value.requires_grad_() for name, value in batch.state.items()}
    out, _ = result(KTO(), one, replace(batch, state=grown))
    assert all(value.grad is None for value in grown.values()) and not out.extras["kl"].requires_grad


def test_weights_weigh_the_pair_and_not_z(ratios: Tensor) -> None:
    """Holds the reward to b |y| sum a d, |y| of the source, of the mask or left out; each side has its own weight.

    beta multiplies z too; a pair's loss is the mean of its two examples.
    """
    mask = make_rows(COUNTS).response_mask
    weights = torch.rand(mask.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64) * mask
    lengths = torch.tensor([9.0, 3.0, 2.0, 4.0, 5.0, 6.0], dtype=torch.float64)
    batch = batch_of(replace(make_rows(COUNTS, weights), source_lengths=lengths), 0.4)
    sums = (weights * ratios).sum(-1)
    expected = {
        KTO(0.3, 3.0, 5.0): lengths * sums,
        KTO(0.3, 3.0, 5.0, length_from=LengthFrom.TRAIN): mask.sum(-1) * sums,
        KTO(0.3, 3.0, 5.0, length_scale=False): sums,
    }
    for objective, scores in expected.items():
        out, gradient = result(objective, ratios, batch)
        rewards = torch.cat([out.chosen_rewards, out.rejected_rewards])
        assert torch.allclose(rewards, 0.3 * scores, rtol=1e-12), objective
        by_hand = 3 * torch.sigmoid(-0.3 * (scores[:PAIRS] - 0.4)) + 5 * torch.sigmoid(-0.3 * (0.4 - scores[PAIRS:]))
        assert torch.allclose(out.losses, 0.5 * by_hand, rtol=1e-12), objective
        assert not gradient[weights == 0].any() and out.extras["kl"].tolist() == pytest.approx([0.4] * PAIRS)
    stats = TokenStats(ratios), TokenStats(torch.zeros_like(ratios))
    bare, weighed = (KTO().step_sums(*stats, make_rows(COUNTS, made)) for made in (torch.zeros_like(weights), weights))
    assert bare == weighed and bare["kl_sum"] != 0


@pytest.mark.parametrize("margin", [500.0, -500.0])
def test_large_margins_stay_finite_and_keep_their_gradient(margin: float) -> None:
    """A gradient of sigmoid(x)(1 - sigmoid(x)) as written would be exactly 0 on the side that rounds to 1."""
    ratios, rows = one_pair(margin, -margin)
    out, gradient = result(KTO(0.1), ratios, batch_of(rows, 0.0))
    assert out.losses.item() == pytest.approx(0.0 if margin > 0 else 1.0, abs=1e-12)
    expected = 0.5 * 0.1 * math.exp(-0.1 * 500)
    assert gradient[:, 0].tolist() == pytest.approx([-expected, expected], rel=1e-9)


def test_what_is_missing_is_told() -> None:
    ratios, rows = one_pair(1.0, 0.0)
    stats = TokenStats(ratios)
    with pytest.raises(ValueError, match="sums over the step's mismatched rows"):
        KTO()(stats, stats, make_batch(rows))
    with pytest.raises(ValueError, match="mismatched rows"):
        KTO().step_sums(stats, None, rows)
    assert KTO().requires == {"reference", "token_weights", "ahead:mismatched", "several_pairs"}


def test_golden_records(vectors: Path) -> None:
    """And the comparison can fail: with one number of the record changed it does."""
    records = [r for r in json.loads((vectors / "losses.json").read_text())["records"] if r["name"] == "kto"]
    assert len(records) == 4
    for record in records:
        comparison = Comparison()
        recompute(Record.read(record), comparison)
        assert comparison.problems == [] and comparison.absolute > 0
    for name, value in records[0]["expected"].items():
        comparison = Comparison()
        moved = (torch.tensor(value).double() + 1e-6).tolist()
        recompute(Record.read({**records[0], "expected": {name: moved}}), comparison)
        assert len(comparison.problems) == 1 and comparison.problems[0].startswith(name), name
