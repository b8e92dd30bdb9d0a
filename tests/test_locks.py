"""One job at a time in a folder: who is refused, who waits, who takes over, and that of several starters one wins."""

import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from attnpo.schema import UserError
from attnpo.system import locks
from attnpo.system.locks import LockHolder, folder_lock

ROOT = Path(__file__).resolve().parents[1]
HOLDS = """
import sys
from pathlib import Path
from attnpo.system.locks import folder_lock
with folder_lock(Path(sys.argv[1]), float(sys.argv[2])):
    print("held", flush=True)
    sys.stdin.read()
"""
LAUNCHERS = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
LAUNCHERS += ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
ELSEWHERE = "another machine"
SHORT = 1.0  # seconds of lock_timeout where it has to pass
LONG = 300.0  # where it must not


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)


@contextmanager
def holding(folder: Path, timeout: float = LONG, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A live process that holds the lock of ``folder`` until its input ends."""
    command = [sys.executable, "-c", HOLDS, str(folder), str(timeout)]
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment}, text=True, **pipes) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def write_lock(folder: Path, age: float = 0.0, **entries: Any) -> Path:
    """The lock of another job as it would lie in ``folder``, and its file."""
    mark = folder / ".lock" / "other"
    mark.parent.mkdir(parents=True)
    mark.write_text(json.dumps({"pid": 7, "host": "node7", "machine": ELSEWHERE, "beat": SHORT / 10, **entries}))
    set_age(mark, age)
    return mark


def set_age(mark: Path, age: float) -> None:
    os.utime(mark, (time.time() - age,) * 2)


def refusal(folder: Path, timeout: float = SHORT) -> str:
    with pytest.raises(UserError) as refused, folder_lock(folder, timeout):
        pass
    assert "\n" not in str(refused.value)
    return str(refused.value)


def is_free(folder: Path, timeout: float = SHORT) -> bool:
    """Whether the lock can be had; nothing of it is left then."""
    with folder_lock(folder, timeout):
        held = len(list((folder / ".lock").iterdir())) == 1
    return held and not (folder / ".lock").exists()


# ------------------------------------------------------------------------------------------------ this machine


def test_a_live_process_is_named_and_its_folder_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with holding(folder) as process:
        text = refusal(folder)
        began = r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
        named = f"{folder} is in use by process {process.pid} on host {socket.gethostname()} {began}: "
        assert re.match(named, text), text
        assert text.endswith(
            "choose another location with name=NAME, or wait for it to exit "
            f"(`while kill -0 {process.pid}; do sleep 5; done`)"
        )
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=60) == 0
    assert not folder.exists()  # nothing was written there
    assert is_free(folder)


@pytest.mark.parametrize("reaped", [True, False])
def test_a_killed_process_is_replaced_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture, reaped: bool) -> None:
    """Also where its parent has not taken note of its end."""
    (tmp_path / "config.yaml").write_text("")
    with holding(tmp_path) as process, caplog.at_level(logging.INFO):
        process.send_signal(signal.SIGKILL)
        if reaped:
            process.wait(timeout=60)
        else:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        began = time.monotonic()
        assert is_free(tmp_path, LONG)
        assert time.monotonic() - began < 60
    assert [
        f"process {process.pid} on host" in line and "has exited; taking over its lock" in line
        for line in caplog.messages
    ] == [True]
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_a_later_process_of_the_same_number_is_not_taken_for_the_holder(tmp_path: Path) -> None:
    this = LockHolder.current(LONG)
    write_lock(tmp_path, pid=this.pid, machine=this.machine, began="long ago")
    assert is_free(tmp_path, LONG)


def test_the_same_number_in_another_container_says_nothing(tmp_path: Path) -> None:
    """Nobody here has it, but its holder is in another container of this machine, with a fresh heartbeat."""
    write_lock(tmp_path, pid=2**22 + 1, host=socket.gethostname())
    assert "is in use by" in refusal(tmp_path)


@pytest.mark.parametrize("ending", [None, UserError("no"), KeyboardInterrupt(), SystemExit(3), RuntimeError("x")])
def test_every_end_frees_the_folder(tmp_path: Path, ending: BaseException | None) -> None:
    """A second session in the same process has it, a second one at the same time has not."""
    (tmp_path / "kept").write_text("")
    try:
        with folder_lock(tmp_path):
            assert f"in use by process {os.getpid()} " in refusal(tmp_path)
            if ending is not None:
                raise ending
    except BaseException as error:  # noqa: BLE001
        assert error is ending
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert is_free(tmp_path)


# ------------------------------------------------------------------------------------------------ another machine


def test_a_fresh_heartbeat_of_another_machine_is_believed(tmp_path: Path) -> None:
    write_lock(tmp_path, since="2026-01-01 00:00:00")
    assert refusal(tmp_path, LONG) == (
        f"{tmp_path} is in use by process 7 on host node7 since 2026-01-01 00:00:00: choose another location "
        "with name=NAME, or wait for it to exit; if it was killed, the lock expires after lock_timeout=300 seconds"
    )


@pytest.mark.parametrize("age", [30.0, -30.0])
def test_an_old_heartbeat_that_does_not_move_frees_the_folder(tmp_path: Path, age: float) -> None:
    """Likewise one from the future, of a clock that is wrong."""
    write_lock(tmp_path, age)
    began = time.monotonic()
    assert is_free(tmp_path)
    assert time.monotonic() - began >= 0.3  # three heartbeats it could have shown


@pytest.mark.parametrize("age", [30.0, -30.0])
def test_a_heartbeat_that_moves_is_believed_whatever_the_clocks_say(tmp_path: Path, age: float) -> None:
    mark = write_lock(tmp_path, age, beat=2.0)
    stop = threading.Event()
    with beating(mark, age, stop):
        assert "on host node7" in refusal(tmp_path)


@contextmanager
def beating(mark: Path, age: float, stop: threading.Event) -> Iterator[None]:
    def beat() -> None:
        while not stop.wait(0.05):
            set_age(mark, age)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": "x", "unknown": 1}'])
def test_a_lock_that_cannot_be_read_holds_while_it_is_fresh(tmp_path: Path, content: str) -> None:
    mark = write_lock(tmp_path)
    mark.write_text(content)
    assert "its lock cannot be read" in refusal(tmp_path, LONG)


def test_something_else_in_the_place_of_the_lock_is_named(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("mine")
    said = f"{tmp_path} cannot be used because the lock .lock in it cannot be created or read: Not a directory"
    assert said in refusal(tmp_path)


def test_a_process_that_was_taken_for_dead_ends(tmp_path: Path) -> None:
    """It was suspended, say; what it wrote now would blend with its successor's files."""
    with holding(tmp_path, 0.5) as process:
        mark = next((tmp_path / ".lock").iterdir())
        mark.rename(mark.with_name("other"))
        assert process.wait(timeout=60) == 1
        said = "other jobs considered this process dead, so it is exiting"
        assert process.stderr is not None and said in process.stderr.read()
    assert [path.name for path in (tmp_path / ".lock").iterdir()] == ["other"]


def test_a_process_whose_lock_is_gone_ends(tmp_path: Path) -> None:
    """The job that took it to be dead is over already; what this one wrote now would replace its result."""
    with holding(tmp_path, 0.5) as process:
        shutil.rmtree(tmp_path / ".lock")
        assert process.wait(timeout=60) == 1
        assert process.stderr is not None and "the lock was removed" in process.stderr.read()


def test_a_folder_behind_a_link_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert refusal(tmp_path / "link").endswith("the lock .lock in it cannot be created or read: Not a directory")


def test_a_sudden_end_frees_the_folder(tmp_path: Path) -> None:
    """A signal that ends the process by no exception, as one does that comes while a module is imported."""
    script = """
import os, signal, sys
from pathlib import Path
from attnpo.cli.terminal import install_signal_handlers
from attnpo.system.locks import folder_lock
install_signal_handlers()
with folder_lock(Path(sys.argv[1])):
    os.kill(os.getpid(), signal.SIGTERM)
"""
    folder = tmp_path / "x"
    done = subprocess.run([sys.executable, "-c", script, str(folder)], cwd=ROOT, check=False, timeout=60)
    assert (done.returncode, folder.exists()) == (143, False)


# ------------------------------------------------------------------------------------------------ requeued jobs


def requeued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")


def test_a_requeued_job_waits_for_its_predecessor_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with holding(tmp_path, SLURM_JOB_ID="41") as process, caplog.at_level(logging.INFO):
        requeued(monkeypatch)
        threading.Timer(1.0, process.terminate).start()
        began = time.monotonic()
        with folder_lock(tmp_path, LONG):
            assert process.poll() is not None or time.monotonic() - began > 1
    assert time.monotonic() - began < 60
    assert len([line for line in caplog.messages if "waiting for it to exit" in line]) == 1


def test_a_predecessor_that_does_not_end_is_not_waited_for_longer_than_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holding(tmp_path, SLURM_JOB_ID="41"):
        requeued(monkeypatch)
        assert "still after " in refusal(tmp_path / "", SHORT / 10)


@pytest.mark.parametrize("other", [{"SLURM_JOB_ID": "40"}, {"SLURM_JOB_ID": "41", "SLURM_RESTART_COUNT": "1"}, {}])
def test_a_requeued_job_does_not_wait_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: dict[str, str]
) -> None:
    """Nor for a second start in the same allocation."""
    with holding(tmp_path, **other):
        requeued(monkeypatch)
        began = time.monotonic()
        assert "still" not in refusal(tmp_path, LONG)
        assert time.monotonic() - began < 60


@pytest.mark.parametrize("beats", [0, 3])
def test_a_requeued_job_replaces_a_predecessor_that_died_on_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beats: int
) -> None:
    """Also one that died while it waited: from its last heartbeat on lock_timeout passes once more."""
    mark = write_lock(tmp_path, attempts={"SLURM_JOB_ID=41": 0})
    requeued(monkeypatch)
    last = 0.1 * beats
    for number in range(beats):
        threading.Timer(last * (number + 1) / beats, set_age, (mark, 0.0)).start()
    began = time.monotonic()
    assert is_free(tmp_path, 2 * SHORT)
    assert time.monotonic() - began >= last + 2 * SHORT - 0.1


# ------------------------------------------------------------------------------------------------ one job's processes


def joined(folder: Path, timeout: float, done: list[str]) -> None:
    """Another process of a job, which comes to work in ``folder``."""
    try:
        with folder_lock(folder, timeout, leading=False):
            done.append("joined")
    except UserError as error:
        done.append(str(error))


def test_the_processes_of_a_job_share_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a requeued job wait with their leader for the end of its predecessor; the leader alone ends the lock."""
    mark = write_lock(tmp_path, attempts={"SLURM_JOB_ID=41": 0})
    requeued(monkeypatch)
    done: list[str] = []
    rank = threading.Thread(target=joined, args=(tmp_path, LONG, done))
    rank.start()
    time.sleep(0.5)
    assert done == []
    mark.unlink()
    with folder_lock(tmp_path, LONG):
        rank.join(timeout=60)
        joined(tmp_path, LONG, done)
        assert done == ["joined"] * 2
        assert len(list((tmp_path / ".lock").iterdir())) == 1


def test_torchruns_without_a_name_are_not_attempts_of_one_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their id is "none"; one of them that was restarted follows nobody."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    write_lock(tmp_path, attempts={"TORCHELASTIC_RUN_ID=none": 0})
    began = time.monotonic()
    refusal(tmp_path, LONG)
    assert time.monotonic() - began < LONG / 2


def test_jobs_on_two_machines_whose_address_is_localhost_are_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    here = LockHolder.current(LONG)
    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    there = LockHolder.current(LONG)
    assert here.is_same_job_as(LockHolder(job=here.job)) and not here.is_same_job_as(LockHolder(job=there.job))


def test_a_process_of_another_job_does_not_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its leader will be refused and take it along; left alone, it gives up."""
    monkeypatch.setattr("attnpo.system.locks.LATE", 0.2)
    monkeypatch.setenv("MASTER_PORT", "1")
    done: list[str] = []
    with holding(tmp_path, MASTER_PORT="2") as process:
        joined(tmp_path, 0.1, done)
    assert f"process {process.pid} " in done[0]


def test_what_lightning_starts_joins_the_process_that_started_it(tmp_path: Path) -> None:
    """The variables of the launch are set when the lock is held already."""
    code = HOLDS.replace("float(sys.argv[2])", "300.0, leading=False")
    with folder_lock(tmp_path):
        environment = {**os.environ, "MASTER_PORT": "9", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
        command = [sys.executable, "-c", code, str(tmp_path)]
        done = subprocess.run(command, cwd=ROOT, env=environment, input="", capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (0, "held\n"), done.stderr
        assert len(list((tmp_path / ".lock").iterdir())) == 1


# ------------------------------------------------------------------------------------------------ races


@pytest.mark.parametrize("window", ["is_alive", "apply_umask"])
def test_one_that_comes_between_two_steps_of_a_starter_keeps_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: str
) -> None:
    """Between the look at a holder that is gone and its removal, and while the lock is being made."""
    this = LockHolder.current(LONG)
    write_lock(tmp_path, pid=this.pid, machine=this.machine, began="long ago")
    place: Any = LockHolder if window == "is_alive" else locks
    step = getattr(place, window)
    with ExitStack() as between:
        entered: list[bool] = []

        def slow(*arguments: Any) -> Any:
            found = step(*arguments)
            if not entered:
                entered.append(True)
                between.enter_context(folder_lock(tmp_path, LONG))
            return found

        monkeypatch.setattr(place, window, slow)
        assert f"in use by process {os.getpid()} " in refusal(tmp_path, LONG)
    assert is_free(tmp_path)


RACERS, ROUNDS = 4, 15
RACES = """
import sys
import time
from pathlib import Path
from attnpo.system import errors
from attnpo.system import locks
for line in sys.stdin:
    folder, start = line.split()
    while time.monotonic() < float(start):
        pass
    try:
        with locks.folder_lock(Path(folder), 300.0):
            print("won", flush=True)
            sys.stdin.readline()
    except errors.UserError:
        print("refused", flush=True)
        sys.stdin.readline()
    print("over", flush=True)
"""


def told(racers: list[subprocess.Popen[str]], line: str) -> list[str]:
    """What processes that are told the same at once answer."""
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write(f"{line}\n")
        racer.stdin.flush()
    return sorted(racer.stdout.readline().strip() for racer in racers if racer.stdout is not None)


def test_of_several_starters_one_takes_a_lock_whose_holder_is_gone(tmp_path: Path) -> None:
    """The winner holds it until all others were refused."""
    this = LockHolder.current(LONG)
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    racers = [subprocess.Popen([sys.executable, "-c", RACES], cwd=ROOT, text=True, **pipes) for _ in range(RACERS)]
    try:
        for turn in range(ROUNDS):
            write_lock(tmp_path / str(turn), pid=this.pid, machine=this.machine, began="long ago")
            assert told(racers, f"{tmp_path / str(turn)} {time.monotonic() + 0.02}") == ["refused"] * (RACERS - 1) + [
                "won"
            ]
            assert told(racers, "end") == ["over"] * RACERS
    finally:
        for racer in racers:
            racer.communicate(timeout=60)
    assert list(tmp_path.iterdir()) == []
