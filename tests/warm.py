"""Our commands in processes of their own, without their imports: a warm process, which has imported them, forks each.

What starts here has the arguments, environment, folder and signal handlers of a process that a shell starts, and ends
as such a one does. Where a test is about imports, or about who starts a process (torchrun), it starts a shell's own.
"""

import atexit
import contextlib
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]


class Process:
    """A process that the warm one has forked; the part of ``subprocess.Popen`` that tests use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = _ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float) -> int:
        limit = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > limit:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(arguments: Sequence[str], environment: Mapping[str, str], output: Path, folder: Path = ROOT) -> Process:
    """``python ARGUMENTS`` (``-m MODULE ...`` or ``FILE ...``) in ``folder``, what it says in the file ``output``."""
    order = {"arguments": list(arguments), "environment": dict(environment), "output": str(output)}
    return Process(_ask({**order, "folder": str(folder)}))


@cache
def _server() -> tuple[IO[str], IO[str]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdin is not None and process.stdout is not None

    def end() -> None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()  # type: ignore[union-attr]
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]

    atexit.register(end)
    return process.stdin, process.stdout


def _ask(order: dict[str, Any]) -> Any:
    orders, answers = _server()
    orders.write(json.dumps(order) + "\n")
    orders.flush()
    return json.loads(answers.readline())


def serve() -> dict[str, Any] | None:
    """Forks what is ordered until nobody orders any more; in a forked process, returns what it was ordered to do."""
    answers = os.fdopen(os.dup(1), "w")
    running: set[int] = set()
    for line in iter(sys.stdin.readline, ""):
        order: dict[str, Any] = json.loads(line)
        if "poll" in order:
            pid, status = os.waitpid(order["poll"], os.WNOHANG)
            running.discard(pid)
            print(json.dumps(os.waitstatus_to_exitcode(status) if pid else None), file=answers, flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            answers.close()
            return order
        running.add(pid)
        print(pid, file=answers, flush=True)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return None


def become(order: dict[str, Any]) -> None:
    """Makes this process the one that was ordered, and runs it."""
    import torch
    from lightning.fabric.utilities.rank_zero import _get_rank, rank_zero_only

    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    # Read from the environment when these were imported.
    rank_zero_only.rank = _get_rank() or 0
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    first, *others = order["arguments"]
    sys.path[0], sys.argv = (
        (order["folder"], list(others)) if first == "-m" else (str(Path(first).parent), [first, *others])
    )
    if first == "-m":
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(first, run_name="__main__")


def main() -> None:
    # Nothing is computed here, so that what is forked has no other threads to miss.
    sys.path[0] = str(ROOT)
    import lightning.pytorch
    import torch
    import torchmetrics.text
    import transformers.models.llama.modeling_llama

    import attnpo.lab.studies.runner
    import attnpo.run.run
    import attnpo.run.training
    from attnpo.config.compose import compose

    compose("fit", [])  # what was read for it is kept for those that are forked
    assert torch and lightning.pytorch and torchmetrics.text and transformers.models.llama.modeling_llama
    assert attnpo.run.run and attnpo.run.training and attnpo.lab.studies.runner
    gc.freeze()
    order = serve()
    if order is not None:
        become(order)


if __name__ == "__main__":
    main()
