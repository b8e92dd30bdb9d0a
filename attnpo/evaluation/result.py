"""The result of an evaluation as a file: ``evaluation.json`` in its folder, written last."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from attnpo.evaluation.base import Score
from attnpo.schema import UserError
from attnpo.system.files import read_record, write_record

RESULT = "evaluation.json"


@dataclass(frozen=True)
class Lengths:
    """How long the answers are: means over questions (all turns) and rounds, and the share cut at the most tokens."""

    tokens: float
    characters: float
    cut: float
    tokenizer: str


@dataclass(frozen=True)
class EvaluationResult:
    """One model on one benchmark. ``label`` is what tables call the model; ``main`` the score that counts.

    ``key``: all that decided the numbers, flat enough to be compared. ``counts``: what was missing or replaced, by
    reason. ``cost``: calls, input_tokens, output_tokens, dollars, seconds.
    """

    label: str
    model: str
    benchmark: str
    grader: str | None
    main: str
    scores: tuple[Score, ...]
    key: Mapping[str, Any]
    lengths: Lengths | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    cost: Mapping[str, float] = field(default_factory=dict)
    table: tuple[Mapping[str, object], ...] = ()

    def score(self, name: str) -> Score | None:
        """Returns the score of a name."""
        return next((score for score in self.scores if score.name == name), None)

    def write(self, folder: Path) -> None:
        """Writes ``evaluation.json`` with a digest of its content."""
        write_record(folder / RESULT, asdict(self))


def read_result(folder: Path) -> EvaluationResult | None:
    """Returns the result in an evaluation's folder; None where it is not finished. UserError for a file that was
    changed.
    """
    path = folder / RESULT
    if not path.is_file():
        return None
    values = read_record(path)
    if values is None:
        raise UserError(f"{path} is damaged or was edited: delete it and give the command of the evaluation again")
    try:
        lengths, scores = values.pop("lengths"), values.pop("scores")
        return EvaluationResult(
            **{**values, "table": tuple(values["table"])},
            scores=tuple(
                Score(
                    **{
                        **score,
                        "rounds": tuple(score["rounds"]),
                        "interval": None if score["interval"] is None else tuple(score["interval"]),
                    }
                )
                for score in scores
            ),
            lengths=None if lengths is None else Lengths(**lengths),
        )
    except (KeyError, TypeError, AttributeError) as problem:
        raise UserError(
            f"{path} is of another version of attnpo ({problem!r}): delete it and give the evaluation's command again"
        ) from problem
