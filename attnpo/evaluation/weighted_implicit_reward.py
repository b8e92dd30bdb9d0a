"""Implicit-reward accuracy of a run's policy: what its folder fills in, and its token weights on unseen pairs."""

import logging
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from attnpo.data.base import PairReader, PairSet
from attnpo.data.rules import LengthRules
from attnpo.evaluation.base import Benchmark, Measure, Measured, Subject
from attnpo.evaluation.implicit_reward import GAIN, OF_RUN, WEIGHTED, ImplicitReward
from attnpo.evaluation.pair_set import KEY, UnseenPairs
from attnpo.models.spec import AUTO
from attnpo.run.folders import run_of, saved_config
from attnpo.run.identity import identity_of
from attnpo.run.run_config import RunConfig
from attnpo.schema import UserError
from attnpo.weights.base import OnlineSource

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ValidationPairs(UnseenPairs):
    """Validation pairs of a run, as its own ``source`` gives them."""

    source: PairReader

    def load(self) -> PairSet:
        """Reads the run's validation split. UserError as training raises it."""
        return self.source.load("val")


def fill_from_run(measure: Benchmark | Measure, model: str, overrides: tuple[str, ...]) -> Benchmark | Measure:
    """Fills in an implicit reward's reference, pairs and lengths from the run whose ``best/`` or ``last/`` is measured.

    For any other ``model`` from the run that its token weights are of, if one is named. What ``overrides`` name is
    kept; one line says what was taken. Any other benchmark stays as it is. UserError where something is auto and the
    run's configuration cannot be read.
    """
    folder = run_of(model)
    if isinstance(measure, WeightedImplicitReward) and measure.run != AUTO:
        folder = folder or Path(measure.run)
    if not isinstance(measure, ImplicitReward) or folder is None:
        return measure
    try:
        run = saved_config(folder, f"model.path={model}")
    except UserError as problem:
        if AUTO in (measure.reference, measure.data.path):
            raise
        log.warning("%slengths are not taken from the run: %s", KEY, problem)
        return measure
    told = []
    if isinstance(measure, WeightedImplicitReward) and measure.run == AUTO:
        measure = replace(measure, run=str(folder))
        told.append("token weights")
    if measure.reference == AUTO:
        revision = measure.reference_revision or run.model.revision
        measure = replace(measure, reference=run.model.path, reference_revision=revision)
        told.append(f"reference {run.model.path}")
        if run.model.quantize is not None:
            log.warning(
                "%sreference=%s is read whole, and the run trained on it in 4 bits (model.quantize=%s): the reward "
                "holds what that changed, too",
                *(KEY, run.model.path, run.model.quantize),
            )
    if measure.data.path == AUTO:
        place = str(getattr(run.data, "place", "its data"))
        measure = replace(measure, data=ValidationPairs(place, group=measure.data.group, source=run.data))
        told.append(f"validation pairs of {place}")
    lengths = lengths_of(run.lengths, measure.lengths, overrides)
    if lengths != measure.lengths:
        rules = {key: getattr(value, "value", value) for key, value in asdict(lengths).items()}
        told.append("lengths " + ", ".join(f"{key}={value}" for key, value in rules.items()))
    if told:
        log.info("%s takes from the run in %s: %s", measure.name, folder, "; ".join(told))
    return replace(measure, lengths=lengths)


def lengths_of(run: LengthRules, asked: LengthRules, overrides: tuple[str, ...]) -> LengthRules:
    """Returns the run's length rules, but those that the command names, or that a benchmark of one's own sets."""
    named = [override.partition("=")[0].lstrip("+") for override in overrides]
    default, taken = asdict(LengthRules()), asdict(run)
    own = {
        key: value
        for key, value in asdict(asked).items()
        if value != default[key] or f"{KEY}lengths.{key}" in named or f"{KEY}lengths" in named
    }
    return LengthRules(**{**taken, **own})


@dataclass(frozen=True)
class WeightedImplicitReward(ImplicitReward):
    """The plain measure, and ``accuracy_weighted``: the order by ``sum_t f_t (log pi - log ref)_t``.

    ``run`` is the folder of the run whose weights are taken (as a rule, of the one that trained the model): its source,
    judge and transforms weigh the pairs as they weighed its training pairs, and f is what its objective multiplies beta
    by. The run's lengths hold instead of ``lengths``.
    """

    run: str = AUTO

    @property
    def scores(self) -> tuple[str, ...]:
        """Returns the weighted accuracy, which counts, those of the plain measure, and what the weighted one is ahead
        by.
        """
        return (WEIGHTED, *super().scores, f"{GAIN}_weighted")

    def versions(self) -> dict[str, object]:
        """Returns those of the plain measure, and the settings of the run that touch weights."""
        cfg = self._config()
        return {**ImplicitReward.versions(replace_lengths(self, cfg.lengths)), "weights": identity_of(cfg).inputs}

    def measure(self, subject: Subject) -> Measured:
        """Accuracies of the plain, the length-normalised and the token-weighted reward, and of each model alone.

        Raises:
            UserError: as the plain measure does; there is no run in the folder, its objective reads no token weights,
                its source computes them in training alone, or its data, model or judge are no longer where they were.
        """
        from attnpo.run.inputs import read_inputs
        from attnpo.run.other_pairs import reward_factors
        from attnpo.run.resolve import resolve

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
        cfg, base, readers, _ = resolve(cfg)
        inputs = read_inputs(cfg, base, readers)
        factors = partial(reward_factors, cfg.objective, inputs.recipe, inputs.weighed, readers)
        return replace_lengths(self, cfg.lengths).measure_with(subject, factors)

    def _config(self) -> RunConfig:
        if self.run == AUTO:
            raise UserError(f"{KEY}run: {OF_RUN}; give {KEY}run=outputs/RUN, the run whose token weights are taken")
        return saved_config(Path(self.run), f"{KEY}run={self.run}")


def replace_lengths(measure: WeightedImplicitReward, lengths: LengthRules) -> WeightedImplicitReward:
    """Returns the measure with the length rules of its run; logs where they differ."""
    if asdict(measure.lengths) != asdict(lengths):
        log.info("%slengths: those of %s hold, since its weights are on tokens that they cut", KEY, measure.run)
    return replace(measure, lengths=lengths)
