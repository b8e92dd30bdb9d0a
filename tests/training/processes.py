"""Starts a command as two processes that find each other, as torchrun or srun would."""

import os
import socket
from collections.abc import Sequence
from pathlib import Path

from tests import warm

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def in_two_processes(
    arguments: Sequence[str], folder: Path, patience: float = 300, *, slurm: bool = False
) -> tuple[list[int], str]:
    """Exit codes and output of two Python processes with ``arguments``; the output passes through ``folder``.

    They have the variables that torchrun sets, or with ``slurm`` those of `srun --ntasks=2`.
    """
    port, place = free_port(), of_srun if slurm else of_torchrun
    processes = [_start(arguments, place(rank), port, folder / f"rank{rank}.txt") for rank in range(2)]
    try:
        codes = [process.wait(timeout=patience) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return codes, "\n".join((folder / f"rank{rank}.txt").read_text() for rank in range(2))


def of_torchrun(rank: int, ranks: int = 2, each: int = 2) -> dict[str, str]:
    """The variables by which torchrun tells a process its place among ``ranks``, ``each`` of them on a node."""
    place = {"RANK": rank, "LOCAL_RANK": rank % each, "GROUP_RANK": rank // each}
    sizes = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": each}
    return {"TORCHELASTIC_RUN_ID": "none", **{name: str(value) for name, value in {**place, **sizes}.items()}}


def of_srun(rank: int, ranks: int = 2, nodes: int = 1) -> dict[str, str]:
    """The same of srun without --ntasks-per-node."""
    each = ranks // nodes
    place = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank % each, "SLURM_NODEID": rank // each}
    sizes = {"SLURM_NTASKS": ranks, "SLURM_STEP_NUM_NODES": nodes, "SLURM_STEP_ID": 0, "SLURM_JOB_ID": 12345}
    return {name: str(value) for name, value in {**place, **sizes}.items()}


def _start(arguments: Sequence[str], place: dict[str, str], port: int, output: Path) -> warm.Process:
    more = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return warm.start(arguments, {**os.environ, **place, **more}, output, Path.cwd())
