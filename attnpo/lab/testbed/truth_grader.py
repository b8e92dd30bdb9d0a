"""The testbed's truth as a grader: what a review is worth is computed from its clauses, no model is asked.

Two kinds of calls are answered, by what their messages are:

- a user turn with a prompt and an assistant turn with a review: what the review is worth;
- one user turn that is a filled judge template, with two labels: which of its two reviews is worth more. A model can
  answer the same call.

The reply's text is a JSON object (``truth_text``). Its log-probabilities hold the better review's label alone, with 0,
or both labels with log 1/2.
"""

import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from attnpo.config.files import find_file
from attnpo.evaluation.grading.base import GradingCall, GradingFailure, GradingReply, Price
from attnpo.judge.wording import JudgeTemplate
from attnpo.lab.testbed.grammar import Grammar
from attnpo.schema import Message, UserError, digest
from attnpo.system.files import parse_json

REWARDS, VERDICT, TIE, UNREADABLE = "rewards", "verdict", "tie", "unreadable"


class Unreadable(Exception):
    """A call whose prompt and reviews cannot be told."""


@dataclass(frozen=True)
class TruthGrader:
    """Grades reviews of the testbed by the grammar's true reward.

    ``grammar`` and ``template_file`` must be those of the benchmark. Where a review holds the template's own words, so
    that more than one way of reading a call gives a prompt of the grammar, the reply gives neither label nor reward.
    """

    grammar: Grammar = field(default_factory=Grammar)
    template_file: str = "judge/testbed.txt"

    @property
    def price(self) -> Price:
        """Prices every token at 0: no service is asked."""
        return Price()

    def check_ready(self) -> None:
        """The truth is always ready; its template was read when it was made."""

    def identity(self) -> dict[str, object]:
        """Returns the world's digest and the wording it reads."""
        return {"grader": "truth", "grammar": self.grammar.digest(), "template": digest(self._template.text)}

    def count_tokens(self, call: GradingCall) -> int | None:
        """None are read."""
        return 0

    def ask(self, calls: Iterable[GradingCall]) -> Iterator[tuple[GradingCall, GradingReply | GradingFailure]]:
        """Yields each call with its reply in their order; one whose prompt or reviews cannot be told is a failure."""
        for call in calls:
            began = time.perf_counter()
            try:
                text, logprobs = self._answer(call)
            except Unreadable as problem:
                yield call, GradingFailure(f"the truth cannot read the call: {problem}")
            else:
                yield call, GradingReply(text, logprobs=logprobs, seconds=time.perf_counter() - began)

    def _answer(self, call: GradingCall) -> tuple[str, dict[str, float] | None]:
        roles = [turn["role"] for turn in call.messages]
        if roles == ["user", "assistant"]:
            prompt, review = (turn["content"] for turn in call.messages)
            return truth_text([self._reward(prompt, review)]), None
        if roles == ["user"] and len(call.labels) == 2:
            return self._compare(call.messages[0], call.labels)
        raise Unreadable(
            "expected a user's turn and an assistant's, or one user's turn with two labels, got the roles "
            f"{roles} with the labels {list(call.labels)}"
        )

    def _compare(self, turn: Message, labels: Sequence[str]) -> tuple[str, dict[str, float] | None]:
        readings = [
            found for found in filled_with(self._template, turn["content"]) if self._is_prompt(found["question"])
        ]
        if not readings:
            raise Unreadable(
                f"its text is no prompt of the grammar with two reviews in the wording of {self.template_file}: give "
                "benchmark=testbed, and the grader the benchmark's grammar and wording"
            )
        if len(readings) > 1:
            return json.dumps({UNREADABLE: f"the wording can be read in {len(readings)} ways"}), None
        (found,) = readings
        first, second = (self._reward(found["question"], found[name]) for name in ("answer_a", "answer_b"))
        if first == second:
            return truth_text([first, second], TIE), dict.fromkeys(labels, math.log(0.5))
        better = labels[0] if first > second else labels[1]
        return truth_text([first, second], better), {better: 0.0}

    def _is_prompt(self, text: str) -> bool:
        try:
            self.grammar.parse_prompt(text)
        except ValueError:
            return False
        return True

    def _reward(self, prompt: str, review: str) -> float:
        try:
            topic = self.grammar.parse_prompt(prompt).topic
        except ValueError as problem:
            raise Unreadable(str(problem)) from problem
        return self.grammar.true_reward(review, topic).reward

    @cached_property
    def _template(self) -> JudgeTemplate:
        template = JudgeTemplate.from_file(find_file(self.template_file, "grader.template_file"))
        if not all(template.literals[1:-1]):
            raise UserError(
                f"grader.template_file={self.template_file}: two placeholders stand side by side, so reviews cannot be "
                "told apart: put text between them"
            )
        return template


def truth_text(rewards: Sequence[float], verdict: str | None = None) -> str:
    """Returns the text of the truth's reply: the reward of each review in the order shown, and which is
    the better one.
    """
    return json.dumps({REWARDS: list(rewards), **({} if verdict is None else {VERDICT: verdict})})


def rewards_in(text: str) -> tuple[float, ...] | None:
    """Returns the rewards in a reply of the truth; None for the text of any other grader."""
    try:
        found = parse_json(text)
    except ValueError:
        return None
    rewards = found.get(REWARDS) if isinstance(found, dict) else None
    if not isinstance(rewards, list) or not all(isinstance(value, int | float) for value in rewards):
        return None
    return tuple(float(value) for value in rewards)


def filled_with(template: JudgeTemplate, text: str) -> Iterator[dict[str, str]]:
    """Yields every way in which ``text`` can be the template filled with three texts, by placeholder."""
    head, first, second, tail = template.literals
    if not (text.startswith(head) and text.endswith(tail) and len(text) >= len(head) + len(tail)):
        return
    inner = text[len(head) : len(text) - len(tail)]
    for here in _places(inner, first, 0):
        for there in _places(inner, second, here + len(first)):
            parts = (inner[:here], inner[here + len(first) : there], inner[there + len(second) :])
            yield dict(zip(template.order, parts, strict=True))


def _places(text: str, part: str, start: int) -> Iterator[int]:
    """Yields where ``part`` begins in ``text`` from ``start`` on, overlapping places included."""
    place = text.find(part, start)
    while place >= 0:
        yield place
        place = text.find(part, place + 1)
