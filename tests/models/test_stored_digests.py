"""Digests kept beside the store: taken where path, inode, size and times are those of then, and in no other case."""

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from attnpo.models import stored_digests
from attnpo.models.stored_digests import cached_digest, set_digest_folder
from attnpo.system.files import file_digest

BYTES = b"weights" * 10


@pytest.fixture(autouse=True)
def reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """The files that were read, in a process that keeps digests of all sizes as soon as they are taken."""
    seen: list[Path] = []

    def count(file: Path) -> str:
        seen.append(file)
        return file_digest(file)

    monkeypatch.setattr(stored_digests, "file_digest", count)
    monkeypatch.setattr(stored_digests, "LARGE", 0)
    monkeypatch.setattr(stored_digests, "SETTLED", 0)
    monkeypatch.setattr(stored_digests, "_places", [])
    monkeypatch.setattr(stored_digests, "_known", {})
    set_digest_folder(tmp_path / "store" / "digests")
    yield seen


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(BYTES)
    return path


def start_anew(folder: Path, **more: bool) -> None:
    """What a new process knows: nothing but what lies in the store."""
    stored_digests._known.clear()
    set_digest_folder(folder / "store" / "digests", **more)


def test_a_later_process_reads_nothing(model: Path, tmp_path: Path, reads: list[Path]) -> None:
    found = cached_digest(model)
    start_anew(tmp_path)
    assert cached_digest(model) == cached_digest(model) == found == file_digest(model)
    assert reads == [model]


def test_full_hashes_again_and_keeps_what_it_found(model: Path, tmp_path: Path, reads: list[Path]) -> None:
    cached_digest(model)
    start_anew(tmp_path, full=True)
    assert cached_digest(model) == cached_digest(model) == file_digest(model) and len(reads) == 2
    start_anew(tmp_path)
    assert cached_digest(model) == file_digest(model) and len(reads) == 2


def overwrite(model: Path) -> None:
    with model.open("r+b") as file:
        file.write(b"W")


def copy_over(model: Path) -> None:
    other = model.with_name("other")
    other.write_bytes(BYTES.upper())
    shutil.copy2(other, model)


def rename_over(model: Path) -> None:
    other = model.with_name("other")
    other.write_bytes(BYTES.upper())
    other.replace(model)


def restore(model: Path) -> None:
    """As from a backup of other bytes: removed, and written again under its name."""
    model.unlink()
    model.write_bytes(BYTES.upper())


def link_elsewhere(model: Path) -> None:
    other = model.with_name("other")
    other.write_bytes(BYTES.upper())
    model.unlink()
    model.symlink_to(other)


CHANGES = (overwrite, copy_over, rename_over, restore, link_elsewhere)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_other_bytes_of_the_same_size_and_time_are_read(
    model: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    before, found = model.stat(), cached_digest(model)
    change(model)
    os.utime(model, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert model.stat().st_size == before.st_size and model.stat().st_mtime_ns == before.st_mtime_ns
    start_anew(tmp_path)
    assert cached_digest(model) == file_digest(model) != found


@pytest.mark.parametrize("field", ["device", "inode", "size", "mtime_ns", "ctime_ns", "path"])
def test_every_part_of_the_key_counts(
    field: str, model: Path, tmp_path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    cached_digest(model)
    facts = stored_digests._file_metadata(model)
    other = str(model.with_name("other")) if field == "path" else int(facts[field]) + 1
    monkeypatch.setattr(stored_digests, "_file_metadata", lambda file: {**facts, field: other})
    start_anew(tmp_path)
    cached_digest(model)
    assert len(reads) == 2


@pytest.mark.parametrize("nothing", ["inode", "ctime_ns"])
def test_file_systems_without_inodes_or_ctime_keep_nothing(
    nothing: str, model: Path, tmp_path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = stored_digests._file_metadata(model)
    monkeypatch.setattr(stored_digests, "_file_metadata", lambda file: {**facts, nothing: 0})
    cached_digest(model)
    start_anew(tmp_path)
    cached_digest(model)
    assert len(reads) == 2 and not (tmp_path / "store").exists()


def test_a_file_that_changed_just_now_is_hashed_by_the_next_process_too(
    model: Path, tmp_path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_digests, "SETTLED", 3600 * 10**9)
    cached_digest(model)
    start_anew(tmp_path)
    cached_digest(model)
    assert len(reads) == 2 and not (tmp_path / "store").exists()


def test_a_file_that_changes_while_it_is_read_is_not_kept(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def disturb(file: Path) -> str:
        found = file_digest(file)
        overwrite(file)
        return found

    monkeypatch.setattr(stored_digests, "file_digest", disturb)
    cached_digest(model)
    assert not (tmp_path / "store").exists()


def test_small_files_leave_no_record(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_digests, "LARGE", len(BYTES) + 1)
    cached_digest(model)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[:-20],
        lambda text: text.replace('"sha256": "', '"sha256": "0'),
        lambda text: "[" * 100_000,
        lambda text: "[]",
    ],
)
def test_a_damaged_record_is_ignored_and_replaced(
    damage: Callable[[str], str], model: Path, tmp_path: Path, reads: list[Path]
) -> None:
    cached_digest(model)
    (record,) = (tmp_path / "store" / "digests").iterdir()
    record.write_text(damage(record.read_text()))
    start_anew(tmp_path)
    assert cached_digest(model) == file_digest(model) and len(reads) == 2
    start_anew(tmp_path)
    assert cached_digest(model) == file_digest(model) and len(reads) == 2


def test_a_store_that_cannot_be_written_costs_another_reading_alone(
    model: Path, tmp_path: Path, reads: list[Path]
) -> None:
    (tmp_path / "store").write_text("a file in its place")
    assert cached_digest(model) == file_digest(model)
    start_anew(tmp_path)
    assert cached_digest(model) == file_digest(model) and len(reads) == 2


def test_many_writers_leave_whole_records(tmp_path: Path, reads: list[Path]) -> None:
    files = [tmp_path / f"model-{number}.safetensors" for number in range(8)]
    for number, file in enumerate(files):
        file.write_bytes(bytes([number]) * 100)
    with ThreadPoolExecutor(8) as pool:
        list(
            pool.map(
                lambda turn: stored_digests._hash_and_store(
                    files[turn % 8], stored_digests._file_metadata(files[turn % 8])
                ),
                range(64),
            )
        )
    reads.clear()
    start_anew(tmp_path)
    assert [cached_digest(file) for file in files] == [file_digest(file) for file in files] and not reads
    records = list((tmp_path / "store" / "digests").iterdir())
    assert len(records) == 8 and all(stat.S_ISREG(record.stat().st_mode) for record in records)
