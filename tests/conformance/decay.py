"""Records of D2PO: weights that decay with the position, under both conventions of the first exponent."""

from jaxtyping import Float
from torch import Tensor

from attnpo.data.collate import pad_rows
from attnpo.objectives.base import PreferenceObjective
from attnpo.schema import SIDES, EncodedResponse, PreferencePair, TokenStats
from attnpo.training.pair_values import pair_values
from attnpo.weights.pipeline import training_weights
from attnpo.weights.sources.decay import Decay
from tests.conformance.batches import both_sides, by_side, filled, pair_batch, row_group
from tests.conformance.fields import Fields, Record
from tests.conformance.records import Comparison, built, compare_expected

FROM_ZERO = "loss_per_example_exponent_from_zero"


def recompute(record: Record, comparison: Comparison) -> None:
    """Compares weights, losses and rewards of ``objective=twdpo`` with ``weights=decay``."""
    given = record.hyperparameters
    objective: PreferenceObjective = built("objective", "objective=twdpo", beta=given["beta"])
    from_one, from_zero = (
        built("weights", "weights=decay", gamma=given["gamma"], first_exponent=first) for first in (1, 0)
    )

    def evaluated(filling: float) -> dict[str, Tensor]:
        other = evaluate(objective, from_zero, record.inputs, filling)["loss_per_example"]
        return {**evaluate(objective, from_one, record.inputs, filling), FROM_ZERO: other}

    compare_expected(record, comparison, evaluated)


def evaluate(objective: PreferenceObjective, source: Decay, inputs: Fields, filling: float) -> dict[str, Tensor]:
    """Every quantity a record may expect, by its name there; positions off the response hold ``filling``."""
    mask = both_sides(inputs, "mask") == 1
    policy, reference = (
        TokenStats(logps=filled(both_sides(inputs, name), mask, filling)) for name in ("policy_logps", "ref_logps")
    )
    weights = on_responses(source, mask.sum(-1).tolist(), mask.shape[1])
    batch = pair_batch(row_group(mask, weights, factors=True))
    output = objective(policy, reference, batch)
    return {
        **{f"{side}_weights": half for side, half in by_side(inputs, "mask", weights).items()},
        "loss_per_example": output.losses,
        "loss": pair_values(policy, output, batch)["loss"].mean(),
        "chosen_rewards": output.chosen_rewards,
        "rejected_rewards": output.rejected_rewards,
    }


def on_responses(source: Decay, counts: list[int], width: int) -> Float[Tensor, "rows R"]:
    """The factors of responses of so many tokens, chosen ones first, through the run's pipeline."""
    rows: tuple[list[Tensor], list[Tensor]] = ([], [])
    for pair in zip(counts[: len(counts) // 2], counts[len(counts) // 2 :], strict=True):
        encoded = {
            side: EncodedResponse([], list(range(count)), [(place, place + 1) for place in range(count)])
            for side, count in zip(SIDES, pair, strict=True)
        }
        made = training_weights(source, None, encoded, pair=PreferencePair("record", (), "", ""))
        if not made.factors:
            raise ValueError("the weights of weights=decay are factors, and the pipeline hands on a distribution")
        rows[0].append(made.chosen)
        rows[1].append(made.rejected)
    return pad_rows([*rows[0], *rows[1]], width).double()
