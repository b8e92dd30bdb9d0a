"""Finished evaluations read back: their columns, what cannot stand in one of them, and their ranks."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import numpy as np

from attnpo.display.tables import half_up
from attnpo.evaluation.base import Score
from attnpo.evaluation.intervals import average_ranks
from attnpo.evaluation.result import RESULT, EvaluationResult, read_result
from attnpo.lab.results import nothing
from attnpo.run.identity import by_class
from attnpo.schema import UserError
from attnpo.system.files import differences

MAIN = ""
"""Stands for the score of a benchmark that counts, whatever its name."""
PAPER = {
    ("alpaca_eval", "lc_win_rate"): "alpacaeval_lc",
    ("alpaca_eval", "win_rate"): "alpacaeval_wr",
    ("mt_bench", MAIN): "mt_bench",
    ("arena_hard", MAIN): "arena_hard_wr",
}
"""The columns of the paper's tables, in its order, by benchmark and score."""
OF_MODEL = ("model", "answers")  # first parts of a key's names that differ from model to model
ROUNDS = "rounds"
# What leaves figures of one kind: how often was answered and graded, and where files lie whose digests are in the key.
OF_ONE_KIND = (ROUNDS, "grading", "benchmark.settings.path")


def column_of(result: EvaluationResult, score: str) -> str:
    """Returns the name of a score's column: the paper's where it has one, else the benchmark's, and the score's after
    it.
    """
    main = score == result.main
    named = PAPER.get((result.benchmark, score)) or (PAPER.get((result.benchmark, MAIN)) if main else None)
    return named or (result.benchmark if main else f"{result.benchmark} {score}")


def counts(result: EvaluationResult, score: str) -> bool:
    """Returns whether a score has a column of the main table: it counts in its benchmark, or the paper shows it."""
    return score == result.main or (result.benchmark, score) in PAPER


# ------------------------------------------------------------------------------------------------ reading


def read_evaluations(folders: Sequence[Path]) -> tuple[dict[Path, EvaluationResult], list[str]]:
    """Returns the finished evaluations in folders, or one level below them, by folder; and lines on those that are not
    finished.

    UserError for a folder without any, for a damaged result, for two results of one label on one benchmark.
    """
    places: dict[Path, Path] = {}
    notes = []
    for folder in folders:
        found = [folder] if (folder / RESULT).is_file() else sorted(path.parent for path in folder.glob(f"*/{RESULT}"))
        if not found and not any(folder.glob("*.jsonl")):
            raise nothing(folder, f"a finished evaluation ({RESULT}), or one with such folders in it")
        if not found:
            notes.append(f"left out, not finished: {folder} has no {RESULT}; give its command of attnpo.evaluate again")
        for place in found:
            places.setdefault(place.resolve(), place)
    if not places:
        raise UserError(f"report scores: expected at least one finished evaluation; {'; '.join(notes)}")
    results = {place: read(place) for place in places.values()}
    once: dict[tuple[str, str], Path] = {}
    for place, result in results.items():
        other = once.setdefault((result.label, result.benchmark), place)
        if other != place:
            raise UserError(
                f"report scores: {other} and {place} are both {result.label!r} on {result.benchmark}; leave one out, "
                "or evaluate one of them under another label"
            )
    return results, notes


def read(folder: Path) -> EvaluationResult:
    """Returns the result in a folder that has one. UserError where it is damaged or of another version."""
    try:
        result = read_result(folder)
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise UserError(
            f"{folder / RESULT}: expected the result of an evaluation, but it cannot be read ({problem!r}); delete it "
            "and give the command of the evaluation again"
        ) from problem
    if result is None:  # removed since it was seen
        raise nothing(folder, f"a finished evaluation ({RESULT})")
    return result


# ------------------------------------------------------------------------------------------------ comparable


@dataclass(frozen=True)
class Mixed:
    """Evaluations of a benchmark that were made otherwise than most: ``odd`` than ``usual``, by labels.

    ``how``: (name, usual, odd) of everything that differs.
    """

    benchmark: str
    usual: tuple[str, ...]
    odd: tuple[str, ...]
    how: tuple[tuple[str, str, str], ...]

    @property
    def comparable(self) -> bool:
        """Returns whether the figures are of one kind all the same: no more than ``OF_ONE_KIND`` differs."""
        return all(name in OF_ONE_KIND or name.partition(".")[0] in OF_ONE_KIND for name, _, _ in self.how)

    def line(self) -> str:
        """Returns the warning in words."""
        shown = ", ".join(f"{name} {odd} against {usual}" for name, usual, odd in self.how[:4])
        more = f", and {len(self.how) - 4} more" if len(self.how) > 4 else ""
        verdict = (
            "means may be compared, spreads are not alike"
            if self.comparable
            else "not comparable, so this benchmark is not ranked"
        )
        return (
            f"WARNING: {self.benchmark}: {listed(self.odd)} graded or answered otherwise than {listed(self.usual)} "
            f"({shown}{more}): {verdict}"
        )


def find_mixed(results: Sequence[EvaluationResult]) -> list[Mixed]:
    """Returns what differs within a benchmark, a line per way of differing from how most of its evaluations were
    made.
    """
    out = []
    for benchmark in dict.fromkeys(result.benchmark for result in results):
        made = {result.label: conditions(result) for result in results if result.benchmark == benchmark}
        usual = max(made.values(), key=list(made.values()).count)
        ways: dict[tuple[tuple[str, str, str], ...], list[str]] = {}
        for label, one in made.items():
            if how := tuple(differences(usual, one)):
                ways.setdefault(how, []).append(label)
        names = tuple(label for label, one in made.items() if one == usual)
        out += [Mixed(benchmark, names, tuple(odd), how) for how, odd in ways.items()]
    return out


def conditions(result: EvaluationResult) -> dict[str, object]:
    """Returns all that must agree in a column: grader, rounds and the key, without what is the model's own.

    As JSON has them, so that what was read and what was made compare alike.
    """
    key = {name: value for name, value in by_class(result.key).items() if name.partition(".")[0] not in OF_MODEL}
    rounds = max((len(score.rounds) for score in result.scores), default=0)
    found: dict[str, object] = json.loads(json.dumps({"grader": result.grader, **key, ROUNDS: rounds}, default=str))
    return found


def listed(names: Sequence[str], most: int = 3) -> str:
    """Returns names as a list in words, the first of them where they are many."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


# ------------------------------------------------------------------------------------------------ what is compared


@dataclass(frozen=True)
class Figure:
    """A column: a benchmark's figure with the score of each label that has one.

    ``shown``: whether it is a column of the main table. ``graded``: whether a grader gives it.
    """

    name: str
    benchmark: str
    shown: bool
    scores: Mapping[str, Score]
    graded: bool = True

    @property
    def digits(self) -> int:
        """Returns the decimals it is printed with: two, as in the paper; four for shares."""
        largest = max(abs(score.mean) for score in self.scores.values())
        return 4 if largest <= 1 else 2

    @property
    def higher_is_better(self) -> bool | None:
        """Returns the direction of its scores; None where they do not say, or not the same."""
        said = {score.higher_is_better for score in self.scores.values()}
        return said.pop() if len(said) == 1 else None

    def rounded_mean(self, label: str) -> float | None:
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
    def main_figures(self) -> list[Figure]:
        """Returns the columns of the main table."""
        return [figure for figure in self.figures if figure.shown]

    def rankable_figures(self) -> list[Figure]:
        """Returns the figures that labels are ranked by: of two labels at least, in one way of grading, with a
        direction.
        """
        unfit = {one.benchmark for one in self.mixed if not one.comparable}
        return [
            figure
            for figure in self.main_figures
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
        figures = self.rankable_figures()
        rows = {label: [figure.rounded_mean(label) for figure in figures] for label in self.labels}
        whole = {label: [v for v in row if v is not None] for label, row in rows.items() if None not in row}
        if not figures or len(whole) < 2:
            return {}
        means = average_ranks(np.array(list(whole.values())), [bool(figure.higher_is_better) for figure in figures])
        return dict(zip(whole, means.tolist(), strict=True))


def board_of(results: Sequence[EvaluationResult], ways: Sequence[Mixed]) -> Board:
    """Returns the board of some evaluations: the paper's columns first, then the others as they come."""
    found: dict[str, list[tuple[EvaluationResult, Score]]] = {}
    for result in results:
        for score in result.scores:
            if isfinite(score.mean):
                found.setdefault(column_of(result, score.name), []).append((result, score))
    paper = list(PAPER.values())
    names = sorted(found, key=lambda name: paper.index(name) if name in paper else len(paper))
    figures = tuple(
        Figure(
            name,
            found[name][0][0].benchmark,
            any(counts(result, score.name) for result, score in found[name]),
            {result.label: score for result, score in found[name]},
            any(result.grader is not None for result, _ in found[name]),
        )
        for name in names
    )
    return Board(tuple(dict.fromkeys(result.label for result in results)), figures, tuple(ways))
