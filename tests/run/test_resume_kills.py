"""Runs that are killed or told to stop, at any moment, and resumed: everything ends as if they had not been."""

import json
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from attnpo.training.checkpoint_folders import complete_folder, read_checkpoint_info
from attnpo.training.metrics_file import read_metrics
from tests.run import traced
from tests.run.traced import BEST, FIRST, LAST, MOMENTS, STEP, VALIDATING
from tests.run.worlds import World, build_world

KILLS = 12
STEPS = 12
# Ten pairs in steps of four are steps of 4, 4 and 2 pairs, one pair at a time.
RUN = (
    "experiment=none",
    'data.train_rows="10"',
    'data.val_rows="4"',
    "batch.pairs=4",
    "batch.micro=1",
    "trainer.max_epochs=4",
    "trainer.validate_every=5",
    "optimizer.lr=0.01",
    "callbacks.samples=0",
    "callbacks.report=false",
)


@dataclass
class Runs:
    """Where runs go."""

    world: World
    output: Path

    def start(self, name: str, *more: str, **order: Any) -> dict[str, Any]:
        """One process of ``attnpo.fit`` from its start to its end, and what became of it (``traced.run``)."""
        overrides = self.world.overrides(*RUN, f"name={name}", f"output={self.output}", *more)
        return traced.run(overrides, self.log(name), **order)

    def log(self, name: str) -> Path:
        return self.output / f"{name}.txt"

    def said(self, name: str) -> str:
        return self.log(name).read_text()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A model with dropout, so that random states matter too."""
    world = build_world(tmp_path_factory.mktemp("world"))
    config = world.model / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "attention_dropout": 0.2}))
    return Runs(world, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def unbroken(runs: Runs) -> float:
    """Seconds of training of the run that nothing disturbs, in ``unbroken/``; it saves at validations alone."""
    runs.start("warm", "trainer.max_steps=1")  # fills the store of weights
    done = runs.start("unbroken")
    assert done["status"] == 0, runs.said("unbroken")[-3000:]
    return float(done["seconds"])


def table(folder: Path) -> list[dict[str, float]]:
    """All rows of the run's metrics but the clock's."""
    rows = read_metrics(folder / "metrics.csv")
    return [{name: value for name, value in row.items() if not name.endswith("_per_s")} for row in rows]


def assert_same_end(runs: Runs, name: str) -> None:
    """Every row of metrics, the final state and both exported policies are those of the unbroken run, bit for bit."""
    here, there = runs.output / name, runs.output / "unbroken"
    assert table(here) == table(there)
    assert len([row for row in table(here) if "train/loss" in row]) == STEPS
    assert [row["step"] for row in table(here) if "val/loss" in row] == [0, 5, 10, 12]
    for part in ("best", "last"):
        assert read_checkpoint_info(here / part)["step"] == read_checkpoint_info(there / part)["step"]
        exported = [(place / part / "model.safetensors").read_bytes() for place in (here, there)]
        assert exported[0] == exported[1], part
    states = [torch.load(place / "last" / "state.ckpt", weights_only=True) for place in (here, there)]
    for mine, theirs in zip(*(state["optimizer_states"][0]["state"].values() for state in states), strict=True):
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)
    assert states[0]["lr_schedulers"] == states[1]["lr_schedulers"]
    results = [json.loads((place / "result.json").read_text()) for place in (here, there)]
    metrics = [{k: v for k, v in result["metrics"].items() if not k.endswith("_per_s")} for result in results]
    assert metrics[0] == metrics[1]
    assert {path.name for path in here.iterdir()} == {path.name for path in there.iterdir()}


def test_killed_at_random_moments(runs: Runs, unbroken: float, record_property: Callable[[str, object], None]) -> None:
    """SIGKILLs while runs train; each chain of resumed runs ends like the unbroken run."""
    moments, before_saving, chains = Counter[str](), 0, 0
    dice = random.Random(20)
    while sum(moments.values()) < KILLS:
        name = f"chain{chains}"
        chains += 1
        while True:
            # Some come at once, before the first save; with a save after each step, training is slower than unbroken.
            delay = unbroken * dice.choice((0.03, 0.8)) * dice.random()
            blow: dict[str, Any] = {"signal": int(signal.SIGKILL), "delay": delay}
            if dice.random() < 0.5:  # saves are short: every other blow waits for one
                blow |= {"upon": [LAST, BEST], "wait": 0.02 * dice.random()}
            if sum(moments.values()) >= KILLS:
                blow = {}
            done = runs.start(name, "callbacks.save_every=1", "resume=auto", **blow)
            if done["status"] == 0:
                break
            assert done["status"] == -signal.SIGKILL, runs.said(name)[-3000:]
            moment = done["met"]["moment"]
            if moment in MOMENTS[STEP : VALIDATING + 1]:
                moments[moment] += 1
                before_saving += not complete_folder(runs.output / name / "last").exists()
        assert_same_end(runs, name)
    found = ", ".join(f"{count} {moment}" for moment, count in moments.most_common())
    line = (
        f"{sum(moments.values())} SIGKILLs in {chains} runs: {found}; {before_saving} before the first save; all equal"
    )
    record_property("resume", line)
    sys.stdout.write(line + "\n")
    assert moments["in a step"] and moments["saving last"] + moments["saving best"]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_within_a_step_saves_and_ends(runs: Runs, unbroken: float, name: str) -> None:
    """Between the micro-batches of the seventh optimiser step; the step is finished, saved and not repeated."""
    number = int(signal.Signals[name])
    done = runs.start(name, signal=number, at=[STEP, 6, 1])
    assert done["status"] == 128 + number, runs.said(name)[-3000:]
    folder = runs.output / name
    assert done["met"] == {"moment": "in a step", "step": 6, "micro": 1}
    assert read_checkpoint_info(folder / "last")["step"] == 7
    assert (folder / "last" / "model.safetensors").is_file()
    last = runs.said(name).splitlines()[-1]
    assert last.startswith(
        f"stopped by {name} at step 7 of 12, saved {folder / 'last'}; continue with python -m attnpo.fit "
    )
    assert last.endswith(f" name={name} resume=auto")
    if name == "SIGTERM":  # the state is the same whatever the signal
        assert runs.start(name, "resume=auto")["status"] == 0, runs.said(name)[-3000:]
        assert_same_end(runs, name)


def test_a_signal_during_validation_ends_after_it(runs: Runs, unbroken: float) -> None:
    done = runs.start("validating", signal=int(signal.SIGTERM), at=[VALIDATING, 5, 7])
    assert done["status"] == 143, runs.said("validating")[-3000:]
    assert read_checkpoint_info(runs.output / "validating" / "last")["step"] == 5
    assert runs.start("validating", "resume=auto")["status"] == 0
    assert_same_end(runs, "validating")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_before_the_first_step_ends_without_a_trace(runs: Runs, unbroken: float, name: str) -> None:
    """Lightning would ignore the one there and end with status 1 on the other."""
    number = int(signal.Signals[name])
    folder = f"early{name}"
    done = runs.start(folder, signal=number, at=[FIRST, 0, 0])
    assert done["status"] == 128 + number, runs.said(folder)[-3000:]
    assert runs.said(folder).splitlines()[-1] == f"stopped by {name} at step 0 of 12, nothing saved"
    assert "Traceback" not in runs.said(folder)
    assert not (runs.output / folder / "last").exists()


@pytest.mark.parametrize(
    ("place", "name"), [("final save", "SIGTERM"), ("final save", "SIGINT"), ("training ends", "SIGUSR1")]
)
def test_a_signal_after_the_last_step_is_not_forgotten(runs: Runs, unbroken: float, place: str, name: str) -> None:
    """What was trained is saved; the result is left to the next start."""
    number, run = int(signal.Signals[name]), f"late {place} {name}".replace(" ", "-")
    done = runs.start(run, own=[place, [number], 0])
    folder = runs.output / run
    assert done["status"] == 128 + number, runs.said(run)[-3000:]
    last = runs.said(run).splitlines()[-1]
    assert last.startswith(f"stopped by {name} at step 12 of 12, saved {folder / 'last'}; continue with python -m ")
    assert last.endswith(f" name={run} resume=auto")
    assert "Traceback" not in runs.said(run) and not (folder / "result.json").exists()
    if place == "final save" and name == "SIGTERM":
        assert runs.start(run, "resume=auto")["status"] == 0, runs.said(run)[-3000:]
        assert_same_end(runs, run)


@pytest.mark.parametrize("name", ["SIGINT", "SIGUSR1"])
def test_a_signal_while_training_is_set_up_ends_before_its_first_step(runs: Runs, unbroken: float, name: str) -> None:
    number, run = int(signal.Signals[name]), f"setup{name}"
    done = runs.start(run, own=["fit begins", [number], 0])
    assert done["status"] == 128 + number, runs.said(run)[-3000:]
    assert runs.said(run).splitlines()[-1] == f"stopped by {name} at step 0 of 12, nothing saved"
    assert "Traceback" not in runs.said(run) and done["step"] == 0


def test_a_signal_while_a_resumed_training_is_set_up_tells_what_is_saved(runs: Runs, unbroken: float) -> None:
    run = "setup-resumed"
    assert runs.start(run, signal=int(signal.SIGTERM), at=[STEP, 6, 1])["status"] == 143
    assert runs.start(run, "resume=auto", own=["fit begins", [int(signal.SIGINT)], 0])["status"] == 130
    last = runs.said(run).splitlines()[-1]
    assert last.startswith(f"stopped by SIGINT at step 7 of 12, saved {runs.output / run / 'last'}; continue with")
    assert runs.start(run, "resume=auto")["status"] == 0, runs.said(run)[-3000:]
    assert_same_end(runs, run)


@pytest.mark.parametrize("place", ["in a step", "fit begins"])
def test_one_ctrl_c_that_arrives_twice_is_one(runs: Runs, unbroken: float, place: str) -> None:
    """From the terminal and from the launcher, milliseconds apart; with a SIGTERM among them."""
    run = f"twice {place}".replace(" ", "-")
    both = [int(signal.SIGINT), int(signal.SIGTERM), int(signal.SIGINT), int(signal.SIGTERM)]
    done = runs.start(run, own=[place, both, 0.003])
    assert done["status"] == 130, runs.said(run)[-3000:]
    step = 1 if place == "in a step" else 0
    assert runs.said(run).splitlines()[-1].startswith(f"stopped by SIGINT at step {step} of 12, ")
    assert (runs.output / run / "last").exists() == bool(step) and "Traceback" not in runs.said(run)


def test_the_same_signal_later_ends_at_once(runs: Runs, unbroken: float) -> None:
    done = runs.start("again", own=["in a step", [int(signal.SIGTERM)] * 2, 1.2])
    assert done["status"] == 143, runs.said("again")[-3000:]
    assert runs.said("again").splitlines()[-1] == "stopped by SIGTERM; stored results are kept"
    assert not (runs.output / "again" / "last").exists() and "Traceback" not in runs.said("again")
