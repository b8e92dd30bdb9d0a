"""``attnpo.report``: writes the kind of report requested on the command line."""

import logging
from collections.abc import Sequence
from pathlib import Path

from attnpo.cli.terminal import command_text
from attnpo.lab.reports.output import check_output_folder
from attnpo.lab.reports.report_config import PLACES, POOL, SCORES, WEIGHTS, ReportConfig, printed_files, report_kind
from attnpo.schema import UserError, digest
from attnpo.system.locks import folder_lock
from attnpo.system.processes import world_size

log = logging.getLogger(__name__)


def write_report(cfg: ReportConfig) -> None:
    """Prints the requested tables and writes them to the report's folder. Raises UserError for invalid requests."""
    if world_size() > 1:
        raise UserError(f"report was started with {world_size()} processes but needs one: start it without torchrun")
    kind = report_kind(cfg.what)
    log.info("%s", command_text("report", *cfg.what, *cfg.composed.arguments()))
    mark = digest({key: value for key, value in cfg.values.items() if key not in PLACES})[:16]
    printed = printed_files(cfg.printed)
    setting = f"-{cfg.composed.choices.get('setting', 'setting')}" if kind == WEIGHTS else ""
    folder = Path(cfg.output) / (f"{kind or 'report'}{setting}-{mark[:8]}" if cfg.name is None else cfg.name)
    given = [Path(name).expanduser() for name in (cfg.what[1:] if kind else cfg.what)]
    with folder_lock(folder, float(cfg.lock_timeout)):
        check_output_folder(folder, mark)
        require_distinct(given)
        require_distinct(printed)
        if kind == WEIGHTS:
            from attnpo.lab.reports.weight_report import write_weight_report

            write_weight_report(cfg, folder, mark)
            if cfg.explorer:
                from attnpo.lab.reports.weight_explorer import write_weight_explorer

                write_weight_explorer(cfg, folder)
        elif kind == SCORES:
            from attnpo.lab.reports.scores import write_scores_report

            write_scores_report(given, printed, cfg.label, folder, mark)
        elif kind == POOL:
            from attnpo.lab.reports.pooled import write_pooled_report

            write_pooled_report(given, folder, mark)
        else:
            from attnpo.lab.reports.folder_report import write_folder_report

            write_folder_report(given, kind, printed, folder, mark)


def require_distinct(paths: Sequence[Path]) -> None:
    """Raises UserError if two of the paths resolve to the same file or folder."""
    places = [path.resolve() for path in paths]
    if len(set(places)) < len(places):
        twice = next(path for path, place in zip(paths, places, strict=True) if places.count(place) > 1)
        raise UserError(f"report: expected each folder and file once, got {twice} more than once")
