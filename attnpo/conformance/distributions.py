"""Records with logits: objectives that compare whole distributions, down to the gradient of the policy's logits.

The statistics come from the run's own functions, once by autograd through whole logits and once through the chunk loop
with the identity as vocabulary head; the record must agree with both.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnpo.conformance.records import Comparison, as_double, built
from attnpo.models.logps import Head, statistics_of_logits, token_statistics
from attnpo.objectives.base import PreferenceObjective
from attnpo.schema import SIDES, ObjectiveOutput, PreferenceBatch, RowGroup, TokenStats
from attnpo.training.metrics import pair_values

# Below this share of the record's rtol, relative to numbers of size 1, a difference is rounding of a sum near 0.
FLOOR = 1e-3
GARBAGE = 1234.5  # put where the mask is 0
CHUNK = 4  # tokens at once; the records' responses are longer

Statistics = dict[str, Float[Tensor, "N"]]
Way = Callable[[Float[Tensor, "N vocab"], Int[Tensor, "N"], Float[Tensor, "N vocab"], tuple[str, ...]], Statistics]


def through_logits(logits: Tensor, labels: Tensor, other: Tensor, joint: tuple[str, ...]) -> Statistics:
    """The statistics by autograd from whole logits, as for a model without a plain head."""
    return statistics_of_logits(logits, labels, joint=joint, other=other)


def through_chunks(logits: Tensor, labels: Tensor, other: Tensor, joint: tuple[str, ...]) -> Statistics:
    """The statistics from the chunk loop, as in training: the logits are hidden states of an identity head."""
    head = Head(torch.eye(logits.shape[-1], dtype=logits.dtype))
    return token_statistics(logits, head, labels, joint=joint, other=(other, head), chunk=CHUNK)


WAYS: Mapping[str, Way] = {"whole logits": through_logits, "chunks": through_chunks}


@dataclass(frozen=True)
class Given:
    """A record's logits in response space, chosen rows first, and the batch around them.

    ``policy`` is a leaf that takes gradient; ``widths`` are the chosen and the rejected side's own in the record.
    """

    policy: Float[Tensor, "rows R vocab"]
    reference: Float[Tensor, "rows R vocab"]
    batch: PreferenceBatch
    widths: tuple[int, int]

    @classmethod
    def of(cls, inputs: Mapping[str, Any], weights: Float[Tensor, "rows R"] | None = None) -> "Given":
        """What the record gives, both sides padded to one width; ``weights`` instead of 1/|y|."""
        sides = [inputs[side] for side in SIDES]
        mask = _both([as_double(side["mask"]) for side in sides]) == 1
        lengths = mask.sum(-1).double()
        rows = RowGroup(
            response_ids=_both([torch.tensor(side["tokens"]) for side in sides]).where(mask, 0),
            response_mask=mask,
            token_weights={"reward": mask / lengths.clamp(min=1).unsqueeze(-1) if weights is None else weights},
            source_lengths=lengths,
            reference_logps=None,
        )
        pairs = len(sides[0]["mask"])
        batch = PreferenceBatch(
            groups={"main": rows},
            pair_weight=torch.ones(pairs, dtype=torch.float64),
            pair_ids=tuple(str(index) for index in range(pairs)),
            step_pairs=pairs,
        )
        policy, reference = (_both([as_double(side[f"{who}_logits"]) for side in sides]) for who in ("policy", "ref"))
        chosen, rejected = (len(side["mask"][0]) for side in sides)
        return cls(policy.requires_grad_(), reference, batch, (chosen, rejected))

    def scored(self, way: Way, joint: tuple[str, ...], filling: float = 0.0) -> tuple[TokenStats, TokenStats]:
        """Statistics of policy and reference at the response tokens; elsewhere they hold ``filling``."""
        mask = self.batch.main.response_mask
        labels = self.batch.main.response_ids[mask]
        own = way(self.policy[mask], labels, self.reference[mask], joint)
        theirs = way(self.reference[mask], labels, self.reference[mask], ())

        def spread(values: Float[Tensor, "N"]) -> Float[Tensor, "rows R"]:
            return values.new_full(mask.shape, filling).masked_scatter(mask, values)

        found = {name: spread(own[f"joint:{name}"]) for name in joint}
        return TokenStats(logps=spread(own["logps"]), joint=found), TokenStats(logps=spread(theirs["logps"]))

    def gradients(self, loss: Float[Tensor, ""]) -> dict[str, Tensor]:
        """The gradient of ``loss`` with respect to the policy's logits, cut to each side's own width."""
        (whole,) = torch.autograd.grad(loss, self.policy)
        halves = zip(SIDES, whole.chunk(2), self.widths, strict=True)
        return {f"grad_{side}_policy_logits": half[:, :width] for side, half, width in halves}


def _both(sides: list[Tensor]) -> Tensor:
    """Both sides one above the other, zeros behind the shorter one's positions."""
    width = max(side.shape[1] for side in sides)
    return torch.cat([torch.cat([s, s.new_zeros(len(s), width - s.shape[1], *s.shape[2:])], dim=1) for s in sides])


def record(record: dict[str, Any], found: Comparison) -> None:
    """Nothing; compares losses, KLs, log-ratios, rewards and gradients of the objective of the record's name.

    Everything is computed both ways, and each way a second time with other values where the mask is 0, which must come
    out the same to the bit.
    """
    name, inputs = str(record["name"]), record["inputs"]
    objective: PreferenceObjective = built("objective", [f"objective={name}"], **record["hyperparameters"])
    beta = float(record["hyperparameters"]["beta"])
    for way in WAYS:
        results, garbage = (evaluate(objective, beta, inputs, way, filling) for filling in (0.0, GARBAGE))
        compare(record, results, garbage, found, way)


def compare(
    record: dict[str, Any],
    results: Mapping[str, Tensor],
    garbage: Mapping[str, Tensor],
    found: Comparison,
    way: str,
) -> None:
    """Nothing; compares every quantity the record expects; ``garbage`` has them with other values under mask 0."""
    rtol = float(record["rtol"])
    found.require(bool(record["expected"]), "the record expects nothing")
    for name, expected in record["expected"].items():
        if name not in results:
            found.mismatch(f"{name}: expected by the record, but nothing here computes it for {record['name']}")
            continue
        size = max(1.0, float(as_double(expected).abs().max()))
        found.numbers(f"{name} ({way})", results[name], expected, rtol=rtol, atol=FLOOR * rtol * size)
        found.require(torch.equal(results[name], garbage[name]), f"{name} ({way}) changes with values under mask 0")


def evaluate(
    objective: PreferenceObjective, beta: float, inputs: Mapping[str, Any], way: str, filling: float = 0.0
) -> dict[str, Tensor]:
    """Every quantity a TDPO record may expect, by its name there."""
    given = Given.of(inputs)
    joint = tuple(sorted(name.removeprefix("joint:") for name in objective.requires if name.startswith("joint:")))
    policy, reference = given.scored(WAYS[way], joint, filling)
    output = objective(policy, reference, given.batch)
    results = {
        "loss_per_example": output.losses,
        "loss": pair_values(policy, output, given.batch)["loss"].mean(),
        **sides(output, beta),
        **given.gradients(output.losses.mean()),
    }
    return {name: value.detach() for name, value in results.items()}


def sides(output: ObjectiveOutput, beta: float) -> dict[str, Float[Tensor, "pairs"]]:
    """Rewards ``beta (S(d) + K)``, sequence KLs K and, as the rest of these, the log-ratios S(d) of both sides."""
    found = {}
    for side, rewards in zip(SIDES, (output.chosen_rewards, output.rejected_rewards), strict=True):
        kl = output.extras[f"seq_kl/{side}"]
        found.update({f"{side}_rewards_logged": rewards, f"{side}_seq_kl": kl, f"{side}_logratio": rewards / beta - kl})
    return found
