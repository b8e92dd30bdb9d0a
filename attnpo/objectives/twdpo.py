"""Token-weighted DPO, the objective of AttentionPO (paper Eq. twdpo; length-normalised form Eq. twdpo_len_norm)."""

from dataclasses import dataclass

import torch

from attnpo.objectives.base import LengthFrom as LengthFrom
from attnpo.objectives.base import Reduction, log_ratios, reduce, split_pairs, sum_factors
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
class TwDPO:
    """``-log sigmoid(beta |y_w| sum_t a_wt d_wt - beta |y_l| sum_t a_lt d_lt)`` (paper Eq. twdpo).

    ``length_scale: false`` drops |y| (the paper's length-normalised ablation, run with beta 2.0). ``length_from:
    train`` counts the training tokens instead of the source's, for judges with another tokenizer. Uniform weights
    1/|y| on every response token give DPO exactly. ``loss_type`` and the SFT term as in DPO.
    """

    beta: float = 0.1
    length_scale: bool = True
    length_from: LengthFrom = LengthFrom.SOURCE
    label_smoothing: float = 0.0
    loss_type: LossType = LossType.SIGMOID
    sft_coef: float = 0.0
    sft: Sft = Sft.MEAN

    def __post_init__(self) -> None:
        check_beta(self.beta, self.label_smoothing, self.loss_type)
        check_not_negative(sft_coef=self.sft_coef)

    @property
    def requires(self) -> frozenset[str]:
        """The reference's log-probabilities and token weights."""
        return frozenset({"reference", "token_weights"})

    def unread(self) -> dict[str, str]:
        """Keys without effect as the others stand, with the reason."""
        return idle_sft(self.sft_coef) | idle_length(self.length_scale)

    def __call__(self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch) -> ObjectiveOutput:
        """Losses, weighted rewards ``beta |y| sum a d`` and, as extras, the unweighted rewards ``beta S(d)``."""
        rows = batch.main
        ratios = log_ratios(policy, reference, batch)
        factors = sum_factors(rows, self.length_scale, self.length_from)
        chosen, rejected = split_pairs(self.beta * reduce(ratios, factors, rows.response_mask, Reduction.SUM))
        preference = margin_loss(chosen - rejected, self.loss_type, self.label_smoothing)
        losses, extras = with_sft(preference, policy, batch, self.sft_coef, self.sft)
        with torch.no_grad():
            plain = split_pairs(self.beta * reduce(ratios, None, rows.response_mask, Reduction.SUM))
        extras |= {"unweighted/chosen": plain[0], "unweighted/rejected": plain[1]}
        return ObjectiveOutput(losses, chosen.detach(), rejected.detach(), extras)
