"""Computes the values logged per pair of a batch, before averaging."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnpo.objectives.base import Reduction, reduce, split_pairs
from attnpo.schema import ModelInputs, ObjectiveOutput, PreferenceBatch, TokenStats


def pair_values(
    policy: TokenStats, output: ObjectiveOutput, batch: PreferenceBatch
) -> dict[str, Float[Tensor, " pairs"]]:
    """Returns everything logged per pair: loss, rewards, margins, accuracies, log-probabilities, weight statistics.

    ``rewards/*`` are the objective's own; a pair with equal rewards counts as an accuracy of 0.5.
    ``weights/effective_share`` is the effective number of weighted tokens divided by the source's |y|, averaged over
    both sides; uniform weights give 1.
    """
    rows = batch.main
    margins = output.chosen_rewards - output.rejected_rewards
    chosen, rejected = split_pairs(reduce(policy.logps.detach(), None, rows.response_mask, Reduction.SUM))
    values = {
        "loss": output.losses.detach() * batch.pair_weight,
        "rewards/chosen": output.chosen_rewards,
        "rewards/rejected": output.rejected_rewards,
        "rewards/margins": margins,
        "rewards/accuracies": (margins > 0).float() + 0.5 * (margins == 0).float(),
        "logps/chosen": chosen,
        "logps/rejected": rejected,
    }
    for name, value in output.extras.items():
        loss_part = name.startswith("losses/")  # excludes pairs with weight 0
        values[name if loss_part else f"rewards/{name}"] = value * batch.pair_weight if loss_part else value
    weights = torch.where(rows.response_mask, rows.token_weights["reward"], 0.0)
    mass = weights.sum(-1)
    square = weights.square().sum(-1)
    effective = torch.where(square > 0, mass.square() / square.clamp(min=1e-30), torch.zeros_like(mass))
    share = effective / rows.source_lengths.clamp(min=1.0)
    values["weights/effective_share"] = 0.5 * (share[: batch.pairs] + share[batch.pairs :])
    values["weights/max"] = torch.maximum(*split_pairs(weights.amax(-1)))
    values |= {name: value for name, value in batch.pair_values.items() if name.startswith("weights/")}
    return values


def tokens_per_pair(batch: PreferenceBatch) -> Float[Tensor, " pairs"]:
    """Returns the mean number of tokens per pair (with prompts, without padding), repeated for each pair."""
    counts = [_count_tokens(rows.inputs) for rows in batch.groups.values() if rows.inputs is not None]
    return torch.stack(counts).sum().double().expand(batch.pairs) / batch.pairs


def _count_tokens(inputs: ModelInputs) -> Int[Tensor, ""]:
    if inputs.segments is not None:
        return inputs.segments[:, [1, 3]].sum().to(inputs.input_ids.device, non_blocking=True)
    if inputs.attention_mask is not None:
        return inputs.attention_mask.sum()
    return inputs.input_ids.new_tensor(inputs.input_ids.numel())
