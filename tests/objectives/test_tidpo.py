"""TI-DPO: step and triplet by hand, stop-gradients, pairs without a triplet; test_contract.py has what holds of all."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attnpo.objectives.base import StepObjective
from attnpo.objectives.tidpo import TIDPO, triplet_term
from attnpo.schema import RowGroup
from tests.objectives.inputs import COUNTS, Case, call, garbled, make_case, with_each, with_leaves

OBJECTIVE = TIDPO(0.2, 0.3, 0.5, 0.7)
PAIRS, LENGTHS = len(COUNTS[0]), COUNTS[0] + COUNTS[1]


@pytest.fixture
def case() -> Case:
    return make_case(OBJECTIVE)


def gradients(objective: TIDPO, case: Case) -> dict[str, Tensor]:
    """Returns those of the summed losses at log-probabilities, KLs and the anchors' log-probabilities."""
    _, policy = with_leaves(objective, case)
    leaves = {"logps": policy.logps, "kl": policy.joint["kl_ref_policy"], "anchor": policy.groups["anchor"].logps}
    return {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}


def plain_losses(case: Case, objective: TIDPO) -> list[float]:
    """Returns the definition, pair by pair, in plain numbers."""
    assert case.reference is not None
    found, of_policy, of_reference = [], case.policy.groups["anchor"].logps, case.reference.groups["anchor"].logps
    ratio, anchors = (case.policy.logps - case.reference.logps).tolist(), (of_policy - of_reference).tolist()
    weights, kls = case.batch.main.token_weights["reward"], case.policy.joint["kl_ref_policy"]
    for pair, anchor in enumerate(case.batch.groups["anchor"].response_mask.sum(-1).tolist()):
        weighted, kl, distance = [], [], []
        for row in (pair, pair + PAIRS):
            length = LENGTHS[row]
            weighted.append(sum(weights[row, t].item() * ratio[row][t] for t in range(length)))
            kl.append(sum(kls[row, :length].tolist()))
            distance.append(sum((anchors[pair][t] - ratio[row][t]) ** 2 for t in range(min(length, anchor))))
        z = weighted[0] - weighted[1] - (objective.alpha * (kl[1] - kl[0]) if objective.kl else 0.0)
        triplet = max(0.0, distance[0] - distance[1] + objective.triplet_margin)
        found.append(math.log1p(math.exp(-objective.beta * z)) + objective.gamma_triplet * triplet)
    return found


@pytest.mark.parametrize("kl", [True, False])
def test_losses_by_their_definition(case: Case, kl: bool) -> None:
    objective = replace(OBJECTIVE, kl=kl)
    out = call(objective, case)
    assert out.losses.tolist() == pytest.approx(plain_losses(case, objective), rel=1e-12)
    assert 0 < int((out.extras["triplet"] > 0).sum()) < PAIRS, "both sides of the relu must be seen"
    assert ("seq_kl/chosen" in out.extras) is kl


def test_gradients_stop_at_the_chosen_kl_alone(case: Case) -> None:
    """And reach every log-prob: of the pair's rows by their weights, of the anchor by the triplet."""
    found, mask = gradients(OBJECTIVE, case), case.mask
    assert not found["kl"][:PAIRS].any() and bool((found["kl"][PAIRS:][mask[PAIRS:]] > 0).all())
    assert bool((found["anchor"] != 0).any())
    step = gradients(replace(OBJECTIVE, gamma_triplet=0.0), case)["logps"]
    assert bool((step[:PAIRS] <= 0).all() and (step[PAIRS:] >= 0).all())
    weights = case.batch.main.token_weights["reward"]
    for row, length in enumerate(LENGTHS):
        values = step[row, :length] / weights[row, :length]
        torch.testing.assert_close(values, values[:1].expand_as(values), rtol=1e-10, atol=0)


def test_the_anchors_gradient_agrees_with_finite_differences(case: Case) -> None:
    def losses(logps: Tensor) -> Tensor:
        anchor = replace(case.policy.groups["anchor"], logps=logps)
        return call(OBJECTIVE, replace(case, policy=replace(case.policy, groups={"anchor": anchor}))).losses

    assert torch.autograd.gradcheck(losses, (case.policy.groups["anchor"].logps.clone().requires_grad_(),))


def test_values_under_the_masks_reach_no_gradient(case: Case) -> None:
    one, other = gradients(OBJECTIVE, case), gradients(OBJECTIVE, garbled(case))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_triplet_by_hand() -> None:
    # d_a = (1, 2, 9); d_w = (0, 0): 1 + 4 = 5 over two shared tokens; d_l = (3, 2, 5): 4 + 0 + 16 = 20 over three
    mask = torch.tensor([[True, True, False], [True, True, True]])
    ratios = torch.tensor([[0.0, 0.0, 7.0], [3.0, 2.0, 5.0]])
    anchor, anchor_mask = torch.tensor([[1.0, 2.0, 9.0]]), torch.tensor([[True, True, True]])
    assert triplet_term(ratios, mask, anchor, anchor_mask, 0.5).losses.item() == 0.0
    assert triplet_term(ratios, mask, anchor, anchor_mask, 16.0).losses.item() == pytest.approx(1.0)
    swapped = triplet_term(ratios.flip(0), mask.flip(0), anchor, anchor_mask, 0.5)
    assert swapped.losses.item() == pytest.approx(15.5) and bool(swapped.measured.all())


def without_anchors(case: Case) -> Case:
    """Returns the case with anchors of no column."""

    def rows(name: str, group: RowGroup) -> RowGroup:
        ids, mask = group.response_ids[:, :0], group.response_mask[:, :0]
        weights = {"reward": group.token_weights["reward"][:, :0]}
        return group if name == "main" else replace(group, response_ids=ids, response_mask=mask, token_weights=weights)

    return with_each(case, lambda name, value: value if name == "main" else value[:, :0], rows)


@pytest.mark.parametrize("empty", ["anchor", "chosen", "rejected", "no anchor position at all"])
def test_a_pair_without_a_distance_has_no_triplet_and_is_counted(case: Case, empty: str) -> None:
    groups, nowhere = dict(case.batch.groups), empty.startswith("no ")
    name, row = ("anchor", 1) if empty == "anchor" else ("main", 1 if empty == "chosen" else 1 + PAIRS)
    mask = groups[name].response_mask.clone()
    mask[row] = False
    groups[name] = replace(groups[name], response_mask=mask)
    case = replace(case, batch=replace(case.batch, groups=groups))
    out = call(OBJECTIVE, without_anchors(case) if nowhere else case)
    assert out.extras["triplet_unmeasured"].tolist() == [float(nowhere or pair == 1) for pair in range(PAIRS)]
    assert out.extras["triplet"][1].item() == 0.0 and bool(out.losses.isfinite().all())


def test_weights_of_one_give_the_tdpo2_step_and_its_rewards(case: Case) -> None:
    assert case.reference is not None
    case = case.with_rows(token_weights={"reward": case.mask.double()})
    out = call(replace(OBJECTIVE, gamma_triplet=0.0), case)
    sums = ((case.policy.logps - case.reference.logps) * case.mask).sum(-1)
    kl = (case.policy.joint["kl_ref_policy"] * case.mask).sum(-1)
    z = 0.2 * (sums[:PAIRS] - sums[PAIRS:] - 0.3 * (kl[PAIRS:] - kl[:PAIRS]))
    torch.testing.assert_close(out.losses, -torch.nn.functional.logsigmoid(z), rtol=1e-12, atol=0)
    torch.testing.assert_close(out.chosen_rewards, 0.2 * (sums + kl)[:PAIRS], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(out.extras["unweighted/rejected"], 0.2 * sums[PAIRS:], rtol=1e-12, atol=1e-14)


def test_it_asks_for_what_it_reads() -> None:
    everything = {"reference", "token_weights", "factors", "joint:kl_ref_policy", "group:anchor"}
    assert TIDPO().requires == everything
    assert TIDPO(kl=False).requires == everything - {"joint:kl_ref_policy"}
    assert TIDPO(gamma_triplet=0.0).requires == everything - {"group:anchor"}
    assert not isinstance(TIDPO(), StepObjective)
    assert set(TIDPO(kl=False, gamma_triplet=0.0).unused_keys()) == {"alpha", "triplet_margin", "anchor"}
    assert not TIDPO().unused_keys()
