"""OTPO: identities, a pair by hand, and the golden records, which fail on each thing that could be wrong."""

import json
import math
import pkgutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attnpo.objectives.dpo import DPO
from attnpo.objectives.twdpo import OTPO
from attnpo.schema import PreferenceBatch, TokenStats
from attnpo.weights.sources.transport import TransportPlan
from tests.conformance.fields import Record
from tests.conformance.records import Check, Status
from tests.conformance.transport import recompute
from tests.objectives.inputs import make_batch, make_rows


def made_batch(counts: tuple[int, ...], factors: Tensor | None = None) -> PreferenceBatch:
    """Returns a batch with these factors, or 1 for every token."""
    rows = make_rows(counts)
    given = rows.response_mask.double() if factors is None else factors
    return make_batch(replace(rows, token_weights={"reward": given}, factors=True))


def test_factors_of_one_are_dpo() -> None:
    generator = torch.Generator().manual_seed(4)
    logps, reference = -3 * torch.rand(2, 4, 6, generator=generator, dtype=torch.float64)
    stats, batch = (TokenStats(logps.requires_grad_()), TokenStats(reference)), made_batch((6, 2, 4, 1))
    found, expected = (kind(0.3, label_smoothing=0.1)(*stats, batch) for kind in (OTPO, DPO))
    torch.testing.assert_close(found.losses, expected.losses, rtol=0, atol=1e-14)
    torch.testing.assert_close(found.chosen_rewards, found.extras["unweighted/chosen"], rtol=0, atol=1e-14)
    grads = [torch.autograd.grad(out.losses.sum(), logps)[0] for out in (found, expected)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-14)
    with pytest.raises(ValueError, match="OTPO needs factors"):
        OTPO()(*stats, make_batch(replace(batch.main, factors=False)))


def test_a_pair_by_hand() -> None:
    # d_w = (1, -0.5, 2), w_w = (.9, .7, .4); d_l = (-1, 0.25), w_l = (1.2, .8): 1.35 and -1; no length enters
    ratios = torch.tensor([[1.0, -0.5, 2.0], [-1.0, 0.25, 9.0]], dtype=torch.float64)
    factors = torch.tensor([[0.9, 0.7, 0.4], [1.2, 0.8, 9.0]], dtype=torch.float64)
    out = OTPO(0.4)(TokenStats(ratios), TokenStats(torch.zeros_like(ratios)), made_batch((3, 2), factors))
    assert out.losses.item() == pytest.approx(math.log(1 + math.exp(-0.4 * 2.35)), abs=1e-12)
    assert out.chosen_rewards.item() == pytest.approx(0.4 * 1.35)
    assert out.rejected_rewards.item() == pytest.approx(-0.4)
    assert out.extras["unweighted/chosen"].item() == pytest.approx(0.4 * 2.5)
    assert out.extras["unweighted/rejected"].item() == pytest.approx(0.4 * -0.75)


# ---------------------------------------------------------------------------------------------------- golden records


@pytest.fixture(scope="module")
def records(vectors: Path) -> list[dict[str, Any]]:
    found = json.loads((vectors / "losses.json").read_text())["records"]
    return [item for item in found if item["name"] == "otpo"]


def statuses(records: list[dict[str, Any]]) -> list[Status]:
    return [Check("otpo", str(item["case"]), partial(recompute, Record.read(item))).run().status for item in records]


def test_the_golden_records_hold(records: list[dict[str, Any]]) -> None:
    assert statuses(records) == [Status.OK] * 4


def without_norms(costs: Any) -> Any:
    """The scale from the distances between real tokens alone."""

    def broken(chosen: Tensor, rejected: Tensor, *masks: Tensor) -> Tensor:
        return costs(
            chosen - chosen[:, :1].mean(1, keepdim=True), rejected - chosen[:, :1].mean(1, keepdim=True), *masks
        )

    return broken


def own_lengths(transport: Any) -> Any:
    """Either side's weights summing to its own token count."""

    def broken(costs: Tensor, chosen_mask: Tensor, rejected_mask: Tensor, *settings: Any) -> TransportPlan:
        plan = transport(costs, chosen_mask, rejected_mask, *settings)
        return replace(
            plan,
            chosen=plan.chosen / plan.chosen.sum(-1, keepdim=True) * chosen_mask.sum(-1, keepdim=True),
            rejected=plan.rejected / plan.rejected.sum(-1, keepdim=True) * rejected_mask.sum(-1, keepdim=True),
        )

    return broken


def altered(**changes: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The plan's solver with some of its keyword settings changed."""

    def breaks(transport: Any) -> Any:
        def broken(costs: Tensor, one: Tensor, other: Tensor, reg: float, reg_m: float, sweeps: int) -> TransportPlan:
            settings = {"reg": reg, "reg_m": reg_m, "sweeps": sweeps}
            settings |= {name: change(settings[name]) for name, change in changes.items()}
            plan: TransportPlan = transport(costs, one, other, **settings)
            return plan

        return broken

    return breaks


SOURCE = "attnpo.weights.sources.transport."


@pytest.mark.parametrize(
    ("target", "breaks"),
    [
        (SOURCE + "token_costs", without_norms),
        (SOURCE + "token_costs", lambda f: lambda *args: f(*args) * 1.001),
        (SOURCE + "solve_transport", own_lengths),
        (SOURCE + "solve_transport", altered(reg=lambda reg: reg * 1.001)),
        (SOURCE + "solve_transport", altered(reg_m=lambda reg_m: reg_m * 1.001)),
        (SOURCE + "solve_transport", altered(sweeps=lambda sweeps: 1)),
        ("attnpo.objectives.twdpo.weighted_sum", lambda f: lambda x, w, *args: f(x, torch.ones_like(w), *args)),
    ],
)
def test_a_golden_record_fails_on_what_is_wrong(
    records: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, target: str, breaks: Callable[[Any], Any]
) -> None:
    monkeypatch.setattr(target, breaks(pkgutil.resolve_name(target)))
    assert Status.FAIL in statuses(records)


@pytest.mark.parametrize("name", ["chosen_weights", "rejected_weights_official_float32", "transport_scale", "loss"])
def test_every_expected_number_is_compared(records: list[dict[str, Any]], name: str) -> None:
    def moved(value: Any) -> Any:
        return [moved(item) for item in value] if isinstance(value, list) else value * 1.01

    changed = [{**item, "expected": {**item["expected"], name: moved(item["expected"][name])}} for item in records]
    assert statuses(changed) == [Status.FAIL] * 4
