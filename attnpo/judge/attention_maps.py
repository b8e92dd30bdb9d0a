"""Attention rows and rollout from the maps that a model gives itself with eager attention, one prompt at a time.

The last of the ways to read a judge: for classes whose attention does not go through transformers' AttentionInterface,
or that take their mask apart. All maps of a prompt are held at once: layers x heads x T x T numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from attnpo.judge.attention_tap import Probe
from attnpo.models.backbone import Parts
from attnpo.models.described import attending_layers, backbone_of
from attnpo.models.logps import project
from attnpo.schema import UserError

ROUNDING = 2e-2  # by how much a row's sum may pass 1, in bfloat16


@dataclass(frozen=True)
class GivenMap:
    """One layer's attention map as the model gives it."""

    maps: Float[Tensor, "batch heads T T"]

    def rows(self, last: Int[Tensor, " batch"]) -> Float[Tensor, "batch heads T"]:
        """Returns the softmax row of each sequence's position ``last``, per query head; float32 or better."""
        rows = self.maps[torch.arange(len(last), device=last.device), :, last]
        return rows.to(torch.promote_types(rows.dtype, torch.float32))

    def pull(self, weights: Float[Tensor, "batch T"]) -> Float[Tensor, "batch T"]:
        """``weights @ A`` for the head-mean attention map A."""
        pulled = torch.zeros_like(weights)
        for head in self.maps.unbind(1):
            pulled += (weights[:, None] @ head.to(weights.dtype))[:, 0]
        return pulled / self.maps.shape[1]


def take_maps(
    model: PreTrainedModel, parts: Parts | None, inputs: dict[str, object], probe: Probe, verdict: bool
) -> Tensor | None:
    """Fills the probe from one prompt's maps; its last logits [1 vocab] when the verdict is wanted.

    Args:
        model: with eager attention.
        parts: backbone and head, if they give the model's logits.
        inputs: keyword arguments with ``input_ids`` [1 T].
        probe: what is asked for, some layer at least.
        verdict: whether logits are wanted.

    Raises:
        UserError: the model gives maps that belong to no layer.
    """
    backbone = backbone_of(model)
    output = (model if verdict and parts is None else backbone)(**inputs, output_attentions=True)
    found = _numbered(output.get("attentions") or (), probe, attending_layers(backbone))
    rows = {layer: found[layer].rows(probe.last) for layer in probe.wanted if layer in found}
    probe.rows = rows if probe.per_head else {layer: each.mean(1) for layer, each in rows.items()}
    probe.kept = dict(found) if probe.keep else {}
    if not verdict:
        return None
    if parts is None:
        return output.logits[:, -1]  # type: ignore[no-any-return]
    return project(output.last_hidden_state[:, -1], parts.projection())


def _numbered(given: Sequence[object], probe: Probe, attending: Sequence[int]) -> dict[int, GivenMap]:
    """Maps by their layer, 0-based: one for each layer, or one for each of the layers that are known to attend."""
    length = int(probe.last.max()) + 1
    maps = [each if isinstance(each, Tensor) and each.shape[2:] == (length, length) else None for each in given]
    if len(given) != probe.depth:
        if len(given) != len(attending):
            raise UserError(f"they are {len(given)}, for {probe.depth} layers, {len(attending)} of them with attention")
        return {layer - 1: GivenMap(each) for layer, each in zip(attending, maps, strict=True) if each is not None}
    return {layer: GivenMap(each) for layer, each in enumerate(maps) if each is not None}


def require_distributions(probe: Probe, attending: Sequence[int]) -> None:
    """Raises ``UserError`` unless the probe has rows [batch heads T] that are at least 0 and sum to 1 at most.

    ``attending``: numbers, from 1, of the layers that must have one.
    """
    absent = [layer for layer in attending if layer - 1 not in probe.rows]
    if absent or not probe.rows:
        raise UserError(f"that of layer {absent[0] if absent else 1} has not one key for each token")
    for layer, rows in sorted(probe.rows.items()):
        if not (float(rows.min()) >= 0 and float(rows.sum(-1).max()) <= 1 + ROUNDING):
            raise UserError(f"that of layer {layer + 1} is no softmax")
