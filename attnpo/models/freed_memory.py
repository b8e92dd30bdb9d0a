"""How the C library treats freed memory while forwards run on a CPU.

Owns the settings of glibc's malloc for the time of a pass, and imports nothing of this package. By default glibc hands
large freed blocks back to the system, which has to clear every page again when the next layer asks for the same block.
"""

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

# Parameters of mallopt(3).
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
KEEP = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: 2**31 - 1}
# A setting cannot be taken back to glibc's moving thresholds; these are the values at which they end up.
USUAL = {M_MMAP_MAX: 65536, M_MMAP_THRESHOLD: 32 << 20, M_TRIM_THRESHOLD: 64 << 20}


@contextmanager
def freed_memory_kept(device: torch.device) -> Iterator[None]:
    """A context in which memory freed on a CPU stays with the process, to be given out again as it is.

    It goes back to the system at the end. Nothing is changed on other devices, without glibc, and where the environment
    has settings of its own for malloc.
    """
    library = _glibc() if device.type == "cpu" else None
    if library is None:
        yield
        return
    _set(library, KEEP)
    try:
        yield
    finally:
        _set(library, USUAL)
        library.malloc_trim(0)


@cache
def _glibc() -> Any:
    """The C library if it is glibc and nobody has set its malloc, else None."""
    settled = any(name.startswith("MALLOC_") for name in os.environ) or "GLIBC_TUNABLES" in os.environ
    if settled or platform.libc_ver()[0] != "glibc":
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None


def _set(library: Any, values: dict[int, int]) -> None:
    for name, value in values.items():
        library.mallopt(name, value)
