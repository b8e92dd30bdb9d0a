"""Determines the number of training processes from the launcher or, if there is none, from the trainer settings."""

import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from attnpo.schema import UserError
from attnpo.system.processes import (
    describe_launcher,
    is_slurm_task,
    launched_processes,
    local_rank,
    rank_and_world_size,
)
from attnpo.training.settings import TrainerSettings

if TYPE_CHECKING:
    from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment

EVERY = ("auto", "-1")
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK")  # set by launchers


def planned_processes(settings: TrainerSettings) -> int:
    """Returns the number of processes that a launcher started or, without a launcher, that ``settings`` request."""
    started = launched_processes()
    return requested_processes(settings) if started is None else started[0]


def requested_processes(settings: TrainerSettings) -> int:
    """Returns how many processes ``settings`` request; ``auto`` means one per usable GPU, or one on a CPU."""
    return _processes_per_node(settings) * settings.num_nodes


def _processes_per_node(settings: TrainerSettings) -> int:
    if settings.devices in EVERY:
        notebook = settings.devices == "auto" and hasattr(sys, "ps1")  # Lightning uses one process there
        return 1 if notebook else max(1, count_visible_gpus(settings))
    return int(settings.devices) if settings.devices.isdigit() else len(settings.devices.split(","))


def count_visible_gpus(settings: TrainerSettings) -> int:
    """Returns the number of GPUs that this process can see and may use."""
    import torch

    return torch.cuda.device_count() if settings.accelerator != "cpu" and torch.cuda.is_available() else 0


def apply_launcher(settings: TrainerSettings) -> TrainerSettings:
    """Returns the settings with the launcher's node and device counts; unchanged without a launcher.

    Raises UserError if the trainer's settings, SLURM's variables, the GPUs or the rank's variables contradict the
    launcher.
    """
    started = launched_processes()
    total, nodes = started or (requested_processes(settings), None)
    nodes = nodes or settings.num_nodes
    _require_launcher(total, nodes)
    if started is None:
        _require_usable_devices(settings)
        return settings
    each, rest = divmod(total, nodes)
    name = describe_launcher()[0]
    if is_slurm_task() and "SLURM_STEP_ID" not in os.environ:
        raise UserError(
            f"SLURM_NTASKS is {total}, but srun did not start this process, so it would wait for the others forever: "
            "put srun before the command, or run it as one process with srun --ntasks=1"
        )
    if rest:
        raise UserError(
            f"{name} started {total} processes on {nodes} nodes, but not the same number on each: use "
            "srun --ntasks-per-node"
        )
    given = None if settings.devices in EVERY else _processes_per_node(settings)
    if given not in (None, each) or settings.num_nodes not in (1, nodes):
        asked = f"trainer.devices={settings.devices} and trainer.num_nodes={settings.num_nodes}"
        raise UserError(
            f"{name} started {total} processes on {nodes} node{'s' * (nodes > 1)}, but {asked} request "
            f"{'a different number' if given is None else given * settings.num_nodes}: omit both (they follow the "
            "launcher), or start as many processes as they request"
        )
    gpus = count_visible_gpus(settings)
    if 0 < gpus < each and not (gpus == 1 and is_slurm_task()):  # SLURM may show each task a GPU of its own
        raise UserError(
            f"{name} started {each} processes on this node, but {gpus} GPU{'s are' if gpus > 1 else ' is'} visible: "
            "start as many processes as there are GPUs, or set trainer.accelerator=cpu"
        )
    return replace(settings, devices=str(each) if given is None else settings.devices, num_nodes=nodes)


def _require_launcher(total: int, nodes: int) -> None:
    """Raises UserError if variables set a rank without a launcher; training would wait forever or write nothing."""
    given = [f"{name}={os.environ[name]}" for name in PLACE if name in os.environ]
    if not given or "TORCHELASTIC_RUN_ID" in os.environ or is_slurm_task():
        return
    needed = ["LOCAL_RANK"] if launched_processes() is not None else []
    needed += ["MASTER_ADDR", "MASTER_PORT"] if needed or nodes > 1 or "LOCAL_RANK" in os.environ else []
    lacking = [name for name in needed if total > 1 and name not in os.environ]
    node = int(os.environ.get("NODE_RANK", os.environ.get("GROUP_RANK", "0")))
    place = node * (total // nodes) + local_rank()
    if lacking or place >= total or ("RANK" in os.environ and rank_and_world_size()[0] != place):
        why = f"{', '.join(lacking)} not set" if lacking else f"NODE_RANK and LOCAL_RANK make it rank {place}"
        raise UserError(
            f"the environment ({', '.join(given)}) makes this process one of {total} on {nodes} "
            f"node{'s' * (nodes > 1)}, but no launcher started it ({why}), so training would wait for the others "
            "forever: start it with torchrun or srun, or as a single process with "
            f"`env {' '.join(f'-u {name}' for name in PLACE if name in os.environ)}` before the command"
        )


def _require_usable_devices(settings: TrainerSettings) -> None:
    """Raises UserError for several nodes without a launcher, and for a list of GPUs on a machine that has none."""
    if settings.num_nodes > 1 and not {"NODE_RANK", "GROUP_RANK"} & os.environ.keys():
        raise UserError(
            f"trainer.num_nodes={settings.num_nodes} needs a launcher to start the processes on every node: use "
            f"torchrun --nnodes {settings.num_nodes} or srun, and omit trainer.num_nodes"
        )
    if not count_visible_gpus(settings) and not (settings.devices == "auto" or settings.devices.isdigit()):
        raise UserError(
            f"trainer.devices={settings.devices} names GPUs, but none can be used here: on a CPU, set it to auto "
            "(one process) or to a number of processes"
        )


def make_cluster_environment() -> "ClusterEnvironment | None":
    """Returns the environment that tells Lightning the process rank; None if Lightning detects the launcher itself."""
    from lightning.fabric.plugins.environments.lightning import LightningEnvironment

    from attnpo.training.trainer import SrunEnvironment

    if is_slurm_task():
        return SrunEnvironment()
    alone = "SLURM_NTASKS" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ
    return LightningEnvironment() if alone else None


def require_world_size(trainer: int, settings: TrainerSettings) -> None:
    """Raises UserError unless the trainer has as many processes as ``settings`` request."""
    wanted = requested_processes(settings)
    if trainer != wanted:
        raise UserError(
            f"trainer.devices={settings.devices} and trainer.num_nodes={settings.num_nodes} request {wanted} "
            f"process{'es' * (wanted > 1)}, but Lightning's trainer has {trainer}: start the run with torchrun or "
            "srun, or set both to match"
        )


def describe_machine(settings: TrainerSettings, seed: int) -> str:
    """Lists devices, processes, threads and seed in one line."""
    import torch

    processes = planned_processes(settings)
    threads = settings.threads or torch.get_num_threads()
    names = ["cpu"]
    if settings.accelerator != "cpu" and torch.cuda.is_available():
        names = [torch.cuda.get_device_name(place) for place in range(torch.cuda.device_count())]
    devices = ", ".join(dict.fromkeys(f"{names.count(name)} x {name}" if len(names) > 1 else name for name in names))
    return f"devices: {devices}; processes {processes}; CPU threads per process {threads}; seed {seed}"
