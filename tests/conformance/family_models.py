"""A tiny random model of every causal LM that transformers has, as a folder that a ``model.path`` may name.

No type of model is known by name in code: what a config's fields mean is told by their names, and what a type needs
beside that stands in families.yaml.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import cast

import torch
from omegaconf import OmegaConf
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from attnpo.system.files import Json

TABLE = Path(__file__).with_name("families.yaml")
LARGEST = 20_000_000  # parameters: a model above it is no tiny one, and a size is missing in the table
PEAKED, LIVELY = 8.0, 3.0  # factors on random weights, so that layers, heads and words differ clearly
QUERIES = ("q_proj.weight", "k_proj.weight", "query.weight", "key.weight", "qkv.weight", "query_key_value.weight")

Fields = dict[str, Json]


def families() -> list[str]:
    """The types of transformers' mapping of causal LMs, then the variants of the committed list."""
    return [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *cast(Mapping[str, Json], _table()["variants"])]


def tiny_config(name: str) -> PretrainedConfig:
    """The config of a family in tiny sizes; any error is the library's, for fields that do not go together."""
    variant = cast(Mapping[str, Fields], _table()["variants"]).get(name, {})
    kind = str(variant.get("type", name))
    fields = sized(CONFIG_MAPPING[kind])
    for more in (cast(Mapping[str, Fields], _table()["types"]).get(kind, {}), variant.get("fields", {})):
        _merge(fields, cast(Fields, more))
    made: PretrainedConfig = cast(Callable[..., PretrainedConfig], CONFIG_MAPPING[kind])(**fields)
    return made


def sized(of: type[PretrainedConfig]) -> Fields:
    """The fields of a config class, and of the parts that it has by default, that have a tiny value."""
    names, aliases = _fields(of), dict(getattr(of, "attribute_map", None) or {})
    values = {name: value for name, value in _sizes().items() if name in names and aliases.get(name) not in names}
    for name in getattr(of, "sub_configs", None) or {}:
        part = getattr(of(), name, None)
        if part is not None:
            kind = {"model_type": part.model_type} if part.model_type else {}
            values[name] = {**kind, **sized(type(part))}
    if "kv_lora_rank" in values:  # keys of a latent: one for each query head, and rotated in a part of their own
        values |= {name: values[like] for name, like in _LATENT.items() if name in values and like in values}
    return values


_LATENT = {"num_key_value_heads": "num_attention_heads", "head_dim": "qk_rope_head_dim"}


def tiny_model(name: str) -> PreTrainedModel:
    """A seeded random model of a family in eval mode, with peaked attention.

    Raises:
        ValueError: a model that is not tiny, for a size that the table lacks.
        Exception: what the library raises for a config it cannot build.
    """
    config = tiny_config(name)
    with torch.device("meta"):
        count = sum(part.numel() for part in _built(config).parameters())
    if count > LARGEST:
        raise ValueError(f"{count / 1e6:.0f}M parameters: {TABLE.name} lacks a size of its config")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _built(config)
        for part, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.data.mul_(PEAKED if part.endswith(QUERIES) else LIVELY)
            if part.endswith(("sinks", "sink_bias")):
                parameter.data.normal_()
    model.train(False)
    return model


def _built(config: PretrainedConfig) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False)  # type: ignore[no-untyped-call]
    return model


@cache
def _table() -> Mapping[str, Json]:
    return cast(Mapping[str, Json], OmegaConf.to_container(OmegaConf.load(TABLE)))


@cache
def _sizes() -> Mapping[str, Json]:
    groups = cast(Mapping[str, Mapping[str, Json]], _table()["sizes"]).values()
    return {field: group["value"] for group in groups for field in cast(list[str], group["fields"])}


def _fields(of: type[PretrainedConfig]) -> set[str]:
    """The names that a config class takes: annotated ones, arguments of its initialisers, and their other names."""
    names = set(getattr(of, "attribute_map", None) or {})
    for base in of.__mro__:
        names |= set(getattr(base, "__annotations__", {})) | set(
            inspect.signature(vars(base).get("__init__", object)).parameters
        )
    return names


def _merge(fields: Fields, more: Fields) -> None:
    for name, value in more.items():
        inner = fields.get(name)
        if isinstance(value, dict) and isinstance(inner, dict):
            _merge(inner, value)
        else:
            fields[name] = value
