"""Direct Preference Optimization (Rafailov et al. 2023, Eq. 7), with the usual options: smoothing, hinge, SFT term."""

from dataclasses import dataclass

from attnpo.objectives.base import Reduction, log_ratios, reduce, split_pairs
from attnpo.objectives.terms import LossType, Sft, check_not_negative, idle_sft, margin_loss, with_sft
from attnpo.objectives.terms import check_beta as check_beta
from attnpo.objectives.terms import sigmoid_loss as sigmoid_loss
from attnpo.schema import ObjectiveOutput, PreferenceBatch, TokenStats


@dataclass(frozen=True)
class DPO:
    """``-log sigmoid(beta (S(d_w) - S(d_l)))`` with d the per-token log-ratio and S the sum over the response.

    ``loss_type`` is what the margin costs; ``sft_coef`` adds the chosen responses' negative log-likelihood.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    loss_type: LossType = LossType.SIGMOID
    sft_coef: float = 0.0
    sft: Sft = Sft.MEAN

    def __post_init__(self) -> None:
        check_beta(self.beta, self.label_smoothing, self.loss_type)
        check_not_negative(sft_coef=self.sft_coef)

    @property
    def requires(self) -> frozenset[str]:
        """The reference's log-probabilities; token weights are not read."""
        return frozenset({"reference"})

    def unread(self) -> dict[str, str]:
        """Keys without effect as the others stand, with the reason."""
        return idle_sft(self.sft_coef)

    def __call__(self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch) -> ObjectiveOutput:
        """Losses and rewards ``beta S(d)`` of the batch."""
        ratios = log_ratios(policy, reference, batch)
        chosen, rejected = split_pairs(self.beta * reduce(ratios, None, batch.main.response_mask, Reduction.SUM))
        preference = margin_loss(chosen - rejected, self.loss_type, self.label_smoothing)
        losses, extras = with_sft(preference, policy, batch, self.sft_coef, self.sft)
        return ObjectiveOutput(losses, chosen.detach(), rejected.detach(), extras)
