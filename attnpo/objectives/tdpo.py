"""Token-level DPO (Zeng et al. 2024, arXiv 2404.11999): DPO's margin minus a difference of sequence KLs.

The sequence KL of a response is ``K = sum_t KL(ref || policy)`` over the whole vocabulary at each of its tokens,
without clamping or averaging; token weights multiply only d. The formulas and the stop-gradient follow the authors'
code (Vance0124/Token-level-Direct-Preference-Optimization), whose logged rewards are ``beta (S(d) + K)`` in both
versions.
"""

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

STATISTIC = "kl_ref_policy"


def reference_kl(policy: TokenStats) -> Float[Tensor, "rows R"]:
    """Returns KL(ref || policy) at each token.

    Raises:
        ValueError: the KL was not computed for the batch.
    """
    if STATISTIC not in policy.joint:
        raise ValueError(f"this objective needs joint:{STATISTIC}, but it was not computed for the batch")
    return policy.joint[STATISTIC]


def tdpo2_margin(sums: Float[Tensor, " rows"], kl: Float[Tensor, " rows"], alpha: float) -> Float[Tensor, " pairs"]:
    """Returns ``S_w - S_l - alpha (K_l - sg(K_w))`` per pair; the chosen response's K carries no gradient."""
    (chosen, rejected), (chosen_kl, rejected_kl) = split_pairs(sums), split_pairs(kl)
    return chosen - rejected - alpha * (rejected_kl - chosen_kl.detach())


def tdpo1_loss(
    policy_logps: Float[Tensor, "rows R"],
    reference_logps: Float[Tensor, "rows R"],
    weights: Float[Tensor, "rows R"],
    mask: Bool[Tensor, "rows R"],
    lengths: Float[Tensor, " rows"] | None,
    position_kl: Float[Tensor, "rows R"],
    beta: float,
) -> ObjectiveOutput:
    """Returns the TDPO1 loss of each pair: ``-log sigmoid(beta [S(d_w) - S(d_l) - (K_l - K_w)])``.

    ``S(d) = |y| sum_t a_t d_t`` sums the log-ratios d and ``K = sum_t KL(ref || policy)`` sums ``position_kl`` without
    weights, all in nats. K_w and K_l carry gradients and are returned as extras. Rewards are ``beta (S(d) + K)``.
    Source: Zeng et al. 2024 (arXiv 2404.11999); Vance0124/Token-level-Direct-Preference-Optimization, ``trainers.py``.

    Example:
        >>> import torch
        >>> from attnpo.losses import tdpo1_loss
        >>> policy, reference = torch.tensor([[-0.5, -1.0], [-2.0, -0.3]]), torch.full((2, 2), -1.0)
        >>> mask, weights = torch.ones(2, 2, dtype=torch.bool), torch.tensor([[0.9, 0.1], [0.5, 0.5]])
        >>> lengths = mask.sum(-1).float()
        >>> kl = torch.tensor([[0.2, 0.1], [0.3, 0.1]])  # token_kl(...)
        >>> tdpo1_loss(policy, reference, weights, mask, lengths, kl, beta=0.1).losses
        tensor([0.6397])
    """
    sums = weighted_sum(log_ratios(policy_logps, reference_logps, mask), weights, mask, lengths)
    kl = reduce(position_kl, None, mask, Reduction.SUM)
    chosen, rejected = split_pairs(sums + kl)
    return tdpo_output(chosen - rejected, sums, kl, beta)


def tdpo2_loss(
    policy_logps: Float[Tensor, "rows R"],
    reference_logps: Float[Tensor, "rows R"],
    weights: Float[Tensor, "rows R"],
    mask: Bool[Tensor, "rows R"],
    lengths: Float[Tensor, " rows"] | None,
    position_kl: Float[Tensor, "rows R"],
    beta: float,
    alpha: float,
) -> ObjectiveOutput:
    """Returns the TDPO2 loss of each pair: ``-log sigmoid(beta [S(d_w) - S(d_l) - alpha (K_l - sg(K_w))])``.

    Like ``tdpo1_loss``, but sg stops the gradient of the chosen side's K, and alpha scales the difference.

    Example:
        >>> import torch
        >>> from attnpo.losses import tdpo2_loss
        >>> policy, reference = torch.tensor([[-0.5, -1.0], [-2.0, -0.3]]), torch.full((2, 2), -1.0)
        >>> mask, weights = torch.ones(2, 2, dtype=torch.bool), torch.tensor([[0.9, 0.1], [0.5, 0.5]])
        >>> lengths = mask.sum(-1).float()
        >>> kl = torch.tensor([[0.2, 0.1], [0.3, 0.1]])  # token_kl(...)
        >>> tdpo2_loss(policy, reference, weights, mask, lengths, kl, beta=0.1, alpha=0.5).losses
        tensor([0.6373])
    """
    sums = weighted_sum(log_ratios(policy_logps, reference_logps, mask), weights, mask, lengths)
    kl = reduce(position_kl, None, mask, Reduction.SUM)
    return tdpo_output(tdpo2_margin(sums, kl, alpha), sums, kl, beta)


def tdpo_output(
    margin: Float[Tensor, " pairs"], sums: Float[Tensor, " rows"], kl: Float[Tensor, " rows"], beta: float
) -> ObjectiveOutput:
    """Returns ``-log sigmoid(beta margin)``, rewards ``beta (S + K)`` without alpha, and each side's K as extras."""
    rewards = split_pairs(beta * (sums + kl).detach())
    return ObjectiveOutput(sigmoid_loss(beta * margin), *rewards, split_by_side("seq_kl", kl.detach()))


@dataclass(frozen=True)
class TDPO1(LengthScaled):
    """``-log sigmoid(beta [S(d_w) - S(d_l) - (K_l - K_w)])``; both K_w and K_l carry gradients.

    ``length_scale`` and ``length_from`` work as in TwDPO; uniform weights give the plain S(d).
    """

    beta: float = 0.1

    requires = frozenset({"reference", "token_weights", f"joint:{STATISTIC}"})

    def __post_init__(self) -> None:
        check_beta(self.beta)

    def __call__(self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch) -> ObjectiveOutput:
        """Computes losses, rewards ``beta (S(d) + K)`` and both sides' K for the batch."""
        return tdpo1_loss(
            policy.logps, logps_of(reference), *self.weighted(batch.main), reference_kl(policy), self.beta
        )


@dataclass(frozen=True)
class TDPO2(TDPO1):
    """``-log sigmoid(beta [S(d_w) - S(d_l) - alpha (K_l - sg(K_w))])``; sg stops the gradient, on the chosen side only.

    ``length_scale`` and ``length_from`` work as in TwDPO; uniform weights give the plain S(d).
    """

    alpha: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("objective", "[0, inf)", alpha=self.alpha)

    def __call__(self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch) -> ObjectiveOutput:
        """Computes losses, rewards ``beta (S(d) + K)`` without alpha, and both sides' K for the batch."""
        return tdpo2_loss(
            policy.logps, logps_of(reference), *self.weighted(batch.main), reference_kl(policy), self.beta, self.alpha
        )
