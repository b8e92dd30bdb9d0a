"""``attnpo.report``: writes the report that a command asks for."""

import logging
from pathlib import Path

from attnpo.cli.terminal import command_text
from attnpo.lab.reports.output import check_free, report_folder
from attnpo.lab.reports.report_config import GAINS, RANKS, SCORES, WEIGHTS, ReportConfig, files, kind_of, mark_of
from attnpo.schema import UserError
from attnpo.system.locks import locked
from attnpo.system.processes import world_size

log = logging.getLogger(__name__)


def report(cfg: ReportConfig) -> None:
    """Prints the tables asked for and writes them into the report's folder. UserError for what cannot be."""
    if world_size() > 1:
        raise UserError(f"report was started with {world_size()} processes; it works alone: start it without torchrun")
    kind = kind_of(cfg.what)
    log.info("%s", command_text("report", *cfg.what, *cfg.composed.arguments()))
    folder = report_folder(cfg, kind)
    with locked(folder, float(cfg.lock_timeout)):
        check_free(folder, mark_of(cfg))
        _write_report(cfg, kind, folder)


def _write_report(cfg: ReportConfig, kind: str, folder: Path) -> None:
    given = [Path(name).expanduser() for name in (cfg.what[1:] if kind else cfg.what)]
    for paths in (given, files(cfg.printed)):
        places = [path.resolve() for path in paths]
        if len(set(places)) < len(places):
            twice = next(path for path, place in zip(paths, places, strict=True) if places.count(place) > 1)
            raise UserError(f"report: expected each folder and file once, got {twice} more than once")
    if kind == WEIGHTS:
        from attnpo.lab.reports.weight_report import weight_report

        weight_report(cfg, folder)
        if cfg.explorer:
            from attnpo.lab.reports.weight_explorer import weight_explorer

            weight_explorer(cfg, folder)
    elif kind == GAINS:
        from attnpo.lab.reports.gains_report import gains_report

        gains_report(given, cfg.level, folder, mark_of(cfg))
    elif kind == SCORES:
        from attnpo.lab.reports.scores_report import scores_report

        scores_report(given, files(cfg.printed), cfg.label, folder, mark_of(cfg))
    elif kind == RANKS:
        from attnpo.lab.reports.ranks_report import ranks_report

        ranks_report(given, folder, mark_of(cfg))
    else:
        from attnpo.lab.reports.folder_report import folder_report

        folder_report(given, kind, files(cfg.printed), folder, mark_of(cfg))
