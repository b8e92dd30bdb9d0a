"""What a command says first: itself, where results go, the store, its configuration, versions and machine.

Only the process that leads a job speaks; a study's points log into their own files. Light: nothing heavy is loaded.
"""

import logging
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from attnpo.files import Json, flat, folder_size, in_bytes
from attnpo.machine import machine_line, version_line
from attnpo.runs.folders import store_root
from attnpo.runs.run_config import RunConfig

log = logging.getLogger(__name__)


def announce(command: str, cfg: RunConfig, folder: Path | None) -> None:
    """Logs the lines of ``opening``."""
    for line in opening(command, cfg, folder):
        log.info("%s", line)


def opening(command: str, cfg: RunConfig, folder: Path | None) -> Iterator[str]:
    """The first lines of ``command`` (fit, weigh), which writes into ``folder`` if there is one."""
    yield shlex.join(["python", "-m", f"attnpo.{command}", *cfg.composed.overrides])
    if folder is not None:
        state = ", which exists" if folder.exists() else ""
        yield f"run folder: {folder}{state}; the full configuration will be in its config.yaml"
    store = store_root(cfg)
    yield f"store: {store} ({in_bytes(folder_size(store))})"
    yield from config_lines(cfg.values)
    yield version_line()
    yield machine_line(cfg.trainer, cfg.seed)


# --------------------------------------------------------------------------------------------- configuration


def config_lines(values: Mapping[str, Json]) -> Iterator[str]:
    """A line per part of a resolved configuration; null, empty and named grids, which `study` has, left out."""
    own = {key: value for key, value in values.items() if not isinstance(value, dict) and key != "_target_"}
    yield "run: " + " ".join(_settings(own))
    for key, value in values.items():
        if isinstance(value, dict) and key not in ("composed", "grids") and any(_settings(value)):
            name = str(value.get("_target_", "")).rpartition(".")[2]
            yield f"{key}: " + " ".join(part for part in (name, *_settings(value)) if part)


def _settings(values: Mapping[str, Json]) -> list[str]:
    return [
        f"{name}={_scalar(value)}"
        for name, value in flat(values)
        if name.rpartition(".")[2] != "_target_" and value is not None and value not in ([], {}, "")
    ]


def _scalar(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(_scalar, value))}]"
    text = str(value)
    return repr(text) if " " in text or "\n" in text else text


_said: set[str] = set()


def log_once(lines: Iterable[str], level: int = logging.INFO) -> None:
    """Logs the lines that this process has not logged yet: the points of a study share most of them."""
    for line in lines:
        if line not in _said:
            _said.add(line)
            log.log(level, "%s", line)
