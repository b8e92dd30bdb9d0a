"""Equal weights: the control that turns TwDPO into DPO."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from attnpo.schema import EncodedResponse, Kind, PreferencePair
from attnpo.weights.base import Uncaptured


@dataclass(frozen=True)
class Uniform(Uncaptured):
    """1/m on each of the m training tokens, end of turn included, with |y| = m: TwDPO + Uniform is DPO."""

    name: ClassVar[str] = "uniform"
    why_not_captured: ClassVar[str] = "weights=uniform needs no capture"
    kind: ClassVar[Kind] = Kind.DISTRIBUTION
    signed: ClassVar[bool] = False
    neutral: ClassVar[bool] = True

    def weigh(self, pair: PreferencePair, side: str, encoded: EncodedResponse) -> Float[Tensor, " m"]:
        """1/m for each of the m training tokens, float32."""
        count = len(encoded.response_ids)
        return torch.full((count,), 1.0 / max(1, count))
