"""Parts of a Hugging Face causal language model: backbone, vocabulary head, and how logits follow from them.

They are located through the library's accessors and the config's fields, never by model name, and tried.
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

from attnpo.models.described import backbone_of
from attnpo.models.logps import Head, project
from attnpo.schema import UserError

logger = logging.getLogger(__name__)

PROBE_LENGTH = 4
# Both ways run the same backbone kernels, so they differ by rounding of the head's product only.
PROBE_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
PROBE_TOLERANCE_LOW_PRECISION = 3e-2


@dataclass(frozen=True)
class Parts:
    """Backbone (ids to final hidden states) and head (hidden states to logits) of one model."""

    backbone: nn.Module
    head: nn.Linear
    scale: float
    softcap: float | None

    def projection(self) -> Head:
        """Returns the head as a map from hidden states to final logits."""
        return Head.of(self.head, scale=self.scale, softcap=self.softcap)


def find_parts(model: PreTrainedModel) -> Parts | None:
    """Returns backbone and head of a causal LM; None when its head is not one plain linear layer (adapters, 4-bit).

    Cap, divisor and factor of the logits are read from the text config (``final_logit_softcapping``, ...).
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
    return Parts(backbone, head, scale, None if softcap is None else float(softcap))


def layer_stack(model: nn.Module) -> nn.ModuleList:
    """Returns the module list with the most parameters, the decoder blocks; ValueError without any."""
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not stacks:
        raise ValueError(f"{type(model).__name__} has no list of layers")
    return max(stacks, key=parameter_count)


def parameter_count(module: nn.Module) -> int:
    """Returns the number of parameters, trained or not; tied ones count once."""
    return sum(parameter.numel() for parameter in module.parameters())


def vocabulary(model: PreTrainedModel) -> int:
    """Returns the number of token ids that the model's input embeddings hold; 2 where these are no plain table."""
    table: object = model.get_input_embeddings()
    return int(table.num_embeddings) if isinstance(table, nn.Embedding) else 2


def final_hidden(backbone: nn.Module, input_ids: Tensor, **inputs: object) -> Tensor:
    """Returns hidden states [batch T d] after the final norm; no cache is kept."""
    hidden: Tensor = backbone(input_ids=input_ids, use_cache=False, **inputs).last_hidden_state
    return hidden


def is_materialised(model: nn.Module) -> bool:
    """Returns whether every parameter is a plain tensor with data: not on the meta device and not sharded."""
    return not any(parameter.is_meta or isinstance(parameter, DTensor) for parameter in model.parameters())


@torch.no_grad()
def parts_agree(model: PreTrainedModel) -> bool:
    """Returns whether backbone and head give the model's own logits on four tokens; warns once by how much not."""
    parts = find_parts(model)
    if parts is None:
        logger.warning("%s: the vocabulary head is no plain linear layer; whole logits are used", _kind(model))
        return False
    with eval_mode(model):
        ids = torch.arange(PROBE_LENGTH, device=parts.head.weight.device)[None] % parts.head.weight.shape[0]
        expected = model(input_ids=ids, use_cache=False).logits[0]
        ours = project(final_hidden(parts.backbone, ids)[0], parts.projection())
    bound = probe_bound(expected)
    gap = float((ours - expected).abs().max())
    if gap > bound:
        logger.warning(
            "%s: backbone and head differ from its own logits by %.3g (bound %.3g); whole logits are used: slower, "
            "more memory, same numbers",
            *(_kind(model), gap, bound),
        )
    return gap <= bound


@torch.no_grad()
def first_position(model: PreTrainedModel) -> int:
    """Returns the position of a text's first token, by trying: 0, or the one after the padding id (RoBERTa's kind).

    Raises ``UserError`` for a model that counts in another way.
    """
    backbone, padding = backbone_of(model), getattr(model.config.get_text_config(), "pad_token_id", None)
    start = padding + 1 if isinstance(padding, int) else 0
    ids = torch.arange(start, start + PROBE_LENGTH, device=model.device)[None] % vocabulary(model)
    with eval_mode(model):
        own = final_hidden(backbone, ids)
        for first in dict.fromkeys((0, start)):
            positions = torch.arange(first, first + PROBE_LENGTH, device=ids.device)[None]
            ours = final_hidden(backbone, ids, position_ids=positions)
            if not float((ours - own).abs().max()) > probe_bound(own):  # NaN, of a broken model, is told elsewhere
                return first
    raise UserError(
        f"{_kind(model)} counts the positions of its tokens neither from 0 nor from the one after its padding id, so "
        "prompts and responses cannot be laid out as it would; take another model"
    )


def probe_bound(expected: Tensor) -> float:
    """Returns how far numbers of a probe may lie from ``expected`` by rounding alone."""
    tolerance = PROBE_TOLERANCE.get(expected.dtype, PROBE_TOLERANCE_LOW_PRECISION)
    return tolerance * max(1.0, float(expected.abs().max()))


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Opens a context in which ``model`` is in eval mode; each module's own mode is restored, after errors too."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def training_mode(model: nn.Module) -> Iterator[None]:
    """Opens a context in training mode without dropout modules; random state and buffers are restored."""
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
    """Returns ``model`` as a Hugging Face causal LM, or a ``UserError`` naming what is missing."""
    for needed in ("get_decoder", "get_output_embeddings", "config"):
        if not hasattr(model, needed):
            raise UserError(
                f"expected a Hugging Face causal language model, got {_kind(model)} without {needed!r}; load it with "
                "attnpo.models.loading.load_model"
            )
    return cast(PreTrainedModel, model)


def _kind(model: nn.Module) -> str:
    return type(model).__name__


def frozen(model: nn.Module) -> nn.Module:
    """Returns the same model in eval mode with every gradient switched off."""
    return model.eval().requires_grad_(False)
