"""Terms shared by objectives: margin losses, log odds, the SFT term, the anchor, and checks of their config keys."""

import math
from dataclasses import dataclass, replace
from enum import Enum

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from attnpo.objectives.base import ObjectivePart, Reduction, reduce, split_pairs
from attnpo.schema import ObjectiveOutput, PreferenceBatch, RowGroup, TokenStats, UserError, check_range

# --------------------------------------------------------------------------------------------- losses of a margin


class LossType(Enum):
    """Loss of a pair's margin z; e is the label smoothing.

    SIGMOID: ``-(1-e) log sigmoid(z) - e log sigmoid(-z)``. HINGE: ``max(0, 1 - z)``. ROBUST: a sigmoid loss whose
    expectation, if labels are flipped with probability e, is the loss under the true labels (Chowdhury et al. 2024).
    """

    SIGMOID = "sigmoid"
    HINGE = "hinge"
    ROBUST = "robust"


def sigmoid_loss(margin: Float[Tensor, " pairs"], label_smoothing: float = 0.0) -> Float[Tensor, " pairs"]:
    """Returns ``-(1-e) log sigmoid(z) - e log sigmoid(-z)`` per pair, stable for margins in the hundreds."""
    loss = -F.logsigmoid(margin)
    if label_smoothing:
        loss = (1.0 - label_smoothing) * loss - label_smoothing * F.logsigmoid(-margin)
    return loss


def margin_loss(
    margin: Float[Tensor, " pairs"], loss_type: LossType, label_smoothing: float = 0.0
) -> Float[Tensor, " pairs"]:
    """Computes the loss of each pair's margin."""
    if loss_type is LossType.HINGE:
        return F.relu(1.0 - margin)
    if loss_type is LossType.SIGMOID:
        return sigmoid_loss(margin, label_smoothing)
    agreeing = (1.0 - label_smoothing) * F.logsigmoid(margin)
    return (label_smoothing * F.logsigmoid(-margin) - agreeing) / (1.0 - 2.0 * label_smoothing)


# --------------------------------------------------------------------------------------------- odds


def log1mexp(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Returns ``log(1 - exp(x))`` for x < 0, accurate at both ends; the formula changes at -log 2 (Maechler 2012).

    Values within one rounding step of 0 (a response with probability 1) are replaced by that step to keep the result
    finite.
    """
    x = x.clamp(max=-torch.finfo(x.dtype).eps)
    near = x > -math.log(2.0)
    inside = torch.full_like(x, -math.log(2.0))  # keeps the unused branch away from its infinite slope
    small = torch.log(-torch.expm1(torch.where(near, x, inside)))
    return torch.where(near, small, torch.log1p(-torch.exp(torch.where(near, inside, x))))


def log_odds(log_probability: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Returns the log odds ``log(p / (1 - p))`` for log-probabilities ``log p``."""
    return log_probability - log1mexp(log_probability)


# --------------------------------------------------------------------------------------------- supervised term


class Sft(Enum):
    """Unit over which the negative log-likelihood of the chosen responses is averaged; token weights never apply.

    MEAN: each response's tokens. SUM: no averaging, the likelihood of the whole response. BATCH: all chosen tokens of
    the optimizer step, so that longer responses count more.
    """

    MEAN = "mean"
    SUM = "sum"
    BATCH = "batch"


def chosen_nll(
    policy_logps: Float[Tensor, "rows R"], mask: Bool[Tensor, "rows R"], form: Sft, pairs_per_token: float = 0.0
) -> Float[Tensor, " pairs"]:
    """Returns the negative log-likelihood ``-A(p)`` or ``-S(p)`` of each chosen response (the first half of the rows).

    With BATCH, returns each pair's share ``-S(p) pairs_per_token``, where ``pairs_per_token`` is the number of pairs
    per chosen token in the whole optimizer step; its mean over the pairs then equals the mean over the tokens.
    """
    pairs = len(policy_logps) // 2
    how = Reduction.MEAN if form is Sft.MEAN else Reduction.SUM
    nll = -reduce(policy_logps[:pairs], None, mask[:pairs], how)
    return nll * pairs_per_token if form is Sft.BATCH else nll


def add_sft(output: ObjectiveOutput, nll: Float[Tensor, " pairs"], coef: float = 1.0) -> ObjectiveOutput:
    """Adds ``coef nll`` to each pair's loss; stores the original loss and ``nll`` as extras.

    ``nll`` is the result of ``chosen_nll``.

    Example:
        >>> import torch
        >>> from attnpo.losses import Sft, add_sft, chosen_nll, dpo_loss
        >>> policy, reference = torch.tensor([[-0.5, -1.0], [-2.0, -0.3]]), torch.full((2, 2), -1.0)
        >>> mask = torch.ones(2, 2, dtype=torch.bool)  # rows: chosen, rejected
        >>> add_sft(dpo_loss(policy, reference, mask, beta=0.1), chosen_nll(policy, mask, Sft.MEAN), 0.5).losses
        tensor([1.0289])
    """
    extras = {"losses/preference": output.losses.detach(), **output.extras, "losses/sft": nll.detach()}
    return replace(output, losses=output.losses + coef * nll, extras=extras)


@dataclass(frozen=True, kw_only=True)
class SftTerm(ObjectivePart):
    """Config keys of the SFT term, which is ``sft_coef`` times the negative log-likelihood of the chosen responses."""

    sft_coef: float = 0.0
    sft: Sft = Sft.MEAN

    def unused_keys(self) -> dict[str, str]:
        """Returns the keys that have no effect in this config, mapped to the reasons."""
        return ({} if self.sft_coef else {"sft": "the SFT term's coefficient is 0"}) | super().unused_keys()

    def with_sft(self, output: ObjectiveOutput, policy: TokenStats, batch: PreferenceBatch) -> ObjectiveOutput:
        """Adds the term to the output, using the token counts of the batch's step.

        Raises:
            ValueError: the step's token counts are needed but missing.
        """
        if self.sft_coef == 0:
            return output
        counted = batch.step_tokens != (0, 0)
        # A step with only void pairs has no tokens to count.
        if self.sft is Sft.BATCH and not counted and bool((batch.pair_weight > 0).any()):
            raise ValueError("a mean over the step's chosen tokens needs their count, but batch.step_tokens is (0, 0)")
        pairs_per_token = batch.step_pairs / max(batch.step_tokens[0], 1) if counted else 0.0
        nll = chosen_nll(policy.logps, batch.main.response_mask, self.sft, pairs_per_token)
        return add_sft(output, nll, self.sft_coef)


# --------------------------------------------------------------------------------------------- bounded pushes


def clip_log_ratios(ratios: Float[Tensor, "rows R"], clip: float | None) -> Float[Tensor, "rows R"]:
    """Clips log-ratios to [-clip, clip] nats, so that tokens outside this range get no gradient.

    None disables clipping.

    HALOs' humanline objectives clip each token's log-ratio in the same way, at -1 and 1.5.
    """
    return ratios if clip is None else ratios.clamp(-clip, clip)


# --------------------------------------------------------------------------------------------- anchor

ANCHOR_STATISTIC = "kl_policy_ref"


class AnchorOn(Enum):
    """Share of a token's KL to the reference that the anchor penalises.

    ALL: the full KL. LOW: the fraction by which the token's weight is below a uniform weight, ``max(0, 1 - n a_t)`` for
    a distribution a over n tokens and ``max(0, 1 - w_t)`` for factors, so that tokens with low weight stay close to the
    reference.
    """

    ALL = "all"
    LOW = "low"


def low_shares(rows: RowGroup) -> Float[Tensor, "rows R"]:
    """Returns the share of each token's KL that ``AnchorOn.LOW`` penalises."""
    weights = rows.token_weights["reward"]
    if not rows.factors:
        weights = weights * rows.response_mask.sum(-1, keepdim=True).to(weights.dtype)
    return (1 - weights).clamp(min=0)


def with_anchor(
    output: ObjectiveOutput,
    position_kl: Float[Tensor, "rows R"],
    mask: Bool[Tensor, "rows R"],
    coef: float,
    shares: Float[Tensor, "rows R"] | None = None,
) -> ObjectiveOutput:
    """Adds ``coef (K_w + K_l) / 2`` to each pair's loss, where ``K = sum_t h_t KL_t``.

    ``position_kl`` is KL(policy || reference) over the whole vocabulary at each token, in nats, and carries gradient;
    ``shares`` are the h_t and default to 1. The extras contain the loss without the term, and the term without
    ``coef``.
    """
    chosen, rejected = split_pairs(reduce(position_kl, shares, mask, Reduction.SUM))
    term = (chosen + rejected) / 2
    extras = {"losses/preference": output.losses.detach(), **output.extras, "losses/anchor": term.detach()}
    return replace(output, losses=output.losses + coef * term, extras=extras)


# --------------------------------------------------------------------------------------------- checks


def check_beta(beta: float, label_smoothing: float = 0.0, loss_type: LossType = LossType.SIGMOID) -> None:
    """Raises UserError unless beta is positive and the label smoothing is in [0, 0.5) and takes effect."""
    check_range("objective", "(0, inf)", beta=beta)
    check_range("objective", "[0, 0.5)", label_smoothing=label_smoothing)
    if label_smoothing and loss_type is LossType.HINGE:
        raise UserError(
            f"objective.label_smoothing must be 0 with objective.loss_type=hinge, which has no smoothing, got "
            f"{label_smoothing}: set it to 0, or choose objective.loss_type=sigmoid or robust"
        )
