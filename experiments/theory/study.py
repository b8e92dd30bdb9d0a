"""Theory study: checks the paper's statements and ours on problems small enough to enumerate every response.

``python -m experiments.theory FOLDER`` and ``notebooks/06_theory.ipynb`` print its tables and draw its figures.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from experiments.theory.cases import Case, Reads, cases, solve, spread_weights
from experiments.theory.gradient import GradientRow, gradient_row
from experiments.theory.normalized_likelihood import NoteRow, note_row
from experiments.theory.own_statements import (
    MARKS,
    ExistenceRow,
    FreedomPath,
    LemmaRow,
    PolicyRow,
    existence_rows,
    freedom_path,
    lemma_row,
    policy_row,
)
from experiments.theory.paper_bounds import PaperRow, paper_row
from experiments.theory.problem import random_problem
from experiments.theory.properties import PropertyRow, property_row
from experiments.theory.tightness import TightnessRow, ending_row, tightness_rows

DELTAS = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8)
PROPERTY_RATIO = 4  # times as many problems as elsewhere: what holds of most need not hold of all
PROPERTY_DELTA = 0.6  # as for the path of the freedom, of which the properties are the ends


@dataclass(frozen=True)
class Study:
    """All results; ``paper`` and ``ending`` (responses of any length) cover the paper's statements, sections 3 to 7."""

    paper: tuple[PaperRow, ...]
    ending: PaperRow
    properties: tuple[PropertyRow, ...]
    gradient: GradientRow
    note: tuple[NoteRow, ...]
    tightness: tuple[TightnessRow, ...]
    policies: tuple[PolicyRow, ...]
    lemmas: tuple[LemmaRow, ...]
    existence: tuple[ExistenceRow, ...]
    freedom: FreedomPath


def run_study(problems: int = 3, deltas: Sequence[float] = DELTAS, marks: Sequence[int] = MARKS) -> Study:
    """Runs the study on ``problems`` random problems (3 words, 3 tokens, beta 0.5).

    The results are the same in every run.
    """
    drawn = [random_problem(seed=seed) for seed in range(problems)]
    grid = [(reads, delta) for reads in Reads for delta in deltas]
    with _one_thread():
        solved = {one: cases(drawn, *one) for one in grid}
        looking = [solved[Reads.RESPONSE, delta] for delta in deltas]
        return Study(
            paper=tuple(paper_row(solved[one], one[0].value) for one in grid),
            ending=ending_row(problems=problems),
            properties=tuple(
                property_row(both_orders(reads, PROPERTY_RATIO * problems), reads.value) for reads in Reads
            ),
            gradient=gradient_row([case for one in looking for case in one]),
            note=tuple(note_row(one, delta) for one, delta in zip(looking, deltas, strict=True)),
            tightness=tightness_rows(problems),
            policies=tuple(policy_row(solved[one], *one) for one in grid),
            lemmas=tuple(lemma_row(drawn, *one) for one in grid),
            existence=existence_rows(drawn),
            freedom=freedom_path(drawn, marks=marks),
        )


def both_orders(reads: Reads, problems: int) -> list[list[Case]]:
    """Returns problems under two weightings each: position weights that rise in one and fall in the other."""
    drawn = [random_problem(seed=seed) for seed in range(problems)]
    turns = [
        [spread_weights(one.tree, reads, PROPERTY_DELTA, 2 * i + turn) for turn in range(2)]
        for i, one in enumerate(drawn)
    ]
    return [[solve(one, weights, starts=1) for weights in two] for one, two in zip(drawn, turns, strict=True)]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limits torch to one thread: on 40 by 40 matrices several threads take twenty times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
