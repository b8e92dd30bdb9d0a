"""``python -m attnpo.verify PATH...``: golden records recomputed through the objects that training builds."""

import argparse
import sys
from collections.abc import Sequence

from attnpo.console import as_called, guarded, hear_signals, reporting

DESCRIPTION = "Recompute golden records with the objects that training builds from its configuration."
EPILOG = """\
PATH is a losses.json, an extraction/ or evaluation/ folder, or a folder of these. One line per record: name, case,
largest absolute and relative error, and ok, FAIL, variant (differs on purpose, as the note says) or not built.
Exit status: 0, or 1 when a record fails or none was found, 2 when a path cannot be read.

example:
  python -m attnpo.verify golden/ --only 'twdpo*' --only 'extraction/rows 00*'"""


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line per record as it is done, and the counts; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog=as_called("python -m attnpo.verify"),
        description=DESCRIPTION,
        epilog=as_called(EPILOG),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="+", metavar="PATH")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help="records by 'name case'")
    options = parser.parse_args(argv)

    with reporting(bars=False):
        return guarded(lambda: _verify(options.paths, options.only))


def _verify(paths: Sequence[str], only: Sequence[str]) -> int:
    from attnpo.conformance import passed, summary, verify

    outcomes = []
    for outcome in verify(paths, only):
        outcomes.append(outcome)
        sys.stdout.write(outcome.line() + "\n")
        sys.stdout.flush()
    sys.stdout.write((summary(outcomes) if outcomes else "no golden record found") + "\n")
    return 0 if passed(outcomes) else 1


if __name__ == "__main__":
    hear_signals()
    sys.exit(main())
