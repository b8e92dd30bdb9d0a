"""RRHF (Yuan et al. 2023, Eq. 2-4), pairwise as in the SimPO study: a hinge on length-normalised scores plus SFT."""

from dataclasses import dataclass, field

import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from attnpo.objectives.base import mean_factors, split_pairs, weighted_sum
from attnpo.objectives.terms import Sft, SftTerm
from attnpo.schema import ObjectiveOutput, PreferenceBatch, TokenStats, check_range


def rrhf_loss(
    policy_logps: Float[Tensor, "rows R"],
    weights: Float[Tensor, "rows R"],
    mask: Bool[Tensor, "rows R"],
    length_penalty: float,
) -> ObjectiveOutput:
    """Returns the pairwise RRHF loss ``max(0, s_l - s_w)`` of the scores s, without its SFT term (``add_sft``).

    ``s = n^(1-k) A(p)``, which is ``S(p) / n^k``; s is also the reward. ``A(p) = sum_t a_t p_t`` is the mean of the
    policy's log-probabilities p (nats), and a (``weights``) is 1/n or another distribution. n is the number of tokens
    in ``mask``, and k is the length penalty. Source: Yuan et al. 2023, Eq. 2-4 (arXiv 2304.05302), in the pairwise form
    of the SimPO study.

    Example:
        >>> import torch
        >>> from attnpo.losses import Sft, add_sft, chosen_nll, rrhf_loss
        >>> policy = torch.tensor([[-0.5, -1.0], [-2.0, -0.3]])  # rows: chosen, rejected
        >>> mask, weights = torch.ones(2, 2, dtype=torch.bool), torch.tensor([[0.9, 0.1], [0.5, 0.5]])
        >>> add_sft(rrhf_loss(policy, weights, mask, length_penalty=1.0), chosen_nll(policy, mask, Sft.SUM)).losses
        tensor([1.5000])
    """
    scores = weighted_sum(policy_logps, weights, mask)
    chosen, rejected = split_pairs(scores * mask.sum(-1).to(scores.dtype) ** (1.0 - length_penalty))
    return ObjectiveOutput(F.relu(rejected - chosen), chosen.detach(), rejected.detach())


@dataclass(frozen=True)
class RRHF(SftTerm):
    """``max(0, s_l - s_w) + sft_coef NLL(y_w)`` with the score ``s = S(p) / n^k``, where k is the length penalty.

    The NLL is the likelihood of the whole response (``sft: sum``). The original code weights the ranking term instead
    of the SFT term; this class follows the SimPO study, whose RRHF results it reproduces. Token weights replace 1/n in
    ``s = n^(1-k) A(p)``.
    """

    length_penalty: float = 1.0
    sft_coef: float = field(default=1.0, kw_only=True)
    sft: Sft = field(default=Sft.SUM, kw_only=True)

    requires = frozenset({"token_weights"})

    def __post_init__(self) -> None:
        check_range("objective", "[0, inf)", length_penalty=self.length_penalty, sft_coef=self.sft_coef)

    def __call__(self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch) -> ObjectiveOutput:
        """Computes losses for the batch and returns the scores as rewards."""
        output = rrhf_loss(policy.logps, mean_factors(batch.main), batch.main.response_mask, self.length_penalty)
        return self.with_sft(output, policy, batch)
