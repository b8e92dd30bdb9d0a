"""Records of a ``losses.json``: objectives, and the weight and alignment rules, in float64.

What compares the records of a name stands in ``RECORDS``; a name that is not there but is an option of
configs/objective is compared as an objective of pairs.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from attnpo.config import build, compose
from attnpo.conformance import distributions, transport, unpaired, weights
from attnpo.conformance import gradient_importance as importance
from attnpo.conformance.records import Absent, Check, Comparison, Item, as_double, has_option
from attnpo.objectives.base import PreferenceObjective
from attnpo.schema import ObjectiveOutput, PreferenceBatch, RowGroup, TokenStats
from attnpo.training.metrics import pair_values

# Below this share of the record's rtol, relative to numbers of size 1, a difference is rounding of a sum near 0.
FLOOR = 1e-3
GARBAGE = 1234.5  # put where the mask is 0; finite, so that an objective may also multiply by its mask
FLOAT32 = 1e-6  # a number that the reference formed in float32

Compare = Callable[[dict[str, Any], Comparison], None]


@dataclass(frozen=True)
class Recorded:
    """What the records of one name belong to (configs/``group``/``option``.yaml) and what compares them.

    ``apart``: quantities that get a line of their own each, compared by another function; those, as a rule, of which
    there is no exact counterpart here and whose line says why.
    """

    group: str
    option: str
    compare: Compare
    apart: Mapping[str, Compare] = field(default_factory=dict)


def items(records: list[dict[str, Any]]) -> Iterator[Item]:
    """The items of every record, in the file's order: one, and one more for each quantity that stands apart."""
    for record in records:
        name, case = str(record["name"]), str(record["case"])
        rule = RECORDS.get(name, pairwise(name))
        if not has_option(rule.group, rule.option):
            yield Absent(name, case, rule.group, rule.option)
            continue
        expected = {key: value for key, value in record["expected"].items() if key not in rule.apart}
        yield Check(name, case, partial(rule.compare, {**record, "expected": expected}))
        for quantity, compare in rule.apart.items():
            if quantity in record["expected"]:
                yield Check(name, f"{case} {quantity}", partial(compare, record))


# --------------------------------------------------------------------------------------------- objectives of pairs


@dataclass(frozen=True)
class ObjectiveRule:
    """How the records of a pairwise objective reach its option of configs/objective.

    ``fixed``: keys that are always set. ``keys``: hyperparameters of another name here. ``properties``: hyperparameters
    that follow from the others and are compared. ``others``: quantities of the objective under other keys, each with
    its name there. ``derived``: quantities read off the output.
    """

    option: str
    fixed: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    properties: tuple[str, ...] = ()
    others: Mapping[str, tuple[str, Mapping[str, Any]]] = field(default_factory=dict)
    derived: Mapping[str, Callable[[Any, ObjectiveOutput], Tensor]] = field(default_factory=dict)

    def build(self, hyperparameters: Mapping[str, Any], **values: Any) -> Any:
        """The objective of a record, with ``values`` set as well."""
        given = {self.keys.get(key, key): value for key, value in hyperparameters.items() if key not in self.properties}
        return configured(self.option, **{**self.fixed, **given, **values})


@cache
def _composed(option: str) -> DictConfig:
    # Without a setting: what a setting says of one objective's keys is no part of another's.
    return compose("fit", ["~setting", f"objective={option}"])


def configured(option: str, **values: Any) -> Any:
    """The objective that ``attnpo.fit objective=option`` builds, with ``values`` as its keys.

    Raises UserError or OmegaConf's errors for keys it does not know.
    """
    cfg = OmegaConf.create(_composed(option))
    for key, value in values.items():
        OmegaConf.update(cfg, f"objective.{key}", value)
    return build(cfg.objective)


def objective_record(rule: ObjectiveRule, record: dict[str, Any], found: Comparison) -> None:
    """Nothing; compares loss, rewards and accuracies of the objective built from config with the record.

    Everything is computed a second time with other values where the mask is 0, and must come out the same to the bit.
    """
    rtol = float(record["rtol"])
    given = record["hyperparameters"]
    computed = {"": _twice(rule, record, {})}
    found.require(bool(record["expected"]), "the record expects nothing")
    for name in rule.properties:
        found.numbers(name, getattr(rule.build(given), name), given[name], rtol=rtol)
    for name, expected in record["expected"].items():
        here, values = rule.others.get(name, (name, {}))
        if values and name not in computed:
            computed[name] = _twice(rule, record, values)
        results, garbage = computed[name if values else ""]
        if here not in results:
            found.mismatch(f"{name}: expected by the record, but nothing here computes it for {rule.option}")
            continue
        if name.endswith("accuracy"):  # a float32 mean in the reference
            found.numbers(name, results[here].float(), torch.tensor(expected).float())
        else:
            found.numbers(name, results[here], expected, rtol=rtol, atol=FLOOR * rtol * _scale(expected))
        found.require(torch.equal(results[here], garbage[here]), f"{name} changes with values under mask 0")


def _twice(
    rule: ObjectiveRule, record: dict[str, Any], values: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    objective = rule.build(record["hyperparameters"], **values)
    clean, garbage = (evaluate(objective, record["inputs"], filling, rule.derived) for filling in (None, GARBAGE))
    return clean, garbage


def _scale(expected: Any) -> float:
    return max(1.0, float(as_double(expected).abs().max()))


def evaluate(
    objective: PreferenceObjective,
    inputs: Mapping[str, Any],
    garbage: float | None = None,
    derived: Mapping[str, Callable[[Any, ObjectiveOutput], Tensor]] | None = None,
) -> dict[str, Tensor]:
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
    results |= {name: read(objective, output) for name, read in (derived or {}).items()}
    if "losses/sft" in output.extras:
        results["sft"] = output.extras["losses/sft"].mean()
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
        step_tokens=(int(mask[:pairs].sum()), int(mask[pairs:].sum())),
    )
    reference = TokenStats(logps=values("ref_logps")) if "ref_logps" in sides[0] else None
    return TokenStats(logps=values("policy_logps")), reference, batch


# --------------------------------------------------------------------------------------------- what compares what


def _preference(objective: Any, output: ObjectiveOutput) -> Tensor:
    return output.extras.get("losses/preference", output.losses)  # without an SFT term the losses are it


def _chosen(objective: Any, output: ObjectiveOutput) -> Tensor:
    return output.chosen_rewards


def _rejected(objective: Any, output: ObjectiveOutput) -> Tensor:
    return output.rejected_rewards


def _chosen_mean(objective: Any, output: ObjectiveOutput) -> Tensor:
    mean: Tensor = output.chosen_rewards / objective.lam
    return mean


def _rejected_mean(objective: Any, output: ObjectiveOutput) -> Tensor:
    mean: Tensor = output.rejected_rewards / objective.lam
    return mean


ORPO = ObjectiveRule(
    "orpo",
    keys={"lambda": "lam"},
    derived={
        "odds_ratio_loss_per_example": _preference,
        "chosen_avg_logp": _chosen_mean,
        "rejected_avg_logp": _rejected_mean,
    },
)


def prompt_nll(record: dict[str, Any], found: Comparison) -> None:
    """Nothing; compares TRL's ORPO loss with ours after the prompt's tokens were added to the SFT term."""
    objective = ORPO.build(record["hyperparameters"], sft="batch")
    results = evaluate(objective, record["inputs"], None, ORPO.derived)
    chosen = record["inputs"]["chosen"]
    tokens, prompt = as_double(chosen["mask"]).sum(), as_double(chosen["prompt_logps"])
    nll = (results["sft"] * tokens - prompt.sum()) / (tokens + prompt.numel())
    loss = objective.lam * results["odds_ratio_loss_per_example"].mean() + nll
    expected = record["expected"]["loss_trl_float32_with_prompt_nll"]
    found.numbers("loss with the prompt's tokens", loss, expected, rtol=FLOAT32)
    found.variant = "TRL's SFT term reads the prompt too, ours the response alone; equal once the prompt is added"


def pairwise(option: str, apart: Mapping[str, Compare] | None = None, **rule: Any) -> Recorded:
    """Records of an objective of pairs; ``rule`` are the fields of its ``ObjectiveRule``."""
    return Recorded("objective", option, partial(objective_record, ObjectiveRule(option, **rule)), apart or {})


BATCH_NLL = {"nll_token_mean_over_batch": ("sft", {"sft": "batch", "sft_coef": 1.0})}
SCORES = {"rank_loss_per_example": _preference, "chosen_score": _chosen, "rejected_score": _rejected}

RECORDS: dict[str, Recorded] = {
    "twdpo_len_norm": pairwise("twdpo", fixed={"length_scale": False}),
    "ipo": pairwise("ipo", others={"loss_per_example_summed_variant": ("loss_per_example", {"reduction": "sum"})}),
    "cpo": pairwise(
        "cpo",
        others={"loss_per_example_sequence_sum_variant": ("loss_per_example", {"sft": "sum"}), **BATCH_NLL},
        derived={"preference_loss_per_example": _preference},
    ),
    "orpo": Recorded(
        "objective", "orpo", partial(objective_record, ORPO), {"loss_trl_float32_with_prompt_nll": prompt_nll}
    ),
    "simpo": pairwise("simpo", properties=("gamma",)),
    "rrhf": pairwise("rrhf", derived=SCORES),
    "slic_hf": pairwise("slic_hf", others=BATCH_NLL, derived={"hinge_per_example": _preference}),
    "kto": Recorded("objective", "kto", unpaired.record),
    "tdpo1": Recorded("objective", "tdpo1", distributions.record),
    "tdpo2": Recorded("objective", "tdpo2", distributions.record),
    "tidpo": Recorded("objective", "tidpo", importance.record),
    "otpo": Recorded("objective", "otpo", transport.record),
    "attnpo_weights_layer": Recorded("weights", "attention", weights.layer_record),
    "attnpo_weights_rollout": Recorded("weights", "rollout", weights.rollout_record),
    "attnpo_align": Recorded("weights", "attention", weights.align_record),
}
