"""Tables of benchmark scores: the paper's main table, rounds with their intervals, spreads, differences, lengths."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import stdev

import numpy as np

from attnpo.display.printed import KeyedTable
from attnpo.display.tables import Cell, fixed, half_up
from attnpo.evaluation.base import Score
from attnpo.evaluation.intervals import average_ranks
from attnpo.evaluation.shown import rounds_text
from attnpo.evaluation.spreads import grading_noise, half_widths
from attnpo.lab.reports.evaluations import PAPER, Evaluation, Mixed, counts

METHOD, BENCHMARK, FIGURE, AVG_RANK = "method", "benchmark", "figure", "avg_rank"
PRINTED_RANK = "avg_rank_printed"  # what files of printed numbers call the paper's average rank
MEAN, CI, T = "_mean", "_ci95", "_t95"  # after a figure's name; the first two as in the paper's table of three runs
DECIMALS = 2  # of the paper's tables
SHARE_DECIMALS = 4  # of figures between -1 and 1
Cells = dict[str, Cell]


@dataclass(frozen=True)
class Figure:
    """A column: a benchmark's figure with the score of each label that has one.

    ``shown``: whether it is a column of the main table. ``graded``: whether a grader gives it. ``digits``: decimals it
    is printed with.
    """

    name: str
    benchmark: str
    shown: bool
    scores: Mapping[str, Score]
    graded: bool = True

    @property
    def digits(self) -> int:
        """Two, as in the paper; four for shares."""
        largest = max(abs(score.mean) for score in self.scores.values())
        return SHARE_DECIMALS if largest <= 1 else DECIMALS

    @property
    def higher_is_better(self) -> bool | None:
        """Returns the direction of its scores; None where they do not say, or not the same."""
        said = {score.higher_is_better for score in self.scores.values()}
        return said.pop() if len(said) == 1 else None

    def printed(self, label: str) -> float | None:
        """Returns a label's mean as it is printed."""
        score = self.scores.get(label)
        return None if score is None else half_up(score.mean, self.digits)


@dataclass(frozen=True)
class Board:
    """All that is compared: labels in their order, figures in theirs, and what cannot be compared."""

    labels: tuple[str, ...]
    figures: tuple[Figure, ...]
    mixed: tuple[Mixed, ...]

    @property
    def shown(self) -> list[Figure]:
        """Returns the columns of the main table."""
        return [figure for figure in self.figures if figure.shown]

    def ranked(self) -> list[Figure]:
        """Returns the figures that labels are ranked by: of two labels at least, in one way of grading, with a
        direction.
        """
        unfit = {one.benchmark for one in self.mixed if not one.comparable}
        return [
            figure
            for figure in self.shown
            if len(figure.scores) > 1 and figure.benchmark not in unfit and figure.higher_is_better is not None
        ]

    def way(self, label: str, benchmark: str) -> int:
        """Returns which way of grading and answering a label's figures of a benchmark are of: 0 for that of most."""
        ways = [one for one in self.mixed if one.benchmark == benchmark and not one.comparable]
        return next((number for number, one in enumerate(ways, start=1) if label in one.odd), 0)

    def ranks(self) -> dict[str, float]:
        """Returns the mean of each label's ranks, 1 the best, over its printed figures; without labels that lack one.

        Ties share the mean of their ranks (paper, main table; reference EVALUATION 6). A benchmark with two columns
        counts twice.
        """
        figures = self.ranked()
        rows = {label: [figure.printed(label) for figure in figures] for label in self.labels}
        whole = {label: [v for v in row if v is not None] for label, row in rows.items() if None not in row}
        if not figures or len(whole) < 2:
            return {}
        directions = [bool(figure.higher_is_better) for figure in figures]
        means = average_ranks(np.array(list(whole.values()), dtype=np.float64), directions)
        return {label: float(mean) for label, mean in zip(whole, means, strict=True)}


def board_of(evaluations: Sequence[Evaluation], ways: Sequence[Mixed]) -> Board:
    """Returns the board of some evaluations: the paper's columns first, then the others as they come."""
    scores: dict[str, dict[str, Score]] = {}
    benchmarks: dict[str, str] = {}
    shown: set[str] = set()
    graded: set[str] = set()
    for one in evaluations:
        for name, score in one.figures():
            scores.setdefault(name, {})[one.result.label] = score
            benchmarks[name] = one.result.benchmark
            if counts(one.result, score.name):
                shown.add(name)
            if one.result.grader is not None:
                graded.add(name)
    paper = list(PAPER.values())
    names = sorted(scores, key=lambda name: paper.index(name) if name in paper else len(paper))
    figures = tuple(Figure(name, benchmarks[name], name in shown, scores[name], name in graded) for name in names)
    return Board(tuple(dict.fromkeys(one.result.label for one in evaluations)), figures, tuple(ways))


# ------------------------------------------------------------------------------------------------ main table


def scores_table(board: Board) -> KeyedTable:
    """Returns a row per label, a column per figure (means over rounds), the average rank: the paper's main table."""
    ranks = board.ranks()
    columns = (METHOD, *(figure.name for figure in board.shown), AVG_RANK)
    odd = {(label, one.benchmark) for one in board.mixed for label in one.odd}
    rows: list[Cells] = []
    read: list[Cells] = []
    for label in board.labels:
        means = {figure.name: figure.scores[label].mean for figure in board.shown if label in figure.scores}
        rows.append({METHOD: label, **means, AVG_RANK: ranks.get(label)})
        marked = {
            figure.name: _marked(figure.printed(label), figure.digits, (label, figure.benchmark) in odd)
            for figure in board.shown
        }
        read.append({METHOD: label, **marked, AVG_RANK: _half_up(ranks.get(label))})
    digits = {**{figure.name: figure.digits for figure in board.shown}, AVG_RANK: DECIMALS}
    table = KeyedTable("scores", "Scores, means over rounds", columns, tuple(rows), (METHOD,), None, digits)
    return replace(table, reading=replace(table, rows=tuple(read)))


def _marked(value: float | None, digits: int, odd: bool) -> Cell:
    return f"{value:.{digits}f}*" if odd and value is not None else value


def _half_up(value: float | None) -> float | None:
    return None if value is None else half_up(value, DECIMALS)


def rounds_table(board: Board) -> KeyedTable:
    """Returns the means with both intervals over rounds: the paper's table of three runs, with Student's t beside it.

    People read ``21.90 ± 1.57 (t 3.45)``; the CSV has a column for each of the three.
    """
    ranks = board.ranks()
    rows: list[Cells] = []
    read: list[Cells] = []
    for label in board.labels:
        row: Cells = {METHOD: label}
        told: Cells = {METHOD: label}
        for figure in board.shown:
            score = figure.scores.get(label)
            if score is None:
                continue
            normal, student = half_widths(score.rounds)
            row |= {figure.name + MEAN: score.mean, figure.name + CI: normal, figure.name + T: student}
            told[figure.name] = f"{fixed(score.mean, figure.digits)} {rounds_text(score, figure.digits)}".rstrip()
        rows.append({**row, AVG_RANK: ranks.get(label)})
        read.append({**told, AVG_RANK: _half_up(ranks.get(label))})
    parts = [figure.name + part for figure in board.shown for part in (MEAN, CI, T)]
    digits = {figure.name + part: figure.digits for figure in board.shown for part in (MEAN, CI, T)}
    table = KeyedTable(
        "rounds",
        "Means over rounds ± 1.96 s/sqrt(n) (t: the half width by Student's t)",
        (METHOD, *parts, AVG_RANK),
        tuple(rows),
        (METHOD,),
        None,
        {**digits, AVG_RANK: DECIMALS},
    )
    columns = (METHOD, *(figure.name for figure in board.shown), AVG_RANK)
    return replace(table, reading=replace(table, columns=columns, rows=tuple(read)))


# ------------------------------------------------------------------------------------------------ spreads


def spreads_table(board: Board) -> KeyedTable:
    """Returns every figure with its three spreads apart: 95 % over questions, standard deviations over rounds and of
    grading.

    Empty where a spread is not known.
    """
    rows: list[Cells] = []
    read: list[Cells] = []
    for figure in board.figures:
        for label, score in figure.scores.items():
            low, high = score.interval or (None, None)
            spread = stdev(score.rounds) if len(score.rounds) > 1 else None
            names: Cells = {FIGURE: figure.name, METHOD: label}
            rows.append(
                {
                    **names,
                    "mean": score.mean,
                    "questions": score.questions,
                    "questions_low": low,
                    "questions_high": high,
                    "rounds": len(score.rounds),
                    "rounds_sd": spread,
                    "grading_sd": score.grading,
                }
            )
            both = (
                "" if low is None or high is None else f"{fixed(low, figure.digits)} to {fixed(high, figure.digits)} "
            )
            read.append(
                {
                    **names,
                    "mean": fixed(score.mean, figure.digits),
                    "95 % over questions (n)": f"{both}({score.questions})",
                    "sd of rounds (n)": ""
                    if spread is None
                    else f"{fixed(spread, figure.digits)} ({len(score.rounds)})",
                    "sd of grading": "" if score.grading is None else fixed(score.grading, figure.digits),
                }
            )
    table = KeyedTable("spreads", "Spreads of each figure", tuple(rows[0]), tuple(rows), (FIGURE, METHOD))
    return replace(table, reading=replace(table, columns=tuple(read[0]), rows=tuple(read)))


def close_table(board: Board) -> KeyedTable | None:
    """Pairs of labels that a figure does not tell apart, since grading the same answers again moves it as much.

    Pairs that were graded or answered in different ways are left out. None where no pair is so close.
    """
    rows: list[Cells] = []
    for figure in board.shown:
        known = [(label, score, score.grading) for label, score in figure.scores.items() if score.grading is not None]
        known.sort(key=lambda item: -item[1].mean)
        for place, (label, score, spread) in enumerate(known):
            for other, lower, below in known[place + 1 :]:
                noise = grading_noise(spread, below)
                alike = board.way(label, figure.benchmark) == board.way(other, figure.benchmark)
                if alike and score.mean - lower.mean < noise:
                    rows.append(
                        {
                            FIGURE: figure.name,
                            METHOD: label,
                            "not told from": other,
                            "difference": score.mean - lower.mean,
                            "grading_noise": noise,
                        }
                    )
    if not rows:
        return None
    title = "Differences below the grading noise"
    return KeyedTable("close", title, tuple(rows[0]), tuple(rows), (FIGURE, METHOD))


# ------------------------------------------------------------------------------------------------ lengths


def lengths_table(evaluations: Sequence[Evaluation]) -> KeyedTable | None:
    """Returns how long the answers are, by benchmark and label; None where no evaluation says."""
    rows: list[Cells] = [
        {
            BENCHMARK: one.result.benchmark,
            METHOD: one.result.label,
            "n_tokens": lengths.tokens,
            "n_characters": lengths.characters,
            "cut": lengths.cut,
            "tokenizer": lengths.tokenizer,
        }
        for one in evaluations
        if (lengths := one.result.lengths) is not None
    ]
    if not rows:
        return None
    rows.sort(key=lambda row: str(row[BENCHMARK]))
    digits = {"n_tokens": 1, "n_characters": 1, "cut": 3}
    title = "Response lengths, means over questions; cut: share that ended at the most tokens"
    return KeyedTable("lengths", title, tuple(rows[0]), tuple(rows), (BENCHMARK, METHOD), None, digits)


def missing_table(evaluations: Sequence[Evaluation]) -> KeyedTable | None:
    """Returns what was missing or replaced, by label, benchmark and reason; None where nothing was."""
    rows: list[Cells] = [
        {METHOD: one.result.label, BENCHMARK: one.result.benchmark, "reason": reason, "count": count}
        for one in evaluations
        for reason, count in one.result.counts.items()
        if count
    ]
    if not rows:
        return None
    return KeyedTable("missing", "Missing or replaced", tuple(rows[0]), tuple(rows), (METHOD, BENCHMARK, "reason"))


def cost_rows(evaluations: Sequence[Evaluation]) -> list[Cells]:
    """Returns what each evaluation cost."""
    names = dict.fromkeys(name for one in evaluations for name in one.result.cost)
    return [
        {
            METHOD: one.result.label,
            BENCHMARK: one.result.benchmark,
            **{name: one.result.cost.get(name) for name in names},
        }
        for one in evaluations
    ]
