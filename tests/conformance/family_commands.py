"""One family's folder through the commands that a user types: train, save, stop, go on, adapters, export, answer.

What the commands say goes to a file: the terminal keeps a line per family.
"""

import logging
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TextIO

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import AutoModelForCausalLM

from attnpo import fit as fitting
from attnpo import generate as generating
from attnpo.cli.entry import run_entry
from tests.conformance.family_checks import Finding
from tests.conformance.family_tokenizer import write_pairs

RESUMED = 1e-5  # float32; one thread gives the same bits
STOPPED = 128 + signal.SIGTERM  # a background job of a shell does not hear SIGINT
BRIEF = (
    "batch.pairs=4", "batch.micro=2", "batch.eval_micro=2", "trainer.validate_every=2", "trainer.accelerator=cpu",
    "callbacks.samples=0", "callbacks.report=false", "trainer.progress=false",
)  # fmt: skip


def fit(argv: Sequence[str]) -> int:
    """Calls the command ``fit``."""
    return run_entry(fitting.main, "fit", argv, "", "", complete=lambda cfg: cfg.prepare is None)


def generate(argv: Sequence[str]) -> int:
    """Calls the command ``generate``."""
    return run_entry(generating.main, "generate", argv, "", "")


def run_commands(folder: Path, work: Path, said: TextIO, *, judged: bool) -> Iterator[Finding]:
    """Findings of the commands on a model's folder; what they write lies below ``work``, what they say in ``said``.

    ``judged``: the model can be a judge, so that it trains with its own attention; else with uniform weights. One run
    goes through; a second one is stopped by a signal in its first optimiser step and goes on from what it saved.
    """
    data = write_pairs(work / "pairs")
    weights = ["weights=attention"] if judged else ["weights=uniform"]
    base = [
        "setting=real_smoke", f"model.path={folder}", f"data.path={data}", f"output={work}", f"store={work / 'store'}",
        *BRIEF, *weights,
    ]  # fmt: skip
    steps = ["trainer.max_steps=2"]
    yield _call("fit", fit, [*base, "name=first", *steps], said)
    exported = work / "first/last"
    if exported.is_dir():
        with _interrupted():
            yield _call("stop", fit, [*base, "name=second", *steps], said, expected=STOPPED)
        yield _call("resume", fit, [*base, "name=second", "resume=auto", *steps], said)
        yield _reloaded(folder, exported, work / "second/last")
        answer = [f"model.path={exported}", f"data.path={data}", "data.rows=1", "sampling.max_new_tokens=4"]
        answer += [f"output={work / 'answers.jsonl'}", "trainer.accelerator=cpu"]
        yield _call("generate", generate, answer, said)
    adapters = ["name=adapters", "model=lora", "reference=adapter_off", "trainer.max_steps=1"]
    yield _call("lora", fit, [*base, *adapters], said)


@contextmanager
def into(said: TextIO) -> Iterator[None]:
    """A context in which prints and log lines go to ``said`` alone."""
    root = logging.getLogger()
    before, root.handlers = root.handlers, [logging.StreamHandler(said)]
    try:
        with redirect_stdout(said), redirect_stderr(said):
            yield
    finally:
        root.handlers = before


@contextmanager
def _interrupted() -> Iterator[None]:
    """A context in which the first optimiser step is followed by SIGTERM, as the end of a job sends it."""

    def once(*told: object) -> None:
        handle.remove()
        signal.raise_signal(signal.SIGTERM)

    handle = register_optimizer_step_post_hook(once)
    try:
        yield
    finally:
        handle.remove()


def _call(
    check: str, command: Callable[[Sequence[str]], int], words: Sequence[str], said: TextIO, expected: int = 0
) -> Finding:
    began = said.tell()
    said.write(f"$ {check} {' '.join(words)}\n")
    try:
        with into(said):
            status = command(list(words))
    except Exception as error:  # noqa: BLE001  # a traceback is what this looks for
        said.write(traceback.format_exc())
        return Finding(check, problem=f"{type(error).__name__}: {' '.join(str(error).split())}")
    if status == expected:
        return Finding(check, 0.0)
    said.seek(began)
    lines = [line for line in said.read().splitlines()[1:] if "error" in line.lower()]
    told = lines[-1] if lines else f"exit status {status}"
    return Finding(check, reason=told) if status == 2 else Finding(check, problem=told)


def _reloaded(folder: Path, exported: Path, resumed: Path) -> Finding:
    """Whether transformers alone loads both exports, as one model that is another than the one training began with."""
    ids = torch.arange(5, 25)[None]
    try:
        with torch.no_grad():
            before, after, again = (
                AutoModelForCausalLM.from_pretrained(each, trust_remote_code=False)(input_ids=ids).logits
                for each in (folder, exported, resumed)
            )
    except Exception as error:  # noqa: BLE001  # whatever the library raises, the export is not one
        return Finding("export", problem=f"{type(error).__name__}: {' '.join(str(error).split())}")
    if not torch.isfinite(after).all() or torch.equal(before, after):
        return Finding("export", problem="training left the exported logits as they were, or not finite")
    gap = float((after - again).abs().max() / after.abs().max())
    return Finding(
        "export", gap, problem="" if gap <= RESUMED else f"the resumed run's logits differ by {gap:.1e} of the largest"
    )
