"""Damage in the store: found, named, computed anew, and nothing else lost."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from attnpo import weigh
from attnpo.cli.entry import run_entry
from attnpo.system.store import Store
from tests.bad_input.attempts import Attempts
from tests.bad_input.conftest import Record
from tests.run.worlds import TRAIN, VAL, World, judge_loads

PAIRS = TRAIN + VAL


@pytest.fixture(scope="module")
def shards(world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Returns a store with two shards, of the validation pairs and of the rest, and both by their places in it."""
    folder = tmp_path_factory.mktemp("filled")
    shutil.copytree(world.data, folder / "half")
    shutil.copy(world.data / "test.jsonl", folder / "half" / "train.jsonl")
    found: list[Path] = []
    for data in (folder / "half", world.data):
        words = World(world.model, data, folder / "store").overrides("experiment=none")
        assert run_entry(weigh.main, "weigh", words, "", "") == 0
        found += [path for path in (folder / "store").glob("weights/*/*.parquet") if path not in found]
    first, second = (path.relative_to(folder / "store") for path in found)
    return folder / "store", first, second


@pytest.fixture
def damaged_store(attempts: Attempts, shards: tuple[Path, Path, Path]) -> tuple[World, Path, Path]:
    """Returns a world with a copy of that store, and both shards."""
    store, *both = shards
    world = attempts.on()
    shutil.copytree(store, world.store)
    first, second = (world.store / path for path in both)
    return world, first, second


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def other_pair(path: Path) -> None:
    entry = json.loads(path.with_suffix(".json").read_text())
    entry["pairs"][0] = "0" * 32
    path.with_suffix(".json").write_text(json.dumps(entry))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit in a shard": (flip, "the checksum differs"),
    "a shard that was cut off": (lambda path: path.write_bytes(path.read_bytes()[:-40]), "the checksum differs"),
    "an empty shard": (lambda path: path.write_bytes(b""), "the checksum differs"),
    "a shard that is gone": (Path.unlink, "No such file"),
    "an entry with broken JSON": (
        lambda path: path.with_suffix(".json").write_text('{"sha256": '),
        "the shard's entry is not readable JSON",
    ),
    "an entry that lacks a key": (lambda path: path.with_suffix(".json").write_text("{}"), "'pairs'"),
    "an entry with a changed pair id": (other_pair, "the pairs differ from those in the shard's entry"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_costs_the_rows_of_one_shard(
    attempts: Attempts, damaged_store: tuple[World, Path, Path], record: Record, case: str
) -> None:
    world, victim, other = damaged_store
    damage, why = DAMAGE[case]
    sound, kept = victim.read_bytes(), other.read_bytes()
    damage(victim)
    with judge_loads() as loaded:
        answer = attempts.weigh(world=world)
    message = answer.noted("is ignored and its rows count as missing")
    assert victim.name in message and why in message
    assert len(loaded) == 1 and answer.noted(f"weights: {PAIRS - VAL} of {PAIRS} pairs in the store; computing {VAL}")
    assert victim.read_bytes() == sound, "the same numbers come again, under the same name"
    assert other.read_bytes() == kept
    with judge_loads() as loaded:
        again = attempts.weigh(world=world)
    assert loaded == [] and not any("ignored" in line for line in again.log)
    record(case, message.partition(": shard ")[2], f"{VAL} of {PAIRS} rows, computed anew")


def test_an_entry_that_is_gone_is_an_interrupted_write(
    attempts: Attempts, damaged_store: tuple[World, Path, Path], record: Record
) -> None:
    world, victim, _ = damaged_store
    victim.with_suffix(".json").unlink()
    message = attempts.weigh(world=world).noted(
        f"weights: {PAIRS - VAL} of {PAIRS} pairs in the store; computing {VAL}"
    )
    record("an entry that is gone", message, f"{VAL} of {PAIRS} rows, computed anew")


def test_a_broken_key_file_does_not_matter(
    attempts: Attempts, damaged_store: tuple[World, Path, Path], record: Record
) -> None:
    """The folder's name is the key; the file is for people and for naming the nearest other table."""
    world, victim, _ = damaged_store
    (victim.parent / "key.json").write_text("{")
    with judge_loads() as loaded:
        answer = attempts.weigh(world=world)
    assert loaded == []
    record("a broken key.json", answer.noted(f"weights: {PAIRS} of {PAIRS} pairs in the store"), "nothing")


def test_a_store_that_cannot_be_written(attempts: Attempts, record: Record) -> None:
    """A file where the folder should be stands for a full disk and for missing permission."""
    (attempts.folder / "store").write_text("a file")
    message = attempts.weigh(world=attempts.on(store=attempts.folder / "store")).refused()
    assert message.startswith("store: ") and "cannot be written to" in message
    assert message.endswith("or choose a different folder with store=FOLDER")
    record("a store that cannot be written", message, "run not started")


def test_what_was_stored_before_survives_a_write_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from attnpo.schema import UserError

    table = Store(tmp_path).table("weights", {"code": "1"})
    table.append({"p": {"a": 1}})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(UserError, match=r"cannot be written .*No space left on device.*store=FOLDER"):
        table.append({"q": {"a": 2}})
    assert table.read(["p"], ["a"]) == {"p": {"a": 1}} and table.missing_pairs(["q"], ["a"]) == ["q"]
    assert not list(table.folder.glob(".writing-*"))
