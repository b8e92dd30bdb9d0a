"""Token-weighted DPO, the objective of AttentionPO (paper Eq. twdpo; length-normalised form Eq. twdpo_len_norm)."""

from dataclasses import dataclass
from enum import Enum

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnpo.objectives.base import Reduction, log_ratios, reduce, split_pairs
from attnpo.objectives.dpo import check_beta, sigmoid_loss
from attnpo.schema import ObjectiveOutput, PreferenceBatch, TokenStats


class LengthFrom(Enum):
    """Whose tokens |y| counts: the weight source's (paper) or the training side's."""

    SOURCE = "source"
    TRAIN = "train"


def token_factors(
    weights: Float[Tensor, "rows R"],
    mask: Bool[Tensor, "rows R"],
    source_lengths: Float[Tensor, "rows"],
    length_scale: bool,
    length_from: LengthFrom,
) -> Float[Tensor, "rows R"]:
    """What multiplies each token's log-ratio: ``|y| a_t``, or ``a_t`` without the length scale."""
    if not length_scale:
        return weights
    lengths = source_lengths if length_from is LengthFrom.SOURCE else mask.sum(-1).to(weights.dtype)
    return weights * lengths.to(weights.dtype).unsqueeze(-1)


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
        factors = token_factors(
            rows.token_weights["reward"], rows.response_mask, rows.source_lengths, self.length_scale, self.length_from
        )
        chosen, rejected = split_pairs(self.beta * reduce(ratios, factors, rows.response_mask, Reduction.SUM))
        with torch.no_grad():
            plain = split_pairs(self.beta * reduce(ratios, None, rows.response_mask, Reduction.SUM))
        return ObjectiveOutput(
            losses=sigmoid_loss(chosen - rejected, self.label_smoothing),
            chosen_rewards=chosen.detach(),
            rejected_rewards=rejected.detach(),
            extras={"unweighted/chosen": plain[0], "unweighted/rejected": plain[1]},
        )
