"""Equal weights: the control that turns TwDPO into DPO."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from attnpo.schema import EncodedResponse, PairWeights, PreferencePair, UserError
from attnpo.weights.base import Tools, Unlayered
from attnpo.weights.layers import Row
from attnpo.weights.postprocess import Postprocess


@dataclass(frozen=True)
class Uniform(Unlayered):
    """1/m on each of the m training tokens, end of turn included, with |y| = m: TwDPO + Uniform is DPO."""

    name: ClassVar[str] = "uniform"
    why_not_captured: ClassVar[str] = "weights=uniform needs no capture"
    rows: ClassVar[tuple[int, ...]] = ()
    tokens: ClassVar[str] = "train"
    requires: ClassVar[frozenset[str]] = frozenset()
    postprocess: ClassVar[Postprocess | None] = None
    neutral: ClassVar[bool] = True

    def capture_fingerprint(self) -> dict[str, object]:
        """The name of the source; nothing is stored under it."""
        return {"source": self.name}

    def capture(self, pairs: Sequence[PreferencePair], tools: Tools, layers: tuple[Row, ...]) -> list[PairWeights]:
        """Raises UserError: there is nothing to store."""
        raise UserError(f"{self.why_not_captured}; run attnpo.fit directly")

    def weigh(self, pair: PreferencePair, side: str, encoded: EncodedResponse) -> Float[Tensor, "m"]:
        """1/m for each of the m training tokens, float32."""
        count = len(encoded.response_ids)
        return torch.full((count,), 1.0 / max(1, count))
