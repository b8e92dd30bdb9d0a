"""Kahneman-Tversky Optimization (Ethayarajh et al. 2024, section 4) on pairs of a desirable and an undesirable example.

The reference point z is one number per optimizer step, the mean over all its micro-batches and ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from attnpo.objectives.base import LengthScaled, Reduction, log_ratios, logps_of, reduce, split_pairs, weighted_sum
from attnpo.objectives.terms import check_beta
from attnpo.schema import ObjectiveOutput, PreferenceBatch, RowGroup, TokenStats, check_range


def example_losses(
    rewards: Float[Tensor, " rows"],
    z: Float[Tensor, ""],
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> tuple[Float[Tensor, " pairs"], Float[Tensor, " pairs"]]:
    """Computes the losses of the desirable and undesirable examples from their rewards ``b S(d)``."""
    desirable, undesirable = split_pairs(rewards - beta * z)
    # The exponential of a log-sigmoid is the sigmoid, with a gradient that does not vanish where it rounds to 1.
    return desirable_weight * F.logsigmoid(-desirable).exp(), undesirable_weight * F.logsigmoid(undesirable).exp()


def kto_loss(
    policy_logps: Float[Tensor, "rows R"],
    reference_logps: Float[Tensor, "rows R"],
    weights: Float[Tensor, "rows R"],
    mask: Bool[Tensor, "rows R"],
    lengths: Float[Tensor, " rows"] | None,
    mismatched_mean: Float[Tensor, ""],
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> ObjectiveOutput:
    """Returns the KTO loss of each pair.

    It is the mean of ``lam_D sigmoid(-b (S(d_w) - z))`` and ``lam_U sigmoid(-b (z - S(d_l)))``.

    ``S(d) = |y| sum_t a_t d_t`` sums the log-ratios d (nats); rewards are ``b S(d)``, where b is ``beta``.
    ``z = max(0, mismatched_mean)`` has no gradient and is returned as the extra ``kl``; ``mismatched_mean`` is the mean
    of the unweighted S(d) over the step's mismatched rows. Source: Ethayarajh et al. 2024, section 4 (arXiv
    2402.01306); TRL 1.16 ``kto_trainer.py``.

    Example:
        >>> import torch
        >>> from attnpo.losses import kto_loss
        >>> policy, reference = torch.tensor([[-0.5, -1.0], [-2.0, -0.3]]), torch.full((2, 2), -1.0)
        >>> mask, weights = torch.ones(2, 2, dtype=torch.bool), torch.tensor([[0.9, 0.1], [0.5, 0.5]])
        >>> lengths = mask.sum(-1).float()
        >>> mean = torch.tensor(0.2)  # of the log-ratio sums of prompts with other prompts' responses
        >>> kto_loss(policy, reference, weights, mask, lengths, mean, beta=0.1).losses
        tensor([0.4850])
    """
    rewards = beta * weighted_sum(log_ratios(policy_logps, reference_logps, mask), weights, mask, lengths)
    z = mismatched_mean.to(rewards.dtype).clamp(min=0).detach()
    desirable, undesirable = example_losses(rewards, z, beta, desirable_weight, undesirable_weight)
    losses = 0.5 * (desirable + undesirable)
    return ObjectiveOutput(losses, *split_pairs(rewards.detach()), extras={"kl": z.expand(len(losses))})


@dataclass(frozen=True)
class KTO(LengthScaled):
    """``lam_D sigmoid(-b (S_w(d) - z))`` for chosen responses, ``lam_U sigmoid(-b (z - S_w(d)))`` for rejected ones.

    ``z = max(0, mean of S(d))`` over the step's mismatched rows (prompts paired with responses to a different prompt),
    without gradient; the mean is clamped, not each row. The loss of a pair is the mean of its two examples, so the mean
    over pairs is the mean over all examples. S_w applies the token weights like TwDPO (``length_scale``,
    ``length_from``); z is not weighted. With uniform weights this is the KTO of TRL 1.16, except that z covers the
    whole step instead of a micro-batch.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    requires = frozenset({"reference", "token_weights", "ahead:mismatched", "several_pairs"})

    def __post_init__(self) -> None:
        check_beta(self.beta)
        check_range(
            "objective", "(0, inf)", desirable_weight=self.desirable_weight, undesirable_weight=self.undesirable_weight
        )

    def step_sums(
        self, policy: TokenStats, reference: TokenStats | None, rows: RowGroup
    ) -> dict[str, Float[Tensor, ""]]:
        """Returns the sum of S(d) over the mismatched rows and the number of those rows; together they determine z.

        Raises:
            ValueError: no reference statistics were given.
        """
        ratios = log_ratios(policy.logps.detach(), logps_of(reference, "its mismatched rows"), rows.response_mask)
        sums = reduce(ratios, None, rows.response_mask, Reduction.SUM)
        return {"kl_sum": sums.double().sum(), "kl_rows": sums.new_tensor(len(sums)).double()}

    def mismatched_mean(self, state: Mapping[str, Float[Tensor, ""]]) -> Float[Tensor, ""]:
        """Returns the mean of S(d) over the mismatched rows of the step, before clamping.

        Raises:
            ValueError: no mismatched rows were scored before this step.
        """
        if "kl_sum" not in state or "kl_rows" not in state:
            raise ValueError(
                "KTO needs the sums over the step's mismatched rows, which the batch state does not contain"
            )
        return state["kl_sum"] / state["kl_rows"]

    def __call__(self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch) -> ObjectiveOutput:
        """Computes losses and weighted rewards ``b S_w(d)``; the extra ``kl`` is z, the same for every pair."""
        return kto_loss(
            policy.logps,
            logps_of(reference),
            *self.weighted(batch.main),
            self.mismatched_mean(batch.state),
            self.beta,
            self.desirable_weight,
            self.undesirable_weight,
        )
