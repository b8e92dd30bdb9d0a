"""Signals within one process and among several: agreed on, obeyed after a step, handlers given back.

Started as a script (``python test_resume_signals.py FOLDER PART``) this is one of several processes of a run.
"""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from attnpo.cli.terminal import SIGNALS
from attnpo.data.rules import BatchPlan
from attnpo.lab.testbed.grammar import Grammar
from attnpo.lab.testbed.tokenizer import build_tokenizer
from attnpo.training import signals as interruption
from attnpo.training.checkpoint_folders import STATE, read_checkpoint_info
from attnpo.training.checkpoints import LastCheckpoint
from attnpo.training.export import Exporter
from attnpo.training.interrupted import RunInterrupted
from attnpo.training.loggers import make_loggers
from attnpo.training.metrics_file import merge_metrics, read_metrics
from attnpo.training.resume_state import ExactResume
from attnpo.training.settings import LoggerSettings, TrainerSettings
from attnpo.training.signals import SignalHandler
from attnpo.training.trainer import make_trainer, quiet_lightning
from tests.training.processes import in_two_processes
from tests.training.tiny import Rows, make_data, make_examples, make_module

STEPS = 6  # two epochs of 20 pairs in steps of 8, 8 and 4


class Signal(L.Callback):
    """Sends signals to this process at the first micro-batch of a step, on one rank."""

    def __init__(self, step: int, numbers: tuple[int, ...], rank: int = 0) -> None:
        self.step, self.numbers, self.rank = step, numbers, rank

    def on_train_batch_start(self, trainer: L.Trainer, *rest: Any) -> None:
        if trainer.global_step == self.step and trainer.global_rank == self.rank:
            for number in self.numbers:
                os.kill(os.getpid(), number)
            self.numbers = ()


class Late(L.Callback):
    """Sends SIGTERM to the second process once the last step is saved."""

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def train(place: Path, *, devices: int, blow: L.Callback | None = None, resume: Path | None = None) -> Rows:
    """The rows of the run's metrics; raises Interrupted when a signal ended it."""
    plan = BatchPlan(8, 2)
    settings = TrainerSettings(max_epochs=2, accelerator="cpu", devices=str(devices), validate_every=4)
    signals = SignalHandler()
    last = LastCheckpoint(place / "last", Exporter(build_tokenizer(Grammar())))
    callbacks = [ExactResume(), signals, last, *([blow] if blow else [])]
    with quiet_lightning():
        trainer = make_trainer(settings, make_loggers(LoggerSettings(), place, {}), callbacks, place, 1)
        trainer.accumulate_grad_batches = plan.accumulation_steps(trainer.world_size)
        module, data = make_module(STEPS), make_data(make_examples(20), plan)
        with signals.handle_signals(trainer, STEPS, place / "last"):
            trainer.fit(module, data, ckpt_path=resume, weights_only=True)
    return merge_metrics(place) if trainer.is_global_zero else []


@pytest.fixture
def handlers() -> Iterator[None]:
    """The signals' handlers, put back whatever a test does."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_training_ends_after_the_step_and_the_handlers_come_back(tmp_path: Path, number: int) -> None:
    heard: list[int] = []

    def record(got: int, frame: object) -> None:
        heard.append(got)

    for each in SIGNALS:
        signal.signal(each, record)
    with pytest.raises(RunInterrupted) as stopped:
        train(tmp_path, devices=1, blow=Signal(1, (number,)))
    assert (stopped.value.signum, stopped.value.step, stopped.value.exit_status) == (number, 2, 128 + number)
    assert stopped.value.saved == tmp_path / "last" and read_checkpoint_info(tmp_path / "last")["step"] == 2
    assert (tmp_path / "last" / "model.safetensors").is_file()
    assert not any("val/loss" in row for row in merge_metrics(tmp_path)), "no validation on the way out"
    assert heard == [] and signal.getsignal(number) is record


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same signal counts as another one however soon it comes."""
    monkeypatch.setattr(interruption, "REPEAT", 0.0)


@pytest.mark.usefixtures("handlers", "no_pause")
def test_the_same_signal_again_does_what_it_did_before(tmp_path: Path) -> None:
    heard: list[int] = []
    signal.signal(signal.SIGUSR1, lambda got, frame: heard.append(got))
    with pytest.raises(RunInterrupted):
        train(tmp_path, devices=1, blow=Signal(1, (signal.SIGUSR1, signal.SIGUSR1)))
    assert heard == [signal.SIGUSR1]


@pytest.mark.usefixtures("handlers", "no_pause")
def test_ctrl_c_twice_ends_at_once(tmp_path: Path) -> None:
    """As KeyboardInterrupt; Lightning alone would end the process with status 1."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt) as ended:
        train(tmp_path, devices=1, blow=Signal(1, (signal.SIGINT, signal.SIGINT)))
    assert not isinstance(ended.value, RunInterrupted)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not (tmp_path / "last").exists()


def test_two_processes_agree_and_another_number_goes_on(tmp_path: Path) -> None:
    """A signal to the second of two; one process goes on. Then one process is stopped and two go on."""
    unbroken = train(tmp_path / "unbroken", devices=1)
    with pytest.raises(RunInterrupted):
        train(tmp_path / "one first", devices=1, blow=Signal(3, (signal.SIGTERM,)))
    codes, output = in_two_processes([__file__, str(tmp_path)], tmp_path)
    assert codes == [0, 0], output[-6000:]
    assert read_checkpoint_info(tmp_path / "two first" / "last")["step"] == 2
    train(tmp_path / "two first", devices=1, resume=tmp_path / "two first" / "last" / STATE)
    for name in ("two first", "one first"):
        rows = read_metrics(tmp_path / name / "metrics.csv")
        for metric in ("train/loss", "train/lr", "train/grad_norm", "val/loss"):
            found, wanted = ({row["step"]: row[metric] for row in all if metric in row} for all in (rows, unbroken))
            assert found == pytest.approx(wanted, rel=2e-5, abs=2e-6), (name, metric)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    try:
        train(folder / "two first", devices=2, blow=Signal(1, (signal.SIGTERM,), rank=1))
    except RunInterrupted as stop:
        assert (stop.signum, stop.step) == (signal.SIGTERM, 2)
    else:
        raise AssertionError("not interrupted")
    try:
        train(folder / "late", devices=2, blow=Late())
    except RunInterrupted as stop:
        assert (stop.signum, stop.step, stop.saved) == (signal.SIGTERM, STEPS, folder / "late" / "last")
    else:
        raise AssertionError("the first process must hear of it too")
    train(folder / "one first", devices=2, resume=folder / "one first" / "last" / STATE)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
