"""Converts components back to config values, and lists the keys that do not affect results."""

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from enum import Enum
from types import UnionType
from typing import Union, get_args, get_origin

from attnpo.config.reader import enum_text, field_hints, join_key
from attnpo.system.files import Json


def bookkeeping_keys(part: object, path: str = "") -> Iterator[str]:
    """Yields the keys below ``part`` whose fields are marked as having no effect on any computed number.

    ``part`` is a component or a component class. For a class, fields are found by their annotations; fields below
    protocols, mappings and sequences are known only for an actual component.
    """
    kind = part if inspect.isclass(part) else type(part)
    if isinstance(part, Mapping):
        for key, item in part.items():
            yield from bookkeeping_keys(item, join_key(path, key))
    elif isinstance(part, list | tuple):
        for index, item in enumerate(part):
            yield from bookkeeping_keys(item, join_key(path, index))
    elif dataclasses.is_dataclass(kind):
        hints = field_hints(kind) if kind is part else {}
        for item in dataclasses.fields(kind):
            key = join_key(path, item.name)
            if not item.init:
                continue
            if not item.metadata.get("moves_numbers", True):
                yield key
            elif kind is part:
                hint = hints.get(item.name)
                members = get_args(hint) if get_origin(hint) in (Union, UnionType) else [hint]
                yield from dict.fromkeys(below for member in members for below in bookkeeping_keys(member, key))
            else:
                yield from bookkeeping_keys(getattr(part, item.name), key)


def to_config(component: object) -> dict[str, Json]:
    """Converts a component to config values: its keys and ``_target_``, with enum members replaced by their values."""
    kind = type(component)
    items = dataclasses.fields(component) if dataclasses.is_dataclass(component) else ()
    keys = {item.name: _to_config_value(getattr(component, item.name)) for item in items if item.init}
    return {"_target_": f"{kind.__module__}.{kind.__qualname__}", **keys}


def _to_config_value(value: object) -> Json:
    if dataclasses.is_dataclass(value):
        return to_config(value)
    if isinstance(value, Enum):
        return enum_text(value)
    if isinstance(value, Mapping):
        return {str(key): _to_config_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_config_value(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
