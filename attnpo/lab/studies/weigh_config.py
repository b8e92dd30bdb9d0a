"""All keys of ``configs/weigh.yaml`` as a typed root: those of ``fit``, and where to write weights for others."""

from dataclasses import dataclass, field
from typing import ClassVar

from attnpo.lab.studies.fit_config import FitConfig
from attnpo.schema import BOOKKEEPING, UserError


@dataclass(frozen=True)
class WeighConfig(FitConfig):
    """What ``attnpo.weigh`` reads.

    ``export``: the file (.parquet or .jsonl) that gets the training pairs' weights. ``prune``: in the place of all
    else, prepared rows that no run has opened for so many days are removed from the store.
    """

    trains: ClassVar[bool] = False

    export: str | None = field(default=None, metadata=BOOKKEEPING)
    prune: float | None = field(default=None, metadata=BOOKKEEPING)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prune is not None and not self.prune >= 0:
            raise UserError(f"prune: expected a number of days, 0 or more, got {self.prune}")
