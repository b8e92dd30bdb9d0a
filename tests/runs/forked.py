"""Runs of ``attnpo.fit`` in real processes without their imports: a warm process forks one per run and may signal it.

Started by the tests as ``python forked.py``. Each line of its input is a JSON object with ``overrides``, ``log`` (a
file for the run's output) and, to send a signal, ``signal`` with ``delay`` (seconds from the start of training, then
``wait`` seconds into the next of the moments ``upon``) or ``at`` (moment, optimiser steps done, micro-batch). With
``own`` (place, signals, seconds between them) the run sends them to itself at a named place. For each
it answers with a line: the process's exit status (negative: killed by that signal), what the signal ``met`` (null: the
run was over), the optimiser steps done, how long training took.
"""

import json
import mmap
import os
import signal
import struct
import sys
import time
import traceback
from pathlib import Path
from typing import Any

MOMENTS = (
    "before training",
    "validating first",
    "in a step",
    "between steps",
    "saving last",
    "saving best",
    "validating",
    "after training",
)
BEFORE, FIRST, STEP, BETWEEN, LAST, BEST, VALIDATING, AFTER = range(len(MOMENTS))
HELD: list[int] = []  # in a run: the moment at which it waits for its signal
OWN: list[Any] = []  # in a run: the place at which it sends signals to itself, these, and seconds between them
HOLD = 0.5  # seconds; longer than a busy machine keeps the process that sends it from looking
FORM = "iiidd"  # moment, optimiser steps done, micro-batch, start and end of training


class Board:
    """Where a run notes what it is doing, seen from outside."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, struct.calcsize(FORM))

    def read(self) -> tuple[int, int, int, float, float]:
        return struct.unpack(FORM, self.memory[:])  # type: ignore[return-value]

    def write(self, **changes: Any) -> None:
        names = ("moment", "step", "micro", "began", "ended")
        values = {**dict(zip(names, self.read(), strict=True)), **changes}
        self.memory[:] = struct.pack(FORM, *values.values())


def reach(place: str) -> None:
    """Sends the signals that are meant for ``place``, once."""
    if OWN and OWN[0] == place:
        numbers, between = OWN[1:]
        OWN.clear()
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(between)


def trace(board: Board) -> None:
    """Makes every run of this process keep ``board``."""
    import lightning as L

    from attnpo.runs import training
    from attnpo.training import checkpoints

    class Trace(L.Callback):
        def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            reach("fit begins")

        def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            reach("training ends")

        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            board.write(moment=STEP, step=trainer.global_step, began=time.monotonic())

        def on_train_batch_start(self, trainer: L.Trainer, *rest: Any) -> None:
            board.write(moment=STEP, step=trainer.global_step, micro=rest[-1])
            reach("in a step")
            if [STEP, trainer.global_step, rest[-1]] == HELD:
                time.sleep(HOLD)

        def on_train_batch_end(self, trainer: L.Trainer, *rest: Any) -> None:
            if trainer.global_step > board.read()[1]:
                board.write(moment=BETWEEN, step=trainer.global_step)

        def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            board.write(moment=VALIDATING if trainer.state.fn == "fit" else FIRST)

        def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            if trainer.state.fn == "fit":
                board.write(moment=BETWEEN)

        def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            board.write(moment=AFTER, ended=time.monotonic())

    make_callbacks, save = training.make_callbacks, checkpoints.CheckpointFolder.save

    def traced(*arguments: Any, **named: Any) -> list[Any]:
        return [*make_callbacks(*arguments, **named), Trace()]

    def traced_save(self: Any, *arguments: Any, **named: Any) -> None:
        before = board.read()[0]
        board.write(moment=LAST if self.folder.name == "last" else BEST)
        if named.get("export") and self.folder.name == "last":
            reach("final save")
        save(self, *arguments, **named)
        board.write(moment=before)

    training.make_callbacks = traced
    checkpoints.CheckpointFolder.save = traced_save  # type: ignore[method-assign]


def child(order: dict[str, Any]) -> int:
    from attnpo.command_line import run_entry
    from attnpo.fit import DESCRIPTION, EXAMPLES, main

    output = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    HELD.extend(order.get("at", []))
    OWN.extend(order.get("own", []))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    return run_entry(main, "fit", order["overrides"], DESCRIPTION, EXAMPLES)


def wait(pid: int, board: Board, order: dict[str, Any]) -> dict[str, Any]:
    met = None
    if "signal" in order:
        met = strike(pid, board, order)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    _, step, _, began, ended = board.read()
    return {"status": status, "met": met, "step": step, "seconds": ended - began}


def strike(pid: int, board: Board, order: dict[str, Any]) -> dict[str, Any] | None:
    """Sends the signal at its time; where it met the run, or None when the run was over."""
    while True:
        over = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if over is not None:
            return None
        moment, step, micro, began, _ = board.read()
        if "delay" in order:
            due = began > 0 and time.monotonic() - began >= order["delay"] and moment in order.get("upon", [moment])
        else:
            due = [moment, step, micro] == order["at"]
        if due:
            time.sleep(order.get("wait", 0.0))
            os.kill(pid, order["signal"])
            if order["signal"] == signal.SIGKILL:
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
                moment, step, micro, *_ = board.read()
            return {"moment": MOMENTS[moment], "step": step, "micro": micro}
        time.sleep(0.0002)


def main() -> None:
    # One thread and nothing computed here: what is forked has no other threads to miss.
    import torch

    torch.set_num_threads(1)
    import attnpo.fit
    import attnpo.runs.run
    import attnpo.studies.report
    import attnpo.studies.runner
    from attnpo.config import compose

    assert attnpo.fit
    board = Board()
    trace(board)
    answers = os.fdopen(os.dup(1), "w")
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        board.write(moment=BEFORE, step=0, micro=0, began=0.0, ended=0.0)
        compose("fit", order["overrides"])  # kept for the process that is forked
        pid = os.fork()
        if pid == 0:
            status = 70
            try:
                status = child(order)
            finally:  # the traceback of an error stays in the log, the process must not go on as a second server
                if sys.exc_info()[0] is not None:
                    traceback.print_exc()
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        print(json.dumps(wait(pid, board, order)), file=answers, flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main()
