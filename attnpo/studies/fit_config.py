"""All that ``fit`` and ``weigh`` compose, as one typed component: keys, their types, and which have no effect."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnpo.data.rules import AlignRules, BatchPlan, LengthRules
from attnpo.locks import TIMEOUT
from attnpo.models.spec import ModelSpec
from attnpo.objectives.base import PreferenceObjective
from attnpo.runs.settings import (
    LAYOUTS,
    AutoLayer,
    Judge,
    OtherJudge,
    PairReader,
    Preparer,
    Truth,
    Verbalizer,
    is_auto,
    require_one_piece,
    require_pairs,
    require_parts,
    require_reader,
    require_reference,
    require_whole,
)
from attnpo.schema import UserError, check_seed
from attnpo.studies.study import Grid, Study
from attnpo.training.optimizer import Optimizer
from attnpo.training.settings import CallbackSettings, LoggerSettings, TrainerSettings
from attnpo.weights.base import WeightSource
from attnpo.weights.pipeline import check_transforms
from attnpo.weights.transforms import WeightTransform


def require_name(name: str | None) -> None:
    """Nothing; raises UserError for a name that is no folder of its own below ``output``."""
    if name is not None and (not name.strip(" ./") or ".." in Path(name).parts or Path(name).is_absolute()):
        raise UserError(f"name: expected the name of a folder below `output`, got {name!r}")
    if name is not None and not name.isprintable():
        raise UserError(f"name: expected printable characters alone, got {name!r}")


def require_folder(key: str, folder: str | None) -> None:
    """Raises UserError for the value of ``key`` where it can be no folder; None stands for a default."""
    if folder is not None and not (folder.strip() and folder.isprintable()):
        raise UserError(f"{key}: expected the path of a folder in printable characters, got {folder!r}")


def require_worlds(study: Study, prepare: Preparer | None) -> None:
    """Nothing; raises UserError for a study whose worlds turn knobs that this setting does not have."""
    sets = [override for overrides in study.worlds.values() for override in overrides]
    knobs = [override for override in sets if override.startswith("prepare.")]
    if knobs and prepare is None:
        raise UserError(
            f"study {study.name}: its worlds set {knobs[0].partition('=')[0]}, and this setting builds no world "
            "(prepare=null): leave setting= out, or choose setting=testbed"
        )


@dataclass(frozen=True)
class RunConfig:
    """One run, or the study built from it; a field per key of ``configs/fit.yaml``, where each is explained."""

    data: PairReader
    model: ModelSpec
    weights: WeightSource
    judge: Judge
    other_judge: OtherJudge
    verbalizer: Verbalizer
    auto_layer: AutoLayer
    objective: PreferenceObjective
    optimizer: Optimizer
    trainer: TrainerSettings
    logger: LoggerSettings
    callbacks: CallbackSettings
    lengths: LengthRules
    align: AlignRules
    batch: BatchPlan
    grid: Grid
    output: str
    seed: int
    default_layer: int | str
    default_beta: float
    verbalized_epochs: int
    reference: str
    live_reference: str
    layout: str = "auto"
    name: str | None = None
    store: str | None = None
    seeds: int | None = None
    resume: str | None = None
    lock_timeout: float = TIMEOUT
    prepare: Preparer | None = None
    truth: Truth | None = None
    transforms: dict[str, WeightTransform] = field(default_factory=dict)
    grids: dict[str, Grid] = field(default_factory=dict)
    study: Study | None = None
    composed: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.seeds is not None and self.seeds < 1:
            raise UserError(f"seeds: expected at least 1, or null to leave it to the study, got {self.seeds}")
        check_seed("seed", self.seed, self.seeds or (1 if self.study is None else self.study.seeds))
        if self.verbalized_epochs < 1:
            raise UserError(f"verbalized_epochs: expected at least 1, got {self.verbalized_epochs}")
        if not 0 < self.lock_timeout < math.inf:
            raise UserError(f"lock_timeout: expected seconds, more than 0, got {self.lock_timeout}")
        require_name(self.name)
        require_folder("output", self.output)
        require_folder("store", self.store)
        if self.layout not in LAYOUTS:
            raise UserError(f"layout={self.layout!r} is not known; one of {', '.join(LAYOUTS)}")
        require_parts(self.reference, self.model, self.optimizer)
        require_one_piece(self.trainer, self.model)
        if self.study is not None:
            require_worlds(self.study, self.prepare)
        if self.study is None:  # a study's arms may choose them anew
            require_reader(self.weights, self.objective)
            require_reference(self.reference, self.objective)
            require_pairs(self.batch, self.objective)
            require_whole(self.trainer, self.objective)
            check_transforms(self.weights, list(self.transforms.values()))

    def unread(self) -> dict[str, str]:
        """Keys without effect as the others stand, with the reason.

        A study's arms choose groups of their own; what depends on such a group is left alone.
        """
        chosen: set[str] = set()
        if self.study is not None:
            study = self.study
            sets = [*study.arms.values(), *study.truth_arms.values(), *study.worlds.values(), list(study.shared)]
            chosen = {item.partition("=")[0].lstrip("+~").partition(".")[0] for overrides in sets for item in overrides}
        source = type(self.weights).__name__
        found: dict[str, str] = {}
        if "weights" not in chosen and "judge" not in self.weights.requires:
            found["judge"] = f"weights are {source}, which needs no judge"
        if "weights" not in chosen and not is_auto(getattr(self.weights, "layer", None)):
            found["auto_layer"] = "weights.layer is not auto"
        if "weights" not in chosen and self.weights.tokens == "train":
            found["align"] = f"weights are {source}, which lie on the training tokens already"
        if "weights" not in chosen and "generator" not in self.weights.requires:
            found["verbalizer"] = f"weights are {source}, which ask no verbalizer"
        if "judge" not in chosen and not self.judge.other:
            found["other_judge"] = "the judge is not the setting's other judge (judge=other)"
        if "judge" not in chosen and self.judge.path is None and not self.judge.other:
            own = "the judge is the model itself (judge.path=null)"
            found |= {"judge.revision": own, "judge.chat_template": own}
        if "model" not in chosen and (Path(self.model.path).expanduser().is_dir() or self.model.path == "???"):
            found["model.revision"] = "the model is a folder on this machine"
        if "objective" not in chosen:
            found |= self._unread_objective()
        found |= self._unread_grids()
        if "callbacks" not in chosen:
            found |= self._unread_callbacks()
        return found

    def _unread_objective(self) -> dict[str, str]:
        name, found = type(self.objective).__name__, {}
        if "reference" not in self.objective.requires:
            found["reference"] = f"objective {name} reads no reference"
        if getattr(self.objective, "beta", None) != self.default_beta:
            found["default_beta"] = f"objective {name} has a beta of its own, or none"
        return found

    def _unread_grids(self) -> dict[str, str]:
        """Grids that no arm gets. A study reads them by value, so that one equal to a grid in use counts as used."""
        if self.study is None:
            return dict.fromkeys(("grid", "grids", "seeds"), "there is no study (experiment=none)")
        used = [self.study.grid, *self.study.grids.values()]
        named = {"grid": self.grid, **{f"grids.{name}": grid for name, grid in self.grids.items()}}
        return {name: f"study {self.study.name} does not use it" for name, grid in named.items() if grid not in used}

    def _unread_callbacks(self) -> dict[str, str]:
        kept, found = self.callbacks, {}
        if not kept.checkpoints:
            found = dict.fromkeys(("callbacks.monitor", "callbacks.mode"), "callbacks.checkpoints=false")
        if not kept.samples:
            found["callbacks.sample_tokens"] = "callbacks.samples=0"
        if not kept.report and self.logger.wandb is None:
            found["callbacks.heat_maps"] = "callbacks.report=false"
        return found
