"""Direct Preference Optimization (Rafailov et al. 2023, Eq. 7), with the usual options: smoothing, hinge, SFT term."""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from attnpo.objectives.base import Reduction, log_ratios, logps_of, reduce, split_pairs
from attnpo.objectives.terms import (
    ANCHOR_STATISTIC,
    LossType,
    SftTerm,
    check_beta,
    clip_log_ratios,
    margin_loss,
    with_anchor,
)
from attnpo.schema import ObjectiveOutput, PreferenceBatch, TokenStats, check_range


def dpo_loss(
    policy_logps: Float[Tensor, "rows R"],
    reference_logps: Float[Tensor, "rows R"],
    mask: Bool[Tensor, "rows R"],
    beta: float,
    label_smoothing: float = 0.0,
    loss_type: LossType = LossType.SIGMOID,
    clip_ratio: float | None = None,
) -> ObjectiveOutput:
    """Returns the DPO loss of each pair: ``-log sigmoid(beta (S(d_w) - S(d_l)))``.

    d is the log-ratio of a token in nats, and S is its sum over the response. Rewards are ``beta S(d)``. ``loss_type``
    and ``label_smoothing`` select the loss of the margin (``margin_loss``); ``clip_ratio`` bounds d
    (``clip_log_ratios``). Source: Rafailov et al. 2023, Eq. 7 (arXiv 2305.18290);
    eric-mitchell/direct-preference-optimization, ``trainers.py``.

    Example:
        >>> import torch
        >>> from attnpo.losses import dpo_loss
        >>> policy, reference = torch.tensor([[-0.5, -1.0], [-2.0, -0.3]]), torch.full((2, 2), -1.0)
        >>> mask = torch.ones(2, 2, dtype=torch.bool)  # rows: chosen, rejected
        >>> dpo_loss(policy, reference, mask, beta=0.1).losses
        tensor([0.6539])
    """
    ratios = clip_log_ratios(log_ratios(policy_logps, reference_logps, mask), clip_ratio)
    chosen, rejected = split_pairs(beta * reduce(ratios, None, mask, Reduction.SUM))
    losses = margin_loss(chosen - rejected, loss_type, label_smoothing)
    return ObjectiveOutput(losses, chosen.detach(), rejected.detach())


@dataclass(frozen=True)
class DPO(SftTerm):
    """``-log sigmoid(beta (S(d_w) - S(d_l)))``, where d is the per-token log-ratio and S sums over the response.

    ``loss_type`` is the loss of the margin; ``clip_ratio`` bounds d (``clip_log_ratios``); ``sft_coef`` scales an added
    negative log-likelihood of the chosen response; ``anchor`` scales an added KL(policy || reference) at the tokens of
    both responses (``with_anchor``).
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    loss_type: LossType = LossType.SIGMOID
    clip_ratio: float | None = None
    anchor: float = 0.0

    def __post_init__(self) -> None:
        check_beta(self.beta, self.label_smoothing, self.loss_type)
        check_range("objective", "[0, inf)", sft_coef=self.sft_coef, anchor=self.anchor)
        check_range("objective", "(0, inf)", clip_ratio=self.clip_ratio)

    @property
    def requires(self) -> frozenset[str]:
        """Requires the reference and, if an anchor is set, KL(policy || reference) at each token."""
        return frozenset({"reference", *([f"joint:{ANCHOR_STATISTIC}"] if self.anchor else [])})

    def __call__(self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch) -> ObjectiveOutput:
        """Computes losses and rewards ``beta S(d)`` for the batch."""
        given = policy.logps, logps_of(reference), batch.main.response_mask, self.beta
        output = dpo_loss(*given, self.label_smoothing, self.loss_type, self.clip_ratio)
        return self.with_sft_and_anchor(output, policy, batch)

    def with_sft_and_anchor(
        self, output: ObjectiveOutput, policy: TokenStats, batch: PreferenceBatch, shares: Tensor | None = None
    ) -> ObjectiveOutput:
        """Adds the SFT term and the anchor to the output; ``shares`` is passed on to ``with_anchor``."""
        output = self.with_sft(output, policy, batch)
        if not self.anchor:
            return output
        return with_anchor(output, policy.joint[ANCHOR_STATISTIC], batch.main.response_mask, self.anchor, shares)
