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
from attnpo.objectives.otpo import OTPO
from attnpo.schema import PreferenceBatch, RowGroup, TokenStats, UserError
from attnpo.weights.optimal_transport import Plan
from tests.conformance.fields import Record
from tests.conformance.records import Check, Status
from tests.conformance.transport import recompute


def made_batch(factors: Tensor, mask: Tensor) -> PreferenceBatch:
    rows = RowGroup(
        response_ids=torch.zeros(mask.shape, dtype=torch.long),
        response_mask=mask,
        token_weights={"reward": factors},
        source_lengths=mask.sum(-1).double(),
        reference_logps=None,
        factors=True,
    )
    pairs = mask.shape[0] // 2
    return PreferenceBatch({"main": rows}, torch.ones(pairs), tuple(map(str, range(pairs))), step_pairs=pairs)


@pytest.fixture
def case() -> tuple[TokenStats, TokenStats, Tensor]:
    generator = torch.Generator().manual_seed(4)
    policy, reference = -3 * torch.rand(2, 4, 6, generator=generator, dtype=torch.float64)
    mask = torch.arange(6) < torch.tensor([6, 2, 4, 1])[:, None]
    return TokenStats(policy.requires_grad_()), TokenStats(reference), mask


def test_factors_of_one_are_dpo(case: tuple[TokenStats, TokenStats, Tensor]) -> None:
    policy, reference, mask = case
    batch = made_batch(mask.double(), mask)
    found = OTPO(0.3, label_smoothing=0.1)(policy, reference, batch)
    expected = DPO(0.3, label_smoothing=0.1)(policy, reference, batch)
    torch.testing.assert_close(found.losses, expected.losses, rtol=0, atol=1e-14)
    torch.testing.assert_close(found.chosen_rewards, found.extras["unweighted/chosen"], rtol=0, atol=1e-14)
    grads = [torch.autograd.grad(out.losses.sum(), policy.logps)[0] for out in (found, expected)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-14)


def test_a_pair_by_hand() -> None:
    # d_w = (1, -0.5, 2), w_w = (.9, .7, .4); d_l = (-1, 0.25), w_l = (1.2, .8): 1.35 and -1; no length enters
    mask = torch.tensor([[True, True, True], [True, True, False]])
    ratios = torch.tensor([[1.0, -0.5, 2.0], [-1.0, 0.25, 9.0]], dtype=torch.float64)
    factors = torch.tensor([[0.9, 0.7, 0.4], [1.2, 0.8, 9.0]], dtype=torch.float64)
    out = OTPO(0.4)(TokenStats(ratios), TokenStats(torch.zeros_like(ratios)), made_batch(factors, mask))
    assert out.losses.item() == pytest.approx(math.log(1 + math.exp(-0.4 * 2.35)), abs=1e-12)
    assert out.chosen_rewards.item() == pytest.approx(0.4 * 1.35)
    assert out.rejected_rewards.item() == pytest.approx(-0.4)
    assert out.extras["unweighted/chosen"].item() == pytest.approx(0.4 * 2.5)
    assert out.extras["unweighted/rejected"].item() == pytest.approx(0.4 * -0.75)


def test_a_distribution_is_refused(case: tuple[TokenStats, TokenStats, Tensor]) -> None:
    policy, reference, mask = case
    batch = made_batch(mask.double(), mask)
    batch = replace(batch, groups={"main": replace(batch.main, factors=False)})
    with pytest.raises(ValueError, match="OTPO reads factors"):
        OTPO()(policy, reference, batch)


@pytest.mark.parametrize(("key", "values"), [("beta", (0.0, math.nan)), ("label_smoothing", (-0.1, 0.5))])
def test_settings_out_of_range_are_refused(key: str, values: tuple[float, ...]) -> None:
    for value in values:
        with pytest.raises(UserError, match=rf"objective\.{key} must be .*, got {value}"):
            OTPO(**{key: value})


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

    def broken(costs: Tensor, chosen_mask: Tensor, rejected_mask: Tensor, *settings: Any) -> Plan:
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
        def broken(costs: Tensor, one: Tensor, other: Tensor, reg: float, reg_m: float, sweeps: int) -> Plan:
            settings = {"reg": reg, "reg_m": reg_m, "sweeps": sweeps}
            settings |= {name: change(settings[name]) for name, change in changes.items()}
            plan: Plan = transport(costs, one, other, **settings)
            return plan

        return broken

    return breaks


SOURCE = "attnpo.weights.sources.transport."


@pytest.mark.parametrize(
    ("target", "breaks"),
    [
        (SOURCE + "token_costs", without_norms),
        (SOURCE + "token_costs", lambda f: lambda *args: f(*args) * 1.001),
        (SOURCE + "transport", own_lengths),
        (SOURCE + "transport", altered(reg=lambda reg: reg * 1.001)),
        (SOURCE + "transport", altered(reg_m=lambda reg_m: reg_m * 1.001)),
        (SOURCE + "transport", altered(sweeps=lambda sweeps: 1)),
        ("attnpo.objectives.twdpo.weighted_sum", lambda f: lambda x, w, *args: f(x, torch.ones_like(w), *args)),
    ],
)
def test_a_golden_record_fails_on_what_is_wrong(
    records: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    breaks: Callable[[Any], Any],
) -> None:
    monkeypatch.setattr(target, breaks(pkgutil.resolve_name(target)))
    assert Status.FAIL in statuses(records)


@pytest.mark.parametrize("name", ["chosen_weights", "rejected_weights_official_float32", "transport_scale", "loss"])
def test_every_expected_number_is_compared(records: list[dict[str, Any]], name: str) -> None:
    def moved(value: Any) -> Any:
        return [moved(item) for item in value] if isinstance(value, list) else value * 1.01

    changed = [{**item, "expected": {**item["expected"], name: moved(item["expected"][name])}} for item in records]
    assert statuses(changed) == [Status.FAIL] * 4
