"""Records of a ``losses.json``: objectives, and the weight and alignment rules, in float64.

``RECORDS`` says by name what recomputes a record; a name that is not there but is an option of configs/objective is
compared as an objective of pairs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from attnpo.objectives.base import PreferenceObjective
from attnpo.schema import SIDES, ObjectiveOutput, TokenStats
from attnpo.training.pair_values import pair_values
from tests.conformance import decay, distributions, scorers, transport, unpaired, weights
from tests.conformance import gradient_importance as importance
from tests.conformance.batches import both_sides, filled, pair_batch, row_group
from tests.conformance.fields import Fields, Record
from tests.conformance.records import Absent, Check, Comparison, Item, built, compare_expected, has_option

FLOAT32 = 1e-6  # a number that the reference formed in float32

Compare = Callable[[Record, Comparison], None]
Derived = Callable[[Fields, ObjectiveOutput], Tensor]  # from a record's hyperparameters and an objective's output


@dataclass(frozen=True)
class RecordKind:
    """What the records of one name belong to (configs/``group``/``option``.yaml) and what compares them.

    ``apart``: quantities that get a line of their own each, compared by another function; those, as a rule, of which
    there is no exact counterpart here and whose line says why.
    """

    group: str
    option: str
    compare: Compare
    apart: Mapping[str, Compare] = field(default_factory=dict)


def items(records: Sequence[Record]) -> Iterator[Item]:
    """The items of every record, in the file's order: one, and one more for each quantity that stands apart."""
    for record in records:
        kind = RECORDS.get(record.name) or pairwise(Pairwise(record.name))
        if not has_option(kind.group, kind.option):
            yield Absent(record.name, record.case, kind.group, kind.option)
            continue
        yield Check(record.name, record.case, partial(kind.compare, record.without(tuple(kind.apart))))
        for quantity, compare in kind.apart.items():
            if quantity in record.expected:
                yield Check(record.name, f"{record.case} {quantity}", partial(compare, record))


# --------------------------------------------------------------------------------------------- objectives of pairs


@dataclass(frozen=True)
class Pairwise:
    """How the records of a pairwise objective reach its option of configs/objective.

    ``fixed``: keys that are always set. ``keys``: hyperparameters of another name here. ``properties``: hyperparameters
    that follow from the others and are compared. ``others``: quantities of the objective under other keys, each with
    its name there. ``derived``: quantities that follow from the output.
    """

    option: str
    fixed: Mapping[str, object] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    properties: tuple[str, ...] = ()
    others: Mapping[str, tuple[str, Mapping[str, object]]] = field(default_factory=dict)
    derived: Mapping[str, Derived] = field(default_factory=dict)

    def build(self, hyperparameters: Fields, **values: object) -> PreferenceObjective:
        """The objective of a record, with ``values`` set as well."""
        given = {self.keys.get(k, k): value for k, value in hyperparameters.items() if k not in self.properties}
        keys = {**self.fixed, **given, **values}
        objective: PreferenceObjective = built("objective", f"objective={self.option}", **keys)
        return objective

    def compare(self, record: Record, comparison: Comparison) -> None:
        """Compares loss, rewards and accuracies of the objective built from config with the record."""
        given = record.hyperparameters
        objective = self.build(given)
        others = {n: (there, self.build(given, **v)) for n, (there, v) in self.others.items() if n in record.expected}
        for name in self.properties:
            comparison.numbers(name, getattr(objective, name), given[name], rtol=record.rtol)

        def evaluated(filling: float) -> dict[str, Tensor]:
            alone = {name: self.evaluate(other, record, filling)[there] for name, (there, other) in others.items()}
            return self.evaluate(objective, record, filling) | alone

        compare_expected(record, comparison, evaluated)

    def evaluate(self, objective: PreferenceObjective, record: Record, filling: float = 0.0) -> dict[str, Tensor]:
        """Every quantity a record may expect, by its name there; taken from the run's own metrics where it logs them.

        ``filling`` stands where the mask is 0.
        """
        inputs, chosen = record.inputs, record.inputs.at("chosen")
        mask = both_sides(inputs, "mask") == 1

        def masked(name: str) -> Float[Tensor, "rows R"]:
            return filled(both_sides(inputs, name), mask, filling)

        weights = masked("weights") if "weights" in chosen else None
        lengths = [inputs.at(side).tensor("judge_token_count") for side in SIDES if "judge_token_count" in chosen]
        batch = pair_batch(row_group(mask, weights, torch.cat(lengths) if lengths else None))
        policy = TokenStats(logps=masked("policy_logps"))
        reference = TokenStats(logps=masked("ref_logps")) if "ref_logps" in chosen else None
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
        results |= {name: derive(record.hyperparameters, output) for name, derive in self.derived.items()}
        if "losses/sft" in output.extras:
            results["sft"] = output.extras["losses/sft"].mean()
        if "unweighted/chosen" in output.extras:
            unweighted = [output.extras[f"unweighted/{side}"] for side in SIDES]
            results["unweighted_chosen_rewards"], results["unweighted_rejected_rewards"] = unweighted
            plain = replace(output, chosen_rewards=unweighted[0], rejected_rewards=unweighted[1])
            results["unweighted_accuracy"] = pair_values(policy, plain, batch)["rewards/accuracies"].mean()
        return results


# --------------------------------------------------------------------------------------------- what compares what


def _preference(given: Fields, output: ObjectiveOutput) -> Tensor:
    return output.extras.get("losses/preference", output.losses)  # without an SFT term the losses are it


ORPO = Pairwise(
    "orpo",
    keys={"lambda": "lam"},
    derived={
        "odds_ratio_loss_per_example": _preference,
        "chosen_avg_logp": lambda given, output: output.chosen_rewards / given["lambda"],
        "rejected_avg_logp": lambda given, output: output.rejected_rewards / given["lambda"],
    },
)


def prompt_nll(record: Record, comparison: Comparison) -> None:
    """Compares TRL's ORPO loss with ours after the prompt's tokens were added to the SFT term."""
    results = ORPO.evaluate(ORPO.build(record.hyperparameters, sft="batch"), record)
    chosen = record.inputs.at("chosen")
    tokens, prompt = chosen.tensor("mask").sum(), chosen.tensor("prompt_logps")
    nll = (results["sft"] * tokens - prompt.sum()) / (tokens + prompt.numel())
    loss = record.hyperparameters["lambda"] * results["odds_ratio_loss_per_example"].mean() + nll
    expected = record.expected.tensor(PROMPT_NLL)
    comparison.numbers("loss with the prompt's tokens", loss, expected, rtol=FLOAT32)
    comparison.vary("TRL's SFT term reads the prompt too, ours the response alone; equal once the prompt is added")


def pairwise(rule: Pairwise, apart: Mapping[str, Compare] | None = None) -> RecordKind:
    """Records of an objective of pairs."""
    return RecordKind("objective", rule.option, rule.compare, apart or {})


PROMPT_NLL = "loss_trl_float32_with_prompt_nll"
BATCH_NLL = {"nll_token_mean_over_batch": ("sft", {"sft": "batch", "sft_coef": 1.0})}
SCORES: dict[str, Derived] = {
    "rank_loss_per_example": _preference,
    "chosen_score": lambda given, output: output.chosen_rewards,
    "rejected_score": lambda given, output: output.rejected_rewards,
}

RECORDS: dict[str, RecordKind] = {
    "twdpo_len_norm": pairwise(Pairwise("twdpo", fixed={"length_scale": False})),
    "ipo": pairwise(
        Pairwise("ipo", others={"loss_per_example_summed_variant": ("loss_per_example", {"reduction": "sum"})})
    ),
    "cpo": pairwise(
        Pairwise(
            "cpo",
            others={"loss_per_example_sequence_sum_variant": ("loss_per_example", {"sft": "sum"}), **BATCH_NLL},
            derived={"preference_loss_per_example": _preference},
        )
    ),
    "orpo": pairwise(ORPO, {PROMPT_NLL: prompt_nll}),
    "simpo": pairwise(Pairwise("simpo", properties=("gamma",))),
    "rrhf": pairwise(Pairwise("rrhf", derived=SCORES)),
    "slic_hf": pairwise(Pairwise("slic_hf", others=BATCH_NLL, derived={"hinge_per_example": _preference})),
    "kto": RecordKind("objective", "kto", unpaired.recompute),
    "tdpo1": RecordKind("objective", "tdpo1", distributions.recompute),
    "tdpo2": RecordKind("objective", "tdpo2", distributions.recompute),
    "tidpo": RecordKind("objective", "tidpo", importance.recompute),
    "otpo": RecordKind("objective", "otpo", transport.recompute),
    "d2po": RecordKind("weights", "decay", decay.recompute),
    "tis_dpo": RecordKind("weights", "contrast", scorers.recompute_tis_dpo),
    "cdpo": RecordKind(
        "weights", "contrast_cdpo", scorers.recompute_cdpo, dict.fromkeys(scorers.COLUMNS, scorers.columns_of_cdpo)
    ),
    "sepo": RecordKind("weights", "selection", scorers.recompute_sepo),
    "attnpo_weights_layer": RecordKind("weights", "attention", weights.recompute_layer),
    "attnpo_weights_rollout": RecordKind("weights", "rollout", weights.recompute_rollout),
    "abc": RecordKind("weights", "reward_attention", weights.recompute_credit),
    "attnpo_align": RecordKind("weights", "attention", weights.recompute_alignment),
}
