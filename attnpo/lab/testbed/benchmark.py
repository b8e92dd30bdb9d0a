"""Testbed benchmark: true reward on held-out prompts of the review grammar, and win rate as judged by a grader."""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from attnpo.evaluation.base import ModelAnswer, Question, Replies, RoundScores, match_answers, select_answered_questions
from attnpo.evaluation.chat import GradingCall, GradingFailure, GradingReply, Price
from attnpo.evaluation.pairwise import Comparison, PairwiseRules
from attnpo.lab.testbed.grammar import Grammar
from attnpo.schema import SEEDS, Message, Sampling, UserError, check_at_least, check_choice

SPLITS = ("test", "validation")
TIE = "tie"
BASELINE_STREAM = 7_919
"""Added to the seed for the baseline; with equal seeds, an unchanged model would produce identical reviews."""

# Increase with every code change that changes the baseline's answers.
BASELINE_VERSION = "1"


@dataclass(frozen=True)
class TestbedBenchmark:
    """Benchmark of reviews for held-out prompts: their true reward, and their win rate against a baseline.

    ``baseline``: folder or hub name of the model to compare against. The baseline's reviews are sampled with the same
    settings as the model's, but with different random numbers, which stay the same in all rounds. With a baseline, the
    scores are ``win_rate`` (percent, by the grader) and ``reward`` (mean true reward). Without one, ``reward`` is the
    only score and no grader is used.

    As in all benchmarks, special tokens are removed from generated reviews. A run's own scores (``TruthScorer``) count
    such tokens as broken words instead.
    """

    __test__ = False  # keeps pytest from collecting it as a test class

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
        """Returns the name "testbed"."""
        return "testbed"

    @property
    def scores(self) -> tuple[str, ...]:
        """Returns the names of the scores; the win rate needs a baseline."""
        return ("reward",) if self.baseline is None else ("win_rate", "reward")

    def questions(self) -> Sequence[Question]:
        """Returns the split's prompts in the grammar's order, with the prompt text as id and the topic as category.

        Raises:
            UserError: the split has no prompts.
        """
        found = self.grammar.prompts(self.split)[: self.prompts]
        if not found:
            raise UserError(
                f"benchmark.split={self.split}: the grammar has no prompts for this split; increase "
                f"benchmark.grammar.{self.split}_share"
            )
        return [Question(prompt.text, (prompt.text,), category=prompt.topic) for prompt in found]

    def fingerprint(self) -> dict[str, object]:
        """Returns the grammar, the prompts, the comparison rules, and the weights and seed of the baseline."""
        from attnpo.models.loading import weights_fingerprint

        asked: dict[str, object] = {"grammar": self.grammar.digest(), "split": self.split, "prompts": self.prompts}
        if self.baseline is not None:
            rival = {
                "weights": weights_fingerprint(self.baseline),
                "seed": self._baseline_sampling.seed,
                "code": BASELINE_VERSION,
            }
            asked |= {"baseline": rival, "pairwise": self.pairwise.fingerprint()}
        return asked

    @property
    def _baseline_sampling(self) -> Sampling:
        return replace(self.sampling, seed=(self.sampling.seed + BASELINE_STREAM) % SEEDS)

    def baseline_answers(self) -> Mapping[str, str]:
        """Returns the baseline's review for each prompt, generated once on the CPU in float32."""
        return self._baseline_answers

    @cached_property
    def _baseline_answers(self) -> Mapping[str, str]:
        from attnpo.models.description import config_vocabulary_size
        from attnpo.models.generate import make_chat_generator
        from attnpo.models.loading import load_model, load_text_config, load_tokenizer
        from attnpo.text.chat import ChatFormat

        if self.baseline is None:
            return {}
        try:
            chat = ChatFormat(
                load_tokenizer(self.baseline), rows=config_vocabulary_size(load_text_config(self.baseline, None))
            )
            generator = make_chat_generator(load_model(self.baseline), chat, batch_size=256)
        except UserError as problem:
            raise UserError(f"benchmark.baseline={self.baseline}: {problem}") from problem
        questions = self.questions()
        prompts = [[Message(role="user", content=question.turns[0])] for question in questions]
        texts = generator.generate(prompts, self._baseline_sampling)
        return {question.id: text for question, text in zip(questions, texts, strict=True)}

    def grading_calls(self, answers: Mapping[str, ModelAnswer], round_: int) -> Sequence[GradingCall]:
        """Returns two comparisons per prompt, one for each order; none if there is no baseline."""
        questions = self.questions()
        given = match_answers(self.name, questions, answers)
        if self.baseline is None:
            return []
        rivals = self.baseline_answers()
        contests = [
            Comparison(question.id, question.turns[0], answer.turns[0], rivals[question.id])
            for question, answer in zip(questions, given, strict=True)
        ]
        return self.pairwise.grading_calls(self.name, round_, contests)

    def grade(self, answers: Mapping[str, ModelAnswer], replies: Replies) -> RoundScores:
        """Computes the scores of one round's answers."""
        asked = select_answered_questions(self.questions(), answers)
        reviews = ((question, answers[question.id].turns[0]) for question in asked)
        rewards = np.array([self.grammar.true_reward(text, question.category).reward for question, text in reviews])
        items = tuple(question.id for question in asked)
        found = self.pairwise.preferences(items if self.baseline is not None else (), replies)
        scores = {"win_rate": found.win_rate, "reward": float(rewards.mean())}
        values = {"win_rate": found.percent, "reward": rewards}
        weights = {"win_rate": found.weights, "reward": np.ones(len(items))}
        return RoundScores(
            questions=items,
            scores={name: scores[name] for name in self.scores},
            values={name: values[name] for name in self.scores},
            weights={name: weights[name] for name in self.scores},
            counts=found.counts,
        )


@dataclass(frozen=True)
class TruthGrader:
    """Grader that compares two testbed reviews by true reward; ``grammar`` must be the benchmark's.

    A reply has log-probability 0 for the label of the better review, or log 1/2 for both labels in a tie.
    """

    grammar: Grammar = field(default_factory=Grammar)

    @property
    def price(self) -> Price:
        """Returns a price of 0, since no service is used."""
        return Price()

    def check_ready(self) -> None:
        """Does nothing, since this grader is always ready."""

    def identity(self) -> dict[str, object]:
        """Returns the grammar's digest."""
        return {"grader": "truth", "grammar": self.grammar.digest()}

    def count_tokens(self, call: GradingCall) -> int | None:
        """Returns 0, since no tokens are used."""
        return 0

    def ask(self, calls: Iterable[GradingCall]) -> Iterator[tuple[GradingCall, GradingReply | GradingFailure]]:
        """Yields each call with its reply in order; calls that do not compare two testbed reviews fail."""
        for call in calls:
            yield call, self._compare_reviews(call)

    def _compare_reviews(self, call: GradingCall) -> GradingReply | GradingFailure:
        began = time.perf_counter()
        if call.compared is None or len(call.labels) != 2:
            return GradingFailure(
                "grader=truth can only compare two testbed reviews, unlike this call: use another grader"
            )
        question, *reviews = call.compared
        try:
            topic = self.grammar.parse_prompt(question).topic
        except ValueError as problem:
            return GradingFailure(f"grader=truth does not know this prompt: {problem}")
        first, second = (self.grammar.true_reward(review, topic).reward for review in reviews)
        better = call.labels[0] if first > second else call.labels[1]
        logprobs = {better: 0.0} if first != second else dict.fromkeys(call.labels, math.log(0.5))
        return GradingReply(better if first != second else TIE, logprobs=logprobs, seconds=time.perf_counter() - began)
