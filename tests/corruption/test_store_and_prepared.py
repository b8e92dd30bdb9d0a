"""What lies in the store and is used again, damaged in every way: made anew with the same numbers, or refused."""

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from attnpo.config import compose
from attnpo.files import SEAL
from attnpo.studies.ground import settle
from attnpo.testbed import pairs, prepare
from attnpo.testbed.prepare import REPORT
from tests.corruption.damages import DAMAGES
from tests.studies.worlds import TRAIN, World, build_world

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
    cfg = setting().copy()
    cfg.store = str(store)
    cfg = settle(cfg)[0]
    return Path(cfg.model.path), Path(cfg.data.path)


@cache
def setting() -> DictConfig:
    """The composed setting, which must not be changed."""
    return compose("fit", ["setting=testbed"])


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


@pytest.mark.parametrize("name", DAMAGES)
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


def rope_base(model: Path, data: Path) -> None:
    edit(model / "config.json", lambda config: config.update(rope_theta=5e5, rope_parameters={"rope_theta": 5e5}))


def ids_swapped(model: Path, data: Path) -> None:
    def swap(tokenizer: Any) -> None:
        vocabulary = tokenizer["model"]["vocab"]
        one, two = [word for word in vocabulary if word.isalpha()][:2]
        vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]

    edit(model / "tokenizer.json", swap)


def half_of_the_pairs(model: Path, data: Path) -> None:
    lines = (data / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (data / "train.jsonl").write_text("".join(lines[: len(lines) // 2]), encoding="utf-8")


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
    "rope base edited": rope_base,
    "ids swapped": ids_swapped,
    "half of the pairs gone": half_of_the_pairs,
    "sides swapped": sides_swapped,
    "two files exchanged": lambda model, data: exchanged(model / "config.json", model / "generation_config.json"),
    "splits exchanged": lambda model, data: exchanged(data / "train.jsonl", data / "validation.jsonl"),
    "another weight file": lambda model, data: shutil.copyfile(model / "model.safetensors", model / "b.safetensors"),
    "another split": lambda model, data: shutil.copyfile(data / "train.jsonl", data / "train.json"),
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
    assert told and all("made anew" in line and "\n" not in line for line in told)
