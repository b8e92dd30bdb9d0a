"""``python -m attnpo.theory [FOLDER]``: every statement with its verdict, and figures in FOLDER."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from attnpo.theory.figures import theory_figure
from attnpo.theory.study import run_study
from attnpo.theory.tables import report_markdown, report_text
from attnpo.theory.tightness_figure import tightness_figure


def main(arguments: Sequence[str]) -> int:
    """Prints the tables and draws the figures into the folder named (``outputs/theory`` by default); returns 0."""
    parser = argparse.ArgumentParser(
        prog="python -m attnpo.theory",
        description="Check the paper's theory on policies small enough to enumerate: what holds, fails, says nothing.",
    )
    parser.add_argument("folder", nargs="?", type=Path, default=Path("outputs/theory"), help="where the figures go")
    parser.add_argument(
        "--markdown", action="store_true", help="print the tables as Markdown, as docs/theory.md has them"
    )
    chosen = parser.parse_args(arguments)
    study = run_study()
    first = theory_figure(study, chosen.folder / "theory.png")
    second = tightness_figure(study, chosen.folder / "tightness.png")
    report = report_markdown(study) if chosen.markdown else report_text(study)
    sys.stdout.write(f"{report}\n\nfigures: {first} {second}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
