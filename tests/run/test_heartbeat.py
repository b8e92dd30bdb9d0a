"""Every long part of a single run says in the log what it is, and the commands of its last lines run as printed."""

import logging
import shlex
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from attnpo import fit
from attnpo.cli import progress as live
from attnpo.cli.entry import run_entry
from attnpo.data import weighing
from attnpo.run import models, report, resolve, run
from attnpo.training.module import PreferenceModule
from tests.run.worlds import World

# What is slowed down in the run, and what is to be read meanwhile.
SLOW = (
    (weighing, "ensure_captured", "judge pass"),
    (models, "load_model", "loading the model"),
    (resolve, "score_examples", "reference pass"),
    (L.Trainer, "validate", "validation before the first step"),
    (PreferenceModule, "training_step", "training"),
    (run, "make_chat_generator", "sampling answers"),
    (report, "training_curves", "report and figures"),
)


class Said(logging.Handler):
    """The lines of the log, and an event for the next of them that holds ``awaited``."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.awaited, self.seen = "", threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        if self.awaited and self.awaited in self.lines[-1]:
            self.seen.set()

    def slowed(self, function: Callable[..., Any], what: str) -> Callable[..., Any]:
        """``function`` that does not begin, the first time, before ``what`` is said to be at work, or a minute over."""
        first = [True]

        def waits(*arguments: Any, **named: Any) -> Any:
            if first.pop() if first else False:
                self.seen.clear()
                self.awaited = f"{what}: running for "
                self.seen.wait(60)
                self.awaited = ""
            return function(*arguments, **named)

        return waits


@pytest.fixture(scope="module")
def said(world: World, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The log of a run whose parts take long, as a file gets it; nine seconds are none here."""
    found, root = Said(), logging.getLogger("attnpo")
    given = ["experiment=none", "reference=cached", "name=one run", f"output={tmp_path_factory.mktemp('out put')}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live, "QUIET_FOR", 0.01)
        for owner, name, what in SLOW:
            patch.setattr(owner, name, found.slowed(getattr(owner, name), what))
        root.addHandler(found)
        try:
            assert run_entry(fit.main, "fit", world.overrides(*given), "", "") == 0
        finally:
            root.removeHandler(found)
    return found.lines


@pytest.mark.parametrize("what", [what for _, _, what in SLOW])
def test_a_long_part_is_named_while_it_lasts(said: list[str], what: str) -> None:
    assert any(line.startswith(f"{what}: running for ") for line in said)


@pytest.mark.parametrize("place", range(3))
def test_each_printed_command_runs(said: list[str], place: int, tmp_path: Path) -> None:
    """As a shell would read it, in this process; without checkpoints and page, which the first run had."""
    commands = [line.strip() for line in said if line.startswith("  python -m attnpo.")]
    assert len(commands) == 3
    _, _, module, *words = shlex.split(commands[place])
    name = module.removeprefix("attnpo.")
    positional = "what" if name == "report" else None
    words += [f"output={tmp_path}"] if name == "report" else ["callbacks=none"]
    assert run_entry(import_module(module).main, name, words, "", "", positional=positional) == 0
