"""Odds Ratio Preference Optimization (Hong et al. 2024, Eq. 6): an SFT term and the log odds ratio of the responses."""

from dataclasses import dataclass

from attnpo.objectives.base import Reduction, mean_factors, reduce, split_pairs
from attnpo.objectives.terms import Sft, check_positive, log_odds, sigmoid_loss, with_sft
from attnpo.schema import ObjectiveOutput, PreferenceBatch, TokenStats


@dataclass(frozen=True)
class ORPO:
    """``NLL(y_w) - lam log sigmoid(o_w - o_l)`` with o the log odds of a response's mean log-probability A(p).

    The NLL is each response's own mean over its tokens (``sft: mean``); ``batch`` is the mean over the chosen tokens of
    the whole step. Differs from TRL: the prompt is never part of it. Token weights take the place of 1/n in A.
    """

    lam: float = 0.1
    sft: Sft = Sft.MEAN

    def __post_init__(self) -> None:
        check_positive(lam=self.lam)

    @property
    def requires(self) -> frozenset[str]:
        """Token weights; there is no reference."""
        return frozenset({"token_weights"})

    def __call__(self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch) -> ObjectiveOutput:
        """Losses and rewards ``lam A(p)`` of the batch."""
        rows = batch.main
        means = reduce(policy.logps, mean_factors(rows), rows.response_mask, Reduction.SUM)
        chosen, rejected = split_pairs(log_odds(means))
        losses, extras = with_sft(sigmoid_loss(chosen - rejected), policy, batch, 1.0, self.sft, scale=self.lam)
        return ObjectiveOutput(losses, *split_pairs(self.lam * means.detach()), extras)
