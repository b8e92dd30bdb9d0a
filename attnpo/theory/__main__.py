"""``python -m attnpo.theory [FOLDER]``: the theory study's tables, and its figure in FOLDER."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from attnpo.theory.claims import run_study
from attnpo.theory.figures import theory_figure
from attnpo.theory.tables import report_text


def main(arguments: Sequence[str]) -> int:
    """Prints the tables and writes ``theory.png`` into the folder named (``outputs/theory`` by default); returns 0."""
    parser = argparse.ArgumentParser(
        prog="python -m attnpo.theory",
        description="Check the paper's theory on policies small enough to enumerate: tables and a figure.",
    )
    parser.add_argument("folder", nargs="?", type=Path, default=Path("outputs/theory"), help="where theory.png goes")
    folder = parser.parse_args(arguments).folder
    study = run_study()
    path = theory_figure(study, folder / "theory.png")
    sys.stdout.write(f"{report_text(study)}\n\nfigure: {path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
