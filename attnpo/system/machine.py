"""Surroundings of a command: versions and commit, the device of models that are not trained. Light: torch waits."""

import platform
import subprocess
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from attnpo.system.processes import local_rank
from attnpo.system.version import VERSION

if TYPE_CHECKING:
    import torch


def inference_device(accelerator: str) -> "torch.device":
    """Returns where models that are not trained run: the GPU of this process if ``trainer.accelerator`` allows one."""
    import torch

    if accelerator == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank() % torch.cuda.device_count())


def device_memory(device: "torch.device") -> int | None:
    """Returns bytes of memory that a device has; None where it is no GPU."""
    import torch

    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


PACKAGES = (
    *("torch", "lightning", "transformers", "datasets", "torchmetrics", "hydra-core", "Levenshtein"),
    *("numpy", "tokenizers", "peft", "bitsandbytes", "torchao"),
)
ROOT = Path(__file__).resolve().parents[2]


# --------------------------------------------------------------------------------------------- versions, machine


def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages whose change can change a number, as far as they are installed."""
    found = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return {"attnpo": VERSION, "python": platform.python_version(), **found}


def git_commit() -> str | None:
    """Returns the commit this package is checked out at, marked where files differ from it; None outside a checkout."""
    if not (ROOT / ".git").exists():
        return None
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=, changed", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def version_line() -> str:
    """Returns all versions in one line."""
    found, at = package_versions(), git_commit()
    own = f"{found.pop('attnpo')} (commit {at})" if at else found.pop("attnpo")
    return f"versions: attnpo {own} " + " ".join(f"{name} {version}" for name, version in found.items())
