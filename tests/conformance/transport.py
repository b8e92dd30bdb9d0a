"""Records with hidden states: optimal transport weights and the objective that reads them (OTPO).

Weights reach the batch as in a training step. Our plan is held to the double values, within the record's rtol, and to
what the published code gave in float32, which stopped early.
"""

from functools import partial

from torch import Tensor

from attnpo.objectives.base import PreferenceObjective
from attnpo.schema import TokenStats
from attnpo.training.pair_values import pair_values
from attnpo.weights.sources.transport import Transport
from tests.conformance.batches import both_sides, by_side, filled, pair_batch, row_group
from tests.conformance.fields import Fields, Record
from tests.conformance.records import Comparison, built, compare_expected

EARLY = 5e-3  # how far an early stop in float32 may be off
EARLY_NAME = "_official_float32"


def recompute(record: Record, comparison: Comparison) -> None:
    """Compares weights, transported mass, losses and rewards of ``objective=otpo`` with ``weights=transport``."""
    given = dict(record.hyperparameters)
    source: Transport = built("weights", "weights=transport", reg=given.pop("ot_reg"), reg_m=given.pop("ot_reg_m"))
    objective: PreferenceObjective = built("objective", "objective=otpo", **given)
    early = {name: EARLY for name in record.expected if name.endswith(EARLY_NAME)}
    compare_expected(record, comparison, partial(evaluate, objective, source, record.inputs), rtols=early)


def evaluate(
    objective: PreferenceObjective, source: Transport, inputs: Fields, filling: float = 0.0
) -> dict[str, Tensor]:
    """Every quantity a record may expect, by its name there; positions off the response hold ``filling``."""
    from attnpo.training.module import apply_online_weights

    mask = both_sides(inputs, "mask") == 1
    logps, hidden = (filled(both_sides(inputs, name), mask, filling) for name in ("policy_logps", "hidden"))
    policy = TokenStats(logps=logps, hidden=hidden)
    reference = TokenStats(logps=filled(both_sides(inputs, "ref_logps"), mask, filling))
    batch = apply_online_weights(pair_batch(row_group(mask)), source, policy, reference)
    output = objective(policy, reference, batch)
    halves = by_side(inputs, "mask", batch.main.token_weights["reward"])
    weights = {f"{side}_weights": half for side, half in halves.items()}
    return {
        **weights,
        **{name + EARLY_NAME: value for name, value in weights.items()},
        "transport_scale": source.transport_plan(policy, batch).scale,
        "loss_per_example": output.losses,
        "loss": pair_values(policy, output, batch)["loss"].mean(),
        "chosen_rewards": output.chosen_rewards,
        "rejected_rewards": output.rejected_rewards,
    }
