"""RRHF (Yuan et al. 2023, Eq. 2-4), pairwise as in the SimPO study: a ranking of length-normalised scores, and SFT."""

from dataclasses import dataclass

import torch.nn.functional as F

from attnpo.objectives.base import Reduction, mean_factors, reduce, split_pairs
from attnpo.objectives.terms import Sft, check_not_negative, idle_sft, with_sft
from attnpo.schema import ObjectiveOutput, PreferenceBatch, TokenStats


@dataclass(frozen=True)
class RRHF:
    """``max(0, s_l - s_w) + sft_coef NLL(y_w)`` with the score ``s = S(p) / n^k``, k the length penalty.

    The NLL is the likelihood of the whole response (``sft: sum``). Differs from the original code, which weighs the
    ranking term instead of the SFT term: because the SimPO study, whose row this is, writes it so. Token weights take
    the place of 1/n in ``s = n^(1-k) A(p)``.
    """

    length_penalty: float = 1.0
    sft_coef: float = 1.0
    sft: Sft = Sft.SUM

    def __post_init__(self) -> None:
        check_not_negative(length_penalty=self.length_penalty, sft_coef=self.sft_coef)

    @property
    def requires(self) -> frozenset[str]:
        """Token weights; there is no reference."""
        return frozenset({"token_weights"})

    def unread(self) -> dict[str, str]:
        """Keys without effect as the others stand, with the reason."""
        return idle_sft(self.sft_coef)

    def __call__(self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch) -> ObjectiveOutput:
        """Losses and, as rewards, the scores of the batch."""
        rows = batch.main
        scores = reduce(policy.logps, mean_factors(rows), rows.response_mask, Reduction.SUM)
        scores = scores * rows.response_mask.sum(-1).to(scores.dtype) ** (1.0 - self.length_penalty)
        chosen, rejected = split_pairs(scores)
        losses, extras = with_sft(F.relu(rejected - chosen), policy, batch, self.sft_coef, self.sft)
        return ObjectiveOutput(losses, chosen.detach(), rejected.detach(), extras)
