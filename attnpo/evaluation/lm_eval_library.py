"""The edges of lm_eval (EleutherAI's lm-evaluation-harness): kept quiet, its random states undone, its tasks found.

Nothing here imports lm_eval before it is called: importing it and its index of tasks take seconds.
"""

import logging
import os
import random
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING

import numpy as np
import torch

from attnpo.schema import UserError

if TYPE_CHECKING:
    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager

WORDS = "lm_eval.log"
"""What the library says, in the folder of the evaluation."""


# ------------------------------------------------------------------------------------------------ a context for it


class _Heard(logging.Handler):
    """Counts the warnings of a logger by their text, numbers left out."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.counts: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        text = re.sub(r"\d+", "N", " ".join(record.getMessage().split()))
        self.counts[shorten(text, 160, placeholder=" ...")] += 1


@contextmanager
def quiet(folder: Path, device: torch.device) -> Iterator[Counter[str]]:
    """Opens a context in which lm_eval may print and seed: its words go to ``lm_eval.log``, its warnings are counted.

    Python's, numpy's and torch's random states are afterwards what they were; lm_eval seeds all three. Subprocesses and
    progress bars are caught too, as the process's own outputs are turned away meanwhile.
    """
    folder.mkdir(parents=True, exist_ok=True)
    states = random.getstate(), np.random.get_state()
    heard, logger = _Heard(), logging.getLogger("lm_eval")
    before = logger.propagate, logger.level
    with (
        (folder / WORDS).open("a", encoding="utf-8") as words,
        _outputs_to(words.fileno()),
        redirect_stdout(words),
        redirect_stderr(words),
        warnings.catch_warnings(),
        torch.random.fork_rng([device] if device.type == "cuda" else []),
    ):
        warnings.simplefilter("ignore")
        logger.propagate = False
        logger.setLevel(logging.WARNING)
        logger.addHandler(heard)
        try:
            yield heard.counts
        finally:
            logger.removeHandler(heard)
            logger.propagate, level = before
            logger.setLevel(level)
            random.setstate(states[0])
            np.random.set_state(states[1])


@contextmanager
def _outputs_to(target: int) -> Iterator[None]:
    """Opens a context in which file descriptors 1 and 2, which subprocesses inherit, are those of another file."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(number) for number in (1, 2)]
    try:
        for number in (1, 2):
            os.dup2(target, number)
        yield
    finally:
        for number, original in zip((1, 2), kept, strict=True):
            os.dup2(original, number)
            os.close(original)


# ------------------------------------------------------------------------------------------------ tasks


@dataclass(frozen=True)
class FoundTask:
    """A task, or the tasks of a group or tag, with their data, and the index that they were found in."""

    name: str
    tasks: "dict[str, Task]"
    asked: Sequence[object]
    manager: "TaskManager"


def find_task(name: str, include_path: Path | None) -> FoundTask:
    """Returns the task, group or tag of a name, from the folder of the user's own ones or from lm_eval.

    Raises:
        UserError: there is none of that name, or it cannot be made, as where its data cannot be had.
    """
    manager = _index_with(name, include_path)
    try:
        loaded = manager.load([name])
    except Exception as error:
        raise UserError(_problem(name, manager, error)) from error
    groups, tasks = loaded.get("groups", {}), loaded["tasks"]
    return FoundTask(name, tasks, [groups[name]] if name in groups else list(tasks.values()), manager)


def _index_with(name: str, include_path: Path | None) -> "TaskManager":
    """Returns an index that has ``name``: of the user's folder, of lm_eval's folder of that name, or of all there is.

    lm_eval's own takes ten seconds to read. From the first two only what names nothing of another folder is taken.
    """
    import lm_eval.tasks

    own = Path(str(lm_eval.tasks.__file__)).parent / name
    for folder in (include_path, own if own.is_dir() else None):
        if folder is not None:
            manager = lm_eval.tasks.TaskManager(include_path=folder, include_defaults=False)
            if _stands_alone(name, manager):
                return manager
    manager = lm_eval.tasks.TaskManager(include_path=include_path)
    if name not in manager.all_tasks:
        near = [other for other in manager.all_tasks if name.lower() in other.lower()][:5]
        raise UserError(
            f"benchmark.tasks: {name} is no task, group or tag of lm_eval"
            + (
                f", nor of benchmark.include_path={include_path}, where a file that is no task is passed over"
                * bool(include_path)
            )
            + (f"; there is {', '.join(near)}" if near else "; `lm-eval ls tasks` lists them")
        )
    return manager


def _stands_alone(name: str, manager: "TaskManager") -> bool:
    """Returns whether an index has a task, or a group with all that it names; tags may have tasks of any folder."""
    if name not in manager.all_groups:
        return name in manager.all_subtasks
    parts = (manager.task_index[name].cfg or {}).get("task", ())
    return all(isinstance(part, str) and _stands_alone(part, manager) for part in parts)


def _problem(name: str, manager: "TaskManager", error: Exception) -> str:
    """Why a task cannot be made, and what to do."""
    import datasets

    words = shorten(str(error) or type(error).__name__, 300, placeholder=" ...").rstrip(".")
    if isinstance(error, ImportError):
        return f"benchmark.tasks: {name} of lm_eval needs a package that is not installed: {words}"
    settings = manager.task_index[name].cfg or {}
    path, part = settings.get("dataset_path"), settings.get("dataset_name")
    if not isinstance(error, OSError | datasets.exceptions.DatasetsError):
        return f"benchmark.tasks: {name} of lm_eval cannot be made ({type(error).__name__}: {words}); see its YAML file"
    if path is None:
        return f"benchmark.tasks: the data of {name} of lm_eval cannot be had: {words}"
    arguments = repr(str(path)) + (f", {str(part)!r}" if part else "")
    return (
        f"benchmark.tasks: the data set {path} of {name} of lm_eval is neither in the cache nor can it be downloaded: "
        f'{words}. Where there is a network: python -c "import datasets; datasets.load_dataset({arguments})", and copy '
        "the cache (HF_HOME) here; or write a task on files of your own and name its folder as benchmark.include_path"
    )


def require_nltk(names: Sequence[str]) -> None:
    """Downloads the tokenizer data ``names`` that nltk lacks, as tasks would only after the last answer.

    UserError for data that cannot be downloaded.
    """
    if not names:
        return
    import nltk

    for name in names:
        try:
            nltk.data.find(f"tokenizers/{name}")
        except LookupError as error:
            if not nltk.download(name, quiet=True):
                raise UserError(
                    f"benchmark.nltk_data: nltk has no {name} here, which the task counts sentences with, and cannot "
                    f"download it: copy nltk_data/tokenizers/{name} from a machine with a network (python -m "
                    f"nltk.downloader {name}) to ~/nltk_data/tokenizers or below a folder that NLTK_DATA names"
                ) from error
