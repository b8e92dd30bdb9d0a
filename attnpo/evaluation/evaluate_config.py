"""Configuration of ``attnpo.evaluate``; cheap to import, so that errors show up before model code is loaded."""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path

from attnpo.config.compose import RUNS_ROOT, RootConfig
from attnpo.evaluation.base import Benchmark, UngradedBenchmark
from attnpo.evaluation.chat import AnsweringBackend, Grader
from attnpo.evaluation.session import GradingLimits
from attnpo.models.spec import ModelSpec
from attnpo.schema import BOOKKEEPING, UserError, check_at_least, check_choice
from attnpo.training.settings import ACCELERATORS


@dataclass(frozen=True)
class GradingRules:
    """Rules for the number of rounds and of repeated gradings (config node ``grading``).

    ``rounds``: rounds of generation and grading. ``again``: share of questions whose answers are graded twice, but at
    least ``again_least`` questions (or all, if there are fewer). ``missing``: maximum number of calls without a reply
    in a finished result.
    """

    rounds: int = 3
    again: float = 0.1
    again_least: int = 50
    missing: int = 0

    def __post_init__(self) -> None:
        check_at_least("grading", 1, rounds=self.rounds)
        check_at_least("grading", 0, again_least=self.again_least, missing=self.missing)
        if not 0 <= self.again <= 1:
            raise UserError(f"grading.again must be a share from 0 to 1, got {self.again}")

    def regrade_count(self, questions: int) -> int:
        """Returns the number of questions to grade twice, out of ``questions``; 0 if ``again`` is 0."""
        return min(questions, max(self.again_least, math.ceil(self.again * questions))) if self.again else 0


@dataclass(frozen=True)
class EvaluateConfig(RootConfig):
    """Root configuration of ``attnpo.evaluate``, with one field per key of ``configs/evaluate.yaml``."""

    model: ModelSpec
    benchmark: Benchmark | UngradedBenchmark
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

    def unused_keys(self) -> dict[str, str]:
        """Returns keys that have no effect with the current settings, each with the reason."""
        if isinstance(self.benchmark, Benchmark):
            return {}
        why = f"benchmark {self.benchmark.name} evaluates the model directly"
        return dict.fromkeys(("answering", "grader", "grading", "limits"), why)

    def model_label(self) -> str:
        """Returns the model's name for tables."""
        return self.label or "/".join(_last_path_parts(self.model.path))

    def folder(self) -> Path:
        """Returns the evaluation's folder: ``output``, or a default named after model and benchmark."""
        if self.output is not None:
            return Path(self.output).expanduser()
        named = "-".join([*_last_path_parts(self.model.path), self.benchmark.name])
        return RUNS_ROOT / f"eval-{re.sub(r'[^A-Za-z0-9._-]+', '_', named)}"


def _last_path_parts(path: str) -> list[str]:
    """Returns the last two parts of a path (RUN/best, organisation/model), since the last part alone is ambiguous."""
    return [part for part in Path(path).parts[-2:] if part.strip("./~")]
