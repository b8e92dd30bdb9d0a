"""``python -m attnpo.report WHAT ...``: token weight statistics; tables of finished studies, runs and evaluations."""

import sys
from typing import TYPE_CHECKING

from attnpo.cli.terminal import install_signal_handlers

if TYPE_CHECKING:
    from attnpo.lab.reports.report_config import ReportConfig

DESCRIPTION = """\
Tables from the store and from finished folders; printed=FILE.csv adds published numbers below ours.

  weights           statistics of the weights a run would train with; uses the groups below
  study FOLDER ...  tables of finished studies; several studies are shown side by side
  run FOLDER ...    one row per finished run; with FOLDER ... alone the kind is detected
  scores FOLDER ... finished evaluations in the paper's format: scores, spreads, ranks, lengths
  pool FOLDER ...   studies of one world with different seeds, or their records.json, as one study"""
EXAMPLES = """\
python -m attnpo.report weights layers=[1,2,3,4]
python -m attnpo.report scores outputs/eval-* printed=experiments/paper/main_results/printed.csv"""

MOVED = {"gains": "experiments.gains FOLDER ... --kl 1.0", "ranks": "experiments.check_tables TABLE.csv ..."}
"""Reports that moved out of the package, with their new commands; this hint will be removed in 0.2.0."""


def main(cfg: "ReportConfig") -> int:
    """Prints the tables and writes them to a folder under ``output``; returns 0."""
    from attnpo.lab.reports.report import write_report

    write_report(cfg)
    return 0


def needs_complete_config(cfg: "ReportConfig") -> bool:
    """Returns whether the report needs a complete config: weight statistics do, because they need a model and data."""
    return list(cfg.what[:1]) == ["weights"] and cfg.prepare is None


if __name__ == "__main__":
    install_signal_handlers()
    if moved := MOVED.get(next((word for word in sys.argv[1:] if "=" not in word), "")):
        sys.stderr.write(f"error: the package no longer contains this report: from a checkout, run python -m {moved}\n")
        sys.exit(2)
    from attnpo.cli.entry import run_entry
    from attnpo.data.tables import check_validation as early

    sys.exit(
        run_entry(
            main, "report", None, DESCRIPTION, EXAMPLES, positional="what", complete=needs_complete_config, early=early
        )
    )
