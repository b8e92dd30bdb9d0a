"""Checkpoint folders on disk, replaced atomically: a complete one exists even if the process is killed."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypedDict

from attnpo.system.files import Json, fsync_path, parse_json

STATE = "state.ckpt"
ACCOUNT = "checkpoint.json"


class CheckpointInfo(TypedDict, total=False):
    """Contents of ``checkpoint.json``: the step, the run's settings, digests of its inputs, and the monitored value.

    ``merge``: the rounding error of merging adapters into the exported weights (``lora.MergeRounding.to_json``).
    """

    step: int
    config: dict[str, object]
    contents: dict[str, object]
    merge: dict[str, Json]


def _sibling(folder: Path, mark: str) -> Path:
    return folder.with_name(f"{folder.name}.{mark}")


def complete_folder(folder: Path) -> Path:
    """Returns the folder with the newest complete contents of ``folder``: normally ``folder`` itself.

    If a replacement was interrupted between its two renames, returns the new folder next to ``folder``; it is complete,
    because the old one is moved aside only after the new one is written.
    """
    if not folder.exists() and _sibling(folder, "old").exists() and _sibling(folder, "new").exists():
        return _sibling(folder, "new")
    return folder


@contextmanager
def replace_folder(folder: Path) -> Iterator[Path]:
    """Yields an empty folder that replaces ``folder`` when the block ends without an error.

    All files are flushed to disk first. If the block or the disk fails, ``folder`` is unchanged.
    """
    finish_replacement(folder)
    new, old = _sibling(folder, "new"), _sibling(folder, "old")
    new.mkdir(parents=True)
    try:
        yield new
        for path in sorted(new.rglob("*")):
            fsync_path(path)
        fsync_path(new)
    except BaseException:  # not around the renames: there the new folder may be the only one
        shutil.rmtree(new, ignore_errors=True)
        raise
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    fsync_path(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def finish_replacement(folder: Path) -> None:
    """Finishes a replacement that was interrupted between its two renames, and removes other leftovers."""
    newest_whole = complete_folder(folder)
    if newest_whole != folder:
        newest_whole.rename(folder)
    for mark in ("new", "old"):
        shutil.rmtree(_sibling(folder, mark), ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Removes ``folder`` and the leftovers of its replacements."""
    finish_replacement(folder)
    shutil.rmtree(folder, ignore_errors=True)


def write_checkpoint_info(folder: Path, account: Mapping[str, object]) -> None:
    """Writes the description of a checkpoint folder to its ``checkpoint.json``."""
    (folder / ACCOUNT).write_text(json.dumps(dict(account), indent=1) + "\n", encoding="utf-8")


def read_checkpoint_info(folder: Path) -> CheckpointInfo:
    """Reads a folder's ``checkpoint.json``; returns an empty dict if there is none or it cannot be read."""
    try:
        account: CheckpointInfo = parse_json((complete_folder(folder) / ACCOUNT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return account if isinstance(account, dict) else {}


def latest_checkpoint(place: Path) -> tuple[int, Path] | None:
    """Returns the step and folder of the latest checkpoint in ``place`` (``last/`` wins ties), or None."""
    steps = [(read_checkpoint_info(place / name).get("step"), place / name) for name in ("last", "best")]
    known = [(int(step), folder) for step, folder in steps if step is not None]
    return max(known, key=lambda each: each[0], default=None)
