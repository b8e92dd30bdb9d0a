"""The versions of the testbed that are raised by hand: no change of the code they stand for goes by unnoticed."""

import ast
import hashlib
from pathlib import Path

import pytest

from attnpo.lab.testbed import grammar, prepare

FOLDER = Path(grammar.__file__).parent
# Each version with the files it stands for, and the digest of their code when it was last thought about.
RECORDED = {
    "RULES_VERSION": (grammar.RULES_VERSION, ("grammar.py",), 1, "8ad05c396c164337"),
    "CODE_VERSION": (
        prepare.CODE_VERSION,
        ("pairs.py", "pretrain.py", "sampling.py", "tokenizer.py", "words.py"),
        "1",
        "ae9ce1c13fe708c6",
    ),
}


def shape(node: object) -> object:
    """A syntax tree as nested lists, without docstrings, imports and annotations: what can change a number."""
    if isinstance(node, list):
        statements = [item for item in node if not isinstance(item, ast.Import | ast.ImportFrom)]
        return [shape(item) for item in statements if not is_text(item)]
    if isinstance(node, ast.AST):
        fields = [(name, value) for name, value in ast.iter_fields(node) if name not in ("annotation", "returns")]
        return [type(node).__name__, *([name, shape(value)] for name, value in fields if value not in (None, []))]
    return repr(node)


def is_text(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def code_digest(*texts: str) -> str:
    return hashlib.sha256(repr([shape(ast.parse(text)) for text in texts]).encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", RECORDED)
def test_a_change_of_the_code_asks_whether_the_version_must_be_raised(name: str) -> None:
    version, files, recorded_version, recorded = RECORDED[name]
    now = code_digest(*((FOLDER / file).read_text(encoding="utf-8") for file in files))
    assert (version, now) == (recorded_version, recorded), (
        f"the code of {', '.join(files)} has changed. Would the same recipe now give another base, other pairs or "
        f"another truth? Then raise {name}. Either way record here: {name} with the digest {now}"
    )


def test_words_about_the_code_are_not_the_code() -> None:
    plain = "import a\ndef f(x):\n    return x + 1\n"
    assert code_digest(plain) == code_digest(
        'import b\ndef f(x: int) -> int:\n    """Adds."""\n    return x + 1  # one\n'
    )
    assert code_digest(plain) != code_digest(plain.replace("1", "2"))
    assert code_digest(plain) != code_digest(plain.replace("+", "-"))
