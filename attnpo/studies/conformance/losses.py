"""Records of a ``losses.json``: objectives, and the weight and alignment rules, in float64."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnpo.objectives.base import PreferenceObjective
from attnpo.schema import PreferenceBatch, RowGroup, TokenStats
from attnpo.studies.conformance import weights
from attnpo.studies.conformance.records import Absent, Check, Comparison, Item, as_double, built, has_option
from attnpo.training.metrics import pair_values

# Below this share of the record's rtol, relative to numbers of size 1, a difference is rounding of a sum near 0.
FLOOR = 1e-3
GARBAGE = 1234.5  # put where the mask is 0; finite, so that an objective may also multiply by its mask


@dataclass(frozen=True)
class ObjectiveRule:
    """How records of one name reach an objective: the option of configs/objective, and keys that are always set."""

    option: str
    fixed: Mapping[str, Any]


# Names that are not simply an option of configs/objective with the record's hyperparameters as its keys.
OBJECTIVES = {"twdpo_len_norm": ObjectiveRule("twdpo", {"length_scale": False})}

# name -> option of configs/weights it belongs to, and what compares it (None: nobody yet).
WEIGHT_RULES: dict[str, tuple[str, Callable[[dict[str, Any], Comparison], None] | None]] = {
    "attnpo_weights_layer": ("attention", weights.layer_record),
    "attnpo_weights_rollout": ("rollout", weights.rollout_record),
    "attnpo_align": ("attention", weights.align_record),
}


def items(records: list[dict[str, Any]]) -> Iterator[Item]:
    """One item per record, in the file's order."""
    for record in records:
        name, case = str(record["name"]), str(record["case"])
        if name in WEIGHT_RULES:
            option, compare = WEIGHT_RULES[name]
            known = compare is not None and has_option("weights", option)
            yield (
                Check(name, case, partial(compare, record))
                if known and compare
                else Absent(name, case, "weights", option)
            )
            continue
        rule = OBJECTIVES.get(name, ObjectiveRule(name, {}))
        if has_option("objective", rule.option):
            yield Check(name, case, partial(objective_record, rule, record))
        else:
            yield Absent(name, case, "objective", rule.option)


def objective_record(rule: ObjectiveRule, record: dict[str, Any], found: Comparison) -> None:
    """Nothing; compares loss, rewards and accuracies of the objective built from config with the record.

    Everything is computed a second time with other values where the mask is 0, and must come out the same to the bit.
    """
    objective: PreferenceObjective = built(
        "objective", [f"objective={rule.option}"], **rule.fixed, **record["hyperparameters"]
    )
    results, garbage = (evaluate(objective, record["inputs"], filling) for filling in (None, GARBAGE))
    rtol = float(record["rtol"])
    found.require(bool(record["expected"]), "the record expects nothing")
    for name, expected in record["expected"].items():
        if name not in results:
            found.mismatch(f"{name}: expected by the record, but nothing here computes it for {rule.option}")
            continue
        if name.endswith("accuracy"):  # a float32 mean in the reference
            found.numbers(name, results[name].float(), torch.tensor(expected).float())
        else:
            found.numbers(name, results[name], expected, rtol=rtol, atol=FLOOR * rtol * _scale(expected))
        found.require(torch.equal(results[name], garbage[name]), f"{name} changes with values under mask 0")


def _scale(expected: Any) -> float:
    return max(1.0, float(as_double(expected).abs().max()))


def evaluate(objective: PreferenceObjective, inputs: Mapping[str, Any], garbage: float | None) -> dict[str, Tensor]:
    """Every quantity a record may expect, by its name there; taken from the run's own metrics where it logs them."""
    policy, reference, batch = preference_batch(inputs, garbage)
    output = objective(policy, reference, batch)
    logged = pair_values(policy, output, batch)
    results = {
        "loss_per_example": output.losses,
        "loss": logged["loss"].mean(),
        "chosen_rewards": output.chosen_rewards,
        "rejected_rewards": output.rejected_rewards,
        "weighted_chosen_rewards": output.chosen_rewards,
        "weighted_rejected_rewards": output.rejected_rewards,
        "accuracy": logged["rewards/accuracies"].mean(),
        "weighted_accuracy": logged["rewards/accuracies"].mean(),
    }
    if "unweighted/chosen" in output.extras:
        plain = replace(
            output,
            chosen_rewards=output.extras["unweighted/chosen"],
            rejected_rewards=output.extras["unweighted/rejected"],
        )
        results["unweighted_chosen_rewards"] = plain.chosen_rewards
        results["unweighted_rejected_rewards"] = plain.rejected_rewards
        results["unweighted_accuracy"] = pair_values(policy, plain, batch)["rewards/accuracies"].mean()
    return {name: value.detach() for name, value in results.items()}


def preference_batch(
    inputs: Mapping[str, Any], garbage: float | None = None
) -> tuple[TokenStats, TokenStats | None, PreferenceBatch]:
    """Policy statistics, reference statistics and batch of a record: chosen rows first, both sides padded to one width.

    ``garbage`` replaces the record's own values where the mask is 0. Records without weights get 1/|y|.
    """
    sides = [inputs[side] for side in ("chosen", "rejected")]
    width = max(len(row) for side in sides for row in side["mask"])

    def both(name: str) -> Float[Tensor, "rows R"]:
        rows = [row + [0.0] * (width - len(row)) for side in sides for row in side[name]]
        return torch.tensor(rows, dtype=torch.float64)

    mask: Bool[Tensor, "rows R"] = both("mask") == 1

    def values(name: str) -> Float[Tensor, "rows R"]:
        return both(name) if garbage is None else torch.where(mask, both(name), garbage)

    lengths = mask.sum(-1).double()
    weights = values("weights") if "weights" in sides[0] else mask / lengths.clamp(min=1).unsqueeze(-1)
    if "judge_token_count" in sides[0]:
        lengths = torch.tensor([count for side in sides for count in side["judge_token_count"]], dtype=torch.float64)
    pairs = len(sides[0]["mask"])
    rows = RowGroup(
        response_ids=torch.zeros(mask.shape, dtype=torch.long),
        response_mask=mask,
        token_weights={"reward": weights},
        source_lengths=lengths,
        reference_logps=None,
    )
    batch = PreferenceBatch(
        groups={"main": rows},
        pair_weight=torch.ones(pairs, dtype=torch.float64),
        pair_ids=tuple(str(index) for index in range(pairs)),
        step_pairs=pairs,
    )
    reference = TokenStats(logps=values("ref_logps")) if "ref_logps" in sides[0] else None
    return TokenStats(logps=values("policy_logps")), reference, batch
