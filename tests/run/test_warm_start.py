"""A start on a filled store: the model is loaded once, tried never again, and no file of it is read for its digest."""

import hashlib
import logging
from pathlib import Path

import pytest

from attnpo.models import loading, stored_digests
from attnpo.run import models as policies_room
from attnpo.run.run import run
from attnpo.schema import UserError
from tests.run.worlds import World, build_world, judge_loads

BARE = ("callbacks=none", "callbacks.samples=0", "trainer.max_steps=1")
ATTENTION = ("weights=attention", "judge.low_label_mass=warn", "reference=cached", *BARE)


class Calls:
    """What a start does that takes long on a large model, in its order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loads: list[str] = []
        self.trials: list[str] = []
        self.hashed: list[str] = []
        for room, name, into in (
            (loading, "check_causal", self.trials),
            (policies_room, "check_trainable", self.trials),
            (policies_room, "select_layout", self.trials),
            (policies_room, "load_model", self.loads),
        ):
            self._count(monkeypatch, room, name, into)
        digest = hashlib.file_digest

        def hash_file(file: object, kind: str) -> object:
            self.hashed.append(Path(file.name).name)  # type: ignore[attr-defined]
            return digest(file, kind)  # type: ignore[arg-type]

        monkeypatch.setattr(hashlib, "file_digest", hash_file)

    def _count(self, monkeypatch: pytest.MonkeyPatch, room: object, name: str, into: list[str]) -> None:
        real = getattr(room, name)

        def count(*given: object, **more: object) -> object:
            into.append(name)
            return real(*given, **more)

        monkeypatch.setattr(room, name, count)

    def of_model(self, world: World) -> list[str]:
        """The model's files that were hashed."""
        return sorted(name for name in self.hashed if (world.model / name).is_file())

    def start_anew(self) -> None:
        """What a new process knows: nothing but what lies in the store."""
        stored_digests._known.clear()
        for seen in (self.loads, self.trials, self.hashed):
            seen.clear()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    monkeypatch.setattr(stored_digests, "LARGE", 0)
    monkeypatch.setattr(stored_digests, "SETTLED", 0)
    monkeypatch.setattr(stored_digests, "_known", {})
    return Calls(monkeypatch)


def test_a_warm_start_loads_once_and_repeats_no_trial_and_no_digest(
    tmp_path: Path, calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    world = build_world(tmp_path)
    cold = run(world.config(*ATTENTION), tmp_path / "cold")
    # The judge's own load is not among them; the layout of the reference pass is that of training.
    assert calls.loads == ["load_model"] and calls.trials.count("select_layout") == 1
    assert calls.of_model(world) == ["config.json", "model.safetensors"]
    calls.start_anew()
    with judge_loads() as judges, caplog.at_level(logging.INFO, "attnpo"):
        warm = run(world.config(*ATTENTION), tmp_path / "warm")
    assert calls.loads == ["load_model"] and not calls.trials and not judges and not calls.of_model(world)
    assert "model.safetensors: unchanged since it was hashed (set digests=full to hash it again)" in caplog.text
    assert cold is not None and warm is not None and warm.metrics == cold.metrics

    calls.start_anew()
    run(world.config(*ATTENTION, "digests=full"), tmp_path / "full")
    assert calls.of_model(world) == ["config.json", "model.safetensors"]


def test_other_weights_under_the_same_name_are_tried_again(tmp_path: Path, calls: Calls) -> None:
    world = build_world(tmp_path)
    given = ("weights=uniform", "reference=live", *BARE)
    run(world.config(*given), tmp_path / "cold")
    file = world.model / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    calls.start_anew()
    run(world.config(*given), tmp_path / "warm")
    # As the policy, and as the reference after that has passed.
    assert calls.trials == ["check_causal", "check_trainable", "select_layout"] and len(calls.loads) == 2
    assert calls.of_model(world) == ["model.safetensors"]


def test_a_choice_of_digests_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="digests must be one of kept, full, got 'never'"):
        World(tmp_path, tmp_path, tmp_path).config("digests=never")
