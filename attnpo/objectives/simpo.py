"""SimPO (Meng et al. 2024, Eq. 6): length-averaged log-probabilities, a target margin, no reference."""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from attnpo.objectives.base import mean_factors, split_pairs, weighted_sum
from attnpo.objectives.terms import LossType, Sft, SftTerm, check_beta, margin_loss
from attnpo.schema import ObjectiveOutput, PreferenceBatch, TokenStats, check_range


def simpo_loss(
    policy_logps: Float[Tensor, "rows R"],
    weights: Float[Tensor, "rows R"],
    mask: Bool[Tensor, "rows R"],
    beta: float,
    gamma: float,
    label_smoothing: float = 0.0,
    loss_type: LossType = LossType.SIGMOID,
) -> ObjectiveOutput:
    """Returns the SimPO loss of each pair: ``-log sigmoid(beta (A(p_w) - A(p_l)) - gamma)``.

    ``A(p) = sum_t a_t p_t`` is the mean of the policy's log-probabilities p (nats); a (``weights``) is 1/n or another
    distribution; ``gamma`` is the target margin itself. Rewards are ``beta A(p)``. Source: Meng et al. 2024, Eq. 6
    (arXiv 2405.14734); princeton-nlp/SimPO, ``scripts/simpo_trainer.py``.

    Example:
        >>> import torch
        >>> from attnpo.losses import simpo_loss
        >>> policy = torch.tensor([[-0.5, -1.0], [-2.0, -0.3]])  # rows: chosen, rejected
        >>> mask, weights = torch.ones(2, 2, dtype=torch.bool), torch.tensor([[0.9, 0.1], [0.5, 0.5]])
        >>> simpo_loss(policy, weights, mask, beta=2.0, gamma=1.0).losses
        tensor([0.5981])
    """
    chosen, rejected = split_pairs(beta * weighted_sum(policy_logps, weights, mask))
    losses = margin_loss(chosen - rejected - gamma, loss_type, label_smoothing)
    return ObjectiveOutput(losses, chosen.detach(), rejected.detach())


@dataclass(frozen=True)
class SimPO:
    """``-log sigmoid(beta (A(p_w) - A(p_l)) - gamma)``; A is the token mean, and gamma is ``beta gamma_beta_ratio``.

    The config key is the ratio, as in the authors' code; TRL's ``simpo_gamma`` is gamma itself. Token weights replace
    1/n in A.
    """

    beta: float = 2.0
    gamma_beta_ratio: float = 0.5
    loss_type: LossType = LossType.SIGMOID
    label_smoothing: float = 0.0
    sft_weight: float = 0.0
    sft: Sft = Sft.BATCH

    requires = frozenset({"token_weights"})

    def __post_init__(self) -> None:
        check_beta(self.beta, self.label_smoothing, self.loss_type)
        check_range("objective", "[0, inf)", gamma_beta_ratio=self.gamma_beta_ratio, sft_weight=self.sft_weight)

    @property
    def gamma(self) -> float:
        """Returns the target margin."""
        return self.beta * self.gamma_beta_ratio

    @property
    def _sft_term(self) -> SftTerm:
        return SftTerm(sft_coef=self.sft_weight, sft=self.sft)

    def unused_keys(self) -> dict[str, str]:
        """Returns the keys that have no effect in this config, mapped to the reasons."""
        return self._sft_term.unused_keys()

    def __call__(self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch) -> ObjectiveOutput:
        """Computes losses and rewards ``beta A(p)`` for the batch."""
        given = policy.logps, mean_factors(batch.main), batch.main.response_mask, self.beta, self.gamma
        return self._sft_term.with_sft(simpo_loss(*given, self.label_smoothing, self.loss_type), policy, batch)
