"""Scores of a policy against the true reward on held-out prompts, beside the base's own samples."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

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
_BASE_STREAM = 7_919  # seed offset: the base draws its own random numbers, so wins are between independent samples


@dataclass(frozen=True)
class PolicyScore:
    """True score of a policy's samples.

    `numbers`: means over prompts and samples by the names in NUMBERS (`length` in tokens without the end token, `kl` in
    nats per sequence, `broken` the share of clauses that are broken, `ended` the share of answers that ended). The
    arrays keep prompt by sample values for paired statistics; equal prompts and seed give equal rows.
    """

    numbers: dict[str, float]
    rewards: Float[np.ndarray, "prompts samples"]
    base_rewards: Float[np.ndarray, "prompts samples"]
    kls: Float[np.ndarray, "prompts samples"]
    prompts: tuple[str, ...]
    answers: tuple[str, ...]

    def scalars(self) -> dict[str, float]:
        """Returns the numbers by name, for tables and loggers."""
        return self.numbers


@dataclass(frozen=True)
class TruthScorer:
    """Samples answers for held-out prompts and scores them with the grammar's true reward.

    prompts: how many prompts of the split to use; samples_per_prompt: answers per prompt. One seed gives every
    policy the same random numbers, which makes differences between policies less noisy than the scores.
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
        """Returns the prompts scored: the first `prompts` of the split, or all of it (logged) if it has fewer."""
        if split not in ("validation", "test"):
            raise ValueError(f"scores are taken on held-out prompts: split must be validation or test, got {split!r}")
        available = self.grammar.prompts(split)
        if len(available) < self.prompts:
            logger.info("testbed scorer: the %s part has %d prompts, all used", split, len(available))
        return available[: self.prompts]

    def base_answers(
        self, base: "PreTrainedModel", tokenizer: "PreTrainedTokenizerFast", *, split: str = "test"
    ) -> "Answers":
        """Returns the base's samples for the split; compute once and pass to every `score` of a study."""
        return self._sample(base, tokenizer, self._repeat_prompts(split), self.seed + _BASE_STREAM)

    def score(
        self,
        policy: "PreTrainedModel",
        base: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerFast",
        *,
        split: str = "test",
        base_answers: "Answers | None" = None,
    ) -> PolicyScore:
        """Returns the policy's score on the split; `base_answers` must come from this scorer and split."""
        from attnpo.lab.testbed.sampling import sequence_kl  # transformers takes seconds to import

        prompts = self._repeat_prompts(split)
        rivals = base_answers or self.base_answers(base, tokenizer, split=split)
        if len(rivals.texts) != len(prompts):
            raise ValueError(
                f"base_answers holds {len(rivals.texts)} answers where {len(prompts)} are scored; "
                "take them from this scorer's base_answers() for the same split"
            )
        answers = self._sample(policy, tokenizer, prompts, self.seed)
        scored, rivals_scored = (
            [self.grammar.true_reward(text, prompt.topic) for text, prompt in zip(of.texts, prompts, strict=True)]
            for of in (answers, rivals)
        )
        rewards, rival_rewards = (np.array([score.reward for score in of]) for of in (scored, rivals_scored))
        kls = sequence_kl(policy, base, tokenizer, [prompt.text for prompt in prompts], answers.texts).numpy()
        shape = (-1, self.samples_per_prompt)
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
        """Returns whether each token of a response decides its true reward; ``importance.decisive``."""
        from attnpo.lab.testbed.importance import decisive  # brings torch

        return decisive(pair, side, places, self.grammar)

    def is_flipped(self, pair: "PreferencePair") -> bool:
        """Returns whether the rejected response is truly the better one."""
        from attnpo.lab.testbed.importance import is_flipped  # brings torch

        return is_flipped(pair, self.grammar)

    def _repeat_prompts(self, split: str) -> list[ReviewPrompt]:
        return [prompt for prompt in self.prompt_set(split) for _ in range(self.samples_per_prompt)]

    def _sample(
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
    """Returns the share of all clauses that are broken."""
    return sum(score.broken for score in scored) / max(1, sum(score.clauses for score in scored))


def win_rate(rewards: Float[np.ndarray, " rows"], rivals: Float[np.ndarray, " rows"]) -> float:
    """Returns the share of rows where the first reward is larger; ties count one half."""
    return float(np.mean((rewards > rivals) + 0.5 * (rewards == rivals)))
