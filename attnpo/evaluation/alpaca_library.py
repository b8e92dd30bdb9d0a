"""Parts of ``alpaca_eval`` that AlpacaEval 2 uses: prompts, order of the answers, meaning of a reply, win rates.

The library defines the benchmark (version 0.6.6). A function in place of its own client gets its prompts and gives the
replies that are there. So one store, one budget and one set of retries serve every benchmark, and the library's caches
are never used: no round can meet the replies of another one.

The length-controlled rate needs ``df_gamed.csv`` (the difficulty of each instruction, and 1610 rows of the baseline
told to be short or long), which the library downloads. Here it is a file that is handed over.
"""

import io
import logging
import math
import os
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
from jaxtyping import Float, Int

from attnpo.evaluation.base import Replies
from attnpo.evaluation.chat import GradingReply
from attnpo.schema import Json, Message, UserError, digest
from attnpo.system.files import shorten
from attnpo.system.hub_access import hub_unreachable_reason, offline_if_unreachable

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

    @property
    def same(self) -> bool:
        """Returns whether both answers are one text, which the library takes for a tie and asks nobody about."""
        return self.baseline == self.output


@dataclass(frozen=True)
class Annotator:
    """Annotator of the library: ``settings`` are those of a ``GradingCall``.

    Their ``labels`` are the tokens that it reads, none where it reads a text. ``digest`` stands for its template, its
    settings and its parser.
    """

    name: str
    settings: Mapping[str, Any]
    digest: str


# ------------------------------------------------------------------------------------------------ the library


@cache
def library() -> ModuleType:
    """Returns the package ``alpaca_eval``, imported without its traces: a .env file read, the log's level changed.

    Raises:
        ImportError: it is not installed (``system.packages.describe_missing_package`` names the extra).
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
    root, nothing = logging.getLogger(), logging.NullHandler()
    with _one_at_a_time, warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        level, disabled = root.level, root.disabled
        root.addHandler(nothing)  # without a handler its first record would install one that writes to the terminal
        root.disabled = True
        try:
            yield
        finally:
            root.disabled = disabled
            root.removeHandler(nothing)
            root.setLevel(level)


# ------------------------------------------------------------------------------------------------ its data


def from_hub(file: str) -> Path | str:
    """Returns a file of the library's data set, from the hub or its cache; in words why it cannot be had."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        with offline_if_unreachable(), quiet():
            return Path(hf_hub_download(REPOSITORY, file, repo_type="dataset"))
    except (OSError, EntryNotFoundError) as error:
        return hub_unreachable_reason() or shorten(str(error).splitlines()[0], 120)


def how_to_get(file: str) -> str:
    """Says where a file of the library's data set is."""
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
    asked = {
        "max_tokens": int(settings.get("max_tokens", MOST_TOKENS)),
        "temperature": float(settings.get("temperature", TEMPERATURE)),
        "top_p": float(settings.get("top_p", 1.0)),
        "top_logprobs": int(settings.get("top_logprobs", 0)),
        "labels": tuple(dict.fromkeys((numerator, *denominators))) if numerator else (),
    }
    return Annotator(name, asked, digest([*account, single.seed, library().__version__]))


def _pool(name: str):  # type: ignore[no-untyped-def]  # a class of the library
    """Returns the library's annotator, which keeps nothing on the disk. A name with a slash is a path of the user's."""
    package = library()
    config = str(Path(name).expanduser().absolute()) if os.sep in name else name
    with quiet():
        try:
            return package.annotators.PairwiseAnnotator(annotators_config=config, caching_path=None)
        except (OSError, ImportError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"benchmark.annotator={name}: alpaca_eval {package.__version__} cannot make this annotator "
                f"({type(error).__name__}: {shorten(str(error), 120)}); expected the name of a folder in "
                f"{package.constants.EVALUATORS_CONFIG_DIR}, or the path of a folder like these, written with a slash"
            ) from error


def _unusable(name: str, why: str) -> UserError:
    return UserError(
        f"benchmark.annotator={name} cannot be asked through a grader: {why}; expected one that asks one question per "
        "call in plain messages, such as weighted_alpaca_eval_gpt-4o-mini-2024-07-18"
    )


# ------------------------------------------------------------------------------------------------ questions and replies


def annotate(
    name: str, rows: Sequence[Compared], replies: Replies
) -> tuple[list[tuple[Message, ...] | None], Float[np.ndarray, " rows"]]:
    """Returns what the judge is still to be asked of each row, and the library's preference, from one pass of it.

    A row that has its reply, or two equal answers, has nothing to be asked. A preference is 1 where the baseline's
    answer is surely better, 2 where the model's is, 1.5 for ties; NaN without a reply, or without a verdict in it. A
    reply without log-probabilities counts as if its text had all the probability. The instruction seeds the order of
    the two answers, the library's way: the same in every round.

    Raises:
        ValueError: a reply is to a prompt that no row has.
    """
    given = {digest(call.messages): reply for call, reply in replies.items()}
    known: set[str] = set()
    with quiet():
        pool = _pool(name)
        (single,) = pool.annotators.values()
        parse, lacking = single.fn_completion_parser, f"{single.prfx_to_completion_cols}lacking"

        def complete(prompts: Sequence[str], **settings: object) -> dict[str, Sequence[object]]:
            """Stands for the library's client; prompts come shuffled, and go back in the column ``lacking``."""
            keys = [digest(_messages(prompt)) for prompt in prompts]
            known.update(keys)
            found = [given.get(key) for key in keys]
            return {
                single.completion_key: [
                    "" if one is None else _completion(one, single.completion_key) for one in found
                ],
                "lacking": [prompt if one is None else None for prompt, one in zip(prompts, found, strict=True)],
            }

        single.fn_completions = complete
        # The library drops what has no verdict, and with it what is to be asked.
        single.fn_completion_parser = lambda completion: [1] if completion == "" else parse(completion)
        pool.other_keys_to_keep.append(lacking)
        annotated = pool.annotate_head2head(  # in the order of the rows
            outputs_1=[{"instruction": row.instruction, "output": row.baseline} for row in rows],
            outputs_2=[{"instruction": row.instruction, "output": row.output} for row in rows],
            is_ordered=True,
        )
    others = [call.item for call in replies if digest(call.messages) not in known]
    if others:
        raise ValueError(f"the reply of question {others[0]} is to another prompt than this question has")
    asked = [_messages(prompt) if isinstance(prompt := row.get(lacking), str) else None for row in annotated]
    values = [row["preference"] if messages is None else None for row, messages in zip(annotated, asked, strict=True)]
    return asked, np.array([np.nan if value is None else float(value) for value in values], dtype=float)


def _messages(prompt: str) -> tuple[Message, ...]:
    turns = library().utils.prompt_to_chatml(prompt.strip())
    return tuple(Message(role=turn["role"], content=turn["content"]) for turn in turns)


def _completion(reply: GradingReply, completion_key: str) -> Json:
    """Returns a reply as the library's client does: a text, or a choice with the first token's log-probabilities."""
    text = reply.text or " "
    if completion_key == "completions":
        return text
    likely = {reply.text.strip(): 0.0} if reply.logprobs is None else reply.logprobs
    tokens: list[Json] = [{"token": token, "logprob": value} for token, value in likely.items()]
    return {"text": text, "logprobs": {"content": [{"token": text, "top_logprobs": tokens}]}}


LENGTH_CONTROLLED, RAW, DISCRETE = "lc_win_rate", "win_rate", "discrete_win_rate"
AUXILIARY = "df_gamed.csv"
MODEL_FORM = "length_controlled_v1"
GAMED_WEIGHT = 0.2 / 2  # of each extra row: the library's lambda over its two gamed baselines


@dataclass(frozen=True)
class Rates:
    """Win rates in percent. ``values`` [rows]: what each row adds to a figure that is a mean over rows, NaN for none.

    ``errors``: the standard error of each figure over questions. ``lengths_equal``: no length-controlled rate exists,
    because the lengths of the two answers differ by the same everywhere, or there is one row.
    """

    scores: dict[str, float]
    values: dict[str, Float[np.ndarray, " rows"]]
    errors: dict[str, float] = field(default_factory=dict)
    lengths_equal: bool = False


# ------------------------------------------------------------------------------------------------ the auxiliary file


def read_auxiliary(file: Path, instructions: int, named: str) -> Path:
    """Returns the auxiliary file itself.

    UserError, in which it is called ``named``, where there is none, or it is not for so many instructions.
    """
    import pandas

    wanted = {"index", "model", "preference", "std_delta_len", "instruction_difficulty", "not_gamed_baseline"}
    if not file.is_file():
        raise UserError(f"{named}: there is no such file (looked from {Path.cwd()}); expected {how_to_get(AUXILIARY)}")
    try:
        table = pandas.read_csv(file)
    except (OSError, ValueError) as error:
        raise UserError(f"{named} is no table ({error}); expected {how_to_get(AUXILIARY)}") from error
    if lacking := sorted(wanted - set(table.columns)):
        raise UserError(f"{named} has no column {lacking[0]}; expected {how_to_get(AUXILIARY)}")
    order = list(dict.fromkeys(table["index"].tolist()))
    if order != list(range(instructions)) or order != table["index"].tolist()[:instructions]:
        raise UserError(
            f"{named} is for {len(order)} instructions, the reference set has {instructions} "
            "(benchmark.reference_outputs): difficulties belong to instructions by their position, so both files must "
            "be of the same set; without that, benchmark.length_controlled=false gives the raw win rate alone"
        )
    return file


# ------------------------------------------------------------------------------------------------ win rates


def win_rates(
    rows: Sequence[Compared],
    preferences: Float[np.ndarray, " rows"],
    auxiliary: Path | None,
    places: Sequence[int] | None = None,
) -> Rates:
    """Returns the library's win rates of a model, from its preferences (1 to 2, NaN where the judge gave no verdict).

    ``places``: the rows' positions in the reference set, by which they have their difficulty; all in order by default.
    ``auxiliary`` None: no length-controlled rate. Raw rates leave rows without a preference out; the length-controlled
    one is fitted without them, but predicts for them, as the library has it.
    """
    import pandas

    percent = (np.where(preferences == 0, 1.5, preferences) - 1) * 100
    values = {RAW: percent, DISCRETE: np.where(percent == 50, 50, np.where(percent > 50, 100, 0) + 0 * percent)}
    if np.isnan(preferences).all():
        nothing = {name: math.nan for name in ([LENGTH_CONTROLLED] if auxiliary else []) + [RAW, DISCRETE]}
        return Rates(nothing, values)
    # The library knows the baseline by its name: against itself the length-controlled rate is 50 by definition.
    itself = all(row.output == row.baseline for row in rows)
    annotations = pandas.DataFrame(
        {
            "instruction": [row.instruction for row in rows],
            "output_1": [row.baseline for row in rows],
            "output_2": [row.output for row in rows],
            "generator_1": "baseline",
            "generator_2": "baseline" if itself else "model",
            "preference": preferences,
        },
        index=list(range(len(rows)) if places is None else places),
    )
    lengths = np.array([len(row.baseline) - len(row.output) for row in rows], dtype=float)
    spread = float(np.std(lengths, ddof=1)) if len(rows) > 1 else 0.0
    controlled = auxiliary is not None and (itself or spread > 0)
    found = _metrics(annotations, auxiliary if controlled else None)
    scores = {RAW: float(found["win_rate"]), DISCRETE: float(found["discrete_win_rate"])}
    errors = {RAW: float(found["standard_error"])}
    if auxiliary is None:
        return Rates(scores, values, errors)
    scores = {LENGTH_CONTROLLED: float(found.get("length_controlled_winrate", math.nan)), **scores}
    if itself:
        errors[LENGTH_CONTROLLED] = 0.0
    elif controlled:
        weights = np.array([found["length"], found["difficulty"], found["baseline"]])
        errors[LENGTH_CONTROLLED] = _standard_error(
            weights, lengths / spread, percent / 100, annotations.index.to_numpy(), auxiliary
        )
    return Rates(scores, values, errors, lengths_equal=not controlled)


def _metrics(annotations: object, auxiliary: Path | None) -> dict[str, float]:
    """Returns the library's metrics; with the auxiliary file those of length control and the three fitted weights."""
    import pandas
    import sklearn

    metrics = library().metrics
    if auxiliary is None:
        with quiet():
            return {name: float(value) for name, value in metrics.get_winrate(annotations).items()}
    # Two traces that the library would leave: weights beside its own sources, and a switch of scikit-learn.
    with tempfile.TemporaryDirectory() as folder, sklearn.config_context():
        download = patch.object(metrics.glm_winrate, "hf_hub_download", lambda **named: str(auxiliary))
        with quiet(), download:
            found = metrics.get_length_controlled_winrate(annotations, glm_name=MODEL_FORM, save_weights_dir=folder)
        weights = pandas.read_csv(Path(folder) / MODEL_FORM / "baseline_baseline.csv", index_col=0).iloc[0].tolist()
    named = dict(zip(("length", "difficulty", "baseline"), weights, strict=True))
    return {name: float(value) for name, value in {**found, **named}.items()}


def _standard_error(
    weights: Float[np.ndarray, "3"],
    lengths: Float[np.ndarray, " rows"],
    shares: Float[np.ndarray, " rows"],
    places: Int[np.ndarray, " rows"],
    auxiliary: Path,
) -> float:
    """Returns the standard error over questions of the length-controlled rate, in percent.

    The library's own (``lc_standard_error``) is the spread of predictions whose fit is taken as certain, though it is
    the questions that decide the fit: about half of what resampling them gives. Here a question counts by what it adds
    through the mean and through the fitted weights (the influence function of a weighted logistic regression).
    ``lengths`` are in standard deviations, ``shares`` in [0, 1].
    """
    import pandas

    table = pandas.read_csv(auxiliary)
    difficulties = table["instruction_difficulty"].to_numpy()
    difficulty, count = difficulties[places], len(shares)
    rows = np.stack([np.tanh(lengths), difficulty, np.ones(count)], axis=1)
    gamed = np.stack([np.tanh(table["std_delta_len"]), difficulties, np.zeros(len(table))], axis=1)
    judged = np.isfinite(shares)
    fitted, gamed_fitted = _logistic(rows @ weights), _logistic(gamed @ weights)
    pulls = np.where(judged, shares - fitted, 0.0)[:, None] * rows
    curvature = (rows * (judged * fitted * (1 - fitted))[:, None]).T @ rows
    curvature += (gamed * (GAMED_WEIGHT * gamed_fitted * (1 - gamed_fitted))[:, None]).T @ gamed
    free = weights != 0  # a weight that the penalty holds at 0 does not move
    moves = np.zeros_like(pulls)
    moves[:, free] = count * (pulls - pulls.mean(axis=0))[:, free] @ np.linalg.pinv(curvature[np.ix_(free, free)])
    predicted = _logistic(difficulty * weights[1] + weights[2])
    slope = (predicted * (1 - predicted))[:, None] * np.stack([np.zeros(count), difficulty, np.ones(count)], axis=1)
    influence = predicted + moves @ slope.mean(axis=0)
    return float(100 * influence.std(ddof=1) / math.sqrt(count))


def _logistic(values: Float[np.ndarray, " rows"]) -> Float[np.ndarray, " rows"]:
    return np.asarray(np.exp(-np.logaddexp(0, -values)))
