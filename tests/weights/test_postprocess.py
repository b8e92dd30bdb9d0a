"""Rounds, normalisation and sink rule against golden numbers and by property; shares of weights that arrive."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnpo.schema import Kind, UserError
from attnpo.weights.arrival import WeightCoverage, coverage_and_kept_mass
from attnpo.weights.postprocess import (
    Postprocess,
    RoundOrder,
    check_is_distribution,
    combine_rounds,
    fix_sink,
    has_flat_rounds,
    is_flat,
    normalize,
)

ORDERS = {"official": RoundOrder.NORMALIZE_THEN_MEAN, "paper_order": RoundOrder.MEAN_THEN_NORMALIZE}
MASSES = st.lists(st.floats(0, 1e6, allow_subnormal=False) | st.just(0.0), min_size=1, max_size=12)


def double(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("sink", [0, 1])
def test_layer_records_of_the_reference(vectors: Path, order: str, sink: int) -> None:
    records = [r for r in json.loads((vectors / "losses.json").read_text())["records"]
               if r["name"] == "attnpo_weights_layer"]  # fmt: skip
    assert len(records) == 8
    for record in records:
        hyper = record["hyperparameters"]
        process = Postprocess(ORDERS[order], sink * hyper["K"], hyper["K_min_len"])
        for side in ("chosen", "rejected"):
            rows = [double(record["inputs"][f"round{k}_{side}_attention_per_head"]).mean(0) for k in (1, 2)]
            expected = double(record["expected"][f"{side}_{order}" + ("_sink_fixed" if sink else "")])
            torch.testing.assert_close(process(rows), expected, rtol=1e-9, atol=0)


def test_sink_cases_of_the_reference(vectors: Path) -> None:
    cases = json.loads((vectors / "extraction/unit_cases.json").read_text())["sink_fix"]
    assert sum(case["fixed"] is None for case in cases) == 2
    for case in cases:
        weights = double(case["weights"])
        fixed = fix_sink(weights)
        if case["fixed"] is None:  # the reference divides by zero here; ours spreads the rest evenly
            expected = torch.full_like(weights, float(weights.sum()) / weights.numel())
        else:
            expected = double(case["fixed"])
        torch.testing.assert_close(fixed, expected, rtol=1e-12, atol=1e-15)


def test_a_round_without_mass_is_uniform_when_normalised_first() -> None:
    rounds = [double([0.0, 0.0]), double([1.0, 3.0])]
    torch.testing.assert_close(combine_rounds(rounds, RoundOrder.NORMALIZE_THEN_MEAN), double([0.375, 0.625]))
    torch.testing.assert_close(combine_rounds(rounds, RoundOrder.MEAN_THEN_NORMALIZE), double([0.25, 0.75]))


@pytest.mark.parametrize("values", [[1e-310, 3e-310], [1e308, 1.5e308], [0.0, 0.0, 0.0]])
def test_normalising_extreme_masses(values: list[float]) -> None:
    row = normalize(double(values))
    assert math.isclose(float(row.sum()), 1.0, rel_tol=1e-12)
    assert bool((row >= 0).all())


def test_rows_without_mass_can_be_told() -> None:
    assert is_flat(double([0.0, 0.0]))
    assert not is_flat(double([0.0, 1e-320])), "a subnormal weight is mass"
    assert is_flat(torch.tensor([1e-46, 1e-50], dtype=torch.float64).float()), "underflow in float32 is not"
    silent, loud = double([0.0, 0.0]), double([1.0, 3.0])
    cases = [([silent, silent], True, True), ([silent, loud], False, True), ([loud, loud], False, False)]
    for rounds, mean_first, each_first in cases:
        assert has_flat_rounds(rounds, RoundOrder.MEAN_THEN_NORMALIZE) == mean_first
        assert has_flat_rounds(rounds, RoundOrder.NORMALIZE_THEN_MEAN) == each_first
    assert Postprocess()([silent, silent]).tolist() == [0.5, 0.5]


@settings(max_examples=25)
@given(MASSES, st.integers(0, 4), st.integers(1, 8))
def test_sink_rule_keeps_the_total_and_the_order_of_the_rest(values: list[float], first: int, least: int) -> None:
    weights = double(values)
    fixed = fix_sink(weights, first, least)
    assert bool((fixed >= 0).all())
    torch.testing.assert_close(fixed.sum(), weights.sum(), rtol=1e-9, atol=1e-12)
    if first == 0 or len(values) < least:
        assert torch.equal(fixed, weights)
    else:
        torch.testing.assert_close(fixed[:first], (weights.sum() / len(values)).expand(min(first, len(values))))


@settings(max_examples=25)
@given(st.lists(st.tuples(st.floats(0, 1e3), st.floats(0, 1e3)), min_size=1, max_size=9), st.sampled_from(RoundOrder))
def test_the_result_sums_to_one_and_ignores_scale(pairs: list[tuple[float, float]], order: RoundOrder) -> None:
    rounds = [double([float(f"{a:.3f}") for a, _ in pairs]), double([float(f"{b:.3f}") for _, b in pairs])]
    process = Postprocess(order)
    row = process(rounds)
    assert math.isclose(float(row.sum()), 1.0, rel_tol=1e-9)
    torch.testing.assert_close(process([one * 7 for one in rounds]), row, rtol=1e-9, atol=1e-12)


def test_no_row_and_no_token_are_refused() -> None:
    for rows in ([], [double([])]):
        with pytest.raises(UserError, match="pair 3f2a: expected at least one round"):
            Postprocess()(rows, "pair 3f2a")


def test_only_distributions_may_be_postprocessed() -> None:
    check_is_distribution(Kind.DISTRIBUTION, False)
    for kind, signed, said in ((Kind.FACTOR, False, "kind factor"), (Kind.DISTRIBUTION, True, "signed weights")):
        with pytest.raises(UserError, match=said):
            check_is_distribution(kind, signed)


# --------------------------------------------------------------------------------------- arrival


ARRIVED = torch.tensor([1.0, 0.0, 0.5])


@pytest.mark.parametrize(
    ("weights", "kept"), [([0.5, 0.3, 0.2], 0.6), ([0.5, -0.3, -0.2], 0.6), ([0.0, 0.0, 0.0], 1.0)]
)
def test_tokens_and_weights_are_counted_apart(weights: list[float], kept: float) -> None:
    """Two of three tokens arrive at all; of the weight 0.5 whole and half of 0.2, whatever its sign."""
    assert coverage_and_kept_mass(torch.tensor(weights), ARRIVED) == pytest.approx((2 / 3, kept))


def test_nothing_measured_is_no_number_and_no_warning() -> None:
    none = WeightCoverage.mean_over([])
    assert all(math.isnan(value) for value in vars(none).values()) and not none.is_low
