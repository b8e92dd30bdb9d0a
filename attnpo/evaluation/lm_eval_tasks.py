"""Runs lm_eval tasks, such as IFEval, on a model folder, without a grader.

Sources: EleutherAI/lm-evaluation-harness (lm_eval 0.4.13); IFEval: Zhou et al. 2023, arXiv 2311.07911. lm_eval's output
is redirected to a log file, and random states are restored afterwards. lm_eval is imported lazily, since loading it and
its task index takes seconds.
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

from attnpo.evaluation.base import BenchmarkScore, EvaluatedModel, UngradedResult
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
"""File with lm_eval's output, in the evaluation's folder."""


# ------------------------------------------------------------------------------------------------ silencing it


class _WarningCounter(logging.Handler):
    """Counts a logger's warnings by message, with digits masked."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.counts: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        text = re.sub(r"\d+", "N", " ".join(record.getMessage().split()))
        self.counts[shorten(text, 160, placeholder=" ...")] += 1


@contextmanager
def silence_lm_eval(folder: Path, device: torch.device) -> Iterator[Counter[str]]:
    """Redirects lm_eval's output to ``lm_eval.log``, counts its warnings, and restores random states on exit.

    lm_eval seeds Python, numpy and torch. Output is redirected for the whole process, including subprocesses and
    progress bars.
    """
    folder.mkdir(parents=True, exist_ok=True)
    states = random.getstate(), np.random.get_state()
    heard, logger = _WarningCounter(), logging.getLogger("lm_eval")
    before = logger.propagate, logger.level
    with (
        (folder / WORDS).open("a", encoding="utf-8") as words,
        _redirect_output(words.fileno()),
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
def _redirect_output(target: int) -> Iterator[None]:
    """Redirects file descriptors 1 and 2, which subprocesses inherit, to another file."""
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


def load_task(name: str, include_path: Path | None) -> "tuple[TaskManager, dict[str, Task], list[object]]":
    """Loads a task, group or tag by name, from lm_eval or from the user's own folder.

    Returns lm_eval's task manager, the tasks (with their data) by name, and the objects to pass to the evaluation.

    Raises:
        UserError: the name is unknown, or the task cannot be loaded, for example because its data are missing.
    """
    manager = _make_task_manager(name, include_path)
    try:
        loaded = manager.load([name])
    except Exception as error:
        raise UserError(_describe_load_error(name, manager, error)) from error
    groups, tasks = loaded.get("groups", {}), loaded["tasks"]
    return manager, tasks, [groups[name]] if name in groups else list(tasks.values())


def _make_task_manager(name: str, include_path: Path | None) -> "TaskManager":
    """Builds a task manager that covers ``name``, from the user's folder, lm_eval's folder ``name`` or all tasks."""
    import lm_eval.tasks

    # Indexing all of lm_eval takes ten seconds, so try single folders first; their tasks must be self-contained.
    own = Path(str(lm_eval.tasks.__file__)).parent / name
    for folder in (include_path, own if own.is_dir() else None):
        if folder is not None:
            manager = lm_eval.tasks.TaskManager(include_path=folder, include_defaults=False)
            if _is_self_contained(name, manager):
                return manager
    manager = lm_eval.tasks.TaskManager(include_path=include_path)
    if name not in manager.all_tasks:
        near = [other for other in manager.all_tasks if name.lower() in other.lower()][:5]
        elsewhere = f" or of benchmark.include_path={include_path} (files that are not valid tasks are skipped)"
        raise UserError(
            f"benchmark.tasks: {name} is not a task, group or tag of lm_eval{elsewhere if include_path else ''}; "
            + (f"similar names: {', '.join(near)}" if near else "`lm-eval ls tasks` lists all names")
        )
    return manager


def _is_self_contained(name: str, manager: "TaskManager") -> bool:
    """Returns whether the index contains the task, or the group with all members.

    Returns False for tags, which may span folders.
    """
    if name not in manager.all_groups:
        return name in manager.all_subtasks
    parts = (manager.task_index[name].cfg or {}).get("task", ())
    return all(isinstance(part, str) and _is_self_contained(part, manager) for part in parts)


def _describe_load_error(name: str, manager: "TaskManager", error: Exception) -> str:
    """Explains why a task cannot be loaded and what to do."""
    import datasets

    words = shorten(str(error) or type(error).__name__, 300, placeholder=" ...").rstrip(".")
    settings = manager.task_index[name].cfg or {}
    path, part = settings.get("dataset_path"), settings.get("dataset_name")
    if path is None or not isinstance(error, OSError | datasets.exceptions.DatasetsError):
        return f"benchmark.tasks: lm_eval cannot load {name} ({type(error).__name__}: {words}); see its YAML file"
    arguments = repr(str(path)) + (f", {str(part)!r}" if part else "")
    return (
        f"benchmark.tasks: the data set {path} of lm_eval's {name} is not in the cache and cannot be downloaded: "
        f'{words}. On a machine with network access, run python -c "import datasets; '
        f'datasets.load_dataset({arguments})" and copy its cache (HF_HOME) to this one; or write a task that '
        "reads your own files and set benchmark.include_path to its folder"
    )


def download_nltk_data(names: Sequence[str]) -> None:
    """Downloads missing nltk tokenizer data up front, since a task that needs it would fail only after its last answer.

    Raises:
        UserError: the data cannot be downloaded.
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
                    f"benchmark.nltk_data: nltk lacks {name}, which the task needs to count sentences, and cannot "
                    f"download it: run python -m nltk.downloader {name} on a machine with network access and copy "
                    f"nltk_data/tokenizers/{name} to ~/nltk_data/tokenizers or to a folder in NLTK_DATA"
                ) from error


BOOTSTRAP = 1000
"""Bootstrap resamples for standard errors that have no formula.

lm_eval's default of 100,000 takes minutes and only improves the third digit.
"""
NO_FILTER = "none"  # lm_eval's name for unfiltered answers
VERSION = "2"  # increase with every code change that changes a score


@dataclass(frozen=True)
class LmEvalTasks:
    """Benchmark of lm_eval tasks, groups or tags.

    ``include_path``: folder with custom tasks in lm_eval's format; Python functions of these tasks are executed.
    ``num_fewshot`` and ``max_gen_toks`` (new tokens per answer) override the tasks' own values. ``limit``: maximum
    number of documents per task. ``nltk_data``: nltk data that the tasks need. The model is loaded as in training, in
    ``model.dtype``. ``apply_chat_template``: whether to wrap prompts in the model's chat format.
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
            raise UserError("benchmark.system needs a chat format: set benchmark.apply_chat_template=true as well")

    @property
    def scores(self) -> tuple[str, ...]:
        """Returns an empty tuple, since the scores are known only after the tasks have run."""
        return ()

    def fingerprint(self) -> dict[str, object]:
        """Returns lm_eval's version (which fixes tasks and prompts), digests of custom tasks, and the settings.

        The result's table contains the version of each task and a digest of the task's documents.
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

    def measure(self, subject: EvaluatedModel) -> UngradedResult:
        """Runs all tasks; returns the scores with intervals of ±1.96 standard errors, and one table row per metric.

        Finished tasks are saved in the evaluated model's folder and reused when the command is rerun.

        Raises:
            UserError: a task is unknown, its data or packages are missing, or its answers are too long for the model.
        """
        import lm_eval  # noqa: F401  fails early, with a hint at the missing extra

        self._require_tasks()
        download_nltk_data(self.nltk_data)
        runner = _TaskRunner(self, subject, None if self.include_path is None else self._task_folder())
        found = [runner.run_task(name) for name in self.tasks]
        counts: Counter[str] = Counter()
        for one in found:
            counts.update(one.counts)
        scores = tuple(score for one in found for score in one.scores)
        return UngradedResult(scores, dict(counts), tuple(row for one in found for row in one.table))

    def _require_tasks(self) -> None:
        if not self.tasks:
            raise UserError(
                "benchmark.tasks is empty: set it to lm_eval tasks, for example benchmark.tasks=[arc_easy,hellaswag]"
            )
        if len(set(self.tasks)) < len(self.tasks):
            raise UserError(f"benchmark.tasks={list(self.tasks)} contains a task twice")
        if self.include_path is not None and not self._task_folder().is_dir():
            raise UserError(
                f"benchmark.include_path={self.include_path}: no such folder (working folder: {Path.cwd()})"
            )

    def _task_folder(self) -> Path:
        return Path(str(self.include_path)).expanduser().resolve()


# ------------------------------------------------------------------------------------------------ one task


class _TaskRunner:
    """Runs tasks on one model, which is loaded when the first task needs it."""

    def __init__(self, settings: LmEvalTasks, subject: EvaluatedModel, own: Path | None) -> None:
        from attnpo.models.loading import resolve_attention, weights_fingerprint

        self.settings, self.subject, self.own = settings, subject, own
        self._lm: HFLM | None = None
        model = subject.model
        decoding = Path(model.path).expanduser() / "generation_config.json"  # used by lm_eval for decoding
        self._key = {  # determines the scores of any task
            **({"generation_config": file_digest(decoding)} if decoding.is_file() else {}),
            **{name: value for name, value in settings.fingerprint().items() if name != "tasks"},
            "model": weights_fingerprint(model.path, model.revision),
            "dtype": model.dtype,
            "attention": resolve_attention(model.path, model.revision, model.attn_implementation),
            "chat": subject.chat.fingerprint(),
        }

    def run_task(self, name: str) -> UngradedResult:
        """Returns the scores of one task, group or tag, reading them from the folder if they are already there."""
        path, key = self.subject.folder / f"task-{safe_filename(name)}.json", digest([name, self._key])
        kept = read_record(path)
        if kept is not None and kept.get("key") == key:
            log.info("%s: %s is already finished; its scores were read from %s", self.settings.name, name, path)
            return UngradedResult(tuple(map(BenchmarkScore.read, kept["scores"])), kept["counts"], tuple(kept["table"]))
        began = time.perf_counter()
        result = self._evaluate(name)
        write_record(path, {"key": key, **asdict(result)})
        seconds = time.perf_counter() - began
        log.info("%s: %s finished in %.0f s; lm_eval's output is in %s", self.settings.name, name, seconds, WORDS)
        return result

    def _evaluate(self, name: str) -> UngradedResult:
        import lm_eval

        settings, folder, device = self.settings, self.subject.folder, self.subject.device
        with silence_lm_eval(folder, device):
            manager, tasks, asked = load_task(name, self.own)
            self._lm = self._lm or self._load_model()
        self._check_tasks(tasks, self._lm)
        parts = len(tasks)
        log.info("%s: %s%s on %s", settings.name, name, f" ({parts} tasks)" * (parts > 1), device)
        with silence_lm_eval(folder, device) as heard:
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
        if results is None:  # lm_eval returns them only in the first process
            raise UserError(f"benchmark={settings.name} runs in one process: start it without torchrun or srun")
        for text, count in heard.items():
            log.warning("%s: %s: lm_eval warned %d times: %s", settings.name, name, count, text)
        counts = {f"lm_eval: {text}": count for text, count in heard.items()}
        return make_task_result(name, results, counts)

    def _load_model(self) -> "HFLM":
        """Loads the model for lm_eval, with the chat format and end-of-turn tokens used in training."""
        from lm_eval.models.huggingface import HFLM

        from attnpo.models.loading import load_model, load_tokenizer

        spec, chat = self.subject.model, self.subject.chat
        model = load_model(
            spec.path, dtype=spec.dtype, attn_implementation=spec.attn_implementation, revision=spec.revision
        )
        model.to(self.subject.device)  # type: ignore[arg-type]
        if self.settings.apply_chat_template and model.generation_config is not None:
            model.generation_config.eos_token_id = sorted(chat.end_ids)
        tokenizer = load_tokenizer(spec.path, spec.revision)  # a separate one, since lm_eval modifies it
        tokenizer.chat_template = chat.chat_template
        return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=self.settings.batch_size)

    def _check_tasks(self, tasks: "Mapping[str, Task]", lm: "HFLM") -> None:
        """Checks for problems that would otherwise surface only late in the evaluation.

        Raises:
            UserError: a task runs generated code, needs images, or its answers are too long for the model.
        """
        for name, task in tasks.items():
            if getattr(task, "UNSAFE_CODE", False):
                raise UserError(f"benchmark.tasks: {name} runs model-generated code, which is not supported")
            if getattr(task, "MULTIMODAL", False):
                raise UserError(f"benchmark.tasks: {name} needs images, but the model accepts only text")
            if task.OUTPUT_TYPE != "generate_until":
                continue
            asked = self.settings.max_gen_toks or (task.config.generation_kwargs or {}).get(
                "max_gen_toks", lm.max_gen_toks
            )
            if int(asked) >= lm.max_length:
                raise UserError(
                    f"benchmark.tasks: {name} asks for answers of up to {asked} tokens, but {self.subject.model.path} "
                    f"has only {lm.max_length} positions for prompt and answer: lower benchmark.max_gen_toks"
                )


# ------------------------------------------------------------------------------------------------ its results


class TaskMetric(TypedDict):
    """Value of one metric of a task or group, for answers passed through one filter (e.g. ``acc,none``).

    ``shots``: number of few-shot examples; ``data``: digest of the documents (None for a group). ``higher_is_better``:
    the metric's direction as stated by the task; None if the task states no direction, or if the tasks in a group do
    not all state the same one.
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


def metric_to_score(figure: TaskMetric) -> BenchmarkScore:
    """Converts a metric to a score with an interval of ±1.96 standard errors."""
    name = ".".join(part for part in (figure["task"], figure["metric"], figure["filter"]) if part != NO_FILTER)
    value, half = figure["value"], None if figure["stderr"] is None else NORMAL * figure["stderr"]
    interval = None if half is None else (value - half, value + half)
    return BenchmarkScore(name, value, (value,), interval, None, figure["documents"], figure["higher_is_better"])


def make_task_result(name: str, results: "EvalResults", counts: Mapping[str, int]) -> UngradedResult:
    """Builds a result with the scores of a task, a whole group or each task in a tag, and one table row per metric."""
    figures = list_metrics(results)
    whole = [figure for figure in figures if figure["task"] == name] or figures
    if not whole:
        raise UserError(f"benchmark.tasks: lm_eval's {name} has no numeric metric")
    left = sum(size["original"] - size["effective"] for size in results["n-samples"].values())
    limited = {"documents left out by benchmark.limit": left} if left else {}
    return UngradedResult(tuple(map(metric_to_score, whole)), {**counts, **limited}, tuple(figures))


def list_metrics(results: "EvalResults") -> list[TaskMetric]:
    """Returns all numeric metrics of all tasks and groups."""
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
