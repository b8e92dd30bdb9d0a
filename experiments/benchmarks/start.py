"""Benchmarks the start of a run on much data: seconds to the first step and memory, cold and warm, and for TRL.

    make trl                                      creates TRL's environment, once; without it its rows are left out
    python -m experiments.benchmarks.start [--short] [--rows 60000] [--sample FILE --tokenizer FOLDER] [--json FILE]

Uses rows with unique texts (``experiments.benchmarks.rows``), a model of two tiny layers, attention weights of the last
layer or uniform ones, and two steps, so that reading, tokenising and weighting dominate. Cold means an empty store,
warm the same command again; TRL keeps its tokenised rows in the cache of ``datasets``. The judge pass that fills the
store is not counted. Every start is its own process. Memory is the peak of the resident set, including mapped files
shared by all processes of a machine, and the private memory at the first step.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging as library

from attnpo.config.compose import CONFIG_DIR
from experiments.benchmarks.harness import ROOT, Bar, finish, new_parser, parsed, say, table
from experiments.benchmarks.pipeline import CHAT, LIMIT, process
from experiments.benchmarks.rows import read_sample, write_rows
from experiments.benchmarks.shapes import Shape, random_llama
from experiments.benchmarks.step import add_trl, trl_python

FEW, HELD_OUT = 64, 16  # rows of the start that others are held against; rows for validation
FIRST, FIRST_OF_TRL = "parameters for 2 optimiser steps", "the first step begins"
PREPARED = re.compile(r"(\w+) rows: prepared in ([\d.]+) s")
ROOM_BAR, LATE_BAR = 0.7, 3.0  # GB beyond a start on few rows; seconds after TRL's


def save_model(folder: Path, options: Namespace) -> None:
    """Saves a model of two tiny layers with the given tokenizer, or one trained on the pages."""
    if options.tokenizer is not None:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(options.tokenizer)
    else:
        learnt = ByteLevelBPETokenizer()
        texts = [text for one in read_sample(None) for text in one.values()]
        learnt.train_from_iterator(texts, vocab_size=8192, special_tokens=["<s>", "</s>"], show_progress=False)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=learnt._tokenizer, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = tokenizer.chat_template or (CONFIG_DIR / CHAT).read_text(encoding="utf-8").rstrip("\n")
    tokenizer.save_pretrained(folder)
    shape = Shape(width=64, layers=2, heads=4, kv_heads=1, mlp=128, vocab=len(tokenizer))
    random_llama(shape, options.seed).save_pretrained(folder)


def until(command: Sequence[str], mark: str, said: list[str] | None = None) -> tuple[float, float, float]:
    """Starts a process; returns the seconds until it writes ``mark``, and its peak resident and private memory in GB.

    ``said`` collects the lines it wrote. The process is stopped afterwards. Raises ``SystemExit`` if it ends without
    the mark.
    """
    began = time.perf_counter()
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as started:
        assert started.stderr is not None
        lines: list[str] = [] if said is None else said
        for line in started.stderr:
            lines.append(line)
            if mark in line:
                seconds = time.perf_counter() - began
                status = Path(f"/proc/{started.pid}/status").read_text(encoding="utf-8")
                peak, private = (
                    int(status.partition(f"{name}:")[2].split()[0]) * 1024 / 1e9 for name in ("VmHWM", "RssAnon")
                )
                started.kill()
                return seconds, peak, private
    raise SystemExit(f"{' '.join(command)} ended with status {started.returncode}:\n{''.join(lines)[-3000:]}")


def ours(options: Namespace, folder: Path, rows: int, store: Path) -> list[str]:
    """Returns the command of our run on the first rows."""
    command = [sys.executable, "-m", "attnpo.fit", "setting=real_smoke", "judge=short", "callbacks=none"]
    command += [f"model.path={folder / 'model'}", f"data.path={folder / 'rows.jsonl'}", f"store={store}"]
    command += [f"data.train_rows=0:{rows}", f"data.val_rows={options.rows}:", f"output={folder / 'runs'}"]
    command += [f"name=run{time.time_ns()}", "reference=live", f"weights={options.weights}", "callbacks.samples=0"]
    command += [f"lengths.max_length={LIMIT}", "lengths.max_prompt_length=1800", "lengths.overlong=cut"]
    command += ["judge.max_length=4096", "judge.max_response_length=1536", "judge.low_label_mass=warn"]
    command += ["batch.pairs=4", "batch.micro=4", "trainer.max_steps=2", "trainer.accelerator=cpu"]
    return [*command, "trainer.progress=false", "model.fallback_template=model/plain_chat.jinja"]


def theirs(options: Namespace, folder: Path, python: Path) -> list[str]:
    """Returns the command of TRL's run on the same rows."""
    given = {
        **{"model": str(folder / "model"), "data": str(folder / "rows.jsonl"), "cache": str(folder / "cache")},
        **{"beta": 0.1, "lr": 1e-4, "warmup": 0.1, "micro": 4, "accumulation": 1, "steps": 2},
        **{"seed": options.seed, "threads": options.threads},
    }
    return [str(python), "-m", "experiments.benchmarks.trl_worker", "train", json.dumps(given)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables; returns 0."""
    parser = new_parser(__doc__, rounds=1)
    add_trl(parser)
    parser.add_argument("--rows", type=int, default=20_000, help="rows of the data")
    parser.add_argument("--sample", type=Path, help="pairs that provide lengths and sentences of the rows")
    parser.add_argument("--tokenizer", type=Path, help="folder of a tokenizer with a chat template")
    parser.add_argument("--weights", default="uniform", help="weights of the runs")
    options = parsed(parser, arguments)
    if options.short:
        options.rows = min(options.rows, 5_000)
    library.disable_progress_bar()
    python, missing = trl_python(options)
    found, rates = dict[str, tuple[float, float, float]](), dict[str, float]()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save_model(folder / "model", options)
        write_rows(folder / "rows.jsonl", options.sample, options.rows + HELD_OUT, options.seed)
        size = os.path.getsize(folder / "rows.jsonl") / 1e9
        print(f"{options.rows} rows, {size:.2f} GB; weights {options.weights}; TRL: {missing or python}", flush=True)
        until(ours(options, folder, FEW, folder / "few"), FIRST)
        found[f"ours, {FEW} rows"] = until(ours(options, folder, FEW, folder / "few"), FIRST)
        if options.weights != "uniform":
            say("the judge pass")
            process(ours(options, folder, options.rows, folder / "store"))
            shutil.rmtree(folder / "store" / "examples")
        for name in ("ours, cold", "ours, warm"):
            said: list[str] = []
            found[name] = until(ours(options, folder, options.rows, folder / "store"), FIRST, said)
            rates |= {kind: (options.rows + HELD_OUT) / float(took) for kind, took in PREPARED.findall("".join(said))}
            say(f"{name}: {found[name][0]:.1f} s")
        for name in ("TRL, cold", "TRL, warm") if python is not None else ():
            found[name] = until(theirs(options, folder, python), FIRST_OF_TRL)
            say(f"{name}: {found[name][0]:.1f} s")
    for kind, rate in rates.items():
        print(f"{kind} rows: {rate:,.0f} pairs/s")
    rows = [[name, f"{seconds:.1f}", f"{peak:.2f}", f"{own:.2f}"] for name, (seconds, peak, own) in found.items()]
    head = ("start", "seconds to the first step", "resident at its peak, GB", "private then, GB")
    print(f"\n{table(head, rows)}", flush=True)
    late = found["ours, warm"][0] - found["TRL, warm"][0] if python is not None else None
    beyond = max(found[f"ours, {way}"][2] for way in ("cold", "warm")) - found[f"ours, {FEW} rows"][2]
    bars = [
        Bar("start: ours warm after TRL's", LATE_BAR, late, False, missing, " s"),
        Bar(f"start: private memory beyond {FEW} rows", ROOM_BAR, beyond, False, unit=" GB"),
    ]
    finish("start", options, {"seconds_and_gb": found, "pairs_a_second": rates}, bars)
    return 0


if __name__ == "__main__":
    sys.exit(main())
