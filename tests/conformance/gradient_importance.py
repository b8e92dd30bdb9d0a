"""Records of TI-DPO: importance weights from given gradients, the weighted step, its plain form, the triplet."""

from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from attnpo.objectives.tidpo import TIDPO
from attnpo.schema import SIDES, InputGradient, RowGroup, TokenStats
from attnpo.training.pair_values import pair_values
from attnpo.weights.sources.gradient import Gradient, NormalizationScope, importance_weights
from tests.conformance.batches import both_sides, by_side, filled, row_group
from tests.conformance.distributions import WAYS, LogitRows
from tests.conformance.fields import Fields, Record
from tests.conformance.records import Comparison, built, compare_expected

SCOPES = {"response": "response", "prompt+response": "sequence"}  # the records' names, those of weights.scope


def recompute(record: Record, comparison: Comparison) -> None:
    """Compares weights, losses, KLs, triplet and gradients of objective=tidpo with weights=gradient, both ways."""
    given = record.hyperparameters
    names = ("beta", "alpha", "gamma_triplet", "triplet_margin")
    objective: TIDPO = built("objective", "objective=tidpo", **{name: given[name] for name in names})
    source: Gradient = built(
        "weights",
        "weights=gradient",
        lam=given["lambda_importance"],
        prior_sigma_div=given["prior_sigma_div"],
        scope=SCOPES[given["importance_scope"]],
    )
    for way in WAYS:
        compare_expected(record, comparison, partial(evaluate, objective, source, record.inputs, way), way)


def evaluate(objective: TIDPO, source: Gradient, inputs: Fields, way: str, filling: float) -> dict[str, Tensor]:
    """Every quantity a record may expect, by its name there; gradients are those of the step without its triplet."""
    given = LogitRows.of(inputs)
    policy, reference = given.scored(WAYS[way], ("kl_ref_policy",), filling)
    gradient = gradient_statistic(inputs, given, filling)
    weights = source.weights(replace(policy, input_gradient=gradient), reference, given.batch)
    main = replace(given.batch.main, token_weights={"reward": weights}, factors=True)
    rows, ratios = anchor(inputs, filling)
    batch = replace(given.batch, groups={"main": main, "anchor": rows})
    policy = replace(policy, groups={"anchor": TokenStats(logps=ratios)})
    reference = replace(reference, groups={"anchor": TokenStats(logps=torch.zeros_like(ratios))})
    whole = objective(policy, reference, batch)
    step = replace(objective, gamma_triplet=0.0)(policy, reference, batch)
    plain = replace(objective, gamma_triplet=0.0, kl=False)(policy, reference, batch)
    return {
        **{f"{side}_weights": value for side, value in whole_weights(source, inputs, weights).items()},
        **{f"{side}_seq_kl": step.extras[f"seq_kl/{side}"] for side in SIDES},
        "tdpo2_loss_per_example": step.losses,
        "weighted_dpo_loss_per_example": plain.losses,
        "triplet_loss": whole.extras.get("triplet", torch.zeros(batch.pairs, dtype=torch.float64)).mean(),
        "loss": pair_values(policy, whole, batch)["loss"].mean(),
        **given.gradients(step.losses.mean()),
    }


def gradient_statistic(inputs: Fields, given: LogitRows, filling: float) -> InputGradient:
    """The record's scores as the statistic that a step computes from its policy."""
    mask, prompt = given.batch.main.response_mask, inputs["prompt_tokens"]
    scores = both_sides(inputs, "importance_scores")
    return InputGradient(
        response=filled(scores[:, prompt:], mask, filling),
        prompt=scores[:, :prompt].sum(-1),
        prompt_tokens=torch.full((len(mask),), prompt),
    )


def whole_weights(
    source: Gradient, inputs: Fields, weights: Float[Tensor, "rows R"]
) -> dict[str, Float[Tensor, "pairs T"]]:
    """The weights of prompt and response, as records hold them.

    A source gives those of responses; under the scope of both, the prompt's come from the same rule with the prompt in
    the response's place.
    """
    scores, valid = both_sides(inputs, "importance_scores"), both_sides(inputs, "importance_valid") == 1
    none = torch.zeros(len(scores), dtype=torch.long)
    prompt = importance_weights(scores, valid, none.double(), none, source.lam, source.prior_sigma_div)
    prompt = prompt[:, : inputs["prompt_tokens"]] * (source.scope is not NormalizationScope.RESPONSE)
    return by_side(inputs, "importance_scores", torch.cat([prompt, weights], dim=1))


def anchor(inputs: Fields, filling: float) -> tuple[RowGroup, Float[Tensor, "pairs A"]]:
    """The anchor's rows and its log-ratios, which stand for the policy's log-probs with a reference of 0."""
    given = inputs.at("anchor")
    mask = given.tensor("mask") == 1
    return replace(row_group(mask, mask.double()), factors=True), filled(given.tensor("log_ratio"), mask, filling)
