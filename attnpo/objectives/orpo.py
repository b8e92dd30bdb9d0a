"""Odds Ratio Preference Optimization (Hong et al. 2024, Eq. 6): an SFT term plus a log odds ratio loss."""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from attnpo.objectives.base import mean_factors, split_pairs, weighted_sum
from attnpo.objectives.terms import Sft, SftTerm, log_odds, sigmoid_loss
from attnpo.schema import ObjectiveOutput, PreferenceBatch, TokenStats, check_range


def orpo_loss(
    policy_logps: Float[Tensor, "rows R"], weights: Float[Tensor, "rows R"], mask: Bool[Tensor, "rows R"], lam: float
) -> ObjectiveOutput:
    """Returns the ORPO loss of each pair: ``-lam log sigmoid(o_w - o_l)``, without its SFT term (``add_sft``).

    ``o = A(p) - log(1 - exp A(p))``; ``A(p) = sum_t a_t p_t`` is the mean of the policy's log-probabilities p (nats); a
    (``weights``) is 1/n or another distribution. Rewards are ``lam A(p)``. Source: Hong et al. 2024, Eq. 6 (arXiv
    2403.07691); TRL 1.16 ``orpo_trainer.py``, where lam is called beta.

    Example:
        >>> import torch
        >>> from attnpo.losses import Sft, add_sft, chosen_nll, orpo_loss
        >>> policy = torch.tensor([[-0.5, -1.0], [-2.0, -0.3]])  # rows: chosen, rejected
        >>> mask, weights = torch.ones(2, 2, dtype=torch.bool), torch.tensor([[0.9, 0.1], [0.5, 0.5]])
        >>> add_sft(orpo_loss(policy, weights, mask, lam=0.1), chosen_nll(policy, mask, Sft.MEAN)).losses
        tensor([0.7792])
    """
    means = weighted_sum(policy_logps, weights, mask)
    chosen, rejected = split_pairs(log_odds(means))
    preference = sigmoid_loss(chosen - rejected)
    extras = {"losses/preference": preference.detach()}
    return ObjectiveOutput(lam * preference, *split_pairs(lam * means.detach()), extras)


@dataclass(frozen=True)
class ORPO:
    """``NLL(y_w) - lam log sigmoid(o_w - o_l)``, where o is the log odds of a response's mean log-probability A(p).

    The NLL is averaged over each response's tokens (``sft: mean``); ``sft: batch`` averages it over all chosen tokens
    of the step. Unlike in TRL, the NLL never includes the prompt. Token weights replace 1/n in A.
    """

    lam: float = 0.1
    sft: Sft = Sft.MEAN

    requires = frozenset({"token_weights"})

    def __post_init__(self) -> None:
        check_range("objective", "(0, inf)", lam=self.lam)

    def __call__(self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch) -> ObjectiveOutput:
        """Computes losses and rewards ``lam A(p)`` for the batch."""
        output = orpo_loss(policy.logps, mean_factors(batch.main), batch.main.response_mask, self.lam)
        return SftTerm(sft_coef=1.0, sft=self.sft).with_sft(output, policy, batch)
