"""``python -m attnpo.report WHAT ...``: statistics of token weights; tables of finished studies, runs, evaluations."""

import sys
from typing import TYPE_CHECKING

from attnpo.cli.terminal import hear_signals

if TYPE_CHECKING:
    from attnpo.lab.reports.report_config import ReportConfig

DESCRIPTION = """\
Tables from the store and from finished folders; printed=FILE.csv puts printed numbers below ours.

  weights           statistics of the weights a run would train with; reads the groups below
  study FOLDER ...  the tables of finished studies again, and several side by side
  run FOLDER ...    one row per finished run; FOLDER ... alone goes by what the folders hold
  gains FOLDER ...  what is known before training against the gain over uniform weights
  scores FOLDER ... finished evaluations as the paper's tables: scores, spreads, ranks, lengths
  ranks FILE.csv .. average ranks and intervals of printed tables, recomputed"""
EXAMPLES = """\
python -m attnpo.report weights layers=[1,2,3,4]
python -m attnpo.report gains outputs/regimes-testbed outputs/why-testbed level=1
python -m attnpo.report scores outputs/eval-* printed=experiments/paper/main_results/printed.csv"""


def main(cfg: "ReportConfig") -> int:
    """0; tables are printed, and written into a folder under ``output``."""
    from attnpo.lab.reports.report import report

    report(cfg)
    return 0


def complete(cfg: "ReportConfig") -> bool:
    """Returns whether nothing may be open any more: statistics of weights need a model and data."""
    return list(cfg.what[:1]) == ["weights"] and cfg.prepare is None


if __name__ == "__main__":
    hear_signals()
    from attnpo.cli.entry import run_entry
    from attnpo.data.tables import check_validation as early

    sys.exit(run_entry(main, "report", None, DESCRIPTION, EXAMPLES, positional="what", complete=complete, early=early))
