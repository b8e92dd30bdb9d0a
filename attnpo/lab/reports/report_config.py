"""Configuration of ``attnpo.report``. This module avoids heavy imports."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

from attnpo.lab.studies.config import FitConfig
from attnpo.run.run_config import TRAINING
from attnpo.schema import UserError

KINDS = (WEIGHTS, STUDY, RUN, SCORES, POOL) = ("weights", "study", "run", "scores", "pool")
# Parts of the config that change no number in a report.
PLACES = ("name", "output", "store", "lock_timeout", "composed")
# Keys that every report reads, and further keys by kind of report on folders; "" detects the kind.
OF_FOLDERS = ("what", "name", "output", "lock_timeout", "composed")
READ = {**dict.fromkeys(("", STUDY, RUN), ("printed",)), SCORES: ("printed", "label"), POOL: ()}


@dataclass(frozen=True)
class ReportConfig(FitConfig):
    """Config of a report: the keys of ``fit``, plus those documented in ``configs/report.yaml``."""

    trains: ClassVar[bool] = False

    what: tuple[str, ...] = ()
    printed: tuple[str, ...] | str = ()
    layers: tuple[int | str, ...] | str = ()
    label: str | None = None
    min_count: int = 100
    top: int = 10
    heat_maps: int = 2
    explorer: int = 0
    against: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.what and report_kind(self.what) == WEIGHTS and self.what != (WEIGHTS,):
            raise UserError(f"report weights: expected GROUP=OPTION or KEY=VALUE after `weights`, got {self.what[1]!r}")
        if isinstance(self.layers, str) and self.layers != "all":
            raise UserError(f"layers: expected all or a list like [1,2,1/2,last], got {self.layers!r}")
        twice = [layer for layer in dict.fromkeys(self.layers) if list(self.layers).count(layer) > 1]
        if not isinstance(self.layers, str) and twice:
            raise UserError(f"layers: expected each layer once, got {twice[0]} more than once")
        if self.min_count < 1 or self.top < 1 or self.heat_maps < 0 or self.explorer < 0:
            raise UserError("min_count and top must be at least 1, and heat_maps and explorer at least 0")
        for path in printed_files(self.printed):
            if not path.is_file():
                raise UserError(f"printed={path}: expected a CSV file, but it does not exist")

    def unused_keys(self) -> dict[str, str]:
        """Returns the config keys that have no effect, with the reasons."""
        if not self.what:
            return {}
        kind = report_kind(self.what)
        if kind == WEIGHTS:
            alone = {} if self.explorer else {"against": "explorer=0 turns the explorer off"}
            return {**super().unused_keys(), **dict.fromkeys(TRAINING, "a report does not train a model"), **alone}
        names = [item.name for item in fields(self) if item.init and item.name not in (*OF_FOLDERS, *READ[kind])]
        return dict.fromkeys(names, "finished folders are read as they are")


def report_kind(what: Sequence[str]) -> str:
    """Returns the kind of report named by the first argument; empty if all arguments are folders.

    Raises UserError if there is nothing to report on.
    """
    first = what[0] if what else None
    if first is None or (first in KINDS and first != WEIGHTS and len(what) == 1):
        raise UserError(
            f"report{'' if first is None else ' ' + first}: expected `weights`, `study FOLDER ...`, `run FOLDER ...`, "
            "`scores FOLDER ...`, `pool FOLDER ...` or folders of finished studies or runs; see --help"
        )
    return first if first in KINDS else ""


def printed_files(printed: Sequence[str] | str) -> list[Path]:
    """Returns the CSV files in ``printed``, which is a file name or a list of them."""
    return [Path(path).expanduser() for path in ([printed] if isinstance(printed, str) else printed)]
