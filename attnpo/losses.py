"""All objectives as functions of plain tensors, for use in your own trainer: ``from attnpo import losses``.

``losses.NAME_loss`` implements ``objective=NAME`` (docs/objectives.md); training calls the same function. P pairs are
passed as 2P rows: all chosen responses first, then the rejected ones in the same order. The arguments are
log-probabilities of the tokens under policy and reference ``[rows T]`` in nats, a mask that is true on response tokens,
token weights ``[rows T]`` (a distribution over each response, e.g. ``uniform_weights(mask)``) and ``lengths``
``[rows]``, the |y| that a distribution is multiplied by (None for factors, which are used as is). Values outside the
response are ignored. The result is an ``ObjectiveOutput``: ``losses`` per pair, with gradient, and the detached
``chosen_rewards`` and ``rejected_rewards``.

``token_logps`` and ``token_kl`` compute the log-probabilities, the mask, and the KL used by TDPO, TI-DPO and TIS-DPO
from the logits and labels of a Hugging Face causal LM.

Example:
    >>> import torch
    >>> from attnpo import losses
    >>> logits = torch.zeros(2, 4, 10)  # an untrained policy; rows: chosen, rejected
    >>> labels = torch.tensor([[-100, 3, 4, 5], [-100, 3, 6, -100]])  # -100 on the prompt and on padding
    >>> logps, mask = losses.token_logps(logits, labels)
    >>> weights, lengths = losses.uniform_weights(mask), mask.sum(-1).float()
    >>> output = losses.twdpo_loss(logps, logps, weights, mask, lengths, beta=0.1)
    >>> output.losses  # log 2: policy and reference are equal
    tensor([0.6931])
"""

from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnpo.models.logps import statistics_from_logits
from attnpo.objectives.cpo import cpo_loss as cpo_loss
from attnpo.objectives.dpo import dpo_loss as dpo_loss
from attnpo.objectives.ipo import ipo_loss as ipo_loss
from attnpo.objectives.kto import kto_loss as kto_loss
from attnpo.objectives.orpo import orpo_loss as orpo_loss
from attnpo.objectives.rdpo import rdpo_loss as rdpo_loss
from attnpo.objectives.rrhf import rrhf_loss as rrhf_loss
from attnpo.objectives.simpo import simpo_loss as simpo_loss
from attnpo.objectives.slic_hf import slic_hf_loss as slic_hf_loss
from attnpo.objectives.tdpo import tdpo1_loss as tdpo1_loss
from attnpo.objectives.tdpo import tdpo2_loss as tdpo2_loss
from attnpo.objectives.terms import LossType as LossType
from attnpo.objectives.terms import Sft as Sft
from attnpo.objectives.terms import add_sft as add_sft
from attnpo.objectives.terms import chosen_nll as chosen_nll
from attnpo.objectives.tidpo import tidpo_loss as tidpo_loss
from attnpo.objectives.tidpo import triplet_term as triplet_term
from attnpo.objectives.tis_dpo import tis_dpo_loss as tis_dpo_loss
from attnpo.objectives.twdpo import otpo_loss as otpo_loss
from attnpo.objectives.twdpo import twdpo_loss as twdpo_loss
from attnpo.objectives.twdpo import twdpo_variant_loss as twdpo_variant_loss
from attnpo.schema import ObjectiveOutput as ObjectiveOutput
from attnpo.schema import UserError, check_choice

IGNORED = -100  # the label that Hugging Face models ignore in the loss
KLS = ("kl_ref_policy", "kl_policy_ref")


def token_logps(
    logits: Float[Tensor, "rows T vocab"], labels: Int[Tensor, "rows T"]
) -> tuple[Float[Tensor, "rows T"], Bool[Tensor, "rows T"]]:
    """Returns the log-probability of each labelled token, at the label's position, and the mask of those positions.

    ``logits`` come from a causal LM, so position t predicts the label at position t + 1; ``labels`` are the input ids,
    with -100 outside the response. Values outside the mask are 0. The result is at least float32 for any input dtype.

    Raises:
        UserError: the first position has a label, which no logit predicts.

    Example:
        >>> import torch
        >>> from attnpo.losses import token_logps
        >>> token_logps(torch.zeros(1, 3, 4), torch.tensor([[-100, 2, 0]]))
        (tensor([[ 0.0000, -1.3863, -1.3863]]), tensor([[False,  True,  True]]))
    """
    mask = _label_mask(labels)
    kept = mask[:, 1:]
    values = statistics_from_logits(logits[:, :-1][kept], labels[:, 1:][kept])["logps"]
    return values.new_zeros(mask.shape).masked_scatter(mask, values), mask


def token_kl(
    policy_logits: Float[Tensor, "rows T vocab"],
    reference_logits: Float[Tensor, "rows T vocab"],
    labels: Int[Tensor, "rows T"],
    kind: str = "kl_ref_policy",
) -> Float[Tensor, "rows T"]:
    """Returns the KL over the whole vocabulary at each labelled token, in nats and in the layout of ``token_logps``.

    ``kind``: "kl_ref_policy" is KL(reference || policy), the ``position_kl`` of TDPO and TI-DPO; "kl_policy_ref" is the
    reverse, for TIS-DPO. Gradient flows to the policy's logits only.

    Example:
        >>> import torch
        >>> from attnpo.losses import token_kl
        >>> logits = torch.tensor([[[0.0, 1.0], [0.0, 0.0]]])
        >>> token_kl(logits, torch.zeros(1, 2, 2), torch.tensor([[-100, 0]]))  # log((1 + e) / 2) - 1/2
        tensor([[0.0000, 0.1201]])
    """
    check_choice("kind", kind, KLS)
    mask = _label_mask(labels)
    kept = mask[:, 1:]
    policy, reference = policy_logits[:, :-1][kept], reference_logits[:, :-1][kept]
    values = statistics_from_logits(policy, labels[:, 1:][kept], joint=(kind,), other=reference)[f"joint:{kind}"]
    return values.new_zeros(mask.shape).masked_scatter(mask, values)


def uniform_weights(mask: Bool[Tensor, "rows T"]) -> Float[Tensor, "rows T"]:
    """Returns weights of 1/n for the n tokens of each response; they reduce any objective to its unweighted form.

    Example:
        >>> import torch
        >>> from attnpo.losses import uniform_weights
        >>> uniform_weights(torch.tensor([[False, True, True]]))
        tensor([[0.0000, 0.5000, 0.5000]])
    """
    return mask.float() / mask.sum(-1, keepdim=True).clamp(min=1)


def _label_mask(labels: Int[Tensor, "rows T"]) -> Bool[Tensor, "rows T"]:
    mask = labels != IGNORED
    if bool(mask[:, :1].any()):
        raise UserError(
            f"labels: no logit predicts the first token of a row, so its label must be {IGNORED}; row "
            f"{int(mask[:, 0].nonzero()[0])} has a label there: set it to {IGNORED}, or prepend a BOS token"
        )
    return mask
