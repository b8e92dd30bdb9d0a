"""How large the package may be: statements, so that no layout of the lines and no docstring counts."""

import ast
from pathlib import Path

import attnpo

ROOT = Path(attnpo.__file__).parent
BESIDE = ("evaluation", "lab", "theory.py", "verify.py")
"""Rooms and redirects that a run on pairs and a model of one's own does not need."""

# Less is better: write lower numbers down when there are. A commit that raises one says why nothing else could go.
ALL, RUN = 29_508, 19_356


def count(file: Path) -> int:
    """Statements of a module, docstrings left out."""
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    texts = sum(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in nodes)
    return sum(isinstance(node, ast.stmt) for node in nodes) - texts


def test_the_package_has_no_more_statements_than_it_may() -> None:
    files = {file.relative_to(ROOT).as_posix(): count(file) for file in ROOT.rglob("*.py")}
    run = sum(size for name, size in files.items() if name.partition("/")[0] not in BESIDE)
    assert sum(files.values()) <= ALL
    assert run <= RUN
    assert sum(files.values()) > ALL - 1000 and run > RUN - 1000, (
        "far fewer: write the numbers of today down as the limits"
    )
