"""What a model's config says of its attention before a weight is loaded: kernel, layers that have it, exact length.

Kernel and layers are read off the module tree, built without memory (a second for 8B, once per config and process):
no kind of model is known by name here.
"""

import inspect
from copy import deepcopy
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from attnpo.schema import UserError


class Described(NamedTuple):
    """The class of a causal LM, its attention ("sdpa", or "eager" where the class has no other), and where it has any.

    ``layers``: numbers, from 1 and rising, of the layers whose softmax attention goes through transformers'
    ``AttentionInterface``, which is where it can be read.
    """

    name: str
    attention: str
    layers: tuple[int, ...]


_described: dict[str, Described] = {}


def describe(config: PretrainedConfig) -> Described:
    """What the causal LM of ``config`` will be. Raises ``UserError`` when it describes none."""
    key = type(config).__name__ + config.to_json_string(use_diff=False)
    if key not in _described:
        model = on_meta(config)
        backbone = backbone_of(model)
        numbers = {getattr(part, "layer_idx", None) for part in backbone.modules() if _calls_the_interface(part)}
        layers = sorted(number + 1 for number in numbers if isinstance(number, int) and number >= 0)
        _described[key] = Described(type(model).__name__, str(backbone.config._attn_implementation), tuple(layers))
    return _described[key]


def on_meta(config: PretrainedConfig, attention: str | None = None) -> PreTrainedModel:
    """The module tree of the causal LM that ``config`` describes, without memory.

    ``attention``: an implementation that must be possible. Raises ``UserError`` when there is no such model.
    """
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                deepcopy(config), attn_implementation=attention, trust_remote_code=False
            )
            return model
    except Exception as error:  # the library raises anything from ValueError to KeyError here
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"model.path: {config.model_type or type(config).__name__} is no causal language model to lay out "
            f"({first}); give one that AutoModelForCausalLM can make"
        ) from error


def backbone_of(model: PreTrainedModel) -> PreTrainedModel:
    """The part of a causal LM that gives hidden states; the model itself where it has none."""
    found: object = model.get_decoder()  # type: ignore[no-untyped-call]
    if not isinstance(found, PreTrainedModel):  # a vocabulary head may have the library's name for a decoder
        found = model.base_model
    return found if isinstance(found, PreTrainedModel) else model


def widest(config: PretrainedConfig, name: str) -> int | None:
    """The largest value of a width over the layers; None where none is stated."""
    return max(per_layer(config, name), default=None)


def per_layer(config: PretrainedConfig, name: str) -> list[int]:
    """The values of a width: one for all layers, or one for each of them; empty where none is stated.

    A config states one, a list of them, or configs of single layers in which it differs.
    """
    try:
        stated = getattr(config, name, None)
    except RuntimeError:  # the library's for a value that has no meaning for all layers at once
        stated = [getattr(layer, name, None) for layer in config.per_layer_config]
    values = [value for value in (stated if isinstance(stated, list | tuple) else [stated]) if value is not None]
    return [int(value) for value in values]


def exact_length(config: PretrainedConfig) -> tuple[int, str] | None:
    """The longest sequence whose numbers follow from itself alone, with the rope type that ends it there; or None.

    Beyond it these types (longrope, dynamic) set the frequencies of all rows of a batch by the longest of them.
    """
    text = config.get_text_config()
    stated = getattr(text, "rope_parameters", None) or {}
    found = []
    for rope in (stated, *stated.values()):  # of all layers, or by kind of layer
        kind = str(rope.get("rope_type", "")) if isinstance(rope, dict) else ""
        if kind == "longrope":
            limit = rope.get("original_max_position_embeddings") or text.max_position_embeddings
            found.append((int(limit), kind))
        elif "dynamic" in kind:
            found.append((int(text.max_position_embeddings), kind))
    return min(found, default=None)


def require_exact(config: PretrainedConfig, path: str, key: str, length: int) -> None:
    """Refuses sequences of ``length`` tokens, set by ``key``, that are past the exact length of the model at ``path``.

    Raises:
        UserError: with the length that can be had.
    """
    found = exact_length(config)
    if found is not None and length > found[0]:
        raise UserError(
            f"{key}={length}: beyond {found[0]} tokens the rotary positions of {path} (rope type {found[1]}) follow "
            "the longest sequence of a batch, so a row's numbers would change with what is beside it; set "
            f"{key}={found[0]} or lower, or take another model"
        )


def _calls_the_interface(part: torch.nn.Module) -> bool:
    code = getattr(inspect.unwrap(type(part).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names
