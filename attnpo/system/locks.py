"""Folder lock that allows one job at a time; the main process of a job holds it for all of the job's processes.

The lock is a hidden folder ``.lock`` with one file, which names the holder and is touched regularly while the holder is
alive. The folder is created under a temporary name and then renamed. Renaming fails if a lock with a file exists, so
exactly one of several jobs that start together gets the lock. To replace a dead holder, only that holder's file is
removed. Imports no third-party package.
"""

import errno
import json
import logging
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from attnpo.system.errors import UserError
from attnpo.system.files import apply_umask, parse_json, write_atomically
from attnpo.system.processes import before_abrupt_exit

log = logging.getLogger(__name__)

TIMEOUT = 300.0  # seconds without a heartbeat; a network file system may show one a minute late
BEAT = 10.0  # maximum seconds between two heartbeats
MISSED = 3  # heartbeats that must be missed before a lock counts as abandoned, however old the last one looks
POLL = 0.2  # seconds between two checks of a lock
LATE = 60.0  # extra seconds that other processes wait, beyond the time the main process itself may wait
LOOPBACK = ("localhost", "127.0.0.1", "::1")
UNNAMED = "none"  # torchrun's default job name
HELD = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT)


@dataclass(frozen=True)
class LockHolder:
    """Process that holds a folder's lock; the defaults describe a lock that cannot be read.

    ``machine`` and ``began`` distinguish the process from later ones with the same id; ``job`` is the same in all
    processes of a job; ``attempts``: restart count of each scheduler job.
    """

    pid: int = 0
    host: str = "(its lock cannot be read)"
    machine: str = ""
    began: str | None = None
    since: str = "(unknown)"
    beat: float = BEAT
    job: str = ""
    attempts: Mapping[str, int] = field(default_factory=dict)

    @staticmethod
    def current(timeout: float) -> "LockHolder":
        """Returns the current process as a lock holder."""
        pid, beat, since = os.getpid(), min(BEAT, timeout / 10), time.strftime("%Y-%m-%d %H:%M:%S")
        return LockHolder(
            pid,
            socket.gethostname(),
            _machine_id(),
            _process_start_time(pid),
            since,
            beat,
            _job_id(),
            _restart_counts(),
        )

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host} since {self.since}"

    def is_alive(self) -> bool | None:
        """Returns whether the holder's process is running; None if that cannot be determined from this machine."""
        if self.machine != _machine_id() or self.pid < 1:
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # another user's
            pass
        began = _process_start_time(self.pid)
        return None if began is None else began == self.began

    def is_retry_of(self, other: "LockHolder") -> bool:
        """Returns whether this is a later attempt of the same scheduler job as ``other``."""
        return any(count > other.attempts.get(job, count) for job, count in self.attempts.items())

    def is_same_job_as(self, other: "LockHolder") -> bool:
        """Returns whether both processes have the same job id, or ``other`` is the parent of this process."""
        return bool(self.job and self.job == other.job) or other.pid == os.getppid()


@contextmanager
def folder_lock(
    folder: Path, timeout: float = TIMEOUT, *, leading: bool = True, file: str = "", instead: str = "name=NAME"
) -> Iterator[None]:
    """Locks ``folder``, or its file ``file``, against other jobs while the context is open.

    The main process of a job (``leading``) holds the lock; the job's other processes wait until the main process has
    the lock or the lock is free. A holder that has died is replaced: at once if it ran on this machine, otherwise when
    its heartbeat is ``timeout`` seconds old. A restarted job waits up to ``timeout`` seconds for its earlier attempt to
    exit.

    Raises:
        UserError: another job holds the lock (``instead``: setting that selects a different folder), or the lock
            cannot be written.
    """
    lock = folder / (f".{file}.lock" if file else ".lock")
    mark, stop, this = lock / uuid.uuid4().hex, threading.Event(), LockHolder.current(timeout)

    def release() -> None:
        stop.set()
        if leading:
            with suppress(OSError):
                mark.unlink(missing_ok=True)
                lock.rmdir()
                folder.rmdir()  # only if empty: a rejected command leaves no folder behind

    with before_abrupt_exit(release):
        try:
            try:
                _acquire(mark, this, timeout, leading, str(folder / file), instead)
            except OSError as problem:
                text = f"output: {folder} cannot be used because the lock {lock.name} in it cannot be created or read"
                raise UserError(f"{text}: {problem.strerror}") from problem
            if leading:
                threading.Thread(
                    target=_send_heartbeats, args=(mark, this.beat, stop), name="heartbeat", daemon=True
                ).start()
            yield
        finally:
            release()


def _acquire(mark: Path, this: LockHolder, timeout: float, leading: bool, place: str, instead: str) -> None:
    """Waits until this process holds the lock; processes other than the main one wait until their job may proceed."""
    began = at = time.monotonic()
    seen: tuple[Path, float] | None = None
    moves = said = False
    while (lock := _read_lock(mark.parent)) is not None or (leading and not _try_acquire(mark, this)):
        if lock is None:  # another process acquired the lock first
            time.sleep(POLL / 20)
            continue
        path, touched, holder = lock
        if not leading and this.is_same_job_as(holder):
            return
        now = time.monotonic()
        if seen != (path, touched):
            moves = seen is not None and seen[0] == path
            seen, at = (path, touched), now
        lives, unchanged, silence = holder.is_alive(), now - at, MISSED * holder.beat
        patience = timeout if lives is not None else max(timeout, silence)
        gone = (
            not lives
            if lives is not None
            else _has_heartbeat_stopped(_seconds_since(path, touched), unchanged, moves, patience, silence)
        )
        waits = not leading or this.is_retry_of(holder)
        ends = now - began > patience + (0 if leading else LATE) and (lives or unchanged < silence)
        if gone and not leading:  # the main process replaces the holder
            return
        if gone:
            log.info("%s: %s has exited; taking over its lock", place, holder)
            path.unlink(missing_ok=True)
        elif gone is False and (ends or not waits):
            raise UserError(_lock_held_message(place, holder, instead, timeout, now - began if waits else 0.0))
        elif leading and waits and not said:
            said = True
            log.info("%s is in use by %s, an earlier attempt of this job: waiting for it to exit", place, holder)
        else:
            time.sleep(POLL)


def _try_acquire(mark: Path, this: LockHolder) -> bool:
    """Tries to acquire the lock for this process; returns whether it succeeded."""
    try:
        try:
            mark.parents[1].mkdir(parents=True)
        except FileExistsError:  # if it is a file, the next line fails
            if not mark.parents[1].exists():  # a dangling link
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None
        made = Path(tempfile.mkdtemp(prefix=".locking-", dir=mark.parents[1]))
        try:
            apply_umask(made)
            write_atomically(made / mark.name, json.dumps(asdict(this)) + "\n")
            with suppress(OSError):
                mark.parent.rmdir()  # an empty lock; not every file system renames a folder onto another one
            made.rename(mark.parent)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as problem:
        if problem.errno not in HELD:
            raise
    return mark.exists()  # a network file system may report a successful rename as failed


def _read_lock(lock: Path) -> tuple[Path, float, LockHolder] | None:
    """Reads the lock: its file, the time of the last heartbeat and the holder; None if there is no lock."""
    try:
        path = next(lock.iterdir(), None)
        if path is None:
            return None
        touched, text = path.stat().st_mtime, path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return path, touched, LockHolder(**parse_json(text))
    except (ValueError, TypeError):
        return path, touched, LockHolder()


def _has_heartbeat_stopped(age: float, unchanged: float, moves: bool, patience: float, silence: float) -> bool | None:
    """Returns whether the heartbeat has stopped; None if it is too early to tell, because clocks may disagree.

    ``age``: seconds since the last heartbeat by the file system's clock; ``unchanged``: seconds without a new one;
    ``moves``: whether a heartbeat was ever observed.
    """
    if moves or age < patience:
        return unchanged >= patience
    return True if unchanged >= silence else None


def _seconds_since(path: Path, touched: float) -> float:
    """Returns the seconds since ``touched`` by the clock of the file system that contains ``path``."""
    try:
        with tempfile.TemporaryFile(dir=path.parents[1], prefix=".") as file:
            return abs(os.fstat(file.fileno()).st_mtime - touched)
    except OSError:
        return abs(time.time() - touched)


def _lock_held_message(place: str, holder: LockHolder, instead: str, timeout: float, waited: float) -> str:
    wait = f"wait for it to exit (`while kill -0 {holder.pid}; do sleep 5; done`)"
    if holder.is_alive() is None:
        wait = f"wait for it to exit; if it was killed, the lock expires after lock_timeout={timeout:g} seconds"
    still = f", still after {waited:.0f} s" if waited else ""
    return f"{place} is in use by {holder}{still}: choose another location with {instead}, or {wait}"


def _send_heartbeats(mark: Path, beat: float, stop: threading.Event) -> None:
    """Touches the lock's file until ``stop`` is set; exits this process if another one has taken over the lock."""
    while not stop.wait(beat):
        try:
            os.utime(mark)
        except FileNotFoundError:
            lock = _read_lock(mark.parent)
            if stop.is_set():
                return
            # This process was suspended so long that it seemed dead; its files would now mix with another job's.
            who = "was removed by hand or by a finished job" if lock is None else f"is now held by {lock[2]}"
            log.critical(
                "%s: the lock %s; other jobs considered this process dead, so it is exiting", mark.parents[1], who
            )
            os._exit(1)
        except OSError:  # a file server that is temporarily unavailable
            continue


# ------------------------------------------------------------------------------------------- who this is


def _machine_id() -> str:
    """Returns an id for this machine's current boot or this container, within which process ids are unique."""
    names = [socket.gethostname()]
    with suppress(OSError):
        names.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        names.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(names)


def _process_start_time(pid: int) -> str | None:
    """Returns the start time of a process; an empty string if the process has exited, None if unknown."""
    try:
        if Path("/proc/self/stat").exists():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            state, start = fields[0], fields[19]
        else:
            asked = ["ps", "-o", "stat=", "-o", "lstart=", "-p", str(pid)]
            state, _, start = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.partition(" ")
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None
    return "" if state[:1] in "ZX" else start.strip()


def _job_id() -> str:
    """Returns an id shared by the processes of a job, from the launcher's environment variables; empty without one."""
    torchrun = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    slurm = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    names = torchrun if "MASTER_PORT" in os.environ else slurm
    # torchrun's default job name is "none" everywhere, and localhost is a different machine on each node.
    here = socket.gethostname() if os.environ.get("MASTER_ADDR") in LOOPBACK else ""
    return " ".join([*(f"{name}={os.environ[name]}" for name in names if name in os.environ), here]).strip()


def _restart_counts() -> dict[str, int]:
    """Returns the restart counts of the SLURM and torchrun jobs that this process belongs to."""
    names = (("SLURM_JOB_ID", "SLURM_RESTART_COUNT"), ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"))
    return {
        f"{job}={os.environ[job]}": int(os.environ.get(restarts) or 0)
        for job, restarts in names
        if os.environ.get(job, UNNAMED) != UNNAMED
    }
