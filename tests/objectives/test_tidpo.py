"""TI-DPO: step and triplet by hand, stop-gradients, the batch mean as terms per pair, pairs without a triplet."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attnpo.objectives.base import StepObjective
from attnpo.objectives.tidpo import TIDPO, triplet_term
from attnpo.schema import ObjectiveOutput, PreferenceBatch, RowGroup, TokenStats, UserError

PAIRS, WIDTH, ANCHORS = 3, 6, 5
COUNTS = torch.tensor([6, 2, 4, 3, 6, 1])
ANCHOR_COUNTS = torch.tensor([5, 3, 1])


def group(mask: Tensor, weights: Tensor) -> RowGroup:
    return RowGroup(
        response_ids=torch.zeros(mask.shape, dtype=torch.long),
        response_mask=mask,
        token_weights={"reward": weights},
        source_lengths=mask.sum(-1).double(),
        reference_logps=None,
        factors=True,
    )


class Case:
    """Random statistics of three pairs with weights as factors, and an anchor for each."""

    def __init__(self, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)

        def random(rows: int, width: int) -> Tensor:
            return torch.rand(rows, width, generator=draw, dtype=torch.float64)

        self.mask = torch.arange(WIDTH) < COUNTS[:, None]
        self.anchor_mask = torch.arange(ANCHORS) < ANCHOR_COUNTS[:, None]
        self.logps, self.ref = -3 * random(2 * PAIRS, WIDTH), -3 * random(2 * PAIRS, WIDTH)
        self.kl = random(2 * PAIRS, WIDTH)
        self.weights = 2 * random(2 * PAIRS, WIDTH) * self.mask
        self.anchor, self.anchor_ref = -3 * random(PAIRS, ANCHORS), -3 * random(PAIRS, ANCHORS)

    def leaves(self) -> dict[str, Tensor]:
        return {name: getattr(self, name).clone().requires_grad_() for name in ("logps", "kl", "anchor")}

    def output(self, objective: TIDPO, leaves: dict[str, Tensor] | None = None) -> ObjectiveOutput:
        given = leaves or self.leaves()
        policy = TokenStats(
            given["logps"],
            joint={"kl_ref_policy": given["kl"]},
            groups={"anchor": TokenStats(given["anchor"], joint={"kl_ref_policy": torch.zeros_like(given["anchor"])})},
        )
        reference = TokenStats(self.ref, groups={"anchor": TokenStats(self.anchor_ref)})
        groups = {
            "main": group(self.mask, self.weights),
            "anchor": group(self.anchor_mask, self.anchor_mask.double()),
        }
        ids = tuple(map(str, range(PAIRS)))
        batch = PreferenceBatch(groups, torch.ones(PAIRS, dtype=torch.float64), ids, step_pairs=PAIRS)
        return objective(policy, reference, batch)

    def gradients(self, objective: TIDPO) -> dict[str, Tensor]:
        leaves = self.leaves()
        self.output(objective, leaves).losses.sum().backward()
        return {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}


def plain_losses(case: Case, objective: TIDPO) -> list[float]:
    """The definition, pair by pair, in plain numbers."""
    found = []
    ratio = (case.logps - case.ref).tolist()
    anchors = (case.anchor - case.anchor_ref).tolist()
    for pair in range(PAIRS):
        weighted, kl, distance = [], [], []
        for row in (pair, pair + PAIRS):
            length = int(COUNTS[row])
            weighted.append(sum(case.weights[row, t].item() * ratio[row][t] for t in range(length)))
            kl.append(sum(case.kl[row, :length].tolist()))
            shared = min(length, int(ANCHOR_COUNTS[pair]))
            distance.append(sum((anchors[pair][t] - ratio[row][t]) ** 2 for t in range(shared)))
        z = weighted[0] - weighted[1] - (objective.alpha * (kl[1] - kl[0]) if objective.kl else 0.0)
        triplet = max(0.0, distance[0] - distance[1] + objective.triplet_margin)
        found.append(math.log1p(math.exp(-objective.beta * z)) + objective.gamma_triplet * triplet)
    return found


@pytest.mark.parametrize("kl", [True, False])
def test_losses_by_their_definition(kl: bool) -> None:
    case, objective = Case(), TIDPO(0.2, 0.3, 0.5, 0.7, kl)
    out = case.output(objective)
    assert out.losses.tolist() == pytest.approx(plain_losses(case, objective), rel=1e-12)
    assert 0 < int((out.extras["triplet"] > 0).sum()) < PAIRS, "both sides of the relu must be seen"
    assert ("seq_kl/chosen" in out.extras) is kl


def test_gradients_stop_at_the_chosen_kl_alone() -> None:
    """And reach every log-prob: of the pair's rows by their weights, of the anchor by the triplet."""
    case = Case()
    found = case.gradients(TIDPO(0.2, 0.3, 0.5, 0.7))
    assert not found["kl"][:PAIRS].any() and bool((found["kl"][PAIRS:][case.mask[PAIRS:]] > 0).all())
    assert bool((found["anchor"] != 0).any())
    step = case.gradients(TIDPO(0.2, 0.3, 0.0))
    assert bool((step["logps"][:PAIRS] <= 0).all() and (step["logps"][PAIRS:] >= 0).all())
    ratio = step["logps"][case.mask] / case.weights[case.mask]
    spread = torch.zeros_like(step["logps"]).masked_scatter(case.mask, ratio)
    for row in range(2 * PAIRS):
        values = spread[row, : int(COUNTS[row])]
        torch.testing.assert_close(values, values[:1].expand_as(values), rtol=1e-10, atol=0)


def test_gradients_agree_with_finite_differences() -> None:
    case, objective = Case(3), TIDPO(0.2, 0.3, 0.5, 0.7)
    found = case.gradients(objective)
    for name in ("logps", "anchor"):
        for row, column in ((0, 0), (4, 2) if name == "logps" else (1, 1)):
            values = []
            for step in (1e-6, -1e-6):
                leaves = case.leaves()
                leaves[name].data[row, column] += step
                values.append(case.output(objective, leaves).losses.sum().item())
            assert found[name][row, column].item() == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-6, abs=1e-9)


def test_values_under_the_masks_never_matter() -> None:
    objective = TIDPO(0.2, 0.3, 0.5, 0.7)
    clean, dirty = Case(), Case()
    for name, mask in (("logps", clean.mask), ("kl", clean.mask), ("anchor", clean.anchor_mask)):
        setattr(dirty, name, torch.where(mask, getattr(dirty, name), float("-inf")))
    dirty.weights = torch.where(dirty.mask, dirty.weights, float("nan"))
    dirty.ref = torch.where(dirty.mask, dirty.ref, float("nan"))
    assert torch.equal(clean.output(objective).losses, dirty.output(objective).losses)
    one, other = clean.gradients(objective), dirty.gradients(objective)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_step_s_mean_is_the_mean_loss_plus_gamma_times_the_mean_triplet() -> None:
    """What the code does (the batch mean, added to every example) and a term per pair are one number."""
    case, objective = Case(), TIDPO(0.2, 0.3, 0.5, 0.7)
    whole, step = case.output(objective), case.output(replace(objective, gamma_triplet=0.0))
    everywhere = step.losses + 0.5 * whole.extras["triplet"].mean()
    torch.testing.assert_close(whole.losses.mean(), everywhere.mean(), rtol=1e-14, atol=0)


def test_a_triplet_by_hand() -> None:
    # d_a = (1, 2, 9); d_w = (0, 0): 1 + 4 = 5 over two shared tokens; d_l = (3, 2, 5): 4 + 0 + 16 = 20 over three
    mask = torch.tensor([[True, True, False], [True, True, True]])
    ratios = torch.tensor([[0.0, 0.0, 7.0], [3.0, 2.0, 5.0]])
    anchor, anchor_mask = torch.tensor([[1.0, 2.0, 9.0]]), torch.tensor([[True, True, True]])
    assert triplet_term(ratios, mask, anchor, anchor_mask, 0.5).losses.item() == 0.0
    assert triplet_term(ratios, mask, anchor, anchor_mask, 16.0).losses.item() == pytest.approx(1.0)
    swapped = triplet_term(ratios.flip(0), mask.flip(0), anchor, anchor_mask, 0.5)
    assert swapped.losses.item() == pytest.approx(15.5) and bool(swapped.measured.all())


@pytest.mark.parametrize("empty", ["anchor", "chosen", "rejected", "no anchor position at all"])
def test_a_pair_without_a_distance_has_no_triplet_and_is_counted(empty: str) -> None:
    case = Case()
    if empty == "anchor":
        case.anchor_mask[1] = False
    elif empty == "no anchor position at all":
        case.anchor, case.anchor_ref, case.anchor_mask = (
            value[:, :0] for value in (case.anchor, case.anchor_ref, case.anchor_mask)
        )
    else:
        case.mask[1 if empty == "chosen" else 1 + PAIRS] = False
    out = case.output(TIDPO(0.2, 0.3, 0.5, 0.7))
    expected = [1.0] * PAIRS if empty.startswith("no ") else [0.0, 1.0, 0.0]
    assert out.extras["triplet_unmeasured"].tolist() == expected
    assert out.extras["triplet"][1].item() == 0.0 and bool(out.losses.isfinite().all())


def test_weights_of_one_give_the_tdpo2_step_and_its_rewards() -> None:
    case = Case()
    case.weights = case.mask.double()
    out = case.output(TIDPO(0.2, 0.3, 0.0))
    sums = ((case.logps - case.ref) * case.mask).sum(-1)
    kl = (case.kl * case.mask).sum(-1)
    z = 0.2 * (sums[:PAIRS] - sums[PAIRS:] - 0.3 * (kl[PAIRS:] - kl[:PAIRS]))
    torch.testing.assert_close(out.losses, -torch.nn.functional.logsigmoid(z), rtol=1e-12, atol=0)
    torch.testing.assert_close(out.chosen_rewards, 0.2 * (sums + kl)[:PAIRS], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(out.extras["unweighted/rejected"], 0.2 * sums[PAIRS:], rtol=1e-12, atol=1e-14)
    assert not any(value.requires_grad for value in (out.chosen_rewards, out.rejected_rewards, *out.extras.values()))


def test_it_asks_for_what_it_reads() -> None:
    everything = {"reference", "token_weights", "factors", "joint:kl_ref_policy", "group:anchor"}
    assert TIDPO().requires == everything
    assert TIDPO(kl=False).requires == everything - {"joint:kl_ref_policy"}
    assert TIDPO(gamma_triplet=0.0).requires == everything - {"group:anchor"}
    assert not isinstance(TIDPO(), StepObjective)
    assert set(TIDPO(kl=False, gamma_triplet=0.0).unread()) == {"alpha", "triplet_margin", "anchor"}
    assert not TIDPO().unread()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"beta": 0.0}, r"objective\.beta must be above 0"),
        ({"alpha": -0.1}, r"objective\.alpha must be .*at least 0.*, got -0\.1"),
        ({"gamma_triplet": float("inf")}, r"objective\.gamma_triplet must be .*finite.*, got inf"),
        ({"triplet_margin": -1.0}, r"objective\.triplet_margin must be .*, got -1\.0"),
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        TIDPO(**wrong)
