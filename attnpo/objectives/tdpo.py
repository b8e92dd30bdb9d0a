"""Token-level DPO (Zeng et al. 2024, arXiv 2404.11999): DPO's margin less a difference of sequence KLs.

The sequence KL of a response is ``K = sum_t KL(ref || policy)`` over the whole vocabulary at each of its tokens,
neither clamped nor averaged; token weights multiply d alone. Form and stop-gradient are those of the authors' code
(Vance0124/Token-level-Direct-Preference-Optimization), whose logged rewards are ``beta (S(d) + K)`` in both versions.
"""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from attnpo.objectives.base import (
    LengthFrom,
    Reduction,
    log_ratios,
    logps_of,
    reduce,
    response_lengths,
    split_pairs,
    weighted_sum,
)
from attnpo.objectives.terms import check_beta, check_not_negative, idle_length, sigmoid_loss
from attnpo.schema import ObjectiveOutput, PreferenceBatch, TokenStats

STATISTIC = "kl_ref_policy"
REQUIRES = frozenset({"reference", "token_weights", f"joint:{STATISTIC}"})


def kl_of(policy: TokenStats) -> Float[Tensor, "rows R"]:
    """KL of the reference to the policy at each token.

    Raises:
        ValueError: the batch was scored without it.
    """
    if STATISTIC not in policy.joint:
        raise ValueError(f"this objective reads joint:{STATISTIC}, and it was not computed for the batch")
    return policy.joint[STATISTIC]


def tdpo2_margin(sums: Float[Tensor, "rows"], kl: Float[Tensor, "rows"], alpha: float) -> Float[Tensor, "pairs"]:
    """``S_w - S_l - alpha (K_l - sg(K_w))`` per pair: the chosen side's K passes no gradient."""
    (chosen, rejected), (chosen_kl, rejected_kl) = split_pairs(sums), split_pairs(kl)
    return chosen - rejected - alpha * (rejected_kl - chosen_kl.detach())


def tdpo1_loss(
    policy_logps: Float[Tensor, "rows R"],
    reference_logps: Float[Tensor, "rows R"],
    weights: Float[Tensor, "rows R"],
    mask: Bool[Tensor, "rows R"],
    lengths: Float[Tensor, "rows"] | None,
    position_kl: Float[Tensor, "rows R"],
    beta: float,
) -> ObjectiveOutput:
    """The TDPO1 loss of each pair: ``-log sigmoid(beta [S(d_w) - S(d_l) - (K_l - K_w)])``.

    ``S(d) = |y| sum_t a_t d_t`` sums the log-ratios d, ``K = sum_t KL(ref || policy)`` the unweighted ``position_kl``,
    all in nats; both K pass gradient and are extras. Rewards are ``beta (S(d) + K)``. Source: Zeng et al. 2024 (arXiv
    2404.11999); Vance0124/Token-level-Direct-Preference-Optimization, ``trainers.py``.
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
    lengths: Float[Tensor, "rows"] | None,
    position_kl: Float[Tensor, "rows R"],
    beta: float,
    alpha: float,
) -> ObjectiveOutput:
    """The TDPO2 loss of each pair: ``-log sigmoid(beta [S(d_w) - S(d_l) - alpha (K_l - sg(K_w))])``.

    As ``tdpo1_loss``, but sg stops the gradient of the chosen side's K, and alpha scales the difference.
    """
    sums = weighted_sum(log_ratios(policy_logps, reference_logps, mask), weights, mask, lengths)
    kl = reduce(position_kl, None, mask, Reduction.SUM)
    return tdpo_output(tdpo2_margin(sums, kl, alpha), sums, kl, beta)


def tdpo_output(
    margin: Float[Tensor, "pairs"], sums: Float[Tensor, "rows"], kl: Float[Tensor, "rows"], beta: float
) -> ObjectiveOutput:
    """``-log sigmoid(beta margin)``, rewards ``beta (S + K)`` without alpha, and each side's K as extras."""
    chosen, rejected = split_pairs(beta * (sums + kl).detach())
    chosen_kl, rejected_kl = split_pairs(kl.detach())
    return ObjectiveOutput(
        losses=sigmoid_loss(beta * margin),
        chosen_rewards=chosen,
        rejected_rewards=rejected,
        extras={"seq_kl/chosen": chosen_kl, "seq_kl/rejected": rejected_kl},
    )


@dataclass(frozen=True)
class TDPO1:
    """``-log sigmoid(beta [S(d_w) - S(d_l) - (K_l - K_w)])``; both K pass gradient.

    ``length_scale`` and ``length_from`` are read as in TwDPO; uniform weights give S(d) as it is.
    """

    beta: float = 0.1
    length_scale: bool = True
    length_from: LengthFrom = LengthFrom.SOURCE

    def __post_init__(self) -> None:
        check_beta(self.beta)

    def unread(self) -> dict[str, str]:
        """Keys without effect as the others stand, with the reason."""
        return idle_length(self.length_scale)

    @property
    def requires(self) -> frozenset[str]:
        """The reference, its KL to the policy at each token, and token weights."""
        return REQUIRES

    def __call__(self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch) -> ObjectiveOutput:
        """Losses, rewards ``beta (S(d) + K)`` and both K of the batch."""
        rows = batch.main
        return tdpo1_loss(
            policy.logps,
            logps_of(reference),
            rows.token_weights["reward"],
            rows.response_mask,
            response_lengths(rows, self.length_scale, self.length_from),
            kl_of(policy),
            self.beta,
        )


@dataclass(frozen=True)
class TDPO2:
    """``-log sigmoid(beta [S(d_w) - S(d_l) - alpha (K_l - sg(K_w))])``; sg stops the gradient, on the chosen side only.

    ``length_scale`` and ``length_from`` are read as in TwDPO; uniform weights give S(d) as it is.
    """

    beta: float = 0.1
    alpha: float = 0.5
    length_scale: bool = True
    length_from: LengthFrom = LengthFrom.SOURCE

    def __post_init__(self) -> None:
        check_beta(self.beta)
        check_not_negative(alpha=self.alpha)

    def unread(self) -> dict[str, str]:
        """Keys without effect as the others stand, with the reason."""
        return idle_length(self.length_scale)

    @property
    def requires(self) -> frozenset[str]:
        """The reference, its KL to the policy at each token, and token weights."""
        return REQUIRES

    def __call__(self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch) -> ObjectiveOutput:
        """Losses, rewards ``beta (S(d) + K)`` without alpha and both K of the batch."""
        rows = batch.main
        return tdpo2_loss(
            policy.logps,
            logps_of(reference),
            rows.token_weights["reward"],
            rows.response_mask,
            response_lengths(rows, self.length_scale, self.length_from),
            kl_of(policy),
            self.beta,
            self.alpha,
        )
