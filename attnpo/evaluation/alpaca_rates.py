"""AlpacaEval's win rates: raw, discrete and length-controlled, by the library's own functions.

The length-controlled rate needs ``df_gamed.csv`` (the difficulty of each instruction, and 1610 rows of the baseline
told to be short or long), which the library downloads. Here it is a file that is handed over.
"""

import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from attnpo.evaluation.alpaca_library import Compared, how_to_get, library, quiet
from attnpo.schema import UserError

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


def named_auxiliary(path: str, instructions: int) -> Path:
    """Returns the auxiliary file under a path. UserError where there is none, or it is not for so many instructions."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(
            f"benchmark.auxiliary={path}: there is no such file (looked from {Path.cwd()}); expected "
            f"{how_to_get(AUXILIARY)}"
        )
    return checked_auxiliary(file, instructions, f"benchmark.auxiliary={path}")


def checked_auxiliary(file: Path, instructions: int, named: str) -> Path:
    """Returns the file itself. UserError, in which it is called ``named``, where it is not for so many instructions."""
    import pandas

    wanted = {"index", "model", "preference", "std_delta_len", "instruction_difficulty", "not_gamed_baseline"}
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


@contextmanager
def _in_place_of_download(file: Path) -> Iterator[None]:
    """Opens a context in which the library gets ``file`` where it would download its auxiliary file."""
    module = library().metrics.glm_winrate
    download = module.hf_hub_download
    module.hf_hub_download = lambda **named: str(file)
    try:
        yield
    finally:
        module.hf_hub_download = download


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
    lengths = _length_differences(rows)
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


def _length_differences(rows: Sequence[Compared]) -> Float[np.ndarray, " rows"]:
    """Characters of the baseline's answer less those of the model's."""
    return np.array([len(row.baseline) - len(row.output) for row in rows], dtype=float)


def _metrics(annotations: object, auxiliary: Path | None) -> dict[str, float]:
    """Returns the library's metrics; with the auxiliary file the length-controlled ones and the three fitted weights
    too.
    """
    import pandas
    import sklearn

    metrics = library().metrics
    if auxiliary is None:
        with quiet():
            return {name: float(value) for name, value in metrics.get_winrate(annotations).items()}
    # Two traces that the library would leave: weights beside its own sources, and a switch of scikit-learn.
    with tempfile.TemporaryDirectory() as folder, sklearn.config_context():
        with quiet(), _in_place_of_download(auxiliary):
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
