"""Files of a benchmark's own repository, read from a checkout that the user names; nothing in it is executed."""

import ast
import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Formatter
from typing import Any, NoReturn, cast

from attnpo.schema import Message, UserError
from attnpo.system.files import parse_json

NAME = str | int
"""Name in a file: a text, not empty, or a whole number."""
_KINDS = {str: "a text", NAME: "a name or a whole number", list: "a list", dict: "an object"}


@dataclass(frozen=True)
class Checkout:
    """Folder with a benchmark's files.

    ``key`` and ``given`` are the config key and its value, ``source`` says how to get the folder; errors name them.
    ``digests`` collects the SHA-256 of every file as it was read, by its path in the folder.
    """

    folder: Path
    key: str
    given: str
    source: str
    digests: dict[str, str] = field(default_factory=dict)

    def text(self, name: str) -> str:
        """Returns the UTF-8 text of the file ``name``. UserError where it is missing, empty or no such text."""
        path = self.folder / name
        try:
            content = path.read_bytes()
            text = content.decode("utf-8-sig")
        except FileNotFoundError:
            self.refuse(name, "is missing")
        except (OSError, UnicodeDecodeError) as error:
            self.refuse(name, f"cannot be read as UTF-8 text ({error})")
        if not text.strip():
            self.refuse(name, "is empty")
        self.digests[name] = hashlib.sha256(content).hexdigest()
        return text

    def rows(self, name: str, form: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the objects of the JSON lines file ``name``. UserError for a line of another ``form``, by number."""
        lines = enumerate(self.text(name).split("\n"), 1)  # not splitlines: U+2028 stands in real prompts
        return [self._parse(f"{name}, line {number}", line, form) for number, line in lines if line.strip()]

    def json(self, name: str, form: object) -> Any:
        """Returns the value in the JSON file ``name``. UserError for one of another ``form``."""
        return self._parse(name, self.text(name), form)

    def _parse(self, where: str, text: str, form: object) -> Any:
        try:
            value = parse_json(text)
        except ValueError as error:
            self.refuse(where, f"is not JSON ({error}); the file is damaged or half-written")
        self.require(where, value, form)
        return value

    def rows_by(self, key: str, name: str, form: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Returns the objects of a file by the name in ``key``. UserError for a name that stands twice."""
        found: dict[str, dict[str, Any]] = {}
        for row in self.rows(name, {key: NAME, **form}):
            if str(row[key]) in found:
                self.refuse(name, f"has {key} {row[key]} twice")
            found[str(row[key])] = row
        return found

    def require(self, where: str, value: object, form: object) -> None:
        """Raises UserError about the place ``where`` in a file, or one within it, for a value of another form.

        A form is a type, ``{key: form}`` of an object, ``[form]`` of each item of a list that is not empty, or
        ``[..., form]`` of its last item.
        """
        kind = type(form) if isinstance(form, list | dict) else cast(type, form)
        if not isinstance(value, kind) or isinstance(value, bool) or (value in ("", []) and kind is not str):
            got = "it is missing" if value is ... else f"got {str(value)[:40]!r}"
            self.refuse(where, f"has to be {_KINDS[kind]}, {got}")
        if isinstance(form, dict) and isinstance(value, dict):
            for key, inner in form.items():
                self.require(f"{where}: {key}", value.get(key, ...), inner)
        elif isinstance(form, list) and isinstance(value, list):
            last = len(value) - 1
            for place in range(last, last + 1) if form[0] is ... else range(last + 1):
                self.require(f"{where}[{place}]", value[place], form[-1])

    def require_template(self, where: str, text: str, places: Sequence[str]) -> None:
        """Raises UserError unless ``str.format`` finds each of ``places`` in ``text``, plain, and no other.

        A template of somebody else could read attributes through a place that is not plain.
        """
        try:
            parts = [part for part in Formatter().parse(text) if part[1] is not None]
        except ValueError as error:
            self.refuse(where, f"is no template ({error})")
        found = {f"{name}{'!' * bool(conv)}{conv or ''}{':' * bool(form)}{form}" for _, name, form, conv in parts}
        if found != set(places):
            listed = [" ".join("{" + name + "}" for name in names) or "none" for names in (places, sorted(found))]
            self.refuse(where, f"has to have the places {listed[0]}, it has {listed[1]}")

    def refuse(self, where: str, problem: str) -> NoReturn:
        """Raises a UserError about the place ``where`` in the folder, with the way to get the folder anew."""
        raise UserError(f"{self.key}={self.given}: {where} {problem} (looked in {self.folder}). {self.source}")


def grader_messages(system: str, template: str, values: dict[str, str]) -> tuple[Message, ...]:
    """Returns the messages to a grader: ``template`` filled in one pass after ``system``, where that is not empty."""
    before = (Message(role="system", content=system),) if system else ()
    return (*before, Message(role="user", content=template.format(**values)))


# ------------------------------------------------------------------------------------- constants of a Python file


class _Inliner(ast.NodeTransformer):
    """Puts the values of earlier constants in the place of their names, and joins texts."""

    def __init__(self) -> None:
        self.known: dict[str, Any] = {}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self.known[node.id]) if node.id in self.known else node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        texts = [side.value for side in (node.left, node.right) if isinstance(side, ast.Constant)]
        if isinstance(node.op, ast.Add) and len(texts) == 2 and all(isinstance(text, str) for text in texts):
            return ast.Constant("".join(map(str, texts)))
        return node


def read_constant(text: str, name: str) -> Any:
    """Reads the value that the Python file ``text`` gives ``name`` at its top, without running it.

    Raises:
        ValueError: the file is no Python, has no such name, or gives it something that only running it would tell.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # "\\d" in a text of somebody else
            warnings.simplefilter("ignore", DeprecationWarning)  # the same before Python 3.12
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"is no Python file ({error})") from error
    inliner = _Inliner()
    for statement in tree.body:
        if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
            continue
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        try:
            inliner.known |= dict.fromkeys(names, ast.literal_eval(inliner.visit(statement.value)))
        except (ValueError, TypeError, RecursionError, MemoryError):
            for each in names:
                inliner.known.pop(each, None)
    if name not in inliner.known:
        raise ValueError(f"gives {name} no value that can be read without running the file")
    return inliner.known[name]
