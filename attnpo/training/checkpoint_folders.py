"""Checkpoint folders on disk: replaced as a whole, so that a complete one is found whenever a process was killed."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypedDict

from attnpo.system.files import Json, fsync_path, parse_json

STATE = "state.ckpt"
ACCOUNT = "checkpoint.json"


class Account(TypedDict, total=False):
    """Contents of ``checkpoint.json``: the step, the run's settings and contents, and the value of the monitor.

    ``merge``: what merging adapters into the exported weights took (``lora.Rounding.account``).
    """

    step: int
    config: dict[str, object]
    contents: dict[str, object]
    merge: dict[str, Json]


def _beside(folder: Path, mark: str) -> Path:
    return folder.with_name(f"{folder.name}.{mark}")


def whole(folder: Path) -> Path:
    """Returns the folder with the newest complete contents of ``folder``: itself unless a replacement was cut short.

    The old folder is moved aside only when the new one is complete.
    """
    if not folder.exists() and _beside(folder, "old").exists() and _beside(folder, "new").exists():
        return _beside(folder, "new")
    return folder


@contextmanager
def replace_folder(folder: Path) -> Iterator[Path]:
    """Opens an empty folder beside ``folder`` to write into; it takes the place of ``folder`` when the block ends well.

    Its files are on the disk before. When the block or the disk fails, ``folder`` is as it was.
    """
    tidy(folder)
    new, old = _beside(folder, "new"), _beside(folder, "old")
    new.mkdir(parents=True)
    try:
        yield new
        for path in sorted(new.rglob("*")):
            fsync_path(path)
        fsync_path(new)
    except BaseException:  # from the first rename on, the new folder may be the only one: it stays
        shutil.rmtree(new, ignore_errors=True)
        raise
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    fsync_path(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def tidy(folder: Path) -> None:
    """Finishes a replacement that was cut short between its two renames; removes what others have left."""
    newest_whole = whole(folder)
    if newest_whole != folder:
        newest_whole.rename(folder)
    for mark in ("new", "old"):
        shutil.rmtree(_beside(folder, mark), ignore_errors=True)


def remove(folder: Path) -> None:
    """Removes ``folder`` and what replacements of it have left."""
    tidy(folder)
    shutil.rmtree(folder, ignore_errors=True)


def write_account(folder: Path, account: Mapping[str, object]) -> None:
    """Writes what a checkpoint folder holds to its ``checkpoint.json``."""
    (folder / ACCOUNT).write_text(json.dumps(dict(account), indent=1) + "\n", encoding="utf-8")


def read_account(folder: Path) -> Account:
    """Returns what the checkpoint folder says it holds; empty where it has no ``checkpoint.json`` that can be read."""
    try:
        account: Account = parse_json((whole(folder) / ACCOUNT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return account if isinstance(account, dict) else {}


def newest(place: Path) -> tuple[int, Path] | None:
    """Returns optimiser step and folder of the newest checkpoint in ``place``, last/ of equals; None without any."""
    steps = [(read_account(place / name).get("step"), place / name) for name in ("last", "best")]
    known = [(int(step), folder) for step, folder in steps if step is not None]
    return max(known, key=lambda each: each[0], default=None)
