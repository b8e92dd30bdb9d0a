"""What a command says before anything heavy is loaded: itself, where results go, its configuration, versions, machine.

Only the process that leads a job speaks; a study's points log into their own files.
"""

import logging
import platform
import shlex
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from attnpo import __version__
from attnpo.config import plain
from attnpo.studies.folders import store_root
from attnpo.studies.processes import planned_processes

if TYPE_CHECKING:
    from attnpo.models.spec import ModelSpec

log = logging.getLogger(__name__)

PACKAGES = (
    *("torch", "lightning", "transformers", "datasets", "torchmetrics", "hydra-core", "Levenshtein"),
    *("numpy", "tokenizers", "peft", "bitsandbytes", "torchao"),
)
ROOT = Path(__file__).resolve().parents[2]


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
    """A line per part of a resolved configuration; what is null or empty is left out."""
    own = {key: value for key, value in values.items() if not isinstance(value, dict) and key != "_target_"}
    yield "run: " + " ".join(_settings(own))
    for key, value in values.items():
        if isinstance(value, dict) and key != "composed" and any(_settings(value)):
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


# --------------------------------------------------------------------------------------------- versions, machine


def versions() -> dict[str, str]:
    """Versions of Python and of the packages whose change can change a number, as far as they are installed."""
    found = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return {"attnpo": __version__, "python": platform.python_version(), **found}


def commit() -> str | None:
    """The commit this package is checked out at, marked where files differ from it; None outside a checkout."""
    if not (ROOT / ".git").exists():
        return None
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=, changed", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def version_line() -> str:
    """All versions in one line."""
    found, at = versions(), commit()
    own = f"{found.pop('attnpo')} (commit {at})" if at else found.pop("attnpo")
    return f"versions: attnpo {own} " + " ".join(f"{name} {version}" for name, version in found.items())


def machine_line(cfg: DictConfig) -> str:
    """Devices, processes, threads and seed."""
    import torch

    processes = planned_processes(cfg)
    threads = cfg.trainer.threads or torch.get_num_threads()
    names = ["cpu"]
    if cfg.trainer.accelerator != "cpu" and torch.cuda.is_available():
        names = [torch.cuda.get_device_name(place) for place in range(torch.cuda.device_count())]
    devices = ", ".join(dict.fromkeys(f"{names.count(name)} x {name}" if len(names) > 1 else name for name in names))
    return f"devices: {devices}; processes {processes}; CPU threads per process {threads}; seed {cfg.seed}"


# --------------------------------------------------------------------------------------------- model, memory, store

_said: set[str] = set()


def once(lines: Iterable[str]) -> None:
    """Nothing; logs the lines that this process has not logged yet: the points of a study share most of them."""
    for line in lines:
        if line not in _said:
            _said.add(line)
            log.info("%s", line)


def log_memory(lines: Iterable[str]) -> None:
    """Nothing; logs an estimate of the memory a run needs (``attnpo.training.memory``), before its model is loaded."""
    once(lines)


def log_model(spec: "ModelSpec") -> None:
    """Nothing; logs what a model's config says: class, parameters, layers. UserError when there is no such config."""
    from attnpo.models.loading import attention_of, load_config, model_depth
    from attnpo.training.memory import count_parameters

    layers = model_depth(spec.path, spec.revision)
    config = load_config(spec.path, spec.revision)
    parameters, adapters = count_parameters(config, spec.lora)
    name = (config.architectures or [type(config).__name__])[0]
    trained = f" ({adapters:,} more in adapters, which alone are trained)" if adapters else ""
    attention = attention_of(spec.path, spec.revision, spec.attn_implementation)
    instead = "" if attention == spec.attn_implementation else f", {attention} attention (its class has no other)"
    once([f"model: {spec.path}, {name}, {parameters:,} parameters{trained}, {spec.dtype}, {layers} layers{instead}"])


def log_store(what: str, total: int, lacking: int, difference: str | None, size: int) -> None:
    """Nothing; logs what the store holds of ``what`` and, if pairs are lacking, why and how much will be written.

    ``difference`` is the first key part in which the nearest other table differs; ``size`` an upper bound in bytes.
    """
    line = f"{what}: {total - lacking} of {total} pairs in the store"
    if lacking:
        nearest = f" (nearest stored: {difference})" if difference else ""
        line += f"{nearest}; {lacking} to compute, at most about {in_bytes(size)} to write"
    log.info("%s", line)


def folder_size(folder: Path) -> int:
    """Bytes of all files below ``folder``; 0 where there is none."""
    return sum(path.lstat().st_size for path in _files(folder))


def _files(folder: Path) -> Iterable[Path]:
    return (path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else ()


def in_bytes(count: int) -> str:
    """A number of bytes for readers: ``1.4 GiB``."""
    if count < 1024:
        return f"{count} B"
    size = count / 1024
    for unit in ("KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
