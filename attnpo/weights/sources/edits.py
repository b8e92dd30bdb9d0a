"""Weights on the tokens where the two responses of a pair differ (DDPO from RLHF-V; FIGA uses the same tokens)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from attnpo.schema import SIDES, EncodedResponse, Kind, PreferencePair, UserError, check_at_least
from attnpo.text.alignment import mark_differing_tokens
from attnpo.weights.base import TextSource


@dataclass(frozen=True)
class Edits(TextSource):
    """Factors: ``changed`` for tokens that the other response lacks at this position, ``same`` for shared tokens.

    Shared runs of fewer than ``min_match`` tokens count as changed. Tokens that contain no response text (end of turn)
    count as shared. ``average`` divides the factors by their sum, so the sum of the log-ratios becomes a weighted mean;
    if all factors of a response are 0, they stay 0.

    Unlike DDPO, which uses its own diff, this class compares the responses with the token alignment in
    ``text.alignment``. FIGA's loss is not implemented.
    """

    changed: float = 3.0
    same: float = 1.0
    min_match: int = 3
    average: bool = False

    name: ClassVar[str] = "edits"
    kind: ClassVar[Kind] = Kind.FACTOR

    def __post_init__(self) -> None:
        check_at_least("weights", 0, changed=self.changed, same=self.same)
        if self.changed == self.same == 0:
            raise UserError("weights.changed and weights.same are both 0, so all weights would be 0: raise one of them")
        check_at_least("weights", 1, min_match=self.min_match)

    def weigh_pair(
        self, pair: PreferencePair, encoded: Mapping[str, EncodedResponse]
    ) -> dict[str, Float[Tensor, " _"]]:
        """Returns the factors of both responses on their training tokens, float32."""
        holding = {
            side: [place for place, (start, end) in enumerate(encoded[side].offsets) if end > start] for side in SIDES
        }
        chosen, rejected = ([encoded[side].response_ids[place] for place in holding[side]] for side in SIDES)
        found = {}
        for side, changed in zip(SIDES, mark_differing_tokens(chosen, rejected, self.min_match), strict=True):
            row = torch.full((len(encoded[side].response_ids),), self.same, dtype=torch.float64)
            row[torch.tensor(holding[side], dtype=torch.long)[changed]] = self.changed
            found[side] = (row / row.sum() if self.average and bool(row.any()) else row).float()
        return found
