"""Runs of ``attnpo.fit`` in processes of their own that note what they are doing, and are signalled at a moment of it.

``run`` is for tests. The process it starts is this file as a script: it traces its own training into a file that both
have mapped.
"""

import json
import mmap
import os
import signal
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests import warm

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
HOLD = 0.5  # seconds; longer than a busy machine keeps the process that sends a signal from looking
FORM = "iiidd"  # moment, optimiser steps done, micro-batch, start and end of training


class Board:
    """Where a run notes what it is doing, seen from outside; the file ``path`` is made where there is none."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(struct.calcsize(FORM)))
        with path.open("r+b") as file:
            self.memory = mmap.mmap(file.fileno(), struct.calcsize(FORM))

    def read(self) -> tuple[int, int, int, float, float]:
        return struct.unpack(FORM, self.memory[:])  # type: ignore[return-value]

    def write(self, **changes: Any) -> None:
        names = ("moment", "step", "micro", "began", "ended")
        values = {**dict(zip(names, self.read(), strict=True)), **changes}
        self.memory[:] = struct.pack(FORM, *values.values())


def run(overrides: Sequence[str], log: Path, **order: Any) -> dict[str, Any]:
    """One process of ``attnpo.fit`` from its start to its end, what it says in the file ``log``; what became of it.

    ``signal`` is sent with ``delay`` (seconds from the start of training, then ``wait`` seconds into the next of the
    moments ``upon``) or ``at`` (moment, optimiser steps done, micro-batch). With ``own`` (place, signals, seconds
    between them) the run sends them to itself at a named place. The answer has the process's exit ``status`` (negative:
    killed by that signal), what the signal ``met`` (None: the run was over), the optimiser ``step`` and the ``seconds``
    of training.
    """
    path = log.with_suffix(".board")
    path.unlink(missing_ok=True)
    board = Board(path)
    told = json.dumps({name: order[name] for name in ("at", "own") if name in order})
    more = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(warm.ROOT)}
    process = warm.start([__file__, str(path), told, *overrides], {**os.environ, **more}, log)
    met = _strike(process, board, order) if "signal" in order else None
    status = process.wait(timeout=600)
    _, step, _, began, ended = board.read()
    path.unlink()
    return {"status": status, "met": met, "step": step, "seconds": ended - began}


def _strike(process: warm.Process, board: Board, order: dict[str, Any]) -> dict[str, Any] | None:
    """Sends the signal at its time; where it met the run, or None when the run was over."""
    looks = 0
    while looks % 100 or process.poll() is None:  # asking is dear, looking is not
        looks += 1
        moment, step, micro, began, _ = board.read()
        if "delay" in order:
            due = began > 0 and time.monotonic() - began >= order["delay"] and moment in order.get("upon", [moment])
        else:
            due = [moment, step, micro] == order["at"]
        if due:
            time.sleep(order.get("wait", 0.0))
            process.send_signal(order["signal"])
            if order["signal"] == signal.SIGKILL:
                process.wait(timeout=60)
                moment, step, micro, *_ = board.read()
            return {"moment": MOMENTS[moment], "step": step, "micro": micro}
        time.sleep(0.0002)
    return None


def trace(board: Board, at: Sequence[int], own: Sequence[Any]) -> None:
    """Makes training in this process keep ``board``, wait at the moment ``at`` and signal itself as ``own`` says."""
    import lightning as L

    from attnpo.run import training
    from attnpo.training import checkpoints

    left = list(own)

    def reach(place: str) -> None:
        if left and left[0] == place:
            numbers, between = left[1:]
            left.clear()
            for number in numbers:
                os.kill(os.getpid(), number)
                time.sleep(between)

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
            if [STEP, trainer.global_step, rest[-1]] == list(at):
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


def main() -> None:
    from attnpo.cli.entry import run_entry
    from attnpo.fit import DESCRIPTION, EXAMPLES
    from attnpo.fit import main as fit

    board, told, *overrides = sys.argv[1:]
    trace(Board(Path(board)), **{"at": [], "own": [], **json.loads(told)})
    sys.exit(run_entry(fit, "fit", overrides, DESCRIPTION, EXAMPLES))


if __name__ == "__main__":
    main()
