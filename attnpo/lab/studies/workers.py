"""Points run in processes of their own, or one after the other in this one; one that is killed ends alone.

Light: a new process imports this module before it can say how the heavy ones are to be imported.
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

Job = tuple[list[str], Path]  # the overrides of a point and its folder


Done = tuple[int, RunResult | None, str | None]  # a job's place, its result, its error

KILLED = "the point's process was killed (by the machine for want of memory, perhaps)"
LINGER = 5.0  # seconds in which a worker that a signal ended gives its answer back
EDITED = "the package's source was changed while the study ran; run the study's command again"


@dataclass(frozen=True)
class Workers:
    """Workers that do a study's runs: ``count`` at a time, composed with the user's options in ``config_dir``.

    ``store``: where they keep what all share, None for what their own config says. ``lock_timeout``: seconds of waiting
    for a folder in which another command works.
    """

    count: int
    config_dir: Path | None
    store: str | None
    lock_timeout: float


def on_gpu(accelerators: Iterable[str]) -> bool:
    """Returns whether a point with one of these settings would train on a GPU of this machine."""
    import torch

    return torch.cuda.is_available() and any(name != "cpu" for name in accelerators)


def execute(jobs: Sequence[Job], workers: Workers, here: bool = False) -> Iterator[Done]:
    """Yields (place in ``jobs``, result, error) of every job as it finishes in a process of its own.

    ``here``: one after the other in this process, as where they need a GPU, which is not shared.
    """
    if not jobs:
        return
    count = min(workers.count, max(1, os.cpu_count() or 1))
    if count == 1 or here:
        try:
            for place, (overrides, folder) in enumerate(jobs):
                yield (place, *run_point(overrides, folder, workers.config_dir, workers.store, None))
        finally:
            from attnpo.run.point_cache import forget

            forget()
        return
    count = min(count, len(jobs))
    threads = max(1, (os.cpu_count() or count) // count)
    calls = [(overrides, folder, workers.config_dir, workers.store, threads) for overrides, folder in jobs]
    left = deque(range(len(jobs)))
    while left:
        for place in (yield from _until_broken(calls, left, count)):
            # One that was killed by itself is the culprit; beside others each is tried once more, by itself.
            if count == 1 or (yield from _until_broken(calls, deque([place]), 1)):
                yield place, None, KILLED


Call = tuple[list[str], Path, Path | None, str | None, int]


def _until_broken(calls: Sequence[Call], left: deque[int], workers: int) -> Generator[Done, None, list[int]]:
    """Yields what becomes of the jobs in ``left``, taking them out; returns those at work when a process was killed."""
    at_work: dict[Future[tuple[RunResult | None, str | None]], int] = {}
    killed: list[int] = []
    with ProcessPoolExecutor(
        workers, mp_context=get_context("spawn"), initializer=_begin, initargs=(source_digest(),)
    ) as pool:
        try:
            while (left or at_work) and not killed:
                # No more than are worked on: what only waits for a process is not lost with it.
                while left and len(at_work) < workers:
                    at_work[pool.submit(run_point, *calls[left[0]])] = left[0]
                    left.popleft()
                # The pool's thread looks whom it must watch when something is submitted, before that starts a process:
                # without one thing more the death of the process started last went unseen until another point ended.
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
        except BrokenProcessPool:  # on submitting, to a pool that broke just before
            killed += at_work.values()
        except KeyboardInterrupt:  # also a point's own Interrupted
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in active_children():
                worker.terminate()
            raise
    return sorted(killed)


def _begin(source: str) -> None:
    """Readies a worker, which ends with its parent and runs points with that one's ``source`` alone."""
    exit_with_parent()
    skip_gc_at_exit()
    _source.append(source)
    if source_digest() != source:
        _edited.append(EDITED)


class _PointLog(logging.FileHandler):
    """Log file of a point, which a full disk cuts short without a word: the point itself is told of."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Leaves out what cannot be written."""


def run_point(
    overrides: Sequence[str], folder: Path, config_dir: Path | None, store: str | None, threads: int | None
) -> tuple[RunResult | None, str | None]:
    """Returns the result of one point, or the text of what went wrong; its log goes to ``log.txt`` in its folder."""
    if _ended:
        raise _ended[0]
    if _edited:
        return None, _edited[0]
    with import_phase("loading transformers"):
        import torch

        from attnpo.run.point_cache import remembering
        from attnpo.run.run import run
    if _source:  # the imports took seconds, in which the files may have changed
        source_digest.cache_clear()
        if source_digest() != _source.pop():
            _edited.append(EDITED)
            return None, EDITED
    if threads is not None:
        torch.set_num_threads(threads)
    folder.mkdir(parents=True, exist_ok=True)
    handler = _PointLog(folder / "log.txt", encoding="utf-8")
    handler.setFormatter(LogFormatter("%(asctime)s %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    level = root.level
    root.setLevel(logging.INFO)
    try:
        cfg: RunConfig = load("fit", overrides, config_dir)
        if store is not None:
            cfg = cfg.with_value("store", store)
        cfg = cfg.with_value("resume", "auto")  # the folder is named by all that moves a number
        with remembering(), publish_progress_to(folder), hide_info_on_terminal():
            return run(cfg, folder, point=True), None
    except KeyboardInterrupt as stop:
        if threads is not None:
            _ended.append(stop)
            _end_soon()
        raise
    except Exception as error:  # noqa: BLE001  one point's failure is reported with the others' results
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


def _end_soon() -> None:
    """Ends this worker once its answer is away: one that was killed may have kept the lock of the queue it waits on."""
    timer = threading.Timer(LINGER, os._exit, (1,))
    timer.daemon = True
    timer.start()


# In a worker: the signal that ended its point ends the point that is queued to it already.
_ended: list[KeyboardInterrupt] = []
_source: list[str] = []  # in a worker that has imported nothing yet: the digest that its study began with
_edited: list[str] = []  # in a worker: why it runs no point
