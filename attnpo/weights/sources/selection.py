"""SePO's selection: the tokens on which an oracle and its reference differ most (Yang et al. 2024)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnpo.judge.layers import Row
from attnpo.schema import PairWeights, check_range
from attnpo.weights.base import ScorerModel
from attnpo.weights.sources.scorers import ComparedSource, check_scorers, weighed_by


def select_top(scores: Float[Tensor, " n"], top_fraction: float, highest: bool) -> Bool[Tensor, " n"]:
    """Marks the ``int(top_fraction (n - 1))`` highest (or lowest) scores, first of equals, never the first token's.

    Source: SteveKGYang/SePO, ``token_score.py``.
    """
    kept = torch.zeros_like(scores, dtype=torch.bool)
    candidates = scores[1:]
    order = torch.argsort(candidates, descending=highest, stable=True)
    kept[1 + order[: int(top_fraction * candidates.numel())]] = True
    return kept


@dataclass(frozen=True)
class Selection(ComparedSource):
    """``top_fraction`` of the tokens: on the chosen side those that the oracle raises most, on the rejected lowest.

    The score of a token is its log-probability under ``oracle`` less that under ``reference``, the model that the
    oracle was trained from; the end of turn is a candidate. Kept tokens weigh n / (number kept), so that an objective
    that means over a response means over the kept ones (SePO's loss is ``objective=simpo objective.beta=1
    objective.gamma_beta_ratio=0``), or 1 each with ``as_mean`` false. A pair of which one side keeps nothing says
    nothing: its weights are 0 on both sides.
    """

    oracle: ScorerModel
    reference: ScorerModel
    top_fraction: float = 0.3
    as_mean: bool = True

    name: ClassVar[str] = "selection"

    def __post_init__(self) -> None:
        check_scorers(self.scorers)
        check_range("weights", "(0, 1]", top_fraction=self.top_fraction)

    @property
    def scorers(self) -> Mapping[str, ScorerModel]:
        """Returns both models by their keys."""
        return {"oracle": self.oracle, "reference": self.reference}

    def select(self, captured: PairWeights, layers: tuple[Row, ...]) -> PairWeights:
        """Returns the weights of the kept tokens; 0 everywhere where a side keeps none."""
        chosen = weighed_by(captured, self._weights)
        empty = [not bool(part.weights.any()) for item in chosen.rounds for part in (item.chosen, item.rejected)]
        return weighed_by(captured, lambda raw, words, side: torch.zeros_like(raw)) if any(empty) else chosen

    def _weights(self, raw: Float[Tensor, " n"], words: Bool[Tensor, " n"], side: str) -> Float[Tensor, " n"]:
        kept = select_top(raw, self.top_fraction, highest=side == "chosen").to(raw.dtype)
        return kept * (raw.numel() / kept.sum().clamp(min=1)) if self.as_mean else kept
