"""Implicit-reward accuracy with the token weights of a run: what its objective multiplied beta by, on unseen pairs."""

import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from attnpo.config import MISSING
from attnpo.evaluation.base import Measured, Subject
from attnpo.evaluation.implicit_reward import GAIN, WEIGHTED, ImplicitReward
from attnpo.evaluation.pair_set import KEY
from attnpo.runs.folders import saved_config
from attnpo.runs.identity import inputs_of
from attnpo.runs.run_config import RunConfig
from attnpo.schema import UserError
from attnpo.weights.base import OnlineSource

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WeightedImplicitReward(ImplicitReward):
    """The plain measure, and ``accuracy_weighted``: the order by ``sum_t f_t (log pi - log ref)_t``.

    ``run`` is the folder of the run whose weights are taken (as a rule, of the one that trained the model): its source,
    judge and transforms weigh the pairs as they weighed its training pairs, and f is what its objective multiplies beta
    by. The run's lengths hold instead of ``lengths``.
    """

    run: str = MISSING

    @property
    def scores(self) -> tuple[str, ...]:
        """The weighted accuracy, which counts, those of the plain measure, and what the weighted one is ahead by."""
        return (WEIGHTED, *super().scores, f"{GAIN}_weighted")

    def versions(self) -> dict[str, object]:
        """Those of the plain measure, and the settings of the run that touch weights."""
        cfg = self._config()
        return {**replace_lengths(self, cfg)._plain_versions(), "weights": inputs_of(cfg)}

    def _plain_versions(self) -> dict[str, object]:
        return super().versions()

    def measure(self, subject: Subject) -> Measured:
        """Accuracies of the plain, the length-normalised and the token-weighted reward, and of each model alone.

        Raises:
            UserError: as the plain measure does; there is no run in the folder, its objective reads no token weights,
                its source computes them in training alone, or its data, model or judge are no longer where they were.
        """
        from attnpo.runs.inputs import make_inputs
        from attnpo.runs.other_pairs import reward_factors

        if self.reference is None:
            raise UserError(
                f"{KEY}reference=null: there is no log-ratio to weigh; name the model training started from"
            )
        cfg = self._config()
        if "token_weights" not in cfg.objective.requires or isinstance(cfg.weights, OnlineSource):
            what = type(cfg.weights).__name__ if "token_weights" in cfg.objective.requires else "its objective"
            raise UserError(
                f"{KEY}run={self.run}: {what} leaves no token weights to take; name a run with weights that are read "
                "before training, or set benchmark=implicit_reward"
            )
        inputs = make_inputs(cfg)
        return replace_lengths(self, cfg).measured(subject, lambda pairs: reward_factors(inputs, pairs))

    def _config(self) -> RunConfig:
        if self.run == MISSING:
            raise UserError(f"{KEY}run: required; give {KEY}run=outputs/RUN, the run whose token weights are taken")
        return saved_config(Path(self.run), f"{KEY}run={self.run}")


def replace_lengths(measure: WeightedImplicitReward, cfg: RunConfig) -> WeightedImplicitReward:
    """The measure with the run's length rules; logs where they differ."""
    if asdict(measure.lengths) != asdict(cfg.lengths):
        log.info("%slengths: those of %s hold, since its weights are on tokens that they cut", KEY, measure.run)
    return replace(measure, lengths=cfg.lengths)
