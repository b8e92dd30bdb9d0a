"""SLiC-HF (Zhao et al. 2023, Eq. 1): a hinge on the responses' log-probabilities, and an SFT term."""

from dataclasses import dataclass

import torch.nn.functional as F

from attnpo.objectives.base import LengthFrom, Reduction, reduce, split_pairs, sum_factors
from attnpo.objectives.terms import Sft, check_not_negative, check_positive, idle_length, idle_sft, with_sft
from attnpo.schema import ObjectiveOutput, PreferenceBatch, TokenStats


@dataclass(frozen=True)
class SLiCHF:
    """``max(0, delta - S(p_w) + S(p_l)) + sft_coef NLL(y_w)``, sums over the response, no reference, no beta.

    The NLL is the likelihood of the whole response (``sft: sum``). Token weights multiply p in the hinge, scaled as in
    TwDPO. Not what TRL calls hinge: see ``DPO.loss_type``.
    """

    delta: float = 1.0
    sft_coef: float = 0.1
    sft: Sft = Sft.SUM
    length_scale: bool = True
    length_from: LengthFrom = LengthFrom.SOURCE

    def __post_init__(self) -> None:
        check_positive(delta=self.delta)
        check_not_negative(sft_coef=self.sft_coef)

    @property
    def requires(self) -> frozenset[str]:
        """Token weights; there is no reference."""
        return frozenset({"token_weights"})

    def unread(self) -> dict[str, str]:
        """Keys without effect as the others stand, with the reason."""
        return idle_sft(self.sft_coef) | idle_length(self.length_scale)

    def __call__(self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch) -> ObjectiveOutput:
        """Losses and rewards ``S(p)`` of the batch."""
        rows = batch.main
        factors = sum_factors(rows, self.length_scale, self.length_from)
        chosen, rejected = split_pairs(reduce(policy.logps, factors, rows.response_mask, Reduction.SUM))
        hinge = F.relu(self.delta - chosen + rejected)
        losses, extras = with_sft(hinge, policy, batch, self.sft_coef, self.sft)
        return ObjectiveOutput(losses, chosen.detach(), rejected.detach(), extras)
