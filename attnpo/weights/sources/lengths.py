"""Weights from the lengths of a pair's two responses, to counteract a preference for longer responses."""

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnpo.schema import SIDES, Kind, PreferenceBatch, TokenStats, check_range, check_seed, digest
from attnpo.weights.base import OnlineSource


class LengthRule(Enum):
    """Rule for the longer response: keep its first tokens or keep random ones."""

    TAIL = "tail"
    SUBSAMPLE = "subsample"


@dataclass(frozen=True)
class Lengths(OnlineSource):
    """Gives factor 1 to as many tokens of each response as the shorter one has, including the end of turn.

    TAIL keeps the first tokens and gives all later ones ``alpha`` (LD-DPO; 0 is POET). SUBSAMPLE draws the kept tokens
    at random in every optimizer step and gives all others 0 (SamPO); policy and reference share the draw. A draw
    depends only on ``seed``, step, pair and side; validation draws the same tokens every time.

    Lengths are counted in training tokens after truncation. Differs from SamPO's code, which draws separately for
    policy and reference.
    """

    rule: LengthRule = LengthRule.TAIL
    alpha: float = 0.5
    seed: int = 0

    name: ClassVar[str] = "lengths"
    kind: ClassVar[Kind] = Kind.FACTOR

    def __post_init__(self) -> None:
        check_range("weights", "[0, 1]", alpha=self.alpha)
        check_seed("weights.seed", self.seed)

    def unused_keys(self) -> dict[str, str]:
        """Lists the key that only affects the other rule."""
        return {"seed": "weights.rule=tail"} if self.rule is LengthRule.TAIL else {"alpha": "weights.rule=subsample"}

    def weights(
        self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch
    ) -> Float[Tensor, "rows R"]:
        """Returns the batch's factors in float32, or in the dtype of the log-probabilities if that is more precise."""
        mask = batch.main.response_mask
        shorter = torch.minimum(*mask.sum(-1).chunk(2))
        kept = self._rank_kept_tokens(batch) < torch.cat([shorter, shorter])[:, None]
        low = self.alpha if self.rule is LengthRule.TAIL else 0.0
        dtype = torch.promote_types(policy.logps.dtype, torch.float32)
        return torch.where(kept, 1.0, low).to(dtype) * mask

    def _rank_kept_tokens(self, batch: PreferenceBatch) -> Int[Tensor, "rows R"]:
        """Returns the 0-based rank of each response token in the order in which tokens are kept."""
        mask = batch.main.response_mask
        if self.rule is LengthRule.TAIL:
            return mask.cumsum(-1) - 1
        drawn = _draw_numbers(self.seed, batch).to(mask.device, non_blocking=True)
        return drawn.masked_fill(~mask, torch.inf).argsort(dim=-1).argsort(dim=-1)


def _draw_numbers(seed: int, batch: PreferenceBatch) -> Float[Tensor, "rows R"]:
    """Returns a random number per position that depends only on seed, step, pair, side and position."""
    width = batch.main.response_mask.shape[1]
    rows = []
    for side in SIDES:
        for pair_id in batch.pair_ids:
            key = int(digest([seed, batch.step, pair_id, side])[:15], 16)
            rows.append(torch.rand(width, generator=torch.Generator().manual_seed(key), dtype=torch.float64))
    return torch.stack(rows)
