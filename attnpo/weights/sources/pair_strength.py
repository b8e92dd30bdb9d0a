"""Weights for whole pairs with equal token weights: from the policy in each step (WPO, MWPO), or from a data column.

Pair weights multiply a pair's loss, so every objective accepts them, including objectives without token weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnpo.schema import PreferenceBatch, PreferencePair, TokenStats, UserError, check_at_least, check_range
from attnpo.weights.base import OnlineSource, PairedWeights
from attnpo.weights.sources.uniform import Uniform


def token_mean(values: Float[Tensor, "rows R"], mask: Bool[Tensor, "rows R"]) -> Float[Tensor, " rows"]:
    """Returns the mean over each row's tokens, in float64; 0 for a row without tokens."""
    kept = torch.where(mask, values.double(), 0.0)
    return kept.sum(-1) / mask.sum(-1).clamp(min=1)


@dataclass(frozen=True)
class WPO(OnlineSource):
    """Weights pairs by how likely the current policy is to generate the responses: ``min(1, exp(A(c_w) + A(c_l)))``.

    ``c_t = p_t - log sum_v prob_v^2`` compares a token's log-probability with the log of the expected probability of a
    token sampled from the policy; A is the mean over a response's tokens. With ``clamp`` false, weights may exceed 1
    (TRL's version). The policy is the current one, without gradient. Source: WPO (Zhou et al. 2024, arXiv 2406.11827),
    with weights aligned to samples.
    """

    clamp: bool = True

    name: ClassVar[str] = "wpo"
    neutral: ClassVar[bool] = True
    statistics: ClassVar[frozenset[str]] = frozenset({"vocab:collision"})

    def weights(self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch) -> PairedWeights:
        """Returns equal token weights and a weight for each pair. ValueError if the collision statistic is missing."""
        if "collision" not in policy.vocab:
            raise ValueError("weights=wpo needs the statistic vocab:collision, but it was not computed")
        chosen, rejected = token_mean(
            policy.logps.double() - policy.vocab["collision"].double(), batch.main.response_mask
        ).chunk(2)
        found = (chosen + rejected).exp()
        return batch.main.token_weights["reward"], (found.clamp(max=1.0) if self.clamp else found).float()


@dataclass(frozen=True)
class MWPO(OnlineSource):
    """Weights pairs higher if the policy clearly separates the responses and if the rejected response is longer.

    ``sigmoid(m)^alpha sigmoid(length_scale (n_l - n_w))^gamma`` with the implicit reward margin ``m = beta (S(d_w) -
    S(d_l))``, ``d = p - r`` summed over the response; ``per_token`` uses ``margin_scale beta (A(d_w) - A(d_l))``, with
    means over the tokens. ``beta`` is the same as in the loss. No gradient flows through the weights. Source:
    AIR-hl/MWPO, ``mwpo_trainer.py`` (alpha and gamma are its weight_alpha and weight_beta).
    """

    beta: float = 0.1
    alpha: float = 0.6
    gamma: float = 0.4
    length_scale: float = 0.01
    per_token: bool = False
    margin_scale: float = 1.0

    name: ClassVar[str] = "mwpo"
    neutral: ClassVar[bool] = True
    statistics: ClassVar[frozenset[str]] = frozenset({"reference"})

    def __post_init__(self) -> None:
        check_range("weights", "(0, inf)", beta=self.beta)
        for name in ("alpha", "gamma", "length_scale", "margin_scale"):
            check_at_least("weights", 0, **{name: getattr(self, name)})

    def unused_keys(self) -> dict[str, str]:
        """Lists keys without effect under the current values, with the reason."""
        found = {} if self.per_token else {"margin_scale": "weights.per_token=false"}
        if self.alpha == 0:
            found |= dict.fromkeys(("beta", "per_token", "margin_scale"), "weights.alpha=0")
        return found | ({"length_scale": "weights.gamma=0"} if self.gamma == 0 else {})

    def weights(self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch) -> PairedWeights:
        """Returns equal token weights and a weight for each pair. ValueError if there is no reference."""
        if reference is None:
            raise ValueError("weights=mwpo needs the reference's log-probabilities, but none were computed")
        mask = batch.main.response_mask
        counts = mask.sum(-1).double()
        rewards = self.beta * token_mean(policy.logps.double() - reference.logps.double(), mask)
        rewards = rewards * (self.margin_scale if self.per_token else counts)
        margin = rewards[: batch.pairs] - rewards[batch.pairs :]
        longer = counts[batch.pairs :] - counts[: batch.pairs]
        # Powers as sums of logarithms: a margin of minus hundreds gives a tiny weight instead of 0 ** 0.
        strength = self.alpha * torch.nn.functional.logsigmoid(margin)
        length = self.gamma * torch.nn.functional.logsigmoid(self.length_scale * longer)
        return batch.main.token_weights["reward"], (strength + length).exp().float()


@dataclass(frozen=True)
class PairColumn(Uniform):
    """Weights each pair's loss by a non-negative number from a data column.

    The loss is still divided by the number of pairs in the step. A pair with weight 0 has no effect on training; such
    pairs are counted.
    """

    column: str

    name: ClassVar[str] = "pair_column"

    @property
    def columns(self) -> tuple[str, ...]:  # type: ignore[override]
        """Returns the data column that is read in addition to prompt and responses."""
        return (self.column,)

    def capture_fingerprint(self) -> dict[str, object]:
        """Returns the names of the source and its column."""
        return {"source": self.name, "column": self.column}

    def pair_weight(self, pair: PreferencePair) -> float:
        """Returns the column's value for ``pair``. UserError naming the pair if the value is not a valid weight."""
        return read_pair_weight(pair.extra, self.column, pair.pair_id)


def read_pair_weight(row: Mapping[str, object], column: str, pair_id: str) -> float:
    """Reads a number of at least 0 from ``column`` of a row; raises UserError naming the pair otherwise."""
    if column not in row:
        raise UserError(
            f"weights.column={column}: pair {pair_id} has no such column; it has: {', '.join(sorted(row)) or 'none'}. "
            "Choose one of these, or add the column to the data"
        )
    value = row[column]
    if not isinstance(value, int | float) or not (isfinite(value) and value >= 0):
        raise UserError(
            f"weights.column={column}: pair {pair_id}: expected a finite number of at least 0, got {value!r}; correct "
            "the column, or remove such rows"
        )
    return float(value)
