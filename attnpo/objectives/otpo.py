"""DPO on sums weighted by optimal transport (OTPO, Li et al. 2025); ``weights=transport`` computes them."""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from attnpo.objectives.base import logps_of
from attnpo.objectives.terms import check_beta
from attnpo.objectives.twdpo import twdpo_variant_loss
from attnpo.schema import ObjectiveOutput, PreferenceBatch, TokenStats


def otpo_loss(
    policy_logps: Float[Tensor, "rows R"],
    reference_logps: Float[Tensor, "rows R"],
    weights: Float[Tensor, "rows R"],
    mask: Bool[Tensor, "rows R"],
    beta: float,
    label_smoothing: float = 0.0,
) -> ObjectiveOutput:
    """Returns the OTPO loss of each pair: ``-log sigmoid(beta (sum_t w_wt d_wt - sum_t w_lt d_lt))``.

    d is the log-ratio of a token in nats, w (``weights``) the mass that each token keeps in the transport between the
    pair's responses (``weights.optimal_transport``). Rewards are ``beta sum_t w_t d_t``. Source: Li et al. 2025;
    Mimasss2/OTPO, ``scripts/otpo_trainer.py``.

    Example:
        >>> import torch
        >>> from attnpo.losses import otpo_loss
        >>> policy, reference = torch.tensor([[-0.5, -1.0], [-2.0, -0.3]]), torch.full((2, 2), -1.0)
        >>> mask, weights = torch.ones(2, 2, dtype=torch.bool), torch.tensor([[0.9, 0.1], [0.5, 0.5]])
        >>> otpo_loss(policy, reference, 2 * weights, mask, beta=0.1).losses
        tensor([0.6349])
    """
    return twdpo_variant_loss(policy_logps, reference_logps, weights, mask, None, beta, label_smoothing)


@dataclass(frozen=True)
class OTPO:
    """``-log sigmoid(beta (sum_t w_wt d_wt - sum_t w_lt d_lt))`` with d the per-token log-ratio and factors w.

    The form of TwDPO, but of factors alone: both sides' weights are of one plan and never scaled by a length.
    """

    beta: float = 0.01
    label_smoothing: float = 0.0

    requires = frozenset({"reference", "token_weights", "factors"})

    def __post_init__(self) -> None:
        check_beta(self.beta, self.label_smoothing)

    def __call__(self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch) -> ObjectiveOutput:
        """Losses, weighted rewards ``beta sum w d`` and, as extras, the unweighted rewards ``beta S(d)``.

        ValueError for weights that are a distribution.
        """
        rows = batch.main
        if not rows.factors:
            raise ValueError("OTPO reads factors, and the batch's token weights are a distribution")
        weights, mask = rows.token_weights["reward"], rows.response_mask
        return otpo_loss(policy.logps, logps_of(reference), weights, mask, self.beta, self.label_smoothing)
