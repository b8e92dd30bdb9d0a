"""``python -m attnpo.report WHAT ...``: statistics of token weights; tables of finished studies, runs, evaluations."""

import sys
from typing import TYPE_CHECKING

from attnpo.cli.terminal import install_signal_handlers

if TYPE_CHECKING:
    from attnpo.lab.reports.report_config import ReportConfig

DESCRIPTION = """\
Tables from the store and from finished folders; printed=FILE.csv puts printed numbers below ours.

  weights           statistics of the weights a run would train with; reads the groups below
  study FOLDER ...  the tables of finished studies again, and several side by side
  run FOLDER ...    one row per finished run; FOLDER ... alone goes by what the folders hold
  scores FOLDER ... finished evaluations as the paper's tables: scores, spreads, ranks, lengths"""
EXAMPLES = """\
python -m attnpo.report weights layers=[1,2,3,4]
python -m attnpo.report scores outputs/eval-* printed=experiments/paper/main_results/printed.csv"""

MOVED = {"gains": "experiments.gains FOLDER ... --kl 1.0", "ranks": "experiments.check_tables TABLE.csv ..."}
"""Reports that stand beside the package, with their commands; told until 0.2.0."""


def main(cfg: "ReportConfig") -> int:
    """Returns 0; tables are printed, and written into a folder under ``output``."""
    from attnpo.lab.reports.report import report

    report(cfg)
    return 0


def needs_complete_config(cfg: "ReportConfig") -> bool:
    """Returns whether nothing may be open any more: statistics of weights need a model and data."""
    return list(cfg.what[:1]) == ["weights"] and cfg.prepare is None


if __name__ == "__main__":
    install_signal_handlers()
    if moved := MOVED.get(next((word for word in sys.argv[1:] if "=" not in word), "")):
        sys.stderr.write(f"error: this report stands beside the package: in a checkout, python -m {moved}\n")
        sys.exit(2)
    from attnpo.cli.entry import run_entry
    from attnpo.data.tables import check_validation as early

    sys.exit(
        run_entry(
            main, "report", None, DESCRIPTION, EXAMPLES, positional="what", complete=needs_complete_config, early=early
        )
    )
