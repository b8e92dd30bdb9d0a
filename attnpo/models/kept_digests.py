"""Digests of large files, kept beside the store: a start does not read again what an earlier one has hashed.

One counts only while path, device, inode, size and both times are those that it was hashed with; the time of change
(ctime) cannot be set by hand.
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
"""Bytes from which on a digest is kept on the disk: what is smaller is hashed in a moment."""
SETTLED = 2 * 10**9
"""Nanoseconds after a change in which another write may leave the same times: a digest taken then is not kept."""

_known: dict[tuple[str | int, ...], str] = {}
_places: list[tuple[Path, bool]] = []


def set_digest_folder(folder: Path, *, full: bool = False) -> None:
    """Keeps the digests of this process in ``folder`` from now on, and takes those there; ``full`` hashes again."""
    _places[:] = [(folder.absolute(), full)]  # whatever becomes the working directory


def cached_digest(file: Path) -> str:
    """Returns the sha256 of a file's bytes; reads it once per process and state on disk, or not at all if kept."""
    facts = _file_facts(file)
    key = tuple(facts.values())
    if key not in _known:
        _known[key] = _read_cached_digest(facts) or _hash_and_store(file, facts)
    return _known[key]


def _file_facts(file: Path) -> dict[str, str | int]:
    found = file.stat()
    # Copies may keep size and time of modification, but not the inode's number and time of change.
    return {
        "path": str(file.resolve()),
        "device": found.st_dev,
        "inode": found.st_ino,
        "size": found.st_size,
        "mtime_ns": found.st_mtime_ns,
        "ctime_ns": found.st_ctime_ns,
    }


def _record_path(facts: dict[str, str | int]) -> Path | None:
    """Returns where the digest of a file is kept, one record a path; None for small files and unsure file systems."""
    sure = os.name == "posix" and facts["inode"] and facts["ctime_ns"]  # on Windows ctime is the time of creation
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
    log.info("%s: not changed since it was hashed (digests=full hashes again)", Path(str(facts["path"])).name)
    return found


def _hash_and_store(file: Path, facts: dict[str, str | int]) -> str:
    place, settled = _record_path(facts), time.time_ns() - int(facts["ctime_ns"]) > SETTLED
    found = file_digest(file)
    if place is not None and settled and _file_facts(file) == facts:
        with suppress(OSError):  # no room, or a store that is only read: it is hashed again next time
            place.parent.mkdir(parents=True, exist_ok=True)
            write_record(place, {**facts, "sha256": found})
    return found
