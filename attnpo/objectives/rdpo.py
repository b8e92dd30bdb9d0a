"""R-DPO (Park et al. 2024, Eq. 9): DPO with the length difference in its margin."""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from attnpo.objectives.base import LengthScaled, log_ratios, logps_of, split_pairs, weighted_sum
from attnpo.objectives.terms import check_beta, sigmoid_loss
from attnpo.schema import ObjectiveOutput, PreferenceBatch, TokenStats, check_range


def rdpo_loss(
    policy_logps: Float[Tensor, "rows R"],
    reference_logps: Float[Tensor, "rows R"],
    weights: Float[Tensor, "rows R"],
    mask: Bool[Tensor, "rows R"],
    lengths: Float[Tensor, " rows"] | None,
    beta: float,
    alpha: float,
    label_smoothing: float = 0.0,
) -> ObjectiveOutput:
    """Returns the R-DPO loss of each pair: ``-log sigmoid(beta (S(d_w) - S(d_l)) + alpha (n_w - n_l))``.

    ``S(d) = |y| sum_t a_t d_t`` sums the log-ratios d (nats) and n counts the tokens in ``mask``, so alpha is in nats
    per token. Rewards are ``beta S(d)``. Source: Park et al. 2024, Eq. 9 (arXiv 2403.19159); there is no public code.

    Example:
        >>> import torch
        >>> from attnpo.losses import rdpo_loss
        >>> policy, reference = torch.tensor([[-0.5, -1.0], [-2.0, -0.3]]), torch.full((2, 2), -1.0)
        >>> mask, weights = torch.ones(2, 2, dtype=torch.bool), torch.tensor([[0.9, 0.1], [0.5, 0.5]])
        >>> lengths = mask.sum(-1).float()
        >>> rdpo_loss(policy, reference, weights, mask, lengths, beta=0.1, alpha=0.05).losses
        tensor([0.6349])
    """
    ratios = log_ratios(policy_logps, reference_logps, mask)
    chosen, rejected = split_pairs(beta * weighted_sum(ratios, weights, mask, lengths))
    chosen_tokens, rejected_tokens = split_pairs(mask.sum(-1).to(chosen.dtype))
    margin = chosen - rejected + alpha * (chosen_tokens - rejected_tokens)
    return ObjectiveOutput(sigmoid_loss(margin, label_smoothing), chosen.detach(), rejected.detach())


@dataclass(frozen=True)
class RDPO(LengthScaled):
    """``-log sigmoid(beta (S(d_w) - S(d_l)) + alpha (n_w - n_l))``, where n counts the response's training tokens.

    A longer chosen response already gets part of its margin from alpha, so its likelihood is raised less; beta does not
    multiply alpha. Token weights multiply the log-ratios d, scaled as in TwDPO; n is not weighted.
    """

    beta: float = 0.1
    alpha: float = 0.05
    label_smoothing: float = 0.0

    requires = frozenset({"reference", "token_weights"})

    def __post_init__(self) -> None:
        check_beta(self.beta, self.label_smoothing)
        check_range("objective", "[0, inf)", alpha=self.alpha)

    def __call__(self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch) -> ObjectiveOutput:
        """Computes losses and rewards ``beta S(d)`` for the batch."""
        return rdpo_loss(
            policy.logps,
            logps_of(reference),
            *self.weighted(batch.main),
            self.beta,
            self.alpha,
            self.label_smoothing,
        )
