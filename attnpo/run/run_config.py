"""Typed root config with all keys of one run, and a check for keys that have no effect."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from attnpo.config.compose import MISSING, RootConfig
from attnpo.data.base import PairReader, PairSource
from attnpo.data.rules import AlignRules, BatchPlan, LengthRules
from attnpo.judge.settings import Judge, OtherJudge
from attnpo.models.spec import ModelSpec
from attnpo.models.stored_digests import CHOICES
from attnpo.objectives.base import PreferenceObjective
from attnpo.objectives.terms import AnchorOn
from attnpo.run.combinations import (
    LAYOUTS,
    is_auto_layer,
    require_pairs_per_step,
    require_reference,
    require_reference_and_packages,
    require_reward_model_fits,
    require_trainable_dtype,
    require_unsharded_policy,
    require_unsharded_quantization,
    require_usable_weights,
)
from attnpo.run.components import DriftMeasure, LayerFinder, Preparer, Truth
from attnpo.schema import BOOKKEEPING, UserError, check_choice, check_seed
from attnpo.system.locks import TIMEOUT
from attnpo.training.optimizer import Optimizer
from attnpo.training.settings import CallbackSettings, LoggerSettings, TrainerSettings
from attnpo.weights.base import WeightSource, online_statistics
from attnpo.weights.pipeline import check_trace_weighting, check_transforms
from attnpo.weights.transforms import WeightTransform
from attnpo.weights.verbalizer_settings import Verbalizer


def require_name(name: str | None) -> None:
    """Raises UserError unless ``name`` can be the name of a folder below ``output``."""
    if name is not None and (not name.strip(" ./") or ".." in Path(name).parts or Path(name).is_absolute()):
        raise UserError(f"name: expected the name of a folder below `output`, got {name!r}")
    if name is not None and not name.isprintable():
        raise UserError(f"name: expected only printable characters, got {name!r}")


def require_folder(key: str, folder: str | None) -> None:
    """Raises UserError if the value of ``key`` cannot be a folder; None selects the default."""
    if folder is not None and not (folder.strip() and folder.isprintable()):
        raise UserError(f"{key}: expected a folder path with only printable characters, got {folder!r}")


@dataclass(frozen=True)
class RunConfig(RootConfig):
    """Config of one run, with one field per key. ``configs/fit.yaml`` explains the keys."""

    trains: ClassVar[bool] = True
    """True if the command trains its model."""

    data: PairReader
    model: ModelSpec
    weights: WeightSource
    judge: Judge
    other_judge: OtherJudge = field(metadata=BOOKKEEPING)
    verbalizer: Verbalizer
    auto_layer: LayerFinder
    objective: PreferenceObjective
    optimizer: Optimizer
    trainer: TrainerSettings
    logger: LoggerSettings = field(metadata=BOOKKEEPING)
    callbacks: CallbackSettings
    lengths: LengthRules
    align: AlignRules
    batch: BatchPlan
    output: str = field(metadata=BOOKKEEPING)
    seed: int
    default_beta: float = field(metadata=BOOKKEEPING)
    reference: str
    layout: str = field(default="auto", metadata=BOOKKEEPING)
    name: str | None = field(default=None, metadata=BOOKKEEPING)
    store: str | None = field(default=None, metadata=BOOKKEEPING)
    resume: str | None = field(default=None, metadata=BOOKKEEPING)
    lock_timeout: float = field(default=TIMEOUT, metadata=BOOKKEEPING)
    digests: str = field(default=CHOICES[0], metadata=BOOKKEEPING)
    prepare: Preparer | None = None
    truth: Truth | None = None
    drift: DriftMeasure | None = None
    transforms: dict[str, WeightTransform] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_seed("seed", self.seed, self.seed_count())
        if not 0 < self.lock_timeout < math.inf:
            raise UserError(f"lock_timeout: expected a number of seconds greater than 0, got {self.lock_timeout}")
        check_choice("digests", self.digests, CHOICES)
        require_name(self.name)
        require_folder("output", self.output)
        require_folder("store", self.store)
        if self.layout not in LAYOUTS:
            raise UserError(f"layout={self.layout!r} is unknown: expected one of {', '.join(LAYOUTS)}")
        require_reference_and_packages(self.reference, self.model, self.optimizer)
        require_unsharded_quantization(self.trainer, self.model)
        self.check_combination()

    def seed_count(self) -> int:
        """Returns the number of consecutive seeds, starting at ``seed``."""
        return 1

    def default_name(self) -> str:
        """Returns the default name of a run folder, without its time stamp."""
        return "run"

    def headline(self) -> str:
        """Describes in a few words what is about to run."""
        return f"one run, setting {self.composed.choices.get('setting') or 'none'}"

    def budget(self) -> str:
        """Describes the training length."""
        trainer = self.trainer
        epochs = f"{trainer.max_epochs} epoch{'s' * (trainer.max_epochs != 1)}"
        return epochs if trainer.max_steps < 0 else f"{trainer.max_steps} optimiser steps"

    def grid_note(self) -> str:
        """Describes the grid that replaces the config's learning rate and beta; empty for a single run."""
        return ""

    def reusable_folder(self) -> str | None:
        """Returns the folder below ``output`` to reuse if no ``name`` is set; None means a new folder each time."""
        return None

    def check_combination(self) -> None:
        """Raises UserError for incompatible components."""
        require_usable_weights(self.weights, self.objective)
        require_reference(self.reference, self.objective)
        require_pairs_per_step(self.batch, self.objective)
        if self.trains:
            require_trainable_dtype(self.model, self.optimizer)
        require_unsharded_policy(self.trainer, self.objective)
        check_transforms(self.weights, list(self.transforms.values()))
        if isinstance(self.data, PairSource) and self.data.has_separate_traces:
            check_trace_weighting(self.weights)
        if self.model.reward:
            require_reward_model_fits(self.objective, self.weights, self.trainer)
            self._require_no_sampled_answers()

    def _require_no_sampled_answers(self) -> None:
        """Raises UserError if settings ask for responses from a reward model, which cannot generate them."""
        asked = {
            "truth=null": self.truth is not None,
            "drift.pairs=0": self.drift is not None and self.drift.pairs > 0,
            "callbacks.samples=0": self.callbacks.samples > 0,
        }
        given = [mend for mend, wanted in asked.items() if wanted]
        if given:
            raise UserError(f"model.reward=true trains a reward model, which cannot generate: set {' '.join(given)}")

    def groups_set_by_runs(self) -> frozenset[str]:
        """Returns the config groups that a study's runs set themselves; checks skip these groups."""
        return frozenset()

    def unused_keys(self) -> dict[str, str]:
        """Returns the keys that have no effect given the other settings, mapped to the reasons."""
        source = type(self.weights).__name__
        found: dict[str, str] = {}
        chosen = self.groups_set_by_runs()
        if "weights" not in chosen:
            if "judge" not in self.weights.requires:
                found["judge"] = f"weights are {source}, which needs no judge"
            if not is_auto_layer(getattr(self.weights, "layer", None)):
                found["auto_layer"] = "weights.layer is not auto"
            if self.weights.tokens == "train":
                found["align"] = f"weights are {source}, which are computed on the training tokens"
            if "generator" not in self.weights.requires:
                found["verbalizer"] = f"weights are {source}, which need no verbalizer"
        if "judge" not in chosen and not self.judge.other:
            found["other_judge"] = "the judge is not the setting's other judge (judge=other)"
            if self.judge.path is None:
                own = "the judge is the model itself (judge.path=null)"
                found |= {"judge.revision": own, "judge.chat_template": own}
        if "model" not in chosen and (Path(self.model.path).expanduser().is_dir() or self.model.path == MISSING):
            found["model.revision"] = "the model is a folder on this machine"
        if self.drift is not None and self.drift.pairs and self.truth is None:
            found["drift.answers"] = "answers are sampled only with a truth"
        if "objective" not in chosen:
            found |= self._unread_objective()
        if "callbacks" not in chosen:
            found |= self._unread_callbacks()
        return found

    def _unread_objective(self) -> dict[str, str]:
        name, found = type(self.objective).__name__, {}
        if "reference" not in self.objective.requires | online_statistics(self.weights):
            found["reference"] = f"objective {name} needs no reference"
        anchored, on = getattr(self.objective, "anchor", 0), getattr(self.objective, "anchor_on", None)
        if anchored and on is AnchorOn.LOW and getattr(self.weights, "neutral", False) and not self.transforms:
            found["objective.anchor"] = "objective.anchor_on=low needs weights below uniform, and uniform has none"
        if getattr(self.objective, "beta", None) != self.default_beta:
            found["default_beta"] = f"objective {name} has its own beta, or none"
        return found

    def _unread_callbacks(self) -> dict[str, str]:
        kept, found = self.callbacks, {}
        if not kept.checkpoints:
            keys = ("monitor", "mode", "save_every", "export_dtype")
            found = {f"callbacks.{key}": "callbacks.checkpoints=false" for key in keys}
        if not kept.samples:
            found["callbacks.sample_tokens"] = "callbacks.samples=0"
        if not kept.report and self.logger.wandb is None:
            found["callbacks.heat_maps"] = "callbacks.report=false"
        return found


# Keys of `fit` that are used only in training.
TRAINING = (
    *("optimizer", "callbacks", "logger", "reference", "resume", "seeds", "grid", "grids", "batch"),
    "verbalized_epochs",
)
