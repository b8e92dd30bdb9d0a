"""All keys of ``configs/weigh.yaml`` as a typed root: those of ``fit``, and where to write weights for others."""

from dataclasses import dataclass, field
from typing import ClassVar

from attnpo.schema import BOOKKEEPING
from attnpo.studies.fit_config import FitConfig


@dataclass(frozen=True)
class WeighConfig(FitConfig):
    """What ``attnpo.weigh`` reads. ``export``: the file (.parquet or .jsonl) that gets the training pairs' weights."""

    trains: ClassVar[bool] = False

    export: str | None = field(default=None, metadata=BOOKKEEPING)
