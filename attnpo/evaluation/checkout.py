"""Reads files of a benchmark's own repository from a local checkout, without executing any of them."""

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
"""Name in a file: a non-empty string or an integer."""
_KINDS = {str: "a string", NAME: "a name or an integer", list: "a list", dict: "an object"}


@dataclass(frozen=True)
class Checkout:
    """Folder with a benchmark's files.

    ``key`` and ``given``: config key and its value; ``source``: how to get the folder. Error messages include all
    three. ``digests`` collects the SHA-256 of every file read, by its path within the folder.
    """

    folder: Path
    key: str
    given: str
    source: str
    digests: dict[str, str] = field(default_factory=dict)

    def read_text(self, name: str) -> str:
        """Reads the UTF-8 text file ``name``.

        Raises:
            UserError: the file is missing, empty or not UTF-8.
        """
        path = self.folder / name
        try:
            content = path.read_bytes()
            text = content.decode("utf-8-sig")
        except FileNotFoundError:
            self.fail(name, "is missing")
        except (OSError, UnicodeDecodeError) as error:
            self.fail(name, f"cannot be read as UTF-8 text ({error})")
        if not text.strip():
            self.fail(name, "is empty")
        self.digests[name] = hashlib.sha256(content).hexdigest()
        return text

    def read_rows(self, name: str, form: dict[str, Any]) -> list[dict[str, Any]]:
        """Reads the objects in the JSON lines file ``name``.

        Raises:
            UserError: a line does not match ``form``; the message includes the line number.
        """
        lines = enumerate(self.read_text(name).split("\n"), 1)  # not splitlines: real prompts contain U+2028
        return [self._parse(f"{name}, line {number}", line, form) for number, line in lines if line.strip()]

    def read_json(self, name: str, form: object) -> Any:
        """Reads the JSON file ``name``.

        Raises:
            UserError: the value in the file does not match ``form``.
        """
        return self._parse(name, self.read_text(name), form)

    def _parse(self, where: str, text: str, form: object) -> Any:
        try:
            value = parse_json(text)
        except ValueError as error:
            self.fail(where, f"is not JSON ({error}); the file is damaged or incomplete")
        self.check_form(where, value, form)
        return value

    def read_rows_by(self, key: str, name: str, form: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Reads the objects in a JSON lines file and indexes them by the field ``key``.

        Raises:
            UserError: a value of ``key`` occurs twice.
        """
        found: dict[str, dict[str, Any]] = {}
        for row in self.read_rows(name, {key: NAME, **form}):
            if str(row[key]) in found:
                self.fail(name, f"contains {key} {row[key]} twice")
            found[str(row[key])] = row
        return found

    def check_form(self, where: str, value: object, form: object) -> None:
        """Checks that a value has the given form; ``where`` is its location in a file, for messages.

        A form is a type, ``{key: form}`` for an object, ``[form]`` for every item of a non-empty list, or
        ``[..., form]`` for its last item.

        Raises:
            UserError: the value, or a part of it, has a different form.
        """
        kind = type(form) if isinstance(form, list | dict) else cast(type, form)
        if not isinstance(value, kind) or isinstance(value, bool) or (value in ("", []) and kind is not str):
            got = "it is missing" if value is ... else f"got {str(value)[:40]!r}"
            self.fail(where, f"must be {_KINDS[kind]}, {got}")
        if isinstance(form, dict) and isinstance(value, dict):
            for key, inner in form.items():
                self.check_form(f"{where}: {key}", value.get(key, ...), inner)
        elif isinstance(form, list) and isinstance(value, list):
            last = len(value) - 1
            for place in range(last, last + 1) if form[0] is ... else range(last + 1):
                self.check_form(f"{where}[{place}]", value[place], form[-1])

    def check_template(self, where: str, text: str, places: Sequence[str]) -> None:
        """Checks that a ``str.format`` template has exactly the placeholders ``places``, without any modifiers.

        Modified placeholders are rejected because a third-party template could read attributes through them.

        Raises:
            UserError: the placeholders differ.
        """
        try:
            parts = [part for part in Formatter().parse(text) if part[1] is not None]
        except ValueError as error:
            self.fail(where, f"is not a valid template ({error})")
        found = {f"{name}{'!' * bool(conv)}{conv or ''}{':' * bool(form)}{form}" for _, name, form, conv in parts}
        if found != set(places):
            listed = [" ".join("{" + name + "}" for name in names) or "none" for names in (places, sorted(found))]
            self.fail(where, f"must have the placeholders {listed[0]}, got {listed[1]}")

    def fail(self, where: str, problem: str) -> NoReturn:
        """Raises a UserError about a location in the folder, with instructions for getting the folder."""
        raise UserError(f"{self.key}={self.given}: {where} {problem} (looked in {self.folder}). {self.source}")


def build_grader_messages(system: str, template: str, values: dict[str, str]) -> tuple[Message, ...]:
    """Builds the messages for a grader: the system message, unless empty, and the filled-in template."""
    before = (Message(role="system", content=system),) if system else ()
    return (*before, Message(role="user", content=template.format(**values)))


# ------------------------------------------------------------------------------------- constants of a Python file


class _Inliner(ast.NodeTransformer):
    """Replaces the names of earlier constants with the constants' values and joins string literals."""

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
    """Reads a top-level constant called ``name`` from the source ``text`` of a Python file, without running it.

    Raises:
        ValueError: the text is not Python, has no such constant, or the constant's value cannot be determined without
            running it.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # "\\d" in third-party source
            warnings.simplefilter("ignore", DeprecationWarning)  # its category before Python 3.12
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"is not a valid Python file ({error})") from error
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
        raise ValueError(f"does not define {name} as a constant that can be read without running the file")
    return inliner.known[name]
