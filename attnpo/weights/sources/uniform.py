"""Equal weights: the control that turns TwDPO into DPO."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from attnpo.schema import EncodedResponse, Kind, PairWeights, PreferencePair, UserError
from attnpo.weights.base import Tools
from attnpo.weights.layers import Row
from attnpo.weights.postprocess import Postprocess


@dataclass(frozen=True)
class Uniform:
    """1/m on each of the m training tokens, end of turn included, with |y| = m: TwDPO + Uniform is DPO."""

    kind: ClassVar[Kind] = Kind.DISTRIBUTION
    signed: ClassVar[bool] = False
    tokens: ClassVar[str] = "train"
    requires: ClassVar[frozenset[str]] = frozenset()
    postprocess: ClassVar[Postprocess | None] = None
    neutral: ClassVar[bool] = True

    def resolve(self, num_layers: int) -> "Uniform":
        """Returns the source itself: it has no layer."""
        return self

    def capture_layers(self, num_layers: int) -> tuple[int, ...]:
        """No layer."""
        return ()

    def wanted(self) -> tuple[int, ...]:
        """No layer."""
        return ()

    def capture_fingerprint(self) -> dict[str, object]:
        """The name of the source; nothing is stored under it."""
        return {"source": "uniform"}

    def capture(self, pairs: Sequence[PreferencePair], tools: Tools, layers: tuple[Row, ...]) -> list[PairWeights]:
        """Raises UserError: there is nothing to store."""
        raise UserError("weights=uniform needs no capture; run attnpo.fit directly")

    def select(self, captured: PairWeights, layers: tuple[Row, ...]) -> PairWeights:
        """``captured`` as it is."""
        return captured

    def weigh(self, pair: PreferencePair, side: str, encoded: EncodedResponse) -> Float[Tensor, "m"]:
        """1/m for each of the m training tokens, float32."""
        count = len(encoded.response_ids)
        return torch.full((count,), 1.0 / max(1, count))
