"""Whole writes and sealed folders: what a crash leaves, what a changed byte says."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from attnpo.system.files import (
    SEAL,
    WRITING,
    apply_umask,
    describe_change,
    file_digest,
    has_checksums,
    read_record,
    remove_temporary_files,
    rename_damaged,
    write_atomically,
    write_checksums,
    write_record,
)
from tests.corruption import damages as everything
from tests.corruption.damages import Damage


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_file_is_written_whole_and_readable_as_the_umask_says(tmp_path: Path) -> None:
    mask = os.umask(0)
    os.umask(mask)
    write_atomically(tmp_path / "a", "old")
    write_atomically(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o666 & ~mask
    apply_umask(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o777 & ~mask


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_atomically(tmp_path / "a", "old")

    def refuse(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="no space"):
        write_atomically(tmp_path / "a", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "old")]


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    (folder / "below").mkdir(parents=True)
    (folder / "a.txt").write_text("first")
    (folder / "below" / "b.txt").write_text("second")
    write_checksums(folder)
    return folder


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit": (lambda folder: flip(folder / "below" / "b.txt"), "below/b.txt has changed since it was written"),
    "a cut file": (lambda folder: (folder / "a.txt").write_text("fir"), "a.txt has changed since it was written"),
    "a missing file": (lambda folder: (folder / "a.txt").unlink(), "a.txt is missing"),
    "swapped files": (lambda folder: (folder / "a.txt").rename(folder / "below" / "b.txt"), "a.txt is missing"),
    "another file": (lambda folder: (folder / "c").touch(), "c was added after the folder was written"),
    "no seal": (lambda folder: (folder / SEAL).unlink(), "it has no digests.json"),
    "an empty seal": (lambda folder: (folder / SEAL).write_text(""), "its digests.json cannot be read"),
    "a seal of another form": (lambda folder: (folder / SEAL).write_text("[]"), "its digests.json cannot be read"),
    "a seal with a flipped bit": (lambda folder: flip(folder / SEAL), "its digests.json"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_sealed_folder_says_what_has_changed(sealed: Path, name: str) -> None:
    assert describe_change(sealed) is None
    damage, words = DAMAGES[name]
    damage(sealed)
    assert words in str(describe_change(sealed))


def test_hidden_files_do_not_count(sealed: Path) -> None:
    (sealed / ".lock").touch()
    assert has_checksums(sealed)
    assert describe_change(sealed) is None


def test_a_digest_taken_while_writing_is_not_taken_again(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("what came to the disk")
    write_checksums(tmp_path, {"state": "0" * 64})
    assert describe_change(tmp_path) == "state has changed since it was written"
    write_checksums(tmp_path, {"state": file_digest(tmp_path / "state")})
    assert describe_change(tmp_path) is None


def test_what_is_set_aside_keeps_its_content_under_a_free_name(sealed: Path) -> None:
    first = rename_damaged(sealed)
    assert (first.name, (first / "a.txt").read_text()) == ("folder.damaged", "first")
    sealed.mkdir()
    assert rename_damaged(sealed).name == "folder.damaged-2"


def test_a_record_comes_back_as_json_has_it(tmp_path: Path) -> None:
    write_record(tmp_path / "record.json", {"b": (1, 0.1), "a": {10: None, 9: float("inf")}})
    assert read_record(tmp_path / "record.json") == {"b": [1, 0.1], "a": {"10": None, "9": float("inf")}}
    assert read_record(tmp_path / "none.json") is None


@pytest.mark.parametrize("damage", everything.DAMAGES.values(), ids=everything.DAMAGES)
def test_a_damaged_record_is_none(tmp_path: Path, damage: Damage) -> None:
    write_record(tmp_path / "record.json", {"score": 0.25, "layer": 3})
    damage(tmp_path / "record.json")
    assert read_record(tmp_path / "record.json") is None


def test_a_record_with_another_digit_or_without_a_digest_is_none(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_record(path, {"score": 0.25})
    path.write_text(path.read_text().replace("0.25", "0.35"))
    assert read_record(path) is None
    path.write_text('{"score": 0.25}')
    assert read_record(path) is None


def test_what_a_killed_process_was_writing_is_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in (f"{WRITING}abc", "config.yaml", ".hidden"):
        (tmp_path / name).write_text("x")
    remove_temporary_files(tmp_path)
    remove_temporary_files(tmp_path / "absent")
    assert {path.name for path in tmp_path.iterdir()} == {"config.yaml", ".hidden"}
