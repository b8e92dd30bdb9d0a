"""TDPO1 and TDPO2: golden records, stop-gradients, token weights; test_contract.py has what holds of all objectives."""

import json
import math
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attnpo.objectives.base import LengthFrom, PreferenceObjective
from attnpo.objectives.dpo import DPO
from attnpo.objectives.tdpo import TDPO1, TDPO2
from attnpo.objectives.twdpo import TwDPO
from attnpo.schema import TokenStats
from tests.conformance import distributions
from tests.conformance.fields import Record
from tests.conformance.records import Comparison, compare_expected
from tests.objectives.inputs import (
    COUNTS,
    Case,
    garbled,
    make_batch,
    make_case,
    make_rows,
    with_gradient,
    with_leaves,
)

PAIRS = len(COUNTS[0])
BOTH = (TDPO1(0.3), TDPO2(0.3, 0.5))


@pytest.fixture
def case() -> Case:
    return make_case(TDPO1())


def gradient_of_kl(objective: PreferenceObjective, case: Case) -> Tensor:
    found = with_leaves(objective, case)[1].joint["kl_ref_policy"].grad
    assert found is not None
    return found


# ------------------------------------------------------------------------------------------------ golden records


def golden(vectors: Path, name: str) -> list[dict[str, Any]]:
    records = json.loads((vectors / "losses.json").read_text())["records"]
    found = [record for record in records if record["name"] == name]
    assert len(found) == 4
    return found


@pytest.mark.parametrize("name", ("tdpo1", "tdpo2"))
def test_golden_records_agree_to_the_gradient_of_the_logits(vectors: Path, name: str) -> None:
    for record in golden(vectors, name):
        comparison = Comparison()
        distributions.recompute(Record.read(record), comparison)
        assert not comparison.problems and not comparison.variant and 0 < comparison.absolute < 1e-13


@pytest.mark.parametrize("way", list(distributions.WAYS))
def test_only_the_gradients_tell_a_stop_gradient_apart(vectors: Path, way: str) -> None:
    """TDPO1's formula with both K passing gradient is TDPO2's at alpha 1 in all but the chosen side's gradient."""
    record = Record.read(golden(vectors, "tdpo2")[3])
    assert record.hyperparameters == {"beta": 0.5, "alpha": 1.0}
    results = distributions.evaluate(TDPO1(0.5), 0.5, record.inputs, way)
    comparison = Comparison()
    compare_expected(record, comparison, lambda filling: results, way)
    assert [problem.partition(" ")[0] for problem in comparison.problems] == ["grad_chosen_policy_logits"]


def test_a_record_with_another_number_fails(vectors: Path) -> None:
    for quantity in ("loss", "chosen_seq_kl", "rejected_rewards_logged", "grad_rejected_policy_logits"):
        record = deepcopy(golden(vectors, "tdpo2")[0])
        values = torch.tensor(record["expected"][quantity], dtype=torch.float64)
        values.view(-1)[0] += 1e-8
        record["expected"][quantity] = values.tolist()
        comparison = Comparison()
        distributions.recompute(Record.read(record), comparison)
        assert {problem.split("[")[0].partition(" ")[0] for problem in comparison.problems} == {quantity}


# ------------------------------------------------------------------------------------------------ by hand, identities


def test_weights_multiply_the_log_ratios_and_not_the_kl() -> None:
    # a_w = (.75, .25), |y_w| = 2 -> 2 (.75 - .125) = 1.25; a_l = (.5, .5), |y_l| = 3 -> 3 (-.375) = -1.125.
    ratios = torch.tensor([[1.0, -0.5], [-1.0, 0.25]], dtype=torch.float64)
    kl = torch.tensor([[0.1, 0.2], [0.3, 0.4]], dtype=torch.float64)  # K_w = 0.3, K_l = 0.7
    stats = TokenStats(ratios, joint={"kl_ref_policy": kl}), TokenStats(torch.zeros_like(ratios))
    rows = make_rows((2, 2), torch.tensor([[0.75, 0.25], [0.5, 0.5]], dtype=torch.float64))
    batch = make_batch(replace(rows, source_lengths=torch.tensor([2.0, 3.0], dtype=torch.float64)))
    for objective, margin in (
        (TDPO1(0.4), 2.375 - 0.4),
        (TDPO1(0.4, length_scale=False), 1.0 - 0.4),
        (TDPO2(0.4, 0.25), 2.375 - 0.1),
        (TDPO2(0.4, 0.25, length_from=LengthFrom.TRAIN), 2.0 - 0.1),
    ):
        out = objective(*stats, batch)
        assert out.losses.item() == pytest.approx(math.log(1 + math.exp(-0.4 * margin)), abs=1e-12)
        assert out.extras["seq_kl/chosen"].item() == pytest.approx(0.3)
        assert out.extras["seq_kl/rejected"].item() == pytest.approx(0.7)


def test_the_kl_passes_gradient_on_both_sides_of_tdpo1_and_the_rejected_side_of_tdpo2(case: Case) -> None:
    first, second = (gradient_of_kl(objective, case) for objective in BOTH)
    chosen, rejected = case.mask[:PAIRS], case.mask[PAIRS:]
    assert bool((first[:PAIRS][chosen] < 0).all()) and bool((first[PAIRS:][rejected] > 0).all())
    assert not second[:PAIRS].any() and bool((second[PAIRS:][rejected] > 0).all())


def test_without_kl_they_are_dpo_and_with_weights_twdpo(case: Case) -> None:
    uniform = make_rows(COUNTS[0] + COUNTS[1])
    plain = case.with_rows(token_weights=uniform.token_weights, source_lengths=uniform.source_lengths)
    for given, other in ((plain, DPO(0.3)), (case, TwDPO(0.3))):
        expected, expected_gradient = with_gradient(other, given)
        none = replace(
            given, policy=replace(given.policy, joint={"kl_ref_policy": torch.zeros_like(case.policy.logps)})
        )
        for objective, read in ((TDPO1(0.3), none), (TDPO2(0.3, 0.5), none), (TDPO2(0.3, 0.0), given)):
            out, gradient = with_gradient(objective, read)
            torch.testing.assert_close(out.losses, expected.losses, rtol=0, atol=1e-14)
            torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-14)


def test_a_token_without_weight_gets_no_gradient_but_its_kl_counts(case: Case) -> None:
    weights, rows = case.batch.main.token_weights["reward"].clone(), [0, PAIRS]
    weights[rows, 1] = 0.0
    silent = case.with_rows(token_weights={"reward": weights})
    gradient, of_kl = with_gradient(TDPO1(0.3), silent)[1], gradient_of_kl(TDPO1(0.3), silent)
    assert not gradient[rows, 1].any() and of_kl[rows, 1].all() and gradient[rows, 0].all()


def test_values_under_the_mask_reach_no_gradient_of_the_kl(case: Case) -> None:
    for objective in BOTH:
        found = gradient_of_kl(objective, garbled(case))
        assert torch.equal(found, gradient_of_kl(objective, case)) and not found[~case.mask].any()


def test_a_batch_without_the_statistic_is_an_error(case: Case) -> None:
    other = replace(case.policy, joint={"kl_policy_ref": case.policy.joint["kl_ref_policy"]})
    for objective in BOTH:
        assert objective.requires == {"reference", "token_weights", "joint:kl_ref_policy"}
        with pytest.raises(ValueError, match="needs joint:kl_ref_policy, but it was not computed"):
            objective(other, case.reference, case.batch)
