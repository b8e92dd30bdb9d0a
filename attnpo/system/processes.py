"""Processes of a job: how many, and which one this is, by what launchers announce; what runs before a sudden end."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def rank_and_world_size() -> tuple[int, int]:
    """Returns (rank, number of processes) of this job as torchrun, Lightning or SLURM announce them.

    (0, 1) otherwise.
    """
    for rank, ranks in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if ranks in os.environ:
            return int(os.environ.get(rank, os.environ.get("LOCAL_RANK", "0"))), int(os.environ[ranks])
    return 0, 1


def world_size() -> int:
    """Returns the number of processes of this job."""
    return rank_and_world_size()[1]


def launched_processes() -> tuple[int, int | None] | None:
    """Returns (processes, nodes) that a launcher started; None where none did, so that training starts its own.

    The nodes are None where the launcher does not name them. torchrun is one for a single process too.
    """
    ranks = world_size()
    if ranks == 1 and "LOCAL_WORLD_SIZE" not in os.environ:
        return None
    if "WORLD_SIZE" in os.environ:
        each = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
        return ranks, ranks // each if each and ranks % each == 0 else None
    nodes = os.environ.get("SLURM_STEP_NUM_NODES", os.environ.get("SLURM_NNODES"))
    return ranks, None if nodes is None else int(nodes)


def local_rank() -> int:
    """Returns this process's place among those of its node."""
    return int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))


def is_main_process() -> bool:
    """Returns whether this process reports for its job."""
    return rank_and_world_size()[0] == 0 and os.environ.get("NODE_RANK", "0") == "0"


_exit_callbacks: list[Callable[[], None]] = []


@contextmanager
def before_abrupt_exit(act: Callable[[], None]) -> Iterator[None]:
    """Opens a context in which ``act`` is called before a signal ends this process at once, without an exception."""
    _exit_callbacks.append(act)
    try:
        yield
    finally:
        _exit_callbacks.remove(act)


def is_slurm_task() -> bool:
    """Returns whether it is SLURM that numbers this job's processes, and no launcher inside its job."""
    return "WORLD_SIZE" not in os.environ and launched_processes() is not None


def describe_launcher() -> tuple[str, str]:
    """Returns what started this job's processes, and what to put before a command that is to be one process there."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun", ""
    if "WORLD_SIZE" not in os.environ and "SLURM_NTASKS" in os.environ:
        return "SLURM (srun or sbatch --ntasks)", "srun --ntasks=1 "
    if "LOCAL_RANK" in os.environ:
        return "torchrun or its like (LOCAL_RANK is set)", ""
    return "a launcher that sets WORLD_SIZE", "env -u WORLD_SIZE -u RANK "
