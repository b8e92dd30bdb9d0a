"""The testbed as a benchmark: held-out prompts of the review grammar, graded by its truth or by a judge."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from jaxtyping import Float

from attnpo.evaluation.answers.questions import ModelAnswer, Question
from attnpo.evaluation.base import Graded, Replies
from attnpo.evaluation.grading.base import GradingCall
from attnpo.evaluation.matching import matched
from attnpo.evaluation.pairwise import MODEL_FIRST, MODEL_SECOND, Contest, PairwiseRules, mean_of, there
from attnpo.lab.testbed.grammar import Grammar
from attnpo.lab.testbed.truth_grader import rewards_in
from attnpo.schema import SEEDS, Message, Sampling, UserError, check_choice, check_least

SPLITS = ("test", "validation")
ANSWER = "answer"
BASELINE_STREAM = 7_919
"""Added to the seed for the baseline: with the model's own numbers an unchanged model would give its very reviews."""

NO_REPLY = "reviews without a reply"
NO_REWARD = "replies without a true reward"

# Raised by hand with every change of the code that moves the baseline's answers.
BASELINE_VERSION = "1"


@dataclass(frozen=True)
class TestbedBenchmark:
    """Reviews for held-out prompts: what they are truly worth, and how often they are better than a baseline's.

    ``baseline`` is a model folder (or hub name) whose own reviews are the rivals, drawn with the same settings from
    other random numbers, the same ones in every round. With one the scores are ``win_rate`` (percent) and, of the
    truth alone, ``reward``, the mean true reward; without one ``reward`` is all there is.

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
        check_least("benchmark", 1, prompts=self.prompts)

    @property
    def name(self) -> str:
        """Returns the benchmark's name."""
        return "testbed"

    @property
    def scores(self) -> tuple[str, ...]:
        """Returns what is given: a win rate needs a baseline."""
        return ("reward",) if self.baseline is None else ("win_rate", "reward")

    def questions(self) -> Sequence[Question]:
        """Returns the prompts of the split in the grammar's order, named by their text, with their topic as
        category.
        """
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
        if self.baseline is None:
            return asked
        rival = {"weights": weights_fingerprint(self.baseline), "seed": self._rival.seed, "code": BASELINE_VERSION}
        return {**asked, "baseline": rival, "pairwise": self.pairwise.versions()}

    @property
    def _rival(self) -> Sampling:
        return replace(self.sampling, seed=(self.sampling.seed + BASELINE_STREAM) % SEEDS)

    def baseline_answers(self) -> Mapping[str, str]:
        """Returns the baseline's review for each prompt, computed on the CPU in float32 and kept while this object
        lives.
        """
        return self._baseline_answers

    @cached_property
    def _baseline_answers(self) -> Mapping[str, str]:
        from attnpo.models.described import token_rows
        from attnpo.models.generate import chat_generator
        from attnpo.models.loading import load_model, load_tokenizer, text_config
        from attnpo.text.chat import ChatFormat

        if self.baseline is None:
            return {}
        try:
            chat = ChatFormat(load_tokenizer(self.baseline), rows=token_rows(text_config(self.baseline, None)))
            generator = chat_generator(load_model(self.baseline), chat, batch_size=256)
        except UserError as problem:
            raise UserError(f"benchmark.baseline={self.baseline}: {problem}") from problem
        questions = self.questions()
        prompts = [[Message(role="user", content=question.turns[0])] for question in questions]
        texts = generator.generate(prompts, self._rival)
        return {question.id: text for question, text in zip(questions, texts, strict=True)}

    def calls(self, answers: Mapping[str, ModelAnswer], round_: int) -> Sequence[GradingCall]:
        """With a baseline two comparisons per prompt, one per order; else one call with prompt and review as turns."""
        questions = self.questions()
        given = matched(self.name, questions, answers)
        if self.baseline is None:
            return [self._alone(question, answer, round_) for question, answer in zip(questions, given, strict=True)]
        rivals = self.baseline_answers()
        contests = [
            Contest(question.id, question.turns[0], answer.turns[0], rivals[question.id])
            for question, answer in zip(questions, given, strict=True)
        ]
        return self.pairwise.calls(self.name, round_, contests)

    def _alone(self, question: Question, answer: ModelAnswer, round_: int) -> GradingCall:
        turns = (Message(role="user", content=question.turns[0]), Message(role="assistant", content=answer.turns[0]))
        return GradingCall(self.name, question.id, ANSWER, round_, turns, max_tokens=16)

    def grade(self, answers: Mapping[str, ModelAnswer], replies: Replies) -> Graded:
        """Returns the scores of one round's answers; ``reward`` is left out with a judge, whose replies hold none."""
        items = tuple(question.id for question in self.questions() if question.id in answers)
        rewards = self._rewards(items, replies)
        counts: Counter[str] = Counter()
        values, weights = {"reward": rewards}, {"reward": there(rewards)}
        scores = {"reward": mean_of(rewards)}
        if self.baseline is None:
            replied = {call.item for call in replies}
            if replied and not there(rewards).any():
                raise UserError(
                    "benchmark=testbed: no reply holds a true reward. Without a baseline only the truth can grade: "
                    "give grader=truth, or benchmark.baseline=BASE for comparisons that a judge can grade"
                )
            counts[NO_REPLY] = sum(item not in replied for item in items)
            counts[NO_REWARD] = int(np.isnan(rewards).sum()) - counts[NO_REPLY]
        else:
            found = self.pairwise.preferences(items, replies)
            values["win_rate"], weights["win_rate"] = found.percent, found.weights
            scores["win_rate"] = found.win_rate
            counts.update(found.counts)
        judged = self.baseline is not None and bool(replies) and not there(rewards).any()
        named = ("win_rate",) if judged else self.scores
        return Graded(
            questions=items,
            scores={name: scores[name] for name in named},
            values={name: values[name] for name in named},
            weights={name: weights[name] for name in named},
            counts={reason: count for reason, count in counts.items() if count},
        )

    def _rewards(self, items: Sequence[str], replies: Replies) -> Float[np.ndarray, " items"]:
        """Returns the true reward of each prompt's review, from whichever of its calls has one; NaN where none has."""
        place = {ANSWER: 0, MODEL_FIRST: 0, MODEL_SECOND: 1}
        found: dict[str, float] = {}
        for call, reply in replies.items():
            rewards = rewards_in(reply.text)
            if rewards is not None and call.part in place and place[call.part] < len(rewards):
                found[call.item] = rewards[place[call.part]]
        return np.array([found.get(item, math.nan) for item in items])
