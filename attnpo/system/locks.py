"""One job at a time in a folder: a lock that the leading process of a job holds for all of the job's processes.

The lock is the hidden folder ``.lock`` with one file, which names its holder and is touched while that lives. It is
made under another name and renamed, which succeeds only where there is no lock with a file in it: of several starters
one wins. To replace a holder that is gone only that holder's file is removed. Light: imports no package.
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
BEAT = 10.0  # seconds between two heartbeats, at most
MISSED = 3  # heartbeats that must fail to come before a lock counts as left, however old the last one looks
POLL = 0.2  # seconds between two looks at a lock
LATE = 60.0  # seconds that a process waits for the leading one beyond the time that one may wait itself
LOOPBACK = ("localhost", "127.0.0.1", "::1")
UNNAMED = "none"  # torchrun's name for a job that was given none
HELD = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT)


@dataclass(frozen=True)
class LockHolder:
    """Process that works in a folder, according to its lock; the defaults stand for a lock that cannot be read.

    ``machine`` and ``began`` tell it from later processes of its number; ``job``: the same in all processes of a job;
    ``attempts``: the scheduler's jobs, with how often they were restarted.
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
        """Returns this process, as a holder."""
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
        """Returns whether its process is there; None where this one cannot see it."""
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
        """Returns whether it is a later attempt of the scheduler's job that ``other`` was an attempt of."""
        return any(count > other.attempts.get(job, count) for job, count in self.attempts.items())

    def is_same_job_as(self, other: "LockHolder") -> bool:
        """Returns whether both are processes of one job; Lightning starts the others from the leading one."""
        return bool(self.job and self.job == other.job) or other.pid == os.getppid()


@contextmanager
def folder_lock(
    folder: Path, timeout: float = TIMEOUT, *, leading: bool = True, file: str = "", instead: str = "name="
) -> Iterator[None]:
    """Opens a context in which no other job works in ``folder``, or on its file ``file``.

    The leading process of a job holds the lock; its others wait until it has it or it is free. A holder that is gone is
    replaced: at once on this machine, elsewhere when its heartbeat is ``timeout`` seconds old. A job that was restarted
    waits so long for its earlier attempt. Raises UserError where another job works (``instead``: the key that names
    another place), and where nothing can be written.
    """
    lock = folder / (f".{file}.lock" if file else ".lock")
    mark, stop, this = lock / uuid.uuid4().hex, threading.Event(), LockHolder.current(timeout)

    def release() -> None:
        stop.set()
        if leading:
            with suppress(OSError):
                mark.unlink(missing_ok=True)
                lock.rmdir()
                folder.rmdir()  # where it is empty: a command that was refused leaves no folder

    with before_abrupt_exit(release):
        try:
            try:
                _acquire(mark, this, timeout, leading, str(folder / file), instead)
            except OSError as problem:
                text = f"output=: {folder} must be a folder to work in, but its {lock.name} cannot be made or read"
                raise UserError(f"{text}: {problem.strerror}") from problem
            if leading:
                threading.Thread(
                    target=_send_heartbeats, args=(mark, this.beat, stop), name="heartbeat", daemon=True
                ).start()
            yield
        finally:
            release()


def _acquire(mark: Path, this: LockHolder, timeout: float, leading: bool, place: str, instead: str) -> None:
    """Waits until this process holds the lock, or until the leading one of its job does or it is free."""
    began = at = time.monotonic()
    seen: tuple[Path, float] | None = None
    moves = said = False
    while (lock := _read_lock(mark.parent)) is not None or (leading and not _try_acquire(mark, this)):
        if lock is None:  # another process took it first
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
        if gone and not leading:  # the leading process replaces it
            return
        if gone:
            log.info("%s: %s is gone; going on", place, holder)
            path.unlink(missing_ok=True)
        elif gone is False and (ends or not waits):
            raise UserError(_lock_held_message(place, holder, instead, timeout, now - began if waits else 0.0))
        elif leading and waits and not said:
            said = True
            log.info("%s is in use by %s, started earlier for this job: waiting for its end", place, holder)
        else:
            time.sleep(POLL)


def _try_acquire(mark: Path, this: LockHolder) -> bool:
    """Makes the lock this process's, where nobody holds it; returns whether it is."""
    try:
        try:
            mark.parents[1].mkdir(parents=True)
        except FileExistsError:  # a file there is met by the next line
            if not mark.parents[1].exists():  # a link to a place that is not there
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None
        made = Path(tempfile.mkdtemp(prefix=".locking-", dir=mark.parents[1]))
        try:
            apply_umask(made)
            write_atomically(made / mark.name, json.dumps(asdict(this)) + "\n")
            with suppress(OSError):
                mark.parent.rmdir()  # one that is empty: not every file system puts a folder in its place
            made.rename(mark.parent)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as problem:
        if problem.errno not in HELD:
            raise
    return mark.exists()  # a network file system may report a rename as failed that it has done


def _read_lock(lock: Path) -> tuple[Path, float, LockHolder] | None:
    """Returns the lock's file, the time of its last heartbeat, and its holder; None where there is no lock."""
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
    """Returns whether a heartbeat has stopped; None when it is too early to tell, as clocks of machines may disagree.

    ``age``: seconds since the last one by the file system's clock; ``unchanged``: seconds in which no new one was seen;
    ``moves``: whether one ever was.
    """
    if moves or age < patience:
        return unchanged >= patience
    return True if unchanged >= silence else None


def _seconds_since(path: Path, touched: float) -> float:
    """Seconds between ``touched`` and now, on the clock that stamps the files beside ``path``."""
    try:
        with tempfile.TemporaryFile(dir=path.parents[1], prefix=".") as file:
            return abs(os.fstat(file.fileno()).st_mtime - touched)
    except OSError:
        return abs(time.time() - touched)


def _lock_held_message(place: str, holder: LockHolder, instead: str, timeout: float, waited: float) -> str:
    wait = f"wait for its end (`while kill -0 {holder.pid}; do sleep 5; done`)"
    if holder.is_alive() is None:
        wait = f"wait for its end; were it killed, its place is free lock_timeout={timeout:g} seconds after that"
    still = f", still after {waited:.0f} s" if waited else ""
    return f"{place} is in use by {holder}{still}: give another {instead}, or {wait}"


def _send_heartbeats(mark: Path, beat: float, stop: threading.Event) -> None:
    """Touches the lock's file until ``stop``; ends this process when another has taken its place."""
    while not stop.wait(beat):
        try:
            os.utime(mark)
        except FileNotFoundError:
            lock = _read_lock(mark.parent)
            if stop.is_set():
                return
            # It was suspended for so long that it was taken to be gone; its files would now mix with another's.
            who = "was removed, by hand or by a job that is over" if lock is None else f"is now that of {lock[2]}"
            log.critical("%s: its lock %s, to whom this process seemed dead: ending", mark.parents[1], who)
            os._exit(1)
        except OSError:  # a file server that is away for a while
            continue


# ------------------------------------------------------------------------------------------- who this is


def _machine_id() -> str:
    """Returns an identity of this machine since its start, or of this container, for its process numbers."""
    names = [socket.gethostname()]
    with suppress(OSError):
        names.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        names.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(names)


def _process_start_time(pid: int) -> str | None:
    """Returns when a process began; empty when it has ended, None when the system does not say."""
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
    """Returns an identity shared by the processes of a job, from their launcher; empty where there is none."""
    torchrun = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    slurm = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    names = torchrun if "MASTER_PORT" in os.environ else slurm
    # torchrun's default name for a job is "none" everywhere, and localhost is another machine on each.
    here = socket.gethostname() if os.environ.get("MASTER_ADDR") in LOOPBACK else ""
    return " ".join([*(f"{name}={os.environ[name]}" for name in names if name in os.environ), here]).strip()


def _restart_counts() -> dict[str, int]:
    """Returns the jobs of SLURM and torchrun that this process is part of, each with how often it was restarted."""
    names = (("SLURM_JOB_ID", "SLURM_RESTART_COUNT"), ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"))
    return {
        f"{job}={os.environ[job]}": int(os.environ.get(restarts) or 0)
        for job, restarts in names
        if os.environ.get(job, UNNAMED) != UNNAMED
    }
