"""What lies in the store and is used again, damaged in every way: made anew with the same numbers, or refused."""

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from attnpo.cli.entry import run_entry
from attnpo.config.compose import load
from attnpo.lab.studies.config import FitConfig
from attnpo.lab.testbed import pairs, prepare
from attnpo.lab.testbed.prepare import REPORT
from attnpo.run.combinations import CHOICE
from attnpo.run.models import add_reference_logps, reference_table
from attnpo.run.resolve import resolve_paths
from attnpo.system.files import SEAL
from attnpo.system.store import Store
from attnpo.weigh import main
from tests.corruption.damages import DAMAGES, PARSED
from tests.run.made import make
from tests.run.worlds import TRAIN, VAL, World, build_world

Files = dict[str, bytes]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return build_world(tmp_path_factory.mktemp("world"))


def contents(folder: Path) -> Files:
    """Every file below a folder by its place; those moved aside are left out."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    names = {path: path.relative_to(folder) for path in files}
    return {name.as_posix(): path.read_bytes() for path, name in names.items() if ".damaged" not in name.parts[0]}


# ------------------------------------------------------------------------------------------------ prepared folders


@pytest.fixture(scope="module")
def builders(world: World) -> Iterator[None]:
    """A base and its pairs from nothing in no time: a random model, and reviews that no model wrote."""

    def base(grammar: object, recipe: object, seed: int, folder: Path) -> Mapping[str, object]:
        for file in sorted(world.model.iterdir()):
            shutil.copyfile(file, folder / file.name)
        return {"gate_passed": True, "seconds": 1.0, "seed": seed}

    def write_pairs(model: object, tokenizer: object, grammar: object, recipe: object, folder: Path) -> dict[str, int]:
        for name, split in (("train", "train"), ("test", "validation")):
            shutil.copyfile(world.data / f"{name}.jsonl", folder / f"{split}.jsonl")
        (folder / "test_prompts.jsonl").write_text('{"prompt": "how was the soup ?"}\n', encoding="utf-8")
        return {"train_pairs": TRAIN}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "_build_base", base)
        patch.setattr(pairs, "write_pairs", write_pairs)
        yield


def prepared(store: Path) -> tuple[Path, Path]:
    """The folders of model and data that a run with this store stands on, as the run settles them."""
    cfg = resolve_paths(setting().with_value("store", str(store)))[0]
    return Path(cfg.model.path), Path(cfg.data.path)


@cache
def setting() -> FitConfig:
    """The composed setting, which must not be changed."""
    return load("fit", ["setting=testbed"])


@pytest.fixture(scope="module")
def sound(builders: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Files]:
    """A store with a base and its pairs, and what its files hold."""
    store = tmp_path_factory.mktemp("sound")
    prepared(store)
    return store, contents(store / "prepared")


def mended(sound: tuple[Path, Files], damage: Callable[[Path, Path], object], place: Path, log: Any) -> list[str]:
    """The warnings of a run on a damaged copy of the store; its folders are as they were before the damage."""
    store = shutil.copytree(sound[0], place)
    damage(*(next((store / "prepared").glob(f"{kind}-*")) for kind in ("base", "data")))
    assert contents(store / "prepared") != sound[1]
    prepared(store)
    assert contents(store / "prepared") == sound[1]
    told: list[str] = list(log.messages)
    log.clear()
    prepared(store)
    assert log.messages == []  # it stays mended
    shutil.rmtree(store)
    return told


@pytest.mark.parametrize("name", PARSED)
def test_a_damaged_file_of_base_or_pairs_is_named_and_its_folder_made_anew(
    name: str, sound: tuple[Path, Files], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    assert len(sound[1]) >= 11
    for file in sound[1]:
        folder, _, short = file.partition("/")

        def damage(model: Path, data: Path, file: str = file) -> None:
            DAMAGES[name](model.parent / file)

        told = mended(sound, damage, tmp_path / "store", caplog)
        assert [folder in line and short in line and "\n" not in line for line in told] == [True], (file, told)


def edit(path: Path, change: Callable[[Any], object]) -> None:
    """Rewrites a JSON file with ``change`` applied to what it holds."""
    value = json.loads(path.read_text(encoding="utf-8"))
    change(value)
    path.write_text(json.dumps(value), encoding="utf-8")


def ids_swapped(model: Path, data: Path) -> None:
    def swap(tokenizer: Any) -> None:
        vocabulary = tokenizer["model"]["vocab"]
        one, two = [word for word in vocabulary if word.isalpha()][:2]
        vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]

    edit(model / "tokenizer.json", swap)


def sides_swapped(model: Path, data: Path) -> None:
    rows = [json.loads(line) for line in (data / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    swapped = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in rows]
    (data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in swapped), encoding="utf-8")


def exchanged(one: Path, two: Path) -> None:
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)


def only_what_it_was_told(model: Path, data: Path) -> None:
    for folder in (model, data):
        for path in folder.iterdir():
            path.unlink()


SEMANTIC: dict[str, Callable[[Path, Path], object]] = {
    "ids swapped": ids_swapped,
    "sides swapped": sides_swapped,
    "two files exchanged": lambda model, data: exchanged(model / "config.json", model / "generation_config.json"),
    "another weight file": lambda model, data: shutil.copyfile(model / "model.safetensors", model / "b.safetensors"),
    "no marker": lambda model, data: (model / REPORT).unlink(),
    "as older versions left it": lambda model, data: (model / SEAL).unlink(),
    "empty folders": only_what_it_was_told,
    "a file in its place": lambda model, data: (shutil.rmtree(data), data.write_text("pairs", encoding="utf-8")),
    "a folder of another seal": lambda model, data: shutil.copyfile(data / SEAL, model / SEAL),
}


@pytest.mark.parametrize("name", SEMANTIC)
def test_a_sound_looking_change_of_base_or_pairs_is_found(
    name: str, sound: tuple[Path, Files], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    told = mended(sound, SEMANTIC[name], tmp_path / "store", caplog)
    assert told and all("rebuilding" in line and "\n" not in line for line in told)


# ------------------------------------------------------------------------------------------------ tables

KEY = {"judge": {"weights": "abc", "dtype": "float32"}, "code": "1"}
KINDS: dict[str, list[dict[str, dict[str, Any]]]] = {
    "weights": [
        {
            f"pair {place}": {
                "tokens": {"counts": np.array([2, 1], dtype=np.int32), "ids": np.arange(3) + place},
                "L01": np.linspace(0.1, 0.9, 3, dtype=np.float32) * place,
            }
            for place in places
        }
        for places in ((1, 2), (3,))
    ],
    "reference": [{"pair 1": {"chosen": np.array([-0.5, -2.0], dtype=np.float32), "rejected": np.array([-1.0])}}],
    "answers": [{"prompt 1": {"answer": "food 9\nstaff 2"}, "prompt 2": {"answer": ""}}],
}


def filled(root: Path, kind: str) -> dict[str, Any]:
    """All rows of a table as a run reads them, having computed what is missing; as plain values."""
    table = Store(root).table(kind, KEY)
    for rows in KINDS[kind]:
        columns = list(next(iter(rows.values())))
        lacking = table.missing_pairs(list(rows), columns)
        if lacking:
            table.append({name: rows[name] for name in lacking})
    return {
        name: str(row)
        for rows in KINDS[kind]
        for name, row in table.read(list(rows), list(next(iter(rows.values())))).items()
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_of_a_table_is_named_and_its_rows_are_computed_again(
    name: str, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = filled(tmp_path / "sound", kind)
    files = [file for file in contents(tmp_path / "sound")]
    assert len(files) == 1 + 2 * len(KINDS[kind])
    for file in files:
        store = shutil.copytree(tmp_path / "sound", tmp_path / "store")
        DAMAGES[name](store / file)
        assert filled(store, kind) == expected and filled(store, kind) == expected
        entry_gone = name == "removed" and file.endswith(".json") and "key" not in file
        said = [line for line in caplog.messages if Path(file).stem in line]
        assert said or entry_gone, file  # a shard without an entry is a write that was cut short
        assert not any("\n" in line for line in caplog.messages)
        caplog.clear()
        shutil.rmtree(store)


# ------------------------------------------------------------------------------------------------ whole commands

ASKED = ("experiment=none", "weights=attention", "weights.layer=auto", "reference=cached")
SAMPLE = ("auto_layer.pairs=4", "auto_layer.shares=[0.2]")


@pytest.fixture(scope="module")
def weighed(world: World) -> World:
    """A world with a store that two commands have filled: two shards to a table, two layers that were found."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        for rows in ("data.train_rows=6", "data.train_rows=null"):
            assert weigh(world, rows) == 0
    return world


def weigh(world: World, *more: str) -> int:
    return run_entry(main, "weigh", world.overrides(*ASKED, *SAMPLE, *more), "description", "example")


@pytest.fixture(scope="module")
def sound_numbers(weighed: World, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Returns the numbers of the undamaged store."""
    return numbers(on_copy(weighed, tmp_path_factory.mktemp("sound") / "store"))


def numbers(world: World) -> list[float]:
    """Every number that a run on this store would read, in one order."""
    made = make(world.config(*ASKED, *SAMPLE))
    assert made.inputs.layer_choice is not None
    found = [float(score) for score in made.inputs.layer_choice["scores"].values()]
    table = reference_table(made.base, made.cfg.lengths)
    for examples in made.inputs.examples.values():
        for example in add_reference_logps(Path(made.base.store.root), table, examples):
            assert example.reference_logps is not None
            for row in (*example.weights, *example.reference_logps):
                found += row.tolist()
    return found


def on_copy(world: World, folder: Path) -> World:
    shutil.copytree(world.store, folder)
    return replace(world, store=folder)


def every(damage: Callable[[Path], object]) -> Callable[[Path], None]:
    """The damage done to every file of a store."""

    def all_files(store: Path) -> None:
        for path in sorted(path for path in store.rglob("*") if path.is_file()):
            damage(path)

    return all_files


def tables(store: Path, kind: str) -> list[Path]:
    """The shards of the only table of a kind."""
    return sorted(store.glob(f"{kind}/*/*.parquet"))


def of_another_key(store: Path) -> None:
    """As someone merges who does not look at the folder's names: rows of the very pairs, other numbers."""
    for kind in ("weights", "reference"):
        own = tables(store, kind)[0].parent
        held = json.loads((own / "key.json").read_text(encoding="utf-8"))
        other = Store(store.parent / "other").table(kind, {**held, "code": "0"})
        for path in tables(store, kind):
            rows = pq.read_table(path).to_pylist()
            other.append(
                {
                    row.pop("pair_id"): {
                        name: 2 * np.array(value, dtype=np.float32)
                        for name, value in row.items()
                        if isinstance(value, list)
                    }
                    for row in rows
                }
            )
            path.unlink()
            path.with_suffix(".json").unlink()
        shutil.copytree(other.folder, own, dirs_exist_ok=True)


def entries_exchanged(store: Path) -> None:
    for kind in ("weights", "reference"):
        one, two = tables(store, kind)[:2]
        exchanged(one.with_suffix(".json"), two.with_suffix(".json"))


def shards_exchanged(store: Path) -> None:
    for kind in ("weights", "reference"):
        exchanged(*tables(store, kind)[:2])


def between_kinds(store: Path) -> None:
    for suffix in (".parquet", ".json"):
        exchanged(tables(store, "weights")[0].with_suffix(suffix), tables(store, "reference")[0].with_suffix(suffix))


def choices_exchanged(store: Path) -> None:
    exchanged(*sorted((store / CHOICE).glob("*.json")))


STORE_DAMAGES: dict[str, Callable[[Path], object]] = {
    **{f"every file: {name}": every(DAMAGES[name]) for name in PARSED},
    "shards of another key": of_another_key,
    "entries exchanged": entries_exchanged,
    "shards exchanged": shards_exchanged,
    "shard and entry exchanged between kinds": between_kinds,
    "found layers exchanged": choices_exchanged,
}


@pytest.mark.parametrize("name", STORE_DAMAGES)
def test_a_command_on_a_damaged_store_gives_the_same_numbers(
    name: str,
    weighed: World,
    sound_numbers: list[float],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    world = on_copy(weighed, tmp_path / "store")
    STORE_DAMAGES[name](world.store)
    assert weigh(world) == 0
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert name == "every file: removed" or any(str(world.store) in line for line in told), told
    assert "Traceback" not in caplog.text + capsys.readouterr().err
    assert numbers(world) == pytest.approx(sound_numbers, abs=2e-6)


CHANGES: dict[str, Callable[[Path, Path], object]] = {name: SEMANTIC[name] for name in ("ids swapped", "sides swapped")}


@pytest.mark.parametrize("name", CHANGES)
def test_a_command_on_a_changed_base_or_changed_pairs_weighs_the_true_ones(
    name: str, builders: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is computed again: model and pairs are what the stored weights were made of."""
    caplog.set_level(logging.INFO)
    argv = ["setting=testbed", "experiment=none", "weights=attention", f"store={tmp_path}"]
    assert run_entry(main, "weigh", argv, "description", "example") == 0
    caplog.clear()
    CHANGES[name](*(next((tmp_path / "prepared").glob(f"{kind}-*")) for kind in ("base", "data")))
    assert run_entry(main, "weigh", argv, "description", "example") == 0
    assert sum("was changed since it was built" in line for line in caplog.messages) == 1
    assert f"weights: {TRAIN + VAL} of {TRAIN + VAL} pairs in the store" in caplog.messages
