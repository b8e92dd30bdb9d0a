"""Tasks of lm_eval as a measure: IFEval, and any other by name, on the model folder, without a grader.

Sources: EleutherAI/lm-evaluation-harness (lm_eval 0.4.13); IFEval: Zhou et al. 2023, arXiv 2311.07911. lm_eval is kept
quiet and its random states are undone; it is imported where it is called, since it and its index take seconds.
"""

import logging
import math
import os
import random
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field
from importlib import metadata
from numbers import Real
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import torch

from attnpo.evaluation.base import BenchmarkScore, Subject, UngradedResult
from attnpo.evaluation.spreads import NORMAL
from attnpo.schema import BOOKKEEPING, UserError, check_at_least, digest
from attnpo.system.files import file_digest, read_record, safe_filename, write_record

if TYPE_CHECKING:
    from lm_eval.api.task import Task
    from lm_eval.models.huggingface import HFLM
    from lm_eval.result_schema import EvalResults
    from lm_eval.tasks import TaskManager

log = logging.getLogger(__name__)

WORDS = "lm_eval.log"
"""Log of the library, in the folder of the evaluation."""


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


def find_task(name: str, include_path: Path | None) -> "tuple[TaskManager, dict[str, Task], list[object]]":
    """Returns the index that has a name, the tasks that it stands for with their data, and what is to be run.

    It is a task, a group or a tag, of the folder of the user's own ones or of lm_eval.

    Raises:
        UserError: there is none of that name, or it cannot be made, as where its data cannot be had.
    """
    manager = _index_with(name, include_path)
    try:
        loaded = manager.load([name])
    except Exception as error:
        raise UserError(_problem(name, manager, error)) from error
    groups, tasks = loaded.get("groups", {}), loaded["tasks"]
    return manager, tasks, [groups[name]] if name in groups else list(tasks.values())


def _index_with(name: str, include_path: Path | None) -> "TaskManager":
    """Returns an index that has ``name``: of the user's folder, of lm_eval's of that name, or of all there is."""
    import lm_eval.tasks

    # lm_eval's own takes ten seconds to read. From the first two only what names nothing of another folder is taken.
    own = Path(str(lm_eval.tasks.__file__)).parent / name
    for folder in (include_path, own if own.is_dir() else None):
        if folder is not None:
            manager = lm_eval.tasks.TaskManager(include_path=folder, include_defaults=False)
            if _stands_alone(name, manager):
                return manager
    manager = lm_eval.tasks.TaskManager(include_path=include_path)
    if name not in manager.all_tasks:
        near = [other for other in manager.all_tasks if name.lower() in other.lower()][:5]
        nor = f", nor of benchmark.include_path={include_path}, where a file that is no task is passed over"
        raise UserError(
            f"benchmark.tasks: {name} is no task, group or tag of lm_eval{nor if include_path else ''}; "
            + (f"there is {', '.join(near)}" if near else "`lm-eval ls tasks` lists them")
        )
    return manager


def _stands_alone(name: str, manager: "TaskManager") -> bool:
    """Returns whether an index has a task, or a group with all that it names; tags may have tasks of any folder."""
    if name not in manager.all_groups:
        return name in manager.all_subtasks
    parts = (manager.task_index[name].cfg or {}).get("task", ())
    return all(isinstance(part, str) and _stands_alone(part, manager) for part in parts)


def _problem(name: str, manager: "TaskManager", error: Exception) -> str:
    """Returns the reason why a task cannot be made, and what to do."""
    import datasets

    words = shorten(str(error) or type(error).__name__, 300, placeholder=" ...").rstrip(".")
    settings = manager.task_index[name].cfg or {}
    path, part = settings.get("dataset_path"), settings.get("dataset_name")
    if path is None or not isinstance(error, OSError | datasets.exceptions.DatasetsError):
        return f"benchmark.tasks: {name} of lm_eval cannot be made ({type(error).__name__}: {words}); see its YAML file"
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


BOOTSTRAP = 1000
"""Resamples for standard errors without a formula (lm_eval's own 100,000 take minutes for a third digit)."""
NO_FILTER = "none"  # lm_eval's name for answers taken as they are
VERSION = "2"  # raised by hand with every change of the code that moves a figure


@dataclass(frozen=True)
class LmEvalTasks:
    """Figures of tasks, groups or tags of lm_eval, by their names.

    ``include_path``: a folder with tasks of one's own in lm_eval's format, whose Python functions are run.
    ``num_fewshot`` and ``max_gen_toks`` (new tokens of an answer) replace what tasks say; ``limit``: only so many
    documents of each task. ``nltk_data``: data of nltk that the tasks need. The model is loaded as for training, in
    ``model.dtype``; ``apply_chat_template`` asks in its chat format.
    """

    tasks: tuple[str, ...] = ()
    name: str = "lm_eval"
    apply_chat_template: bool = False
    system: str | None = None
    num_fewshot: int | None = None
    max_gen_toks: int | None = None
    limit: int | None = None
    batch_size: int = field(default=8, metadata=BOOKKEEPING)
    include_path: str | None = None
    nltk_data: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_at_least("benchmark", 1, limit=self.limit, batch_size=self.batch_size, max_gen_toks=self.max_gen_toks)
        check_at_least("benchmark", 0, num_fewshot=self.num_fewshot)
        if self.system is not None and not self.apply_chat_template:
            raise UserError("benchmark.system is a turn of a chat: set benchmark.apply_chat_template=true as well")

    @property
    def scores(self) -> tuple[str, ...]:
        """Returns nothing: only the tasks know their figures."""
        return ()

    def versions(self) -> dict[str, object]:
        """Returns lm_eval's version, which fixes its tasks and prompts, digests of the user's own, and the settings.

        The version of each task and a digest of its documents stand in the table of the result.
        """
        self._require_tasks()
        settings = ("apply_chat_template", "system", "num_fewshot", "max_gen_toks", "limit")
        return {
            "lm_eval": metadata.version("lm_eval"),
            "tasks": list(self.tasks),
            "own_tasks": None
            if self.include_path is None
            else {
                path.relative_to(self._task_folder()).as_posix(): file_digest(path)
                for path in sorted(self._task_folder().rglob("*"))
                if path.is_file() and "__pycache__" not in path.parts
            },
            "code": VERSION,
            **{name: getattr(self, name) for name in settings},
        }

    def measure(self, subject: Subject) -> UngradedResult:
        """Returns the figures of every task with 1.96 standard errors, and a row for each figure of each part.

        A task that is done is kept in the subject's folder, and read from there by a repeated command.

        Raises:
            UserError: a task is not known, or its data, its packages or its room in the model cannot be had.
        """
        import lm_eval  # noqa: F401  a user without the package is told of its extra, before anything else

        self._require_tasks()
        require_nltk(self.nltk_data)
        runner = _Runner(self, subject, None if self.include_path is None else self._task_folder())
        found = [runner.task(name) for name in self.tasks]
        counts: Counter[str] = Counter()
        for one in found:
            counts.update(one.counts)
        scores = tuple(score for one in found for score in one.scores)
        return UngradedResult(scores, dict(counts), tuple(row for one in found for row in one.table))

    def _require_tasks(self) -> None:
        if not self.tasks:
            raise UserError(
                "benchmark.tasks is empty: name tasks of lm_eval, as in benchmark.tasks=[arc_easy,hellaswag]"
            )
        if len(set(self.tasks)) < len(self.tasks):
            raise UserError(f"benchmark.tasks={list(self.tasks)} names a task twice")
        if self.include_path is not None and not self._task_folder().is_dir():
            raise UserError(f"benchmark.include_path={self.include_path}: no such folder (looked from {Path.cwd()})")

    def _task_folder(self) -> Path:
        return Path(str(self.include_path)).expanduser().resolve()


# ------------------------------------------------------------------------------------------------ one task


class _Runner:
    """Runs the tasks of one measure on one model, which is loaded when the first task needs it."""

    def __init__(self, settings: LmEvalTasks, subject: Subject, own: Path | None) -> None:
        from attnpo.models.loading import resolve_attention, weights_fingerprint

        self.settings, self.subject, self.own = settings, subject, own
        self._lm: HFLM | None = None
        model = subject.model
        decoding = Path(model.path).expanduser() / "generation_config.json"  # lm_eval decodes by it
        self._key = {  # decides the figures of any task
            **({"generation_config": file_digest(decoding)} if decoding.is_file() else {}),
            **{name: value for name, value in settings.versions().items() if name != "tasks"},
            "model": weights_fingerprint(model.path, model.revision),
            "dtype": model.dtype,
            "attention": resolve_attention(model.path, model.revision, model.attn_implementation),
            "chat": subject.chat.fingerprint(),
        }

    def task(self, name: str) -> UngradedResult:
        """Returns the figures of one task, group or tag; read from the folder where they are there."""
        path, key = self.subject.folder / f"task-{safe_filename(name)}.json", digest([name, self._key])
        kept = read_record(path)
        if kept is not None and kept.get("key") == key:
            log.info("%s: %s is done, read from %s", self.settings.name, name, path)
            return UngradedResult(tuple(map(BenchmarkScore.read, kept["scores"])), kept["counts"], tuple(kept["table"]))
        began = time.perf_counter()
        measured = self._run(name)
        write_record(path, {"key": key, **asdict(measured)})
        seconds = time.perf_counter() - began
        log.info("%s: %s is done in %.0f s; what lm_eval said is in %s", self.settings.name, name, seconds, WORDS)
        return measured

    def _run(self, name: str) -> UngradedResult:
        import lm_eval

        settings, folder, device = self.settings, self.subject.folder, self.subject.device
        with quiet(folder, device):
            manager, tasks, asked = find_task(name, self.own)
            self._lm = self._lm or self._model()
        self._check(tasks, self._lm)
        parts = len(tasks)
        log.info("%s: %s%s on %s", settings.name, name, f" ({parts} tasks)" * (parts > 1), device)
        with quiet(folder, device) as heard:
            results = lm_eval.simple_evaluate(
                model=self._lm,
                tasks=asked,
                task_manager=manager,
                num_fewshot=settings.num_fewshot,
                limit=settings.limit,
                bootstrap_iters=BOOTSTRAP,
                apply_chat_template=settings.apply_chat_template,
                system_instruction=settings.system,
                gen_kwargs=None if settings.max_gen_toks is None else {"max_gen_toks": settings.max_gen_toks},
            )
        if results is None:  # lm_eval gives them to the first process alone
            raise UserError(f"benchmark={settings.name} runs in one process: start it without torchrun or srun")
        for text, count in heard.items():
            log.warning("%s: %s: lm_eval says, %d times: %s", settings.name, name, count, text)
        counts = {f"lm_eval: {text}": count for text, count in heard.items()}
        return measured_of(name, results, counts)

    def _model(self) -> "HFLM":
        """Returns the model for lm_eval: loaded as for training, with training's chat format and ends of turn."""
        from lm_eval.models.huggingface import HFLM

        from attnpo.models.loading import load_model, load_tokenizer

        spec, chat = self.subject.model, self.subject.chat
        model = load_model(
            spec.path, dtype=spec.dtype, attn_implementation=spec.attn_implementation, revision=spec.revision
        )
        model.to(self.subject.device)  # type: ignore[arg-type]
        if self.settings.apply_chat_template and model.generation_config is not None:
            model.generation_config.eos_token_id = sorted(chat.end_ids)
        tokenizer = load_tokenizer(spec.path, spec.revision)  # lm_eval changes the one it gets
        tokenizer.chat_template = chat.chat_template
        return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=self.settings.batch_size)

    def _check(self, tasks: "Mapping[str, Task]", lm: "HFLM") -> None:
        """Raises UserError for a task that would end in an error only after its first hour."""
        for name, task in tasks.items():
            if getattr(task, "UNSAFE_CODE", False):
                raise UserError(f"benchmark.tasks: {name} runs code that a model wrote, which is not done here")
            if getattr(task, "MULTIMODAL", False):
                raise UserError(f"benchmark.tasks: {name} shows images, and the model reads text alone")
            if task.OUTPUT_TYPE != "generate_until":
                continue
            asked = self.settings.max_gen_toks or (task.config.generation_kwargs or {}).get(
                "max_gen_toks", lm.max_gen_toks
            )
            if int(asked) >= lm.max_length:
                raise UserError(
                    f"benchmark.tasks: {name} asks for answers of up to {asked} tokens, and {self.subject.model.path} "
                    f"has {lm.max_length} positions for prompt and answer: set benchmark.max_gen_toks below it"
                )


# ------------------------------------------------------------------------------------------------ its results


class TaskMetric(TypedDict):
    """One number of a task or group: of a metric, for the answers as a filter leaves them (``acc,none``).

    ``shots``: examples in front of a question; ``data``: a digest of the documents, None for a group.
    ``higher_is_better``: what the task says of its metric; None where it, or a group's tasks together, do not say.
    """

    task: str
    metric: str
    filter: str
    value: float
    stderr: float | None
    documents: int
    shots: int | None
    version: str | float | None
    data: str | None
    higher_is_better: bool | None


def score_of(figure: TaskMetric) -> BenchmarkScore:
    """Returns a figure as a score, with 1.96 standard errors."""
    name = ".".join(part for part in (figure["task"], figure["metric"], figure["filter"]) if part != NO_FILTER)
    value, half = figure["value"], None if figure["stderr"] is None else NORMAL * figure["stderr"]
    interval = None if half is None else (value - half, value + half)
    return BenchmarkScore(name, value, (value,), interval, None, figure["documents"], figure["higher_is_better"])


def measured_of(name: str, results: "EvalResults", counts: Mapping[str, int]) -> UngradedResult:
    """Scores of a task, of a group as a whole or of each task of a tag; rows for all there is."""
    figures = figures_of(results)
    whole = [figure for figure in figures if figure["task"] == name] or figures
    if not whole:
        raise UserError(f"benchmark.tasks: {name} of lm_eval gives no figure that is a number")
    left = sum(size["original"] - size["effective"] for size in results["n-samples"].values())
    limited = {"documents left out by benchmark.limit": left} if left else {}
    return UngradedResult(tuple(map(score_of, whole)), {**counts, **limited}, tuple(figures))


def figures_of(results: "EvalResults") -> list[TaskMetric]:
    """Returns every number of every task and group; what is no number is left out."""
    figures = []
    rows: dict[str, dict[str, Any]] = {task: dict(metrics) for task, metrics in results["results"].items()}
    for task, metrics in rows.items():
        documents = {str(sample["doc_hash"]) for sample in results.get("samples", {}).get(task, ())}
        for key, value in metrics.items():
            metric, _, selected = key.partition(",")
            if not selected or metric.endswith("_stderr") or isinstance(value, bool) or not isinstance(value, Real):
                continue
            error = metrics.get(f"{metric}_stderr,{selected}")
            figure = TaskMetric(
                task=task,
                metric=metric,
                filter=selected,
                value=float(value),
                stderr=float(error) if isinstance(error, Real) and math.isfinite(error) else None,
                documents=int(metrics.get("sample_len", 0)),
                shots=results["n-shot"].get(task),
                version=results["versions"].get(task),
                data=digest(sorted(documents))[:12] if documents else None,
                higher_is_better=results["higher_is_better"].get(task, {}).get(metric),
            )
            figures.append(figure)
    return figures
