"""What AlpacaEval 2 takes from ``alpaca_eval``: the judge's prompts, the order of the answers, what a reply means.

The library defines the benchmark (version 0.6.6). It is given a function in place of its own client: the first time it
hands over its prompts, the second time it gets the replies. So one store, one budget and one set of retries serve every
benchmark, and the library's caches are never used: no round can meet the replies of another one.
"""

import io
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
from jaxtyping import Float

from attnpo.evaluation.grading.base import GradingReply
from attnpo.schema import Json, Message, UserError, digest
from attnpo.system.files import shortened
from attnpo.system.hub_access import hub, out_of_reach

# What a grader can be told of the library's settings for a call; the others say how its own client goes about it.
ASKED = {"max_tokens", "temperature", "top_p", "logprobs", "top_logprobs"}
CLIENT = {"model_name", "price_per_token", "requires_chatml", "batch_size", "num_procs", "n_retries"}
TEMPERATURE, MOST_TOKENS = 0.7, 2048  # what the library's client takes where an annotator says nothing
REPOSITORY = "tatsu-lab/alpaca_eval"
_one_at_a_time = threading.RLock()


@dataclass(frozen=True)
class Compared:
    """One row of the benchmark: an instruction, the baseline's answer, the model's answer (both may be empty)."""

    instruction: str
    baseline: str
    output: str


@dataclass(frozen=True)
class Annotator:
    """How an annotator of the library asks. ``labels``: the tokens that it reads, none where it reads a text.

    ``digest`` stands for its template, its settings and its parser.
    """

    name: str
    max_tokens: int
    temperature: float
    top_p: float
    top_logprobs: int
    labels: tuple[str, ...]
    digest: str


# ------------------------------------------------------------------------------------------------ the library


@cache
def library() -> ModuleType:
    """Returns the package ``alpaca_eval``, imported without its traces: a .env file read, the log's level changed.

    Raises:
        ImportError: it is not installed (``system.packages.missing_package`` names the extra).
        UserError: it is, but what it imports itself is not there.
    """
    # It reads a .env file, and asks for the user's name, which a container may not have.
    wanted = {"PYTHON_DOTENV_DISABLED": "1", "LOGNAME": os.environ.get("LOGNAME", "nobody")}
    before = {name: os.environ.get(name) for name in wanted}
    with quiet():
        os.environ.update(wanted)
        try:
            import alpaca_eval
            import alpaca_eval.annotators
            import alpaca_eval.metrics.glm_winrate
        except ModuleNotFoundError as error:
            if error.name != "pkg_resources":
                raise
            raise UserError(
                "alpaca_eval needs pkg_resources, which setuptools 81 and later no longer bring: "
                "pip install 'setuptools<81'"
            ) from error
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
    package: ModuleType = alpaca_eval
    return package


@contextmanager
def quiet() -> Iterator[None]:
    """Opens a context in which the library says nothing: it logs on the root logger, warns, prints, draws bars.

    Records of other loggers pass. What the library reports is counted by those who call it.
    """
    import warnings

    def mute(record: logging.LogRecord) -> bool:
        return False

    root, nothing = logging.getLogger(), logging.NullHandler()
    with _one_at_a_time:
        level = root.level
        root.addHandler(nothing)  # without a handler its first record would install one that writes to the terminal
        root.addFilter(mute)
        try:
            with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                warnings.simplefilter("ignore")
                yield
        finally:
            root.removeFilter(mute)
            root.removeHandler(nothing)
            root.setLevel(level)


# ------------------------------------------------------------------------------------------------ its data


def from_hub(file: str) -> Path | str:
    """Returns a file of the library's data set, from the hub or its cache; in words why it cannot be had."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        with hub(), quiet():
            return Path(hf_hub_download(REPOSITORY, file, repo_type="dataset"))
    except (OSError, EntryNotFoundError) as error:
        return out_of_reach() or shortened(str(error).splitlines()[0], 120)


def how_to_get(file: str) -> str:
    """In words where a file of the library's data set is."""
    return (
        f"{file} of the hub data set {REPOSITORY} (on a machine with a network: `hf download {REPOSITORY} {file} "
        "--repo-type dataset`)"
    )


# ------------------------------------------------------------------------------------------------ annotators


def annotator(name: str) -> Annotator:
    """Returns what the annotator of this name asks for; a path of a folder with a ``configs.yaml`` is one too.

    Raises:
        UserError: there is no such annotator, or it asks for what a grader cannot be given (tools, favoured tokens,
            several questions in one call, a prompt that is no chat).
    """
    pool = _pool(name)
    if len(pool.annotators) != 1:
        raise _unusable(name, f"it is a pool of {len(pool.annotators)} annotators")
    (single,) = pool.annotators.values()
    settings, parser = dict(single.completions_kwargs), single.fn_completion_parser
    unknown = sorted(settings.keys() - ASKED - CLIENT)
    if unknown:
        raise _unusable(name, f"it needs {', '.join(unknown)}, which graders are not told")
    if single.batch_size != 1:
        raise _unusable(name, f"it puts {single.batch_size} questions into one call")
    if not single.prompt_template.lstrip().startswith("<|im_start|>"):
        raise _unusable(name, "its prompt is not a list of messages (<|im_start|> ...)")
    numerator = parser.keywords.get("numerator_token")
    reads_text = numerator is None and single.completion_key == "completions"
    if not reads_text and (numerator is None or parser.keywords.get("log_prob_index", "batch") not in ("batch", 0)):
        raise _unusable(name, "it reads more of a reply than its text or its first token")
    denominators = parser.keywords.get("denominator_tokens", ())
    account = [single.prompt_template, settings, parser.func.__name__, repr(sorted(parser.keywords.items()))]
    return Annotator(
        name=name,
        max_tokens=int(settings.get("max_tokens", MOST_TOKENS)),
        temperature=float(settings.get("temperature", TEMPERATURE)),
        top_p=float(settings.get("top_p", 1.0)),
        top_logprobs=int(settings.get("top_logprobs", 0)),
        labels=tuple(dict.fromkeys((numerator, *denominators))) if numerator else (),
        digest=digest([*account, single.seed, library().__version__]),
    )


def _pool(name: str):  # type: ignore[no-untyped-def]  # a class of the library
    """The library's annotator, which keeps nothing on the disk. A name with a slash is a path of the user's."""
    package = library()
    config = str(Path(name).expanduser().absolute()) if os.sep in name else name
    with quiet():
        try:
            return package.annotators.PairwiseAnnotator(annotators_config=config, caching_path=None)
        except (OSError, ImportError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"benchmark.annotator={name}: alpaca_eval {package.__version__} cannot make this annotator "
                f"({type(error).__name__}: {shortened(str(error), 120)}); expected the name of a folder in "
                f"{package.constants.EVALUATORS_CONFIG_DIR}, or the path of a folder like these, written with a slash"
            ) from error


def _unusable(name: str, why: str) -> UserError:
    return UserError(
        f"benchmark.annotator={name} cannot be asked through a grader: {why}; expected one that asks one question per "
        "call in plain messages, such as weighted_alpaca_eval_gpt-4o-mini-2024-07-18"
    )


# ------------------------------------------------------------------------------------------------ questions and replies


def prompts(name: str, rows: Sequence[Compared]) -> list[str | None]:
    """Returns the judge's prompt for each row as the library writes it; None where both answers are the same text, a
    tie.

    The instruction seeds the order of the two answers, the library's way: the same in every round.
    """

    def record(prompts: Sequence[str], completion_key: str) -> dict[str, Sequence[object]]:
        return {completion_key: list(prompts)}

    asked = _annotated(name, rows, record, parser=lambda prompt: [1])
    return [prompt if isinstance(prompt, str) else None for prompt in (row["prompt"] for row in asked)]


def preferences(name: str, rows: Sequence[Compared], replies: Mapping[str, GradingReply]) -> Float[np.ndarray, " rows"]:
    """Returns the library's preferences: 1 where the baseline's answer is surely better, 2 where the model's is, 1.5
    for ties.

    NaN where the reply to a row's prompt holds no verdict, or is not among ``replies`` (by prompt). A reply without
    log-probabilities counts as if its text had all the probability.
    """

    def replay(prompts: Sequence[str], completion_key: str) -> dict[str, Sequence[object]]:
        found = [replies.get(prompt) for prompt in prompts]
        return {completion_key: ["" if reply is None else _completion(reply, completion_key) for reply in found]}

    annotated = _annotated(name, rows, replay)
    values = [row["preference"] for row in annotated]
    return np.array([np.nan if value is None else float(str(value)) for value in values], dtype=float)


def messages(prompt: str) -> tuple[Message, ...]:
    """Returns a prompt of the library as messages."""
    turns = library().utils.prompt_to_chatml(prompt.strip())
    return tuple(Message(role=turn["role"], content=turn["content"]) for turn in turns)


def _completion(reply: GradingReply, completion_key: str) -> Json:
    """Returns a reply in the form of the library's client: a text, or a choice with the first token's
    log-probabilities.
    """
    text = reply.text or " "
    if completion_key == "completions":
        return text
    likely = {reply.text.strip(): 0.0} if reply.logprobs is None else reply.logprobs
    tokens: list[Json] = [{"token": token, "logprob": value} for token, value in likely.items()]
    return {"text": text, "logprobs": {"content": [{"token": text, "top_logprobs": tokens}]}}


def _annotated(
    name: str,
    rows: Sequence[Compared],
    complete: Callable[[Sequence[str], str], dict[str, Sequence[object]]],
    parser: Callable[[str], list[int]] | None = None,
) -> list[dict[str, object]]:
    """Returns each row's preference and raw completion after a pass of the library in which ``complete`` stands for its
    client.

    Rows stay in their order: the library drops none, it gives None where it has no preference.
    """
    with quiet():
        pool = _pool(name)
        (single,) = pool.annotators.values()
        single.fn_completions = lambda prompts, **settings: complete(prompts, single.completion_key)
        single.fn_completion_parser = parser or single.fn_completion_parser
        found = pool.annotate_head2head(
            outputs_1=[{"instruction": row.instruction, "output": row.baseline} for row in rows],
            outputs_2=[{"instruction": row.instruction, "output": row.output} for row in rows],
            is_ordered=True,
        )
    return [{"preference": row["preference"], "prompt": row.get(pool.completion_key)} for row in found]
