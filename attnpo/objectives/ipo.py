"""Identity Preference Optimization (Azar et al. 2024, Eq. 17): a squared distance of the margin from 1 / (2 beta)."""

from dataclasses import dataclass
from enum import Enum

from attnpo.objectives.base import LengthFrom, Reduction, log_ratios, mean_factors, reduce, split_pairs, sum_factors
from attnpo.objectives.terms import check_positive, idle_length
from attnpo.schema import ObjectiveOutput, PreferenceBatch, TokenStats


class Over(Enum):
    """How the log-ratios of a response's tokens become one: their mean (TRL, confirmed by the authors) or their sum."""

    MEAN = "mean"
    SUM = "sum"


@dataclass(frozen=True)
class IPO:
    """``((A(d_w) - A(d_l)) - 1 / (2 beta))^2`` with A the mean (or the sum) of the log-ratios over the response.

    ``beta`` is the paper's tau. Token weights take the place of 1/n in the mean; in the sum they are scaled by
    ``length_scale`` and ``length_from`` as in TwDPO.
    """

    beta: float = 0.1
    reduction: Over = Over.MEAN
    length_scale: bool = True
    length_from: LengthFrom = LengthFrom.SOURCE

    def __post_init__(self) -> None:
        check_positive(beta=self.beta)

    @property
    def requires(self) -> frozenset[str]:
        """The reference's log-probabilities and token weights."""
        return frozenset({"reference", "token_weights"})

    def unread(self) -> dict[str, str]:
        """Keys without effect as the others stand, with the reason."""
        why = "objective.reduction=mean reads no lengths"
        idle = dict.fromkeys(("length_scale", "length_from"), why)
        return idle_length(self.length_scale) if self.reduction is Over.SUM else idle

    def __call__(self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch) -> ObjectiveOutput:
        """Losses and rewards ``beta A(d)`` of the batch."""
        rows = batch.main
        summed = self.reduction is Over.SUM
        factors = sum_factors(rows, self.length_scale, self.length_from) if summed else mean_factors(rows)
        ratios = reduce(log_ratios(policy, reference, batch), factors, rows.response_mask, Reduction.SUM)
        chosen, rejected = split_pairs(ratios)
        losses = (chosen - rejected - 1.0 / (2.0 * self.beta)).square()
        return ObjectiveOutput(losses, self.beta * chosen.detach(), self.beta * rejected.detach())
