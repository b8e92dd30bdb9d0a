"""Determines a model's attention kernel, readable layers and exact length from its config, without loading weights.

The kernel and layers are determined from the module tree on the meta device, never from the name of the model type.
"""

import inspect
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from attnpo.schema import UserError


class ModelDescription(NamedTuple):
    """Class name of a causal LM, its attention implementation ("sdpa", or "eager" if it is the only one) and layers.

    ``layers``: 1-based indices, in ascending order, of the layers whose attention can be read. ``mapped``: attention
    can be read only as eager attention maps. ``why``: the reason if no layer can be read.
    """

    name: str
    attention: str
    layers: tuple[int, ...]
    mapped: bool = False
    why: str = ""

    @property
    def judge_attention(self) -> str:
        """Returns the ``attn_implementation`` to load a judge with; attention maps need eager attention."""
        return "eager" if self.mapped else "sdpa"


TRIED = 6  # tokens
NO_MAPS = "it has no softmax attention: its class cannot return attention maps (output_attentions)"
NO_ROWS = "it has no softmax attention: its layers return no attention maps (output_attentions)"
_on_meta: dict[tuple[str, str | None], PreTrainedModel] = {}


def describe_model(config: PretrainedConfig) -> ModelDescription:
    """Describes the causal LM that ``config`` defines. Raises ``UserError`` if it does not define one."""
    model = build_on_meta(config)
    backbone = backbone_of(model)
    name, attention = type(model).__name__, str(backbone.config._attn_implementation)
    layers = attending_layers(backbone)
    if layers:
        return ModelDescription(name, attention, layers)
    layers, why = _mapped_layers(config)
    return ModelDescription(name, attention, layers, mapped=bool(layers), why=why)


def attending_layers(backbone: PreTrainedModel) -> tuple[int, ...]:
    """Returns the 1-based indices, in ascending order, of the layers that use transformers' ``AttentionInterface``."""
    numbers = {getattr(part, "layer_idx", None) for part in backbone.modules() if _uses_attention_interface(part)}
    return tuple(sorted(number + 1 for number in numbers if isinstance(number, int) and number >= 0))


def _mapped_layers(config: PretrainedConfig) -> tuple[tuple[int, ...], str]:
    """Returns the layers that return eager attention maps for six meta-device tokens, or the reason if none do."""
    ids = torch.zeros(1, TRIED, dtype=torch.long, device="meta")
    try:
        asked = {"attention_mask": torch.ones_like(ids), "output_attentions": True, "use_cache": False}
        model = build_on_meta(config, "eager").train(False)
        given = model(input_ids=ids, **asked).get("attentions") or ()
    except Exception as error:  # noqa: BLE001  # code of any model, which may read values that meta tensors lack
        if not _can_return_maps(model):
            return (), NO_MAPS
        return (), (
            "none of its layers uses transformers' AttentionInterface, and its attention maps (output_attentions) "
            f"cannot be checked without weights, because its forward reads tensor values ({error})"
        )
    depth = getattr(config.get_text_config(), "num_hidden_layers", None)
    shapes = [getattr(each, "shape", ())[2:] for each in given]
    layers = tuple(number for number, shape in enumerate(shapes, 1) if shape == (TRIED, TRIED))
    if not given:
        return (), NO_ROWS if _can_return_maps(model) else NO_MAPS
    if not layers:
        found = " x ".join(map(str, getattr(given[0], "shape", ())))
        return (), f"it has no softmax attention: output_attentions have the shape {found} instead of tokens x tokens"
    if len(given) != depth:
        return (), f"it returns {len(layers)} attention maps for {depth} layers, so they cannot be assigned to layers"
    return layers, ""


def _can_return_maps(model: PreTrainedModel) -> bool:
    """Returns whether the class declares attention maps, as recorded outputs or as an argument to its forward."""
    return any(
        "attentions" in (getattr(part, "_can_record_outputs", None) or ())
        or "output_attentions" in inspect.signature(type(part).forward).parameters
        for part in (model, backbone_of(model))
    )


def build_on_meta(config: PretrainedConfig, attention: str | None = None) -> PreTrainedModel:
    """Builds the causal LM for ``config`` on the meta device; the result is cached and must not be modified.

    ``attention``: required attention implementation. Raises ``UserError`` if ``config`` does not define a causal LM.
    """
    try:
        key = (type(config).__name__ + config.to_json_string(use_diff=False), attention)
        if key not in _on_meta:
            with torch.device("meta"):
                _on_meta[key] = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                    deepcopy(config), attn_implementation=attention, trust_remote_code=False
                )
        return _on_meta[key]
    except Exception as error:  # the library raises anything from ValueError to KeyError here
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"model.path: {config.model_type or type(config).__name__} is not a causal language model "
            f"({first}): choose one that AutoModelForCausalLM supports"
        ) from error


def backbone_of(model: PreTrainedModel) -> PreTrainedModel:
    """Returns the submodule of a causal LM that computes hidden states, or the model itself if it has none."""
    decoder: object = model.get_decoder()  # type: ignore[no-untyped-call]
    if not isinstance(decoder, PreTrainedModel):  # a vocabulary head may have the library's name for a decoder
        decoder = model.base_model
    if isinstance(decoder, PreTrainedModel) and decoder is not model:
        return decoder
    parts = [part for part in model.children() if isinstance(part, PreTrainedModel)]
    return parts[0] if len(parts) == 1 else model


def config_vocabulary_size(config: PretrainedConfig) -> int | None:
    """Returns the vocabulary size from a model's config; None if the config lacks it."""
    rows = getattr(config.get_text_config(), "vocab_size", None)
    return rows if isinstance(rows, int) else None


def max_over_layers(config: PretrainedConfig, name: str) -> int | None:
    """Returns the largest value of a config field over the layers; None if the config lacks the field."""
    return max(values_per_layer(config, name), default=None)


def values_per_layer(config: PretrainedConfig, name: str) -> list[int]:
    """Returns the values of a config field: one for all layers, or one per layer; empty if the config lacks it."""
    try:
        stated = getattr(config, name, None)
    except RuntimeError:  # raised by the library for a value that differs between layers
        stated = [getattr(layer, name, None) for layer in config.per_layer_config]
    values = [value for value in (stated if isinstance(stated, list | tuple) else [stated]) if value is not None]
    return [int(value) for value in values]


def exact_length(config: PretrainedConfig) -> tuple[int, str] | None:
    """Returns the length up to which results do not depend on the batch, and the rope type; None if unlimited."""
    text = config.get_text_config()
    lengths = []
    for rope in _rope_settings(text):
        kind = str(rope.get("rope_type", ""))
        if kind == "longrope":
            limit = rope.get("original_max_position_embeddings") or text.max_position_embeddings
            lengths.append((int(limit), kind))
        elif "dynamic" in kind:
            lengths.append((int(text.max_position_embeddings), kind))
    return min(lengths, default=None)


def check_exact_length(config: PretrainedConfig, path: str, key: str, length: int) -> None:
    """Checks that rows of ``length`` tokens, set by ``key``, do not exceed the exact length of the model at ``path``.

    Raises:
        UserError: the rows are too long.
    """
    exact = exact_length(config)
    if exact is not None and length > exact[0]:
        raise UserError(
            f"{key}={length}: beyond {exact[0]} tokens the rotary positions of {path} (rope type {exact[1]}) depend on "
            "the longest sequence in the batch, so a row's results would depend on the rest of its batch: set "
            f"{key}={exact[0]} or lower, or choose another model"
        )


def max_positions(config: PretrainedConfig) -> int | None:
    """Returns the number of positions that a config allows, including rope scaling; None if it does not specify one."""
    text = config.get_text_config()
    stated = max_over_layers(text, "max_position_embeddings")
    if stated is None:
        return None
    stretched = (
        int((rope.get("original_max_position_embeddings") or stated) * (rope.get("factor") or 1))
        for rope in _rope_settings(text)
    )
    return max(stated, *stretched)


def _rope_settings(text: PretrainedConfig) -> list[dict[str, Any]]:
    """Returns the rope settings: one for all layers, or one per layer type."""
    stated = getattr(text, "rope_parameters", None) or {}
    return [rope for rope in (stated, *stated.values()) if isinstance(rope, dict)]


def position_warning(config: PretrainedConfig, path: str, key: str, length: int) -> str | None:
    """Returns a warning if ``length``, the value of ``key``, exceeds the model's number of positions, else None."""
    positions = max_positions(config)
    if positions is None or length <= positions:
        return None
    return (
        f"{path} was trained on only {positions} positions (max_position_embeddings): set {key}={positions} or lower, "
        "or choose a model with a longer context"
    )


def _uses_attention_interface(part: torch.nn.Module) -> bool:
    code = getattr(inspect.unwrap(type(part).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names
