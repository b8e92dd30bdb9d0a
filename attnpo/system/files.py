"""Files on disk: atomic writes, sizes, and checksums that detect later changes.

Imports only the standard library and UserError.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnpo.system.errors import UserError

if TYPE_CHECKING:
    Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
else:  # the tests' type checker (beartype) fails on an alias that refers to itself
    Json = None | bool | int | float | str | list | dict
"""Value that can be represented in JSON."""

SEAL = "digests.json"
WRITING = ".writing-"
RECORD = "digest"
MARK = ".meta.json"
# Reading the umask requires setting it, which is not thread-safe; therefore it is read on import.
_UMASK = os.umask(0)
os.umask(_UMASK)


def write_atomically(path: Path, content: bytes | str) -> None:
    """Writes ``content`` to ``path`` atomically: even after a crash, the file is absent, unchanged or complete.

    The content is flushed to disk before it replaces the old file; permissions follow the umask.
    """
    with name_file_in_errors(path):
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=WRITING)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            apply_umask(Path(temporary))
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


@contextmanager
def name_file_in_errors(path: Path) -> Iterator[None]:
    """Adds ``path`` to an OSError raised inside the context. Python does not name the file when a write fails."""
    try:
        yield
    except OSError as problem:
        if problem.errno is not None:
            problem.filename = str(path)
        raise


def apply_umask(path: Path) -> None:
    """Sets the default permissions under the umask, because temporary files are accessible only to their owner."""
    path.chmod((0o777 if path.is_dir() else 0o666) & ~_UMASK)


def fsync_path(path: Path) -> None:
    """Flushes a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --------------------------------------------------------------------------------------------- digests


def file_digest(path: Path) -> str:
    """Returns the SHA-256 of a file's content in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_checksums(folder: Path, known: Mapping[str, str] | None = None, only: Sequence[str] | None = None) -> None:
    """Writes a digest of each file below ``folder`` to its ``digests.json``, which ``describe_change`` checks.

    ``known``: digests that are already computed, by relative path. ``only``: the files to include (None: all).
    """
    known = known or {}
    names = _list_files(folder) if only is None else sorted(only)
    files = {name: known.get(name) or file_digest(folder / name) for name in names}
    content = json.dumps({"files": files, "of_all": _combined_digest(files)}, indent=1)
    write_atomically(folder / SEAL, content + "\n")


def has_checksums(folder: Path) -> bool:
    """Returns whether ``folder`` contains checksums of its files."""
    return (folder / SEAL).is_file()


def read_checksums(folder: Path) -> dict[str, str]:
    """Reads the checksums stored in ``folder``; empty if they are missing or unreadable."""
    digests = _load_checksums(folder)
    return {} if isinstance(digests, str) else digests


def describe_change(
    folder: Path, only: Sequence[str] | None = None, digest: Callable[[Path], str] | None = None
) -> str | None:
    """Describes how a folder differs from its checksums, as a phrase to follow the folder's name; None if it matches.

    A folder without readable checksums counts as changed. ``only``: names or patterns of the files to check.
    ``digest``: replaces ``file_digest``.
    """
    files = _load_checksums(folder)
    if isinstance(files, str):
        return files
    there = set(_list_files(folder))
    if only is not None:
        lacking = [name for name in only if "*" not in name and name not in files]
        if lacking:
            return f"its {SEAL} does not list {lacking[0]}"
        files = {name: value for name, value in files.items() if any(_matches(name, pattern) for pattern in only)}
    for name, value in files.items():
        if name not in there:
            return f"{name} is missing"
        try:
            same = (digest or file_digest)(folder / name) == value
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if not same:
            return f"{name} has changed since it was written"
    unknown = sorted(there - files.keys()) if only is None else []
    return f"{unknown[0]} was added after the folder was written" if unknown else None


def _matches(name: str, pattern: str) -> bool:
    return name.count("/") == pattern.count("/") and fnmatch(name, pattern)


def _load_checksums(folder: Path) -> dict[str, str] | str:
    """Reads a folder's checksums; returns a description of the problem if that fails."""
    try:
        content = parse_json((folder / SEAL).read_text(encoding="utf-8"))
        files: dict[str, str] = content["files"]
        if content["of_all"] != _combined_digest(files):
            return f"its {SEAL} is damaged"
    except FileNotFoundError:
        return f"it has no {SEAL}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"its {SEAL} cannot be read"
    return files


def parse_json(text: str | bytes) -> Any:
    """Parses JSON. Raises ValueError if the text is not JSON or is nested too deeply for Python."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def write_record(path: Path, content: Mapping[str, object]) -> None:
    """Writes ``content`` as JSON to ``path`` atomically, with a digest that ``read_record`` verifies."""
    plain = json.loads(json.dumps(content))  # as it will be read: keys become strings
    write_atomically(path, json.dumps({**plain, RECORD: _combined_digest(plain)}, indent=1) + "\n")


def read_record(path: Path) -> dict[str, Any] | None:
    """Reads a file written by ``write_record``; None if the file does not exist or has changed since."""
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        return content if content.pop(RECORD) == _combined_digest(content) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def digest(value: object) -> str:
    """Returns the hexadecimal SHA-256 of a JSON-serialisable value, independent of key order but not of list order."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def add_row_digest(row: Mapping[str, object], of: str = "") -> dict[str, object]:
    """Returns a copy of ``row`` with a digest of ``of`` and the row's values, which ``pop_row_digest`` verifies."""
    return {**row, RECORD: digest({**row, RECORD: of} if of else dict(row))[:16]}


def pop_row_digest(row: object, of: str = "") -> bool:
    """Removes the digest from ``row``; returns whether it matches ``of`` and the remaining values."""
    return isinstance(row, dict) and row.pop(RECORD, None) == add_row_digest(row, of)[RECORD]


# --------------------------------------------------------------------------------------------- files named by users


def check_is_own_file(said: str, path: Path, mark: Path, written: Sequence[str], maker: str) -> None:
    """Checks that ``maker`` may write ``path``: the file does not exist, or is unchanged since ``maker`` wrote it.

    ``written``: digests of the versions that ``maker`` wrote, from the marker file ``mark``; empty if another program
    wrote the marker.

    Raises:
        UserError: another program wrote the file, or the file was changed.
    """
    strange = [file for file in (path, mark) if os.path.lexists(file) and not written]
    if strange or (os.path.lexists(path) and not (path.is_file() and file_digest(path) in written)):
        what = f"{strange[0]} was not written by {maker}" if strange else f"it has changed since {maker} wrote it"
        raise UserError(f"{said}: {what}; move the file elsewhere or choose a different one")


def check_is_marked_file(said: str, path: Path, maker: str) -> None:
    """Checks that ``path`` does not exist or is a file that ``write_marked_file`` wrote for ``maker``.

    Raises:
        UserError: ``path`` is any other file.
    """
    mark = path.with_name(f"{path.name}{MARK}")
    stored = read_record(mark) or {}
    check_is_own_file(said, path, mark, stored["written"] if stored.get("made_by") == maker else (), maker)


def write_marked_file(
    said: str, path: Path, content: bytes | str, maker: str, facts: Mapping[str, object] | None = None
) -> None:
    """Writes a marker FILE.meta.json with ``facts`` and the file's digest, and then the file, which the user named.

    Raises:
        UserError: ``path`` exists but was not written by ``maker``, or was changed since.
    """
    check_is_marked_file(said, path, maker)
    content = content.encode() if isinstance(content, str) else content
    # If the process stops between the two writes, the marker still matches the old file.
    written = [*([file_digest(path)] if path.is_file() else []), hashlib.sha256(content).hexdigest()]
    write_record(path.with_name(f"{path.name}{MARK}"), {**(facts or {}), "made_by": maker, "written": written})
    write_atomically(path, content)


def remove_partial_line(path: Path) -> bool:
    """Removes an incomplete last line left by an interrupted command; returns whether it removed one."""
    content = path.read_bytes() if path.is_file() else b""
    keep = content.rfind(b"\n") + 1
    if keep == len(content):
        return False
    with path.open("r+b") as file:
        file.truncate(keep)
    return True


def _list_files(folder: Path) -> list[str]:
    """Lists the files below ``folder``, except the checksum file and hidden files."""
    names = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(
        name.as_posix()
        for name in names
        if name.as_posix() != SEAL and not any(part.startswith(".") for part in name.parts)
    )


def _combined_digest(content: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(dict(content), sort_keys=True).encode()).hexdigest()


def rename_damaged(path: Path) -> Path:
    """Renames a damaged file or folder to an unused name (``NAME.damaged``) and returns the new path."""
    aside, number = path.with_name(f"{path.name}.damaged"), 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.damaged-{number}")
    path.rename(aside)
    return aside


def safe_filename(name: str) -> str:
    """Replaces characters that are not safe in file names with underscores."""
    return "".join(letter if letter.isalnum() or letter in "=.-" else "_" for letter in name)


def folder_size(folder: Path) -> int:
    """Returns the total size in bytes of all files below ``folder``; 0 if the folder does not exist."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def format_bytes(count: int) -> str:
    """Formats a number of bytes for display: ``1.4 GiB``."""
    if count < 1024:
        return f"{count} B"
    size = count / 1024
    for unit in ("KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def remove_temporary_files(folder: Path) -> None:
    """Removes temporary files that a killed process left in ``folder``; call only if no other process writes there."""
    for path in folder.glob(f"{WRITING}*"):
        path.unlink(missing_ok=True)


# --------------------------------------------------------------------------------------------- nested values


def flatten(values: Mapping[str, object], separator: str = ".", path: str = "") -> Iterator[tuple[str, object]]:
    """Yields (name, value) for each leaf of nested mappings, with names joined by ``separator``.

    An empty mapping counts as a leaf.
    """
    for key, item in values.items():
        name = f"{path}{separator}{key}" if path else str(key)
        if isinstance(item, Mapping) and item:
            yield from flatten(item, separator, name)
        else:
            yield name, item


def find_differences(stored: Mapping[str, object], asked: Mapping[str, object]) -> list[tuple[str, str, str]]:
    """Lists (name, stored, requested) for every difference between nested JSON values; shortens values for messages."""
    before, now = dict(flatten(stored)), dict(flatten(json.loads(json.dumps(asked))))
    names = [name for name in (*now, *(before.keys() - now.keys())) if before.get(name) != now.get(name)]
    return [(name, shorten(before.get(name)), shorten(now.get(name))) for name in names]


def shorten(value: object, most: int = 60) -> str:
    """Formats a JSON value as text of at most ``most`` characters."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."
