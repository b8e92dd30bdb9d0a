"""Records with logits: objectives that compare whole distributions, down to the gradient of the policy's logits.

The statistics come from the run's own functions, once by autograd through whole logits and once through the chunk loop
with the identity as vocabulary head; the record must agree with both.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnpo.models.logps import LMHead, statistics_from_logits, token_statistics
from attnpo.objectives.base import PreferenceObjective
from attnpo.schema import SIDES, ObjectiveOutput, PreferenceBatch, TokenStats
from attnpo.training.pair_values import pair_values
from tests.conformance.batches import both_sides, by_side, pair_batch, row_group
from tests.conformance.fields import Fields, Record
from tests.conformance.records import Comparison, built, compare_expected

CHUNK = 4  # tokens at once; the records' responses are longer

Statistics = dict[str, Float[Tensor, " N"]]
Way = Callable[[Float[Tensor, "N vocab"], Int[Tensor, " N"], Float[Tensor, "N vocab"], tuple[str, ...]], Statistics]


def through_logits(logits: Tensor, labels: Tensor, other: Tensor, joint: tuple[str, ...]) -> Statistics:
    """The statistics by autograd from whole logits, as for a model without a plain head."""
    return statistics_from_logits(logits, labels, joint=joint, other=other)


def through_chunks(logits: Tensor, labels: Tensor, other: Tensor, joint: tuple[str, ...]) -> Statistics:
    """The statistics from the chunk loop, as in training: the logits are hidden states of an identity head."""
    head = LMHead(torch.eye(logits.shape[-1], dtype=logits.dtype))
    return token_statistics(logits, head, labels, joint=joint, other=(other, head), chunk=CHUNK)


WAYS: Mapping[str, Way] = {"whole logits": through_logits, "chunks": through_chunks}


@dataclass(frozen=True)
class LogitRows:
    """A record's logits in response space, chosen rows first, and the batch around them.

    ``policy`` is a leaf that takes gradient.
    """

    inputs: Fields
    policy: Float[Tensor, "rows R vocab"]
    reference: Float[Tensor, "rows R vocab"]
    batch: PreferenceBatch

    @classmethod
    def of(cls, inputs: Fields) -> "LogitRows":
        """What the record gives, both sides padded to one width, with weights 1/|y|."""
        mask = both_sides(inputs, "mask") == 1
        batch = pair_batch(row_group(mask, ids=both_sides(inputs, "tokens").long().where(mask, 0)))
        policy, reference = (both_sides(inputs, f"{model}_logits") for model in ("policy", "ref"))
        return cls(inputs, policy.requires_grad_(), reference, batch)

    def scored(self, way: Way, joint: tuple[str, ...], filling: float = 0.0) -> tuple[TokenStats, TokenStats]:
        """Statistics of policy and reference at the response tokens; elsewhere they hold ``filling``."""
        mask = self.batch.main.response_mask
        labels = self.batch.main.response_ids[mask]
        ours = way(self.policy[mask], labels, self.reference[mask], joint)
        theirs = way(self.reference[mask], labels, self.reference[mask], ())

        def spread(values: Float[Tensor, " N"]) -> Float[Tensor, "rows R"]:
            return values.new_full(mask.shape, filling).masked_scatter(mask, values)

        policy = TokenStats(logps=spread(ours["logps"]), joint={name: spread(ours[f"joint:{name}"]) for name in joint})
        return policy, TokenStats(logps=spread(theirs["logps"]))

    def gradients(self, loss: Float[Tensor, ""]) -> dict[str, Tensor]:
        """The gradient of ``loss`` with respect to the policy's logits, cut to each side's own width."""
        (whole,) = torch.autograd.grad(loss, self.policy)
        return {f"grad_{side}_policy_logits": half for side, half in by_side(self.inputs, "mask", whole).items()}


def recompute(record: Record, comparison: Comparison) -> None:
    """Compares losses, KLs, log-ratios, rewards and gradients of the objective of the record's name, both ways."""
    given = record.hyperparameters
    objective: PreferenceObjective = built("objective", f"objective={record.name}", **given)
    for way in WAYS:
        compare_expected(record, comparison, partial(evaluate, objective, given["beta"], record.inputs, way), way)


def evaluate(
    objective: PreferenceObjective, beta: float, inputs: Fields, way: str, filling: float = 0.0
) -> dict[str, Tensor]:
    """Every quantity a TDPO record may expect, by its name there."""
    given = LogitRows.of(inputs)
    joint = tuple(sorted(name.removeprefix("joint:") for name in objective.requires if name.startswith("joint:")))
    policy, reference = given.scored(WAYS[way], joint, filling)
    output = objective(policy, reference, given.batch)
    return {
        "loss_per_example": output.losses,
        "loss": pair_values(policy, output, given.batch)["loss"].mean(),
        **logged_values(output, beta),
        **given.gradients(output.losses.mean()),
    }


def logged_values(output: ObjectiveOutput, beta: float) -> dict[str, Float[Tensor, " pairs"]]:
    """Rewards ``beta (S(d) + K)``, sequence KLs K and, as the rest of these, the log-ratios S(d) of both sides."""
    values: dict[str, Tensor] = {}
    for side, rewards in zip(SIDES, (output.chosen_rewards, output.rejected_rewards), strict=True):
        kl = output.extras[f"seq_kl/{side}"]
        values |= {f"{side}_rewards_logged": rewards, f"{side}_seq_kl": kl, f"{side}_logratio": rewards / beta - kl}
    return values
