"""Contrastive Preference Optimization (Xu et al. 2024, Eq. 5): DPO with a uniform reference, and an SFT term."""

from dataclasses import dataclass

from attnpo.objectives.base import LengthFrom, Reduction, reduce, split_pairs, sum_factors
from attnpo.objectives.terms import (
    LossType,
    Sft,
    check_beta,
    check_not_negative,
    idle_length,
    idle_sft,
    margin_loss,
    with_sft,
)
from attnpo.schema import ObjectiveOutput, PreferenceBatch, TokenStats


@dataclass(frozen=True)
class CPO:
    """``-log sigmoid(beta (S(p_w) - S(p_l))) + sft_coef NLL(y_w)`` with p the policy's log-probabilities.

    The NLL is a mean over the chosen tokens of the whole step (``sft: batch``, as in TRL); the paper's formula is the
    likelihood of each response (``sum``). Token weights multiply p in the margin, scaled as in TwDPO.
    """

    beta: float = 0.1
    sft_coef: float = 1.0
    sft: Sft = Sft.BATCH
    loss_type: LossType = LossType.SIGMOID
    label_smoothing: float = 0.0
    length_scale: bool = True
    length_from: LengthFrom = LengthFrom.SOURCE

    def __post_init__(self) -> None:
        check_beta(self.beta, self.label_smoothing, self.loss_type)
        check_not_negative(sft_coef=self.sft_coef)

    @property
    def requires(self) -> frozenset[str]:
        """Token weights; there is no reference."""
        return frozenset({"token_weights"})

    def unread(self) -> dict[str, str]:
        """Keys without effect as the others stand, with the reason."""
        return idle_sft(self.sft_coef) | idle_length(self.length_scale)

    def __call__(self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch) -> ObjectiveOutput:
        """Losses and rewards ``beta S(p)`` of the batch."""
        rows = batch.main
        factors = sum_factors(rows, self.length_scale, self.length_from)
        chosen, rejected = split_pairs(self.beta * reduce(policy.logps, factors, rows.response_mask, Reduction.SUM))
        preference = margin_loss(chosen - rejected, self.loss_type, self.label_smoothing)
        losses, extras = with_sft(preference, policy, batch, self.sft_coef, self.sft)
        return ObjectiveOutput(losses, chosen.detach(), rejected.detach(), extras)
