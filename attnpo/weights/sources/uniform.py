"""Equal weights: the control that turns TwDPO into DPO."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from attnpo.schema import EncodedResponse, PreferencePair
from attnpo.weights.base import TextSource, equal_weights


@dataclass(frozen=True)
class Uniform(TextSource):
    """1/m on each of the m training tokens, end of turn included, with |y| = m: TwDPO + Uniform is DPO."""

    name: ClassVar[str] = "uniform"
    neutral: ClassVar[bool] = True

    def weigh(self, pair: PreferencePair, side: str, encoded: EncodedResponse) -> Float[Tensor, " m"]:
        """Returns 1/m for each of the m training tokens, float32."""
        return equal_weights(encoded)
