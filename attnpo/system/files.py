"""Files on disk: written whole or not at all, measured, and sealed with digests that tell when one has changed since.

Light: imports the standard library alone, and the error that a user can mend.
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
"""Value that a JSON text can hold."""

SEAL = "digests.json"
WRITING = ".writing-"
RECORD = "digest"
MARK = ".meta.json"
# The umask can only be read by setting it, which two threads must not do at once: read at import, with one thread.
_UMASK = os.umask(0)
os.umask(_UMASK)


def write_atomically(path: Path, content: bytes | str) -> None:
    """Writes ``content`` to ``path``: the file is absent, old or complete at any moment, also after a crash.

    The content is on the disk before it replaces the old one; the file gets the permissions of the umask.
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
    """Names ``path`` in what the system refuses inside: where a write fails, Python names no file."""
    try:
        yield
    except OSError as problem:
        if problem.errno is not None:
            problem.filename = str(path)
        raise


def apply_umask(path: Path) -> None:
    """Gives a file or folder the permissions that the umask asks for; temporary ones are made for the owner alone."""
    path.chmod((0o777 if path.is_dir() else 0o666) & ~_UMASK)


def fsync_path(path: Path) -> None:
    """Flushes a file or folder from the system's cache to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --------------------------------------------------------------------------------------------- digests


def file_digest(path: Path) -> str:
    """Returns the sha256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_checksums(folder: Path, known: Mapping[str, str] | None = None, only: Sequence[str] | None = None) -> None:
    """Writes the digests of all files below ``folder`` to its ``digests.json``; ``changed`` compares with them.

    ``known``: digests taken before, by relative path. ``only``: the files that are sealed.
    """
    known = known or {}
    names = _list_files(folder) if only is None else sorted(only)
    files = {name: known.get(name) or file_digest(folder / name) for name in names}
    content = json.dumps({"files": files, "of_all": _combined_digest(files)}, indent=1)
    write_atomically(folder / SEAL, content + "\n")


def has_checksums(folder: Path) -> bool:
    """Returns whether ``folder`` holds the digests of its files."""
    return (folder / SEAL).is_file()


def read_checksums(folder: Path) -> dict[str, str]:
    """Returns the digests that ``folder`` holds of its files; none where there is no seal that can be read."""
    digests = _load_checksums(folder)
    return {} if isinstance(digests, str) else digests


def describe_change(
    folder: Path, only: Sequence[str] | None = None, digest: Callable[[Path], str] | None = None
) -> str | None:
    """Describes what changed in a folder since it was sealed, in words that follow its name; None when nothing did.

    A folder without a readable seal counts as changed. ``only``: names or patterns of the files that matter.
    ``digest``: replaces ``file_digest``.
    """
    files = _load_checksums(folder)
    if isinstance(files, str):
        return files
    there = set(_list_files(folder))
    if only is not None:
        lacking = [name for name in only if "*" not in name and name not in files]
        if lacking:
            return f"{lacking[0]} is not in its {SEAL}"
        files = {name: value for name, value in files.items() if any(_matches(name, pattern) for pattern in only)}
    for name, value in files.items():
        if name not in there:
            return f"{name} is missing"
        try:
            same = (digest or file_digest)(folder / name) == value
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if not same:
            return f"{name} is not as it was written"
    unknown = sorted(there - files.keys()) if only is None else []
    return f"{unknown[0]} was not there when it was written" if unknown else None


def _matches(name: str, pattern: str) -> bool:
    return name.count("/") == pattern.count("/") and fnmatch(name, pattern)


def _load_checksums(folder: Path) -> dict[str, str] | str:
    """Returns the digests in a folder's seal, or what is wrong with it."""
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
    """Parses JSON. ValueError for what is none, and for what is nested more deeply than Python reads."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def write_record(path: Path, content: Mapping[str, object]) -> None:
    """Writes ``content`` as JSON to ``path``, whole or not at all, with the digest that ``read_record`` compares."""
    plain = json.loads(json.dumps(content))  # as it will be read: keys are text
    write_atomically(path, json.dumps({**plain, RECORD: _combined_digest(plain)}, indent=1) + "\n")


def read_record(path: Path) -> dict[str, Any] | None:
    """Reads what ``write_record`` wrote; None when there is no such file, or it has changed since."""
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        return content if content.pop(RECORD) == _combined_digest(content) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def digest(value: object) -> str:
    """Returns hexadecimal SHA-256 of a JSON-serialisable value; key order does not matter, list order does."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def add_row_digest(row: Mapping[str, object], of: str = "") -> dict[str, object]:
    """Returns a row with a digest of the rest of it, and of what it is ``of``, which ``pop_row_digest`` compares."""
    return {**row, RECORD: digest({**row, RECORD: of} if of else dict(row))[:16]}


def pop_row_digest(row: object, of: str = "") -> bool:
    """Takes the digest out of a row that was read; returns whether the rest is as it was sealed."""
    return isinstance(row, dict) and row.pop(RECORD, None) == add_row_digest(row, of)[RECORD]


# --------------------------------------------------------------------------------------------- files users name


def check_is_own_file(said: str, path: Path, mark: Path, written: Sequence[str], maker: str) -> None:
    """Raises UserError where ``maker`` would replace a file that it did not write, or that was changed since.

    ``written``: the digests of what it wrote, as the file ``mark`` has them; none where that is no mark of its own.
    """
    strange = [file for file in (path, mark) if os.path.lexists(file) and not written]
    if strange or (os.path.lexists(path) and not (path.is_file() and file_digest(path) in written)):
        what = f"{strange[0]} is no file that {maker} wrote" if strange else f"it was changed since {maker} wrote it"
        raise UserError(f"{said}: {what}; move it away, or give another file")


def check_is_marked_file(said: str, path: Path, maker: str) -> None:
    """Raises UserError where ``path`` holds a file that ``write_marked_file`` did not write for ``maker``."""
    mark = path.with_name(f"{path.name}{MARK}")
    stored = read_record(mark) or {}
    check_is_own_file(said, path, mark, stored["written"] if stored.get("made_by") == maker else (), maker)


def write_marked_file(
    said: str, path: Path, content: bytes | str, maker: str, facts: Mapping[str, object] | None = None
) -> None:
    """Writes a file that the user named, and before it FILE.meta.json: ``facts``, and what its maker knows it by.

    UserError where another file is in its place.
    """
    check_is_marked_file(said, path, maker)
    content = content.encode() if isinstance(content, str) else content
    # Stopped between the two, the mark is that of the old file as well.
    written = [*([file_digest(path)] if path.is_file() else []), hashlib.sha256(content).hexdigest()]
    write_record(path.with_name(f"{path.name}{MARK}"), {**(facts or {}), "made_by": maker, "written": written})
    write_atomically(path, content)


def remove_partial_line(path: Path) -> bool:
    """Removes what stands after a file's last line end, which a stopped command was writing; whether anything did."""
    content = path.read_bytes() if path.is_file() else b""
    keep = content.rfind(b"\n") + 1
    if keep == len(content):
        return False
    with path.open("r+b") as file:
        file.truncate(keep)
    return True


def _list_files(folder: Path) -> list[str]:
    """Returns the files below ``folder`` that count: not its seal, and nothing hidden."""
    names = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(
        name.as_posix()
        for name in names
        if name.as_posix() != SEAL and not any(part.startswith(".") for part in name.parts)
    )


def _combined_digest(content: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(dict(content), sort_keys=True).encode()).hexdigest()


def rename_damaged(path: Path) -> Path:
    """Renames a damaged file or folder to a free name beside it (``NAME.damaged``), and returns its new path."""
    aside, number = path.with_name(f"{path.name}.damaged"), 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.damaged-{number}")
    path.rename(aside)
    return aside


def safe_filename(name: str) -> str:
    """Returns a name as part of a file's name."""
    return "".join(letter if letter.isalnum() or letter in "=.-" else "_" for letter in name)


def folder_size(folder: Path) -> int:
    """Returns bytes of all files below ``folder``; 0 where there is none."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def format_bytes(count: int) -> str:
    """Returns a number of bytes for readers: ``1.4 GiB``."""
    if count < 1024:
        return f"{count} B"
    size = count / 1024
    for unit in ("KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def remove_temporary_files(folder: Path) -> None:
    """Removes what a killed process was writing into ``folder``; no other process may be writing there."""
    for path in folder.glob(f"{WRITING}*"):
        path.unlink(missing_ok=True)


# --------------------------------------------------------------------------------------------- nested values


def flatten(values: Mapping[str, object], separator: str = ".", path: str = "") -> Iterator[tuple[str, object]]:
    """Returns (name, value) of everything below nested mappings, names joined by ``separator``.

    An empty mapping is a value.
    """
    for key, item in values.items():
        name = f"{path}{separator}{key}" if path else str(key)
        if isinstance(item, Mapping) and item:
            yield from flatten(item, separator, name)
        else:
            yield name, item


def find_differences(stored: Mapping[str, object], asked: Mapping[str, object]) -> list[tuple[str, str, str]]:
    """Returns (name, stored, asked) wherever nested JSON values differ, in words short enough for a message."""
    before, now = dict(flatten(stored)), dict(flatten(json.loads(json.dumps(asked))))
    names = [name for name in (*now, *(before.keys() - now.keys())) if before.get(name) != now.get(name)]
    return [(name, shorten(before.get(name)), shorten(now.get(name))) for name in names]


def shorten(value: object, most: int = 60) -> str:
    """Returns a JSON value as text of at most ``most`` characters."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."
