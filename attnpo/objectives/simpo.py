"""SimPO (Meng et al. 2024, Eq. 6): length-averaged log-probabilities, a target margin, no reference."""

from dataclasses import dataclass

from attnpo.objectives.base import Reduction, mean_factors, reduce, split_pairs
from attnpo.objectives.terms import LossType, Sft, check_beta, check_not_negative, idle_sft, margin_loss, with_sft
from attnpo.schema import ObjectiveOutput, PreferenceBatch, TokenStats


@dataclass(frozen=True)
class SimPO:
    """``-log sigmoid(beta (A(p_w) - A(p_l)) - gamma)`` with ``gamma = beta gamma_beta_ratio``, A the token mean.

    The key is the ratio, as in the authors' code; TRL's ``simpo_gamma`` is gamma itself. Token weights take the place
    of 1/n in A.
    """

    beta: float = 2.0
    gamma_beta_ratio: float = 0.5
    loss_type: LossType = LossType.SIGMOID
    label_smoothing: float = 0.0
    sft_weight: float = 0.0
    sft: Sft = Sft.BATCH

    def __post_init__(self) -> None:
        check_beta(self.beta, self.label_smoothing, self.loss_type)
        check_not_negative(gamma_beta_ratio=self.gamma_beta_ratio, sft_weight=self.sft_weight)

    @property
    def gamma(self) -> float:
        """The target margin."""
        return self.beta * self.gamma_beta_ratio

    @property
    def requires(self) -> frozenset[str]:
        """Token weights; there is no reference."""
        return frozenset({"token_weights"})

    def unread(self) -> dict[str, str]:
        """Keys without effect as the others stand, with the reason."""
        return idle_sft(self.sft_weight)

    def __call__(self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch) -> ObjectiveOutput:
        """Losses and rewards ``beta A(p)`` of the batch."""
        rows = batch.main
        means = reduce(policy.logps, mean_factors(rows), rows.response_mask, Reduction.SUM)
        chosen, rejected = split_pairs(self.beta * means)
        preference = margin_loss(chosen - rejected - self.gamma, self.loss_type, self.label_smoothing)
        losses, extras = with_sft(preference, policy, batch, self.sft_weight, self.sft)
        return ObjectiveOutput(losses, chosen.detach(), rejected.detach(), extras)
