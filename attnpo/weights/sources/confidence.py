"""Selections of tokens by the current policy's own numbers, anew in every step: ConfPO, Selective-DPO, high entropy."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnpo.schema import Kind, PreferenceBatch, TokenStats, check_range
from attnpo.weights.base import OnlineSource, PairedWeights

TIE = 1e-9
"""Nats within which a log-probability equals the mean: what rounding leaves of equal ones, in float64."""


def below_mean(logps: Float[Tensor, "rows R"], mask: Bool[Tensor, "rows R"]) -> Bool[Tensor, "rows R"]:
    """Returns tokens below the mean probability of their response; none where all are equal (ConfPO)."""
    exact = torch.where(mask, logps.double(), -torch.inf)
    mean = exact.logsumexp(-1, keepdim=True) - mask.sum(-1, keepdim=True).clamp(min=1).double().log()
    return mask & (exact < mean - TIE)


def above_quantile(
    scores: Float[Tensor, "rows R"], mask: Bool[Tensor, "rows R"], quantile: float
) -> Bool[Tensor, "rows R"]:
    """Returns tokens with a score of at least the response's ``quantile`` (linear between ranks)."""
    exact = torch.where(mask, scores.double(), torch.nan)
    return mask & (exact >= exact.nanquantile(quantile, dim=-1, keepdim=True))


def highest(scores: Float[Tensor, "rows R"], mask: Bool[Tensor, "rows R"], share: float) -> Bool[Tensor, "rows R"]:
    """Returns the ceil(share n) of a response's n tokens with the highest scores, and equals of the last."""
    exact = torch.where(mask, scores.double(), -torch.inf)
    # 1e-9: a share such as 0.2 is not exact, and 0.2 of 5 tokens is one.
    count = (share * mask.sum(-1, keepdim=True).double() - 1e-9).ceil().long().clamp(min=1)
    least = exact.sort(-1, descending=True).values.gather(-1, count - 1)
    return mask & (exact >= least)


def alike(kept: Bool[Tensor, "rows R"], dtype: torch.dtype) -> Float[Tensor, "rows R"]:
    """Returns 1/k on each of a row's k kept tokens, 0 on the others; a row that keeps none is all 0."""
    return kept.to(dtype) / kept.sum(-1, keepdim=True).clamp(min=1).to(dtype)


def both_kept(kept: Bool[Tensor, "rows R"]) -> Float[Tensor, " pairs"]:
    """Returns 1 for each pair that keeps a token on both sides, 0 for the others."""
    chosen, rejected = kept.any(-1).chunk(2)
    return (chosen & rejected).float()


@dataclass(frozen=True)
class Confidence(OnlineSource):
    """ConfPO: the tokens less probable than their response's mean probability, alike; equal weights until training.

    Under SimPO the weighted sums are means over these tokens, which is the method. A pair of which one side keeps no
    token (a single one, or all equally probable) has pair weight 0. Source: FIELD 1.1, hee-suk-yoon/ConfPO.
    """

    name: ClassVar[str] = "confidence"

    def weights(self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch) -> PairedWeights:
        """Returns 1/k on the k kept tokens of each row, and 0 or 1 for each pair."""
        kept = below_mean(policy.logps, batch.main.response_mask)
        return alike(kept, policy.logps.dtype), both_kept(kept)


@dataclass(frozen=True)
class Selective(OnlineSource):
    """Selective-DPO: tokens that the policy has not yet learnt, as factors of 0 and 1; equal weights until training.

    The score is ``r - p`` on the chosen and ``p - r`` on the rejected response (log-probabilities of reference and
    policy); tokens at or above the response's ``quantile`` of it are kept. At the first step, when policy and reference
    are the same, every token is. A quantile of 0.6 keeps about 40 % (Dongzhijin/SDPO, ``sdpo_threshold``).
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
        """Returns 1 on the kept tokens, 0 on the others. ValueError without the reference's log-probabilities."""
        if reference is None:
            raise ValueError("weights=selective read the reference's log-probabilities, and none were computed")
        gained = policy.logps.double() - reference.logps.double()
        scores = torch.cat([-gained[: batch.pairs], gained[batch.pairs :]])
        return above_quantile(scores, batch.main.response_mask, self.quantile).to(policy.logps.dtype)


@dataclass(frozen=True)
class Entropy(OnlineSource):
    """Tokens at which the policy is least settled, alike: the highest entropies; equal weights until training.

    ``share``: of each response's tokens (0.2 in arXiv 2506.01939, which selects over a batch of samples in RL; here
    each response selects for itself). One token at least is kept.
    """

    share: float = 0.2

    name: ClassVar[str] = "entropy"
    statistics: ClassVar[frozenset[str]] = frozenset({"vocab:entropy"})

    def __post_init__(self) -> None:
        check_range("weights", "(0, 1]", share=self.share)

    def weights(
        self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch
    ) -> Float[Tensor, "rows R"]:
        """Returns 1/k on the k kept tokens of each row. ValueError without the policy's entropies."""
        if "entropy" not in policy.vocab:
            raise ValueError("weights=entropy read the statistic vocab:entropy, and it was not computed")
        return alike(highest(policy.vocab["entropy"], batch.main.response_mask, self.share), policy.logps.dtype)
