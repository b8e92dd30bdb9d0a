"""Runs points in worker processes, or sequentially in this process; if a worker is killed, only its point is lost.

Avoids heavy imports, because a new process imports this module before it can show import progress.
"""

import logging
import os
import threading
import traceback
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import TYPE_CHECKING

from attnpo.cli.progress import hide_info_on_terminal, import_phase, publish_progress_to
from attnpo.cli.terminal import LogFormatter, exit_status_and_message, exit_with_parent, skip_gc_at_exit
from attnpo.config.compose import load
from attnpo.run.result import RunResult
from attnpo.system.credentials import mask_credentials
from attnpo.system.source_digest import source_digest

if TYPE_CHECKING:
    from attnpo.run.run_config import RunConfig

Job = tuple[list[str], Path]  # overrides and folder of a point


Done = tuple[int, RunResult | None, str | None]  # index, result and error of a job

KILLED = "the point's process was killed, perhaps because the machine ran out of memory"
LINGER = 5.0  # seconds for an interrupted worker to return its result
EDITED = "the package's source code was changed while the study ran; run the study's command again"


@dataclass(frozen=True)
class WorkerSettings:
    """Settings of the workers that execute a study's runs: ``count`` processes, with user configs in ``config_dir``.

    ``store``: shared cache folder; None uses the one from each run's config. ``lock_timeout``: seconds to wait for a
    folder that another command has locked.
    """

    count: int
    config_dir: Path | None
    store: str | None
    lock_timeout: float


def needs_gpu(accelerators: Iterable[str]) -> bool:
    """Returns whether training with any of these accelerator settings would use a GPU on this machine."""
    import torch

    return torch.cuda.is_available() and any(name != "cpu" for name in accelerators)


def run_jobs(jobs: Sequence[Job], workers: WorkerSettings, here: bool = False) -> Iterator[Done]:
    """Runs jobs in parallel processes; yields (index in ``jobs``, result, error) as each one finishes.

    ``here``: run the jobs sequentially in this process, e.g. on a GPU, which several processes cannot share.
    """
    if not jobs:
        return
    count = min(workers.count, max(1, os.cpu_count() or 1))
    if count == 1 or here:
        try:
            for place, (overrides, folder) in enumerate(jobs):
                yield (place, *run_point(overrides, folder, workers.config_dir, workers.store, None))
        finally:
            from attnpo.run.point_cache import clear_caches

            clear_caches()
        return
    count = min(count, len(jobs))
    threads = max(1, (os.cpu_count() or count) // count)
    calls = [(overrides, folder, workers.config_dir, workers.store, threads) for overrides, folder in jobs]
    left = deque(range(len(jobs)))
    while left:
        for place in (yield from _run_until_killed(calls, left, count)):
            # A job that was killed while running alone is at fault; otherwise each is tried once more, alone.
            if count == 1 or (yield from _run_until_killed(calls, deque([place]), 1)):
                yield place, None, KILLED


Call = tuple[list[str], Path, Path | None, str | None, int]


def _run_until_killed(calls: Sequence[Call], left: deque[int], workers: int) -> Generator[Done, None, list[int]]:
    """Runs the jobs in ``left`` until all are done or a worker is killed; returns the jobs running at that time."""
    at_work: dict[Future[tuple[RunResult | None, str | None]], int] = {}
    killed: list[int] = []
    with ProcessPoolExecutor(
        workers, mp_context=get_context("spawn"), initializer=_init_worker, initargs=(source_digest(),)
    ) as pool:
        try:
            while (left or at_work) and not killed:
                # Submit no more jobs than there are workers: a queued job would be lost with a killed worker.
                while left and len(at_work) < workers:
                    at_work[pool.submit(run_point, *calls[left[0]])] = left[0]
                    left.popleft()
                # The pool's thread updates its list of processes on submit, before that submit starts a new process.
                # Without this extra submit, the death of the newest process goes unnoticed until another point ends.
                pool.submit(int)
                ended = wait(at_work, return_when=FIRST_COMPLETED).done
                if any(isinstance(future.exception(), BrokenProcessPool) for future in ended):
                    ended = wait(at_work).done
                for future in ended:
                    place = at_work.pop(future)
                    if isinstance(future.exception(), BrokenProcessPool):
                        killed.append(place)
                    else:
                        yield place, *future.result()
        except BrokenProcessPool:  # submitted to a pool that had just broken
            killed += at_work.values()
        except KeyboardInterrupt:  # includes RunInterrupted raised by a point
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in active_children():
                worker.terminate()
            raise
    return sorted(killed)


def _init_worker(source: str) -> None:
    """Sets up a worker that exits with its parent and refuses points if the code's digest is no longer ``source``."""
    exit_with_parent()
    skip_gc_at_exit()
    _source.append(source)
    if source_digest() != source:
        _edited.append(EDITED)


class _PointLogHandler(logging.FileHandler):
    """Handler for a point's log file that ignores write errors; the point itself reports a full disk."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignores records that cannot be written."""


def run_point(
    overrides: Sequence[str], folder: Path, config_dir: Path | None, store: str | None, threads: int | None
) -> tuple[RunResult | None, str | None]:
    """Runs one point and returns (result, error), one of which is None. Writes a log to ``folder/log.txt``."""
    if _ended:
        raise _ended[0]
    if _edited:
        return None, _edited[0]
    with import_phase("loading transformers"):
        import torch

        from attnpo.run.point_cache import cache_between_runs
        from attnpo.run.run import run
    if _source:  # the imports took seconds, in which the files may have changed
        source_digest.cache_clear()
        if source_digest() != _source.pop():
            _edited.append(EDITED)
            return None, EDITED
    if threads is not None:
        torch.set_num_threads(threads)
    folder.mkdir(parents=True, exist_ok=True)
    handler = _PointLogHandler(folder / "log.txt", encoding="utf-8")
    handler.setFormatter(LogFormatter("%(asctime)s %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    level = root.level
    root.setLevel(logging.INFO)
    try:
        cfg: RunConfig = load("fit", overrides, config_dir)
        if store is not None:
            cfg = cfg.with_value("store", store)
        cfg = cfg.with_value("resume", "auto")  # safe, since the folder's name has the digest of all settings
        with cache_between_runs(), publish_progress_to(folder), hide_info_on_terminal():
            return run(cfg, folder, point=True), None
    except KeyboardInterrupt as stop:
        if threads is not None:
            _ended.append(stop)
            _exit_after_delay()
        raise
    except Exception as error:  # noqa: BLE001  reported with the results of the other points
        ending = exit_status_and_message(error)
        if ending is not None:
            return None, mask_credentials(ending[1].removeprefix("error: "))
        text = mask_credentials(traceback.format_exc())
        (folder / "error.txt").write_text(text, encoding="utf-8")
        return None, text.strip()
    finally:
        root.setLevel(level)
        root.removeHandler(handler)
        with suppress(OSError):
            handler.close()


def _exit_after_delay() -> None:
    """Exits this worker shortly after it returns its result, since it might wait forever for a killed worker's lock."""
    timer = threading.Timer(LINGER, os._exit, (1,))
    timer.daemon = True
    timer.start()


# In a worker: an interrupt that ended its point also ends the point that is queued next.
_ended: list[KeyboardInterrupt] = []
_source: list[str] = []  # in a worker with no heavy imports yet: source digest at the study's start
_edited: list[str] = []  # in a worker: error if the code was changed
