"""Looseness of the paper's bounds: bound over actual value, as a function of delta, beta and response length.

Weights depend on the whole response, like a judge's. One of the three is varied at a time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from experiments.theory.cases import Reads, cases, ending_case
from experiments.theory.paper_bounds import PaperRow, paper_row
from experiments.theory.problem import Problem, random_problem

DELTAS = (0.001, 0.01, 0.1, 0.3, 0.8)
BETAS = (0.2, 0.5, 1.0, 3.0, 10.0)
LENGTHS = (2, 3, 4, 5)
MIDDLE_DELTA, MIDDLE_BETA = 0.1, 0.5


@dataclass(frozen=True)
class TightnessRow:
    """One point: the paper's row, and the bound of our theorem (a) on the same total variation."""

    varied: str
    value: float
    paper: PaperRow
    ours: float


def tightness_rows(problems: int = 3, deltas: Sequence[float] = DELTAS) -> tuple[TightnessRow, ...]:
    """Evaluates the statements at all points.

    Uses 3 words and 3 tokens for delta and beta, and 2 words for the length.
    """
    seeds = range(problems)
    return (
        *(_row("delta", delta, delta, [random_problem(seed=seed) for seed in seeds]) for delta in deltas),
        *(_row("beta", beta, MIDDLE_DELTA, [random_problem(beta=beta, seed=seed) for seed in seeds]) for beta in BETAS),
        *(
            _row("length", float(size), MIDDLE_DELTA, [random_problem(2, size, seed=seed) for seed in seeds])
            for size in LENGTHS
        ),
    )


def ending_row(delta: float = MIDDLE_DELTA, problems: int = 3) -> PaperRow:
    """Evaluates the paper's statements on responses that end early, so that each policy has its own mean length."""
    return paper_row([ending_case(delta, length=4, seed=seed) for seed in range(problems)], "response, of any length")


def exponent(rows: Sequence[TightnessRow]) -> float:
    """Returns the power of delta with which TV(pi*, h) goes to 0, estimated from the two smallest deltas.

    The theorem's power is 1/2.
    """
    first, second = sorted((row for row in rows if row.varied == "delta"), key=lambda row: row.value)[:2]
    rise = second.paper.theorem.actual / first.paper.theorem.actual
    return math.log(rise) / math.log(second.value / first.value)


def _row(varied: str, value: float, delta: float, problems: Sequence[Problem]) -> TightnessRow:
    found = paper_row(cases(problems, Reads.RESPONSE, delta, starts=1), varied)
    return TightnessRow(varied, value, found, math.sqrt(problems[0].tree.length) * delta / (1 - delta))
