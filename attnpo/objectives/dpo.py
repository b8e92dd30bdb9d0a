"""Direct Preference Optimization (Rafailov et al. 2023, Eq. 7), with the usual options: smoothing, hinge, SFT term."""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from attnpo.objectives.base import Reduction, log_ratios, logps_of, reduce, split_pairs
from attnpo.objectives.terms import (
    ANCHOR_STATISTIC,
    LossType,
    Sft,
    anchor_needs,
    batch_nll,
    check_beta,
    check_not_negative,
    check_positive,
    clipped,
    idle_sft,
    margin_loss,
    with_anchor,
    with_sft,
)
from attnpo.schema import ObjectiveOutput, PreferenceBatch, TokenStats


def dpo_loss(
    policy_logps: Float[Tensor, "rows R"],
    reference_logps: Float[Tensor, "rows R"],
    mask: Bool[Tensor, "rows R"],
    beta: float,
    label_smoothing: float = 0.0,
    loss_type: LossType = LossType.SIGMOID,
    nll: Float[Tensor, " pairs"] | None = None,
    sft_coef: float = 1.0,
    clip_ratio: float | None = None,
) -> ObjectiveOutput:
    """Returns the DPO loss of each pair: ``-log sigmoid(beta (S(d_w) - S(d_l)))``, ``+ sft_coef nll`` where given.

    d is the log-ratio of a token in nats, S its sum over the response. Rewards are ``beta S(d)``. ``loss_type`` and
    ``label_smoothing`` say what the margin costs (``margin_loss``), ``clip_ratio`` bounds d (``clipped``). Source:
    Rafailov et al. 2023, Eq. 7 (arXiv 2305.18290); eric-mitchell/direct-preference-optimization, ``trainers.py``.

    Example:
        >>> import torch
        >>> from attnpo.losses import dpo_loss
        >>> policy, reference = torch.tensor([[-0.5, -1.0], [-2.0, -0.3]]), torch.full((2, 2), -1.0)
        >>> mask = torch.ones(2, 2, dtype=torch.bool)  # rows: chosen, rejected
        >>> dpo_loss(policy, reference, mask, beta=0.1).losses
        tensor([0.6539])
    """
    ratios = clipped(log_ratios(policy_logps, reference_logps, mask), clip_ratio)
    chosen, rejected = split_pairs(beta * reduce(ratios, None, mask, Reduction.SUM))
    preference = margin_loss(chosen - rejected, loss_type, label_smoothing)
    losses, extras = with_sft(preference, nll, sft_coef)
    return ObjectiveOutput(losses, chosen.detach(), rejected.detach(), extras)


@dataclass(frozen=True)
class DPO:
    """``-log sigmoid(beta (S(d_w) - S(d_l)))`` with d the per-token log-ratio and S the sum over the response.

    ``loss_type`` is what the margin costs; ``clip_ratio`` bounds d (``clipped``); ``sft_coef`` adds the chosen
    responses' negative log-likelihood, ``anchor`` times the KL(policy || reference) at their tokens (``with_anchor``).
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    loss_type: LossType = LossType.SIGMOID
    sft_coef: float = 0.0
    sft: Sft = Sft.MEAN
    clip_ratio: float | None = None
    anchor: float = 0.0

    def __post_init__(self) -> None:
        check_beta(self.beta, self.label_smoothing, self.loss_type)
        check_not_negative(sft_coef=self.sft_coef, anchor=self.anchor)
        if self.clip_ratio is not None:
            check_positive(clip_ratio=self.clip_ratio)

    @property
    def requires(self) -> frozenset[str]:
        """Returns the reference, and its KL from the policy at each token for an anchor."""
        return anchor_needs(self.anchor) | {"reference"}

    def unread(self) -> dict[str, str]:
        """Keys without effect as the others stand, with the reason."""
        return idle_sft(self.sft_coef)

    def __call__(self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch) -> ObjectiveOutput:
        """Losses and rewards ``beta S(d)`` of the batch."""
        output = dpo_loss(
            policy.logps,
            logps_of(reference),
            batch.main.response_mask,
            self.beta,
            self.label_smoothing,
            self.loss_type,
            batch_nll(policy, batch, self.sft_coef, self.sft),
            self.sft_coef,
            self.clip_ratio,
        )
        if not self.anchor:
            return output
        return with_anchor(output, policy.joint[ANCHOR_STATISTIC], batch.main.response_mask, self.anchor)
