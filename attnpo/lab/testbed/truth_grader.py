"""Grader that knows the testbed's truth: computes what a review is worth from its clauses, and asks no model."""

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from attnpo.evaluation.chat import GradingCall, GradingFailure, GradingReply, Price
from attnpo.lab.testbed.grammar import Grammar

TIE = "tie"


@dataclass(frozen=True)
class TruthGrader:
    """Compares two reviews of the testbed by the grammar's true reward; ``grammar`` must be that of the benchmark.

    The log-probabilities of a reply hold the better review's label alone, with 0, or both labels with log 1/2.
    """

    grammar: Grammar = field(default_factory=Grammar)

    @property
    def price(self) -> Price:
        """Prices every token at 0: no service is asked."""
        return Price()

    def check_ready(self) -> None:
        """Returns at once: the truth is always ready."""

    def identity(self) -> dict[str, object]:
        """Returns the world's digest."""
        return {"grader": "truth", "grammar": self.grammar.digest()}

    def count_tokens(self, call: GradingCall) -> int | None:
        """None are read."""
        return 0

    def ask(self, calls: Iterable[GradingCall]) -> Iterator[tuple[GradingCall, GradingReply | GradingFailure]]:
        """Yields each call with its reply in their order; what compares no two reviews of the world is a failure."""
        for call in calls:
            yield call, self._answer(call)

    def _answer(self, call: GradingCall) -> GradingReply | GradingFailure:
        began = time.perf_counter()
        if call.compared is None or len(call.labels) != 2:
            return GradingFailure("the truth compares two reviews of the testbed, and this call does not: name another")
        question, *reviews = call.compared
        try:
            topic = self.grammar.parse_prompt(question).topic
        except ValueError as problem:
            return GradingFailure(f"the truth knows no such prompt: {problem}")
        first, second = (self.grammar.true_reward(review, topic).reward for review in reviews)
        better = call.labels[0] if first > second else call.labels[1]
        logprobs = {better: 0.0} if first != second else dict.fromkeys(call.labels, math.log(0.5))
        return GradingReply(better if first != second else TIE, logprobs=logprobs, seconds=time.perf_counter() - began)
