"""TIS-DPO (Liu et al. 2025): DPO on weighted sums, with an optional weighted KL; use with ``weights=contrast``."""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from attnpo.objectives.base import (
    LengthScaled,
    Reduction,
    log_ratios,
    logps_of,
    reduce,
    split_by_side,
    split_pairs,
    weighted_sum,
)
from attnpo.objectives.terms import check_beta, sigmoid_loss
from attnpo.schema import ObjectiveOutput, PreferenceBatch, TokenStats, check_range

KL = "kl_policy_ref"


def tis_dpo_loss(
    policy_logps: Float[Tensor, "rows R"],
    reference_logps: Float[Tensor, "rows R"],
    weights: Float[Tensor, "rows R"],
    mask: Bool[Tensor, "rows R"],
    lengths: Float[Tensor, " rows"] | None,
    position_kl: Float[Tensor, "rows R"] | None,
    beta: float,
    alpha: float = 0.5,
    label_smoothing: float = 0.0,
) -> ObjectiveOutput:
    """Returns the TIS-DPO loss of each pair.

    ``-log sigmoid(beta (S_w - S_l - alpha (K_w - K_l)))``, where ``S = sum_t w_t d_t``.

    d is the log-ratio of a token in nats; w (``weights``) is a factor, or a distribution times |y| (``lengths``). K is
    ``sum_t w_t KL_t``, where ``position_kl`` is the KL from policy to reference at each position. Without
    ``position_kl``, there is no KL term; this is the default in the authors' code. Rewards are ``beta S``, or
    ``beta (S - K)`` with ``position_kl``; the extras contain K and the unweighted rewards. Both K_w and K_l carry
    gradients. Source: exlaw/TIS-DPO, ``trainers.py``.

    Example:
        >>> import torch
        >>> from attnpo.losses import tis_dpo_loss
        >>> policy, reference = torch.tensor([[-0.5, -1.0], [-2.0, -0.3]]), torch.full((2, 2), -1.0)
        >>> mask, weights = torch.ones(2, 2, dtype=torch.bool), torch.tensor([[0.9, 0.1], [0.5, 0.5]])
        >>> tis_dpo_loss(policy, reference, 2 * weights, mask, None, None, beta=0.1).losses
        tensor([0.6349])
    """
    ratios = log_ratios(policy_logps, reference_logps, mask)
    rewards = beta * weighted_sum(ratios, weights, mask, lengths)
    chosen, rejected = split_pairs(rewards)
    margin = chosen - rejected
    extras = split_by_side("unweighted", beta * reduce(ratios.detach(), None, mask, Reduction.SUM))
    if position_kl is not None:
        sums = weighted_sum(position_kl, weights, mask, lengths)
        chosen_kl, rejected_kl = split_pairs(sums)
        margin = margin - beta * alpha * (chosen_kl - rejected_kl)
        chosen, rejected = split_pairs(rewards - beta * sums)
        extras |= split_by_side("weighted_kl", sums.detach())
    return ObjectiveOutput(sigmoid_loss(margin, label_smoothing), chosen.detach(), rejected.detach(), extras)


@dataclass(frozen=True)
class TISDPO(LengthScaled):
    """``-log sigmoid(beta (S_w - S_l))``, where S is the weighted sum of log-ratios; like TwDPO, but for any weights.

    ``token_level`` adds the KL term of the authors' code to the margin: ``alpha`` times ``K_l - K_w``, where K is the
    weighted sum of KL(policy || reference) over a response.
    """

    beta: float = 0.1
    alpha: float = 0.5
    token_level: bool = False
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_beta(self.beta, self.label_smoothing)
        check_range("objective", "[0, inf)", alpha=self.alpha)

    @property
    def requires(self) -> frozenset[str]:
        """Requires the reference and token weights and, with ``token_level``, KL(policy || reference) per position."""
        return frozenset({"reference", "token_weights"} | ({f"joint:{KL}"} if self.token_level else set()))

    def unused_keys(self) -> dict[str, str]:
        """Returns the keys that have no effect in this config, mapped to the reasons."""
        return ({} if self.token_level else {"alpha": "objective.token_level=false"}) | super().unused_keys()

    def __call__(self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch) -> ObjectiveOutput:
        """Computes losses, weighted rewards and, as extras, the unweighted rewards and the KL sums."""
        kl = policy.joint[KL] if self.token_level else None
        return tis_dpo_loss(
            policy.logps,
            logps_of(reference),
            *self.weighted(batch.main),
            kl,
            self.beta,
            self.alpha,
            self.label_smoothing,
        )
