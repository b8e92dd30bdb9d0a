"""Identity Preference Optimization (Azar et al. 2024, Eq. 17): the squared distance of the margin from 1 / (2 beta)."""

from dataclasses import dataclass
from enum import Enum

from jaxtyping import Bool, Float
from torch import Tensor

from attnpo.objectives.base import (
    LengthScaled,
    log_ratios,
    logps_of,
    mean_factors,
    response_lengths,
    split_pairs,
    weighted_sum,
)
from attnpo.schema import ObjectiveOutput, PreferenceBatch, TokenStats, check_range


class LogRatioReduction(Enum):
    """Reduction of a response's log-ratios: the mean (as in TRL, confirmed by the authors) or the sum."""

    MEAN = "mean"
    SUM = "sum"


def ipo_loss(
    policy_logps: Float[Tensor, "rows R"],
    reference_logps: Float[Tensor, "rows R"],
    weights: Float[Tensor, "rows R"],
    mask: Bool[Tensor, "rows R"],
    lengths: Float[Tensor, " rows"] | None,
    beta: float,
) -> ObjectiveOutput:
    """Returns the IPO loss of each pair: ``((A(d_w) - A(d_l)) - 1 / (2 beta))^2``.

    ``A(d) = sum_t a_t d_t`` is the mean of a response's log-ratios d in nats; a (``weights``) is 1/n or another
    distribution. With ``lengths``, A is a sum, ``|y| sum_t a_t d_t``. Rewards are ``beta A(d)``. ``beta`` is called tau
    in the paper. Source: Azar et al. 2024, Eq. 17 (arXiv 2310.12036), which uses the sum; TRL 1.16 ``DPOTrainer`` uses
    the mean. According to TRL's documentation, the authors confirmed the mean.

    Example:
        >>> import torch
        >>> from attnpo.losses import ipo_loss
        >>> policy, reference = torch.tensor([[-0.5, -1.0], [-2.0, -0.3]]), torch.full((2, 2), -1.0)
        >>> mask, weights = torch.ones(2, 2, dtype=torch.bool), torch.tensor([[0.9, 0.1], [0.5, 0.5]])
        >>> ipo_loss(policy, reference, weights, mask, None, beta=0.1).losses
        tensor([19.3600])
    """
    ratios = log_ratios(policy_logps, reference_logps, mask)
    chosen, rejected = split_pairs(weighted_sum(ratios, weights, mask, lengths))
    losses = (chosen - rejected - 1.0 / (2.0 * beta)).square()
    return ObjectiveOutput(losses, beta * chosen.detach(), beta * rejected.detach())


@dataclass(frozen=True)
class IPO(LengthScaled):
    """``((A(d_w) - A(d_l)) - 1 / (2 beta))^2``, where A is the mean (or the sum) of the log-ratios over the response.

    ``beta`` is the paper's tau. Token weights replace 1/n in the mean; in the sum, they are scaled by ``length_scale``
    and ``length_from`` as in TwDPO.
    """

    beta: float = 0.1
    reduction: LogRatioReduction = LogRatioReduction.MEAN

    requires = frozenset({"reference", "token_weights"})

    def __post_init__(self) -> None:
        check_range("objective", "(0, inf)", beta=self.beta)

    def unused_keys(self) -> dict[str, str]:
        """Returns the keys that have no effect in this config, mapped to the reasons."""
        if self.reduction is LogRatioReduction.SUM:
            return super().unused_keys()
        return dict.fromkeys(("length_scale", "length_from"), "objective.reduction=mean does not use lengths")

    def __call__(self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch) -> ObjectiveOutput:
        """Computes losses and rewards ``beta A(d)`` for the batch."""
        rows, mean = batch.main, self.reduction is LogRatioReduction.MEAN
        return ipo_loss(
            policy.logps,
            logps_of(reference),
            mean_factors(rows) if mean else rows.token_weights["reward"],
            rows.response_mask,
            None if mean else response_lengths(rows, self.length_scale, self.length_from),
            self.beta,
        )
