"""Cached digests of large files, so that they are not hashed again on every start.

The digests are stored next to the weight store. A digest is valid only while path, device, inode, size, mtime and ctime
are unchanged; ctime cannot be set by hand.
"""

import logging
import os
import time
from contextlib import suppress
from pathlib import Path

from attnpo.system.files import digest, file_digest, read_record, write_record

log = logging.getLogger(__name__)

CHOICES = ("kept", "full")
LARGE = 1 << 20
"""Minimum file size in bytes for a cached digest; smaller files are hashed quickly."""
SETTLED = 2 * 10**9
"""Nanoseconds after a write in which another write may leave the timestamps unchanged; no digest is cached then."""

_known: dict[tuple[str | int, ...], str] = {}
_places: list[tuple[Path, bool]] = []


def set_digest_folder(folder: Path, *, full: bool = False) -> None:
    """Sets the folder for cached digests; with ``full``, cached digests are ignored and all files are hashed again."""
    _places[:] = [(folder.absolute(), full)]  # independent of later changes of the working directory


def cached_digest(file: Path) -> str:
    """Returns a file's SHA-256 from the cache, or hashes the file, at most once per process and file state."""
    facts = _file_metadata(file)
    key = tuple(facts.values())
    if key not in _known:
        _known[key] = _read_cached_digest(facts) or _hash_and_store(file, facts)
    return _known[key]


def _file_metadata(file: Path) -> dict[str, str | int]:
    found = file.stat()
    # A copy may preserve size and modification time, but not inode and change time.
    return {
        "path": str(file.resolve()),
        "device": found.st_dev,
        "inode": found.st_ino,
        "size": found.st_size,
        "mtime_ns": found.st_mtime_ns,
        "ctime_ns": found.st_ctime_ns,
    }


def _record_path(facts: dict[str, str | int]) -> Path | None:
    """Returns the path of a file's digest record; None for small files and file systems without reliable timestamps."""
    sure = os.name == "posix" and facts["inode"] and facts["ctime_ns"]  # on Windows ctime is the creation time
    if not _places or not sure or int(facts["size"]) < LARGE:
        return None
    return _places[0][0] / f"{digest(facts['path'])[:20]}.json"


def _read_cached_digest(facts: dict[str, str | int]) -> str | None:
    place = _record_path(facts)
    if place is None or _places[0][1]:
        return None
    record = read_record(place) or {}
    found = record.pop("sha256", None)
    if record != facts or not isinstance(found, str):
        return None
    log.info("%s: unchanged since it was hashed (set digests=full to hash it again)", Path(str(facts["path"])).name)
    return found


def _hash_and_store(file: Path, facts: dict[str, str | int]) -> str:
    place, settled = _record_path(facts), time.time_ns() - int(facts["ctime_ns"]) > SETTLED
    found = file_digest(file)
    if place is not None and settled and _file_metadata(file) == facts:
        with suppress(OSError):  # full disk or read-only store: the file is hashed again next time
            place.parent.mkdir(parents=True, exist_ok=True)
            write_record(place, {**facts, "sha256": found})
    return found
