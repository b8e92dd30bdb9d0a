"""Token-weighted DPO, the objective of AttentionPO (paper Eq. twdpo; length-normalised form Eq. twdpo_len_norm)."""

from dataclasses import dataclass

import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from attnpo.objectives.base import (
    LengthScaled,
    Reduction,
    by_side,
    log_ratios,
    logps_of,
    reduce,
    split_pairs,
    weighted_sum,
)
from attnpo.objectives.terms import (
    ANCHOR_STATISTIC,
    AnchorOn,
    LossType,
    Sft,
    anchor_needs,
    batch_nll,
    check_beta,
    check_not_negative,
    check_positive,
    clipped,
    idle_sft,
    low_shares,
    margin_loss,
    with_anchor,
    with_sft,
)
from attnpo.schema import ObjectiveOutput, PreferenceBatch, TokenStats

NO_OPTIONS = (0.0, LossType.SIGMOID, 0.0, None)
"""Smoothing, form of the loss, SFT coefficient and clip of the paper."""


def twdpo_loss(
    policy_logps: Float[Tensor, "rows R"],
    reference_logps: Float[Tensor, "rows R"],
    weights: Float[Tensor, "rows R"],
    mask: Bool[Tensor, "rows R"],
    lengths: Float[Tensor, " rows"] | None,
    beta: float,
) -> ObjectiveOutput:
    """Computes -log sigmoid(r_w - r_l) with r = beta |y| sum_t a_t d_t and d_t = log pi(y_t) - log ref(y_t) in nats.

    a (``weights``) is a distribution over the response, |y| (``lengths``) its tokens as the judge counts them; without
    lengths |y| is left out. Rewards are r; the extras hold the unweighted ones, ``beta sum_t d_t``.
    Source: paper Eq. twdpo, without lengths Eq. twdpo_len_norm; HCY123902/AttentionPO, ``tw_dpo_trainer.py``.

    Example:
        >>> import torch
        >>> from attnpo.losses import twdpo_loss
        >>> policy, reference = torch.tensor([[-0.5, -1.0], [-2.0, -0.3]]), torch.full((2, 2), -1.0)
        >>> mask, weights = torch.ones(2, 2, dtype=torch.bool), torch.tensor([[0.9, 0.1], [0.5, 0.5]])
        >>> lengths = mask.sum(-1).float()
        >>> twdpo_loss(policy, reference, weights, mask, lengths, beta=0.1).losses
        tensor([0.6349])
    """
    d = log_ratios(policy_logps, reference_logps, mask)  # of each token, 0 off the response
    r_w, r_l = split_pairs(beta * weighted_sum(d, weights, mask, lengths))
    losses = -F.logsigmoid(r_w - r_l)
    unweighted = by_side("unweighted", beta * d.detach().sum(-1))
    return ObjectiveOutput(losses, r_w.detach(), r_l.detach(), unweighted)


def twdpo_variant_loss(
    policy_logps: Float[Tensor, "rows R"],
    reference_logps: Float[Tensor, "rows R"],
    weights: Float[Tensor, "rows R"],
    mask: Bool[Tensor, "rows R"],
    lengths: Float[Tensor, " rows"] | None,
    beta: float,
    label_smoothing: float = 0.0,
    loss_type: LossType = LossType.SIGMOID,
    nll: Float[Tensor, " pairs"] | None = None,
    sft_coef: float = 1.0,
    clip_ratio: float | None = None,
) -> ObjectiveOutput:
    """Computes ``twdpo_loss`` with its options: another form of the loss, an SFT term, log-ratios that are held.

    With an ``nll``, ``sft_coef nll`` is added; ``clip_ratio`` bounds d (``clipped``).

    Example:
        >>> import torch
        >>> from attnpo.losses import twdpo_variant_loss
        >>> policy, reference = torch.tensor([[-0.5, -1.0], [-2.0, -0.3]]), torch.full((2, 2), -1.0)
        >>> mask, weights = torch.ones(2, 2, dtype=torch.bool), torch.tensor([[0.9, 0.1], [0.5, 0.5]])
        >>> twdpo_variant_loss(policy, reference, weights, mask, mask.sum(-1).float(), 0.1, label_smoothing=0.5).losses
        tensor([0.6949])
    """
    ratios = clipped(log_ratios(policy_logps, reference_logps, mask), clip_ratio)
    chosen, rejected = split_pairs(beta * weighted_sum(ratios, weights, mask, lengths))
    preference = margin_loss(chosen - rejected, loss_type, label_smoothing)
    losses, extras = with_sft(preference, nll, sft_coef)
    extras |= by_side("unweighted", beta * reduce(ratios.detach(), None, mask, Reduction.SUM))
    return ObjectiveOutput(losses, chosen.detach(), rejected.detach(), extras)


@dataclass(frozen=True)
class TwDPO(LengthScaled):
    """``-log sigmoid(beta |y_w| sum_t a_wt d_wt - beta |y_l| sum_t a_lt d_lt)`` (paper Eq. twdpo).

    ``length_scale: false`` drops |y| (the paper's length-normalised ablation, run with beta 2.0). ``length_from:
    train`` counts the training tokens instead of the source's, for judges with another tokenizer. Uniform weights 1/|y|
    on every response token give DPO exactly. ``loss_type``, the SFT term, ``clip_ratio`` and ``anchor`` as in DPO;
    ``anchor_on`` says which tokens it holds.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    loss_type: LossType = LossType.SIGMOID
    sft_coef: float = 0.0
    sft: Sft = Sft.MEAN
    clip_ratio: float | None = None
    anchor: float = 0.0
    anchor_on: AnchorOn = AnchorOn.ALL

    def __post_init__(self) -> None:
        check_beta(self.beta, self.label_smoothing, self.loss_type)
        check_not_negative(sft_coef=self.sft_coef, anchor=self.anchor)
        if self.clip_ratio is not None:
            check_positive(clip_ratio=self.clip_ratio)

    @property
    def requires(self) -> frozenset[str]:
        """Returns the reference, token weights, and for an anchor the KL from policy to reference at each token."""
        return anchor_needs(self.anchor) | {"reference", "token_weights"}

    def unread(self) -> dict[str, str]:
        """Keys without effect as the others stand, with the reason."""
        anchor = {} if self.anchor else {"anchor_on": "objective.anchor is 0"}
        return idle_sft(self.sft_coef) | anchor | super().unread()

    def __call__(self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch) -> ObjectiveOutput:
        """Losses, weighted rewards ``beta |y| sum a d`` and, as extras, the unweighted rewards ``beta S(d)``."""
        given = policy.logps, logps_of(reference), *self.weighted(batch.main), self.beta
        options = self.label_smoothing, self.loss_type, self.sft_coef, self.clip_ratio
        if options == NO_OPTIONS:
            output = twdpo_loss(*given)
        else:
            smoothing, kind, coef, clip = options
            nll = batch_nll(policy, batch, coef, self.sft)
            output = twdpo_variant_loss(*given, smoothing, kind, nll, coef, clip)
        if not self.anchor:
            return output
        rows = batch.main
        shares = low_shares(rows) if self.anchor_on is AnchorOn.LOW else None
        return with_anchor(output, policy.joint[ANCHOR_STATISTIC], rows.response_mask, self.anchor, shares)
