"""Two answers compared by the label logits of a judge, in both orders, for any benchmark that has a baseline.

The wording is a judge template as AttentionPO's own judge reads it (``text.judge_template``, ``configs/judge/*.txt``),
put into one user message. A model on this machine (``grader=local``) and a served one that gives log-probabilities
answer alike.
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
from attnpo.evaluation.base import Benchmark, Graded, ModelAnswer, Question, Replies, first_turn, match_answers
from attnpo.evaluation.chat import GradingCall, GradingReply
from attnpo.judge.prompts import JudgeTemplate, question_text
from attnpo.schema import Message, Sampling, UserError, check_at_least, digest

MODEL_FIRST, MODEL_SECOND = "model first", "model second"
ORDERS = (MODEL_FIRST, MODEL_SECOND)

MISSING = "comparisons without a reply"
NO_VERDICT = "replies that give neither label"
OTHER_TOKEN = "replies whose likeliest token is no label"
FIRST_TWICE = "questions where both orders prefer the answer shown first"
SECOND_TWICE = "questions where both orders prefer the answer shown second"
TIES = "ties"


@dataclass(frozen=True)
class Contest:
    """One question, the model's answer and the rival's."""

    item: str
    question: str
    answer: str
    rival: str


@dataclass(frozen=True)
class PairwiseRules:
    """Rules for showing two answers and reading verdicts.

    ``template_file``: text with {question}, {answer_a} and {answer_b}. ``labels``: the letters of the first and the
    second answer. ``strip``: show answers without blanks at their ends. ``top_logprobs``: how many likeliest tokens a
    served judge is asked for; a label that is not among them counts as impossible.

    Nothing is cut: a prompt that is too long for the judge is a failed call.
    """

    template_file: str = "judge/pairwise.txt"
    labels: tuple[str, str] = ("A", "B")
    strip: bool = True
    top_logprobs: int = 5

    def __post_init__(self) -> None:
        check_at_least("benchmark.pairwise", 1, top_logprobs=self.top_logprobs)
        if self.labels[0] == self.labels[1]:
            raise UserError(f"benchmark.pairwise.labels: expected two that differ, got {self.labels[0]} twice")

    @cached_property
    def template(self) -> JudgeTemplate:
        """Returns the wording. Raises UserError when it cannot be read or lacks a placeholder."""
        return JudgeTemplate.from_file(find_file(self.template_file, "benchmark.pairwise.template_file"))

    def versions(self) -> dict[str, object]:
        """Returns what decides calls and values beside the answers."""
        return {"template": digest(self.template.text), "labels": list(self.labels), "strip": self.strip}

    def calls(self, benchmark: str, round_: int, contests: Iterable[Contest]) -> list[GradingCall]:
        """Returns two calls per contest: the model's answer first, then second."""
        return [self._call(benchmark, round_, contest, part) for contest in contests for part in ORDERS]

    def _call(self, benchmark: str, round_: int, contest: Contest, part: str) -> GradingCall:
        # An empty answer is one blank, as AttentionPO's judge shows it.
        shown = [(text.strip() if self.strip else text) or " " for text in (contest.answer, contest.rival)]
        first, second = shown if part == MODEL_FIRST else reversed(shown)
        text = self.template.render(contest.question, first, second).text
        return GradingCall(
            benchmark=benchmark,
            item=contest.item,
            part=part,
            round=round_,
            messages=(Message(role="user", content=text),),
            max_tokens=1,
            top_logprobs=self.top_logprobs,
            labels=self.labels,
            compared=(contest.question, first, second),
        )

    def preferences(self, items: Sequence[str], replies: Replies) -> "Preferences":
        """Returns what the replies say of each item. An item counts only when both of its orders have a verdict."""
        found = {(call.item, call.part): reply for call, reply in replies.items()}
        counts: Counter[str] = Counter()
        values = np.full(len(items), math.nan)
        for index, item in enumerate(items):
            leans = [self._lean(found.get((item, part)), counts) for part in ORDERS]
            first, second = leans
            if first is None or second is None:
                continue
            values[index] = 0.5 + (first - second) / 4
            counts += Counter({TIES: int(first == second)})
            counts += Counter({FIRST_TWICE: int(min(first, second) > 0), SECOND_TWICE: int(max(first, second) < 0)})
        return Preferences(tuple(items), values, {reason: count for reason, count in counts.items() if count})

    def _lean(self, reply: GradingReply | None, counts: Counter[str]) -> float | None:
        """Returns how far a reply leans to the answer shown first, from -1 to 1; None without a verdict.

        That is P(first) - P(second).
        The probabilities are those of the two labels alone. It is odd in the exchange of the labels, so that what both
        orders say together does not depend on which answer is called the model's.
        """
        if reply is None:
            counts[MISSING] += 1
            return None
        if reply.logprobs is None:
            said = reply.text.strip()
            counts[OTHER_TOKEN] += said not in self.labels
            if said not in self.labels:
                counts[NO_VERDICT] += 1
                return None
            return 1.0 if said == self.labels[0] else -1.0
        first, second = (_of_label(reply.logprobs, label) for label in self.labels)
        counts[OTHER_TOKEN] += max(reply.logprobs.values(), default=-math.inf) > max(first, second)
        if max(first, second) == -math.inf:
            counts[NO_VERDICT] += 1
            return None
        return 1.0 if second == -math.inf else -1.0 if first == -math.inf else math.tanh((first - second) / 2)


def _of_label(logprobs: Mapping[str, float], label: str) -> float:
    """Returns the log-probability of a label.

    Of a served judge's tokens that differ by blanks around it, the likeliest.
    """
    near = (value for text, value in logprobs.items() if text.strip() == label)
    return logprobs[label] if label in logprobs else max(near, default=-math.inf)


@dataclass(frozen=True)
class Preferences:
    """Judge's probability that the model's answer is better, averaged over both orders; NaN without both.

    ``counts``: replies that are missing or say nothing, ties, questions whose two orders prefer the same place.
    """

    items: tuple[str, ...]
    values: Float[np.ndarray, " items"]
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def weights(self) -> Float[np.ndarray, " items"]:
        """Returns 1 for an item with a value, else 0."""
        return np.asarray(np.isfinite(self.values), dtype=float)

    @property
    def percent(self) -> Float[np.ndarray, " items"]:
        """Returns the values in percent."""
        return 100 * self.values

    @property
    def win_rate(self) -> float:
        """Returns the mean in percent, NaN where no item has a value."""
        found = self.percent[np.isfinite(self.values)]
        return float(found.mean()) if len(found) else math.nan


@runtime_checkable
class WithBaseline(Benchmark, Protocol):
    """Benchmark with an answer to compare with for each of its questions, which have one turn."""

    def baseline_answers(self) -> Mapping[str, str]:
        """Returns the baseline's answer to each question, by its id."""


@dataclass(frozen=True)
class PairwiseBenchmark:
    """Questions and the baseline of a benchmark (``of``), judged by label logits in place of its own protocol."""

    of: WithBaseline
    pairwise: PairwiseRules = field(default_factory=PairwiseRules)

    @property
    def name(self) -> str:
        """Returns the name of the benchmark with ``_labels``."""
        return f"{self.of.name}_labels"

    @property
    def scores(self) -> tuple[str, ...]:
        """Returns one figure: the mean probability of the model's answer being better, in percent."""
        return ("win_rate",)

    @property
    def sampling(self) -> Sampling:
        """Returns the benchmark's."""
        return self.of.sampling

    def questions(self) -> Sequence[Question]:
        """Returns the benchmark's. UserError for questions of several turns."""
        found = self.of.questions()
        several = [question.id for question in found if len(question.turns) > 1]
        if several:
            raise UserError(
                f"benchmark {self.name}: question {several[0]} has several turns, a comparison shows one; use "
                f"benchmark={self.of.name}"
            )
        return found

    def versions(self) -> dict[str, object]:
        """Returns the benchmark's, and the wording."""
        return {"of": self.of.versions(), "pairwise": self.pairwise.versions()}

    def calls(self, answers: Mapping[str, ModelAnswer], round_: int) -> Sequence[GradingCall]:
        """Returns two calls per question."""
        questions = self.questions()
        given = match_answers(self.name, questions, answers)
        rivals = self.of.baseline_answers()
        missing = [question.id for question in questions if question.id not in rivals]
        if missing:
            raise UserError(
                f"benchmark {self.name}: the baseline has no answer to {len(missing)} of {len(questions)} questions "
                f"(first: {missing[0]}); give a complete file of its answers"
            )
        contests = [
            Contest(question.id, question_text(first_turn(question)), answer.turns[0], rivals[question.id])
            for question, answer in zip(questions, given, strict=True)
        ]
        return self.pairwise.calls(self.name, round_, contests)

    def grade(self, answers: Mapping[str, ModelAnswer], replies: Replies) -> Graded:
        """Returns the win rate of one round's answers."""
        items = [question.id for question in self.questions() if question.id in answers]
        found = self.pairwise.preferences(items, replies)
        return Graded(
            questions=found.items,
            scores={"win_rate": found.win_rate},
            values={"win_rate": found.percent},
            weights={"win_rate": found.weights},
            counts=found.counts,
        )
