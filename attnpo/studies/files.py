"""Files named in a config: looked for from the working directory, then among the configs."""

from pathlib import Path

from attnpo.config import CONFIG_DIR
from attnpo.schema import UserError


def find_file(name: str, key: str) -> Path:
    """The existing file ``name``; ``key`` is the config key that names it, for the error."""
    for candidate in (Path(name).expanduser(), CONFIG_DIR / name):
        if candidate.is_file():
            return candidate.resolve()
    raise UserError(f"{key}={name}: no such file from {Path.cwd()} or among the configs in {CONFIG_DIR}")
