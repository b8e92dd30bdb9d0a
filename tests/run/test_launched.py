"""What a launcher started is what trains: a run's processes are torchrun's or SLURM's, or it is refused."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import rank_zero_only

from attnpo.cli.entry import run_entry
from attnpo.config.compose import load
from attnpo.fit import main
from attnpo.run.folders import STAMP
from attnpo.schema import UserError
from attnpo.system.machine import inference_device
from attnpo.training.checkpoint_folders import STATE, read_checkpoint_info
from attnpo.training.metrics_file import read_metrics
from attnpo.training.processes import apply_launcher, make_cluster_environment, planned_processes, require_world_size
from attnpo.training.settings import TrainerSettings
from attnpo.training.trainer import make_trainer, quiet_lightning
from tests import own_texts
from tests.run.worlds import World
from tests.training.processes import ROOT, free_port, in_two_processes, of_srun, of_torchrun

MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
KNOWN = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "TORCHELASTIC_RUN_ID", STAMP),
    *("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NNODES", "SLURM_STEP_NUM_NODES"),
    *("SLURM_STEP_ID", "SLURM_JOB_ID", "SLURM_NTASKS_PER_NODE", "SLURM_JOB_NAME", "MASTER_ADDR", "MASTER_PORT"),
)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KNOWN:
        monkeypatch.setenv(name, "0")  # so that what the code sets is undone afterwards
        monkeypatch.delenv(name)
    monkeypatch.setattr(rank_zero_only, "rank", 0, raising=False)  # which Lightning's environments set for good


def place(monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def trainer_of(settings: TrainerSettings, folder: Path) -> L.Trainer:
    with quiet_lightning():
        return make_trainer(settings, [], [], folder, 1, environment=make_cluster_environment())


# ------------------------------------------------------------------------------------------------ who counts


@pytest.mark.parametrize(
    ("variables", "given", "devices", "nodes", "total"),
    [
        (of_torchrun(0, 2, 2), {}, "2", 1, 2),
        (of_torchrun(5, 8, 4), {}, "4", 2, 8),
        (of_torchrun(0, 1, 1), {}, "1", 1, 1),  # Lightning's "auto" would be one process for each GPU
        (of_torchrun(0, 8, 4), {"devices": "4", "num_nodes": 2}, "4", 2, 8),
        (of_torchrun(0, 2, 2), {"devices": "-1"}, "2", 1, 2),
        (of_srun(0, 2, 1), {}, "2", 1, 2),
        (of_srun(7, 8, 2), {"devices": "4"}, "4", 2, 8),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "1", **MEETING}, {"devices": "2"}, "2", 1, 2),  # Lightning's own
        ({"WORLD_SIZE": "4", "LOCAL_RANK": "1", "NODE_RANK": "1", **MEETING}, {"num_nodes": 2}, "2", 2, 4),
        ({"NODE_RANK": "0", **MEETING}, {"devices": "3", "num_nodes": 2}, "3", 2, 6),
        ({}, {}, "auto", 1, 1),
        ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, {"devices": "3"}, "3", 1, 3),  # Lightning starts the others
    ],
)
def test_devices_follow_the_launcher(
    variables: dict[str, str],
    given: dict[str, Any],
    devices: str,
    nodes: int,
    total: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Settings, the log's count and the trainer that is built agree."""
    place(monkeypatch, variables)
    settings = apply_launcher(TrainerSettings(accelerator="cpu", **given))
    assert (settings.devices, settings.num_nodes) == (devices, nodes)
    written = [f"trainer.{key}={value}" for key, value in given.items()]
    assert planned_processes(load("fit", ["trainer.accelerator=cpu", *written]).trainer) == total
    trainer = trainer_of(settings, tmp_path)
    assert trainer.world_size == total
    require_world_size(trainer.world_size, settings)


@pytest.mark.parametrize(
    ("variables", "given", "words"),
    [
        (of_torchrun(0, 2, 2), ["trainer.devices=1"], "trainer.devices=1 and trainer.num_nodes=1 request 1"),
        (of_torchrun(1, 2, 2), ["trainer.devices='0,1,2'"], "torchrun started 2 .* trainer.devices=0,1,2 .* request 3"),
        (of_torchrun(0, 4, 2), ["trainer.num_nodes=4"], "4 processes on 2 nodes, .* trainer.num_nodes=4 request"),
        (of_srun(1, 2, 1), ["trainer.devices=4"], r"SLURM .* started 2 .* trainer.devices=4 .* request 4"),
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, [], "SLURM_NTASKS is 2, but srun did not start this process"),
    ],
)  # fmt: skip
def test_a_trainer_that_contradicts_the_launcher_is_refused(
    variables: dict[str, str],
    given: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On every process, in one line, before a model or data are looked for."""
    place(monkeypatch, variables)
    overrides = ["setting=real_smoke", "model.path=nowhere", "data.path=nowhere", "name=x", f"output={tmp_path}"]
    status = run_entry(main, "fit", [*overrides, "trainer.accelerator=cpu", *given], "", "")
    error = capsys.readouterr().err.splitlines()[-1]
    assert status == 2 and re.search(words, error), error


@pytest.mark.parametrize(
    ("variables", "given", "why"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, [], "LOCAL_RANK, MASTER_ADDR, MASTER_PORT not set"),
        ({"WORLD_SIZE": "2", **MEETING}, [], "LOCAL_RANK not set"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, [], "MASTER_ADDR, MASTER_PORT not set"),
        ({"LOCAL_RANK": "1"}, ["trainer.devices='2'"], "MASTER_ADDR, MASTER_PORT not set"),
        ({"NODE_RANK": "1"}, ["trainer.num_nodes=2"], "MASTER_ADDR, MASTER_PORT not set"),
        ({"NODE_RANK": "1"}, [], "make it rank 1"),
        ({"RANK": "1", "WORLD_SIZE": "1"}, [], "make it rank 0"),
        ({"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", **MEETING}, [], "make it rank 0"),
        ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "2", **MEETING}, [], "make it rank 2"),
    ],
)
def test_a_rank_without_a_launcher_is_refused(
    variables: dict[str, str],
    given: list[str],
    why: str,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It waited for the others for ever, or trained in silence and wrote no result."""
    place(monkeypatch, variables)
    (tmp_path / "file").touch()  # for a folder, so that it goes no further where it is not refused
    given = [*world.overrides("experiment=none", "name=x", f"output={tmp_path / 'file'}"), *given]
    status = run_entry(main, "fit", given, "", "")
    error = capsys.readouterr().err.splitlines()[-1]
    assert status == 2 and "no launcher started it" in error and why in error, error
    unset = " ".join(f"-u {name}" for name in variables if name not in MEETING)
    assert f"`env {unset}` before the command" in error


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            TrainerSettings(num_nodes=2, accelerator="cpu"),
            "trainer.num_nodes=2 needs a launcher to start the processes on every node",
        ),
        (TrainerSettings(devices="-1", accelerator="cpu"), "trainer.devices=-1 names GPUs, but none can be used"),
        (TrainerSettings(devices="0,1", accelerator="cpu"), "trainer.devices=0,1 names GPUs, but none can be used"),
    ],
)
def test_what_no_launcher_stands_behind_is_refused(settings: TrainerSettings, words: str) -> None:
    """Lightning waited for the other node for ever, deaf to SIGTERM."""
    with pytest.raises(UserError) as caught:
        apply_launcher(settings)
    assert str(caught.value).startswith(words)


def test_a_split_with_fewer_pairs_than_processes_is_refused(world: World, tmp_path: Path) -> None:
    given = (
        "experiment=none",
        "weights=uniform",
        "name=x",
        f"output={tmp_path}",
        "data.val_rows='1'",
        "trainer.devices='2'",
    )
    with pytest.raises(UserError, match=r"^val: 1 pair for 2 processes, .*data\.val_rows"):
        main(world.config(*given))


def test_a_command_leaves_the_process_group(world: World, tmp_path: Path) -> None:
    """Left open, its threads may abort a process at exit."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    given = ("experiment=none", "weights=uniform", "name=x", f"output={tmp_path}", "trainer.max_steps=1")
    assert main(world.config(*given)) == 0
    assert not torch.distributed.is_initialized()


def test_a_trainer_of_another_size_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of(TrainerSettings(accelerator="cpu", devices="2"), tmp_path)
    asked = TrainerSettings(accelerator="cpu", num_nodes=3)
    words = r"trainer.devices=auto and trainer.num_nodes=3 request 3 processes, but Lightning's trainer has 2"
    with pytest.raises(UserError, match=words):
        require_world_size(trainer.world_size, asked)


# ------------------------------------------------------------------------------------------------ GPUs


def test_tasks_that_see_one_gpu_each_are_one_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """SLURM's --gpus-per-task=1: each of two tasks sees a GPU 0 of its own. No GPU is touched in building a trainer."""
    place(monkeypatch, of_srun(1, 2, 1))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    settings = apply_launcher(TrainerSettings())
    trainer = trainer_of(settings, tmp_path)
    assert (trainer.world_size, trainer.local_rank, trainer.strategy.root_device) == (2, 1, torch.device("cuda", 0))
    assert inference_device(load("fit", ["trainer.accelerator=auto"]).trainer.accelerator) == torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert trainer_of(settings, tmp_path).strategy.root_device == torch.device("cuda", 1)
    assert inference_device(load("fit", ["trainer.accelerator=auto"]).trainer.accelerator) == torch.device("cuda", 1)


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    place(monkeypatch, of_torchrun(0, 2, 2))
    with pytest.raises(
        UserError, match=r"torchrun started 2 processes on this node, but 1 GPU is visible: .*accelerator"
    ):
        apply_launcher(TrainerSettings())
    assert apply_launcher(TrainerSettings(accelerator="cpu")).devices == "2"


# ------------------------------------------------------------------------------------------------ real processes
RANK = """
import sys, time
from pathlib import Path
from attnpo.cli.terminal import install_signal_handlers
if len(sys.argv) < 2:
    sys.stdin.read()
install_signal_handlers()
for folder in sys.argv[1:]:
    Path(folder, str(time.monotonic_ns())).touch()
time.sleep(600)
"""
LAUNCHER = """
import os, subprocess, sys, time
os.environ.update(**eval(sys.argv[2]))
print(subprocess.Popen([sys.executable, "-c", sys.argv[1]]).pid, flush=True)
time.sleep(600)
"""
PATIENCE = 20  # seconds in which a rank ends whose launcher was killed
LIGHTNING = "{'ATTNPO_STARTED_BY': str(os.getpid()), 'LOCAL_RANK': '1', 'WORLD_SIZE': '2'}"
AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1"}


@contextmanager
def ended_at_last(*pids: int) -> Iterator[None]:
    """A context after which none of these processes runs."""
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("launcher", "early"),
    [("torchrun", False), ("srun", False), ("Lightning", False), ("torchrun", True), ("Lightning", True)],
)
def test_a_rank_ends_with_its_launcher(launcher: str, early: bool) -> None:
    """Killed while the rank runs, or ``early``, before the rank watches it."""
    torchrun = {**of_torchrun(1), **(AGENT if early else {}), "MASTER_PORT": str(free_port())}
    variables = {"torchrun": str(torchrun), "srun": str(of_srun(1)), "Lightning": LIGHTNING}[launcher]
    command = [sys.executable, "-c", LAUNCHER, RANK, variables]
    job = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert job.stdin is not None and job.stdout is not None
    with ended_at_last(job.pid, int(job.stdout.readline())):
        if not early:
            job.stdin.close()
            time.sleep(0.5)
        job.kill()
        job.wait()
        job.stdin = job.stdin if early else None
        job.communicate(timeout=PATIENCE)  # until the rank, which has this output too, is gone


def test_the_ranks_of_a_killed_torchrun_end(tmp_path: Path) -> None:
    """They trained on for hours, and held the machine and the run's folder."""
    rank, ready, said = tmp_path / "rank.py", tmp_path / "ready", tmp_path / "said.txt"
    rank.write_text(RANK)
    ready.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with said.open("w") as output:
        job = subprocess.Popen([*TORCHRUN, str(rank), str(ready)], env=environment, stdout=output, stderr=output)
    with ended_at_last(job.pid):
        while len(list(ready.iterdir())) < 2 and job.poll() is None:
            time.sleep(0.05)
        ranks = [int(pid) for pid in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()]
        with ended_at_last(*ranks):
            assert len(ranks) == 2, said.read_text()[-4000:]
            job.kill()
            job.wait()
            deadline = time.monotonic() + PATIENCE
            while (left := [pid for pid in ranks if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
                time.sleep(0.1)
            assert left == []


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
STEPS = 12
PAIRS = 4  # of a step


@pytest.fixture(scope="module")
def keys(babbler: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A small model and pairs of texts; of the trainer only max_steps. In float64, where losses can be compared."""
    place = tmp_path_factory.mktemp("real")
    own_texts.write_rows(place / "data" / "train.jsonl", 20)
    own_texts.write_rows(place / "data" / "test.jsonl", 30, start=20)
    return [
        "setting=real_smoke",
        f"model.path={babbler}",
        f"data.path={place / 'data'}",
        *("data.train_rows='12'", "data.val_rows='4'", f"batch.pairs={PAIRS}", "batch.micro=2"),
        *("lengths.max_length=96", "lengths.max_prompt_length=48", "lengths.overlong=cut", "judge.max_length=200"),
        *("model.dtype=float64", f"trainer.max_steps={STEPS}", "callbacks.samples=0", "callbacks.report=false"),
        *(f"store={place / 'store'}", f"output={place / 'runs'}", "callbacks.save_every=1"),
    ]


def losses(folder: Path) -> list[float]:
    """Training losses by step, then the validation losses."""
    rows = read_metrics(folder / "metrics.csv")
    return [row[name] for name in ("train/loss", "val/loss") for row in rows if name in row]


def test_torchrun_weighs_trains_is_stopped_and_one_process_goes_on(
    keys: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """One group of two: half of each step on either, the losses of one process, a state that one process continues."""
    runs = Path(next(key for key in keys if key.startswith("output=")).partition("=")[2])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    codes, said = in_two_processes(["-m", "attnpo.weigh", *keys], runs.parent)
    assert codes == [0, 0], said[-4000:]
    assert "weights: 0 of 8 pairs in the store; computing 8" in said, "half of 16 pairs"
    two = runs / "two"
    with (runs.parent / "two.txt").open("w+") as output:
        command = [*TORCHRUN, "-m", "attnpo.fit", *keys, "name=two"]
        job = subprocess.Popen(command, env=environment, stderr=output, text=True)
        while not (two / "last" / STATE).is_file() and job.poll() is None:
            time.sleep(0.01)
        job.send_signal(signal.SIGTERM)
        job.wait(timeout=300)
        output.seek(0)
        said = output.read()
    assert "steps: 4 pairs each = 2 per forward x 1 accumulated x 2 processes; " in said, said[-4000:]
    reached = int(read_checkpoint_info(two / "last")["step"])
    assert 1 <= reached < STEPS, "stopped on its way"
    assert f"stopped by SIGTERM at step {reached} of {STEPS}, saved {two / 'last'}" in said, said[-4000:]
    state = torch.load(two / "last" / STATE, weights_only=True)
    assert state["PreferenceDataModule"]["layout"]["world_size"] == 2 and len(state["attnpo"]["random"]) == 2
    for name, more in (("two", ["resume=auto"]), ("one", [])):
        status = run_entry(main, "fit", [*keys, f"name={name}", *more], "", "")
        assert status == 0, capsys.readouterr().err[-4000:]
    assert len(losses(runs / "one")) == STEPS + 2
    assert losses(two) == pytest.approx(losses(runs / "one"), abs=1e-6, rel=0)
    assert min(losses(two)) < 0.6, "there was something to learn"
