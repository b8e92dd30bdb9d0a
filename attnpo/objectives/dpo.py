"""Direct Preference Optimization (Rafailov et al. 2023, Eq. 7), with optional label smoothing."""

from dataclasses import dataclass

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from attnpo.objectives.base import Reduction, log_ratios, reduce, split_pairs
from attnpo.schema import ObjectiveOutput, PreferenceBatch, TokenStats, UserError


def sigmoid_loss(margin: Float[Tensor, "pairs"], label_smoothing: float = 0.0) -> Float[Tensor, "pairs"]:
    """``-(1-e) log sigmoid(z) - e log sigmoid(-z)`` per pair, stable for margins of several hundred."""
    loss = -F.logsigmoid(margin)
    if label_smoothing:
        loss = (1.0 - label_smoothing) * loss - label_smoothing * F.logsigmoid(-margin)
    return loss


def check_beta(beta: float, label_smoothing: float) -> None:
    """Nothing; raises UserError for a beta that is not positive or a smoothing outside [0, 0.5)."""
    if not beta > 0:
        raise UserError(f"objective.beta must be above 0, got {beta}")
    if not 0 <= label_smoothing < 0.5:
        raise UserError(f"objective.label_smoothing must be at least 0 and below 0.5, got {label_smoothing}")


@dataclass(frozen=True)
class DPO:
    """``-log sigmoid(beta (S(d_w) - S(d_l)))`` with d the per-token log-ratio and S the sum over the response."""

    beta: float = 0.1
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_beta(self.beta, self.label_smoothing)

    @property
    def requires(self) -> frozenset[str]:
        """The reference's log-probabilities; token weights are not read."""
        return frozenset({"reference"})

    def __call__(self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch) -> ObjectiveOutput:
        """Losses and rewards ``beta S(d)`` of the batch."""
        ratios = log_ratios(policy, reference, batch)
        rewards = self.beta * reduce(ratios, None, batch.main.response_mask, Reduction.SUM)
        chosen, rejected = split_pairs(rewards)
        return ObjectiveOutput(
            losses=sigmoid_loss(chosen - rejected, self.label_smoothing),
            chosen_rewards=chosen.detach(),
            rejected_rewards=rejected.detach(),
        )
