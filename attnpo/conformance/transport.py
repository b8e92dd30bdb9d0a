"""Records with hidden states: optimal transport weights and the objective that reads them (OTPO).

Weights reach the batch as in a training step. Our plan is held to the double values, within the record's rtol, and to
what the published code gave in float32, which stopped early.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attnpo.conformance.records import Comparison, as_double, built
from attnpo.objectives.base import PreferenceObjective
from attnpo.schema import SIDES, PreferenceBatch, RowGroup, TokenStats
from attnpo.training.metrics import pair_values
from attnpo.training.module import weighed
from attnpo.weights.sources.transport import Transport

# Below this share of the record's rtol, relative to numbers of size 1, a difference is rounding of a sum near 0.
FLOOR = 1e-3
GARBAGE = 1234.5  # put where the mask is 0
EARLY = 5e-3  # how far an early stop in float32 may be off
EARLY_NAME = "_official_float32"


def record(record: dict[str, Any], found: Comparison) -> None:
    """Nothing; compares weights, transported mass, losses and rewards of ``objective=otpo`` with ``weights=transport``.

    Everything is computed a second time with other values where the mask is 0, and must come out the same to the bit.
    """
    given = dict(record["hyperparameters"])
    source: Transport = built("weights", ["weights=transport"], reg=given.pop("ot_reg"), reg_m=given.pop("ot_reg_m"))
    objective: PreferenceObjective = built("objective", ["objective=otpo"], **given)
    results, garbage = (evaluate(objective, source, record["inputs"], filling) for filling in (0.0, GARBAGE))
    found.require(bool(record["expected"]), "the record expects nothing")
    for name, expected in record["expected"].items():
        quantity, rtol = name.removesuffix(EARLY_NAME), EARLY if name.endswith(EARLY_NAME) else float(record["rtol"])
        if quantity not in results:
            found.mismatch(f"{name}: expected by the record, but nothing here computes it for otpo")
            continue
        size = max(1.0, float(as_double(expected).abs().max()))
        found.numbers(name, results[quantity], expected, rtol=rtol, atol=FLOOR * rtol * size)
        found.require(torch.equal(results[quantity], garbage[quantity]), f"{name} changes with values under mask 0")


def evaluate(
    objective: PreferenceObjective, source: Transport, inputs: Mapping[str, Any], filling: float = 0.0
) -> dict[str, Tensor]:
    """Every quantity a record may expect, by its name there; positions off the response hold ``filling``."""
    policy, reference, batch = step(inputs, filling)
    batch = weighed(batch, source, policy, reference)
    output = objective(policy, reference, batch)
    halves = batch.main.token_weights["reward"].chunk(2)
    widths = [len(inputs[side]["mask"][0]) for side in SIDES]
    return {
        **{f"{side}_weights": half[:, :width] for side, half, width in zip(SIDES, halves, widths, strict=True)},
        "transport_scale": source.plan(policy, batch).scale,
        "loss_per_example": output.losses,
        "loss": pair_values(policy, output, batch)["loss"].mean(),
        "chosen_rewards": output.chosen_rewards,
        "rejected_rewards": output.rejected_rewards,
    }


def step(inputs: Mapping[str, Any], filling: float) -> tuple[TokenStats, TokenStats, PreferenceBatch]:
    """Policy, reference and batch of a record, chosen rows first, both sides padded to one width; weights 1/|y|."""
    sides = [inputs[side] for side in SIDES]
    mask = _both([as_double(side["mask"]) for side in sides]) == 1

    def values(name: str) -> Tensor:
        rows = _both([as_double(side[name]) for side in sides])
        return torch.where(mask.reshape(*mask.shape, *[1] * (rows.dim() - 2)), rows, filling)

    lengths = mask.sum(-1).double()
    rows = RowGroup(
        response_ids=torch.zeros(mask.shape, dtype=torch.long),
        response_mask=mask,
        token_weights={"reward": mask / lengths.unsqueeze(-1)},
        source_lengths=lengths,
        reference_logps=None,
    )
    pairs = len(mask) // 2
    batch = PreferenceBatch(
        groups={"main": rows},
        pair_weight=torch.ones(pairs, dtype=torch.float64),
        pair_ids=tuple(str(index) for index in range(pairs)),
        step_pairs=pairs,
    )
    policy = TokenStats(logps=values("policy_logps"), hidden=values("hidden"))
    return policy, TokenStats(logps=values("ref_logps")), batch


def _both(sides: list[Tensor]) -> Tensor:
    """Both sides one above the other, zeros behind the shorter one's positions."""
    width = max(side.shape[1] for side in sides)
    return torch.cat([torch.cat([s, s.new_zeros(len(s), width - s.shape[1], *s.shape[2:])], dim=1) for s in sides])
