"""Commands as the documents hold them: fenced lines, words in backticks, headers of configs, cells of notebooks."""

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "experiments").rglob("*.md")),
]
HEADED = sorted([*(ROOT / "configs").rglob("*.yaml"), *(ROOT / "experiments" / "sweeps").glob("*.yaml")])
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# What a line begins with that a reader is to type. In a fence that says it is a shell's, lines begin with nothing else.
PROGRAMS = ("python", "torchrun", "srun", "sbatch", "make", "pip", "vllm", "wandb", "attnpo", "export", "git", "cd")
SHELLS = ("bash", "sh", "shell", "console")
BEGINS = re.compile(rf"(?:\$ |! ?|%)?(?:\S*/bin/)?(?:{'|'.join(PROGRAMS)})(?:3(?:\.\d+)?)?(?= +\S|$)|\. \S")
# Words after a command are about it where they are no argument: two blanks before them, no `=` or `-` in the next word.
ABOUT = re.compile(r" {2,}(?! )(?![-'+~\\]|\S*=).*| +# .*")
FENCE = re.compile(r"^(```+)(\w*)[^\n]*\n(.*?)^\1", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
HEADER = re.compile(r"#\s+(.*)")


@dataclass(frozen=True)
class Command:
    """One command, without the words about it, and the file that holds it."""

    text: str
    place: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text)


def joined(text: str) -> list[str]:
    """Lines, those that end with a backslash with their next one."""
    return re.sub(r"\\\n\s*#?\s*", " ", text).splitlines()


def of_line(line: str) -> list[str]:
    """The commands of one line a shell would read; none where it begins with no program."""
    line = line.strip()
    if not BEGINS.match(line):
        return []
    line = ABOUT.sub("", re.sub(r"^[$!%] ?", "", line))
    return [part.strip() for part in line.split(" && ")]


def of_markdown(text: str) -> Iterator[str]:
    """Commands of a page; those in backticks count where they have an argument."""
    for _, language, block in FENCE.findall(text):
        if language not in ("", "text", *SHELLS):
            continue
        for line in joined(block):
            found = of_line(line)
            if not found and language in SHELLS and line.strip() and not line.strip().startswith("#"):
                yield line.strip()  # fails as a command of no known kind
            yield from found
    for words in INLINE.findall(FENCE.sub("", text)):
        words = " ".join(words.split())
        if " " in words:
            yield from of_line(words)


def of_notebook(path: Path) -> Iterator[str]:
    """Commands in the text of a notebook and after ``!`` in its code."""
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            yield from of_markdown(text)
        else:
            yield from (found for line in text.splitlines() if line.startswith("!") for found in of_line(line))


def of_header(path: Path) -> Iterator[str]:
    """Commands in the comments of a YAML file, on lines of their own."""
    comments = "\n".join(line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#"))
    for line in joined(comments):
        if found := HEADER.match(line):
            yield from (one for one in of_line(found[1]) if " -m " in one or one.startswith(("attnpo ", "wandb ")))


def every_command() -> list[Command]:
    """Each command once, with the first file that has it."""
    found: dict[str, str] = {}
    for path in PAGES:
        for text in of_markdown(path.read_text(encoding="utf-8")):
            found.setdefault(text, str(path.relative_to(ROOT)))
    for path in HEADED:
        for text in of_header(path):
            found.setdefault(text, str(path.relative_to(ROOT)))
    for path in NOTEBOOKS:
        for text in of_notebook(path):
            found.setdefault(text, str(path.relative_to(ROOT)))
    return [Command(text, place) for text, place in found.items()]
