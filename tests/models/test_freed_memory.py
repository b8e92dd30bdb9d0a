"""Freed memory stays with the process during a pass on the CPU, and goes back behind it."""

import platform
import resource
from pathlib import Path

import pytest
import torch

from attnpo.models import freed_memory
from attnpo.models.freed_memory import freed_memory_kept

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc is set")
CPU = torch.device("cpu")
SIZE, TIMES = 48 << 20, 6
PAGES = SIZE // resource.getpagesize()


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    freed_memory._glibc.cache_clear()


def faults() -> int:
    """Pages that the system had to give this process while blocks are asked for, filled and freed."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(TIMES):
        torch.ones(SIZE // 4)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def held() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_pages_are_given_once_inside_and_every_time_outside() -> None:
    before = faults()
    with freed_memory_kept(CPU):
        faults()
        inside, kept = faults(), held()
    assert before > 0.9 * TIMES * PAGES and faults() > 0.9 * TIMES * PAGES
    assert inside < 0.1 * PAGES
    assert held() < kept - 0.9 * SIZE, "the memory must have gone back"


def test_it_goes_back_behind_an_error_too() -> None:
    with pytest.raises(ZeroDivisionError), freed_memory_kept(CPU):
        raise ZeroDivisionError
    assert faults() > 0.9 * TIMES * PAGES


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES"])
def test_settings_of_the_environment_stand(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    with freed_memory_kept(CPU):
        assert faults() > 0.9 * TIMES * PAGES


def test_other_devices_change_nothing() -> None:
    with freed_memory_kept(torch.device("meta")):
        assert faults() > 0.9 * TIMES * PAGES
