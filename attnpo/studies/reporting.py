"""What ``report`` was asked for, and the folder its tables go to. Light: known before anything heavy is loaded."""

import json
import logging
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from omegaconf import DictConfig

from attnpo.config import plain
from attnpo.console import world_size
from attnpo.locks import locked
from attnpo.schema import UserError, digest
from attnpo.studies.folders import make_folder
from attnpo.studies.root import RunConfig

log = logging.getLogger(__name__)

WEIGHTS, STUDY, RUN = "weights", "study", "run"
KINDS = (WEIGHTS, STUDY, RUN)
MARK = "report.json"
# Parts of the config that move no number of a report.
PLACES = ("name", "output", "store", "lock_timeout", "composed")
# Keys of `fit` that only training reads.
TRAINING = (
    *("optimizer", "callbacks", "logger", "reference", "resume", "seeds", "grid", "grids", "batch"),
    "verbalized_epochs",
)
# Keys that reports of folders read.
OF_FOLDERS = ("what", "printed", "name", "output", "lock_timeout", "composed")


@dataclass(frozen=True)
class ReportConfig(RunConfig):
    """A report; a field per key of ``configs/report.yaml``, where each is explained, and those of ``fit``."""

    what: tuple[str, ...] = ()
    printed: tuple[str, ...] | str = ()
    layers: tuple[int | str, ...] | str = ()
    label: str | None = None
    min_count: int = 100
    top: int = 10
    heat_maps: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.what and kind_of(self.what) == WEIGHTS and self.what != (WEIGHTS,):
            raise UserError(f"report weights: expected GROUP=OPTION or KEY=VALUE behind it, got {self.what[1]!r}")
        if isinstance(self.layers, str) and self.layers != "all":
            raise UserError(f"layers: expected all or a list such as [1,2,1/2,last], got {self.layers!r}")
        twice = [layer for layer in dict.fromkeys(self.layers) if list(self.layers).count(layer) > 1]
        if not isinstance(self.layers, str) and twice:
            raise UserError(f"layers: expected each layer once, got {twice[0]} more than once")
        if self.min_count < 1 or self.top < 1 or self.heat_maps < 0:
            raise UserError("min_count and top must be at least 1, heat_maps at least 0")
        for path in files(self.printed):
            if not path.is_file():
                raise UserError(f"printed={path}: expected a CSV file, there is none")

    def unread(self) -> dict[str, str]:
        """Keys without effect as the others stand, with the reason."""
        if not self.what:
            return {}
        if kind_of(self.what) != WEIGHTS:
            names = [item.name for item in fields(self) if item.name not in OF_FOLDERS]
            return dict.fromkeys(names, "finished folders are read as they are")
        return {**super().unread(), **dict.fromkeys(TRAINING, "a report trains nothing")}


def kind_of(what: Sequence[str]) -> str:
    """The kind of report its words ask for; empty when they are folders alone. UserError when nothing is asked for."""
    first = what[0] if what else None
    if first is None or (first in (STUDY, RUN) and len(what) == 1):
        raise UserError(
            f"report{'' if first is None else ' ' + first}: expected `weights`, `study FOLDER ...`, `run FOLDER ...` "
            "or folders of finished studies or runs; see --help"
        )
    return first if first in KINDS else ""


def files(printed: Sequence[str] | str) -> list[Path]:
    """The CSV files of ``printed``, a name or a list of names."""
    return [Path(path).expanduser() for path in ([printed] if isinstance(printed, str) else printed)]


def report(cfg: DictConfig) -> None:
    """Nothing; prints the tables asked for and writes them into the report's folder. UserError for what cannot be."""
    if world_size() > 1:
        raise UserError(f"report was started with {world_size()} processes; it works alone: start it without torchrun")
    kind = kind_of(cfg.what)
    given = [*cfg.what, *cfg.composed.get("overrides", [])]
    log.info("%s", shlex.join(["python", "-m", "attnpo.report", *map(str, given)]))
    folder = report_folder(cfg, kind)
    with locked(folder, float(cfg.lock_timeout)):
        check_free(folder, mark_of(cfg))
        _write_report(cfg, kind, folder)


def _write_report(cfg: DictConfig, kind: str, folder: Path) -> None:
    if kind == WEIGHTS:
        from attnpo.studies.weight_report import weight_report

        weight_report(cfg, folder)
    else:
        from attnpo.studies.folder_report import folder_report

        names = cfg.what[1:] if kind else cfg.what
        folder_report([Path(name).expanduser() for name in names], kind, files(cfg.printed), folder, mark_of(cfg))


# ------------------------------------------------------------------------------------------------ folder


def mark_of(cfg: DictConfig) -> str:
    """Digest of everything a command asks for: what tells its folder from those of others."""
    return digest({key: value for key, value in plain(cfg).items() if key not in PLACES})[:16]


def report_folder(cfg: DictConfig, kind: str) -> Path:
    """The folder of a report under ``output``: ``name``, else its kind, the setting and a digest of the command."""
    output = Path(str(cfg.output))
    if cfg.name is not None:
        return output / str(cfg.name)
    setting = f"-{cfg.composed.get('choices', {}).get('setting', 'setting')}" if kind == WEIGHTS else ""
    return output / f"{kind or 'report'}{setting}-{mark_of(cfg)[:8]}"


def check_free(folder: Path, mark: str) -> None:
    """Nothing; UserError for a folder with anything but an earlier report of the same command."""
    try:
        names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    except OSError as problem:
        raise UserError(f"output=: {folder} must be a folder that can be read, but: {problem.strerror}") from problem
    held = [name for name in names if not name.startswith(".")]  # its lock
    if not held:
        return
    try:
        before = json.loads((folder / MARK).read_text(encoding="utf-8"))["mark"]
    except (OSError, ValueError, KeyError, TypeError):
        before = None
    if before != mark:
        other = "the report of another command" if before else f"{', '.join(held[:3])}"
        raise UserError(f"{folder} holds {other}, which would be overwritten; give name= another folder below `output`")


def write_files(folder: Path, mark: str, texts: dict[str, str]) -> None:
    """Nothing; puts the files of a report into its folder, in the place of its earlier ones."""
    make_folder(folder)
    (folder / MARK).write_text(json.dumps({"mark": mark, "files": sorted(texts)}) + "\n", encoding="utf-8")
    for name, text in texts.items():
        part = folder / f".{name}.part"
        part.write_text(text, encoding="utf-8")
        shutil.move(part, folder / name)
