"""Finished evaluations read back: what tables call their figures, and which of them cannot stand in one column."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from attnpo.evaluation.base import Score
from attnpo.evaluation.result import RESULT, EvaluationResult, read_result
from attnpo.lab.reports.finished import nothing
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


@dataclass(frozen=True)
class Evaluation:
    """A finished evaluation and the folder it was read from."""

    folder: Path
    result: EvaluationResult

    def figures(self) -> Iterator[tuple[str, Score]]:
        """Yields every score that is a number, with the name of its column."""
        for score in self.result.scores:
            if math.isfinite(score.mean):
                yield column_of(self.result, score.name), score

    def conditions(self) -> dict[str, object]:
        """Returns all that must agree in a column: grader, rounds and the key, without what is the model's own."""
        key = {
            name: value for name, value in by_class(self.result.key).items() if name.partition(".")[0] not in OF_MODEL
        }
        rounds = max((len(score.rounds) for score in self.result.scores), default=0)
        return {"grader": self.result.grader, **key, ROUNDS: rounds}


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


def read_evaluations(folders: Sequence[Path]) -> tuple[list[Evaluation], list[str]]:
    """Returns the finished evaluations in folders, or one level below them, and lines on those that are not finished.

    UserError for a folder without any, for a damaged result, for two results of one label on one benchmark.
    """
    found: dict[Path, Evaluation] = {}
    notes = []
    for folder in folders:
        places = [folder] if (folder / RESULT).is_file() else [path.parent for path in folder.glob(f"*/{RESULT}")]
        if not places and not any(folder.glob("*.jsonl")):
            raise nothing(folder, f"a finished evaluation ({RESULT}), or one with such folders in it")
        if not places:
            notes.append(f"left out, not finished: {folder} has no {RESULT}; give its command of attnpo.evaluate again")
        for place in sorted(places):
            found.setdefault(place.resolve(), Evaluation(place, read(place)))
    evaluations = list(found.values())
    if not evaluations:
        raise UserError(f"report scores: expected at least one finished evaluation; {'; '.join(notes)}")
    once: dict[tuple[str, str], Evaluation] = {}
    for one in evaluations:
        other = once.setdefault((one.result.label, one.result.benchmark), one)
        if other is not one:
            raise UserError(
                f"report scores: {other.folder} and {one.folder} are both {one.result.label!r} on "
                f"{one.result.benchmark}; leave one out, or evaluate one of them under another label"
            )
    return evaluations, notes


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


def mixed(evaluations: Sequence[Evaluation]) -> list[Mixed]:
    """Returns what differs within a benchmark, a line per way of differing from how most of its
    evaluations were made.
    """
    out = []
    for benchmark in dict.fromkeys(one.result.benchmark for one in evaluations):
        mine = [one for one in evaluations if one.result.benchmark == benchmark]
        texts = [json.dumps(one.conditions(), sort_keys=True, default=str) for one in mine]
        most = Counter(texts).most_common(1)[0][0]
        usual = [one for one, text in zip(mine, texts, strict=True) if text == most]
        ways: dict[tuple[tuple[str, str, str], ...], list[str]] = {}
        for one in mine:
            how = tuple(differences(plain(usual[0].conditions()), plain(one.conditions())))
            if how:
                ways.setdefault(how, []).append(one.result.label)
        names = tuple(one.result.label for one in usual)
        out += [Mixed(benchmark, names, tuple(odd), how) for how, odd in ways.items()]
    return out


def plain(conditions: Mapping[str, object]) -> dict[str, object]:
    """Conditions as JSON has them, so that what was read and what was made compare alike."""
    read_back: dict[str, object] = json.loads(json.dumps(conditions, default=str))
    return read_back


def listed(names: Sequence[str], most: int = 3) -> str:
    """Names as a list in words, the first of them where they are many."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
