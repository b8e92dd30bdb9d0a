"""Selects tokens in every step by statistics of the current policy: ConfPO, Selective-DPO, high entropy."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnpo.schema import Kind, PreferenceBatch, TokenStats, check_range
from attnpo.weights.base import OnlineSource, PairedWeights

TIE = 1e-9
"""Tolerance in nats within which log-probabilities count as equal to the mean, to absorb float64 rounding errors."""


def mark_below_mean(logps: Float[Tensor, "rows R"], mask: Bool[Tensor, "rows R"]) -> Bool[Tensor, "rows R"]:
    """Marks tokens whose probability is below their response's mean (ConfPO). Marks none if all are equal."""
    exact = torch.where(mask, logps.double(), -torch.inf)
    mean = exact.logsumexp(-1, keepdim=True) - mask.sum(-1, keepdim=True).clamp(min=1).double().log()
    return mask & (exact < mean - TIE)


def mark_above_quantile(
    scores: Float[Tensor, "rows R"], mask: Bool[Tensor, "rows R"], quantile: float
) -> Bool[Tensor, "rows R"]:
    """Marks tokens whose score is at least the response's ``quantile`` (interpolated linearly between ranks)."""
    exact = torch.where(mask, scores.double(), torch.nan)
    return mask & (exact >= exact.nanquantile(quantile, dim=-1, keepdim=True))


def mark_highest(scores: Float[Tensor, "rows R"], mask: Bool[Tensor, "rows R"], share: float) -> Bool[Tensor, "rows R"]:
    """Marks the ceil(share n) highest scores of a response's n tokens, plus ties with the lowest of them."""
    exact = torch.where(mask, scores.double(), -torch.inf)
    # 1e-9, because a share such as 0.2 is not exact, and 0.2 of 5 tokens must be 1.
    count = (share * mask.sum(-1, keepdim=True).double() - 1e-9).ceil().long().clamp(min=1)
    least = exact.sort(-1, descending=True).values.gather(-1, count - 1)
    return mask & (exact >= least)


def equal_shares(kept: Bool[Tensor, "rows R"], dtype: torch.dtype) -> Float[Tensor, "rows R"]:
    """Returns 1/k for a row's k selected tokens and 0 for the others; rows without selected tokens are all 0."""
    return kept.to(dtype) / kept.sum(-1, keepdim=True).clamp(min=1).to(dtype)


def mark_pairs_with_both_sides(kept: Bool[Tensor, "rows R"]) -> Float[Tensor, " pairs"]:
    """Returns 1 for each pair with selected tokens on both sides and 0 for the others."""
    chosen, rejected = kept.any(-1).chunk(2)
    return (chosen & rejected).float()


@dataclass(frozen=True)
class Confidence(OnlineSource):
    """ConfPO: equal weights on all tokens whose probability is below their response's mean.

    Before training, all tokens get equal weights. Under SimPO the weighted sums are means over the selected tokens,
    which is the published method. A pair gets a pair weight of 0 if no token is selected on one side (because it has a
    single token or all its tokens are equally probable). Source: FIELD 1.1, hee-suk-yoon/ConfPO.
    """

    name: ClassVar[str] = "confidence"

    def weights(self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch) -> PairedWeights:
        """Returns 1/k for the k selected tokens of each row, and a weight of 0 or 1 for each pair."""
        kept = mark_below_mean(policy.logps, batch.main.response_mask)
        return equal_shares(kept, policy.logps.dtype), mark_pairs_with_both_sides(kept)


@dataclass(frozen=True)
class Selective(OnlineSource):
    """Selective-DPO: factor 1 for tokens that the policy has not learnt yet and 0 for all others.

    The score is ``r - p`` on the chosen and ``p - r`` on the rejected response (log-probabilities of reference and
    policy); tokens with a score of at least the response's ``quantile`` are kept. Before training, all tokens get equal
    weights; at the first step, when policy and reference are identical, every token is kept. A quantile of 0.6 keeps
    about 40 % (Dongzhijin/SDPO, ``sdpo_threshold``).
    """

    quantile: float = 0.6

    name: ClassVar[str] = "selective"
    kind: ClassVar[Kind] = Kind.FACTOR
    statistics: ClassVar[frozenset[str]] = frozenset({"reference"})

    def __post_init__(self) -> None:
        check_range("weights", "[0, 1]", quantile=self.quantile)

    def weights(
        self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch
    ) -> Float[Tensor, "rows R"]:
        """Returns 1 for the kept tokens and 0 for the others. ValueError if reference log-probabilities are missing."""
        if reference is None:
            raise ValueError("weights=selective needs the reference's log-probabilities, but none were computed")
        gained = policy.logps.double() - reference.logps.double()
        scores = torch.cat([-gained[: batch.pairs], gained[batch.pairs :]])
        return mark_above_quantile(scores, batch.main.response_mask, self.quantile).to(policy.logps.dtype)


@dataclass(frozen=True)
class Entropy(OnlineSource):
    """Equal weights on the tokens where the policy's entropy is highest.

    Before training, all tokens get equal weights. ``share``: share of each response's tokens to keep (0.2 in arXiv
    2506.01939, which selects over a batch of samples in RL; here each response is treated separately). At least one
    token is kept.
    """

    share: float = 0.2

    name: ClassVar[str] = "entropy"
    statistics: ClassVar[frozenset[str]] = frozenset({"vocab:entropy"})

    def __post_init__(self) -> None:
        check_range("weights", "(0, 1]", share=self.share)

    def weights(
        self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch
    ) -> Float[Tensor, "rows R"]:
        """Returns 1/k for the k kept tokens of each row. ValueError if the policy's entropies are missing."""
        if "entropy" not in policy.vocab:
            raise ValueError("weights=entropy needs the statistic vocab:entropy, but it was not computed")
        return equal_shares(
            mark_highest(policy.vocab["entropy"], batch.main.response_mask, self.share), policy.logps.dtype
        )
