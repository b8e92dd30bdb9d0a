"""Benchmark of the testbed: held-out prompts of the review grammar, their true reward, and the verdicts of a grader."""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from attnpo.evaluation.base import Graded, ModelAnswer, Question, Replies, match_answers, select_answered
from attnpo.evaluation.chat import GradingCall, GradingFailure, GradingReply, Price
from attnpo.evaluation.pairwise import Contest, PairwiseRules
from attnpo.lab.testbed.grammar import Grammar
from attnpo.schema import SEEDS, Message, Sampling, UserError, check_at_least, check_choice

SPLITS = ("test", "validation")
TIE = "tie"
BASELINE_STREAM = 7_919
"""Added to the seed for the baseline: with the model's own numbers an unchanged model would give its very reviews."""

# Raised by hand with every change of the code that moves the baseline's answers.
BASELINE_VERSION = "1"


@dataclass(frozen=True)
class TestbedBenchmark:
    """Reviews for held-out prompts: what they are truly worth, and how often they are better than a baseline's.

    ``baseline`` is a model folder (or hub name) whose own reviews are the rivals, drawn with the same settings from
    other random numbers, the same ones in every round. With one the scores are ``win_rate``, in percent and by the
    grader, and ``reward``, the mean true reward; without one ``reward`` is all there is, and no grader is asked.

    Reviews come through the same generation as every benchmark's: special tokens inside them are left out of the text,
    where the scores that a run takes itself (``TruthScorer``) count them as broken words.
    """

    __test__ = False  # not a test class, whatever its name says to pytest

    grammar: Grammar = field(default_factory=Grammar)
    baseline: str | None = None
    prompts: int = 384
    split: str = "test"
    sampling: Sampling = field(default_factory=lambda: Sampling(max_new_tokens=64))
    pairwise: PairwiseRules = field(default_factory=lambda: PairwiseRules("judge/testbed.txt", strip=False))

    def __post_init__(self) -> None:
        check_choice("benchmark.split", self.split, SPLITS)
        check_at_least("benchmark", 1, prompts=self.prompts)

    @property
    def name(self) -> str:
        """Returns the benchmark's name."""
        return "testbed"

    @property
    def scores(self) -> tuple[str, ...]:
        """Returns what is given: a win rate needs a baseline."""
        return ("reward",) if self.baseline is None else ("win_rate", "reward")

    def questions(self) -> Sequence[Question]:
        """Returns the split's prompts in the grammar's order, named by their text, with their topic."""
        found = self.grammar.prompts(self.split)[: self.prompts]
        if not found:
            raise UserError(
                f"benchmark.split={self.split}: the grammar holds no prompt out for it; raise "
                f"benchmark.grammar.{self.split}_share"
            )
        return [Question(prompt.text, (prompt.text,), category=prompt.topic) for prompt in found]

    def versions(self) -> dict[str, object]:
        """Returns the world, the prompts, the wording, and what decides the baseline's reviews."""
        from attnpo.models.loading import weights_fingerprint

        asked: dict[str, object] = {"grammar": self.grammar.digest(), "split": self.split, "prompts": self.prompts}
        if self.baseline is not None:
            rival = {"weights": weights_fingerprint(self.baseline), "seed": self._rival.seed, "code": BASELINE_VERSION}
            asked |= {"baseline": rival, "pairwise": self.pairwise.versions()}
        return asked

    @property
    def _rival(self) -> Sampling:
        return replace(self.sampling, seed=(self.sampling.seed + BASELINE_STREAM) % SEEDS)

    def baseline_answers(self) -> Mapping[str, str]:
        """Returns the baseline's review for each prompt, computed once on the CPU in float32."""
        return self._answers

    @cached_property
    def _answers(self) -> Mapping[str, str]:
        from attnpo.models.described import token_rows
        from attnpo.models.generate import make_chat_generator
        from attnpo.models.loading import load_model, load_text_config, load_tokenizer
        from attnpo.text.chat import ChatFormat

        if self.baseline is None:
            return {}
        try:
            chat = ChatFormat(load_tokenizer(self.baseline), rows=token_rows(load_text_config(self.baseline, None)))
            generator = make_chat_generator(load_model(self.baseline), chat, batch_size=256)
        except UserError as problem:
            raise UserError(f"benchmark.baseline={self.baseline}: {problem}") from problem
        questions = self.questions()
        prompts = [[Message(role="user", content=question.turns[0])] for question in questions]
        texts = generator.generate(prompts, self._rival)
        return {question.id: text for question, text in zip(questions, texts, strict=True)}

    def calls(self, answers: Mapping[str, ModelAnswer], round_: int) -> Sequence[GradingCall]:
        """Returns two comparisons per prompt, one per order, with a baseline; none without."""
        questions = self.questions()
        given = match_answers(self.name, questions, answers)
        if self.baseline is None:
            return []
        rivals = self.baseline_answers()
        contests = [
            Contest(question.id, question.turns[0], answer.turns[0], rivals[question.id])
            for question, answer in zip(questions, given, strict=True)
        ]
        return self.pairwise.calls(self.name, round_, contests)

    def grade(self, answers: Mapping[str, ModelAnswer], replies: Replies) -> Graded:
        """Returns the scores of one round's answers."""
        asked = select_answered(self.questions(), answers)
        reviews = ((question, answers[question.id].turns[0]) for question in asked)
        rewards = np.array([self.grammar.true_reward(text, question.category).reward for question, text in reviews])
        items = tuple(question.id for question in asked)
        found = self.pairwise.preferences(items if self.baseline is not None else (), replies)
        scores = {"win_rate": found.win_rate, "reward": float(rewards.mean())}
        values = {"win_rate": found.percent, "reward": rewards}
        weights = {"win_rate": found.weights, "reward": np.ones(len(items))}
        return Graded(
            questions=items,
            scores={name: scores[name] for name in self.scores},
            values={name: values[name] for name in self.scores},
            weights={name: weights[name] for name in self.scores},
            counts=found.counts,
        )


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
        """Returns 0: none are read."""
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
