"""``python -m tests.conformance PATH...``: golden records recomputed through the objects that training builds."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from shutil import get_terminal_size
from textwrap import fill

from attnpo.cli.terminal import install_signal_handlers, log_to_terminal, make_printable, rewrite_commands, run_guarded

FAMILIES = "families"
DESCRIPTION = "Recompute golden records with the objects that training builds from its configuration."
EPILOG = """\
PATH is a losses.json, an extraction/ or evaluation/ folder, or a folder of these. One line per record: name, case,
largest absolute and relative error, and ok, FAIL, variant (differs on purpose, as the note says) or not built.
Exit status: 0, or 1 when a record fails or none was found, 2 when a path cannot be read.

`families` in place of PATH builds every causal language model of transformers tiny and takes it through loader, judge,
layouts and commands: equal to the library's own eager numbers, policy only (no attention that can be read), refused
with the reason, not built (by transformers itself), or FAIL. keep=FOLDER leaves the models there, each with a
tokenizer, and a few pairs in FOLDER/pairs; only=gemma2,qwen* takes some; records=FILE keeps outcomes, and leaves out
what it holds when called again; table=FILE.md writes them as a page, which says at which commits they were made.

examples:
  python -m tests.conformance golden/ --only 'twdpo*' --only 'extraction/rows 00*'
  python -m tests.conformance families only=llama,gemma2,qwen3*
  python -m tests.conformance families records=outputs/families.jsonl table=docs/models.md"""
FAMILY_KEYS = ("keep", "only", "records", "table")


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line per record as it is done, and the counts; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog=rewrite_commands("python -m tests.conformance"),
        description=DESCRIPTION,
        epilog=rewrite_commands(EPILOG),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="golden records, or `families`")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help="records by 'name case'")
    options = parser.parse_args(argv)

    with log_to_terminal(bars=False):
        if options.paths[0] == FAMILIES:
            return run_guarded(lambda: _families(options.paths[1:]))
        return run_guarded(lambda: _verify(options.paths, options.only))


def _verify(paths: Sequence[str], only: Sequence[str]) -> int:
    from tests.conformance.recompute import passed, summary, verify

    outcomes = []
    for outcome in verify(paths, only):
        outcomes.append(outcome)
        _write(outcome.line())
    sys.stdout.write((summary(outcomes) if outcomes else "no golden record found") + "\n")
    return 0 if passed(outcomes) else 1


def _write(line: str) -> None:
    """Writes a line at once; what it says beyond a terminal's edge goes on below it, set in."""
    if sys.stdout.isatty():
        line = fill(line, get_terminal_size().columns, subsequent_indent=" " * 6, break_on_hyphens=False)
    sys.stdout.write(f"{make_printable(line)}\n")
    sys.stdout.flush()


def _families(words: Sequence[str]) -> int:
    from dataclasses import replace
    from pathlib import Path

    from attnpo.config.reader import did_you_mean
    from attnpo.schema import UserError
    from attnpo.system.machine import git_commit, package_versions
    from tests.conformance.families import matching, verify_families
    from tests.conformance.family_table import FAILED, append, recorded, require_page, share, summary, write_page

    given = dict(word.partition("=")[::2] for word in words)
    for key in given.keys() - set(FAMILY_KEYS):
        raise UserError(
            f"families: {key!r} is not known{did_you_mean(key, FAMILY_KEYS)}; give keep=FOLDER, only=NAME,NAME, "
            "records=FILE or table=FILE.md"
        )
    places = {key: Path(given[key]).expanduser() for key in given if key != "only"}
    records, table = places.get("records"), places.get("table")
    if table is not None:
        require_page(table)
    names = matching([name for name in given.get("only", "").split(",") if name])
    done = {} if records is None else {name: one for name, one in recorded(records).items() if name in names}
    left = [name for name in names if name not in done]
    at = git_commit() or ""
    for family in verify_families(left, places.get("keep")) if left else ():
        family = replace(family, commit=at)
        done[family.name] = family
        if records is not None:
            append(records, family)
        _write(family.line())
    ordered = [done[name] for name in names]
    sys.stdout.write(f"{summary(ordered)}. {share(ordered)}\n")
    if table is not None:
        write_page(
            table, ordered, package_versions(), shlex.join(["python", "-m", "tests.conformance", "families", *words])
        )
    return 1 if any(one.status == FAILED for one in ordered) else 0


if __name__ == "__main__":
    install_signal_handlers()
    sys.exit(main())
