"""Equal weights: the control under which TwDPO equals DPO."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from attnpo.schema import EncodedResponse, PreferencePair
from attnpo.weights.base import TextSource, equal_weights


@dataclass(frozen=True)
class Uniform(TextSource):
    """Weight 1/m on each of the m training tokens, including the end of turn, with |y| = m; TwDPO then equals DPO."""

    name: ClassVar[str] = "uniform"
    neutral: ClassVar[bool] = True

    def weigh(self, pair: PreferencePair, side: str, encoded: EncodedResponse) -> Float[Tensor, " m"]:
        """Returns 1/m for each of the m training tokens, float32."""
        return equal_weights(encoded)
