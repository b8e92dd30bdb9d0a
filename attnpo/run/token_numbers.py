"""What policy and reference make of a pair's tokens, and what each token adds to the pair's reward margin."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from attnpo.data.collate import TrainingExample, collate
from attnpo.models.layouts import padded
from attnpo.objectives.base import PreferenceObjective
from attnpo.schema import TokenStats, UserError
from attnpo.weights.capture import LogpPair

AT_ONCE = 64  # copies of a pair per call of the objective


@dataclass(frozen=True)
class Scores:
    """Log-probabilities of a pair's tokens under policy and reference, (chosen, rejected) each, in nats."""

    policy: LogpPair
    reference: LogpPair

    def columns(self, objective: PreferenceObjective, example: TrainingExample) -> list[dict[str, Float[Tensor, " _"]]]:
        """Returns the columns of either side: log-probabilities, log-ratio, contribution to the margin."""
        parts = contributions(objective, example, self)
        return [
            {"logp": policy, "reference_logp": reference, "log_ratio": policy - reference, "contribution": part}
            for policy, reference, part in zip(self.policy, self.reference, parts, strict=True)
        ]


def contributions(objective: PreferenceObjective, example: TrainingExample, scores: Scores) -> LogpPair:
    """Returns how much smaller the pair's reward margin is where the policy gives a token the reference's
    log-probability.

    The margin is the objective's own (chosen minus rejected reward), so beta, |y| and weights are in it. Where it is
    linear in the log-ratios, as in DPO and TwDPO, the contributions of all tokens add up to it. UserError for an
    objective that reads more than log-probabilities and weights.
    """
    more = sorted(objective.requires - {"reference", "token_weights"})
    if more:
        raise UserError(
            f"column=contribution: objective {type(objective).__name__} also reads {', '.join(more)}, so a token has "
            "no part of its own in the margin; take another column, or objective=twdpo"
        )
    counts = [len(side.response_ids) for side in example.sides]
    places = [(side, place) for side, count in enumerate(counts) for place in range(count)]
    whole = float(_margins(objective, example, scores, [None])[0])
    chunks = [places[start : start + AT_ONCE] for start in range(0, len(places), AT_ONCE)]
    parts = (whole - torch.cat([_margins(objective, example, scores, chunk) for chunk in chunks])).float()
    return parts[: counts[0]], parts[counts[0] :]


def _margins(
    objective: PreferenceObjective,
    example: TrainingExample,
    scores: Scores,
    left_out: Sequence[tuple[int, int] | None],
) -> Float[Tensor, " _"]:
    """Returns the margin with each of the tokens (side, place) as the reference has it; None leaves the policy as it
    is.
    """
    copies = len(left_out)
    batch = collate([example] * copies, padded, 0, copies)
    shape = batch.main.response_mask.shape
    policy, reference = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    for side in range(2):
        rows, count = slice(side * copies, (side + 1) * copies), len(scores.policy[side])
        policy[rows, :count], reference[rows, :count] = scores.policy[side].double(), scores.reference[side].double()
    for copy, token in enumerate(left_out):
        if token is not None:
            side, place = token
            policy[side * copies + copy, place] = reference[side * copies + copy, place]
    read = TokenStats(logps=reference) if "reference" in objective.requires else None
    output = objective(TokenStats(logps=policy), read, batch)
    return (output.chosen_rewards - output.rejected_rewards).double()
