"""What is ranked and who ranks: the answers to a prompt, a score for each, a component that gives scores."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NotRequired, Protocol, runtime_checkable

import torch

from attnpo.evaluation.jsonl_store import Row
from attnpo.schema import Message, asked_by, digest


@dataclass(frozen=True)
class Candidate:
    """An answer: ``draw`` is its place among those to its prompt, ``extra`` what else its row holds."""

    draw: int
    text: str
    extra: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class AnswerSet:
    """The different answers to one prompt, in the order of their draws."""

    id: str
    prompt: tuple[Message, ...]
    answers: tuple[Candidate, ...]

    def fingerprint(self) -> str:
        """Digest of prompt and answers."""
        return digest([self.id, asked_by(self.prompt), [[one.draw, one.text] for one in self.answers]])


class ScoreRow(Row):
    """The score of an answer, higher for a better one; None where it has none, with the reason."""

    score: float | None
    reason: NotRequired[str]


def scored(found: AnswerSet, scores: Sequence[float]) -> list[ScoreRow]:
    """Returns a row for each answer of a set."""
    return [ScoreRow(id=found.id, draw=one.draw, score=at) for one, at in zip(found.answers, scores, strict=True)]


def unscored(found: AnswerSet, reason: str) -> list[ScoreRow]:
    """Returns the rows of a set that cannot be ranked."""
    return [ScoreRow(id=found.id, draw=one.draw, score=None, reason=reason) for one in found.answers]


@runtime_checkable
class Ranker(Protocol):
    """A component that scores answers (config group ``ranker``)."""

    @property
    def name(self) -> str:
        """Returns what every pair names it: its kind, and the model or the column."""

    def key(self, sets: Sequence[AnswerSet]) -> dict[str, object]:
        """Returns all that decides the scores of ``sets`` beside their texts. UserError for what is known to fail."""

    def scores(self, sets: Sequence[AnswerSet], device: torch.device, folder: Path) -> Iterator[list[ScoreRow]]:
        """Returns the rows of the sets as they come, whole sets at a time, to be written before the next are asked for.

        ``folder`` is where it may keep files of its own. A set that a repeated command may still score is left out.
        """
