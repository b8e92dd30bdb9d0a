"""Token-level DPO (Zeng et al. 2024, arXiv 2404.11999): DPO's margin less a difference of sequence KLs.

The sequence KL of a response is ``K = sum_t KL(ref || policy)`` over the whole vocabulary at each of its tokens,
neither clamped nor averaged; token weights multiply d alone. Form and stop-gradient are those of the authors' code
(Vance0124/Token-level-Direct-Preference-Optimization), whose logged rewards are ``beta (S(d) + K)`` in both versions.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from attnpo.objectives.base import LengthFrom, Reduction, log_ratios, reduce, split_pairs, sum_factors
from attnpo.objectives.terms import check_beta, check_not_negative, idle_length, sigmoid_loss
from attnpo.schema import ObjectiveOutput, PreferenceBatch, TokenStats

STATISTIC = "kl_ref_policy"
REQUIRES = frozenset({"reference", "token_weights", f"joint:{STATISTIC}"})


def sequence_kl(policy: TokenStats, batch: PreferenceBatch) -> Float[Tensor, "rows"]:
    """``K`` per row: the KL of the reference to the policy, summed over the response.

    Raises:
        ValueError: the batch was scored without it.
    """
    if STATISTIC not in policy.joint:
        raise ValueError(f"this objective reads joint:{STATISTIC}, and it was not computed for the batch")
    return reduce(policy.joint[STATISTIC], None, batch.main.response_mask, Reduction.SUM)


def weighted_ratios(
    policy: TokenStats,
    reference: TokenStats | None,
    batch: PreferenceBatch,
    length_scale: bool = True,
    length_from: LengthFrom = LengthFrom.SOURCE,
) -> Float[Tensor, "rows"]:
    """``S(d)`` per row with the token weights in it: ``|y| sum_t a_t d_t``."""
    factors = sum_factors(batch.main, length_scale, length_from)
    return reduce(log_ratios(policy, reference, batch), factors, batch.main.response_mask, Reduction.SUM)


def tdpo2_margin(sums: Float[Tensor, "rows"], kl: Float[Tensor, "rows"], alpha: float = 0.5) -> Float[Tensor, "pairs"]:
    """``S_w - S_l - alpha (K_l - sg(K_w))`` per pair: the chosen side's K passes no gradient."""
    (chosen, rejected), (chosen_kl, rejected_kl) = split_pairs(sums), split_pairs(kl)
    return chosen - rejected - alpha * (rejected_kl - chosen_kl.detach())


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
        kl = sequence_kl(policy, batch)
        sums = weighted_ratios(policy, reference, batch, self.length_scale, self.length_from)
        chosen, rejected = split_pairs(sums + kl)
        return tdpo_output(chosen - rejected, sums, kl, self.beta)


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
        kl = sequence_kl(policy, batch)
        sums = weighted_ratios(policy, reference, batch, self.length_scale, self.length_from)
        return tdpo_output(tdpo2_margin(sums, kl, self.alpha), sums, kl, self.beta)
