"""R-DPO (Park et al. 2024, Eq. 9): DPO whose margin counts the difference in length."""

from dataclasses import dataclass

from attnpo.objectives.base import LengthFrom, Reduction, log_ratios, reduce, split_pairs, sum_factors
from attnpo.objectives.terms import check_beta, check_not_negative, idle_length, sigmoid_loss
from attnpo.schema import ObjectiveOutput, PreferenceBatch, TokenStats


@dataclass(frozen=True)
class RDPO:
    """``-log sigmoid(beta (S(d_w) - S(d_l)) + alpha (n_w - n_l))`` with n the response's training tokens.

    A longer chosen response has part of its margin already and is pushed less; beta does not multiply alpha. Token
    weights multiply the log-ratios d, scaled as in TwDPO; n reads none.
    """

    beta: float = 0.1
    alpha: float = 0.05
    label_smoothing: float = 0.0
    length_scale: bool = True
    length_from: LengthFrom = LengthFrom.SOURCE

    def __post_init__(self) -> None:
        check_beta(self.beta, self.label_smoothing)
        check_not_negative(alpha=self.alpha)

    def unread(self) -> dict[str, str]:
        """Keys without effect as the others stand, with the reason."""
        return idle_length(self.length_scale)

    @property
    def requires(self) -> frozenset[str]:
        """The reference's log-probabilities and token weights."""
        return frozenset({"reference", "token_weights"})

    def __call__(self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch) -> ObjectiveOutput:
        """Losses and rewards ``beta S(d)`` of the batch."""
        rows = batch.main
        ratios = log_ratios(policy, reference, batch)
        factors = sum_factors(rows, self.length_scale, self.length_from)
        chosen, rejected = split_pairs(self.beta * reduce(ratios, factors, rows.response_mask, Reduction.SUM))
        longer, shorter = split_pairs(rows.response_mask.sum(-1).to(chosen.dtype))
        losses = sigmoid_loss(chosen - rejected + self.alpha * (longer - shorter), self.label_smoothing)
        return ObjectiveOutput(losses, chosen.detach(), rejected.detach())
