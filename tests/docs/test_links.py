"""Links, anchors and the files that the Markdown names; the paper map; the citation."""

import ast
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import yaml

from attnpo import __version__
from attnpo.config.compose import list_groups
from tests.docs.commands import FENCE, INLINE, PAGES, ROOT

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
# Files that the text names in backticks: paths with a folder of the repository in front.
FILE = re.compile(r"^((?:attnpo|configs|docs|experiments|notebooks|tests)(?:/[\w.-]+)+/?)$")
# Files that a run or a reader makes.
MADE = re.compile(r"\b(RUN|NAME|TABLE)\b")
MAP = ROOT / "docs" / "paper_map.md"


def prose(path: Path) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", path.read_text(encoding="utf-8"))


@cache
def anchors(path: Path) -> set[str]:
    """The anchors that a code host makes of a page's headings: lower case, blanks as hyphens, other marks left out."""
    found: dict[str, int] = {}
    names = set()
    for title in re.findall(r"^#+ +(.+?) *$", prose(path), re.MULTILINE):
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        name = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        count = found.get(name, 0)
        found[name] = count + 1
        names.add(f"{name}-{count}" if count else name)
    return names


def on_pages(find: Callable[[Path], list[str]]) -> dict[str, list[str]]:
    """Returns the faults of each page, by its path."""
    return {str(page.relative_to(ROOT)): found for page in PAGES if (found := find(page))}


def test_a_page_holds_no_marks_of_a_merge() -> None:
    assert not on_pages(lambda page: re.findall(r"^(?:<{7} |>{7} |={7}$).*", page.read_text("utf-8"), re.MULTILINE))


def test_links_resolve() -> None:
    def broken(page: Path) -> list[str]:
        found = []
        for target in LINK.findall(re.sub(INLINE, "", prose(page))):
            file, _, anchor = target.partition("#")
            place = (page.parent / file).resolve() if file else page
            lost = not place.exists() or (anchor and place.suffix == ".md" and anchor not in anchors(place))
            found += [target] if lost and not re.match(r"\w+:", target) else []
        return found

    assert not on_pages(broken)


def test_files_that_are_named_exist() -> None:
    def missing(page: Path) -> list[str]:
        named = [found[1] for words in INLINE.findall(prose(page)) if (found := FILE.match(words))]
        return [name for name in named if not MADE.search(name) and not (ROOT / name).exists()]

    assert not on_pages(missing)


def test_options_that_are_named_exist() -> None:
    """``group=option`` in backticks names an option that is there; capitals stand for any."""
    known = list_groups()

    def wrong(page: Path) -> list[str]:
        pairs = [word.split("=", 1) for text in INLINE.findall(prose(page)) for word in text.split() if "=" in word]
        meant = [(group, option) for group, option in pairs if group in known and re.fullmatch(r"[\da-z_]+", option)]
        return [f"{group}={option}" for group, option in meant if option not in known[group]]

    assert not on_pages(lambda page: [word for word in wrong(page) if word not in OWN])


OWN = ("weights=mine", "benchmark=judge", "study=mine")  # a reader's own, and a command of its own


# ------------------------------------------------------------------------------------------------ the paper map

ROWS = [
    [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    for line in MAP.read_text(encoding="utf-8").partition("## Where we differ")[0].splitlines()
    if line.startswith("| ") and not line.startswith("| paper |")
]
SAME = re.compile(r"^the same\b")


def spread(word: str) -> list[str]:
    """``a/{b,c}.py`` as ``a/b.py`` and ``a/c.py``."""
    if found := re.search(r"\{([^}]*)\}", word):
        return [word.replace(found[0], each) for each in found[1].split(",")]
    return [word]


def of_column(number: int) -> list[str]:
    """The cells of a column, ``the same`` filled in from the row above."""
    cells: list[str] = []
    for row in ROWS:
        cells.append(cells[-1] + row[number] if SAME.match(row[number]) else row[number])
    return cells


@cache
def defined(path: Path) -> set[str]:
    """Names of the functions, methods and classes of a module."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, kinds)}


def test_an_entry_of_the_map_names_code_that_exists() -> None:
    """Files of the package, and a function or class in one of them at least."""
    for cell in of_column(1):
        places: list[Path] = []
        names = 0
        for words in re.findall(r"`([^`]+)`", cell):
            if words.endswith(".py"):
                places = [ROOT / ("" if file.startswith("experiments/") else "attnpo") / file for file in spread(words)]
                assert not [place for place in places if not place.is_file()]
            else:
                assert any(set(words.split(".")) <= defined(place) for place in places), words
                names += 1
        assert names, cell


def test_an_entry_of_the_map_names_a_config_that_exists() -> None:
    """An option, a key, a command or a folder of a table."""
    known, keys = list_groups(), all_keys()
    for cell in of_column(2):
        sound = 0
        for word in [each for text in re.findall(r"`([^`]+)`", cell) for each in text.split()]:
            group, sign, option = word.partition("=")
            if sign and group in known:
                assert option in known[group] or option.isupper(), word
            elif "/" in word:
                assert (ROOT / word).exists() or list((ROOT / "configs").glob(word)), word
            elif sign or "." in word:
                assert group.rpartition(".")[2] in keys or group.startswith(("attnpo.", "experiments.")), word
            else:
                continue
            sound += 1
        assert sound, cell


def test_an_entry_of_the_map_names_a_test_that_exists() -> None:
    """A file or folder of tests/ at least; golden records are recomputed by tests/conformance."""
    for cell in of_column(3):
        folder, found = ROOT / "tests", 0
        for word in re.findall(r"`([^`]+)`", cell):
            if word.startswith(("tests/", "test_")):
                place = ROOT / word if "/" in word else folder / word
                folder = place.parent
                assert place.exists(), word
                found += 1
            else:
                assert "golden" in cell, word
        assert found, cell


@cache
def all_keys() -> set[str]:
    """Every key of every config file."""
    found: set[str] = set()

    def walk(node: object) -> None:
        if isinstance(node, dict):
            found.update(str(key) for key in node)
            for value in node.values():
                walk(value)

    for path in (ROOT / "configs").rglob("*.yaml"):
        walk(yaml.safe_load(path.read_text(encoding="utf-8")))
    return found


# ------------------------------------------------------------------------------------------------ the citation


def test_the_citation_names_the_software_and_the_paper() -> None:
    """The keys that version 1.2.0 of the format requires, and what setup.cfg says."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(cited)
    assert (cited["cff-version"], cited["type"], cited["version"]) == ("1.2.0", "software", __version__)
    licence = re.search(r"^license = (.+)$", (ROOT / "setup.cfg").read_text(encoding="utf-8"), re.MULTILINE)
    assert licence is not None and cited["license"] == licence[1]
    paper = cited["preferred-citation"]
    assert {"type", "title", "authors"} <= set(paper) and not {"doi", "identifiers", "url"} & set(paper)
    assert paper["title"] in MAP.read_text(encoding="utf-8")


def test_the_papers_authors_are_the_sheets(shared: Path) -> None:
    sheet = (shared / "reference" / "PAPER.md").read_text(encoding="utf-8")
    paper = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["preferred-citation"]
    names = ", ".join(f"{one['given-names']} {one['family-names']}" for one in paper["authors"])
    assert f"Authors: {names} (" in " ".join(sheet.split())
    assert paper["repository-code"].removeprefix("https://") in sheet


def test_the_changelog_has_the_version() -> None:
    assert f"## {__version__}\n" in (ROOT / "docs" / "changelog.md").read_text(encoding="utf-8")
