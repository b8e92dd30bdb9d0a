"""Records of objectives on unpaired examples: rows with labels, read as pairs of one desirable and one undesirable."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from attnpo.objectives.kto import KTO, example_losses
from attnpo.schema import RowGroup, TokenStats
from tests.conformance.batches import filled, pair_batch, row_group
from tests.conformance.fields import Fields, Record
from tests.conformance.records import Comparison, built, compare_expected


def recompute(record: Record, comparison: Comparison) -> None:
    """Compares losses, rewards and KL estimate of ``objective=kto`` with the record."""
    objective: KTO = built("objective", "objective=kto", **record.hyperparameters)
    compare_expected(record, comparison, partial(evaluate, objective, record.inputs))


def evaluate(objective: KTO, inputs: Fields, filling: float) -> dict[str, Tensor]:
    """Every quantity a record may expect, per example in the record's order.

    The mismatched rows are summed in two parts, as a step of two micro-batches would.
    """
    examples = list(range(len(inputs.tensor("kl_mask"))))
    state: dict[str, Tensor] = {}
    for part in (examples[:1], examples[1:]):
        for name, value in objective.step_sums(*scored_rows(inputs, part, filling, "kl_")).items():
            state[name] = state[name] + value if name in state else value
    order = by_label(inputs["label"])
    policy, reference, rows = scored_rows(inputs, order, filling)
    output = objective(policy, reference, replace(pair_batch(rows), state=state))
    rewards = torch.cat([output.chosen_rewards, output.rejected_rewards])
    kl = output.extras["kl"][0]
    per_example = torch.cat(
        example_losses(rewards, kl, objective.beta, objective.desirable_weight, objective.undesirable_weight)
    )
    return {
        "loss": output.losses.mean(),
        "loss_per_example": in_order(per_example, order),
        "rewards": in_order(rewards, order),
        "kl": kl,
        "kl_before_clamp": objective.mismatched_mean(state),
    }


def by_label(labels: Sequence[int]) -> list[int]:
    """The places of the desirable examples, then those of the undesirable ones.

    Raises:
        ValueError: there are not as many of one kind as of the other, so they are no pairs.
    """
    desirable = [place for place, label in enumerate(labels) if label]
    undesirable = [place for place, label in enumerate(labels) if not label]
    if len(desirable) != len(undesirable):
        raise ValueError(
            f"expected as many desirable as undesirable examples, got {len(desirable)} and {len(undesirable)}"
        )
    return desirable + undesirable


def in_order(values: Float[Tensor, " rows"], order: Sequence[int]) -> Float[Tensor, " rows"]:
    """``values`` of the examples ``order``, each at its place in the record."""
    return torch.empty_like(values).index_put((torch.tensor(order),), values)


def scored_rows(
    inputs: Fields, places: list[int], filling: float, prefix: str = ""
) -> tuple[TokenStats, TokenStats, RowGroup]:
    """Policy, reference and rows of the examples at ``places``; ``filling`` stands where the mask is 0."""
    mask = inputs.tensor(f"{prefix}mask")[places] == 1
    policy, reference = (
        TokenStats(logps=filled(inputs.tensor(f"{prefix}{model}_logps")[places], mask, filling))
        for model in ("policy", "ref")
    )
    return policy, reference, row_group(mask)
