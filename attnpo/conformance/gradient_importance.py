"""Records of TI-DPO: importance weights from given gradients, the weighted step, its plain form, the triplet."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from attnpo.conformance.distributions import GARBAGE, WAYS, Given, compare
from attnpo.conformance.records import Comparison, as_double, built
from attnpo.objectives.tidpo import TIDPO
from attnpo.schema import SIDES, InputGradient, RowGroup, TokenStats
from attnpo.training.metrics import pair_values
from attnpo.weights.sources.gradient import Gradient, Scope, importance_weights

SCOPES = {"response": "response", "prompt+response": "sequence"}  # the records' names, those of weights.scope


def record(record: dict[str, Any], found: Comparison) -> None:
    """Nothing; compares weights, losses, KLs, triplet and gradients of objective=tidpo with weights=gradient.

    Everything is computed through whole logits and through the chunk loop, and each way a second time with other
    values where the mask is 0, which must come out the same to the bit.
    """
    given = record["hyperparameters"]
    names = ("beta", "alpha", "gamma_triplet", "triplet_margin")
    objective: TIDPO = built("objective", ["objective=tidpo"], **{name: given[name] for name in names})
    source: Gradient = built(
        "weights",
        ["weights=gradient"],
        lam=given["lambda_importance"],
        prior_sigma_div=given["prior_sigma_div"],
        scope=SCOPES[given["importance_scope"]],
    )
    for way in WAYS:
        results, garbage = (evaluate(objective, source, record["inputs"], way, filling) for filling in (0.0, GARBAGE))
        compare(record, results, garbage, found, way)


def evaluate(
    objective: TIDPO, source: Gradient, inputs: Mapping[str, Any], way: str, filling: float
) -> dict[str, Tensor]:
    """Every quantity a record may expect, by its name there; gradients are those of the step without its triplet."""
    given = Given.of(inputs)
    policy, reference = given.scored(WAYS[way], ("kl_ref_policy",), filling)
    found = gradient_statistic(inputs, given, filling)
    weights = source.weights(replace(policy, input_gradient=found), reference, given.batch)
    main = replace(given.batch.main, token_weights={"reward": weights}, factors=True)
    rows, ratios = anchor(inputs, filling)
    batch = replace(given.batch, groups={"main": main, "anchor": rows})
    policy = replace(policy, groups={"anchor": TokenStats(logps=ratios)})
    reference = replace(reference, groups={"anchor": TokenStats(logps=torch.zeros_like(ratios))})
    whole = objective(policy, reference, batch)
    step = replace(objective, gamma_triplet=0.0)(policy, reference, batch)
    plain = replace(objective, gamma_triplet=0.0, kl=False)(policy, reference, batch)
    results = {
        **{f"{side}_weights": value for side, value in whole_weights(source, inputs, given, weights).items()},
        **{f"{side}_seq_kl": step.extras[f"seq_kl/{side}"] for side in SIDES},
        "tdpo2_loss_per_example": step.losses,
        "weighted_dpo_loss_per_example": plain.losses,
        "triplet_loss": whole.extras.get("triplet", torch.zeros(batch.pairs, dtype=torch.float64)).mean(),
        "loss": pair_values(policy, whole, batch)["loss"].mean(),
        **given.gradients(step.losses.mean()),
    }
    return {name: value.detach() for name, value in results.items()}


def gradient_statistic(inputs: Mapping[str, Any], given: Given, filling: float) -> InputGradient:
    """The record's scores as the statistic that a step computes from its policy."""
    mask, prompt = given.batch.main.response_mask, int(inputs["prompt_tokens"])
    scores = [as_double(inputs[side]["importance_scores"]) for side in SIDES]
    response = torch.full(mask.shape, filling, dtype=torch.float64)
    for half, own in zip(response.chunk(2), scores, strict=True):
        half[:, : own.shape[1] - prompt] = own[:, prompt:]
    return InputGradient(
        response=torch.where(mask, response, filling),
        prompt=torch.cat([own[:, :prompt].sum(-1) for own in scores]),
        prompt_tokens=torch.full((len(mask),), prompt),
    )


def whole_weights(
    source: Gradient, inputs: Mapping[str, Any], given: Given, weights: Float[Tensor, "rows R"]
) -> dict[str, Float[Tensor, "pairs T"]]:
    """The weights of prompt and response, as records hold them.

    A source gives those of responses; under the scope of both, the prompt's come from the same rule with the prompt in
    the response's place.
    """
    prompt = int(inputs["prompt_tokens"])
    found = {}
    for side, own, width in zip(SIDES, weights.chunk(2), given.widths, strict=True):
        scores = as_double(inputs[side]["importance_scores"])
        valid = as_double(inputs[side]["importance_valid"]) == 1
        none = torch.zeros(len(scores), dtype=torch.long)
        before = importance_weights(scores, valid, none.double(), none, source.lam, source.prior_sigma_div)
        if source.scope is Scope.RESPONSE:
            before = torch.zeros_like(before)
        found[side] = torch.cat([before[:, :prompt], own[:, :width]], dim=1)
    return found


def anchor(inputs: Mapping[str, Any], filling: float) -> tuple[RowGroup, Float[Tensor, "pairs A"]]:
    """The anchor's rows and its log-ratios, which stand for the policy's log-probs with a reference of 0."""
    mask = as_double(inputs["anchor"]["mask"]) == 1
    rows = RowGroup(
        response_ids=torch.zeros(mask.shape, dtype=torch.long),
        response_mask=mask,
        token_weights={"reward": mask.double()},
        source_lengths=mask.sum(-1).double(),
        reference_logps=None,
        factors=True,
    )
    return rows, torch.where(mask, as_double(inputs["anchor"]["log_ratio"]), filling)
