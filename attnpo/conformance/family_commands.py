"""One family's folder through the commands that a user types: train, save, go on, adapters, export, answer."""

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from attnpo.conformance.family_checks import Finding
from attnpo.conformance.family_tokenizer import write_pairs

Command = Callable[[Sequence[str]], int]
"""The main of a command: words to exit status."""

RESUMED = 1e-5  # float32; one thread gives the same bits
BRIEF = (
    "batch.pairs=4", "batch.micro=2", "batch.eval_micro=2", "trainer.validate_every=1", "trainer.accelerator=cpu",
    "callbacks.samples=1", "callbacks.sample_tokens=4", "callbacks.heat_maps=1", "model.chat_template=null",
    "trainer.progress=false",
)  # fmt: skip


def commanded(folder: Path, work: Path, fit: Command, generate: Command, *, judged: bool) -> Iterator[Finding]:
    """Findings of the commands on a model's folder; what they write lies below ``work``.

    ``judged``: the model can be a judge, so that it trains with its own attention; else with uniform weights.
    """
    data = write_pairs(work / "pairs")
    weights = ["weights=attention"] if judged else ["weights=uniform"]
    base = [
        "setting=real_smoke", f"model.path={folder}", f"data.path={data}", f"output={work}", f"store={work / 'store'}",
        *BRIEF, *weights,
    ]  # fmt: skip
    steps = ["trainer.max_steps=3"]
    yield _called("fit", fit, [*base, "name=first", *steps])
    exported = work / "first/last"
    if exported.is_dir():
        yield _called("resume", fit, [*base, "name=second", f"resume={work / 'first/best'}", *steps])
        yield _reloaded(folder, exported, work / "second/last")
        answer = [f"model.path={exported}", f"data.path={data}", "data.rows=1", "sampling.max_new_tokens=4"]
        yield _called("generate", generate, [*answer, f"output={work / 'answers.jsonl'}", "trainer.accelerator=cpu"])
    yield _called("lora", fit, [*base, "name=adapters", "model=lora", "reference=adapter_off", "trainer.max_steps=1"])


def _called(check: str, command: Command, words: Sequence[str]) -> Finding:
    said = io.StringIO()
    try:
        with redirect_stdout(said), redirect_stderr(said):
            status = command(list(words))
    except Exception as error:  # noqa: BLE001  # a traceback is what this looks for
        return Finding(check, problem=f"{type(error).__name__}: {' '.join(str(error).split())}")
    lines = [line for line in said.getvalue().splitlines() if "error" in line.lower()]
    words_of_it = lines[-1] if lines else f"exit status {status}"
    if status == 0:
        return Finding(check, 0.0)
    return Finding(check, reason=words_of_it) if status == 2 else Finding(check, problem=words_of_it)


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
