"""Objectives without a reference inside the training loop: no reference model, and steps cut as one likes."""

from collections.abc import Callable
from typing import Any

import pytest

from attnpo.data.rules import BatchPlan
from tests.objectives.inputs import objective_of
from tests.training.conftest import fit as fit
from tests.training.tiny import make_data, make_examples, make_module

FREE: list[tuple[str, dict[str, Any]]] = [
    ("cpo", {}),
    ("orpo", {"sft": "batch"}),
    ("simpo", {"sft_weight": 0.5}),
    ("rrhf", {"sft": "batch"}),
    ("slic_hf", {}),
]


@pytest.mark.parametrize(("option", "values"), FREE, ids=[option for option, _ in FREE])
def test_how_a_step_is_cut_changes_nothing(
    fit: Callable[..., list[dict[str, float]]], option: str, values: dict[str, Any]
) -> None:
    """12 pairs in steps of 8: the second has four, and token means are those of its own tokens."""
    objective = objective_of(option, *values.items())
    assert "reference" not in objective.requires
    rows = [
        fit(make_module(2, objective, live=False), make_data(make_examples(12), BatchPlan(8, micro)), steps=2, epochs=1)
        for micro in (1, 8)
    ]
    for name in ("train/loss", "train/grad_norm", "train/rewards/margins"):
        cut, whole = ([row[name] for row in run if name in row] for run in rows)
        # AdamW's first step is lr times a sign where a gradient is near 0, so rounding shows in the second step's.
        rel = 1e-4 if name == "train/grad_norm" else 2e-5
        # So it does in a margin, a difference of sums near each other: 3.6e-6 on one processor.
        near = 1e-5 if name == "train/rewards/margins" else 2e-6
        assert len(whole) == 2 and cut == pytest.approx(whole, rel=rel, abs=near), name
