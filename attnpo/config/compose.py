"""Composes configs with Hydra, parses them into typed components, and resolves config paths.

Only this file uses Hydra. Importing this module, ``--help`` and ``--cfg`` do not load torch. Parsing imports the
modules of the targets, which must therefore import quickly. Each combination of group options is composed once per
process. The runs of a study differ only in single values, which are set in a copy.
"""

import difflib
import hashlib
import itertools
import logging
import math
import os
import pickle
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import hydra
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from omegaconf import Container, DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from omegaconf.resolvers import oc

from attnpo.config.fields import to_config
from attnpo.config.reader import (
    ABSENT,
    ConfigReader,
    add_origin_keys,
    did_you_mean,
    join_key,
    missing_value_message,
    to_plain_values,
)
from attnpo.config.reader import MISSING as MISSING
from attnpo.system.credentials import digest_env_values, record_env_read, to_savable
from attnpo.system.errors import UserError
from attnpo.system.files import Json, flatten

SomeRoot = TypeVar("SomeRoot", bound="RootConfig")

CONFIG_DIR = (Path(__file__).parents[1] / "configs").resolve()  # in a checkout, a link to the top-level folder
RUNS_ROOT = Path("outputs")
MOST = 1000  # maximum number of cached compositions, about 20 KiB each
LARGEST = 100_000  # maximum number of values in a YAML file; the largest shipped file has a few hundred

_composed: dict[Hashable, bytes] = {}
_log = logging.getLogger(__name__)


# --------------------------------------------------------------------------------------------- paths


def cache_root() -> Path:
    """Returns the folder for everything that can be recomputed: ``$ATTNPO_CACHE``, or ``~/.cache/attnpo``."""
    return Path(os.environ.get("ATTNPO_CACHE") or Path.home() / ".cache" / "attnpo").expanduser()


def _read_env_variable(*given: str) -> str | None:
    """Reads an environment variable, as ``oc.env`` does, and records the access."""
    record_env_read(given[0])
    try:
        return oc.env(*given)
    except KeyError as unset:
        raise KeyError(f"environment variable {given[0]} not found: set it") from unset


def _register_resolvers() -> None:
    OmegaConf.register_new_resolver("oc.env", _read_env_variable, replace=True)
    OmegaConf.register_new_resolver("cache_root", lambda: str(cache_root()), replace=True)
    OmegaConf.register_new_resolver("runs_root", lambda: str(RUNS_ROOT), replace=True)
    OmegaConf.register_new_resolver("if_set", lambda key, then, other: other if key is None else then, replace=True)


def _config_folders(config_dir: Path | None) -> list[Path]:
    if config_dir is not None and not config_dir.is_dir():
        raise UserError(f"--config-dir {config_dir} is not a folder: specify a folder of YAML files")
    folders = [folder.resolve() for folder in (CONFIG_DIR, config_dir) if folder is not None and folder.is_dir()]
    if not folders:
        raise UserError(
            f"no config files at {CONFIG_DIR}: this installation of attnpo is incomplete; reinstall it, or specify a "
            "folder with --config-dir DIR"
        )
    return folders


def list_groups(config_dir: Path | None = None) -> dict[str, list[str]]:
    """Lists each config group's options, both shipped and in ``config_dir``; files named ``_...`` are skipped."""
    found: dict[str, set[str]] = {}
    for folder in _config_folders(config_dir):
        for file in folder.rglob("*.yaml"):
            if file.parent != folder and not file.stem.startswith("_"):
                found.setdefault(file.parent.relative_to(folder).as_posix(), set()).add(file.stem)
    return {group: sorted(options) for group, options in sorted(found.items())}


# --------------------------------------------------------------------------------------------- composition


@contextmanager
def wrap_yaml_errors(file: Path) -> Iterator[None]:
    """Turns YAML errors raised inside the context, while reading ``file``, into a UserError that names the file.

    Checks first that the file's aliases do not expand to too many values.

    Raises:
        UserError: the file is not YAML, is nested too deeply, or has aliases that expand to too many values.
    """
    try:
        _check_aliases(file)
        yield
    except (yaml.YAMLError, UnicodeError, RecursionError) as problem:
        why = "it is nested too deeply" if isinstance(problem, RecursionError) else " ".join(str(problem).split())
        raise UserError(f"{file} cannot be read as a YAML config ({why}): correct the file") from problem


def _check_aliases(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    if "&" in text and "*" in text and _count_values(yaml.compose(text, yaml.SafeLoader), {}) > LARGEST:
        raise UserError(f"{file}: its aliases (*NAME) expand to more than {LARGEST} values; write out the values")


def _count_values(node: yaml.Node | None, known: dict[int, float]) -> float:
    """Counts the values below a node with all aliases expanded; infinite for a node that contains itself."""
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) not in known:
        known[id(node)] = math.inf
        parts = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
        known[id(node)] = 1 + sum(_count_values(part, known) for part in parts)
    return known[id(node)]


@contextmanager
def _initialize(config_dir: Path | None) -> Iterator[list[str]]:
    first, *others = _config_folders(config_dir)
    quoted = ["'file://" + str(folder).replace("'", "\\'") + "'" for folder in others]
    with hydra.initialize_config_dir(config_dir=str(first), version_base="1.3"):
        yield [f"hydra.searchpath=[{','.join(quoted)}]"] if quoted else []


def compose(name: str, overrides: Sequence[str] = (), config_dir: Path | None = None) -> DictConfig:
    """Composes the config ``name`` with ``overrides``, in struct mode and with interpolations unresolved.

    ``config_dir`` is searched after the shipped folder. The key ``composed`` records ``overrides`` and ``config_dir``.

    Raises:
        UserError: an override is invalid; the message lists the valid options and suggests the closest.
    """
    _register_resolvers()
    folders = _config_folders(config_dir)
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise UserError(format_hydra_error(error)) from error
    grouped = [any((folder / one.key_or_group).is_dir() for folder in folders) for one in parsed]
    if any(map(_needs_hydra, parsed, grouped)):
        return _compose(name, overrides, config_dir)
    choices = tuple(str(one.input_line) for one, group in zip(parsed, grouped, strict=True) if group)
    cfg = _compose_cached(
        (name, choices, config_dir, _files_digest(folders)), lambda: _compose(name, choices, config_dir)
    )
    for one in (one for one, group in zip(parsed, grouped, strict=True) if not group):
        key, value, added = one.key_or_group, one.value(), one.is_add() or one.is_force_add()
        try:
            known = one.is_add() and OmegaConf.select(cfg, key, throw_on_missing=False) is not None
            if known and not isinstance(value, dict | list):
                return _compose(name, overrides, config_dir)
            OmegaConf.update(cfg, key, value, merge=True, force_add=added)
        except (OmegaConfBaseException, ValueError) as error:
            if added or not isinstance(error, ConfigAttributeError | ConfigKeyError):
                return _compose(name, overrides, config_dir)
            raise UserError(_describe_unknown(key, name, overrides, config_dir)) from error
    return _with_overrides(cfg, overrides)


def _needs_hydra(one: Override, grouped: bool) -> bool:
    """Returns whether an override needs Hydra because it neither selects a group option nor sets a single value."""
    if one.is_hydra_override() or one.key_or_group.partition(".")[0] == "composed" or one.is_sweep_override():
        return True
    # Hydra treats a mapping given for a group as a value.
    return isinstance(one.value(), dict) if grouped else one.is_delete() or one.package is not None


def _describe_unknown(key: str, name: str, overrides: Sequence[str], config_dir: Path | None) -> str:
    return describe_unknown_key(
        key, name, overrides, list(list_groups(config_dir)), lambda rest: compose(name, rest, config_dir)
    )


def _compose_cached(key: Hashable, make: Callable[[], DictConfig]) -> DictConfig:
    """Returns a copy of the config that ``make`` composes, cached by ``key`` as a pickle (faster than deepcopy)."""
    if key not in _composed:
        made = pickle.dumps(make())
        if len(_composed) >= MOST:
            _composed.clear()
        _composed[key] = made
    cfg: DictConfig = pickle.loads(_composed[key])
    return cfg


def _files_digest(folders: Sequence[Path]) -> str:
    """Returns a digest of the names, modification times and sizes of all config files in ``folders``."""
    files = sorted(file for folder in folders for file in folder.rglob("*.yaml"))
    found = [(str(file), file.stat()) for file in files]
    return hashlib.sha256(repr([(file, at.st_mtime_ns, at.st_size) for file, at in found]).encode()).hexdigest()


def _compose(name: str, overrides: Sequence[str], config_dir: Path | None) -> DictConfig:
    known, own = list_groups(config_dir), [] if config_dir is None else sorted(config_dir.rglob("*.yaml"))
    for file in own:
        with suppress(yaml.YAMLError, UnicodeError, RecursionError):  # reported when the file is composed
            _check_aliases(file)
    try:
        with _initialize(config_dir) as searchpath:
            cfg = hydra.compose(name, [*searchpath, *overrides], return_hydra_config=True)
    except (yaml.YAMLError, UnicodeError, RecursionError):
        for file in own:
            with wrap_yaml_errors(file):
                OmegaConf.load(file)
        raise
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        text = format_hydra_error(error) if isinstance(error, HydraException) else f"{error} (in {' '.join(overrides)})"
        if refused := re.search(r"Could not override '([^']+)'", text):
            raise UserError(_describe_unknown(refused[1], name, overrides, config_dir)) from error
        raise UserError(suggest_option(text, overrides, known)) from error
    # Hydra silently skips a missing option if the defaults list marks it `optional`.
    for key, choice in cfg.hydra.runtime.choices.items():
        group, _, option = f"{key.partition('@')[0]}/{choice}".rpartition("/")
        if isinstance(choice, str) and group in known and option.removesuffix(".yaml") not in known[group]:
            close = did_you_mean(option, known[group], f"{group}=")
            listed = ", ".join(known[group])
            raise UserError(f"Could not find '{group}/{option}'{close}\nAvailable options in '{group}': {listed}")
    choices = {str(key): choice for key, choice in cfg.hydra.runtime.choices.items() if isinstance(choice, str)}
    folder = None if config_dir is None else str(config_dir)
    with open_dict(cfg):
        del cfg["hydra"]
        if "composed" in cfg:
            cfg.composed = {"overrides": [], "config_dir": folder, "choices": choices}
    return _with_overrides(cfg, overrides)


def _with_overrides(cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Records in ``cfg`` the ``overrides`` it was composed with, escaped so that they are not resolved."""
    if "composed" in cfg:
        cfg.composed.overrides = [override.replace("${", "\\${") for override in overrides]
    return cfg


def expand_sweep(overrides: Sequence[str], config_dir: Path | None = None) -> list[list[str]]:
    """Expands a grid (``a=1,2 b=3,4``: four jobs) into one list of overrides per job; the last key varies fastest."""
    with _initialize(config_dir):
        parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
        try:
            parsed = parser.parse_overrides(list(overrides))
        except HydraException as error:
            raise UserError(format_hydra_error(error)) from error
        axes: dict[str, list[str]] = {}
        for one in parsed:
            key = one.get_key_element()
            if one.is_interval_sweep():
                raise UserError(f"{one.input_line}: an interval cannot be expanded into jobs; list the values")
            texts = one.sweep_string_iterator() if one.is_sweep_override() else [one.get_value_element_as_str()]
            axes[key] = [f"{key}={text}" for text in texts]
    return [list(job) for job in itertools.product(*axes.values())]


# --------------------------------------------------------------------------------------------- what is refused


def format_hydra_error(error: Exception) -> str:
    """Formats a Hydra error in a few lines, without tabs or links."""
    if isinstance(error, OverrideParseException):
        reason = re.sub(r"^Error parsing override .*\n", "", str(error)).partition("\n")[0]
        return (
            f"{error.override} cannot be parsed ({reason}): values that contain brackets, commas, quotes or "
            "spaces must be quoted, e.g. \"KEY='a, b'\""
        )
    lines = [str(error).partition("\nConfig search path")[0]]
    if isinstance(error.__cause__, OmegaConfBaseException):
        lines.append(str(error.__cause__).partition("\n")[0])
    text = re.sub(r"\nSee https\S+ for details|\n\t_\w+(?=\n)", "", "\n".join(lines))
    text = text.replace(":\n\t", ": ").replace("\n\t", ", ")
    return re.sub(r"\n\s*\n", "\n", text)


def suggest_option(text: str, overrides: Sequence[str], known: dict[str, list[str]]) -> str:
    """Adds the closest valid option to Hydra's error ``text``, or says how to remove a group that is set to null."""
    missing = re.search(r"Could not find '(.+)/([^/']+)'", text)
    if missing is not None and missing[1] in known:
        return text.replace(missing[0], missing[0] + did_you_mean(missing[2], known[missing[1]], f"{missing[1]}="), 1)
    for group, value in (override.split("=", 1) for override in overrides if "=" in override):
        if group in known and value not in known[group] and "Config group override" in text:
            listed = ", ".join(known[group])
            close = f"; ~{group} removes it" if value == "null" else did_you_mean(value, known[group], f"{group}=")
            return f"{group}={value}: expected one of the group's options ({listed}){close}"
    return text


MANY = 20  # names of a node; of more, only the closest are listed
# Keys of TRL, Hugging Face's Trainer, PEFT and Lightning, with those that mean the same here.
FAMILIAR = {
    "learning_rate": "optimizer.lr",
    **{"num_train_epochs": "trainer.max_epochs", "max_grad_norm": "trainer.gradient_clip_val"},
    **{
        "warmup_ratio": "optimizer.warmup (a share of the steps)",
        "warmup_steps": "optimizer.warmup (1 or more: steps)",
    },
    "lr_scheduler_type": "optimizer.schedule",
    "per_device_train_batch_size": "batch.micro (pairs per forward; batch.pairs are those per optimizer step)",
    "gradient_accumulation_steps": "batch.pairs (per optimizer step) with batch.micro (per forward)",
    "per_device_eval_batch_size": "batch.eval_micro",
    **{"eval_steps": "trainer.validate_every", "logging_steps": "trainer.log_every_n_steps"},
    **{"max_length": "lengths.max_length", "truncation_mode": "lengths.keep"},
    **{"model_name_or_path": "model.path", "dataset_name": "data.path", "output_dir": "output"},
    **{"bf16": "trainer.precision=bf16-mixed", "attn_implementation": "model.attn_implementation"},
    **{"use_peft": "model=lora", "lora_r": "model.lora.rank with model=lora", "r": "model.lora.rank with model=lora"},
    **{
        "report_to": "logger=wandb",
        "resume_from_checkpoint": "resume",
        "simpo_gamma": "objective.gamma_beta_ratio (gamma / beta)",
    },
    "precompute_ref_log_probs": "reference=cached",
}


def describe_unknown_key(
    key: str, name: str, overrides: Sequence[str], groups: Sequence[str], compose: Callable[[list[str]], DictConfig]
) -> str:
    """Returns the error message for an unknown key; ``compose`` builds the config from the other overrides."""
    typed = next((override for override in overrides if override.lstrip("+~").partition("=")[0] == key), key)
    said = f"{typed}: there is no key {key}"
    rest = [override for override in overrides if override.lstrip("+~").partition("=")[0] != key]
    try:
        root: Any = compose(rest)
    except UserError:
        return said
    node, path = root, ""
    for part in key.split(".")[:-1]:
        if not isinstance(node, DictConfig) or part not in node:
            break
        node, path = node[part], join_key(path, part)
    if not isinstance(node, DictConfig):
        return f"{said}; `{path}` is a value and has no keys"
    names = [str(key) for key in node if key != "_target_"] + ([] if path else [*groups])
    wrong = key[len(path) :].lstrip(".").partition(".")[0]
    if re.split("[.= ]", FAMILIAR.get(key, ""))[0] in names:
        return f"{said}; did you mean {FAMILIAR[key]}?"
    elsewhere = sorted(
        (found for found in _leaf_keys(root) if found.endswith(f".{key}") and not found.startswith("composed.")),
        key=lambda at: at.count("."),
    )
    elsewhere = [found for found in elsewhere if found.count(".") == elsewhere[0].count(".")]
    if elsewhere:
        said += f"; did you mean {' or '.join(elsewhere[:3])}?"
    else:
        said += did_you_mean(wrong, names, f"{path}." if path else "")
    if len(names) > MANY:
        leaves = {found.rpartition(".")[2]: found for found in _leaf_keys(root) if not found.startswith("composed.")}
        places = {**leaves, **{name: name for name in names}}
        closest = [places[name] for name in difflib.get_close_matches(wrong, places, 5, 0)]
        return f"{said}\nclosest keys: {', '.join(closest)}; run with --help to list all"
    return f"{said}\n`{path or name}` has: {', '.join(sorted(set(names)))}"


def _leaf_keys(node: DictConfig, path: str = "") -> Iterator[str]:
    """Yields the dotted path of each leaf value below ``node``, without resolving interpolations."""
    for key in node:
        child, found = node._get_node(key), join_key(path, str(key))
        if not isinstance(child, Container) or child._is_interpolation():
            yield found
        elif isinstance(child, DictConfig) and not child._is_none():
            yield from _leaf_keys(child, found)


# --------------------------------------------------------------------------------------------- components


def report_problems(problems: list[str]) -> None:
    """Raises a single UserError that lists all ``problems``, if there are any."""
    if len(problems) == 1:
        raise UserError(problems[0])
    if problems:
        raise UserError(f"{len(problems)} problems in the configuration:\n  " + "\n  ".join(problems))


@dataclass(frozen=True)
class Composition:
    """Origin of a config: overrides, the user's config folder and the option selected for each group.

    ``environment``: in a saved config, a digest for each key whose value was read from an environment variable.
    """

    overrides: tuple[str, ...] = ()
    config_dir: Path | None = None
    choices: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    def arguments(self) -> list[str]:
        """Returns the command-line arguments that compose the same config again."""
        return [*self.overrides, *([] if self.config_dir is None else ["--config-dir", str(self.config_dir)])]


@dataclass(frozen=True, kw_only=True)
class RootConfig:
    """Typed root of a config; all components are read from it.

    ``values``: the plain values from which the config was parsed, used only to save it and to distinguish runs.
    """

    composed: Composition = field(default_factory=Composition, metadata={"moves_numbers": False})
    values: dict[str, Json] = field(default_factory=dict, init=False, repr=False, compare=False)

    def with_value(self: SomeRoot, key: str, value: Json | tuple[Json, ...]) -> SomeRoot:
        """Returns a copy with ``value`` at the dotted ``key``, in the components and in ``values``."""
        names = key.split(".")
        made: SomeRoot = _replace_at(self, names, value)
        plain_value = list(value) if isinstance(value, tuple) else value
        object.__setattr__(made, "values", _replace_at(self.values, names, plain_value))
        return made

    def with_component(self: SomeRoot, key: str, component: object) -> SomeRoot:
        """Returns a copy with ``component`` at the top-level key ``key``."""
        made: SomeRoot = _replace_at(self, [key], component)
        object.__setattr__(made, "values", {**self.values, key: to_config(component)})
        return made

    def node(self, key: str) -> dict[str, Json]:
        """Returns the plain values of the node ``key``."""
        node = self.values[key]
        return dict(node) if isinstance(node, dict) else {}

    def check_output_paths(self, name: str, *paths: Path) -> None:
        """Checks that the output files ``paths``, set by the key ``name``, are not inputs of this config.

        Inputs are all files named by a value, and the data split files in any folder named by a key ``path``.

        Raises:
            UserError: an output would overwrite an input.
        """
        each = ((key, one) for key, of in flatten(self.values) for one in (of if isinstance(of, list) else [of]))
        texts = [(key, text) for key, text in each if isinstance(text, str) and text and key != name]
        names = {text for _, text in texts}
        for key, text in texts:
            place = Path(os.path.expanduser(text))
            folders = [place, place / "data"] if key.rpartition(".")[2] == "path" else []
            for path in paths:
                split = path.name.partition(".")[0] in names and any(_is_same_file(path.parent, one) for one in folders)
                if split or (_is_same_file(path, place) and not path.is_dir()):
                    raise UserError(
                        f"{name}={path} is an input of this command ({key}={text}): choose a different output file"
                    )


def _is_same_file(path: Path, other: Path) -> bool:
    return os.path.exists(path) and os.path.exists(other) and os.path.samefile(path, other)


def _replace_at(node: Any, names: Sequence[str], value: object) -> Any:
    """Copies a dataclass or mapping and replaces the value at the path ``names``."""
    if not names:
        return value
    if isinstance(node, Mapping):
        return {**node, names[0]: _replace_at(node.get(names[0], {}), names[1:], value)}
    return replace(node, **{names[0]: _replace_at(getattr(node, names[0]), names[1:], value)})


@dataclass(frozen=True)
class ParsedConfig:
    """Result of parsing a config.

    ``root``: ABSENT if it cannot be built; ``missing``: keys that are still ``???``; ``unused``: keys without effect,
    mapped to the reasons.
    """

    root: object
    problems: list[str]
    missing: list[str]
    unused: dict[str, str]

    def as_type(self, kind: type[SomeRoot]) -> SomeRoot:
        """Returns the root as an instance of ``kind``; raises a single UserError with all problems."""
        report_problems(self.problems or [missing_value_message(path) for path in self.missing if self.root is ABSENT])
        if not isinstance(self.root, kind):
            got = type(self.root).__name__
            raise UserError(f"config: _target_ at the top level must be a {kind.__name__}, got {got}")
        return self.root

    def is_unused(self, key: str) -> bool:
        """Returns whether ``key`` has no effect, given the other keys."""
        return any(f"{key}.".startswith(f"{path}.") for path in self.unused)

    def unused_overrides(self) -> dict[str, str]:
        """Returns the overrides that have no effect, mapped to the reasons."""
        given = self.root.composed.overrides if isinstance(self.root, RootConfig) else ()
        keys = {override: override.partition("=")[0].lstrip("+~") for override in given}
        return {
            override: next(why for path, why in self.unused.items() if f"{key}.".startswith(f"{path}."))
            for override, key in keys.items()
            if self.is_unused(key)
        }


def parse(cfg: DictConfig, *, complete: bool = False) -> ParsedConfig:
    """Parses ``cfg`` into its typed root. Strings may still be ``???`` unless ``complete`` is set."""
    _register_resolvers()
    reader = ConfigReader(complete=complete)
    origins: dict[str, str] = {}
    values = cast(dict[str, Json], to_plain_values(cfg, "", reader.problems, origins))
    root = reader.read(values, Any, "")
    if isinstance(root, RootConfig):
        object.__setattr__(root, "values", values)
    return ParsedConfig(root, add_origin_keys(reader.problems, origins), reader.missing, reader.unused)


def validate(cfg: DictConfig, *, complete: bool = True) -> None:
    """Raises a single UserError with all problems of ``cfg`` by key; ``complete=False`` accepts ``???``."""
    report_problems(parse(cfg, complete=complete).problems)


def load(name: str, overrides: Sequence[str] = (), config_dir: Path | None = None) -> Any:
    """Composes and parses the config ``name`` with ``overrides``. Raises UserError like ``validate``."""
    return parse(compose(name, overrides, config_dir)).as_type(RootConfig)


def parse_as(cfg: DictConfig, kind: type[SomeRoot]) -> SomeRoot:
    """Parses ``cfg`` into a root of the class ``kind``. Raises UserError like ``validate``."""
    return parse(cfg).as_type(kind)


def parse_subset(cfg: DictConfig, kind: type[SomeRoot]) -> SomeRoot:
    """Parses only those keys of ``cfg`` that the smaller root ``kind`` has; other keys may be missing or invalid."""
    values, reader = to_container(cfg), ConfigReader(complete=False)
    root = reader.build(kind, {item.name: values[item.name] for item in fields(kind) if item.init}, "")
    return ParsedConfig(root, reader.problems, reader.missing, reader.unused).as_type(kind)


def instantiate(node: object) -> Any:
    """Builds the component of a ``_target_`` node, including nested ones. Raises UserError like ``validate``."""
    _register_resolvers()
    reader = ConfigReader()
    path = str(node._get_full_key(None)) if isinstance(node, DictConfig) else ""
    value = to_plain_values(node, path, reader.problems)
    if not isinstance(value, dict) or "_target_" not in value:
        raise UserError(f"{path or 'config'}: expected a component (a node with _target_), got {value!r}")
    built = reader.read_component(value, Any, path)
    report_problems(reader.problems)
    return built


def to_container(cfg: DictConfig) -> dict[str, Json]:
    """Converts ``cfg`` to resolved dicts and lists; keeps ``???``.

    Raises UserError for interpolations that cannot be resolved.
    """
    _register_resolvers()
    problems: list[str] = []
    values = cast(dict[str, Json], to_plain_values(cfg, "", problems))
    report_problems(problems)
    return values


def to_yaml(values: Mapping[str, Json]) -> str:
    """Formats a config's plain values as YAML with secrets masked; all other values are read back unchanged."""
    saved = to_savable(values)
    if (found := digest_env_values(values)) and isinstance(composed := saved.get("composed"), dict):
        composed["environment"] = found
    return OmegaConf.to_yaml(OmegaConf.create(saved))
