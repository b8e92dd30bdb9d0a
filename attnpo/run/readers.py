"""Readers of a run's weights, and the weights themselves."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from attnpo.data import weighing
from attnpo.data.prepare import EncodedSet
from attnpo.data.rules import LengthRules
from attnpo.data.scoring import RunScorers
from attnpo.data.weighing import Weighed
from attnpo.judge.base import WeightReader
from attnpo.judge.judge import RunJudge
from attnpo.judge.settings import Judge
from attnpo.models.described import require_exact
from attnpo.models.loading import text_config
from attnpo.objectives.base import LengthFrom
from attnpo.run.base import BaseModel
from attnpo.run.messages import log_once
from attnpo.schema import UserError
from attnpo.text.alignment import AlignMethod
from attnpo.weights.base import ScoredSource, WeightSource
from attnpo.weights.readers import RunReward, RunVerbalizer
from attnpo.weights.sources.reward_attention import RewardAttention
from attnpo.weights.verbalizer_settings import Verbalizer


@dataclass(frozen=True)
class Readers:
    """What token weights can be read with in a run, each described cheaply and loaded when it is asked.

    ``length_from``: whose tokens the objective's |y| counts; None where it counts none. ``command``: the command
    that fills the store before a job of several processes.
    """

    base: BaseModel
    judge: Judge
    verbalizer: Verbalizer
    lengths: LengthRules
    align: AlignMethod
    length_from: LengthFrom | None
    command: str

    @property
    def refill(self) -> str:
        """Returns how the store is filled before a job of several processes."""
        return f"in one process or several: {self.command}"

    def make(self, source: WeightSource) -> WeightReader | None:
        """Returns what ``source`` is read with; None when it captures nothing. UserError for what is absent."""
        kinds: Mapping[str, Callable[[], WeightReader]] = {
            "judge": self.make_judge,
            "generator": lambda: RunVerbalizer(self.verbalizer, self.base.spec, self.base.chat, self.base.store),
            "scorers": lambda: self._make_scorers(source),
            "reward": lambda: self._make_reward(source),
        }
        wanted = sorted(source.requires)
        if not wanted:
            return None
        if len(wanted) > 1 or wanted[0] not in kinds:
            raise UserError(
                f"weights {type(source).__name__} need {' and '.join(wanted)}; a run has one of {', '.join(kinds)}: "
                "choose other weights"
            )
        return kinds[wanted[0]]()

    def make_judge(self) -> RunJudge:
        """Returns the run's judge, not loaded. UserError when its tokens cannot be matched with those of training."""
        judge = RunJudge(self.judge, self.base.spec, self.base.chat, self.base.store)
        key, length = "judge.max_length", judge.settings.max_length
        require_exact(text_config(judge.path, judge.revision), judge.path, key, length)
        if (most := judge.prompts.rules.max_length) < length:
            log_once([f"{key}={length}: prompts are cut to the {most} positions that the judge has"])
        if judge.settings.path is not None:
            self._check_vocabulary(judge.tokenizer, judge.path, "judge.path")
        return judge

    def weigh(
        self,
        source: WeightSource,
        encoded: Mapping[str, EncodedSet],
        *,
        shard: tuple[int, int] | None = None,
        every_row: bool = False,
    ) -> Weighed:
        """Returns the weights of ``source`` for the pairs of ``encoded``, by ``attnpo.data.weighing.weigh``.

        A layer must be known already (``auto_layer.settle``).
        """
        return weighing.weigh(
            source,
            self.make(source),
            self.base.store,
            encoded,
            self.base.device,
            shard=shard,
            every_row=every_row,
            refill=self.refill,
        )

    def _make_scorers(self, source: WeightSource) -> RunScorers:
        if not isinstance(source, ScoredSource):
            raise UserError(
                f"weights {type(source).__name__} require scorers and name none; give it a property `scorers`"
            )
        return RunScorers(source, self.base.spec, self.base.chat, self.lengths)

    def _make_reward(self, source: WeightSource) -> RunReward:
        if not isinstance(source, RewardAttention):
            raise UserError(
                f"weights {type(source).__name__} need a reward model and name none: set weights=reward_attention"
            )
        reward = RunReward(source, self.base.spec.fallback_template)
        require_exact(text_config(reward.path, reward.revision), reward.path, "weights.max_length", source.max_length)
        self._check_vocabulary(reward.tokenizer, reward.path, "weights.path")
        return reward

    def _check_vocabulary(self, tokenizer: PreTrainedTokenizerBase, path: str, key: str) -> None:
        """Refuses to match tokens of two vocabularies by their ids, warns where their count is the scale."""
        own = self.base.spec.path
        if tokenizer.get_vocab() == self.base.tokenizer.get_vocab():
            return
        if self.align is AlignMethod.LEVENSHTEIN:
            raise UserError(
                f"{key}={path} has another vocabulary than {own}: token ids cannot be matched; set "
                "align.method=characters (and objective.length_from=train)"
            )
        if self.length_from is LengthFrom.SOURCE:
            warning = (
                f"objective.length_from=source: |y| counts the tokens of {path}, another vocabulary than that of {own}"
                ", so the scale differs from training tokens; objective.length_from=train counts those"
            )
            log_once([warning], logging.WARNING)
