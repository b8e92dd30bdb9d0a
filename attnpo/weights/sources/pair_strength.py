"""Weights of whole pairs, tokens alike: from the policy in every step (WPO, MWPO), or from a column of the data.

They multiply a pair's loss, so every objective takes them, those that read no token weights too.
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
    """Returns the mean over each row's tokens, in float64; 0 for a row without any."""
    kept = torch.where(mask, values.double(), 0.0)
    return kept.sum(-1) / mask.sum(-1).clamp(min=1)


@dataclass(frozen=True)
class WPO(OnlineSource):
    """Pairs weigh as much as the current policy might have written them: ``min(1, exp(A(c_w) + A(c_l)))``.

    ``c_t = p_t - log sum_v prob_v^2``: a token's log-probability against what a token drawn from the policy itself has
    on average; A is the mean over a response's tokens. ``clamp`` false leaves weights above 1 (TRL's version). The
    policy is the current one, and no gradient passes. Source: WPO (Zhou et al. 2024, arXiv 2406.11827), with weights
    aligned to samples.
    """

    clamp: bool = True

    name: ClassVar[str] = "wpo"
    neutral: ClassVar[bool] = True
    statistics: ClassVar[frozenset[str]] = frozenset({"vocab:collision"})

    def weights(self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch) -> PairedWeights:
        """Returns equal token weights, and a weight for each pair. ValueError without the policy's collisions."""
        if "collision" not in policy.vocab:
            raise ValueError("weights=wpo read the statistic vocab:collision, and it was not computed")
        chosen, rejected = token_mean(
            policy.logps.double() - policy.vocab["collision"].double(), batch.main.response_mask
        ).chunk(2)
        found = (chosen + rejected).exp()
        return batch.main.token_weights["reward"], (found.clamp(max=1.0) if self.clamp else found).float()


@dataclass(frozen=True)
class MWPO(OnlineSource):
    """Pairs weigh more that the policy ranks clearly, and whose rejected response is longer.

    ``sigmoid(m)^alpha sigmoid(length_scale (n_l - n_w))^gamma`` with the implicit reward margin
    ``m = beta (S(d_w) - S(d_l))``, ``d = p - r`` summed over the response; ``per_token`` takes
    ``margin_scale beta (A(d_w) - A(d_l))``, means over the tokens. ``beta`` is that of the loss. No gradient passes.
    Source: AIR-hl/MWPO, ``mwpo_trainer.py`` (alpha and gamma are its weight_alpha and weight_beta).
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

    def unread(self) -> dict[str, str]:
        """Keys without effect as the others stand, with the reason."""
        found = {} if self.per_token else {"margin_scale": "weights.per_token=false"}
        if self.alpha == 0:
            found |= dict.fromkeys(("beta", "per_token", "margin_scale"), "weights.alpha=0")
        return found | ({"length_scale": "weights.gamma=0"} if self.gamma == 0 else {})

    def weights(self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch) -> PairedWeights:
        """Returns the batch's equal token weights, and a weight for each pair. ValueError without a reference."""
        if reference is None:
            raise ValueError("weights=mwpo read the reference's log-probabilities, and none were computed")
        mask = batch.main.response_mask
        counts = mask.sum(-1).double()
        rewards = self.beta * token_mean(policy.logps.double() - reference.logps.double(), mask)
        rewards = rewards * (self.margin_scale if self.per_token else counts)
        margin = rewards[: batch.pairs] - rewards[batch.pairs :]
        longer = counts[batch.pairs :] - counts[: batch.pairs]
        # Powers as sums of logarithms: a margin of minus hundreds gives a tiny weight, never 0 to the power of 0.
        strength = self.alpha * torch.nn.functional.logsigmoid(margin)
        length = self.gamma * torch.nn.functional.logsigmoid(self.length_scale * longer)
        return batch.main.token_weights["reward"], (strength + length).exp().float()


@dataclass(frozen=True)
class PairColumn(Uniform):
    """Column of the data with a weight of 0 or more for each pair; it multiplies the pair's loss as it is.

    The normaliser stays the number of pairs in the step. A pair of weight 0 trains nothing, and is counted.
    """

    column: str

    name: ClassVar[str] = "pair_column"

    @property
    def columns(self) -> tuple[str, ...]:  # type: ignore[override]
        """Returns the column of the data that is read beside prompt and responses."""
        return (self.column,)

    def capture_fingerprint(self) -> dict[str, object]:
        """Returns the names of the source and of its column."""
        return {"source": self.name, "column": self.column}

    def pair_weight(self, pair: PreferencePair) -> float:
        """Returns the column's value for ``pair``. UserError naming the pair for one that is no weight."""
        return column_number(pair.extra, self.column, pair.pair_id)


def column_number(row: Mapping[str, object], column: str, pair_id: str) -> float:
    """Returns the number of 0 or more that a row has in ``column``; UserError naming the pair otherwise."""
    if column not in row:
        raise UserError(
            f"weights.column={column}: pair {pair_id} has no such column; it has: {', '.join(sorted(row)) or 'none'}. "
            "Name one of these, or add the column to the data"
        )
    value = row[column]
    if not isinstance(value, int | float) or not (isfinite(value) and value >= 0):
        raise UserError(
            f"weights.column={column}: pair {pair_id}: expected a finite number of 0 or more, got {value!r}; correct "
            "the column, or take such rows out"
        )
    return float(value)
