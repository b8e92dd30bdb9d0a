"""Token-weighted DPO, the objective of AttentionPO (paper Eq. twdpo, Eq. twdpo_len_norm); OTPO has the same form."""

from dataclasses import dataclass

import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from attnpo.objectives.base import (
    LengthScaled,
    Reduction,
    log_ratios,
    logps_of,
    reduce,
    split_by_side,
    split_pairs,
    weighted_sum,
)
from attnpo.objectives.dpo import DPO
from attnpo.objectives.terms import AnchorOn, LossType, check_beta, clip_log_ratios, low_shares, margin_loss
from attnpo.schema import ObjectiveOutput, PreferenceBatch, TokenStats

NO_OPTIONS = (0.0, LossType.SIGMOID, None)
"""Label smoothing, loss type and clip ratio used in the paper."""


def twdpo_loss(
    policy_logps: Float[Tensor, "rows R"],
    reference_logps: Float[Tensor, "rows R"],
    weights: Float[Tensor, "rows R"],
    mask: Bool[Tensor, "rows R"],
    lengths: Float[Tensor, " rows"] | None,
    beta: float,
) -> ObjectiveOutput:
    """Computes -log sigmoid(r_w - r_l) with r = beta |y| sum_t a_t d_t and d_t = log pi(y_t) - log ref(y_t) in nats.

    a (``weights``) is a distribution over the response, and |y| (``lengths``) is its length in judge tokens; without
    lengths, |y| is omitted. Rewards are r; the extras contain the unweighted rewards, ``beta sum_t d_t``. Source: paper
    Eq. twdpo (without lengths, Eq. twdpo_len_norm); HCY123902/AttentionPO, ``tw_dpo_trainer.py``.

    Example:
        >>> import torch
        >>> from attnpo.losses import twdpo_loss
        >>> policy, reference = torch.tensor([[-0.5, -1.0], [-2.0, -0.3]]), torch.full((2, 2), -1.0)
        >>> mask, weights = torch.ones(2, 2, dtype=torch.bool), torch.tensor([[0.9, 0.1], [0.5, 0.5]])
        >>> lengths = mask.sum(-1).float()
        >>> twdpo_loss(policy, reference, weights, mask, lengths, beta=0.1).losses
        tensor([0.6349])
    """
    d = log_ratios(policy_logps, reference_logps, mask)  # per token, 0 outside the response
    r_w, r_l = split_pairs(beta * weighted_sum(d, weights, mask, lengths))
    losses = -F.logsigmoid(r_w - r_l)
    unweighted = split_by_side("unweighted", beta * d.detach().sum(-1))
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
    clip_ratio: float | None = None,
) -> ObjectiveOutput:
    """Computes ``twdpo_loss`` with options: another loss type, and d clipped to ``clip_ratio`` (``clip_log_ratios``).

    Example:
        >>> import torch
        >>> from attnpo.losses import twdpo_variant_loss
        >>> policy, reference = torch.tensor([[-0.5, -1.0], [-2.0, -0.3]]), torch.full((2, 2), -1.0)
        >>> mask, weights = torch.ones(2, 2, dtype=torch.bool), torch.tensor([[0.9, 0.1], [0.5, 0.5]])
        >>> twdpo_variant_loss(policy, reference, weights, mask, mask.sum(-1).float(), 0.1, label_smoothing=0.5).losses
        tensor([0.6949])
    """
    ratios = clip_log_ratios(log_ratios(policy_logps, reference_logps, mask), clip_ratio)
    chosen, rejected = split_pairs(beta * weighted_sum(ratios, weights, mask, lengths))
    losses = margin_loss(chosen - rejected, loss_type, label_smoothing)
    unweighted = split_by_side("unweighted", beta * reduce(ratios.detach(), None, mask, Reduction.SUM))
    return ObjectiveOutput(losses, chosen.detach(), rejected.detach(), unweighted)


@dataclass(frozen=True)
class TwDPO(LengthScaled, DPO):
    """``-log sigmoid(beta |y_w| sum_t a_wt d_wt - beta |y_l| sum_t a_lt d_lt)`` (paper Eq. twdpo).

    ``length_scale: false`` drops |y| (the paper's length-normalised ablation, run with beta 2.0). ``length_from:
    train`` counts the policy's tokens instead of the weight source's, for judges with a different tokenizer. Uniform
    weights 1/|y| on every response token give DPO exactly. The other keys are the same as for DPO; ``anchor_on``
    selects the tokens for ``anchor``.
    """

    anchor_on: AnchorOn = AnchorOn.ALL

    @property
    def requires(self) -> frozenset[str]:
        """Requires the reference, the token weights and, with an anchor, KL(policy || reference) at each token."""
        return super().requires | {"token_weights"}

    def unused_keys(self) -> dict[str, str]:
        """Returns the keys that have no effect in this config, mapped to the reasons."""
        return ({} if self.anchor else {"anchor_on": "objective.anchor is 0"}) | super().unused_keys()

    def __call__(self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch) -> ObjectiveOutput:
        """Computes losses, weighted rewards ``beta |y| sum a d`` and, as extras, unweighted rewards ``beta S(d)``."""
        given = policy.logps, logps_of(reference), *self.weighted(batch.main), self.beta
        options = self.label_smoothing, self.loss_type, self.clip_ratio
        output = twdpo_loss(*given) if options == NO_OPTIONS else twdpo_variant_loss(*given, *options)
        shares = low_shares(batch.main) if self.anchor and self.anchor_on is AnchorOn.LOW else None
        return self.with_sft_and_anchor(output, policy, batch, shares)


def otpo_loss(
    policy_logps: Float[Tensor, "rows R"],
    reference_logps: Float[Tensor, "rows R"],
    weights: Float[Tensor, "rows R"],
    mask: Bool[Tensor, "rows R"],
    beta: float,
    label_smoothing: float = 0.0,
) -> ObjectiveOutput:
    """Returns the OTPO loss of each pair: ``-log sigmoid(beta (sum_t w_wt d_wt - sum_t w_lt d_lt))``.

    d is the log-ratio of a token in nats, and w (``weights``) is the mass that each token retains in the transport
    between the pair's responses (``weights.sources.transport``). Rewards are ``beta sum_t w_t d_t``. Source: Li et al.
    2025; Mimasss2/OTPO, ``scripts/otpo_trainer.py``.

    Example:
        >>> import torch
        >>> from attnpo.losses import otpo_loss
        >>> policy, reference = torch.tensor([[-0.5, -1.0], [-2.0, -0.3]]), torch.full((2, 2), -1.0)
        >>> mask, weights = torch.ones(2, 2, dtype=torch.bool), torch.tensor([[0.9, 0.1], [0.5, 0.5]])
        >>> otpo_loss(policy, reference, 2 * weights, mask, beta=0.1).losses
        tensor([0.6349])
    """
    return twdpo_variant_loss(policy_logps, reference_logps, weights, mask, None, beta, label_smoothing)


@dataclass(frozen=True)
class OTPO:
    """TwDPO's form with factors w (Li et al. 2025), which come from one transport plan and are not scaled by a length.

    ``weights=transport`` computes them.
    """

    beta: float = 0.01
    label_smoothing: float = 0.0

    requires = frozenset({"reference", "token_weights", "factors"})

    def __post_init__(self) -> None:
        check_beta(self.beta, self.label_smoothing)

    def __call__(self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch) -> ObjectiveOutput:
        """Computes losses and rewards like ``otpo_loss``; raises ValueError if the weights are a distribution."""
        rows = batch.main
        if not rows.factors:
            raise ValueError("OTPO needs factors, but the batch's token weights are a distribution")
        weights, mask = rows.token_weights["reward"], rows.response_mask
        return otpo_loss(policy.logps, logps_of(reference), weights, mask, self.beta, self.label_smoothing)
