"""``attnpo.report``: the report of the kind that a command asks for."""

import logging
from collections.abc import Sequence
from pathlib import Path

from attnpo.cli.terminal import command_text
from attnpo.lab.reports.output import check_free
from attnpo.lab.reports.report_config import PLACES, SCORES, WEIGHTS, ReportConfig, files, kind_of
from attnpo.schema import UserError, digest
from attnpo.system.locks import folder_lock
from attnpo.system.processes import world_size

log = logging.getLogger(__name__)


def report(cfg: ReportConfig) -> None:
    """Prints the tables asked for and writes them into the report's folder. UserError for what cannot be."""
    if world_size() > 1:
        raise UserError(f"report was started with {world_size()} processes; it works alone: start it without torchrun")
    kind = kind_of(cfg.what)
    log.info("%s", command_text("report", *cfg.what, *cfg.composed.arguments()))
    mark = digest({key: value for key, value in cfg.values.items() if key not in PLACES})[:16]  # all that is asked for
    printed = files(cfg.printed)
    setting = f"-{cfg.composed.choices.get('setting', 'setting')}" if kind == WEIGHTS else ""
    folder = Path(cfg.output) / (f"{kind or 'report'}{setting}-{mark[:8]}" if cfg.name is None else cfg.name)
    given = [Path(name).expanduser() for name in (cfg.what[1:] if kind else cfg.what)]
    with folder_lock(folder, float(cfg.lock_timeout)):
        check_free(folder, mark)
        require_distinct(given)
        require_distinct(printed)
        if kind == WEIGHTS:
            from attnpo.lab.reports.weight_report import weight_report

            weight_report(cfg, folder, mark)
            if cfg.explorer:
                from attnpo.lab.reports.weight_explorer import weight_explorer

                weight_explorer(cfg, folder)
        elif kind == SCORES:
            from attnpo.lab.reports.scores import scores_report

            scores_report(given, printed, cfg.label, folder, mark)
        else:
            from attnpo.lab.reports.folder_report import folder_report

            folder_report(given, kind, printed, folder, mark)


def require_distinct(paths: Sequence[Path]) -> None:
    """Raises UserError for a path that is given twice, in whichever spelling."""
    places = [path.resolve() for path in paths]
    if len(set(places)) < len(places):
        twice = next(path for path, place in zip(paths, places, strict=True) if places.count(place) > 1)
        raise UserError(f"report: expected each folder and file once, got {twice} more than once")
