"""Files that a configuration names: looked for from the working directory, then among the configs."""

from pathlib import Path

from attnpo.config.compose import CONFIG_DIR
from attnpo.system.errors import UserError


def find_file(name: str, key: str) -> Path:
    """Returns the existing file ``name``; ``key`` is the config key that names it, for the error."""
    for candidate in (Path(name).expanduser(), CONFIG_DIR / name):
        if candidate.is_file():
            return candidate.resolve()
    raise UserError(f"{key}={name}: no such file from {Path.cwd()} or among the configs in {CONFIG_DIR}")


def read_template(template: str | None, key: str = "model.chat_template") -> str | None:
    """Returns a chat template's text: as given when it holds Jinja, else the content of the file it names."""
    if template is None or "{%" in template or "{{" in template:
        return template
    path = find_file(template, key)
    text = path.read_text(encoding="utf-8")
    if "{" not in text:
        raise UserError(f"{key}={template}: {path} holds no Jinja template")
    return text.removesuffix("\n")
