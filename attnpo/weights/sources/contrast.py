"""Two models' opinions of a token as its weight: TIS-DPO, cDPO of critical tokens, TGDPO.

What is stored is the raw comparison of the two models. The form that makes weights of it is applied on every use, so
that another transform asks no model again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnpo.judge.layers import Row
from attnpo.schema import PairWeights, UserError, check_range
from attnpo.weights.base import ScorerModel
from attnpo.weights.sources.scorers import CONTRAST, LOG_RATIO, ComparedSource, check_scorers, weighed_by


@runtime_checkable
class ContrastForm(Protocol):
    """Form in which the comparison of two models becomes factors."""

    @property
    def signed(self) -> bool:
        """Returns whether a weight can be negative."""

    @property
    def statistic(self) -> str:
        """Returns what is compared: "log_ratio" of a token, or its log-probability under the "contrast" of both."""

    def __call__(self, raw: Float[Tensor, " n"], words: Bool[Tensor, " n"], side: str) -> Float[Tensor, " n"]:
        """Returns the weights of a response; ``words`` is false on the tokens that only end the turn."""


# --------------------------------------------------------------------------------------------- TIS-DPO


class Transform(Enum):
    """Transform of a token's reward in TIS-DPO: the four of its code, or the formula of its paper."""

    SCALE = "scale"
    RANK = "rank"
    THRESHOLD = "threshold"
    BINARY = "binary"
    PAPER = "paper"


READ = {
    Transform.SCALE: ("low", "high", "least", "most"),
    Transform.RANK: ("least", "most"),
    Transform.THRESHOLD: ("low", "high"),
    Transform.BINARY: ("top_percent",),
    Transform.PAPER: ("low", "high", "k", "mu"),
}
ROUNDING = 100  # the code keeps two decimals of a log-ratio


def ranks(values: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Returns the place of each value in rising order, from 0; equal values share the mean of theirs."""
    below = (values[None, :] < values[:, None]).sum(-1)
    upto = (values[None, :] <= values[:, None]).sum(-1)
    return (below + upto - 1).to(values.dtype) / 2


@dataclass(frozen=True)
class TISDPO:
    """TIS-DPO's weights of the reward v = log pi_positive - log pi_negative, -v on the rejected side.

    ``scale``: v held in [``low``, ``high``], moved linearly onto [``least``, ``most``]. ``rank``: its rank among the
    response's tokens, on the same range; a single token gets the middle. ``threshold``: v held in [low, high], signed.
    ``binary``: 1 on the ``top_percent`` of the tokens (rounded down), 0 elsewhere. These round v to two decimals and
    leave the end of turn out, with weight 0. ``paper``: ``k exp(mu c)`` on chosen and ``k exp(-mu c)`` on rejected
    tokens, c the unrounded log-ratio held in [low, high], on every token.

    Source: exlaw/TIS-DPO, ``preference_datasets.py``. Differs from it in ties: equal tokens share a rank here, and the
    earlier ones come first in ``binary``. A response cut before its end of turn keeps the weight of its last token.
    """

    transform: Transform = Transform.SCALE
    low: float = -1.5
    high: float = 1.5
    least: float = 0.7
    most: float = 1.3
    top_percent: float = 100.0
    k: float = 1.0
    mu: float = 1.0

    statistic: ClassVar[str] = LOG_RATIO

    def __post_init__(self) -> None:
        check_range("weights.form", "(-1e300, 1e300)", low=self.low, mu=self.mu)
        check_range("weights.form", f"({self.low}, inf)", high=self.high)
        check_range("weights.form", "[0, inf)", least=self.least)
        check_range("weights.form", f"[{self.least}, inf)", most=self.most)
        check_range("weights.form", "(0, 100]", top_percent=self.top_percent)
        check_range("weights.form", "(0, inf)", k=self.k)

    @property
    def signed(self) -> bool:
        """Returns whether factors can be below 0: only with a ``threshold`` below 0."""
        return self.transform is Transform.THRESHOLD and self.low < 0

    def unread(self) -> dict[str, str]:
        """Keys of other transforms."""
        every = dict.fromkeys(name for names in READ.values() for name in names)
        why = f"weights.form.transform={self.transform.value}"
        return {name: why for name in every if name not in READ[self.transform]}

    def __call__(self, raw: Float[Tensor, " n"], words: Bool[Tensor, " n"], side: str) -> Float[Tensor, " n"]:
        """Returns the weights of a response."""
        sign = 1 if side == "chosen" else -1
        if self.transform is Transform.PAPER:
            return self.k * torch.exp(sign * self.mu * raw.clamp(self.low, self.high))
        weights = torch.zeros_like(raw)
        # A number halfway between two decimals goes to the even one, as in Python and NumPy.
        weights[words] = self._of_words(sign * (raw[words] * ROUNDING).round() / ROUNDING)
        return weights

    def _of_words(self, rewards: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        count = rewards.numel()
        if self.transform is Transform.THRESHOLD:
            return rewards.clamp(self.low, self.high)
        if self.transform is Transform.BINARY:
            top = torch.argsort(rewards, descending=True, stable=True)[: int(count * self.top_percent / 100)]
            return torch.zeros_like(rewards).index_fill(0, top, 1.0)
        if self.transform is Transform.RANK:
            share = ranks(rewards) / (count - 1) if count > 1 else torch.full_like(rewards, 0.5)
        else:
            share = (rewards.clamp(self.low, self.high) - self.low) / (self.high - self.low)
        return self.least + share * (self.most - self.least)


# --------------------------------------------------------------------------------------------- cDPO, TGDPO


@dataclass(frozen=True)
class CriticalTokens:
    """cDPO's weights of c, a token's probability under softmax(2 z_positive - z_negative).

    Rejected tokens weigh 1 - c, chosen ones c, or 1 with ``only_neg`` (as the code has it by default); the end of turn
    weighs 1. Source: chenzhiling9954/Critical-Tokens-Matter, ``src/pipeline.py``.
    """

    only_neg: bool = True

    signed: ClassVar[bool] = False
    statistic: ClassVar[str] = CONTRAST

    def __call__(self, raw: Float[Tensor, " n"], words: Bool[Tensor, " n"], side: str) -> Float[Tensor, " n"]:
        """Returns the weights of a response, from log c."""
        one = torch.ones_like(raw)
        if side == "chosen" and self.only_neg:
            return one
        # Rounding may leave a log-probability a little above 0.
        weights = raw.clamp(max=0.0).exp() if side == "chosen" else -torch.expm1(raw.clamp(max=0.0))
        return torch.where(words, weights, one)


@dataclass(frozen=True)
class TokenGuided:
    """TGDPO's factors ``1 + alpha beta q`` on chosen, ``1 - alpha beta q`` on rejected tokens; they can be negative.

    q is the log-ratio of a trained preference model (positive) and the reference (negative), so that ``beta q`` is the
    reward of that model; the code has one beta for it and for the objective. Source: dvlab-research/TGDPO,
    ``src/llamafactory/train/tgdpo/trainer.py``.
    """

    alpha: float = 0.5
    beta: float = 0.1

    signed: ClassVar[bool] = True
    statistic: ClassVar[str] = LOG_RATIO

    def __post_init__(self) -> None:
        check_range("weights.form", "(0, inf)", alpha=self.alpha, beta=self.beta)

    def __call__(self, raw: Float[Tensor, " n"], words: Bool[Tensor, " n"], side: str) -> Float[Tensor, " n"]:
        """Returns the factors of a response."""
        return 1 + (1 if side == "chosen" else -1) * self.alpha * self.beta * raw


# --------------------------------------------------------------------------------------------- the source


@dataclass(frozen=True)
class Contrast(ComparedSource):
    """Factors on the training tokens from what ``positive`` and ``negative`` make of them, by ``form``."""

    positive: ScorerModel
    negative: ScorerModel
    form: ContrastForm

    name: ClassVar[str] = "contrast"

    def __post_init__(self) -> None:
        check_scorers(self.scorers)
        asked = [name for name, model in self.scorers.items() if model.instruction is not None]
        if asked and self.compares_whole:
            raise UserError(
                f"weights.{asked[0]}.instruction: {type(self.form).__name__} compares two models after one and the "
                "same prompt; set it to null, or take another form"
            )

    @property
    def signed(self) -> bool:  # type: ignore[override]
        """Returns whether the form gives negative weights."""
        return self.form.signed

    @property
    def scorers(self) -> Mapping[str, ScorerModel]:
        """Returns both models by their keys."""
        return {"positive": self.positive, "negative": self.negative}

    @property
    def statistic(self) -> str:
        """Returns what the form compares."""
        return self.form.statistic

    @property
    def compares_whole(self) -> bool:  # type: ignore[override]
        """Returns whether the form reads both distributions, not the token's own probabilities alone."""
        return self.statistic == CONTRAST

    def select(self, captured: PairWeights, layers: tuple[Row, ...]) -> PairWeights:
        """Returns the weights that the form makes of the stored comparison."""
        return weighed_by(captured, self.form)
