"""Configuration of ``attnpo.evaluate``. Light: checked before anything that loads a model is imported."""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path

from attnpo.config.compose import RUNS_ROOT, RootConfig
from attnpo.evaluation.base import Benchmark, Measure
from attnpo.evaluation.chat import AnsweringBackend, Grader
from attnpo.evaluation.session import GradingLimits
from attnpo.models.spec import ModelSpec
from attnpo.schema import BOOKKEEPING, UserError, check_at_least, check_choice
from attnpo.training.settings import ACCELERATORS


@dataclass(frozen=True)
class GradingRules:
    """Numbers of draws and gradings (config node ``grading``).

    ``rounds`` of generation and grading. The answers to a share ``again`` of the questions, ``again_least`` of them at
    least and all where there are fewer, are graded twice. ``missing``: calls that may stay without a reply before a
    result is refused.
    """

    rounds: int = 3
    again: float = 0.1
    again_least: int = 50
    missing: int = 0

    def __post_init__(self) -> None:
        check_at_least("grading", 1, rounds=self.rounds)
        check_at_least("grading", 0, again_least=self.again_least, missing=self.missing)
        if not 0 <= self.again <= 1:
            raise UserError(f"grading.again: expected a share from 0 to 1, got {self.again}")

    def twice(self, questions: int) -> int:
        """Returns how many of so many questions are graded twice; none with ``again`` 0."""
        return min(questions, max(self.again_least, math.ceil(self.again * questions))) if self.again else 0


@dataclass(frozen=True)
class EvaluateConfig(RootConfig):
    """Whole of what ``attnpo.evaluate`` composes; a field per key of ``configs/evaluate.yaml``."""

    model: ModelSpec
    benchmark: Benchmark | Measure
    answering: AnsweringBackend
    grader: Grader
    grading: GradingRules = field(default_factory=GradingRules)
    limits: GradingLimits = field(default_factory=GradingLimits, metadata=BOOKKEEPING)
    trainer: dict[str, str] = field(default_factory=dict, metadata=BOOKKEEPING)
    label: str | None = field(default=None, metadata=BOOKKEEPING)
    output: str | None = field(default=None, metadata=BOOKKEEPING)
    lock_timeout: float = field(default=300.0, metadata=BOOKKEEPING)

    def __post_init__(self) -> None:
        check_choice("trainer.accelerator", self.trainer.get("accelerator", "auto"), ACCELERATORS)

    def unread(self) -> dict[str, str]:
        """Keys without effect as the others stand, with the reason."""
        if isinstance(self.benchmark, Benchmark):
            return {}
        why = f"benchmark {self.benchmark.name} is measured on the model itself"
        return dict.fromkeys(("answering", "grader", "grading", "limits"), why)

    def model_label(self) -> str:
        """Returns what tables call the model."""
        return self.label or "/".join(_last_parts(self.model.path))

    def folder(self) -> Path:
        """Returns where the evaluation lies: ``output``, or a folder named after model and benchmark."""
        if self.output is not None:
            return Path(self.output).expanduser()
        named = "-".join([*_last_parts(self.model.path), self.benchmark.name])
        return RUNS_ROOT / f"eval-{re.sub(r'[^A-Za-z0-9._-]+', '_', named)}"


def _last_parts(path: str) -> list[str]:
    """Keeps both parts of RUN/best and organisation/model: the last alone does not say which."""
    return [part for part in Path(path).parts[-2:] if part.strip("./~")]
