"""Scores a policy's samples on held-out prompts by their true reward, compared with the base model's samples."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from attnpo.evaluation.intervals import MeanSquares, smallest_effect
from attnpo.lab.testbed.grammar import Grammar, ReviewPrompt, ReviewScore

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from attnpo.lab.testbed.sampling import Answers
    from attnpo.schema import PreferencePair

logger = logging.getLogger(__name__)

NUMBERS = (
    *("reward", "win_rate", "kl", "length", "polarity", "broken", "ended"),
    *("base_reward", "base_length", "base_broken"),
)
SPREADS = (0.03, 0.10, 0.60)
"""Standard deviations of reward differences from DPO: between seeds, between prompts, and residual for one response.

Measured at KL 0.5 and 1 in this project's testbed studies.
"""
_BASE_STREAM = 7_919  # seed offset for the base, so that win rates compare independent samples


@dataclass(frozen=True)
class PolicyScore:
    """True scores of a policy's samples.

    `numbers`: means over prompts and samples, named as in NUMBERS (`length` in tokens without the end token, `kl` in
    nats per sequence, `broken` as a share of clauses, `ended` as a share of responses). The arrays contain one value
    per prompt and sample, for paired statistics; rows of two policies match if both were scored with the same prompts
    and seed.
    """

    numbers: dict[str, float]
    rewards: Float[np.ndarray, "prompts samples"]
    base_rewards: Float[np.ndarray, "prompts samples"]
    kls: Float[np.ndarray, "prompts samples"]
    prompts: tuple[str, ...]
    answers: tuple[str, ...]

    def scalars(self) -> dict[str, float]:
        """Returns the mean scores by name, for tables and loggers."""
        return self.numbers


@dataclass(frozen=True)
class TruthScorer:
    """Samples responses to held-out prompts and computes their true reward.

    prompts: number of prompts of the split. samples_per_prompt: responses per test prompt; validation prompts, which
    are only used to select a grid point, get one each. For a given seed, all policies use the same random numbers, so
    their differences are less noisy than the scores themselves.
    """

    grammar: Grammar = field(default_factory=Grammar)
    prompts: int = 384
    samples_per_prompt: int = 1
    temperature: float = 1.0
    max_new_tokens: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.prompts, self.samples_per_prompt, self.max_new_tokens) < 1 or self.temperature < 0:
            raise ValueError(
                "scorer.prompts, samples_per_prompt and max_new_tokens must be >= 1 and temperature >= 0, got "
                f"{self.prompts}, {self.samples_per_prompt}, {self.max_new_tokens} and {self.temperature}"
            )

    def prompt_set(self, split: str = "test") -> tuple[ReviewPrompt, ...]:
        """Returns the first `prompts` prompts of the split, or all of them (with a log message) if there are fewer."""
        if split not in ("validation", "test"):
            raise ValueError(f"scores need held-out prompts: split must be validation or test, got {split!r}")
        available = self.grammar.prompts(split)
        if len(available) < self.prompts:
            logger.info("testbed scorer: the %s split has only %d prompts; using all", split, len(available))
        return available[: self.prompts]

    def base_answers(
        self, base: "PreTrainedModel", tokenizer: "PreTrainedTokenizerFast", *, split: str = "test"
    ) -> "Answers":
        """Samples the base model's responses for the split; all calls of `score` in a study can share them."""
        return self._sample_answers(base, tokenizer, self._repeat_prompts(split), self.seed + _BASE_STREAM)

    def score(
        self,
        policy: "PreTrainedModel",
        base: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerFast",
        *,
        split: str = "test",
        base_answers: "Answers | None" = None,
    ) -> PolicyScore:
        """Scores the policy on the split; `base_answers`, if given, must come from this scorer and split."""
        from attnpo.lab.testbed.sampling import sequence_kl  # transformers takes seconds to import

        prompts = self._repeat_prompts(split)
        rivals = base_answers or self.base_answers(base, tokenizer, split=split)
        if len(rivals.texts) != len(prompts):
            raise ValueError(
                f"base_answers has {len(rivals.texts)} answers, but {len(prompts)} are needed; compute them with "
                "base_answers() of this scorer for the same split"
            )
        answers = self._sample_answers(policy, tokenizer, prompts, self.seed)
        scored, rivals_scored = (
            [self.grammar.true_reward(text, prompt.topic) for text, prompt in zip(of.texts, prompts, strict=True)]
            for of in (answers, rivals)
        )
        rewards, rival_rewards = (np.array([score.reward for score in of]) for of in (scored, rivals_scored))
        kls = sequence_kl(policy, base, tokenizer, [prompt.text for prompt in prompts], answers.texts).numpy()
        shape = (-1, self.samples_in(split))
        numbers = (
            float(rewards.mean()),
            win_rate(rewards, rival_rewards),
            float(kls.mean()),
            float(np.mean(answers.lengths)),
            float(np.mean([score.polarity for score in scored])),
            broken_rate(scored),
            float(np.mean(answers.ended)),
            float(rival_rewards.mean()),
            float(np.mean(rivals.lengths)),
            broken_rate(rivals_scored),
        )
        return PolicyScore(
            dict(zip(NUMBERS, numbers, strict=True)),
            rewards=rewards.reshape(shape),
            base_rewards=rival_rewards.reshape(shape),
            kls=kls.reshape(shape),
            prompts=tuple(prompt.text for prompt in prompts),
            answers=answers.texts,
        )

    def mark_decisive(self, pair: "PreferencePair", side: str, places: Sequence[tuple[int, int]]) -> list[bool]:
        """Marks the tokens of a response that determine its true reward (see ``importance.mark_decisive_tokens``)."""
        from attnpo.lab.testbed.importance import mark_decisive_tokens  # imports torch

        return mark_decisive_tokens(pair, side, places, self.grammar)

    def is_flipped(self, pair: "PreferencePair") -> bool:
        """Returns whether the rejected response has the higher true reward."""
        from attnpo.lab.testbed.importance import is_flipped  # imports torch

        return is_flipped(pair, self.grammar)

    def smallest_effect(self, seeds: int) -> float:
        """Returns the smallest true reward difference that 80 % of studies with ``seeds`` seeds (at least 2) detect."""
        spreads = (*SPREADS[:2], SPREADS[2] / math.sqrt(self.samples_per_prompt))
        return smallest_effect(MeanSquares.from_spreads(spreads, seeds, self.prompts))

    def samples_in(self, split: str) -> int:
        """Returns the number of responses per prompt in a split."""
        return self.samples_per_prompt if split == "test" else 1

    def _repeat_prompts(self, split: str) -> list[ReviewPrompt]:
        return [prompt for prompt in self.prompt_set(split) for _ in range(self.samples_in(split))]

    def _sample_answers(
        self, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerFast", prompts: Sequence[ReviewPrompt], seed: int
    ) -> "Answers":
        from attnpo.lab.testbed.sampling import sample_answers

        return sample_answers(
            model,
            tokenizer,
            [prompt.text for prompt in prompts],
            seed=seed,
            temperature=self.temperature,
            max_new_tokens=self.max_new_tokens,
        )


def broken_rate(scored: Sequence[ReviewScore]) -> float:
    """Returns the share of broken clauses among all clauses."""
    return sum(score.broken for score in scored) / max(1, sum(score.clauses for score in scored))


def win_rate(rewards: Float[np.ndarray, " rows"], rivals: Float[np.ndarray, " rows"]) -> float:
    """Returns the share of rows in which the first reward is larger; ties count as one half."""
    return float(np.mean((rewards > rivals) + 0.5 * (rewards == rivals)))
