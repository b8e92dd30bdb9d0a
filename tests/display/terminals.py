"""Commands in terminals of 80 and 120 columns, by `make screenshots`: FOLDER/terminal-NAME-WIDTH.svg and .png.

Of a tiny random model, whose numbers mean nothing. ``python -m tests.display.terminals FOLDER [NAME ...]`` takes some.
"""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tests.display.browser import Browser, browser
from tests.run.worlds import World, build_world

WIDTHS = (80, 120)
CONTROL = re.compile(r"(\x1b\[[0-9;?]*[A-Za-z]|[\r\n])")


def commands(world: World, output: Path) -> Iterator[tuple[str, list[str]]]:
    """Each picture's name and command; later ones read what earlier ones leave."""
    place = f"output={output}"
    given = [word for word in world.overrides() if not word.startswith("trainer.progress")]
    yield "run", ["fit", *given, "experiment=none", "name=run", place]
    study = ["experiment=quickstart", "study.workers=1", "callbacks=none", "name=study", place]
    yield "study", ["fit", *given, *study]
    yield "report", ["report", "study", str(output / "study"), "name=report", place]
    yield "weights", ["report", "weights", *given, "layers=[1,2]", "name=weights", place]
    yield "show", ["show", f"run={output / 'run'}", "rows=1"]
    yield "passport", ["evaluate", "benchmark=judge", *given, "name=passport", place]


def screen(words: Sequence[str], width: int) -> str:
    """What a terminal of so many columns shows when ``python -m attnpo`` has ended, colours kept."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    environment.pop("COLUMNS", None)
    program = [sys.executable, "-m", "attnpo", *words]
    parts = []
    with subprocess.Popen(program, stdin=follower, stdout=follower, stderr=follower, env=environment):
        os.close(follower)
        while True:
            try:
                part = os.read(leader, 65536)
            except OSError:  # Linux's way to say that the other end is closed
                break
            if not part:
                break
            parts.append(part)
    os.close(leader)
    return settled(b"".join(parts).decode(errors="replace"))


def settled(text: str) -> str:
    """The lines that stand when all that moves the cursor up or clears a line has been done."""
    lines, at = [""], 0
    for part in CONTROL.split(text):
        if part == "\n":
            at += 1
            lines += [""] * (at + 1 - len(lines))
        elif (up := re.fullmatch(r"\x1b\[(\d*)A", part)) is not None:
            at = max(0, at - int(up[1] or 1))
        elif re.fullmatch(r"\x1b\[[02]?K", part):
            lines[at] = ""
        elif part != "\r" and not re.fullmatch(r"\x1b\[[0-9;?]*[A-LN-Za-ln-z]", part):
            lines[at] += part
    return "\n".join(lines).rstrip()


def take(tab: Browser, text: str, width: int, folder: Path, name: str) -> Path:
    """The picture of a screen."""
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(text))
    drawn, page = (folder / f"{name}.{kind}" for kind in ("svg", "html"))
    console.save_svg(str(drawn), title=f"{width} columns")
    page.write_text(f'<body style="margin:0"><img src="{drawn.name}" style="width:{10 * width}px">', encoding="utf-8")
    tab.open(page)
    page.unlink()
    return tab.screenshot(folder / f"{name}.png", whole=True)


def main(given: Sequence[str]) -> None:
    """Takes the pictures and prints their names."""
    folder, names = Path(given[0]), given[1:]
    folder.mkdir(parents=True, exist_ok=True)
    with browser() as tab, tempfile.TemporaryDirectory() as place:
        world = build_world(Path(place))
        for width in WIDTHS:
            for name, words in commands(world, Path(place) / f"outputs-{width}"):
                if not names or name in names:
                    taken = take(tab, screen(words, width), width, folder, f"terminal-{name}-{width}")
                    sys.stdout.write(f"{taken}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
