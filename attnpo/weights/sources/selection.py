"""SePO's selection: the tokens on which an oracle and its reference differ most (Yang et al. 2024)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnpo.judge.layers import StoredRow
from attnpo.schema import PairWeights, check_range
from attnpo.weights.base import ScorerModel
from attnpo.weights.sources.scorers import ComparedSource, apply_rule, check_scorers


def select_top(scores: Float[Tensor, " n"], top_fraction: float, highest: bool) -> Bool[Tensor, " n"]:
    """Marks the ``int(top_fraction (n - 1))`` highest (or lowest) scores, never the first token; earlier ties win.

    Source: SteveKGYang/SePO, ``token_score.py``.
    """
    kept = torch.zeros_like(scores, dtype=torch.bool)
    candidates = scores[1:]
    order = torch.argsort(candidates, descending=highest, stable=True)
    kept[1 + order[: int(top_fraction * candidates.numel())]] = True
    return kept


@dataclass(frozen=True)
class Selection(ComparedSource):
    """Selects ``top_fraction`` of the tokens: the highest scores on the chosen side, the lowest on the rejected side.

    A token's score is its log-probability under ``oracle`` minus that under ``reference``, the model that the oracle
    was trained from. The end of turn can be selected too. Selected tokens get n / (number selected), so an objective
    that averages over the response in fact averages over the selected tokens. If ``as_mean`` is false, they get 1.
    SePO's loss is ``objective=simpo objective.beta=1 objective.gamma_beta_ratio=0``. If one side has no selected token,
    the weights of the pair are 0 on both sides.
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
        """Returns both models by their config keys."""
        return {"oracle": self.oracle, "reference": self.reference}

    def select(self, captured: PairWeights, layers: tuple[StoredRow, ...]) -> PairWeights:
        """Returns the weights of the selected tokens; all 0 if no token is selected on one side."""
        chosen = apply_rule(captured, self._selection_weights)
        empty = [not bool(part.weights.any()) for item in chosen.rounds for part in (item.chosen, item.rejected)]
        return apply_rule(captured, lambda raw, words, side: torch.zeros_like(raw)) if any(empty) else chosen

    def _selection_weights(self, raw: Float[Tensor, " n"], words: Bool[Tensor, " n"], side: str) -> Float[Tensor, " n"]:
        kept = select_top(raw, self.top_fraction, highest=side == "chosen").to(raw.dtype)
        return kept * (raw.numel() / kept.sum().clamp(min=1)) if self.as_mean else kept
