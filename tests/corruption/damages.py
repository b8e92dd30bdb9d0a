"""What a disk, a copy or a hand can do to a file: each a function that changes it in place.

A sweep applies each to each file of a folder that is reused later, and asks what the command says then.
"""

import random
from collections.abc import Callable
from pathlib import Path

Damage = Callable[[Path], object]


def flip_bit(path: Path, at: float = 0.5) -> None:
    """Exchanges one bit at a share ``at`` of the file's length."""
    content = bytearray(path.read_bytes())
    content[min(int(at * len(content)), len(content) - 1)] ^= 0x10
    path.write_bytes(content)


def cut(path: Path) -> None:
    """Keeps the first half of the file."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def empty(path: Path) -> None:
    """Keeps nothing of the file but its name."""
    path.write_bytes(b"")


def zeros(path: Path) -> None:
    """Writes zeros over the last third, as a crash of the machine leaves blocks that were never written."""
    content = path.read_bytes()
    keep = 2 * len(content) // 3
    path.write_bytes(content[:keep] + bytes(len(content) - keep))


def garbage(path: Path) -> None:
    """Puts as many random bytes in the file's place."""
    path.write_bytes(random.Random(0).randbytes(max(16, path.stat().st_size)))


def braces(path: Path) -> None:
    """Leaves an empty JSON object (and YAML mapping)."""
    path.write_text("{}\n", encoding="utf-8")


def remove(path: Path) -> None:
    """Removes the file."""
    path.unlink()


DAMAGES: dict[str, Damage] = {
    "first bit": lambda path: flip_bit(path, 0.0),
    "bit in the middle": flip_bit,
    "last bit": lambda path: flip_bit(path, 1.0),
    "cut in half": cut,
    "empty": empty,
    "zeros at the end": zeros,
    "garbage": garbage,
    "an empty object": braces,
    "removed": remove,
}
SEALED = ("bit in the middle", "empty", "removed")
"""Enough where a digest is compared, which knows the same file and any other (tests/test_files.py has every damage)."""
PARSED = ("first bit", "empty", "an empty object", "removed")
"""Enough where the damaged file is read first."""
