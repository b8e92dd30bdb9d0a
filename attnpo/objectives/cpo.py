"""Contrastive Preference Optimization (Xu et al. 2024, Eq. 5): DPO with a uniform reference plus an SFT term."""

from dataclasses import dataclass, field

from jaxtyping import Bool, Float
from torch import Tensor

from attnpo.objectives.base import LengthScaled, split_pairs, weighted_sum
from attnpo.objectives.terms import LossType, Sft, SftTerm, check_beta, margin_loss
from attnpo.schema import ObjectiveOutput, PreferenceBatch, TokenStats, check_range


def cpo_loss(
    policy_logps: Float[Tensor, "rows R"],
    weights: Float[Tensor, "rows R"],
    mask: Bool[Tensor, "rows R"],
    lengths: Float[Tensor, " rows"] | None,
    beta: float,
    label_smoothing: float = 0.0,
    loss_type: LossType = LossType.SIGMOID,
) -> ObjectiveOutput:
    """Returns the CPO loss of each pair: ``-log sigmoid(beta (S(p_w) - S(p_l)))``, without its SFT term (``add_sft``).

    ``S(p) = |y| sum_t a_t p_t`` sums the policy's log-probabilities p (nats). Rewards are ``beta S(p)``. Source: Xu et
    al. 2024, Eq. 5 (arXiv 2401.08417); TRL 1.16 ``cpo_trainer.py``.

    Example:
        >>> import torch
        >>> from attnpo.losses import Sft, add_sft, chosen_nll, cpo_loss
        >>> policy = torch.tensor([[-0.5, -1.0], [-2.0, -0.3]])  # rows: chosen, rejected
        >>> mask, weights = torch.ones(2, 2, dtype=torch.bool), torch.tensor([[0.9, 0.1], [0.5, 0.5]])
        >>> lengths = mask.sum(-1).float()
        >>> output = cpo_loss(policy, weights, mask, lengths, beta=0.1)
        >>> add_sft(output, chosen_nll(policy, mask, Sft.MEAN)).losses
        tensor([1.3849])
    """
    chosen, rejected = split_pairs(beta * weighted_sum(policy_logps, weights, mask, lengths))
    losses = margin_loss(chosen - rejected, loss_type, label_smoothing)
    return ObjectiveOutput(losses, chosen.detach(), rejected.detach())


@dataclass(frozen=True)
class CPO(SftTerm, LengthScaled):
    """``-log sigmoid(beta (S(p_w) - S(p_l))) + sft_coef NLL(y_w)``, where p are the policy's log-probabilities.

    The NLL is a mean over the chosen tokens of the whole step (``sft: batch``, as in TRL); the paper uses the
    likelihood of each response (``sum``). Token weights multiply p in the margin, scaled as in TwDPO.
    """

    beta: float = 0.1
    sft_coef: float = field(default=1.0, kw_only=True)
    sft: Sft = field(default=Sft.BATCH, kw_only=True)
    loss_type: LossType = LossType.SIGMOID
    label_smoothing: float = 0.0

    requires = frozenset({"token_weights"})

    def __post_init__(self) -> None:
        check_beta(self.beta, self.label_smoothing, self.loss_type)
        check_range("objective", "[0, inf)", sft_coef=self.sft_coef)

    def __call__(self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch) -> ObjectiveOutput:
        """Computes losses and rewards ``beta S(p)`` for the batch."""
        output = cpo_loss(policy.logps, *self.weighted(batch.main), self.beta, self.label_smoothing, self.loss_type)
        return self.with_sft(output, policy, batch)
