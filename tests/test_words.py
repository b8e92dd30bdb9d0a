"""Words are code: first words of docstrings, names of functions and classes, and how much there is to read."""

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
NEVER = {"The", "A", "An", "What", "Whether", "How", "Which", "Why"}
NOUNS = {"This", "Its", "As", "Losses", "Weights", "Rows", "Tokens", "Pairs", "Digits", "Others", "Bytes"}
"""Words in -s that begin a sentence and are no verb."""
PARTICIPLE = re.compile(r"_?[a-z]+(ed|pt|ld|wn|eft|ost)")
PARTICIPLES, DOC_WORDS, README_WORDS = 30, 35_000, 800
SAME_PAPER = {"TISDPO"}  # one paper's objective and its form of weights; saved configurations hold both names


def nodes() -> list[tuple[str, ast.AST]]:
    files = [*(ROOT / "attnpo").rglob("*.py"), *(ROOT / "experiments").rglob("*.py")]
    return [(str(file.relative_to(ROOT)), node) for file in files for node in ast.walk(ast.parse(file.read_text()))]


def first_word(node: ast.AST) -> str:
    """Returns the first word of a node's docstring; empty without one."""
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return ""
    return ((ast.get_docstring(node) or "").split() or [""])[0].rstrip(",.:;")


def constant_text(node: ast.AST) -> list[str]:
    """Returns the text of a statement that is nothing else, such as what stands below a constant; empty for others."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return [node.value.value] if node.value.value.split() else []
    return []


def test_no_docstring_begins_with_an_article_or_a_question_and_those_of_functions_with_a_verb() -> None:
    words = [(file, node, first_word(node)) for file, node in nodes()]
    named = [(file, getattr(node, "name", "module"), word) for file, node, word in words if word in NEVER]
    assert named == []
    lines = [(file, node.lineno, text) for file, node in nodes() for text in constant_text(node)]
    assert [(file, line, text) for file, line, text in lines if text.split()[0] in NEVER] == []
    functions = [(file, node.name, word) for file, node, word in words if isinstance(node, ast.FunctionDef) and word]
    assert [found for found in functions if not re.fullmatch(r"[A-Z][a-z]+s", found[2]) or found[2] in NOUNS] == []
    assert len(functions) > 2000
    texts = [(file, getattr(node, "name", ""), ast.get_docstring(node) or "") for file, node, word in words if word]
    assert [found for found in texts if re.match(r"[A-Z][a-z]+s what\b", found[2])] == []


def test_functions_are_seldom_named_by_a_participle_and_no_two_classes_alike() -> None:
    package = [node for file, node in nodes() if file.startswith("attnpo/")]
    names = [node.name for node in package if isinstance(node, ast.FunctionDef)]
    participles = [name for name in names if PARTICIPLE.fullmatch(name)]
    assert len(participles) <= PARTICIPLES, sorted(participles)
    classes = Counter(node.name for node in package if isinstance(node, ast.ClassDef))
    assert [name for name, count in classes.items() if count > 1 and name not in SAME_PAPER] == []


def test_the_pages_can_be_read() -> None:
    words = {page.name: len(page.read_text(encoding="utf-8").split()) for page in (ROOT / "docs").glob("*.md")}
    assert sum(words.values()) <= DOC_WORDS, words
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= README_WORDS


def test_the_quick_tests_are_files_of_every_room() -> None:
    files = (ROOT / "tests" / "quick.txt").read_text(encoding="utf-8").split()
    assert [name for name in files if not (ROOT / name).is_file()] == []
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in files]
    rooms = sorted(folder.parent.name for folder in (ROOT / "attnpo").glob("*/__init__.py"))
    assert {room for room in rooms if not any(f"attnpo.{room}" in text for text in texts)} == set() and len(rooms) > 10
