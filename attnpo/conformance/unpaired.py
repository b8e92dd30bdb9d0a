"""Records of objectives on unpaired examples: rows with labels, read as pairs of one desirable and one undesirable."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from attnpo.conformance.records import Comparison, as_double, built
from attnpo.objectives.kto import KTO, example_losses
from attnpo.schema import PreferenceBatch, RowGroup, TokenStats

# Below this share of the record's rtol, relative to numbers of size 1, a difference is rounding of a sum near 0.
FLOOR = 1e-3
GARBAGE = 1234.5  # put where the mask is 0


def record(record: dict[str, Any], found: Comparison) -> None:
    """Nothing; compares losses, rewards and KL estimate of ``objective=kto`` with the record.

    Everything is computed a second time with other values where the mask is 0, and must come out the same to the bit.
    """
    objective: KTO = built("objective", ["objective=kto"], **record["hyperparameters"])
    results, garbage = (evaluate(objective, record["inputs"], filling) for filling in (None, GARBAGE))
    rtol = float(record["rtol"])
    found.require(bool(record["expected"]), "the record expects nothing")
    for name, expected in record["expected"].items():
        if name not in results:
            found.mismatch(f"{name}: expected by the record, but nothing here computes it for kto")
            continue
        size = max(1.0, float(as_double(expected).abs().max()))
        found.numbers(name, results[name], expected, rtol=rtol, atol=FLOOR * rtol * size)
        found.require(torch.equal(results[name], garbage[name]), f"{name} changes with values under mask 0")


def evaluate(objective: KTO, inputs: Mapping[str, Any], garbage: float | None) -> dict[str, Tensor]:
    """Every quantity a record may expect, per example in the record's order.

    The mismatched rows are summed in two parts, as a step of two micro-batches would.
    """
    order = by_label(inputs["label"])
    rows = row_group(inputs, "mask", order)
    policy, reference = (logps(inputs, name, "mask", order, garbage) for name in ("policy_logps", "ref_logps"))
    examples = range(len(inputs["kl_mask"]))
    state: dict[str, Tensor] = {}
    for part in (examples[:1], examples[1:]):
        ahead = row_group(inputs, "kl_mask", part)
        ours, theirs = (logps(inputs, f"kl_{name}", "kl_mask", part, garbage) for name in ("policy_logps", "ref_logps"))
        for name, value in objective.sums(ours, theirs, ahead).items():
            state[name] = state[name] + value if name in state else value
    pairs = len(order) // 2
    batch = PreferenceBatch(
        groups={"main": rows},
        pair_weight=torch.ones(pairs, dtype=torch.float64),
        pair_ids=tuple(str(index) for index in range(pairs)),
        step_pairs=pairs,
        state=state,
    )
    output = objective(policy, reference, batch)
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


def in_order(values: Float[Tensor, "rows"], order: Sequence[int]) -> Float[Tensor, "rows"]:
    """``values`` of the examples ``order``, each at its place in the record."""
    return torch.empty_like(values).index_put((torch.tensor(order),), values)


def row_group(inputs: Mapping[str, Any], mask: str, places: Sequence[int]) -> RowGroup:
    """The examples at ``places`` with uniform weights 1/n."""
    kept = torch.tensor([inputs[mask][place] for place in places]) == 1
    lengths = kept.sum(-1).double()
    return RowGroup(
        response_ids=torch.zeros(kept.shape, dtype=torch.long),
        response_mask=kept,
        token_weights={"reward": kept / lengths.clamp(min=1).unsqueeze(-1)},
        source_lengths=lengths,
        reference_logps=None,
    )


def logps(inputs: Mapping[str, Any], name: str, mask: str, places: Sequence[int], garbage: float | None) -> TokenStats:
    """Log-probabilities ``name`` at ``places``; ``garbage`` replaces the record's own where the mask is 0."""
    values = as_double([inputs[name][place] for place in places])
    kept = torch.tensor([inputs[mask][place] for place in places]) == 1
    return TokenStats(logps=values if garbage is None else torch.where(kept, values, garbage))
