"""Computes each sequence's expert load in a mixture-of-experts model, and the load-balancing loss."""

import logging
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import PreTrainedModel

from attnpo.models.backbone import PROBE_LENGTH, eval_mode, is_materialised, vocabulary_size
from attnpo.models.description import backbone_of
from attnpo.schema import ModelInputs, UserError

log = logging.getLogger(__name__)

ROUTER = "router"
"""Name of the request for expert loads."""
COEFFICIENT = "router_aux_loss_coef"
CHOSEN = "num_experts_per_tok"
RECORD = {"output_router_logits": True}
"""Keyword arguments that make a backbone return its router logits."""


def check_router(model: PreTrainedModel) -> None:
    """Raises ``UserError`` if the model has no routers or defines no load-balancing loss."""
    what, config = type(model).__name__, model.config.get_text_config()
    asked = f"model.{COEFFICIENT}: expected a mixture of experts with a load-balancing loss, but {what}"
    for name in (COEFFICIENT, CHOSEN):
        if getattr(config, name, None) is None:
            raise UserError(f"{asked} has no {name} in its config; set model.{COEFFICIENT}=0")
    if not is_materialised(model):
        return
    ids = torch.arange(PROBE_LENGTH, device=model.device)[None] % vocabulary_size(model)
    with torch.no_grad(), eval_mode(model):
        output = backbone_of(model)(input_ids=ids, use_cache=False, **RECORD)
    if not getattr(output, "router_logits", None):
        raise UserError(f"{asked} returns no router logits (output_router_logits); set model.{COEFFICIENT}=0")


def log_unused_coefficient(model: PreTrainedModel) -> None:
    """Logs that the load-balancing coefficient in a model's config, if it has one, is not used."""
    config = model.config.get_text_config()
    if (own := getattr(config, COEFFICIENT, None)) and getattr(config, CHOSEN, None):
        told = "model.%s=0: the load-balancing loss is off, although the config of %s sets a coefficient of %g"
        log.info(told, COEFFICIENT, type(model).__name__, own)


def expert_loads(
    logits: Sequence[Float[Tensor, "..."]], inputs: ModelInputs, chosen: int
) -> Float[Tensor, "rows 2 experts"]:
    """Counts each sequence's tokens per expert over all layers, and sums the router probabilities.

    ``logits``: router logits per layer, [tokens experts] or [batch T experts]; ``chosen``: experts per token. Padding
    is not counted; a shared prompt counts for both responses.
    """
    counts: list[Tensor] = []
    sums: list[Tensor] = []
    tokens = sequence_token_mask(inputs)
    for layer in logits:
        probabilities = torch.softmax(layer.flatten(0, -2).float(), -1)
        mask = tokens.to(probabilities)
        top = torch.zeros_like(probabilities).scatter_(1, probabilities.topk(chosen, -1).indices, 1.0)
        counts.append(mask @ top)
        sums.append(mask @ probabilities)
    return torch.stack([torch.stack(counts).sum(0), torch.stack(sums).sum(0)], 1)


def sequence_token_mask(inputs: ModelInputs) -> Bool[Tensor, "rows tokens"]:
    """Returns a mask of the tokens (flat over batch and T) that belong to each response row's sequence."""
    batch, width = inputs.input_ids.shape
    place = torch.arange(batch * width, device=inputs.input_ids.device)
    if inputs.segments is not None:
        lines = inputs.segments if inputs.segment_rows is None else inputs.segments[inputs.segment_rows.argsort()]
        start, count, prefix, shared = lines.to(place.device, non_blocking=True)[:, :, None].unbind(1)
        own = (place >= start) & (place < start + count)
        return own | ((place >= prefix) & (place < prefix + shared))
    rows = place // width == torch.arange(batch, device=place.device)[:, None]
    return rows if inputs.attention_mask is None else rows & inputs.attention_mask.flatten().bool()


def load_balancing_loss(routing: Float[Tensor, "rows 2 experts"]) -> Float[Tensor, " pairs"]:
    """Computes the load-balancing loss of each pair's two sequences.

    Equations 4 to 6 of Switch Transformer (https://huggingface.co/papers/2101.03961) as in
    ``load_balancing_loss_func``: the number of experts times the sum over experts of (share of tokens routed to the
    expert) x (mean probability of the expert), over a pair's tokens and all layers. If the load is even, the loss
    equals the number of experts per token.
    """
    pairs = len(routing) // 2
    counts, sums = (routing[:pairs] + routing[pairs:]).unbind(1)
    tokens = sums.detach().sum(-1, keepdim=True)  # each token's probabilities sum to 1 in every layer
    return routing.shape[-1] * ((counts / tokens) * (sums / tokens)).sum(-1)
