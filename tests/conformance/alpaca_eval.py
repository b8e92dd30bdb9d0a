"""Golden records of AlpacaEval: win rates from stored preferences, through the functions of the benchmark.

A folder holds a CSV file per model (``preference``, ``len_baseline``, ``len_model``, a row per instruction in order),
the auxiliary file of the length-controlled rate (``df_gamed*.csv``) and ``expected.json``.
"""

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np

from attnpo.evaluation.alpaca_library import (
    DISCRETE,
    LENGTH_CONTROLLED,
    RAW,
    AlpacaRow,
    WinRates,
    check_auxiliary,
    import_alpaca_eval,
    win_rates,
)
from attnpo.schema import Json, UserError
from attnpo.system.files import parse_json
from attnpo.system.packages import describe_missing_package
from tests.conformance.records import Check, Comparison, Outcome, Status

NAME = "alpaca_eval"
EXACT = 1e-6
# The choice among ten strengths of the penalty by cross-validation can flip with the version of scikit-learn.
CROSS_VALIDATED = 0.02
Expected = dict[str, dict[str, Json]]


@dataclass(frozen=True)
class NeedsLibrary(Check):
    """A record that the library of the extra recomputes; without it the record says what is missing."""

    def run(self) -> Outcome:
        """The outcome; NOT_BUILT with the extra's name where the library is not installed."""
        try:
            import_alpaca_eval()
        except ImportError as error:
            return Outcome(self.name, self.case, Status.NOT_BUILT, note=describe_missing_package(error) or str(error))
        return super().run()


def records(folder: Path) -> Iterator[Check]:
    """Two records per model: raw rates against the leaderboard, the length-controlled one against the library's own."""
    file = folder / "expected.json"
    try:
        expected: dict[str, Expected] = parse_json(file.read_text(encoding="utf-8"))
        models = expected.items()
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{file}: expected figures by model in JSON, got {error}") from error
    for model, figures in models:
        yield NeedsLibrary(NAME, f"{model} raw", partial(_raw, folder, model, figures))
        yield NeedsLibrary(NAME, f"{model} lc", partial(_controlled, folder, model, figures))


def _raw(folder: Path, model: str, expected: Expected, comparison: Comparison) -> None:
    rates, published = _rates(folder, model), expected["leaderboard"]
    ours = {RAW: rates.scores[RAW], DISCRETE: rates.scores[DISCRETE], "standard_error": rates.errors[RAW]}
    for name, value in ours.items():
        comparison.numbers(name, [value], [_number(published[name])], atol=EXACT)
    comparison.same("rows with a preference", int(np.isfinite(rates.values[RAW]).sum()), published["n_total"])


def _controlled(folder: Path, model: str, expected: Expected, comparison: Comparison) -> None:
    rates, stated = _rates(folder, model), expected["library_with_reconstructed_aux"]
    value = _number(stated["length_controlled_winrate"])
    comparison.numbers(LENGTH_CONTROLLED, [rates.scores[LENGTH_CONTROLLED]], [value], atol=CROSS_VALIDATED)


@cache
def _rates(folder: Path, model: str) -> WinRates:
    """The win rates of one model: texts of the stored lengths stand for its answers, no rate looks at more of them."""
    path = folder / f"{model}.csv"
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = list(csv.DictReader(file))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from error
    auxiliary = sorted(folder.glob("df_gamed*.csv"))
    if len(auxiliary) != 1:
        raise UserError(f"{folder} has {len(auxiliary)} files df_gamed*.csv, expected one")
    rows = [AlpacaRow("", "x" * int(line["len_baseline"]), "x" * int(line["len_model"])) for line in lines]
    preferences = np.array([float(line["preference"]) for line in lines])
    return win_rates(rows, preferences, check_auxiliary(auxiliary[0], len(rows), str(auxiliary[0])))


def _number(value: Json) -> float:
    """A figure of ``expected.json``; NaN, which equals nothing, for what is none."""
    return float(value) if isinstance(value, int | float) else math.nan
