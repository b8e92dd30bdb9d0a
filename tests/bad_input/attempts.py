"""Commands started in process on broken variations of a tiny world, and what they answered."""

import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from attnpo import fit, weigh
from attnpo.cli.entry import run_entry
from tests.run.worlds import World

MAINS = {"weigh": weigh.main, "fit": fit.main}
QUICK = ("callbacks=none", "trainer.max_steps=1")


@dataclass(frozen=True)
class Answer:
    """Exit status of a command, its line on standard error, and its log."""

    status: int
    error: str
    log: list[str]

    def refused(self) -> str:
        """The message of a command that was refused: one line, status 2, no traceback."""
        assert self.status == 2, (self.status, self.error, self.log)
        assert self.error.startswith("error: ") and self.error.count("\n") == 1, self.error
        assert "Traceback" not in self.error
        return self.error.removeprefix("error: ").strip()

    def noted(self, *words: str) -> str:
        """The one log line of a command that ran through which has all of ``words``."""
        assert self.status == 0, (self.status, self.error)
        found = [line for line in self.log if all(word in line for word in words)]
        assert len(found) == 1, (words, self.log)
        return found[0]


class Attempts:
    """Commands on copies of a world with something wrong in them; every one has a store of its own."""

    def __init__(
        self, world: World, folder: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
    ) -> None:
        self.world, self.folder, self._capsys, self._caplog = world, folder, capsys, caplog
        self._made = 0
        lines = (world.data / "train.jsonl").read_text(encoding="utf-8").splitlines()
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def new(self, name: str) -> Path:
        """A folder that does not exist yet."""
        self._made += 1
        return self.folder / f"{name}{self._made}"

    def run(self, entry: str, *overrides: str, world: World | None = None) -> Answer:
        """What ``attnpo.fit`` or ``attnpo.weigh`` answers on ``world`` (the sound one by default)."""
        world = world or self.on()
        argv = world.overrides("experiment=none", "name=run", f"output={self.new('out')}")
        self._caplog.clear()
        self._capsys.readouterr()
        with self._caplog.at_level(logging.INFO):
            extra = QUICK if entry == "fit" else ()
            status = run_entry(MAINS[entry], entry, [*argv, *extra, *overrides], "description", "example")
        log = [record.getMessage() for record in self._caplog.records]
        return Answer(status, self._capsys.readouterr().err, log)

    def weigh(self, *overrides: str, world: World | None = None) -> Answer:
        """What ``attnpo.weigh`` answers."""
        return self.run("weigh", *overrides, world=world)

    def fit(self, *overrides: str, world: World | None = None) -> Answer:
        """What ``attnpo.fit`` answers, trained for one step."""
        return self.run("fit", *overrides, world=world)

    # ------------------------------------------------------------------------------------------ broken worlds

    def on(self, *, model: Path | None = None, data: Path | None = None, store: Path | None = None) -> World:
        """The world with another model, other data or a given store."""
        return World(model or self.world.model, data or self.world.data, store or self.new("store"))

    def content(self, content: bytes, name: str = "train.jsonl") -> World:
        """The world with this training file."""
        folder = self.new("data")
        folder.mkdir()
        shutil.copy(self.world.data / "test.jsonl", folder)
        (folder / name).write_bytes(content)
        return self.on(data=folder)

    def with_rows(self, rows: Sequence[Mapping[str, Any]]) -> World:
        """The world with these training rows."""
        return self.content("".join(json.dumps(row) + "\n" for row in rows).encode())

    def with_first(self, row: Mapping[str, Any]) -> World:
        """The world with its first training row replaced."""
        return self.with_rows([row, *self.rows[1:]])

    def saying(self, chosen: str | None = None, rejected: str | None = None) -> World:
        """The world with other responses in its first training row."""
        row = deepcopy(self.rows[0])
        for side, text in (("chosen", chosen), ("rejected", rejected)):
            if text is not None:
                row[side][-1]["content"] = text
        return self.with_first(row)

    def broken_model(self, damage: Callable[[Path], object]) -> World:
        """The world with a copy of its model folder that ``damage`` was done to."""
        folder = self.new("model")
        shutil.copytree(self.world.model, folder)
        damage(folder)
        return self.on(model=folder)
