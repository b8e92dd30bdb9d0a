"""Finds the backbone and vocabulary head of a Hugging Face causal LM, and checks that they reproduce its logits.

Both are found through transformers' accessors and config fields, never by model name. The check runs on a few tokens.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from attnpo.models.description import backbone_of
from attnpo.models.logps import LMHead, compute_logits
from attnpo.schema import UserError

logger = logging.getLogger(__name__)

PROBE_LENGTH = 4
# Both paths run the same backbone kernels, so they differ only by rounding in the head's matrix product.
PROBE_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
PROBE_TOLERANCE_LOW_PRECISION = 3e-2


@dataclass(frozen=True)
class ModelParts:
    """Backbone (token ids to final hidden states) and head (hidden states to logits) of a model."""

    backbone: nn.Module
    head: nn.Linear
    scale: float
    softcap: float | None

    def projection(self) -> LMHead:
        """Returns the head as a map from hidden states to final logits."""
        return LMHead.from_linear(self.head, scale=self.scale, softcap=self.softcap)


def find_parts(model: PreTrainedModel) -> ModelParts | None:
    """Finds the backbone and head of a causal LM; returns None unless the head is a single plain linear layer.

    A head with adapters or 4-bit weights is not plain. The soft-cap, divisor and scale factor applied to the logits are
    read from the text config (``final_logit_softcapping``, ...).
    """
    backbone = backbone_of(model)
    head: object = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if not isinstance(head, nn.Linear) or list(head.children()) or not head.weight.is_floating_point():
        return None
    if backbone is model:
        return None
    fields = model.config.get_text_config().to_dict()
    softcap, divide, multiply = (fields.get(k) for k in ("final_logit_softcapping", "logits_scaling", "logit_scale"))
    scale = (1.0 if multiply is None else float(multiply)) / (1.0 if divide is None else float(divide))
    return ModelParts(backbone, head, scale, None if softcap is None else float(softcap))


def layer_stack(model: nn.Module) -> nn.ModuleList:
    """Returns the decoder blocks: the module list with the most parameters. Raises ValueError if there is none."""
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not stacks:
        raise ValueError(f"{type(model).__name__} has no list of layers")
    return max(stacks, key=parameter_count)


def parameter_count(module: nn.Module) -> int:
    """Counts all parameters, trainable or frozen; tied parameters are counted once."""
    return sum(parameter.numel() for parameter in module.parameters())


def vocabulary_size(model: PreTrainedModel) -> int:
    """Returns the number of rows in the input embedding table, or 2 if the embeddings are not a plain table."""
    table: object = model.get_input_embeddings()
    return int(table.num_embeddings) if isinstance(table, nn.Embedding) else 2


def final_hidden_states(backbone: nn.Module, input_ids: Tensor, **inputs: object) -> Tensor:
    """Computes hidden states [batch T d] after the final norm, without a key-value cache."""
    hidden: Tensor = backbone(input_ids=input_ids, use_cache=False, **inputs).last_hidden_state
    return hidden


def is_materialised(model: nn.Module) -> bool:
    """Checks that every parameter is a plain tensor with data, neither on the meta device nor sharded."""
    return not any(parameter.is_meta or isinstance(parameter, DTensor) for parameter in model.parameters())


@torch.no_grad()
def has_exact_parts(model: PreTrainedModel) -> bool:
    """Checks on four tokens that the backbone and head reproduce the model's logits; if not, logs the difference."""
    parts = find_parts(model)
    if parts is None:
        logger.warning("%s: the vocabulary head is not a plain linear layer; full logits are used", _class_name(model))
        return False
    with eval_mode(model):
        ids = torch.arange(PROBE_LENGTH, device=parts.head.weight.device)[None] % parts.head.weight.shape[0]
        expected = model(input_ids=ids, use_cache=False).logits[0]
        ours = compute_logits(final_hidden_states(parts.backbone, ids)[0], parts.projection())
    bound = probe_bound(expected)
    gap = float((ours - expected).abs().max())
    if gap > bound:
        logger.warning(
            "%s: logits computed from backbone and head differ from the model's by %.3g (bound %.3g); full logits are "
            "used instead, which is slower and needs more memory",
            *(_class_name(model), gap, bound),
        )
    return gap <= bound


@torch.no_grad()
def first_position(model: PreTrainedModel) -> int:
    """Runs the model to find the position id of a row's first token: 0, or the padding id plus 1 (as in RoBERTa).

    Raises:
        UserError: the model numbers positions differently.
    """
    backbone, padding = backbone_of(model), getattr(model.config.get_text_config(), "pad_token_id", None)
    start = padding + 1 if isinstance(padding, int) else 0
    ids = torch.arange(start, start + PROBE_LENGTH, device=model.device)[None] % vocabulary_size(model)
    with eval_mode(model):
        own = final_hidden_states(backbone, ids)
        for first in dict.fromkeys((0, start)):
            positions = torch.arange(first, first + PROBE_LENGTH, device=ids.device)[None]
            ours = final_hidden_states(backbone, ids, position_ids=positions)
            if not float((ours - own).abs().max()) > probe_bound(own):  # NaN from a broken model is reported elsewhere
                return first
    raise UserError(
        f"{_class_name(model)} does not number token positions from 0 or from its padding id plus 1, so its inputs "
        "cannot be built: choose another model"
    )


def probe_bound(expected: Tensor) -> float:
    """Returns the largest deviation from ``expected`` that rounding can explain."""
    tolerance = PROBE_TOLERANCE.get(expected.dtype, PROBE_TOLERANCE_LOW_PRECISION)
    return tolerance * max(1.0, float(expected.abs().max()))


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Puts ``model`` in eval mode inside the context, then restores each module's mode, even after an error."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def training_mode(model: nn.Module) -> Iterator[None]:
    """Puts ``model`` in training mode without dropout in the context, then restores modes, buffers and random state."""
    modes = {module: module.training for module in model.modules()}
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    try:
        with torch.random.fork_rng(list(devices)):
            for module in modes:
                module.training = not isinstance(module, nn.Dropout)
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for name, buffer in model.named_buffers():
            if name in kept and buffer.shape == kept[name].shape:
                buffer.copy_(kept[name])


def require_causal_lm(model: nn.Module) -> PreTrainedModel:
    """Checks that ``model`` is a Hugging Face causal LM and returns it.

    Raises:
        UserError: an accessor is missing; the message names it.
    """
    for needed in ("get_decoder", "get_output_embeddings", "config"):
        if not hasattr(model, needed):
            raise UserError(
                f"expected a Hugging Face causal language model, got {_class_name(model)} without {needed!r}: load the "
                "model with attnpo.models.loading.load_model"
            )
    return cast(PreTrainedModel, model)


def _class_name(model: nn.Module) -> str:
    return type(model).__name__


def freeze(model: nn.Module) -> nn.Module:
    """Puts the model in eval mode, disables all gradients, and returns it."""
    return model.eval().requires_grad_(False)
