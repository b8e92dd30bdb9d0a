"""What is said of an override that cannot be composed: what there is in its place, and the nearest of that."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hydra.errors import OverrideParseException
from omegaconf import Container, DictConfig
from omegaconf.errors import OmegaConfBaseException

from attnpo.config.reader import did_you_mean, join
from attnpo.system.errors import UserError


def hydra_text(error: Exception) -> str:
    """Hydra's own text in few lines, without its tabs and links."""
    if isinstance(error, OverrideParseException):
        reason = re.sub(r"^Error parsing override .*\n", "", str(error)).partition("\n")[0]
        return (
            f"{error.override}: cannot be read ({reason}); put a value with brackets, commas, quotes or spaces in "
            "quotes of its own, as in \"KEY='a, b'\""
        )
    lines = [str(error).partition("\nConfig search path")[0]]
    if isinstance(error.__cause__, OmegaConfBaseException):
        lines.append(str(error.__cause__).partition("\n")[0])
    text = re.sub(r"\nSee https\S+ for details|\n\t_\w+(?=\n)", "", "\n".join(lines))
    text = text.replace(":\n\t", ": ").replace("\n\t", ", ")
    return re.sub(r"\n\s*\n", "\n", text)


def nearest_option(text: str, overrides: Sequence[str], known: dict[str, list[str]]) -> str:
    """``text`` with the option nearest to one that was not found, and null explained where an option is needed."""
    missing = re.search(r"Could not find '(.+)/([^/']+)'", text)
    if missing is not None and missing[1] in known:
        return text.replace(missing[0], missing[0] + did_you_mean(missing[2], known[missing[1]], f"{missing[1]}="), 1)
    for group, value in (override.split("=", 1) for override in overrides if "=" in override):
        if group in known and value not in known[group] and "Config group override" in text:
            listed = ", ".join(known[group])
            close = f"; ~{group} leaves it out" if value == "null" else did_you_mean(value, known[group], f"{group}=")
            return f"{group}={value}: a group takes one of its options ({listed}){close}"
    return text


def unknown_key(
    key: str, name: str, overrides: Sequence[str], groups: Sequence[str], compose: Callable[[list[str]], DictConfig]
) -> str:
    """Returns what to say of a key that there is not; ``compose`` makes what the other overrides give."""
    typed = next((override for override in overrides if override.lstrip("+~").partition("=")[0] == key), key)
    said = f"{typed}: there is no key {key}"
    rest = [override for override in overrides if override.lstrip("+~").partition("=")[0] != key]
    try:
        root: Any = compose(rest)
    except UserError:
        return said
    node, path = root, ""
    for part in key.split(".")[:-1]:
        if not isinstance(node, DictConfig) or part not in node:
            break
        node, path = node[part], join(path, part)
    if not isinstance(node, DictConfig):
        return f"{said}; `{path}` is a value, it has no keys"
    names = [str(key) for key in node if key != "_target_"] + ([] if path else [*groups])
    wrong = key[len(path) :].lstrip(".").partition(".")[0]
    elsewhere = sorted(
        (found for found in _single(root) if found.endswith(f".{key}") and not found.startswith("composed.")),
        key=lambda at: at.count("."),
    )
    elsewhere = [found for found in elsewhere if found.count(".") == elsewhere[0].count(".")]
    if elsewhere:
        said += f"; did you mean {' or '.join(elsewhere[:3])}?"
    else:
        said += did_you_mean(wrong, names, f"{path}." if path else "")
    return f"{said}\n`{path or name}` has: {', '.join(sorted(set(names)))}"


def _single(node: DictConfig, path: str = "") -> Iterator[str]:
    """Yields the dotted path of every key below ``node`` that holds a single value; no interpolation is resolved."""
    for key in node:
        child, found = node._get_node(key), join(path, str(key))
        if not isinstance(child, Container) or child._is_interpolation():
            yield found
        elif isinstance(child, DictConfig) and not child._is_none():
            yield from _single(child, found)
