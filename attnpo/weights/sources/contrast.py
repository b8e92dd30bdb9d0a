"""Token weights computed by comparing two models: TIS-DPO, cDPO (critical tokens), TGDPO.

The store contains the raw comparison. It is converted into weights on each use, so changing the conversion (form) needs
no new forward pass.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnpo.judge.layers import StoredRow
from attnpo.schema import PairWeights, UserError, check_range
from attnpo.weights.base import ScorerModel
from attnpo.weights.sources.scorers import CONTRAST, LOG_RATIO, ComparedSource, apply_rule, check_scorers


@runtime_checkable
class ContrastForm(Protocol):
    """Rule that converts a comparison of two models into factors."""

    @property
    def signed(self) -> bool:
        """Returns whether weights can be negative."""

    @property
    def statistic(self) -> str:
        """Returns the name of the statistic to store for each token: "log_ratio" or "contrast"."""

    def __call__(self, raw: Float[Tensor, " n"], words: Bool[Tensor, " n"], side: str) -> Float[Tensor, " n"]:
        """Converts a response's statistics into weights; ``words`` is False for tokens that only end the turn."""


# --------------------------------------------------------------------------------------------- TIS-DPO


class RewardTransform(Enum):
    """Transform of token rewards in TIS-DPO: one of the four in its code or the formula in its paper."""

    SCALE = "scale"
    RANK = "rank"
    THRESHOLD = "threshold"
    BINARY = "binary"
    PAPER = "paper"


READ = {
    RewardTransform.SCALE: ("low", "high", "least", "most"),
    RewardTransform.RANK: ("least", "most"),
    RewardTransform.THRESHOLD: ("low", "high"),
    RewardTransform.BINARY: ("top_percent",),
    RewardTransform.PAPER: ("low", "high", "k", "mu"),
}
ROUNDING = 100  # the authors' code rounds a log-ratio to two decimals


def rank_values(values: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Returns the rank of each value in ascending order, from 0; equal values share their mean rank."""
    below = (values[None, :] < values[:, None]).sum(-1)
    upto = (values[None, :] <= values[:, None]).sum(-1)
    return (below + upto - 1).to(values.dtype) / 2


@dataclass(frozen=True)
class TISDPO:
    """TIS-DPO's weights, from the reward v = log pi_positive - log pi_negative (negated on the rejected side).

    ``scale``: v clipped to [``low``, ``high``] and mapped linearly onto [``least``, ``most``]. ``rank``: its rank among
    the response's tokens, mapped onto the same range; a single token gets the middle. ``threshold``: v clipped to [low,
    high], signed. ``binary``: 1 for the highest ``top_percent`` of the tokens (rounded down), 0 for the others. These
    four round v to two decimals and assign weight 0 to the end of turn. ``paper``: ``k exp(mu c)`` on chosen and ``k
    exp(-mu c)`` on rejected tokens, where c is the unrounded log-ratio clipped to [low, high]; every token gets a
    weight.

    Source: exlaw/TIS-DPO, ``preference_datasets.py``. Differs from it in how ties are handled: here tied tokens share a
    rank, and ``binary`` prefers the earlier ones. A response that is truncated before its end of turn keeps the weight
    of its last token.
    """

    transform: RewardTransform = RewardTransform.SCALE
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
        """Returns whether factors can be negative: only with ``threshold`` and a negative ``low``."""
        return self.transform is RewardTransform.THRESHOLD and self.low < 0

    def unused_keys(self) -> dict[str, str]:
        """Lists the keys of other transforms."""
        every = dict.fromkeys(name for names in READ.values() for name in names)
        why = f"weights.form.transform={self.transform.value}"
        return {name: why for name in every if name not in READ[self.transform]}

    def __call__(self, raw: Float[Tensor, " n"], words: Bool[Tensor, " n"], side: str) -> Float[Tensor, " n"]:
        """Returns the weights of a response."""
        sign = 1 if side == "chosen" else -1
        if self.transform is RewardTransform.PAPER:
            return self.k * torch.exp(sign * self.mu * raw.clamp(self.low, self.high))
        weights = torch.zeros_like(raw)
        # Halves are rounded to even, as in Python and NumPy.
        weights[words] = self._text_token_weights(sign * (raw[words] * ROUNDING).round() / ROUNDING)
        return weights

    def _text_token_weights(self, rewards: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        count = rewards.numel()
        if self.transform is RewardTransform.THRESHOLD:
            return rewards.clamp(self.low, self.high)
        if self.transform is RewardTransform.BINARY:
            top = torch.argsort(rewards, descending=True, stable=True)[: int(count * self.top_percent / 100)]
            return torch.zeros_like(rewards).index_fill(0, top, 1.0)
        if self.transform is RewardTransform.RANK:
            share = rank_values(rewards) / (count - 1) if count > 1 else torch.full_like(rewards, 0.5)
        else:
            share = (rewards.clamp(self.low, self.high) - self.low) / (self.high - self.low)
        return self.least + share * (self.most - self.least)


# --------------------------------------------------------------------------------------------- cDPO, TGDPO


@dataclass(frozen=True)
class CriticalTokens:
    """cDPO's weights from c, a token's probability under softmax(2 z_positive - z_negative).

    Rejected tokens get 1 - c. Chosen tokens get c, or 1 with ``only_neg`` (the default in the authors' code). The end
    of turn gets 1. Source: chenzhiling9954/Critical-Tokens-Matter, ``src/pipeline.py``.
    """

    only_neg: bool = True

    signed: ClassVar[bool] = False
    statistic: ClassVar[str] = CONTRAST

    def __call__(self, raw: Float[Tensor, " n"], words: Bool[Tensor, " n"], side: str) -> Float[Tensor, " n"]:
        """Returns the weights of a response, from log c."""
        one = torch.ones_like(raw)
        if side == "chosen" and self.only_neg:
            return one
        # A log-probability may be slightly above 0 because of rounding.
        weights = raw.clamp(max=0.0).exp() if side == "chosen" else -torch.expm1(raw.clamp(max=0.0))
        return torch.where(words, weights, one)


@dataclass(frozen=True)
class TokenGuided:
    """TGDPO's factors: ``1 + alpha beta q`` on chosen and ``1 - alpha beta q`` on rejected tokens; may be negative.

    q is the log-ratio of a trained preference model (positive) and the reference (negative), so ``beta q`` is that
    model's implicit reward; the authors' code uses a single beta for this and for the objective. Source:
    dvlab-research/TGDPO, ``src/llamafactory/train/tgdpo/trainer.py``.
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
    """Factors for the training tokens, computed by ``form`` from a comparison of ``positive`` and ``negative``."""

    positive: ScorerModel
    negative: ScorerModel
    form: ContrastForm

    name: ClassVar[str] = "contrast"

    def __post_init__(self) -> None:
        check_scorers(self.scorers)
        asked = [name for name, model in self.scorers.items() if model.instruction is not None]
        if asked and self.compares_whole:
            raise UserError(
                f"weights.{asked[0]}.instruction: {type(self.form).__name__} compares two models on the same prompt; "
                f"set weights.{asked[0]}.instruction=null, or use a different form"
            )

    @property
    def signed(self) -> bool:  # type: ignore[override]
        """Returns whether the form can produce negative weights."""
        return self.form.signed

    @property
    def scorers(self) -> Mapping[str, ScorerModel]:
        """Returns both models by their config keys."""
        return {"positive": self.positive, "negative": self.negative}

    @property
    def statistic(self) -> str:
        """Returns the statistic that the form compares."""
        return self.form.statistic

    @property
    def compares_whole(self) -> bool:  # type: ignore[override]
        """Returns whether the form needs full next-token distributions instead of the tokens' own probabilities."""
        return self.statistic == CONTRAST

    def select(self, captured: PairWeights, layers: tuple[StoredRow, ...]) -> PairWeights:
        """Converts the stored comparison into weights."""
        return apply_rule(captured, self.form)
