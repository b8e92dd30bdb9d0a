"""Constants of a Python file, read off its syntax tree: the file is never run."""

import ast
import warnings
from collections.abc import Mapping

from attnpo.schema import Json


def constant(text: str, name: str) -> Json:
    """Returns the value that the file ``text`` gives ``name`` at its top: texts, numbers, lists and dicts of them,
    other names.

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
    given: dict[str, Json | None] = {}
    for statement in tree.body:
        for target, value in _assigned(statement):
            try:
                given[target] = _value(value, given)
            except ValueError:
                given[target] = None
    if given.get(name) is None:
        raise ValueError(f"gives {name} no value that can be read without running the file")
    return given[name]


def _assigned(statement: ast.stmt) -> list[tuple[str, ast.expr]]:
    if isinstance(statement, ast.Assign):
        return [(target.id, statement.value) for target in statement.targets if isinstance(target, ast.Name)]
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value is not None:
        return [(statement.target.id, statement.value)]
    return []


def _value(node: ast.expr, given: Mapping[str, Json | None]) -> Json:
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | bool):
        return node.value
    if isinstance(node, ast.Name) and given.get(node.id) is not None:
        return given[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item, given) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {_key(key): _value(item, given) for key, item in zip(node.keys, node.values, strict=True)}
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _value(node.left, given), _value(node.right, given)
        if isinstance(left, str) and isinstance(right, str):
            return left + right
    raise ValueError(f"line {node.lineno} is no constant")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("a key is no text")
