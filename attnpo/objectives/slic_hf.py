"""SLiC-HF (Zhao et al. 2023, Eq. 1): a hinge on the responses' log-probabilities, and an SFT term."""

from dataclasses import dataclass, field

import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from attnpo.objectives.base import LengthScaled, split_pairs, weighted_sum
from attnpo.objectives.terms import Sft, SftTerm
from attnpo.schema import ObjectiveOutput, PreferenceBatch, TokenStats, check_range


def slic_hf_loss(
    policy_logps: Float[Tensor, "rows R"],
    weights: Float[Tensor, "rows R"],
    mask: Bool[Tensor, "rows R"],
    lengths: Float[Tensor, " rows"] | None,
    delta: float,
) -> ObjectiveOutput:
    """Returns the SLiC-HF loss of each pair: ``max(0, delta - S(p_w) + S(p_l))``, without its SFT term (``add_sft``).

    ``S(p) = |y| sum_t a_t p_t`` sums the policy's log-probabilities p; p and delta are in nats. Rewards are ``S(p)``.
    Source: Zhao et al. 2023, Eq. 1 (arXiv 2305.10425).

    Example:
        >>> import torch
        >>> from attnpo.losses import slic_hf_loss
        >>> policy = torch.tensor([[-0.5, -1.0], [-2.0, -0.3]])  # rows: chosen, rejected
        >>> mask, weights = torch.ones(2, 2, dtype=torch.bool), torch.tensor([[0.9, 0.1], [0.5, 0.5]])
        >>> lengths = mask.sum(-1).float()
        >>> slic_hf_loss(policy, weights, mask, lengths, delta=2.0).losses
        tensor([0.8000])
    """
    chosen, rejected = split_pairs(weighted_sum(policy_logps, weights, mask, lengths))
    return ObjectiveOutput(F.relu(delta - chosen + rejected), chosen.detach(), rejected.detach())


@dataclass(frozen=True)
class SLiCHF(SftTerm, LengthScaled):
    """``max(0, delta - S(p_w) + S(p_l)) + sft_coef NLL(y_w)``, where S sums over the response; there is no beta.

    The NLL is the likelihood of the whole response (``sft: sum``). Token weights multiply p in the hinge, scaled as in
    TwDPO. No reference is needed. This is not TRL's hinge loss; see ``DPO.loss_type`` for that one.
    """

    delta: float = 1.0
    sft_coef: float = field(default=0.1, kw_only=True)
    sft: Sft = field(default=Sft.SUM, kw_only=True)

    requires = frozenset({"token_weights"})

    def __post_init__(self) -> None:
        check_range("objective", "(0, inf)", delta=self.delta)
        check_range("objective", "[0, inf)", sft_coef=self.sft_coef)

    def __call__(self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch) -> ObjectiveOutput:
        """Computes losses and rewards ``S(p)`` for the batch."""
        return self.with_sft(slic_hf_loss(policy.logps, *self.weighted(batch.main), self.delta), policy, batch)
