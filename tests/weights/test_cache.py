"""The store: exact round trips, keys, merging, damage, several writers."""

import json
import logging
import multiprocessing
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from attnpo.schema import UserError, digest
from attnpo.system import store as cache
from attnpo.system.files import file_digest
from attnpo.system.store import Store, StoreTable

KEY = {"judge": {"weights": "abc", "dtype": "float32"}, "prompts": {"lengths": [2048, 768]}, "code": "1"}


@pytest.fixture
def table(tmp_path: Path) -> StoreTable:
    return Store(tmp_path).table("weights", KEY)


def fresh(table: StoreTable) -> StoreTable:
    """The same folder as a new process sees it."""
    return StoreTable(table.folder, table.key)


def shards(table: StoreTable) -> list[Path]:
    return sorted(table.folder.glob("*.parquet"))


def test_values_come_back_bit_for_bit(table: StoreTable) -> None:
    bits = np.array([0x00000001, 0x80000000, 0x7F7FFFFF, 0x3EAAAAAB, 0x7FC00001], dtype=np.uint32)
    row = {
        "f": bits.view(np.float32),
        "t": torch.tensor([1 / 3, 2 / 3]),
        "i": np.array([-1, 2**31 - 1], dtype=np.int32),
        "empty": np.array([], dtype=np.float32),
        "d": 0.1,
        "n": 2**40,
        "s": {"a": np.array([1, 2]), "b": np.array([0.5], dtype=np.float32)},
    }
    table.append({"p": row, "q": {**row, "f": bits[:2].view(np.float32), "n": 5}})
    back = fresh(table).read(["q", "p"], list(row))
    assert list(back) == ["q", "p"]
    assert np.array_equal(back["p"]["f"].view(np.uint32), bits)
    assert np.array_equal(back["q"]["f"].view(np.uint32), bits[:2])
    assert torch.equal(torch.from_numpy(back["p"]["t"]), row["t"])
    assert back["p"]["i"].dtype == np.int32 and back["p"]["i"].tolist() == [-1, 2**31 - 1]
    assert back["p"]["empty"].shape == (0,)
    assert (back["p"]["d"], back["p"]["n"], back["q"]["n"]) == (0.1, 2**40, 5)
    assert back["q"]["s"]["a"].tolist() == [1, 2] and back["q"]["s"]["b"].tolist() == [0.5]


def test_reading_does_not_bring_pandas(table: StoreTable) -> None:
    """A second of each command that finds its weights in the store; flags and gaps, which need it, come back too."""
    flags = pa.array([[True, False]], pa.large_list(pa.bool_()))
    gaps = pa.array([[1.0, None]], pa.large_list(pa.float32()))
    assert cache._Column(flags)[0].tolist() == [True, False]  # type: ignore[union-attr]
    assert np.isnan(cache._Column(gaps)[0]).tolist() == [False, True]  # type: ignore[arg-type]
    table.append({"p": {"f": np.array([0.25, 0.75], dtype=np.float32), "n": 3}})
    code = (
        "import json, sys; from pathlib import Path; from attnpo.system.store import StoreTable\n"
        "found = StoreTable(Path(sys.argv[1]), json.loads(sys.argv[2])).read(['p'], ['f', 'n'])\n"
        "print(found['p']['f'].tolist(), found['p']['n'], 'pandas' in sys.modules)"
    )
    words = [sys.executable, "-c", code, str(table.folder), json.dumps(dict(table.key))]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.stdout.split("\n")[0] == "[0.25, 0.75] 3 False", done.stderr


def test_what_rows_took_is_noted_beside_them(table: StoreTable) -> None:
    """A mean over the pairs of the shards that hold any of those asked for; rows without a note say nothing."""
    assert table.seconds_per_pair(["a"]) is None
    table.append({"a": {"x": 1}, "b": {"x": 2}, "c": {"y": 3}}, seconds=6.0)
    table.append({"d": {"x": 4}}, seconds=1.0)
    table.append({"e": {"x": 5}})
    again = fresh(table)
    assert again.seconds_per_pair(["a", "e"]) == 2.0
    assert again.seconds_per_pair(["a", "b", "c", "d", "e"]) == 7 / 4
    assert again.seconds_per_pair(["e"]) is None


def test_columns_of_several_shards_and_rows_are_merged(table: StoreTable) -> None:
    table.append({"p": {"L01": np.array([1.0]), "b": 2}, "q": {"L01": np.array([2.0])}})
    table.append({"p": {"L02": np.array([3.0])}})
    assert table.columns_present(["p", "q", "r"]) == {"p": {"L01", "L02", "b"}, "q": {"L01"}, "r": set()}
    assert table.missing_pairs(["r", "q", "p", "r"], ["L01", "L02"]) == ["r", "q"]
    assert table.missing_pairs(["q", "p"], ["L01"]) == []
    assert table.read(["p"], ["L02", "L01"]) == {"p": {"L01": 1.0, "L02": 3.0}}
    assert table.read(["p", "q"], ["L01"]) == {"p": {"L01": 1.0}, "q": {"L01": 2.0}}


def test_a_missing_row_is_an_error_and_never_a_default(table: StoreTable) -> None:
    table.append({"p": {"a": 1, "b": 2}, "q": {"a": 3}})
    with pytest.raises(UserError, match=r"1 of 2 pairs lack some of the columns a, b \(first: q\): run attnpo\.weigh"):
        table.read(["p", "q"], ["a", "b"])
    with pytest.raises(UserError, match="first: nobody"):
        table.read(["nobody"], ["a"])


def test_only_the_wanted_columns_leave_the_disk(table: StoreTable, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow.parquet as pq

    asked: list[list[str]] = []
    original = pq.ParquetFile.read
    monkeypatch.setattr(
        pq.ParquetFile, "read", lambda stored, columns: asked.append(columns) or original(stored, columns=columns)
    )
    table.append({"p": {"a": 1, "b": 2}})
    table.append({"q": {"a": 3}})
    table.read(["p"], ["b"])
    assert asked[-1] == ["b"] and not any("a" in columns for columns in asked)


def test_mixed_types_in_a_column_are_refused_and_leave_nothing(table: StoreTable) -> None:
    with pytest.raises(ValueError, match="one-dimensional arrays of one type"):
        table.append({"p": {"a": np.array([1.0])}, "q": {"a": np.array([1])}})
    assert table.missing_pairs(["p"], ["a"]) == ["p"]


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [leaf for name, item in value.items() for leaf in leaves(item, (*path, name))]
    return [path]


@pytest.mark.parametrize("path", leaves(KEY), ids=".".join)
def test_every_part_of_the_key_changes_the_folder(tmp_path: Path, path: tuple[str, ...]) -> None:
    other = json.loads(json.dumps(KEY))
    node = other
    for name in path[:-1]:
        node = node[name]
    was, node[path[-1]] = node[path[-1]], "changed"
    store = Store(tmp_path)
    stored, asked = store.table("weights", KEY), store.table("weights", other)
    stored.append({"p": {"a": 1}})
    assert asked.folder != stored.folder
    assert asked.missing_pairs(["p"], ["a"]) == ["p"]
    assert asked.nearest_difference() == f"{'.'.join(path)}: stored {was}, requested changed"


def test_the_nearest_table_is_the_one_with_the_fewest_differences(tmp_path: Path) -> None:
    store = Store(tmp_path)
    far = {"judge": {"weights": "xyz", "dtype": "bfloat16"}, "prompts": {"lengths": [1, 2]}, "code": "1"}
    for key in (far, {**KEY, "judge": {"weights": "abc", "dtype": "bfloat16"}}):
        store.table("weights", key).append({"p": {"a": 1}})
    store.table("reference", {**KEY, "code": "2"}).append({"p": {"a": 1}})
    assert store.table("weights", KEY).nearest_difference() == "judge.dtype: stored bfloat16, requested float32"
    assert store.table("empty", KEY).nearest_difference() is None
    extra = store.table("weights", {**KEY, "rollout": True})
    store.table("weights", KEY).append({"p": {"a": 1}})
    assert extra.nearest_difference() == "rollout: stored null, requested true"


def test_order_of_the_key_does_not_matter_and_a_table_is_shared(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.table("weights", dict(reversed(KEY.items()))) is store.table("weights", KEY)


def test_folders_of_two_workers_merge_by_copying(tmp_path: Path) -> None:
    tables = [Store(tmp_path / name).table("weights", KEY) for name in ("one", "two")]
    tables[0].append({"p": {"a": 1}, "both": {"a": 9}})
    tables[1].append({"q": {"a": 2}, "both": {"a": 9}})
    assert fresh(tables[0]).missing_pairs(["q", "p"], ["a"]) == ["q"]
    shutil.copytree(tmp_path / "two", tmp_path / "one", dirs_exist_ok=True)
    assert tables[0].read(["p", "q", "both"], ["a"]) == {"p": {"a": 1}, "q": {"a": 2}, "both": {"a": 9}}
    assert len(shards(tables[0])) == 2


OTHER = {**KEY, "judge": {"weights": "abc", "dtype": "bfloat16"}}


def test_shards_of_another_key_are_not_taken_by_copying(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whole folders of shards, which says once for all of them."""
    store = Store(tmp_path)
    own, other = store.table("weights", KEY), store.table("weights", OTHER)
    own.append({"p": {"a": 1.0}})
    other.append({"p": {"a": -1.0}, "q": {"a": -2.0}})
    other.append({"r": {"a": -3.0}})
    for path in other.folder.iterdir():
        shutil.copyfile(path, own.folder / path.name)
    again = fresh(own)
    with caplog.at_level(logging.WARNING):
        assert again.missing_pairs(["p", "q", "r"], ["a"]) == ["q", "r"]
        assert again.missing_pairs(["p", "q", "r"], ["a"]) == ["q", "r"]
    said = [line for line in caplog.messages if "a different key" in line]
    assert len(said) == 1 and "2 shards" in said[0] and shards(other)[0].name in said[0]
    again.append({"q": {"a": 2.0}, "r": {"a": 3.0}})
    assert fresh(own).read(["p", "q", "r"], ["a"]) == {"p": {"a": 1.0}, "q": {"a": 2.0}, "r": {"a": 3.0}}
    assert json.loads((own.folder / "key.json").read_text()) == KEY


def test_an_entry_alone_does_not_make_a_shard_ones_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(tmp_path)
    own, other = store.table("weights", KEY), store.table("weights", OTHER)
    own.append({"p": {"a": 1.0}})
    other.append({"q": {"a": -2.0}})
    shard, entry = shards(other)[0], shards(other)[0].with_suffix(".json")
    shutil.copyfile(shard, own.folder / shard.name)
    (own.folder / entry.name).write_text(json.dumps({**json.loads(entry.read_text()), "key": digest(KEY)}))
    with caplog.at_level(logging.WARNING):
        assert fresh(own).missing_pairs(["p", "q"], ["a"]) == ["q"]
    assert len(caplog.messages) == 1


def test_shards_without_a_key_are_those_of_an_older_version(
    table: StoreTable, caplog: pytest.LogCaptureFixture
) -> None:
    table.append({"p": {"a": 1}})
    path = shards(table)[0]
    content = pq.read_table(path).replace_schema_metadata(None)
    pq.write_table(content, path)
    entry = json.loads(path.with_suffix(".json").read_text())
    del entry["key"]
    path.with_suffix(".json").write_text(json.dumps({**entry, "sha256": file_digest(path)}))
    with caplog.at_level(logging.WARNING):
        assert fresh(table).missing_pairs(["p"], ["a"]) == ["p"]
    assert [path.name in line and "an older version" in line for line in caplog.messages] == [True]


@pytest.mark.parametrize("content", ["[1", '{"judge": 1}', None])
def test_a_key_file_that_does_not_hold_the_key_is_written_anew(
    content: str | None, table: StoreTable, caplog: pytest.LogCaptureFixture
) -> None:
    table.append({"p": {"a": 1}})
    path = table.folder / "key.json"
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    with caplog.at_level(logging.WARNING):
        assert fresh(table).missing_pairs(["p"], ["a"]) == []
        assert fresh(table).missing_pairs(["p"], ["a"]) == []
    assert json.loads(path.read_text()) == KEY
    assert ["key.json" in line for line in caplog.messages] == [True]


def test_a_damaged_key_beside_is_not_the_nearest(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for key in (OTHER, {**KEY, "code": "2"}):
        store.table("weights", key).append({"p": {"a": 1}})
    (store.table("weights", OTHER).folder / "key.json").write_text(json.dumps({**KEY, "code": "3"}))
    assert store.table("weights", KEY).nearest_difference() == "code: stored 2, requested 1"


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "entry", "entry_fields"])
def test_a_damaged_shard_is_named_and_its_rows_count_as_missing(
    table: StoreTable, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    table.append({"p": {"a": np.arange(500.0)}})
    victim = shards(table)[0]
    content = victim.read_bytes()
    table.append({"q": {"a": np.arange(3.0)}})
    if damage == "flip":
        victim.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    elif damage == "cut":
        victim.write_bytes(content[:-20])
    elif damage == "gone":
        victim.unlink()
    elif damage == "entry":
        victim.with_suffix(".json").write_text('{"sha256": "')
    else:
        victim.with_suffix(".json").write_text('{"bytes": 3}')
    again = fresh(table)
    with caplog.at_level(logging.WARNING):
        assert again.missing_pairs(["p", "q"], ["a"]) == ["p"]
        assert again.missing_pairs(["p", "q"], ["a"]) == ["p"]
    assert [victim.name in record.message for record in caplog.records] == [True]  # said once
    with pytest.raises(UserError, match="first: p"):
        again.read(["p"], ["a"])
    again.append({"p": {"a": np.arange(500.0)}})  # the same content under the same name
    assert again.read(["p"], ["a"])["p"]["a"].tolist() == list(range(500))
    assert fresh(table).missing_pairs(["p", "q"], ["a"]) == []


def test_damage_after_the_first_look_is_an_error_that_names_the_file(table: StoreTable) -> None:
    table.append({"p": {"a": 1}})
    assert table.missing_pairs(["p"], ["a"]) == []
    shards(table)[0].write_bytes(b"no parquet")
    with pytest.raises(UserError, match=shards(table)[0].name):
        table.read(["p"], ["a"])


def test_a_shard_without_an_entry_is_an_interrupted_write(table: StoreTable) -> None:
    table.append({"p": {"a": 1}})
    shards(table)[0].with_suffix(".json").unlink()
    assert fresh(table).missing_pairs(["p"], ["a"]) == ["p"]


def test_an_interrupted_write_leaves_no_file_and_no_row(table: StoreTable, monkeypatch: pytest.MonkeyPatch) -> None:
    table.append({"p": {"a": 1}})
    before = sorted(table.folder.iterdir())

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", stop)
    with pytest.raises(KeyboardInterrupt):
        table.append({"q": {"a": 2}})
    assert sorted(table.folder.iterdir()) == before
    assert table.missing_pairs(["p", "q"], ["a"]) == ["q"]


def _append_many(root: str, worker: int, rounds: int) -> None:
    table = Store(Path(root)).table("weights", KEY)
    for turn in range(rounds):
        table.append({f"{worker}-{turn}": {"a": np.array([worker, turn])}, "same": {"a": np.array([7, 7])}})
        assert table.missing_pairs([f"{worker}-{turn}"], ["a"]) == []


def test_two_processes_append_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_append_many, args=(str(tmp_path), worker, 8)) for worker in (0, 1)]
    for process in workers:
        process.start()
    for process in workers:
        process.join(60)
    assert [process.exitcode for process in workers] == [0, 0]
    table = Store(tmp_path).table("weights", KEY)
    names = [f"{worker}-{turn}" for worker in (0, 1) for turn in range(8)]
    found = table.read([*names, "same"], ["a"])
    assert [found[name]["a"].tolist() for name in names] == [[worker, turn] for worker in (0, 1) for turn in range(8)]
    assert found["same"]["a"].tolist() == [7, 7]
    assert json.loads((table.folder / "key.json").read_text()) == KEY
    assert not list(table.folder.glob(".writing-*"))
