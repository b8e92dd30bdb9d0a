"""``python -m attnpo.theory [FOLDER]``: the theory study's tables, and its figure in FOLDER."""

import sys
from collections.abc import Sequence
from pathlib import Path

from attnpo.theory.claims import run_study
from attnpo.theory.figures import theory_figure
from attnpo.theory.tables import report_text


def main(arguments: Sequence[str]) -> int:
    """Prints the tables and writes ``theory.png`` into the folder named (``outputs/theory`` by default); returns 0."""
    study = run_study()
    path = theory_figure(study, Path(arguments[0] if arguments else "outputs/theory") / "theory.png")
    sys.stdout.write(f"{report_text(study)}\n\nfigure: {path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
