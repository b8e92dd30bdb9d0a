"""Every objective as a function of plain tensors, for a trainer of your own: ``from attnpo import losses``.

``losses.NAME_loss`` is the formula of ``objective=NAME`` (docs/objectives.md), the very function that training calls.
It takes what a trainer has anyway, with P pairs as 2P rows, all chosen responses first, then the rejected ones in the
same order: log-probabilities of the tokens under policy and reference ``[rows T]`` in nats, a mask that is true on the
response's tokens, token weights ``[rows T]`` (a distribution over each response, such as ``uniform_weights(mask)``) and
``lengths`` ``[rows]``, the |y| that a distribution is multiplied by (None for factors, which are used as they are).
What stands off the response never matters. It gives an ``ObjectiveOutput``: ``losses`` of the pairs, which carry
gradient, ``chosen_rewards`` and ``rejected_rewards``, detached.

``token_logps`` and ``token_kl`` make the log-probabilities, the mask and the KL of TDPO, TI-DPO and TIS-DPO from the
logits and labels of a Hugging Face causal LM.

Example:
    >>> import torch
    >>> from attnpo import losses
    >>> logits = torch.zeros(2, 4, 10)  # of a policy that knows nothing; rows: chosen, rejected
    >>> labels = torch.tensor([[-100, 3, 4, 5], [-100, 3, 6, -100]])  # -100 on the prompt and on padding
    >>> logps, mask = losses.token_logps(logits, labels)
    >>> weights, lengths = losses.uniform_weights(mask), mask.sum(-1).float()
    >>> output = losses.twdpo_loss(logps, logps, weights, mask, lengths, beta=0.1)
    >>> output.losses  # log 2: policy and reference are the same
    tensor([0.6931])
"""

from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnpo.models.logps import statistics_of_logits
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

IGNORED = -100  # the label that Hugging Face's models leave out of a loss
KLS = ("kl_ref_policy", "kl_policy_ref")


def token_logps(
    logits: Float[Tensor, "rows T vocab"], labels: Int[Tensor, "rows T"]
) -> tuple[Float[Tensor, "rows T"], Bool[Tensor, "rows T"]]:
    """Returns log-probabilities of the labelled tokens, each in its label's place, and the mask of these places.

    ``logits`` are what a causal LM gives, so that place t predicts the label of place t + 1; ``labels`` are the input
    ids with -100 off the response. 0 off the mask; float32 at least, whatever the logits are in.

    Raises:
        UserError: the first place has a label, which no logit predicts.

    Example:
        >>> import torch
        >>> from attnpo.losses import token_logps
        >>> token_logps(torch.zeros(1, 3, 4), torch.tensor([[-100, 2, 0]]))
        (tensor([[ 0.0000, -1.3863, -1.3863]]), tensor([[False,  True,  True]]))
    """
    mask = _label_mask(labels)
    kept = mask[:, 1:]
    values = statistics_of_logits(logits[:, :-1][kept], labels[:, 1:][kept])["logps"]
    return values.new_zeros(mask.shape).masked_scatter(mask, values), mask


def token_kl(
    policy_logits: Float[Tensor, "rows T vocab"],
    reference_logits: Float[Tensor, "rows T vocab"],
    labels: Int[Tensor, "rows T"],
    kind: str = "kl_ref_policy",
) -> Float[Tensor, "rows T"]:
    """Returns the KL over the whole vocabulary at each labelled token in nats, laid out as ``token_logps``.

    ``kind``: "kl_ref_policy" is KL(reference || policy), which TDPO and TI-DPO read as ``position_kl``; "kl_policy_ref"
    the other way round, for TIS-DPO. Carries gradient to the policy's logits alone.

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
    values = statistics_of_logits(policy, labels[:, 1:][kept], joint=(kind,), other=reference)[f"joint:{kind}"]
    return values.new_zeros(mask.shape).masked_scatter(mask, values)


def uniform_weights(mask: Bool[Tensor, "rows T"]) -> Float[Tensor, "rows T"]:
    """Returns 1/n on each of the n tokens of a response: with them every objective is its published, unweighted form.

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
            f"labels: expected {IGNORED} in the first place of every row, whose token no logit predicts, got a label "
            f"in row {int(mask[:, 0].nonzero()[0])}; put {IGNORED} there, or a token in front (BOS)"
        )
    return mask
