"""Dispatcher for ``attnpo COMMAND ...`` and ``python -m attnpo COMMAND ...``.

Runs a command exactly like ``python -m attnpo.COMMAND``, with the same exit statuses, signals and child processes.
"""

import os
import runpy
import shlex
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from attnpo.cli.terminal import CALLED, rewrite_commands
from attnpo.system.processes import is_main_process
from attnpo.system.version import VERSION

COMMANDS = {
    "fit": "train one run, or all runs of a study",
    "weigh": "compute token weights before training, in any number of processes",
    "show": "look at pairs: tokens, weights and log-probs of both answers",
    "generate": "let a model answer prompts",
    "pair": "rank several answers to a prompt and build preference pairs",
    "evaluate": "measure a model on a benchmark, or a judge before it is used",
    "report": "tables and figures of finished runs, studies and evaluations",
}
MOVED = ("theory", "verify")
"""Moved commands, which only print their new location; they will be removed in 0.2.0."""
USAGE = """\
usage: python -m attnpo COMMAND [...]

Token-weighted preference optimisation of causal language models.

commands:
{commands}

Start here; this trains a small model, without a network or a GPU:
  python -m attnpo.fit
Options of a command, with examples:
  python -m attnpo.fit --help
"""


def available_commands() -> dict[str, str]:
    """Returns the available commands with one-line descriptions, without importing their modules."""
    return {name: line for name, line in COMMANDS.items() if find_spec(f"attnpo.{name}") is not None}


def usage_text() -> str:
    """Returns the text printed by ``attnpo`` without arguments."""
    return rewrite_commands(
        USAGE.format(commands="\n".join(f"  {name:<9} {line}" for name, line in available_commands().items()))
    )


def main(words: Sequence[str]) -> int:
    """Runs the command named by the first of ``words``; returns its exit status, or 2 for an unknown command."""
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(usage_text())
        return 0
    if words[0] == "--version":
        sys.stdout.write(f"attnpo {VERSION}\n")
        return 0
    name, rest = words[0], list(words[1:])
    if name not in (*available_commands(), *MOVED):
        if is_main_process():
            sys.stderr.write(rewrite_commands(f"error: {_unknown_command_message(words)}\n"))
        return 2
    sys.argv[1:] = rest
    # The command becomes the main module, because code that starts child processes reads its name there.
    runpy.run_module(f"attnpo.{name}", run_name="__main__", alter_sys=True)
    return 0


def _unknown_command_message(words: Sequence[str]) -> str:
    from attnpo.config.reader import did_you_mean

    if "=" in words[0]:
        return f"{words[0]}: expected a command first, e.g. `python -m attnpo.fit {shlex.quote(words[0])}`"
    names = list(available_commands())
    return f"{words[0]}: no such command{did_you_mean(words[0], names)}\ncommands: {', '.join(names)}"


def script() -> int:
    """Runs the installed ``attnpo`` script; returns its exit status."""
    os.environ[CALLED] = sys.argv[0]
    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
