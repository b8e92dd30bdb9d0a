"""What docs/troubleshooting.md quotes is what the program says."""

import ast
import re
from functools import cache

import pytest

from tests.docs.commands import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
QUOTES = [line for block in re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
HOLE = "\0"


def shown(part: ast.expr, named: dict[str, object]) -> str:
    """The text of a part: a module's own constant as it is, any other value as a mark."""
    if isinstance(part, ast.Constant):
        return str(part.value)
    name = part.value.id if isinstance(part, ast.FormattedValue) and isinstance(part.value, ast.Name) else ""
    return str(named.get(name, HOLE))


@cache
def said() -> list[str]:
    """Every text of the package's code, with a mark for each value put into it."""
    texts = []
    for path in (ROOT / "attnpo").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        named = {
            target.id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(shown(part, named) for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(re.sub(r"%\(?\w*\)?[.\d]*[a-z]", HOLE, node.value))
    return texts


def test_every_symptom_has_a_section() -> None:
    sections = re.findall(r"^## (.+)$", PAGE, re.MULTILINE)
    assert len(sections) >= 10 and len(QUOTES) >= 15


@pytest.mark.parametrize("quote", QUOTES)
def test_a_quote_is_in_the_source(quote: str) -> None:
    parts = [part.strip() for part in quote.split("...") if re.search(r"\w", part)]
    assert parts
    missing = [part for part in parts if not any(part in text for text in said())]
    assert not missing, f"attnpo says nowhere: {missing}"
