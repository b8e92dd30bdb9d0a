"""The result of an evaluation for reading: its scores with each spread apart, lengths, counts and cost."""

import math
from collections.abc import Iterator

from attnpo.analysis.intervals import t_quantile
from attnpo.display.page import KeyValues, Paragraph, Section, TableBlock
from attnpo.display.tables import Cell
from attnpo.evaluation.base import Score
from attnpo.evaluation.result import EvaluationResult

NONE = "-"
NOTE = (
    "rounds: half width of the interval of the mean over rounds of generation, 1.96 s / sqrt(n) and, in brackets, "
    "Student's t; questions: 95 % over questions; grading: standard deviation of the mean from grading the same "
    "answers again. A difference of two models below the grading spread is none"
)


def result_sections(result: EvaluationResult) -> list[Section]:
    """The tables of one result."""
    rows = [_row(score) for score in result.scores]
    blocks = [TableBlock(["score", "mean", "rounds", "questions", "grading", "n"], rows, digits={"mean": 2})]
    sections = [Section(f"{result.label} on {result.benchmark}", [*blocks, Paragraph(NOTE)])]
    if result.table:
        columns = list(dict.fromkeys(name for row in result.table for name in row))
        sections.append(Section("In parts", [TableBlock(columns, [_cells(row) for row in result.table])]))
    sections.append(Section("What it stands on", list(_account(result))))
    return sections


def _cells(row: object) -> dict[str, Cell]:
    values = dict(row) if isinstance(row, dict) else {}
    return {str(name): value if isinstance(value, int | float | str) else str(value) for name, value in values.items()}


def _row(score: Score) -> list[Cell]:
    interval = NONE if score.interval is None else f"[{score.interval[0]:.2f}, {score.interval[1]:.2f}]"
    grading = NONE if score.grading is None else f"{score.grading:.2f}"
    mean = NONE if math.isnan(score.mean) else score.mean
    return [score.name, mean, rounds_text(score), interval, grading, score.questions]


def rounds_text(score: Score) -> str:
    """The half width over rounds, normal and, in brackets, t; "-" with fewer than two rounds or without a mean."""
    count = len(score.rounds)
    if count < 2 or math.isnan(score.mean):
        return NONE
    spread = (sum((value - score.mean) ** 2 for value in score.rounds) / (count - 1) / count) ** 0.5
    return f"±{1.96 * spread:.2f} (±{t_quantile(0.975, count - 1) * spread:.2f})"


def _account(result: EvaluationResult) -> Iterator[KeyValues]:
    told: dict[str, Cell] = {"model": result.model, "grader": result.grader or "none"}
    if result.lengths is not None:
        lengths = result.lengths
        told["mean answer"] = (
            f"{lengths.tokens:.0f} tokens ({lengths.tokenizer}), {lengths.characters:.0f} characters, "
            f"{lengths.cut:.1%} cut at the most tokens"
        )
    told |= {f"counted: {reason}": count for reason, count in sorted(result.counts.items()) if count}
    whole = {name: int(value) if float(value).is_integer() else value for name, value in result.cost.items()}
    told |= {f"cost: {name.replace('_', ' ')}": value for name, value in whole.items()}
    yield KeyValues(told)
