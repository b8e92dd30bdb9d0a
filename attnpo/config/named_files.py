"""Finds and hashes files and modules named in settings; searches the working directory and the configs."""

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
    """Returns the path of the file ``name``. Raises UserError naming the config key ``key`` if it does not exist."""
    if (found := _existing_file(name)) is None:
        raise UserError(f"{key}={name}: no such file in {Path.cwd()} or among the configs in {CONFIG_DIR}")
    return Path(found).resolve()


def read_template(template: str | None, key: str = "model.chat_template") -> str | None:
    """Returns the text of a chat template, given as Jinja text or as a file name."""
    if template is None or "{%" in template or "{{" in template:
        return template
    path = find_file(template, key)
    text = path.read_text(encoding="utf-8")
    if "{" not in text:
        raise UserError(f"{key}={template}: {path} is not a Jinja template")
    return text.removesuffix("\n")


# Keys whose value may name a file; the file's content is digested.
FILES = re.compile(r"(.*\.)?\w+_(file|template)")
# Keys that hold import paths of functions; their modules are digested like those of components.
FUNCTIONS = ("weights.function",)


def is_at_or_below(key: str, parents: Sequence[str]) -> bool:
    """Returns whether ``key`` is one of ``parents`` or nested below one."""
    return any(key == parent or key.startswith(f"{parent}.") for parent in parents)


def digest_named_files(values: Mapping[str, object]) -> dict[str, str]:
    """Returns digests, by key, of files named in flat settings and of modules with components outside the package.

    A component outside the package may name files under any key. In the package, only keys matching ``FILES`` name
    files.
    """
    texts = {key: value for key, value in values.items() if isinstance(value, str)}
    code = {key: _module_file(text) for key, text in texts.items() if _is_import_path_key(key)}
    outside = [key.rpartition(".")[0] for key, path in code.items() if path is not None and key not in FUNCTIONS]
    files = {
        key: _existing_file(text) for key, text in texts.items() if FILES.fullmatch(key) or is_at_or_below(key, outside)
    }
    return {key: file_digest(Path(path)) for key, path in {**files, **code}.items() if path is not None}


def digest_named_functions(values: Mapping[str, Json]) -> dict[str, str]:
    """Returns digests, by key, of the modules of functions named in a config, except those inside the package."""
    return digest_named_files({key: value for key, value in flatten(values) if key in FUNCTIONS})


def _is_import_path_key(key: str) -> bool:
    """Returns whether the value of ``key`` is the import path of a class or a function."""
    return key.endswith("_target_") or key in FUNCTIONS


def _existing_file(name: str) -> str | None:
    """Finds a file by name in the working directory or among the configs; returns None if it does not exist."""
    return next(filter(os.path.isfile, (os.path.expanduser(name), str(CONFIG_DIR / name))), None)


def _module_file(dotted: str) -> str | None:
    """Returns the source file of a component outside the package; None if it is inside or has no file."""
    name = dotted.rpartition(".")[0]
    try:
        spec = None if name.partition(".")[0] == PACKAGE.name else find_spec(name)
    except (ImportError, ValueError):
        return None  # reported when the component is built
    return spec.origin if spec is not None and spec.has_location else None
