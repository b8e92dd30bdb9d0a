"""Pairwise comparison of answers in both orders by a judge's label logits, for any benchmark with a baseline.

The prompt is a judge template in the format of AttentionPO's own judge (``text.judge_template``,
``configs/judge/*.txt``), sent as one user message. It works with a local model (``grader=local``) and with a server
that returns log-probabilities.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float

from attnpo.config.named_files import find_file
from attnpo.evaluation.base import Benchmark, ModelAnswer, Question, Replies, RoundScores, first_turn, match_answers
from attnpo.evaluation.chat import GradingCall, GradingReply
from attnpo.judge.prompts import JudgeTemplate, question_text
from attnpo.schema import Message, Sampling, UserError, check_at_least, digest

MODEL_FIRST, MODEL_SECOND = "model first", "model second"
ORDERS = (MODEL_FIRST, MODEL_SECOND)

MISSING = "comparisons without a reply"
NO_VERDICT = "replies with neither label"
OTHER_TOKEN = "replies whose most likely token is not a label"
FIRST_TWICE = "questions where both orders prefer the answer shown first"
SECOND_TWICE = "questions where both orders prefer the answer shown second"
TIES = "ties"


@dataclass(frozen=True)
class Comparison:
    """Two answers to one question: the model's and a competing one, e.g. the baseline's."""

    item: str
    question: str
    answer: str
    rival: str


@dataclass(frozen=True)
class PairwiseRules:
    """Rules for presenting two answers to the judge and reading the judge's verdicts.

    ``template_file``: file with a template that contains {question}, {answer_a} and {answer_b}. ``labels``: labels for
    the first and the second answer. ``strip``: remove leading and trailing whitespace from answers. ``top_logprobs``:
    number of most likely tokens to request from a served judge; a label that is not among them has probability 0.

    Prompts are never truncated: if a prompt is too long for the judge, its call fails.
    """

    template_file: str = "judge/pairwise.txt"
    labels: tuple[str, str] = ("A", "B")
    strip: bool = True
    top_logprobs: int = 5

    def __post_init__(self) -> None:
        check_at_least("benchmark.pairwise", 1, top_logprobs=self.top_logprobs)
        if self.labels[0] == self.labels[1]:
            raise UserError(f"benchmark.pairwise.labels must be two different labels, got {self.labels[0]} twice")

    @cached_property
    def template(self) -> JudgeTemplate:
        """Reads the judge template.

        Raises:
            UserError: the template file cannot be read or lacks a placeholder.
        """
        return JudgeTemplate.from_file(find_file(self.template_file, "benchmark.pairwise.template_file"))

    def fingerprint(self) -> dict[str, object]:
        """Returns everything that affects calls or preferences, apart from the answers."""
        return {"template": digest(self.template.text), "labels": list(self.labels), "strip": self.strip}

    def grading_calls(self, benchmark: str, round_: int, comparisons: Iterable[Comparison]) -> list[GradingCall]:
        """Returns two calls per comparison: one with the model's answer first, and one with it second."""
        return [self._make_call(benchmark, round_, comparison, part) for comparison in comparisons for part in ORDERS]

    def _make_call(self, benchmark: str, round_: int, comparison: Comparison, part: str) -> GradingCall:
        # An empty answer becomes one space, as for AttentionPO's judge.
        shown = [(text.strip() if self.strip else text) or " " for text in (comparison.answer, comparison.rival)]
        first, second = shown if part == MODEL_FIRST else reversed(shown)
        text = self.template.render(comparison.question, first, second).text
        return GradingCall(
            benchmark=benchmark,
            item=comparison.item,
            part=part,
            round=round_,
            messages=(Message(role="user", content=text),),
            max_tokens=1,
            top_logprobs=self.top_logprobs,
            labels=self.labels,
            compared=(comparison.question, first, second),
        )

    def preferences(self, items: Sequence[str], replies: Replies) -> "Preferences":
        """Computes the judge's preference for each item; items need verdicts in both orders."""
        found = {(call.item, call.part): reply for call, reply in replies.items()}
        counts: Counter[str] = Counter()
        values = np.full(len(items), math.nan)
        for index, item in enumerate(items):
            leans = [self._label_preference(found.get((item, part)), counts) for part in ORDERS]
            first, second = leans
            if first is None or second is None:
                continue
            values[index] = 0.5 + (first - second) / 4
            counts += Counter({TIES: int(first == second)})
            counts += Counter({FIRST_TWICE: int(min(first, second) > 0), SECOND_TWICE: int(max(first, second) < 0)})
        return Preferences(tuple(items), values, {reason: count for reason, count in counts.items() if count})

    def _label_preference(self, reply: GradingReply | None, counts: Counter[str]) -> float | None:
        """Returns P(first) - P(second) for the answers in the order shown, from -1 to 1; None without a verdict.

        The probabilities are normalized over the two labels. Swapping the labels flips the sign, so the result over
        both orders does not depend on which answer is treated as the model's.
        """
        if reply is None:
            counts[MISSING] += 1
            return None
        if reply.logprobs is None:
            label = reply.text.strip()
            counts[OTHER_TOKEN] += label not in self.labels
            if label not in self.labels:
                counts[NO_VERDICT] += 1
                return None
            return 1.0 if label == self.labels[0] else -1.0
        first, second = (_label_logprob(reply.logprobs, label) for label in self.labels)
        counts[OTHER_TOKEN] += max(reply.logprobs.values(), default=-math.inf) > max(first, second)
        if max(first, second) == -math.inf:
            counts[NO_VERDICT] += 1
            return None
        return 1.0 if second == -math.inf else -1.0 if first == -math.inf else math.tanh((first - second) / 2)


def _label_logprob(logprobs: Mapping[str, float], label: str) -> float:
    """Returns the log-probability of a label, or of its most likely variant with surrounding whitespace."""
    near = (value for text, value in logprobs.items() if text.strip() == label)
    return logprobs[label] if label in logprobs else max(near, default=-math.inf)


@dataclass(frozen=True)
class Preferences:
    """Judge's probability that the model's answer is better, averaged over both orders; NaN if a verdict is missing.

    ``counts``: missing replies, replies without a verdict, ties, and questions for which the judge prefers the same
    position in both orders.
    """

    items: tuple[str, ...]
    values: Float[np.ndarray, " items"]
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def weights(self) -> Float[np.ndarray, " items"]:
        """Returns 1 for items with a value and 0 for others."""
        return np.asarray(np.isfinite(self.values), dtype=float)

    @property
    def percent(self) -> Float[np.ndarray, " items"]:
        """Returns the probabilities in percent."""
        return 100 * self.values

    @property
    def win_rate(self) -> float:
        """Returns the mean probability in percent; NaN if no item has a value."""
        found = self.percent[np.isfinite(self.values)]
        return float(found.mean()) if len(found) else math.nan


@runtime_checkable
class BaselineBenchmark(Benchmark, Protocol):
    """Benchmark with single-turn questions and a baseline answer to each."""

    def baseline_answers(self) -> Mapping[str, str]:
        """Returns the baseline's answer to each question, by question id."""


@dataclass(frozen=True)
class PairwiseBenchmark:
    """Variant of the benchmark ``of`` that uses label logits to compare answers with the baseline's."""

    of: BaselineBenchmark
    pairwise: PairwiseRules = field(default_factory=PairwiseRules)

    @property
    def name(self) -> str:
        """Returns the benchmark's name with the suffix ``_labels``."""
        return f"{self.of.name}_labels"

    @property
    def scores(self) -> tuple[str, ...]:
        """Returns the name of the win rate: the mean probability, in percent, that the model's answer is better."""
        return ("win_rate",)

    @property
    def sampling(self) -> Sampling:
        """Returns the sampling settings of the underlying benchmark."""
        return self.of.sampling

    def questions(self) -> Sequence[Question]:
        """Returns the questions of the underlying benchmark.

        Raises:
            UserError: a question has several turns.
        """
        found = self.of.questions()
        several = [question.id for question in found if len(question.turns) > 1]
        if several:
            raise UserError(
                f"benchmark {self.name}: question {several[0]} has several turns, but only single-turn questions can "
                f"be compared; use benchmark={self.of.name}"
            )
        return found

    def fingerprint(self) -> dict[str, object]:
        """Returns the fingerprints of the underlying benchmark and of the comparison rules."""
        return {"of": self.of.fingerprint(), "pairwise": self.pairwise.fingerprint()}

    def grading_calls(self, answers: Mapping[str, ModelAnswer], round_: int) -> Sequence[GradingCall]:
        """Returns two calls per question, one for each order of the answers."""
        questions = self.questions()
        given = match_answers(self.name, questions, answers)
        rivals = self.of.baseline_answers()
        missing = [question.id for question in questions if question.id not in rivals]
        if missing:
            raise UserError(
                f"benchmark {self.name}: the baseline has no answers to {len(missing)} of {len(questions)} questions "
                f"(first: {missing[0]}); use a file with all baseline answers"
            )
        comparisons = [
            Comparison(question.id, question_text(first_turn(question)), answer.turns[0], rivals[question.id])
            for question, answer in zip(questions, given, strict=True)
        ]
        return self.pairwise.grading_calls(self.name, round_, comparisons)

    def grade(self, answers: Mapping[str, ModelAnswer], replies: Replies) -> RoundScores:
        """Computes the win rate of one round's answers."""
        items = [question.id for question in self.questions() if question.id in answers]
        found = self.pairwise.preferences(items, replies)
        return RoundScores(
            questions=found.items,
            scores={"win_rate": found.win_rate},
            values={"win_rate": found.percent},
            weights={"win_rate": found.weights},
            counts=found.counts,
        )
