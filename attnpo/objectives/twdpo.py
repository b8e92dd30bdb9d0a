"""Token-weighted DPO, the objective of AttentionPO (paper Eq. twdpo; length-normalised form Eq. twdpo_len_norm)."""

from dataclasses import dataclass

import torch

from attnpo.objectives.base import LengthFrom as LengthFrom
from attnpo.objectives.base import Reduction, log_ratios, reduce, split_pairs, sum_factors
from attnpo.objectives.dpo import check_beta, sigmoid_loss
from attnpo.schema import ObjectiveOutput, PreferenceBatch, TokenStats


@dataclass(frozen=True)
class TwDPO:
    """``-log sigmoid(beta |y_w| sum_t a_wt d_wt - beta |y_l| sum_t a_lt d_lt)`` (paper Eq. twdpo).

    ``length_scale: false`` drops |y| (the paper's length-normalised ablation, run with beta 2.0). ``length_from:
    train`` counts the training tokens instead of the source's, for judges with another tokenizer. Uniform weights
    1/|y| on every response token give DPO exactly.
    """

    beta: float = 0.1
    length_scale: bool = True
    length_from: LengthFrom = LengthFrom.SOURCE
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_beta(self.beta, self.label_smoothing)

    @property
    def requires(self) -> frozenset[str]:
        """The reference's log-probabilities and token weights."""
        return frozenset({"reference", "token_weights"})

    def __call__(self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch) -> ObjectiveOutput:
        """Losses, weighted rewards ``beta |y| sum a d`` and, as extras, the unweighted rewards ``beta S(d)``."""
        rows = batch.main
        ratios = log_ratios(policy, reference, batch)
        factors = sum_factors(rows, self.length_scale, self.length_from)
        chosen, rejected = split_pairs(self.beta * reduce(ratios, factors, rows.response_mask, Reduction.SUM))
        with torch.no_grad():
            plain = split_pairs(self.beta * reduce(ratios, None, rows.response_mask, Reduction.SUM))
        return ObjectiveOutput(
            losses=sigmoid_loss(chosen - rejected, self.label_smoothing),
            chosen_rewards=chosen.detach(),
            rejected_rewards=rejected.detach(),
            extras={"unweighted/chosen": plain[0], "unweighted/rejected": plain[1]},
        )
