"""The terms that objectives share: losses of a pair's margin, odds, the SFT term, and checks of their keys."""

import math
from enum import Enum

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from attnpo.objectives.base import Reduction, reduce
from attnpo.schema import PreferenceBatch, TokenStats, UserError

# --------------------------------------------------------------------------------------------- losses of a margin


class LossType(Enum):
    """What a pair's margin z costs; e is the label smoothing.

    SIGMOID: ``-(1-e) log sigmoid(z) - e log sigmoid(-z)``. HINGE: ``max(0, 1 - z)``. ROBUST: the sigmoid loss whose
    expectation under labels flipped with probability e is that of true labels (Chowdhury et al. 2024).
    """

    SIGMOID = "sigmoid"
    HINGE = "hinge"
    ROBUST = "robust"


def sigmoid_loss(margin: Float[Tensor, "pairs"], label_smoothing: float = 0.0) -> Float[Tensor, "pairs"]:
    """``-(1-e) log sigmoid(z) - e log sigmoid(-z)`` per pair, stable for margins of several hundred."""
    loss = -F.logsigmoid(margin)
    if label_smoothing:
        loss = (1.0 - label_smoothing) * loss - label_smoothing * F.logsigmoid(-margin)
    return loss


def margin_loss(
    margin: Float[Tensor, "pairs"], loss_type: LossType, label_smoothing: float = 0.0
) -> Float[Tensor, "pairs"]:
    """What the margins of the pairs cost."""
    if loss_type is LossType.HINGE:
        return F.relu(1.0 - margin)
    if loss_type is LossType.SIGMOID:
        return sigmoid_loss(margin, label_smoothing)
    agreeing = (1.0 - label_smoothing) * F.logsigmoid(margin)
    return (label_smoothing * F.logsigmoid(-margin) - agreeing) / (1.0 - 2.0 * label_smoothing)


# --------------------------------------------------------------------------------------------- odds


def log1mexp(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """``log(1 - exp(x))`` for x < 0, exact at both ends; the branches change at -log 2 (Maechler 2012).

    Values within one rounding step of 0 (a response that is certain) count as that step: the result stays finite.
    """
    x = x.clamp(max=-torch.finfo(x.dtype).eps)
    near = x > -math.log(2.0)
    inside = torch.full_like(x, -math.log(2.0))  # keeps the branch that is not taken away from its infinite slope
    small = torch.log(-torch.expm1(torch.where(near, x, inside)))
    return torch.where(near, small, torch.log1p(-torch.exp(torch.where(near, inside, x))))


def log_odds(log_probability: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """``log(p / (1 - p))`` of a log-probability."""
    return log_probability - log1mexp(log_probability)


# --------------------------------------------------------------------------------------------- supervised term


class Sft(Enum):
    """What the negative log-likelihood of the chosen responses is averaged over; never over token weights.

    MEAN: each response's tokens. SUM: nothing, it is the likelihood of the whole response. BATCH: all chosen tokens of
    the optimiser step, so that a long response counts more than a short one.
    """

    MEAN = "mean"
    SUM = "sum"
    BATCH = "batch"


def chosen_nll(policy: TokenStats, batch: PreferenceBatch, form: Sft) -> Float[Tensor, "pairs"]:
    """The negative log-likelihood of each chosen response.

    Under BATCH it is the pair's share, ``-S(p) pairs / tokens`` with both counts of the whole optimiser step: its mean
    over the step is that over the tokens, however the step is split.

    Raises:
        ValueError: nobody counted the step's tokens.
    """
    logps, mask = policy.logps[: batch.pairs], batch.main.response_mask[: batch.pairs]
    if form is not Sft.BATCH:
        return -reduce(logps, None, mask, Reduction.MEAN if form is Sft.MEAN else Reduction.SUM)
    counted = batch.step_tokens != (0, 0)
    if not counted and bool((batch.pair_weight > 0).any()):  # a step of void pairs alone has no token to count
        raise ValueError("a mean over the step's chosen tokens needs their number, and batch.step_tokens is (0, 0)")
    share = batch.step_pairs / max(batch.step_tokens[0], 1) if counted else 0.0
    return -reduce(logps, None, mask, Reduction.SUM) * share


def with_sft(
    preference: Float[Tensor, "pairs"],
    policy: TokenStats,
    batch: PreferenceBatch,
    coef: float,
    form: Sft,
    scale: float = 1.0,
) -> tuple[Float[Tensor, "pairs"], dict[str, Float[Tensor, "pairs"]]]:
    """``scale * preference + coef * NLL`` per pair, and both terms unscaled as extras.

    With a coefficient of 0 nothing is computed and there are no extras.
    """
    losses = preference if scale == 1.0 else scale * preference
    if coef == 0:
        return losses, {}
    nll = chosen_nll(policy, batch, form)
    return losses + coef * nll, {"losses/preference": preference.detach(), "losses/sft": nll.detach()}


def idle_sft(coef: float) -> dict[str, str]:
    """The key of the SFT term's form with the reason why it has no effect; empty if it has one."""
    return {} if coef else {"sft": "the SFT term's coefficient is 0"}


def idle_length(length_scale: bool) -> dict[str, str]:
    """The key of |y| with the reason why it has no effect; empty if it has one."""
    return {} if length_scale else {"length_from": "objective.length_scale=false"}


# --------------------------------------------------------------------------------------------- checks


def check_positive(**values: float) -> None:
    """Nothing; raises UserError for a hyperparameter that is not a finite number above 0."""
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise UserError(f"objective.{name} must be above 0 and finite, got {value}")


def check_not_negative(**values: float) -> None:
    """Nothing; raises UserError for a hyperparameter that is not a finite number of at least 0."""
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise UserError(f"objective.{name} must be at least 0 and finite, got {value}")


def check_beta(beta: float, label_smoothing: float = 0.0, loss_type: LossType = LossType.SIGMOID) -> None:
    """Nothing; raises UserError for a beta that is not positive or a smoothing outside [0, 0.5) or without effect."""
    check_positive(beta=beta)
    if not 0 <= label_smoothing < 0.5:
        raise UserError(f"objective.label_smoothing must be at least 0 and below 0.5, got {label_smoothing}")
    if label_smoothing and loss_type is LossType.HINGE:
        raise UserError(
            f"objective.label_smoothing must be 0 with objective.loss_type=hinge, which smooths nothing, got "
            f"{label_smoothing}: set 0, or loss_type=sigmoid or robust"
        )
