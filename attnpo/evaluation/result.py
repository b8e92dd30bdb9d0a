"""Reads and writes ``evaluation.json``, the result of an evaluation, and formats it as tables."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from attnpo.display.page import KeyValues, Paragraph, Section
from attnpo.display.tables import Cell, TableBlock, format_fixed, round_half_up
from attnpo.evaluation.base import BenchmarkScore
from attnpo.evaluation.spreads import half_widths
from attnpo.schema import UserError
from attnpo.system.files import read_record, write_record

RESULT = "evaluation.json"


@dataclass(frozen=True)
class AnswerLengths:
    """Mean answer length (all turns) over questions and rounds, and share of answers truncated at the token limit."""

    tokens: float
    characters: float
    cut: float
    tokenizer: str


@dataclass(frozen=True)
class EvaluationResult:
    """Result of one model on one benchmark. ``label``: the model's name in tables; ``main``: name of the main score.

    ``key``: all settings and digests that determine the scores. ``counts``: number of missing or replaced verdicts, by
    reason. ``cost``: calls, input_tokens, output_tokens, dollars, seconds.
    """

    label: str
    model: str
    benchmark: str
    grader: str | None
    main: str
    scores: tuple[BenchmarkScore, ...]
    key: Mapping[str, Any]
    lengths: AnswerLengths | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    cost: Mapping[str, float] = field(default_factory=dict)
    table: tuple[Mapping[str, object], ...] = ()

    def score(self, name: str) -> BenchmarkScore | None:
        """Returns the score called ``name``; None if there is no such score."""
        return next((score for score in self.scores if score.name == name), None)

    def write(self, folder: Path) -> None:
        """Writes ``evaluation.json`` with a digest of its content."""
        write_record(folder / RESULT, asdict(self))


def read_result(folder: Path) -> EvaluationResult | None:
    """Reads the result in an evaluation's folder; returns None if the evaluation is not finished.

    Raises:
        UserError: the file is damaged, was edited, or comes from another version.
    """
    path = folder / RESULT
    if not path.is_file():
        return None
    values = read_record(path)
    if values is None:
        raise UserError(f"{path} is damaged or was edited: delete it and run the evaluation again")
    try:
        lengths, scores = values.pop("lengths"), values.pop("scores")
        return EvaluationResult(
            **{**values, "table": tuple(values["table"])},
            scores=tuple(map(BenchmarkScore.read, scores)),
            lengths=None if lengths is None else AnswerLengths(**lengths),
        )
    except (KeyError, TypeError, AttributeError) as problem:
        raise UserError(
            f"{path} was written by another version of attnpo ({problem!r}): delete it and run the evaluation again"
        ) from problem


NONE = "-"
DIGITS = 2
DIRECTIONS = {True: "", False: " (lower is better)", None: " (no direction)"}
NOTE = (
    "rounds: half width of the 95 % interval of the mean over rounds of generation, 1.96 s / sqrt(n) (t: with "
    "Student's t); questions: 95 % interval over questions; grading: standard deviation of the mean when the same "
    "answers are graded again. A difference between two models counts only if it exceeds 1.96 sqrt(a^2 + b^2), where "
    "a and b are their grading spreads"
)


def result_sections(result: EvaluationResult) -> list[Section]:
    """Returns the tables of one result, for the terminal and reports."""
    rows = [_score_row(score) for score in result.scores]
    blocks = [TableBlock(["score", "mean", "rounds", "questions", "grading", "n"], rows, digits={"mean": DIGITS})]
    sections = [Section(f"{result.label} on {result.benchmark}", [*blocks, Paragraph(NOTE)])]
    if result.table:
        columns = list(dict.fromkeys(name for row in result.table for name in row))
        sections.append(Section("Breakdown", [TableBlock(columns, [_table_cells(row) for row in result.table])]))
    sections.append(Section("Details", list(_result_details(result))))
    return sections


def _table_cells(row: object) -> dict[str, Cell]:
    values = dict(row) if isinstance(row, dict) else {}
    return {str(name): value if isinstance(value, int | float | str) else str(value) for name, value in values.items()}


def _score_row(score: BenchmarkScore) -> list[Cell]:
    low, high = score.interval or (None, None)
    interval = NONE if low is None or high is None else f"[{format_fixed(low, DIGITS)}, {format_fixed(high, DIGITS)}]"
    grading = NONE if score.grading is None else format_fixed(score.grading, DIGITS)
    name = score.name + DIRECTIONS[score.higher_is_better]
    if math.isnan(score.mean):
        return [name, NONE, NONE, interval, grading, score.questions]
    rounds = format_rounds(score, DIGITS) or NONE
    return [name, round_half_up(score.mean, DIGITS), rounds, interval, grading, score.questions]


def format_rounds(score: BenchmarkScore, digits: int) -> str:
    """Formats both half widths over rounds as ``± 1.57 (t 3.45)``.

    The second one is from Student's t. Returns an empty string for one round.
    """
    normal, student = half_widths(score.rounds)
    if normal is None or student is None:
        return ""
    return f"± {format_fixed(normal, digits)} (t {format_fixed(student, digits)})"


def _result_details(result: EvaluationResult) -> Iterator[KeyValues]:
    details: dict[str, Cell] = {"model": result.model, "grader": result.grader or "none"}
    if result.lengths is not None:
        lengths = result.lengths
        details["mean answer"] = (
            f"{lengths.tokens:.0f} tokens ({lengths.tokenizer}), {lengths.characters:.0f} characters, "
            f"{lengths.cut:.1%} cut at the token limit"
        )
    details |= {f"count: {reason}": count for reason, count in sorted(result.counts.items()) if count}
    costs = {name: int(value) if float(value).is_integer() else value for name, value in result.cost.items()}
    details |= {f"cost: {name.replace('_', ' ')}": value for name, value in costs.items()}
    yield KeyValues(details)
