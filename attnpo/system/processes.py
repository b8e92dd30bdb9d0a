"""Rank and size of a job from its launcher's environment variables, and callbacks on abrupt exit."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def rank_and_world_size() -> tuple[int, int]:
    """Returns this process's rank and the world size as set by torchrun, Lightning or SLURM; (0, 1) otherwise."""
    for rank, ranks in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if ranks in os.environ:
            return int(os.environ.get(rank, os.environ.get("LOCAL_RANK", "0"))), int(os.environ[ranks])
    return 0, 1


def world_size() -> int:
    """Returns the number of processes in this job."""
    return rank_and_world_size()[1]


def launched_processes() -> tuple[int, int | None] | None:
    """Returns how many processes and nodes the launcher started; None without a launcher.

    Without a launcher, training starts its own processes. The number of nodes is None if the launcher does not set it.
    torchrun counts as a launcher even for one process.
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
    """Returns this process's rank within its node."""
    return int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))


def is_main_process() -> bool:
    """Returns whether this is the main process of its job, the only one that logs."""
    return rank_and_world_size()[0] == 0 and os.environ.get("NODE_RANK", "0") == "0"


_exit_callbacks: list[Callable[[], None]] = []


@contextmanager
def before_abrupt_exit(act: Callable[[], None]) -> Iterator[None]:
    """Calls ``act`` if a signal terminates this process without an exception while the context is open."""
    _exit_callbacks.append(act)
    try:
        yield
    finally:
        _exit_callbacks.remove(act)


def is_slurm_task() -> bool:
    """Returns whether SLURM itself assigns this job's ranks, rather than a launcher inside the SLURM job."""
    return "WORLD_SIZE" not in os.environ and launched_processes() is not None


def describe_launcher() -> tuple[str, str]:
    """Returns the name of the launcher, and a command prefix that runs a single process under it."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun", ""
    if "WORLD_SIZE" not in os.environ and "SLURM_NTASKS" in os.environ:
        return "SLURM (srun or sbatch --ntasks)", "srun --ntasks=1 "
    if "LOCAL_RANK" in os.environ:
        return "torchrun or a similar launcher (LOCAL_RANK is set)", ""
    return "a launcher that sets WORLD_SIZE", "env -u WORLD_SIZE -u RANK "
