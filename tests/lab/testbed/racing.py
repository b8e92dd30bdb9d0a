"""What one of several processes does that prepare the same folder. Imports little: a process of its own starts fast."""

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path

from attnpo.lab.testbed import prepare


def build(folder: Path) -> Mapping[str, object]:
    """A folder as any process builds it, and slowly."""
    time.sleep(0.3)
    (folder / "numbers").write_text("1 2 3", encoding="utf-8")
    return {"process": os.getpid()}


def use(target: str) -> None:
    """Prepares ``target`` and reads it."""
    logging.disable()
    prepare._ensure_built(Path(target), "base", build)
    assert (Path(target) / "numbers").read_text(encoding="utf-8") == "1 2 3"
