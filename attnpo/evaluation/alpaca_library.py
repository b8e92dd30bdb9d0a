"""Parts of ``alpaca_eval`` used by AlpacaEval 2: prompts, answer order, reply parsing and win rates.

The library defines the benchmark (version 0.6.6). Its own client is replaced by a function that collects the prompts
and returns stored replies, so all benchmarks can share one store, one budget and one retry policy. The library's caches
are never used, so no round sees replies from another.

The length-controlled rate needs ``df_gamed.csv`` (the difficulty of each instruction, and 1610 rows in which the
baseline was asked to be concise or verbose). The library would download it; here it is passed in as a file.
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

# Settings of the library that a grader supports, and those that only concern the library's own client.
ASKED = {"max_tokens", "temperature", "top_p", "logprobs", "top_logprobs"}
CLIENT = {"model_name", "price_per_token", "requires_chatml", "batch_size", "num_procs", "n_retries"}
TEMPERATURE, MOST_TOKENS = 0.7, 2048  # defaults of the library's client
REPOSITORY = "tatsu-lab/alpaca_eval"
_one_at_a_time = threading.RLock()


@dataclass(frozen=True)
class AlpacaRow:
    """One benchmark row: instruction, baseline answer and model answer (either answer may be empty)."""

    instruction: str
    baseline: str
    output: str

    @property
    def is_tie(self) -> bool:
        """Returns whether both answers are identical; the library counts that as a tie without asking the judge."""
        return self.baseline == self.output


@dataclass(frozen=True)
class Annotator:
    """Annotator loaded from the library; ``settings`` are keyword arguments for its ``GradingCall`` objects.

    ``settings["labels"]`` contains the verdict tokens; it is empty if the annotator parses text instead. ``digest``
    covers the annotator's template, settings and parser.
    """

    name: str
    settings: Mapping[str, Any]
    digest: str


# ------------------------------------------------------------------------------------------------ the library


@cache
def import_alpaca_eval() -> ModuleType:
    """Imports ``alpaca_eval`` without side effects (reading a .env file, changing the root logger's level).

    Raises:
        ImportError: ``alpaca_eval`` is not installed (``system.packages.describe_missing_package`` names the extra).
        UserError: ``alpaca_eval`` is installed, but one of its dependencies is missing.
    """
    # It reads a .env file, and looks up the user's name, which may be unset in a container.
    wanted = {"PYTHON_DOTENV_DISABLED": "1", "LOGNAME": os.environ.get("LOGNAME", "nobody")}
    before = {name: os.environ.get(name) for name in wanted}
    with silence_alpaca_eval():
        os.environ.update(wanted)
        try:
            import alpaca_eval
            import alpaca_eval.annotators
            import alpaca_eval.metrics.glm_winrate
        except ModuleNotFoundError as error:
            if error.name != "pkg_resources":
                raise
            raise UserError(
                "alpaca_eval needs pkg_resources, which was removed in setuptools 81: run pip install 'setuptools<81'"
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
def silence_alpaca_eval() -> Iterator[None]:
    """Silences the library's root-logger records, warnings, prints and progress bars inside a ``with`` block.

    Other loggers still work. Callers keep their own counts of what the library would have reported.
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


def download_data_file(file: str) -> Path | str:
    """Finds a file of the library's data set in the hub cache or downloads it; returns an error message on failure."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        with offline_if_unreachable(), silence_alpaca_eval():
            return Path(hf_hub_download(REPOSITORY, file, repo_type="dataset"))
    except (OSError, EntryNotFoundError) as error:
        return hub_unreachable_reason() or shorten(str(error).splitlines()[0], 120)


def download_hint(file: str) -> str:
    """Returns instructions for downloading a file from the library's data set."""
    return (
        f"{file} from the hub data set {REPOSITORY} (with network access: `hf download {REPOSITORY} {file} "
        "--repo-type dataset`)"
    )


# ------------------------------------------------------------------------------------------------ annotators


def load_annotator(name: str) -> Annotator:
    """Loads an annotator by its name in the library, or from the path of a folder with a ``configs.yaml``.

    Raises:
        UserError: there is no such annotator, or it uses features that graders do not support (tools, logit bias,
            several questions per call, non-chat prompts).
    """
    pool = _load_annotator_pool(name)
    if len(pool.annotators) != 1:
        raise _unsupported_annotator_error(name, f"it is a pool of {len(pool.annotators)} annotators")
    (single,) = pool.annotators.values()
    settings, parser = dict(single.completions_kwargs), single.fn_completion_parser
    unknown = sorted(settings.keys() - ASKED - CLIENT)
    if unknown:
        raise _unsupported_annotator_error(name, f"it needs {', '.join(unknown)}, which graders do not support")
    if single.batch_size != 1:
        raise _unsupported_annotator_error(name, f"it sends {single.batch_size} questions per call")
    if not single.prompt_template.lstrip().startswith("<|im_start|>"):
        raise _unsupported_annotator_error(name, "its prompt is not a list of messages that starts with <|im_start|>")
    numerator = parser.keywords.get("numerator_token")
    reads_text = numerator is None and single.completion_key == "completions"
    if not reads_text and (numerator is None or parser.keywords.get("log_prob_index", "batch") not in ("batch", 0)):
        raise _unsupported_annotator_error(name, "it needs parts of a reply other than the text and the first token")
    denominators = parser.keywords.get("denominator_tokens", ())
    account = [single.prompt_template, settings, parser.func.__name__, repr(sorted(parser.keywords.items()))]
    asked = {
        "max_tokens": int(settings.get("max_tokens", MOST_TOKENS)),
        "temperature": float(settings.get("temperature", TEMPERATURE)),
        "top_p": float(settings.get("top_p", 1.0)),
        "top_logprobs": int(settings.get("top_logprobs", 0)),
        "labels": tuple(dict.fromkeys((numerator, *denominators))) if numerator else (),
    }
    return Annotator(name, asked, digest([*account, single.seed, import_alpaca_eval().__version__]))


def _load_annotator_pool(name: str):  # type: ignore[no-untyped-def]  # a class of the library
    """Loads an annotator from the library without its disk cache; a name with a slash is a path."""
    package = import_alpaca_eval()
    config = str(Path(name).expanduser().absolute()) if os.sep in name else name
    with silence_alpaca_eval():
        try:
            return package.annotators.PairwiseAnnotator(annotators_config=config, caching_path=None)
        except (OSError, ImportError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"benchmark.annotator={name}: alpaca_eval {package.__version__} cannot load this annotator "
                f"({type(error).__name__}: {shorten(str(error), 120)}); expected the name of a folder in "
                f"{package.constants.EVALUATORS_CONFIG_DIR}, or a path (with a slash) to a similar folder"
            ) from error


def _unsupported_annotator_error(name: str, why: str) -> UserError:
    return UserError(
        f"benchmark.annotator={name} cannot be used with a grader: {why}; expected an annotator that sends one "
        "question per call as plain messages, e.g. weighted_alpaca_eval_gpt-4o-mini-2024-07-18"
    )


# ------------------------------------------------------------------------------------------------ questions and replies


def annotate(
    name: str, rows: Sequence[AlpacaRow], replies: Replies
) -> tuple[list[tuple[Message, ...] | None], Float[np.ndarray, " rows"]]:
    """Runs the library on the rows; returns the judge prompts that have no reply yet, and the preferences.

    A row with a reply, or with two identical answers, needs no prompt. Preferences range from 1 (the baseline's answer
    is certainly better) to 2 (the model's is), with 1.5 for a tie and NaN if there is no reply or no verdict in it. The
    text of a reply without log-probabilities is assumed to have probability 1. As in the library, the random order of
    the two answers is seeded by the instruction, so it is the same in every round.

    Raises:
        ValueError: a reply belongs to a prompt that does not match any of the rows.
    """
    given = {digest(call.messages): reply for call, reply in replies.items()}
    known: set[str] = set()
    with silence_alpaca_eval():
        pool = _load_annotator_pool(name)
        (single,) = pool.annotators.values()
        parse, lacking = single.fn_completion_parser, f"{single.prfx_to_completion_cols}lacking"

        def complete(prompts: Sequence[str], **settings: object) -> dict[str, Sequence[object]]:
            """Replaces the library's client; the column ``lacking`` contains prompts without a reply."""
            keys = [digest(_to_messages(prompt)) for prompt in prompts]
            known.update(keys)
            found = [given.get(key) for key in keys]
            return {
                single.completion_key: [
                    "" if one is None else _to_completion(one, single.completion_key) for one in found
                ],
                "lacking": [prompt if one is None else None for prompt, one in zip(prompts, found, strict=True)],
            }

        single.fn_completions = complete
        # The library drops rows without a verdict, and would drop the prompts that we still have to send.
        single.fn_completion_parser = lambda completion: [1] if completion == "" else parse(completion)
        pool.other_keys_to_keep.append(lacking)
        annotated = pool.annotate_head2head(  # in the order of the rows
            outputs_1=[{"instruction": row.instruction, "output": row.baseline} for row in rows],
            outputs_2=[{"instruction": row.instruction, "output": row.output} for row in rows],
            is_ordered=True,
        )
    others = [call.item for call in replies if digest(call.messages) not in known]
    if others:
        raise ValueError(f"the reply to question {others[0]} belongs to a different prompt than the current one")
    asked = [_to_messages(prompt) if isinstance(prompt := row.get(lacking), str) else None for row in annotated]
    values = [row["preference"] if messages is None else None for row, messages in zip(annotated, asked, strict=True)]
    return asked, np.array([np.nan if value is None else float(value) for value in values], dtype=float)


def _to_messages(prompt: str) -> tuple[Message, ...]:
    turns = import_alpaca_eval().utils.prompt_to_chatml(prompt.strip())
    return tuple(Message(role=turn["role"], content=turn["content"]) for turn in turns)


def _to_completion(reply: GradingReply, completion_key: str) -> Json:
    """Converts a reply to the library's form: a string, or a choice with the first token's log-probabilities."""
    text = reply.text or " "
    if completion_key == "completions":
        return text
    likely = {reply.text.strip(): 0.0} if reply.logprobs is None else reply.logprobs
    tokens: list[Json] = [{"token": token, "logprob": value} for token, value in likely.items()]
    return {"text": text, "logprobs": {"content": [{"token": text, "top_logprobs": tokens}]}}


LENGTH_CONTROLLED, RAW, DISCRETE = "lc_win_rate", "win_rate", "discrete_win_rate"
AUXILIARY = "df_gamed.csv"
MODEL_FORM = "length_controlled_v1"
GAMED_WEIGHT = 0.2 / 2  # weight of each extra row: the library's lambda over its two gamed baselines


@dataclass(frozen=True)
class WinRates:
    """Win rates in percent.

    ``values``: for each rate that is a mean over rows, the value of every row [rows], with NaN for missing values.
    ``errors``: standard error of each rate over questions. ``lengths_equal``: True if all rows have the same length
    difference or there is only one row; there is then no length-controlled rate.
    """

    scores: dict[str, float]
    values: dict[str, Float[np.ndarray, " rows"]]
    errors: dict[str, float] = field(default_factory=dict)
    lengths_equal: bool = False


# ------------------------------------------------------------------------------------------------ the auxiliary file


def check_auxiliary(file: Path, instructions: int, named: str) -> Path:
    """Validates the auxiliary file and returns it.

    Raises:
        UserError: the file is missing, malformed or covers a different number of instructions; the message refers to
            the file as ``named``.
    """
    import pandas

    wanted = {"index", "model", "preference", "std_delta_len", "instruction_difficulty", "not_gamed_baseline"}
    if not file.is_file():
        raise UserError(f"{named}: no such file (working folder: {Path.cwd()}); expected {download_hint(AUXILIARY)}")
    try:
        table = pandas.read_csv(file)
    except (OSError, ValueError) as error:
        raise UserError(f"{named} is not a CSV table ({error}); expected {download_hint(AUXILIARY)}") from error
    if lacking := sorted(wanted - set(table.columns)):
        raise UserError(f"{named} has no column {lacking[0]}; expected {download_hint(AUXILIARY)}")
    order = list(dict.fromkeys(table["index"].tolist()))
    if order != list(range(instructions)) or order != table["index"].tolist()[:instructions]:
        raise UserError(
            f"{named} covers {len(order)} instructions, but the reference set has {instructions} "
            "(benchmark.reference_outputs): difficulties are assigned to instructions by position, so both files must "
            "belong to the same set; otherwise set benchmark.length_controlled=false to compute only the raw win rate"
        )
    return file


# ------------------------------------------------------------------------------------------------ win rates


def win_rates(
    rows: Sequence[AlpacaRow],
    preferences: Float[np.ndarray, " rows"],
    auxiliary: Path | None,
    places: Sequence[int] | None = None,
) -> WinRates:
    """Computes the library's win rates from the judge's preferences (1 to 2, NaN without a verdict).

    ``places``: positions of the rows in the reference set, which determine the rows' difficulties (default: 0, 1, ...).
    ``auxiliary``: file for the length-controlled rate, which is skipped if None. Raw rates skip rows without a
    preference. As in the library, the length-controlled rate is fitted without these rows, but its predictions include
    them.
    """
    import pandas

    percent = (np.where(preferences == 0, 1.5, preferences) - 1) * 100
    values = {RAW: percent, DISCRETE: np.where(percent == 50, 50, np.where(percent > 50, 100, 0) + 0 * percent)}
    if np.isnan(preferences).all():
        nothing = {name: math.nan for name in ([LENGTH_CONTROLLED] if auxiliary else []) + [RAW, DISCRETE]}
        return WinRates(nothing, values)
    # The library recognises the baseline by its name: against itself the length-controlled rate is 50 by definition.
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
    found = _compute_metrics(annotations, auxiliary if controlled else None)
    scores = {RAW: float(found["win_rate"]), DISCRETE: float(found["discrete_win_rate"])}
    errors = {RAW: float(found["standard_error"])}
    if auxiliary is None:
        return WinRates(scores, values, errors)
    scores = {LENGTH_CONTROLLED: float(found.get("length_controlled_winrate", math.nan)), **scores}
    if itself:
        errors[LENGTH_CONTROLLED] = 0.0
    elif controlled:
        weights = np.array([found["length"], found["difficulty"], found["baseline"]])
        errors[LENGTH_CONTROLLED] = _standard_error(
            weights, lengths / spread, percent / 100, annotations.index.to_numpy(), auxiliary
        )
    return WinRates(scores, values, errors, lengths_equal=not controlled)


def _compute_metrics(annotations: object, auxiliary: Path | None) -> dict[str, float]:
    """Returns the library's metrics; with an auxiliary file, also length-controlled metrics and the fitted weights."""
    import pandas
    import sklearn

    metrics = import_alpaca_eval().metrics
    if auxiliary is None:
        with silence_alpaca_eval():
            return {name: float(value) for name, value in metrics.get_winrate(annotations).items()}
    # The library would save weights in its own package folder and change scikit-learn's global configuration.
    with tempfile.TemporaryDirectory() as folder, sklearn.config_context():
        download = patch.object(metrics.glm_winrate, "hf_hub_download", lambda **named: str(auxiliary))
        with silence_alpaca_eval(), download:
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

    The library's own estimate (``lc_standard_error``) treats the fitted weights as exact, although they depend on the
    questions, and is only about half of the error obtained by resampling questions. The estimate returned here includes
    each question's effect on the fitted weights as well as on the mean (influence function of a weighted logistic
    regression). ``lengths`` are in standard deviations, ``shares`` in [0, 1].
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
