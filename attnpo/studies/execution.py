"""Points run in processes of their own, or one after the other in this one; one that fails says why and ends alone."""

import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from attnpo.config import compose
from attnpo.schema import UserError
from attnpo.studies.inputs import forget, remembering
from attnpo.studies.run import run

Job = tuple[list[str], Path]  # the overrides of a point and its folder


def execute(
    jobs: Sequence[Job], workers: int, config_dir: Path | None, store: str | None
) -> Iterator[tuple[int, dict[str, Any], str | None]]:
    """(place in ``jobs``, result, error) of every job as it finishes, ``workers`` at a time in processes of their own.

    A GPU is not shared: with one, jobs run in this process one after the other.
    """
    import torch

    if not jobs:
        return
    workers = min(workers, len(jobs), max(1, os.cpu_count() or 1))
    if workers == 1 or torch.cuda.is_available():
        try:
            for place, (overrides, folder) in enumerate(jobs):
                yield (place, *run_point(overrides, folder, config_dir, store, None))
        finally:
            forget()
        return
    threads = max(1, (os.cpu_count() or workers) // workers)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures: dict[Future[tuple[dict[str, Any], str | None]], int] = {
            pool.submit(run_point, overrides, folder, config_dir, store, threads): place
            for place, (overrides, folder) in enumerate(jobs)
        }
        try:
            for future in as_completed(futures):
                try:
                    result, error = future.result()
                except BrokenProcessPool as broken:  # the process was killed, for its memory perhaps
                    result, error = {}, f"the point's process ended abruptly: {broken}"
                yield futures[future], result, error
        except KeyboardInterrupt:  # also a point's own Interrupted
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in active_children():
                worker.terminate()
            raise


def run_point(
    overrides: Sequence[str], folder: Path, config_dir: Path | None, store: str | None, threads: int | None
) -> tuple[dict[str, Any], str | None]:
    """The result of one point, or the text of what went wrong; its log goes to ``log.txt`` in its folder."""
    import traceback

    import torch

    if _ended:
        raise _ended[0]
    if threads is not None:
        torch.set_num_threads(threads)
    folder.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(folder / "log.txt", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    level = root.level
    root.setLevel(logging.INFO)
    try:
        cfg = compose("fit", list(overrides), config_dir)
        if store is not None:
            OmegaConf.update(cfg, "store", store)
        OmegaConf.update(cfg, "resume", "auto")  # the folder is named by all that moves a number
        with remembering():
            return run(cfg, folder), None
    except KeyboardInterrupt as stop:
        if threads is not None:
            _ended.append(stop)
        raise
    except UserError as error:
        return {}, str(error)
    except Exception:  # noqa: BLE001  one point's failure is reported with the others' results
        (folder / "error.txt").write_text(traceback.format_exc(), encoding="utf-8")
        return {}, traceback.format_exc().strip()
    finally:
        root.setLevel(level)
        root.removeHandler(handler)
        handler.close()


# In a worker: the signal that ended its point ends the point that is queued to it already.
_ended: list[KeyboardInterrupt] = []


def last_line(text: str) -> str:
    """The last line of an error's text."""
    return text.strip().rpartition("\n")[2] or "no message"
