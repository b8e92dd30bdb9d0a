"""TI-DPO: token-importance guided DPO, a weighted TDPO2 loss plus a triplet loss with a sampled anchor response."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnpo.objectives.base import Reduction, log_ratios, logps_of, reduce, split_by_side, split_pairs, weighted_sum
from attnpo.objectives.tdpo import reference_kl, tdpo2_margin
from attnpo.objectives.terms import check_beta, sigmoid_loss
from attnpo.schema import ObjectiveOutput, PreferenceBatch, Sampling, TokenStats, check_range

ANCHOR = Sampling(max_new_tokens=32, temperature=0.8, top_p=0.95, top_k=50)


class Triplet(NamedTuple):
    """Triplet term of each pair, and whether the pair's anchor shares a position with both responses."""

    losses: Float[Tensor, " pairs"]
    measured: Bool[Tensor, " pairs"]


def squared_distance(
    first: Float[Tensor, "pairs A"],
    first_mask: Bool[Tensor, "pairs A"],
    second: Float[Tensor, "pairs R"],
    second_mask: Bool[Tensor, "pairs R"],
) -> tuple[Float[Tensor, " pairs"], Bool[Tensor, " pairs"]]:
    """Returns ``sum_t (x_t - y_t)^2`` over the shared response indices t, and whether any are shared."""
    width = min(first.shape[1], second.shape[1])
    both = first_mask[:, :width] & second_mask[:, :width]
    gap = torch.where(both, first[:, :width] - second[:, :width], torch.zeros_like(first[:, :width]))
    return gap.square().sum(-1), both.any(-1)


def triplet_term(
    ratios: Float[Tensor, "rows R"],
    mask: Bool[Tensor, "rows R"],
    anchor: Float[Tensor, "pairs A"],
    anchor_mask: Bool[Tensor, "pairs A"],
    margin: float,
) -> Triplet:
    """Returns ``relu(|d_a - d_w|^2 - |d_a - d_l|^2 + margin)`` of per-token log-ratios d.

    Returns 0 if either distance covers no tokens because the anchor or a response is empty. If both are empty, only the
    constant margin would remain; if one is empty, the other would have nothing to be compared to.
    """
    half = len(anchor)
    chosen, near = squared_distance(anchor, anchor_mask, ratios[:half], mask[:half])
    rejected, far = squared_distance(anchor, anchor_mask, ratios[half:], mask[half:])
    losses = torch.relu(chosen - rejected + margin)
    return Triplet(torch.where(near & far, losses, torch.zeros_like(losses)), near & far)


def tidpo_loss(
    policy_logps: Float[Tensor, "rows R"],
    reference_logps: Float[Tensor, "rows R"],
    weights: Float[Tensor, "rows R"],
    mask: Bool[Tensor, "rows R"],
    position_kl: Float[Tensor, "rows R"] | None,
    triplet: Triplet | None,
    beta: float,
    alpha: float,
    gamma_triplet: float,
) -> ObjectiveOutput:
    """Returns the TI-DPO loss of each pair.

    ``-log sigmoid(beta [M_w - M_l - alpha (K_l - sg(K_w))]) + gamma_triplet triplet``.

    ``M = sum_t w_t d_t`` sums the log-ratios d with factors w (``weights``), and ``K = sum_t KL(ref || policy)`` sums
    ``position_kl`` without weights, all in nats. sg stops the gradient; rewards are ``beta (M + K)``. Without
    ``position_kl`` there is no K (the weighted DPO form of the paper), and without ``triplet`` (``triplet_term``) the
    last term is dropped. The extras are the unweighted rewards ``beta S(d)``, K, the triplet term before scaling by
    ``gamma_triplet``, and an indicator of pairs without that term. Source: latent-lm/TIDPO.

    Example:
        >>> import torch
        >>> from attnpo.losses import tidpo_loss
        >>> policy, reference = torch.tensor([[-0.5, -1.0], [-2.0, -0.3]]), torch.full((2, 2), -1.0)
        >>> mask, weights = torch.ones(2, 2, dtype=torch.bool), torch.tensor([[0.9, 0.1], [0.5, 0.5]])
        >>> kl = torch.tensor([[0.2, 0.1], [0.3, 0.1]])  # token_kl(...)
        >>> tidpo_loss(policy, reference, 2 * weights, mask, kl, None, beta=0.1, alpha=0.5, gamma_triplet=0.0).losses
        tensor([0.6373])
    """
    ratios = log_ratios(policy_logps, reference_logps, mask)
    weighted = weighted_sum(ratios, weights, mask)
    extras = split_by_side("unweighted", beta * reduce(ratios.detach(), None, mask, Reduction.SUM))
    if position_kl is None:
        chosen, rejected = split_pairs(weighted)
        margin, rewards = chosen - rejected, weighted.detach()
    else:
        kl = reduce(position_kl, None, mask, Reduction.SUM)
        margin, rewards = tdpo2_margin(weighted, kl, alpha), (weighted + kl).detach()
        extras |= split_by_side("seq_kl", kl.detach())
    losses = sigmoid_loss(beta * margin)
    if triplet is not None:
        losses = losses + gamma_triplet * triplet.losses
        extras |= {"triplet": triplet.losses.detach(), "triplet_unmeasured": (~triplet.measured).to(losses.dtype)}
    return ObjectiveOutput(losses, *split_pairs(beta * rewards), extras)


@dataclass(frozen=True)
class TIDPO:
    """``-log sigmoid(beta [M_w - M_l - alpha (K_l - sg K_w)]) + gamma_triplet * triplet``, ``M = S(w d)``.

    ``w``: token weights as factors (TI-DPO's own: weights=gradient). ``K``: KL(reference || policy) summed over the
    response's positions, unweighted; sg stops the gradient on the chosen side only (TDPO2). ``kl: false`` drops K,
    which gives the weighted DPO form of the paper's equations. The triplet term compares per-token log-ratios with
    those of an ``anchor`` response sampled from the policy; gradients also flow into the anchor. Sources:
    latent-lm/TIDPO, ``trainers.py``; Vance0124/Token-level-Direct-Preference-Optimization, ``trainers.py``.
    """

    beta: float = 0.01
    alpha: float = 0.5
    gamma_triplet: float = 0.1
    triplet_margin: float = 0.001
    kl: bool = True
    anchor: Sampling = field(default=ANCHOR)

    def __post_init__(self) -> None:
        check_beta(self.beta)
        check_range(
            "objective",
            "[0, inf)",
            alpha=self.alpha,
            gamma_triplet=self.gamma_triplet,
            triplet_margin=self.triplet_margin,
        )

    def unused_keys(self) -> dict[str, str]:
        """Returns the keys that have no effect in this config, mapped to the reasons."""
        idle = {} if self.kl else {"alpha": "objective.kl=false"}
        if not self.gamma_triplet:
            idle |= dict.fromkeys(("triplet_margin", "anchor"), "objective.gamma_triplet=0")
        return idle

    @property
    def requires(self) -> frozenset[str]:
        """Requires the reference and factors, with ``kl`` the KL at each token, and an anchor for a triplet term."""
        kl = {"joint:kl_ref_policy"} if self.kl else set()
        anchor = {"group:anchor"} if self.gamma_triplet else set()
        return frozenset({"reference", "token_weights", "factors"} | kl | anchor)

    def __call__(self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch) -> ObjectiveOutput:
        """Computes losses, rewards ``beta (M + K)`` and the extras of ``tidpo_loss``."""
        rows = batch.main
        return tidpo_loss(
            policy.logps,
            logps_of(reference),
            rows.token_weights["reward"],
            rows.response_mask,
            reference_kl(policy) if self.kl else None,
            self._triplet(policy, reference, batch) if self.gamma_triplet else None,
            self.beta,
            self.alpha,
            self.gamma_triplet,
        )

    def _triplet(self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch) -> Triplet:
        """Computes the triplet term per pair; averaged over the step, it equals the original code's batch mean."""
        rows, mask = batch.groups["anchor"], batch.main.response_mask
        other = None if reference is None else reference.groups["anchor"]
        ratios = log_ratios(policy.logps, logps_of(reference), mask)
        anchor = log_ratios(policy.groups["anchor"].logps, logps_of(other), rows.response_mask)
        return triplet_term(ratios, mask, anchor, rows.response_mask, self.triplet_margin)
