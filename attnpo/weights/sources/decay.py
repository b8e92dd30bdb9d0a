"""Weights that decay with position in the response (D2PO)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from attnpo.schema import EncodedResponse, Kind, PreferencePair, UserError, check_range
from attnpo.weights.base import TextSource

EXPONENTS = (0, 1)


@dataclass(frozen=True)
class Decay(TextSource):
    """Factors ``gamma ** t`` on the training tokens in order, including the end of turn.

    ``first_exponent``: exponent of the first token. It is 1 in D2PO's code, where the first token already decays; 0
    gives the first token a factor of 1. The margins with 1 and with 0 differ by a factor of gamma.
    """

    gamma: float = 0.98
    first_exponent: int = 1

    name: ClassVar[str] = "decay"
    kind: ClassVar[Kind] = Kind.FACTOR

    def __post_init__(self) -> None:
        check_range("weights", "(0, 1]", gamma=self.gamma)
        if self.first_exponent not in EXPONENTS:
            raise UserError(
                f"weights.first_exponent: expected 1 (D2PO's code) or 0 (no decay of the first token), got "
                f"{self.first_exponent}"
            )

    def weigh(self, pair: PreferencePair, side: str, encoded: EncodedResponse) -> Float[Tensor, " m"]:
        """Returns the float32 factors of the m training tokens, computed in float64."""
        places = torch.arange(len(encoded.response_ids), dtype=torch.float64)
        return (self.gamma ** (places + self.first_exponent)).float()
