"""DPO on sums weighted by optimal transport (OTPO, Li et al. 2025); the weights are the source's business."""

from dataclasses import dataclass

from attnpo.objectives.terms import check_beta
from attnpo.objectives.twdpo import TwDPO
from attnpo.schema import ObjectiveOutput, PreferenceBatch, TokenStats


@dataclass(frozen=True)
class OTPO:
    """``-log sigmoid(beta (sum_t w_wt d_wt - sum_t w_lt d_lt))`` with d the per-token log-ratio and factors w.

    The form of TwDPO, but of factors alone: both sides' weights are of one plan and never scaled by a length.
    """

    beta: float = 0.01
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_beta(self.beta, self.label_smoothing)

    @property
    def requires(self) -> frozenset[str]:
        """The reference's log-probabilities, and token weights that are factors."""
        return frozenset({"reference", "token_weights", "factors"})

    def __call__(self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch) -> ObjectiveOutput:
        """Losses, weighted rewards ``beta sum w d`` and, as extras, the unweighted rewards ``beta S(d)``.

        ValueError for weights that are a distribution.
        """
        if not batch.main.factors:
            raise ValueError("OTPO reads factors, and the batch's token weights are a distribution")
        return TwDPO(self.beta, label_smoothing=self.label_smoothing)(policy, reference, batch)
