"""What stands for a point where processes are killed; light, since every new process imports it."""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def fragile(
    overrides: Sequence[str], folder: Path, config_dir: Path | None, store: str | None, threads: int | None
) -> tuple[dict[str, Any], str | None]:
    """The name of the point as its result; a file of that name gets a line with the process each time it is run.

    ``killed`` dies as for want of memory, ``unlucky`` the first time only, once there is a line in ``beside``: one that
    is killed before it wrote that it ran would take its second time for the first. ``beside`` does not end the first
    time.
    """
    name = overrides[0]
    with (folder / name).open("a", encoding="utf-8") as file:
        file.write(f"{os.getpid()}\n")
    first = _runs(folder / name) == 1
    if name == "killed" or (name == "unlucky" and first):
        while not _runs(folder / "beside"):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "beside" and first:
        time.sleep(300)
    return {"name": name}, None


def _runs(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines()) if file.exists() else 0
