"""TI-DPO's importance: gradients with respect to the policy's input embeddings, mixed with a Gaussian prior."""

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnpo.schema import Kind, PreferenceBatch, TokenStats, check_range
from attnpo.weights.base import OnlineSource


class NormalizationScope(Enum):
    """Tokens over which a response's weights are normalised: prompt and response, or only the response."""

    SEQUENCE = "sequence"
    RESPONSE = "response"


def position_prior(
    counts: Int[Tensor, " rows"], first: Int[Tensor, " rows"], width: int, divisor: float, dtype: torch.dtype
) -> Float[Tensor, "rows R"]:
    """Returns a Gaussian over the tokens 0..n-1 of each row (sum 1), at ``width`` positions starting at ``first``.

    Its mean is (n-1)/2 and its standard deviation is max(1, n / divisor). Values beyond n-1 are meaningless; rows with
    n = 0 are all 0.
    """
    longest = int(max(int(counts.max()), int(first.max()) + width)) if counts.numel() else width
    places = torch.arange(longest, device=counts.device, dtype=dtype)
    length = counts.to(dtype)[:, None]
    bell = torch.exp(-0.5 * ((places - (length - 1) / 2) / (length / divisor).clamp(min=1.0)) ** 2)
    bell = torch.where(places < length, bell, torch.zeros_like(bell))
    bell = bell / bell.sum(-1, keepdim=True).clamp(min=torch.finfo(dtype).tiny)
    return bell.gather(1, first[:, None] + torch.arange(width, device=counts.device))


def importance_weights(
    scores: Float[Tensor, "rows R"],
    mask: Bool[Tensor, "rows R"],
    before: Float[Tensor, " rows"],
    tokens_before: Int[Tensor, " rows"],
    lam: float,
    divisor: float,
) -> Float[Tensor, "rows R"]:
    """Returns ``n (lam s_t / sum s + (1 - lam) prior_t)`` on the response's tokens.

    The weights have mean 1 over all n tokens in scope.

    ``before`` and ``tokens_before``: sum and count of the in-scope scores before the response. A row without a positive
    score uses only the prior; a row with a single token has weight 0 (latent-lm/TIDPO).
    """
    zero = torch.zeros((), dtype=scores.dtype, device=scores.device)
    scores = torch.where(mask, scores, zero)
    counts = tokens_before + mask.sum(-1)
    total = (scores.sum(-1) + before)[:, None]
    prior = position_prior(counts, tokens_before, mask.shape[1], divisor, scores.dtype)
    mixed = lam * scores / torch.where(total == 0, torch.ones_like(total), total) + (1 - lam) * prior
    weights = torch.where(total == 0, prior, mixed) * counts.to(scores.dtype)[:, None]
    return torch.where(mask & (counts > 1)[:, None], weights, zero)


@dataclass(frozen=True)
class Gradient(OnlineSource):
    """TI-DPO's token importance: factors from the current policy in every step, computed separately for each response.

    ``lam``: weight of the gradients; the prior gets the rest (0.7 in the TI-DPO paper, 0.2 in its code).
    ``prior_sigma_div``: n divided by this is the prior's standard deviation (8 in the code, 4 in the paper). ``scope``:
    the tokens to normalise over. TI-DPO's code uses prompt and response in its TDPO step but only the response in its
    DPO step. The weights of prompt tokens are discarded.
    """

    lam: float = 0.7
    prior_sigma_div: float = 8.0
    scope: NormalizationScope = NormalizationScope.SEQUENCE

    name: ClassVar[str] = "gradient"
    kind: ClassVar[Kind] = Kind.FACTOR
    statistics: ClassVar[frozenset[str]] = frozenset({"input_gradient"})

    def __post_init__(self) -> None:
        check_range("weights", "[0, 1]", lam=self.lam)
        check_range("weights", "(0, inf)", prior_sigma_div=self.prior_sigma_div)

    def weights(
        self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch
    ) -> Float[Tensor, "rows R"]:
        """Returns the batch's factors, computed from the policy's gradients with respect to its input embeddings."""
        scores = policy.input_gradient
        if scores is None:
            raise ValueError("weights=gradient needs the statistic input_gradient, but it was not computed")
        before, tokens_before = scores.prompt, scores.prompt_tokens
        if self.scope is NormalizationScope.RESPONSE:
            before, tokens_before = torch.zeros_like(before), torch.zeros_like(tokens_before)
        mask = batch.main.response_mask
        return importance_weights(scores.response, mask, before, tokens_before, self.lam, self.prior_sigma_div)
