"""Environment of a command: package versions, git commit and device for inference. Imports torch only when needed."""

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
    """Returns the device for inference: this process's GPU if ``trainer.accelerator`` allows one, otherwise the CPU."""
    import torch

    if accelerator == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank() % torch.cuda.device_count())


def device_memory(device: "torch.device") -> int | None:
    """Returns a GPU's memory in bytes; None for other devices."""
    import torch

    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


PACKAGES = (
    *("torch", "lightning", "transformers", "datasets", "torchmetrics", "hydra-core", "Levenshtein"),
    *("numpy", "tokenizers", "peft", "bitsandbytes", "torchao"),
)
ROOT = Path(__file__).resolve().parents[2]


# --------------------------------------------------------------------------------------------- versions, machine


def package_versions() -> dict[str, str]:
    """Returns versions of attnpo, Python and the installed packages that can affect results."""
    found = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return {"attnpo": VERSION, "python": platform.python_version(), **found}


def git_commit() -> str | None:
    """Returns the checkout's git commit, followed by ", changed" if files have changed; None outside a checkout."""
    if not (ROOT / ".git").exists():
        return None
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=, changed", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def version_line() -> str:
    """Returns one line with the versions of attnpo and the packages it uses."""
    found, at = package_versions(), git_commit()
    own = f"{found.pop('attnpo')} (commit {at})" if at else found.pop("attnpo")
    return f"versions: attnpo {own} " + " ".join(f"{name} {version}" for name, version in found.items())
