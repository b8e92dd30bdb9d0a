"""What a benchmark is, and what comes of one: scores with their spreads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float

from attnpo.evaluation.answers.questions import ModelAnswer, Question
from attnpo.evaluation.grading.base import GradingCall, GradingReply
from attnpo.models.spec import ModelSpec
from attnpo.schema import Sampling
from attnpo.text.chat import ChatFormat

Replies = Mapping[GradingCall, GradingReply]


@dataclass(frozen=True)
class Graded:
    """What a grader's replies say of the answers to a benchmark's questions.

    ``scores``: the benchmark's figures by name. ``values``: per figure a value of each question, NaN where it has none;
    ``weights``: how much each counts in the mean (0 with NaN). Where a figure has values, it is their weighted mean.
    ``counts``: what was missing or replaced, by reason. ``errors``: standard errors over questions that the benchmark's
    own library states.
    """

    questions: tuple[str, ...]
    scores: Mapping[str, float]
    values: Mapping[str, Float[np.ndarray, " questions"]]
    weights: Mapping[str, Float[np.ndarray, " questions"]]
    counts: Mapping[str, int] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class Benchmark(Protocol):
    """A benchmark whose answers are generated and then graded.

    ``name`` names its folder and its columns, ``scores`` the figures it gives, the first one being the one that counts.
    """

    @property
    def name(self) -> str:
        """For example mt_bench."""

    @property
    def scores(self) -> tuple[str, ...]:
        """Names of the figures, for example ("lc_win_rate", "win_rate")."""

    @property
    def sampling(self) -> Sampling:
        """Returns how answers are drawn; ``sampling.seed`` plus the round seeds a round."""

    def questions(self) -> Sequence[Question]:
        """In the benchmark's own order. UserError for a missing file, with the way to get it."""

    def versions(self) -> dict[str, object]:
        """Returns what decides calls and scores beside the answers: digests of files, versions of prompts and rules."""

    def calls(self, answers: Mapping[str, ModelAnswer], round_: int) -> Sequence[GradingCall]:
        """Returns every call that grades one round's answers (by question id). UserError names answers that are
        missing.
        """

    def grade(self, answers: Mapping[str, ModelAnswer], replies: Replies) -> Graded:
        """Returns the scores of one round. A reply without a verdict is counted and follows the protocol's rule.

        ``replies`` may hold only some questions' calls (``limits.max_items``, calls that failed): what is missing is
        counted and left out of every mean.
        """


@dataclass(frozen=True)
class Score:
    """A figure with its three spreads, each apart; None where it is not known.

    ``rounds``: the figure of each round of generation, ``mean`` their mean. ``interval``: 95 % over questions, of the
    mean. ``grading``: the standard deviation of the mean from grading the same answers again. ``questions``: how many
    it stands on. ``higher_is_better``: its direction; None where its library does not say, so that it ranks nobody.
    """

    name: str
    mean: float
    rounds: tuple[float, ...] = ()
    interval: tuple[float, float] | None = None
    grading: float | None = None
    questions: int = 0
    higher_is_better: bool | None = True


@dataclass(frozen=True)
class Measured:
    """What a measure without generation and grading gives: scores, what was left out by reason, rows for a table."""

    scores: tuple[Score, ...]
    counts: Mapping[str, int] = field(default_factory=dict)
    table: tuple[Mapping[str, object], ...] = ()


@dataclass(frozen=True)
class Subject:
    """The model that is measured.

    ``device`` is where it runs; ``folder`` is where a measure may keep files of its own.
    """

    model: ModelSpec
    chat: ChatFormat
    device: torch.device
    folder: Path


@runtime_checkable
class Measure(Protocol):
    """A benchmark that needs no grader: implicit-reward accuracy, tasks of lm-eval."""

    @property
    def name(self) -> str:
        """For example ifeval."""

    @property
    def scores(self) -> tuple[str, ...]:
        """Names of the figures, the one that counts first; empty where only the run shows them."""

    def versions(self) -> dict[str, object]:
        """Returns what decides the scores beside the model."""

    def measure(self, subject: Subject) -> Measured:
        """Returns the scores. UserError for data that cannot be had, with the way to get them."""
