"""Starts a command as two processes that find each other, as torchrun would."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def in_two_processes(arguments: Sequence[str], folder: Path, patience: float = 300) -> tuple[list[int], str]:
    """Exit codes and output of two Python processes with ``arguments``; the output passes through ``folder``."""
    port = free_port()
    processes = [_start(arguments, rank, port, folder / f"rank{rank}.txt") for rank in range(2)]
    try:
        codes = [process.wait(timeout=patience) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return codes, "\n".join((folder / f"rank{rank}.txt").read_text() for rank in range(2))


def _start(arguments: Sequence[str], rank: int, port: int, output: Path) -> subprocess.Popen[str]:
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": 0,
        "WORLD_SIZE": 2,
        "LOCAL_WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "test",
        "OMP_NUM_THREADS": 1,
        "PYTHONPATH": ROOT,
    }
    with output.open("w") as file:
        return subprocess.Popen(
            [sys.executable, *arguments],
            env={**os.environ, **{name: str(value) for name, value in place.items()}},
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
        )
