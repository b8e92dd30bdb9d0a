"""Where a prepare component built model, data and a second judge. Light: read before a model is loaded."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Prepared:
    """Where the artefacts are, what was measured when they were built, and whether both were already there."""

    model_path: Path
    data_path: Path
    report: dict[str, object]
    reused: bool


@dataclass(frozen=True)
class PreparedJudge:
    """Where the second base is, what was measured when it was built, and whether it was already there."""

    path: Path
    report: dict[str, object]
    reused: bool
