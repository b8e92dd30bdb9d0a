"""Configuration files for Hydra, parsed once: a study composes hundreds of points from the same few.

A file that changes, by its time or its size, is parsed anew.
"""

import os
from copy import deepcopy
from dataclasses import replace

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult

_parsed: dict[tuple[str, ...], tuple[tuple[int, int], ConfigResult]] = {}


class ParsedFiles(FileConfigSource):
    """Hydra's source of ``file://``, which keeps what it has parsed and gives copies of it."""

    def load_config(self, config_path: str) -> ConfigResult:
        """The configuration at ``config_path``, Hydra's own error where there is no such file."""
        file = os.path.join(self.path, self._normalize_file_name(config_path))
        if not os.path.exists(file):
            return super().load_config(config_path)
        found = os.stat(file)
        key, state = (self.provider, self.path, config_path), (found.st_mtime_ns, found.st_size)
        if key not in _parsed or _parsed[key][0] != state:
            _parsed[key] = (state, super().load_config(config_path))
        result = _parsed[key][1]
        return replace(result, config=deepcopy(result.config))  # Hydra takes the defaults list out of it


def keep_parsed() -> None:
    """Makes Hydra read configuration files through ``ParsedFiles`` from now on."""
    Plugins.instance()  # brings Hydra's own sources, one of which it replaces
    SourcesRegistry.instance().types[ParsedFiles.scheme()] = ParsedFiles
