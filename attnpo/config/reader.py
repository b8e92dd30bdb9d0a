"""Parses config values according to type hints; used through ``attnpo.config.compose``.

A mapping with ``_target_`` becomes a component. A frozen dataclass is its own schema. All problems are reported
together, under the keys as the user types them. Enum values may be given in upper or lower case, and lists become
tuples of the declared length. (A pydantic ``TypeAdapter`` was tried but offers less.)

A config names code to run. Therefore only ``attnpo`` and the packages listed in the environment variable
ATTNPO_ALLOW_TARGETS (``mine,ours``) are imported, and only frozen dataclasses that implement the expected interface are
instantiated.

A component may have a method ``unused_keys() -> dict[str, str]`` that maps each key that has no effect, given the other
keys, to the reason.
"""

import dataclasses
import difflib
import importlib
import inspect
import os
import re
import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Any, Literal, NewType, Protocol, TypeGuard, Union, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from attnpo.config.moved import current_import_path
from attnpo.system.credentials import collect_env_reads, is_masked, record_interpolation
from attnpo.system.errors import UserError
from attnpo.system.packages import describe_missing_package

Untouched = NewType("Untouched", dict[str, Any])
"""Mapping that is not parsed but passed unchanged to the code that uses it."""
ABSENT: object = object()  # placeholder for a value that is missing, was rejected, or is built later
MISSING = "???"  # OmegaConf's marker for a value that the user must give
ALLOW = "ATTNPO_ALLOW_TARGETS"  # comma-separated packages, besides attnpo, whose classes a config may name
_INTERPOLATION = re.compile(r"\$\{([\w.]+)\}")
_ACCEPTED: dict[object, tuple[type, ...]] = {
    int: (int,),
    float: (float, int),
    bool: (bool,),
    str: (str, int, float),
    Path: (str,),
}
BOUNDED: dict[object, tuple[float, str]] = {  # limits of tensor elements
    int: (2**63 - 1, "a whole number of at most 64 bits"),
    float: (sys.float_info.max, "a finite number"),
}


def join_key(path: str, key: object) -> str:
    """Joins ``path`` and ``key`` with a dot, as the user would type the key."""
    return f"{path}.{key}" if path else str(key)


def did_you_mean(word: str, names: Sequence[str], prefix: str = "") -> str:
    """Returns a hint with the name closest to ``word``, or an empty string if none is close."""
    close = difflib.get_close_matches(word, names, n=1)
    return f"; did you mean {prefix}{close[0]}?" if close else ""


def missing_value_message(path: str) -> str:
    """Returns the error message for a required value that is missing."""
    return f"{path}: required; set {path}=VALUE"


def _describe(hint: object) -> str:
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "one of " + ", ".join(enum_text(member) for member in hint)
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_describe(member) for member in get_args(hint))
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if hint is NoneType:
        return "null"
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)


def _is_interface(hint: object) -> TypeGuard[type]:
    """Returns whether ``hint`` is an interface for components: a runtime-checkable protocol or a base class."""
    if not inspect.isclass(hint) or dataclasses.is_dataclass(hint) or issubclass(hint, Enum):
        return False
    return bool(getattr(hint, "_is_runtime_protocol", False)) or hint.__module__.startswith("attnpo.")


def _is_frozen(target: type) -> bool:
    """Returns whether a class is a frozen dataclass."""
    settings = getattr(target, "__dataclass_params__", None)
    return settings is not None and bool(settings.frozen)


def _protocol_members(role: type) -> set[str]:
    """Returns the attribute names that an object needs to implement a protocol."""
    parents = [parent for parent in role.__mro__ if getattr(parent, "_is_protocol", False) and parent is not Protocol]
    named = {name for parent in parents for name in (*vars(parent), *inspect.get_annotations(parent))}
    return {name for name in named if name == "__call__" or not name.startswith("_")}


def _can_implement(target: type, role: type) -> bool:
    """Checks, without creating an instance, whether the dataclass ``target`` can implement an interface."""
    if not getattr(role, "_is_protocol", False):
        return issubclass(target, role) and not inspect.isabstract(target)
    has = {name for parent in target.__mro__ for name in vars(parent)} | {
        item.name for item in dataclasses.fields(target)
    }
    return _protocol_members(role) <= has


def enum_text(member: Enum) -> str:
    """Returns the config value of an enum member."""
    return member.value if isinstance(member.value, str) else member.name.lower()


def _may_import(dotted: str) -> bool:
    """Returns whether the package of an import path is attnpo or is listed in ATTNPO_ALLOW_TARGETS."""
    allowed = {name.strip() for name in os.environ.get(ALLOW, "").split(",")}
    return dotted.partition(".")[0] in {"attnpo", *allowed} - {""}


def _import_name(dotted: str) -> object:
    """Imports and returns the object at ``module.name`` or ``module.Class.name``."""
    module, _, name = dotted.rpartition(".")
    try:
        target: object = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        owner, _, parent = module.rpartition(".")
        if error.name != module or not owner:
            raise
        target = getattr(getattr(importlib.import_module(owner), parent), name)
    return target


def _defining_module(target: object) -> str | None:
    """Returns the module that defines a class or function, even if it was re-exported; None for other objects."""
    while isinstance(target, partial):
        target = target.func
    if isinstance(target, ModuleType):
        return target.__name__
    if not callable(target):
        return None
    own: str | None = getattr(target, "__module__", None)  # methods of builtins have no __module__
    return own or type(getattr(target, "__self__", target)).__module__


def import_target(dotted: str, what: str) -> tuple[object, str]:
    """Imports the object at an import path; returns (object, "") or (None, reason for the failure).

    Both the path and the defining module must be in attnpo or in a package listed in ATTNPO_ALLOW_TARGETS. ``what``:
    the expected kind of object ("class"), for the message.
    """
    dotted = current_import_path(dotted)
    if not _may_import(dotted):
        return None, _forbidden_import_message(what, dotted, dotted)
    try:
        target = _import_name(dotted)
    except Exception as error:  # noqa: BLE001  any error during the import is reported with the key
        known = isinstance(error, ImportError | AttributeError | ValueError)
        words = describe_missing_package(error) or (str(error) if known else f"{type(error).__name__}: {error}")
        return None, f"cannot import {dotted}: {words}"
    home = _defining_module(target)
    if home is None or _may_import(home):
        return target, ""
    return None, _forbidden_import_message(what, f"{dotted}, which is defined in {home}", home)


def _forbidden_import_message(what: str, got: str, module: str) -> str:
    return (
        f"expected a {what} of attnpo, got {got}; a config can run code: set the environment variable "
        f"{ALLOW}={module.partition('.')[0]} only if you trust that package"
    )


def _init_fields(target: type) -> dict[str, bool]:
    """Returns the init fields of a dataclass, each mapped to whether it is required."""
    return {
        field.name: field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        for field in sorted(dataclasses.fields(target), key=lambda field: bool(field.kw_only))  # base fields come last
        if field.init
    }


def field_hints(target: type) -> dict[str, object]:
    """Returns the type hints of a class's fields; empty if a hint uses a name defined only for type checkers."""
    try:
        return get_type_hints(target)
    except NameError:
        return {}


def to_plain_values(node: object, path: str, problems: list[str], origins: dict[str, str] | None = None) -> object:
    """Converts ``node`` to plain containers with interpolations resolved; ``problems`` collects failures.

    Values that are still ``???`` are kept.
    """
    if not isinstance(node, DictConfig | ListConfig):
        return node
    values: dict[object, object] = {}
    keys: list[Any] = list(node) if isinstance(node, DictConfig) else list(range(len(node)))
    for key in keys:
        origin = _INTERPOLATION.fullmatch(str(node._get_node(key)))
        if origins is not None and origin is not None:
            origins[join_key(path, key)] = origin[1]
        try:
            with collect_env_reads() as reads:
                item = MISSING if OmegaConf.is_missing(node, key) else node[key]
            if reads and isinstance(item, str):
                record_interpolation(join_key(path, key), item, str(node._get_node(key)))
        except InterpolationToMissingValueError:
            item = MISSING
        except OmegaConfBaseException as error:
            why = str(error).splitlines()[0]
            if origin is not None and (empty := _null_parent(node, origin[1])) is not None:
                why = f"`{empty}` is null in this setting: set setting=testbed, or choose another option of "
                why += f"`{join_key(path, key).partition('.')[0]}`"
            problems.append(f"{join_key(path, key)}: {why}")
            item = ABSENT
        values[key] = to_plain_values(item, join_key(path, key), problems, origins)
    return values if isinstance(node, DictConfig) else list(values.values())


def _null_parent(node: DictConfig | ListConfig, key: str) -> str | None:
    """Returns the ancestor of ``key`` that is null in the config that contains ``node``; None if there is none."""
    root, parents = node._get_root(), key.split(".")[:-1]
    paths = [".".join(parents[:depth]) for depth in range(1, len(parents) + 1)]
    return next((path for path in paths if OmegaConf.select(root, path, default=ABSENT) is None), None)


def add_origin_keys(problems: Sequence[str], origins: dict[str, str]) -> list[str]:
    """Adds the source key to problems of interpolated values; drops a problem if the source key already has one."""
    told = []
    for problem in problems:
        key, _, rest = problem.partition(": ")
        reader = next((path for path in origins if key == path or key.startswith(f"{path}.")), None)
        if reader is None:
            told.append(problem)
            continue
        origin = origins[reader] + key[len(reader) :]
        if any(other.startswith(f"{origin}: ") for other in problems):
            continue
        leads_nowhere = rest.startswith("Interpolation")
        told.append(problem if leads_nowhere else f"{key} (read from {origin}): {rest}")
    return told


class ConfigReader:
    """Converts config values to the types in type hints and collects all problems."""

    def __init__(self, *, complete: bool = True) -> None:
        self.complete = complete  # values that are still ??? are problems
        self.problems: list[str] = []
        self.unused: dict[str, str] = {}  # keys without effect in this combination, with the reason
        self.missing: list[str] = []  # keys that are still ???

    def add_problem(self, problem: str) -> object:
        """Records ``problem`` and returns ABSENT."""
        self.problems.append(problem)
        return ABSENT

    def read(self, value: object, hint: object, path: str) -> object:
        """Converts ``value`` to the type ``hint``, or records a problem and returns ABSENT."""
        if value is ABSENT:
            return ABSENT
        if isinstance(value, str) and value == MISSING:
            self.missing.append(path)
            if self.complete:
                return self.add_problem(missing_value_message(path))
            return MISSING if hint is str else ABSENT  # text can stand for itself until the value is known
        if isinstance(value, str) and is_masked(value, path) and not path.startswith("composed."):
            return self.add_problem(
                f"{path}: credentials in this value were masked when the config was saved ({value!r}): enter them "
                "again, preferably as ${oc.env:VARIABLE}, which is saved unchanged"
            )
        if hint is Untouched:
            return value if isinstance(value, dict) else self.add_mismatch(value, "keys with _target_", path)
        origin = get_origin(hint)
        container = origin or hint
        if inspect.isclass(hint) and hint in _ACCEPTED:
            if type(value) not in _ACCEPTED[hint]:
                return self.add_mismatch(value, _describe(hint), path)
            if hint in BOUNDED and not abs(value) <= BOUNDED[hint][0]:  # type: ignore[arg-type]  # NaN is not either
                return self.add_mismatch(value, BOUNDED[hint][1], path)
            kind: type[Any] = hint
            return kind(value)
        if inspect.isclass(hint) and issubclass(hint, Enum):
            names = {str(name).lower(): member for member in hint for name in (member.name, member.value)}
            member = names.get(value.lower(), ABSENT) if isinstance(value, str) else ABSENT
            return self.add_mismatch(value, _describe(hint), path) if member is ABSENT else member
        if origin is Literal:
            same = (choice for choice in get_args(hint) if choice == value and type(choice) is type(value))
            choice = next(same, ABSENT)
            return self.add_mismatch(value, _describe(hint), path) if choice is ABSENT else choice
        if container in (tuple, list, Sequence):
            return self.read_sequence(value, hint, container, path)
        if isinstance(value, dict) and "_target_" in value:
            return self.read_component(value, hint, path)
        if origin in (Union, UnionType):
            return self.read_union(value, hint, path)
        if inspect.isclass(hint) and dataclasses.is_dataclass(hint):
            if isinstance(value, dict):
                return self.build(hint, value, path)
            return self.add_mismatch(value, f"the keys of {hint.__name__}", path)
        if container in (dict, Mapping) and not isinstance(value, dict):
            return self.add_mismatch(value, "keys with values", path)
        if _is_interface(hint) and not isinstance(value, hint):
            return self.add_mismatch(value, f"a component of type {hint.__name__} (keys with _target_)", path)
        if isinstance(value, dict):
            of = get_args(hint)[1] if container in (dict, Mapping) and get_args(hint) else Any
            return self.all_or_absent({key: self.read(item, of, join_key(path, key)) for key, item in value.items()})
        if isinstance(value, list):
            return self.all_or_absent(
                tuple(self.read(item, Any, join_key(path, index)) for index, item in enumerate(value))
            )
        return self.add_mismatch(value, "null", path) if hint is NoneType and value is not None else value

    def add_mismatch(self, value: object, expected: str, path: str) -> object:
        """Records that ``value`` is not what was expected, and returns ABSENT."""
        kind = "" if value is None else f" ({type(value).__name__})"
        shown = "null" if value is None else repr(value)
        if isinstance(value, dict):
            shown, kind = f"keys {', '.join(map(str, value))}", ""
        return self.add_problem(f"{path}: expected {expected}, got {shown}{kind}")

    def all_or_absent(self, value: Mapping[str, object] | Sequence[object]) -> object:
        """Returns ``value``, or ABSENT if any of its items is ABSENT."""
        items = value.values() if isinstance(value, Mapping) else value
        return ABSENT if any(item is ABSENT for item in items) else value

    def read_union(self, value: object, hint: object, path: str) -> object:
        """Converts ``value`` to the first union member that accepts it; keeps a value whose type is a member."""
        members = [member for member in get_args(hint) if member is not NoneType]
        if value is None and len(members) < len(get_args(hint)):
            return None
        if len(members) == 1:
            return self.read(value, members[0], path)
        exact = [member for member in members if member is type(value)]
        for member in exact or [member for member in members if member not in (str, Any)]:
            attempt = ConfigReader(complete=self.complete)
            result = attempt.read(value, member, path)
            if not attempt.problems:
                self.unused.update(attempt.unused)
                self.missing += attempt.missing
                return result
        return self.add_mismatch(value, _describe(hint), path)

    def read_sequence(self, value: object, hint: object, container: object, path: str) -> object:
        """Converts ``value`` to a list or tuple with the item types of the hint."""
        if not isinstance(value, list | tuple):
            return self.add_mismatch(value, "a list", path)
        of = list(get_args(hint))
        if container is tuple and of and of[-1] is not Ellipsis:
            if len(of) != len(value):
                return self.add_mismatch(list(value), f"a list of {len(of)} items", path)
        else:
            of = [of[0] if of else Any] * len(value)
        items = [
            self.read(item, kind, join_key(path, index))
            for index, (item, kind) in enumerate(zip(value, of, strict=True))
        ]
        return self.all_or_absent(items if container is list else tuple(items))

    def read_component(self, value: dict[object, object], hint: object, path: str) -> object:
        """Builds the component that ``_target_`` names, after checking the component's package and interface."""
        dotted, key = str(value["_target_"]), join_key(path, "_target_")
        if dotted == MISSING:
            return self.add_problem(missing_value_message(key))
        target, problem = import_target(dotted, "class")
        if problem:
            return self.add_problem(f"{key}: {problem}")
        members = get_args(hint) or (hint,)
        wanted = tuple(item for item in members if inspect.isclass(item) and dataclasses.is_dataclass(item))
        roles = [item for item in members if _is_interface(item)]
        expected = _describe(hint) if wanted else f"a {_describe(hint) if roles else 'component'}"
        if not inspect.isclass(target) or not _is_frozen(target):
            return self.add_problem(f"{key}: expected {expected}, got {dotted}, which is not a frozen dataclass")
        if (wanted and not issubclass(target, wanted)) or (
            roles and not any(_can_implement(target, role) for role in roles)
        ):
            return self.add_problem(f"{key}: expected {expected}, got {dotted}")
        return self.build(target, {name: item for name, item in value.items() if name != "_target_"}, path)

    def build(self, target: type, keys: dict[object, object], path: str) -> object:
        """Builds the dataclass ``target`` from ``keys``, or returns ABSENT if a value is invalid."""
        known = _init_fields(target)
        hints = field_hints(target)
        before = len(self.problems)
        values: dict[str, object] = {}
        for key, item in keys.items():
            if key not in known:
                name = f"{target.__module__}.{target.__qualname__}"
                close = did_you_mean(str(key), list(known), f"{path}." if path else "")
                self.add_problem(f"{join_key(path, key)}: unknown key of {name}; it has: {', '.join(known)}{close}")
            else:
                values[str(key)] = self.read(item, hints.get(key, Any), join_key(path, key))
        for key, required in known.items():
            if required and key not in keys:
                self.add_problem(
                    f"{join_key(path, key)}: required by {target.__qualname__}; set {join_key(path, key)}=VALUE"
                )
        if len(self.problems) > before or self.all_or_absent(values) is ABSENT:
            return ABSENT
        try:
            built = target(**values)
        except (ValueError, UserError) as error:
            return self.add_problem(f"{path}: {error}" if path else str(error))
        unused_keys = getattr(built, "unused_keys", None)
        if callable(unused_keys):
            self.unused.update({join_key(path, key): reason for key, reason in unused_keys().items()})
        return built
