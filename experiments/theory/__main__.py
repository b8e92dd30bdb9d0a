"""``python -m experiments.theory [FOLDER]``: prints every statement with its verdict, and draws figures in FOLDER."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from attnpo.cli.terminal import install_signal_handlers, log_to_terminal, rewrite_commands, run_guarded

EXAMPLE = """\
example:
  python -m experiments.theory outputs/theory"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables and draws the figures into the given folder (``outputs/theory`` by default); returns 0."""
    parser = argparse.ArgumentParser(
        prog=rewrite_commands("python -m experiments.theory"),
        description="Check the paper's theory on policies small enough to enumerate: what holds, fails, says nothing.",
        epilog=rewrite_commands(EXAMPLE),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", nargs="?", type=Path, default=Path("outputs/theory"), help="where the figures go")
    parser.add_argument(
        "--markdown", action="store_true", help="print the tables as Markdown, as experiments/theory/tables.md has them"
    )
    chosen = parser.parse_args(arguments)
    with log_to_terminal(bars=False):
        return run_guarded(lambda: _study(chosen.folder, markdown=chosen.markdown))


def _study(folder: Path, *, markdown: bool) -> int:
    from attnpo.display.output import make_console, print_sections
    from attnpo.display.page import Section
    from experiments.theory.figures import theory_figure, tightness_figure
    from experiments.theory.study import run_study
    from experiments.theory.tables import report_markdown, tables

    study = run_study()
    first = theory_figure(study, folder / "theory.png")
    second = tightness_figure(study, folder / "tightness.png")
    if markdown:
        sys.stdout.write(f"{report_markdown(study)}\n\n")
    else:
        print_sections(make_console(), [Section(one.caption, [replace(one, caption="")]) for one in tables(study)])
    sys.stdout.write(f"figures: {first} {second}\n")
    return 0


if __name__ == "__main__":
    install_signal_handlers()
    sys.exit(main())
