"""Files and modules that settings name: looked for from the working directory, then among the configs; digested."""

import os
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from attnpo.config.compose import CONFIG_DIR
from attnpo.system.errors import UserError
from attnpo.system.files import Json, file_digest, flatten
from attnpo.system.source_digest import PACKAGE


def find_file(name: str, key: str) -> Path:
    """Returns the existing file ``name``; ``key`` is the config key that names it, for the error."""
    if (found := _existing_file(name)) is None:
        raise UserError(f"{key}={name}: no such file from {Path.cwd()} or among the configs in {CONFIG_DIR}")
    return Path(found).resolve()


def read_template(template: str | None, key: str = "model.chat_template") -> str | None:
    """Returns a chat template's text: as given when it holds Jinja, else the content of the file it names."""
    if template is None or "{%" in template or "{{" in template:
        return template
    path = find_file(template, key)
    text = path.read_text(encoding="utf-8")
    if "{" not in text:
        raise UserError(f"{key}={template}: {path} holds no Jinja template")
    return text.removesuffix("\n")


# Keys whose text may name a file, which counts by what it holds.
FILES = re.compile(r"(.*\.)?\w+_(file|template)")
# Import paths of functions, whose modules are compared as those of components are.
FUNCTIONS = ("weights.function",)


def is_at_or_below(key: str, parents: Sequence[str]) -> bool:
    """Returns whether ``key`` is one of ``parents`` or lies below one."""
    return any(key == parent or key.startswith(f"{parent}.") for parent in parents)


def digest_named_files(values: Mapping[str, object]) -> dict[str, str]:
    """Digests of the files that flat settings name, and of the modules of components outside the package, by key.

    A component outside the package may name a file by any key; in the package ``FILES`` says which keys do.
    """
    texts = {key: value for key, value in values.items() if isinstance(value, str)}
    code = {key: _module_file(text) for key, text in texts.items() if _is_import_path_key(key)}
    outside = [key.rpartition(".")[0] for key, path in code.items() if path is not None and key not in FUNCTIONS]
    files = {
        key: _existing_file(text) for key, text in texts.items() if FILES.fullmatch(key) or is_at_or_below(key, outside)
    }
    return {key: file_digest(Path(path)) for key, path in {**files, **code}.items() if path is not None}


def digest_named_functions(values: Mapping[str, Json]) -> dict[str, str]:
    """Digests of the modules of functions outside the package that a config names, by key."""
    return digest_named_files({key: value for key, value in flatten(values) if key in FUNCTIONS})


def _is_import_path_key(key: str) -> bool:
    """Returns whether a key's text is the import path of a class or a function."""
    return key.endswith("_target_") or key in FUNCTIONS


def _existing_file(name: str) -> str | None:
    """Returns the file of a name, from the working directory or among the configs; None where there is none."""
    return next(filter(os.path.isfile, (os.path.expanduser(name), str(CONFIG_DIR / name))), None)


def _module_file(dotted: str) -> str | None:
    """Returns the file of the module that a component outside the package is in."""
    name = dotted.rpartition(".")[0]
    try:
        spec = None if name.partition(".")[0] == PACKAGE.name else find_spec(name)
    except (ImportError, ValueError):
        return None  # told when it is built
    return spec.origin if spec is not None and spec.has_location else None
