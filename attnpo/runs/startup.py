"""What a command says first: itself, where results go, the store, its configuration, versions and machine.

Only the process that leads a job speaks; a study's points log into their own files. Light: nothing heavy is loaded.
"""

import logging
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from attnpo.config import plain
from attnpo.files import folder_size, in_bytes
from attnpo.machine import machine_line, version_line
from attnpo.runs.folders import store_root

log = logging.getLogger(__name__)


def announce(command: str, cfg: DictConfig, folder: Path | None) -> None:
    """Nothing; logs the lines of ``opening``."""
    for line in opening(command, cfg, folder):
        log.info("%s", line)


def opening(command: str, cfg: DictConfig, folder: Path | None) -> Iterator[str]:
    """The first lines of ``command`` (fit, weigh), which writes into ``folder`` if there is one."""
    given = [str(override) for override in cfg.composed.get("overrides", [])]
    yield shlex.join(["python", "-m", f"attnpo.{command}", *given])
    if folder is not None:
        state = ", which exists" if folder.exists() else ""
        yield f"run folder: {folder}{state}; the full configuration will be in its config.yaml"
    store = store_root(cfg)
    yield f"store: {store} ({in_bytes(folder_size(store))})"
    yield from config_lines(plain(cfg))
    yield version_line()
    yield machine_line(cfg)


# --------------------------------------------------------------------------------------------- configuration


def config_lines(values: Mapping[str, Any]) -> Iterator[str]:
    """A line per part of a resolved configuration; null, empty and named grids, which `study` has, left out."""
    own = {key: value for key, value in values.items() if not isinstance(value, dict) and key != "_target_"}
    yield "run: " + " ".join(_settings(own))
    for key, value in values.items():
        if isinstance(value, dict) and key not in ("composed", "grids") and any(_settings(value)):
            name = str(value.get("_target_", "")).rpartition(".")[2]
            yield f"{key}: " + " ".join(part for part in (name, *_settings(value)) if part)


def _settings(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in values.items():
        if key == "_target_" or value is None or value in ([], {}, ""):
            continue
        if isinstance(value, dict):
            found += _settings(value, f"{prefix}{key}.")
        else:
            found.append(f"{prefix}{key}={_scalar(value)}")
    return found


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(_scalar, value))}]"
    text = str(value)
    return repr(text) if " " in text or "\n" in text else text


_said: set[str] = set()


def log_once(lines: Iterable[str]) -> None:
    """Nothing; logs the lines that this process has not logged yet: the points of a study share most of them."""
    for line in lines:
        if line not in _said:
            _said.add(line)
            log.info("%s", line)
