"""Facts of a model's attention by its config, before a weight is loaded: kernel, layers that have it, exact length.

Kernel and layers are read off the module tree, built without memory: no kind of model is known by name here.
"""

import inspect
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from attnpo.schema import UserError


class ModelDescription(NamedTuple):
    """Class of a causal LM, its attention ("sdpa", or "eager" where the class has no other), and where it has any.

    ``layers``: numbers, from 1 and rising, of the layers whose attention can be read; ``mapped``: as maps of eager
    attention, on request. ``why``: the reason where there are none.
    """

    name: str
    attention: str
    layers: tuple[int, ...]
    mapped: bool = False
    why: str = ""

    @property
    def judge_attention(self) -> str:
        """Returns the ``attn_implementation`` that a judge is loaded with: maps need eager attention from the start."""
        return "eager" if self.mapped else "sdpa"


TRIED = 6  # tokens
NO_MAPS = "it gives no softmax attention: its class has no maps to hand out (output_attentions)"
NO_ROWS = "it gives no softmax attention: asked for maps (output_attentions), its layers hand out none"
_on_meta: dict[tuple[str, str | None], PreTrainedModel] = {}


def describe_model(config: PretrainedConfig) -> ModelDescription:
    """Returns the description of the causal LM that ``config`` makes. Raises ``UserError`` when it makes none."""
    model = build_on_meta(config)
    backbone = backbone_of(model)
    name, attention = type(model).__name__, str(backbone.config._attn_implementation)
    layers = attending_layers(backbone)
    if layers:
        return ModelDescription(name, attention, layers)
    layers, why = _mapped_layers(config)
    return ModelDescription(name, attention, layers, mapped=bool(layers), why=why)


def attending_layers(backbone: PreTrainedModel) -> tuple[int, ...]:
    """Numbers, from 1 and rising, of the layers whose attention goes through transformers' ``AttentionInterface``."""
    numbers = {getattr(part, "layer_idx", None) for part in backbone.modules() if _uses_attention_interface(part)}
    return tuple(sorted(number + 1 for number in numbers if isinstance(number, int) and number >= 0))


def _mapped_layers(config: PretrainedConfig) -> tuple[tuple[int, ...], str]:
    """Returns layers whose maps eager attention gives, tried on six tokens without memory; why, where none does."""
    ids = torch.zeros(1, TRIED, dtype=torch.long, device="meta")
    try:
        asked = {"attention_mask": torch.ones_like(ids), "output_attentions": True, "use_cache": False}
        model = build_on_meta(config, "eager").train(False)
        given = model(input_ids=ids, **asked).get("attentions") or ()
    except Exception as error:  # noqa: BLE001  # code of any model, which may look at numbers that there are none of
        if not _can_give_maps(model):
            return (), NO_MAPS
        return (), (
            "none of its layers goes through transformers' AttentionInterface, and whether it gives maps "
            f"(output_attentions) cannot be tried without weights, as its forward reads numbers ({error})"
        )
    depth = getattr(config.get_text_config(), "num_hidden_layers", None)
    shapes = [getattr(each, "shape", ())[2:] for each in given]
    layers = tuple(number for number, shape in enumerate(shapes, 1) if shape == (TRIED, TRIED))
    if not given:
        return (), NO_ROWS if _can_give_maps(model) else NO_MAPS
    if not layers:
        found = " x ".join(map(str, getattr(given[0], "shape", ())))
        return (), f"it gives no softmax attention: output_attentions are numbers of {found}, none of tokens x tokens"
    if len(given) != depth:
        return (), f"its attention gives {len(layers)} maps for {depth} layers, so they have no numbers"
    return layers, ""


def _can_give_maps(model: PreTrainedModel) -> bool:
    """Returns whether the class says that it can hand out attention maps: as recorded outputs, or as an argument."""
    return any(
        "attentions" in (getattr(part, "_can_record_outputs", None) or ())
        or "output_attentions" in inspect.signature(type(part).forward).parameters
        for part in (model, backbone_of(model))
    )


def build_on_meta(config: PretrainedConfig, attention: str | None = None) -> PreTrainedModel:
    """Returns the module tree of the causal LM that ``config`` describes, without memory; shared, not to be changed.

    ``attention``: an implementation that must be possible. Raises ``UserError`` when there is no such model.
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
            f"model.path: {config.model_type or type(config).__name__} is no causal language model to lay out "
            f"({first}); give one that AutoModelForCausalLM can make"
        ) from error


def backbone_of(model: PreTrainedModel) -> PreTrainedModel:
    """Returns the part of a causal LM that gives hidden states; the model itself where it has none."""
    decoder: object = model.get_decoder()  # type: ignore[no-untyped-call]
    if not isinstance(decoder, PreTrainedModel):  # a vocabulary head may have the library's name for a decoder
        decoder = model.base_model
    if isinstance(decoder, PreTrainedModel) and decoder is not model:
        return decoder
    parts = [part for part in model.children() if isinstance(part, PreTrainedModel)]
    return parts[0] if len(parts) == 1 else model


def token_rows(config: PretrainedConfig) -> int | None:
    """Returns the number of token embeddings that a model's config states, or None where it states none."""
    rows = getattr(config.get_text_config(), "vocab_size", None)
    return rows if isinstance(rows, int) else None


def max_over_layers(config: PretrainedConfig, name: str) -> int | None:
    """Returns the largest value of a width over the layers; None where none is stated."""
    return max(values_per_layer(config, name), default=None)


def values_per_layer(config: PretrainedConfig, name: str) -> list[int]:
    """Returns the values of a width, one for all layers or one for each; empty where the config states none."""
    try:
        stated = getattr(config, name, None)
    except RuntimeError:  # the library's for a value that has no meaning for all layers at once
        stated = [getattr(layer, name, None) for layer in config.per_layer_config]
    values = [value for value in (stated if isinstance(stated, list | tuple) else [stated]) if value is not None]
    return [int(value) for value in values]


def exact_length(config: PretrainedConfig) -> tuple[int, str] | None:
    """Returns the length up to which rows do not depend on their batch, with the rope type; None without one."""
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
    """Refuses rows of ``length`` tokens, set by ``key``, past the exact length of the model at ``path``."""
    exact = exact_length(config)
    if exact is not None and length > exact[0]:
        raise UserError(
            f"{key}={length}: beyond {exact[0]} tokens the rotary positions of {path} (rope type {exact[1]}) follow "
            "the longest sequence of a batch, so a row's numbers would change with what is beside it; set "
            f"{key}={exact[0]} or lower, or take another model"
        )


def stated_positions(config: PretrainedConfig) -> int | None:
    """Returns the number of positions that a config states, stretched ones included; None where it states none."""
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
    """Returns the settings of rotary positions: of all layers, or by kind of layer."""
    stated = getattr(text, "rope_parameters", None) or {}
    return [rope for rope in (stated, *stated.values()) if isinstance(rope, dict)]


def position_warning(config: PretrainedConfig, path: str, key: str, length: int) -> str | None:
    """Returns a warning of ``length`` tokens, bounded by ``key``, where a model states fewer positions; else None."""
    positions = stated_positions(config)
    if positions is None or length <= positions:
        return None
    return (
        f"{path} has {positions} positions (max_position_embeddings), and was never trained beyond; set "
        f"{key}={positions} or lower, or take a model of a longer context"
    )


def _uses_attention_interface(part: torch.nn.Module) -> bool:
    code = getattr(inspect.unwrap(type(part).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names
