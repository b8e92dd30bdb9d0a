"""Text of ``--help``: examples, and the command's config groups with comments from the root config file."""

import argparse
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import NoReturn

from attnpo.cli.terminal import rewrite_commands
from attnpo.system.errors import UserError

WIDTH, NOTES = 100, 51  # columns of a line, and before the notes
_HEADING = re.compile(r" *# (.+)")
_GROUP = re.compile(r" *- (?:override /)?(\w+): (\S+)(?: +# (.+))?")
_ALONE = "no other"
_PARENT = re.compile(r" *- (?!_self_)(\w+)(?: +# without (.+))?")


@dataclass(frozen=True)
class ConfigGroup:
    """Config group from the defaults list of a root config; ``default`` is "null" if the group is optional."""

    name: str
    default: str
    meaning: str
    heading: str

    def format_lines(self, options: Sequence[str]) -> list[str]:
        """Formats the group with its options (default first) and its purpose."""
        ordered = sorted(options, key=lambda option: option != self.default)
        text = f"{self.name}={' | '.join(ordered)}"
        lines = wrap_line(f"[{text}]" if self.default == "null" else text)
        if not self.meaning:
            return lines
        noted = f"{lines[-1]:<{NOTES}}   # {self.meaning}"
        return [*lines[:-1], noted] if len(noted) <= WIDTH else [*lines, f"      # {self.meaning}"]


def wrap_line(text: str) -> list[str]:
    """Wraps a group and its options to the help width."""
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)


def parse_groups(root: Path) -> list[ConfigGroup]:
    """Parses the groups in the defaults list of the file ``root``, in order, including those of parent files.

    Comments above groups are headings. ``# no other`` hides a group; ``- fit  # without logger`` hides a parent's
    group.
    """
    heading = ""
    listed: list[ConfigGroup] = []
    lines = root.read_text(encoding="utf-8").partition("defaults:\n")[2].splitlines()
    for line in takewhile(lambda line: line.startswith(" "), lines):
        if match := _HEADING.fullmatch(line):
            heading = match[1]
        elif match := _GROUP.fullmatch(line):
            if match[3] == _ALONE:
                continue
            listed.append(ConfigGroup(match[1], match[2], match[3] or "", heading))
        elif match := _PARENT.fullmatch(line):
            unread = re.findall(r"\w+", match[2] or "")
            listed += [group for group in parse_groups(root.with_name(f"{match[1]}.yaml")) if group.name not in unread]
    return listed


def format_groups(root: Path, options: Mapping[str, Sequence[str]]) -> str:
    """Formats a root's groups and their ``options`` under headings; groups that are not in any shipped root come last.

    Groups whose only option is the default are not shown.
    """
    lines: list[str] = []
    heading = ""
    legend = " (the default first; groups [in brackets] are optional)"
    for group in parse_groups(root):
        of = options.get(group.name, [])
        if list(of) == [group.default]:
            continue
        if group.heading != heading:
            heading = group.heading
            lines.append(f"{heading}{legend}:")
            legend = ""
        lines += group.format_lines(of)
    known = {group.name for file in root.parent.glob("*.yaml") for group in parse_groups(file)}
    lines += [
        line for name, of in options.items() if name not in known for line in wrap_line(f"+{name}={' | '.join(of)}")
    ]
    return "\n".join(lines)


class CommandParser(argparse.ArgumentParser):
    """Parser for the arguments that all commands accept besides overrides; raises UserError for invalid ones.

    ``name`` is the command and any fixed override, e.g. ``evaluate benchmark=judge``.
    """

    def __init__(self, name: str, description: str, examples: str, positional: str | None) -> None:
        words = f"[{positional.upper()} ...] " if positional else ""
        super().__init__(
            prog=f"python -m attnpo.{name}",
            usage=f"python -m attnpo.{name} {words}[GROUP=OPTION ...] [KEY=VALUE ...] [options]",
            description=f"{description}\n\nexamples:\n" + textwrap.indent(examples, "  "),
            formatter_class=partial(argparse.RawDescriptionHelpFormatter, width=WIDTH),
            add_help=False,
            allow_abbrev=False,
        )
        self.add_argument("words", nargs="*", help=argparse.SUPPRESS)
        self.add_argument("-h", "--help", action="store_true", help=argparse.SUPPRESS)
        shown = self.add_argument_group()
        shown.add_argument("--cfg", metavar="KEY", help="print the config (`job`) or one key of it, and exit")
        shown.add_argument("--config-dir", metavar="DIR", type=Path, help="a folder with your own config files")
        shown.add_argument(
            "-m", "--multirun", action="store_true", help="run one job per combination: a=1,2 b=3,4 gives four"
        )

    def error(self, message: str) -> NoReturn:
        """Raises a UserError that refers to ``--help``."""
        instead = ": write KEY=VALUE instead of --KEY VALUE" * message.startswith("unrecognized arguments")
        raise UserError(f"{message}{instead}; see --help")

    def help_text(self, root: Path, options: Mapping[str, Sequence[str]]) -> str:
        """Returns the full text of ``--help``."""
        self.description = f"{self.description}\n\n{format_groups(root, options)}"
        return rewrite_commands(self.format_help())
