"""What a process has parsed and composed, kept: a study composes each point several times, from the same few files.

Both hold for files as they are: one that changes, by its time or its size, is read anew. Points that choose the same
options differ in single values alone, which Hydra applies last: what the options gave is kept for all of them.
"""

import hashlib
import math
import os
import pickle
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.core_plugins.importlib_resources_config_source import ImportlibResourcesConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import ConfigCompositionException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig

from attnpo.system.errors import UserError

MOST = 1000  # compositions that are kept, of some 20 KiB each
LARGEST = 100_000  # values in a file of YAML; the largest here has some hundreds

_parsed: dict[tuple[str, ...], tuple[tuple[int, ...], bytes]] = {}
_composed: dict[Hashable, bytes] = {}


@contextmanager
def readable(file: Path) -> Iterator[None]:
    """Opens a context in which OmegaConf reads ``file``, once its aliases are known to name no more than it can hold.

    UserError for a file that is not YAML, and for one that is nested too deeply or multiplies itself by aliases.
    """
    try:
        text = file.read_text(encoding="utf-8")
        if "&" in text and "*" in text and _size(yaml.compose(text, yaml.SafeLoader), {}) > LARGEST:
            raise UserError(
                f"{file}: its aliases (*NAME) stand for more than {LARGEST} values; write out what it needs"
            )
        yield
    except (yaml.YAMLError, UnicodeError, RecursionError) as problem:
        why = "it is nested too deeply" if isinstance(problem, RecursionError) else " ".join(str(problem).split())
        raise UserError(
            f"{file}: expected a configuration in YAML, but it cannot be read ({why}); correct it"
        ) from problem


def _size(node: yaml.Node | None, known: dict[int, float]) -> float:
    """Counts the values below a node, each use of an alias anew; those of one that holds itself are infinite."""
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) not in known:
        known[id(node)] = math.inf
        parts = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
        known[id(node)] = 1 + sum(_size(part, known) for part in parts)
    return known[id(node)]


class ParsedFiles(FileConfigSource):
    """Hydra's source of ``file://``, which keeps what it has parsed and gives copies of it."""

    def load_config(self, config_path: str) -> ConfigResult:
        """Returns the configuration at ``config_path``, Hydra's own error where there is no such file."""
        file = os.path.join(self.path, self._normalize_file_name(config_path))
        if not os.path.exists(file):
            return super().load_config(config_path)
        found = os.stat(file)
        with readable(Path(file)):
            return _copy(self, config_path, (found.st_mtime_ns, found.st_size), super().load_config)


class ParsedPackage(ImportlibResourcesConfigSource):
    """The same of ``pkg://``: Hydra's own configuration, which stays as it was installed."""

    def load_config(self, config_path: str) -> ConfigResult:
        """Returns the configuration at ``config_path``, Hydra's own error where there is no such file."""
        return _copy(self, config_path, (), super().load_config)


def _copy(
    source: ConfigSource, config_path: str, state: tuple[int, ...], parse: Callable[[str], ConfigResult]
) -> ConfigResult:
    """Returns what is parsed at ``config_path``, as a copy: Hydra takes the defaults list out of it.

    Pickle makes one five times as fast as OmegaConf's deepcopy.
    """
    key = (source.scheme(), source.provider, source.path, config_path)
    if key not in _parsed or _parsed[key][0] != state:
        _parsed[key] = (state, pickle.dumps(parse(config_path)))
    result: ConfigResult = pickle.loads(_parsed[key][1])
    return result


def keep_parsed() -> None:
    """Makes Hydra read configuration files through ``ParsedFiles`` and ``ParsedPackage`` from now on."""
    Plugins.instance()  # brings Hydra's own sources, which they replace
    for source in (ParsedFiles, ParsedPackage):
        SourcesRegistry.instance().types[source.scheme()] = source


def kept(key: Hashable, folders: Sequence[Path], make: Callable[[], DictConfig]) -> DictConfig:
    """Returns a copy of what ``make`` composed for this ``key`` from the files in ``folders``; ``make`` is called if
    need be.

    What ``make`` raises is passed on and not kept.
    """
    whole = (key, _state(folders))
    if whole not in _composed:
        made = pickle.dumps(make())
        if len(_composed) >= MOST:
            _composed.clear()
        _composed[whole] = made
    cfg: DictConfig = pickle.loads(_composed[whole])
    return cfg


def choices_and_values(overrides: Sequence[str], folders: Sequence[Path]) -> tuple[list[str], list[str]]:
    """``overrides`` parted as Hydra parts them: those that choose options of groups, and those of single values."""
    choices: list[str] = []
    values: list[str] = []
    for override in overrides:
        group = override.lstrip("+~").partition("=")[0].partition("@")
        chosen = bool(group[1]) or any((folder / group[0]).is_dir() for folder in folders)
        (choices if chosen else values).append(override)
    return choices, values


def put(values: Sequence[str], cfg: DictConfig) -> None:
    """Applies overrides of single values to ``cfg``, as Hydra does after all choices.

    Raises Hydra's and OmegaConf's own errors, with less said than where Hydra composes the whole.
    """
    parsed = OverridesParser.create().parse_overrides(list(values))
    for override in parsed:
        if override.is_sweep_override():
            raise ConfigCompositionException(f"{override.input_line}: several values")
    ConfigLoaderImpl._apply_overrides_to_config(parsed, cfg)


def _state(folders: Sequence[Path]) -> str:
    """Returns a digest of the names, times and sizes of all configuration files in ``folders``."""
    files = sorted(file for folder in folders for file in folder.rglob("*.yaml"))
    found = [(str(file), file.stat()) for file in files]
    return hashlib.sha256(repr([(file, at.st_mtime_ns, at.st_size) for file, at in found]).encode()).hexdigest()
