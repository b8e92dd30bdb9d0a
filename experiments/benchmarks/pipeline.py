"""Benchmarks a whole AttentionPO run against plain DPO with TRL, as processes on the same data, model and batch size.

    make trl                                      creates TRL's environment, once; without it its rows are left out
    python -m experiments.benchmarks.pipeline [--short] [--pairs 64] [--override KEY=VALUE ...] [--json FILE]

Ours is ``python -m attnpo.fit`` from an empty store: judge pass over all layers and both orders, the reference's
log-probabilities, one epoch. The second run has another beta on the filled store, like every further run of a sweep.
TRL trains one epoch of DPO with a live reference. Neither saves a model; ours also validates (two pairs) before and
after the epoch. Times cover whole processes; the time after imports is shown as well. Before timing, both sides must
produce the same number of tokens and take the same number of steps.
"""

import json
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median as middle
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as library

from attnpo.config.compose import CONFIG_DIR
from attnpo.models.loading import load_tokenizer
from attnpo.schema import Message
from attnpo.text.chat import ChatFormat
from experiments.benchmarks.harness import (
    ROOT,
    Bar,
    finish,
    interleaved,
    new_parser,
    parsed,
    ratio,
    table,
    timed,
    times_rows,
)
from experiments.benchmarks.shapes import (
    SPECIALS,
    Shape,
    add_shape,
    make_pairs,
    random_llama,
    typical_lengths,
    word_tokenizer,
)
from experiments.benchmarks.step import add_trl, trl_python

TRL, COLD, WARM = "TRL, plain DPO", "ours, store empty", "ours, store warm"
COLD_BAR, WARM_BAR = 0.9, 0.45
JUDGE, CHAT = "judge/pairwise.txt", "model/plain_chat.jinja"
BETA, LR, WARMUP = 5e-3, 1e-4, 0.1
LIMIT = 2000  # tokens of a branch without the chat's own: nothing is cut


class World:
    """Folders of a model with its tokenizer and of pairs, and the runs on them."""

    def __init__(self, options: Namespace, folder: Path, model: PreTrainedModel | None = None) -> None:
        self.options, self.folder = options, folder
        self.model, self.data = folder / "model", folder / "data"
        self.runs = 0
        self.inner: dict[str, list[float]] = {}
        self.steps: dict[str, int] = {}
        self.trl: dict[str, Any] = {}
        template = (CONFIG_DIR / JUDGE).read_text(encoding="utf-8")
        words = [*template.split(), "A", "B", "user:", "assistant:"]
        tokenizer = word_tokenizer(options.vocab, words, (CONFIG_DIR / CHAT).read_text(encoding="utf-8").rstrip("\n"))
        (model or random_llama(Shape.of(options), options.seed)).save_pretrained(self.model)
        tokenizer.save_pretrained(self.model)
        self.data.mkdir()
        first = len({*SPECIALS, *words})
        for name, count, seed in (("train", options.pairs, options.seed), ("test", 2, options.seed + 1)):
            lengths = typical_lengths(count, options.micro, seed, scale=options.scale, limit=LIMIT)
            pairs = make_pairs(lengths, options.vocab, seed, first=first)
            rows = [row(*(" ".join(f"t{i}" for i in ids if i >= first) for ids in pair)) for pair in pairs]
            lines = "".join(json.dumps(one) + "\n" for one in rows)
            (self.data / f"{name}.jsonl").write_text(lines, encoding="utf-8")

    def tokens(self) -> list[int]:
        """Counts the tokens of all prompts, chosen and rejected responses as our training makes them."""
        chat = ChatFormat(load_tokenizer(self.model))
        sums = [0, 0, 0]
        for line in (self.data / "train.jsonl").read_text(encoding="utf-8").splitlines():
            pair = json.loads(line)
            sides = [chat.encode(pair[side][:-1], pair[side][-1]["content"]) for side in ("chosen", "rejected")]
            counts = [len(sides[0].prompt_ids), *(len(side.response_ids) for side in sides)]
            sums = [total + count for total, count in zip(sums, counts, strict=True)]
        return sums

    def ours(self, what: str, store: Path, beta: float) -> float:
        """Times our run and returns its seconds."""
        command = self.command(store, beta)
        filled = store.is_dir()
        seconds = timed(lambda: process(command))
        result = self.result()
        self.inner.setdefault(what, []).append(result["seconds"]["all"])
        self.steps[what] = result["steps"]
        weights = result["inputs"]["weights"]
        require_store(what, found=weights["from_store"], computed=weights["computed"], empty=not filled)
        return seconds

    def command(self, store: Path, beta: float) -> list[str]:
        """Returns the command of the next run."""
        self.runs += 1
        name, options = f"run{self.runs}", self.options
        command = [sys.executable, "-m", "attnpo.fit", "setting=real_smoke", "judge=pairwise", "callbacks=none"]
        command += [f"model.path={self.model}", f"data.path={self.data}", f"store={store}"]
        command += [f"output={self.folder / 'runs'}", f"name={name}", "reference=cached", f"default_beta={beta}"]
        command += ["lengths.max_length=2048", "lengths.max_prompt_length=1800", "lengths.overlong=cut"]
        command += [f"batch.pairs={options.step}", f"batch.micro={options.micro}", "trainer.max_epochs=1"]
        command += ["trainer.accelerator=cpu", "trainer.progress=false", "trainer.validate_every=epoch"]
        command += [f"optimizer.lr={LR}", f"optimizer.warmup={WARMUP}", f"seed={options.seed}"]
        return [*command, f"trainer.threads={torch.get_num_threads()}", *options.override]

    def result(self) -> dict[str, Any]:
        """Reads the result of the last run."""
        file = self.folder / "runs" / f"run{self.runs}" / "result.json"
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found

    def theirs(self, python: Path) -> float:
        """Times TRL's run, keeps its report, and returns its seconds."""
        options = self.options
        details = {
            "model": str(self.model),
            "data": str(self.data / "train.jsonl"),
            "beta": BETA,
            "lr": LR,
            "warmup": WARMUP,
            "micro": options.micro,
            "accumulation": options.step // options.micro,
            "seed": options.seed,
            "threads": torch.get_num_threads(),
        }
        told: list[str] = []
        command = [str(python), "-m", "experiments.benchmarks.trl_worker", "train", json.dumps(details)]
        seconds = timed(lambda: told.append(process(command)))
        self.trl = json.loads(told[0].splitlines()[-1])
        self.inner.setdefault(TRL, []).append(self.trl["seconds"])
        self.steps[TRL] = self.trl["steps"]
        return seconds

    def require_same_work(self) -> None:
        """Raises ``SystemExit`` if TRL trained on other tokens or took another number of steps."""
        ours, theirs = (self.tokens(), self.steps[WARM]), (self.trl["tokens"], self.steps[TRL])
        if ours != theirs:
            raise SystemExit(
                f"expected the same work on both sides, got ours {ours} and TRL's {theirs} (tokens of prompts, chosen "
                "and rejected responses; optimizer steps); nothing was timed"
            )


def require_store(what: str, *, found: int, computed: int, empty: bool) -> None:
    """Raises ``SystemExit`` if a run found weights in an empty store, or computed weights that the store had."""
    if found if empty else computed:
        state = "an empty" if empty else "a filled"
        raise SystemExit(
            f"{what}: the weights of {found} pairs came from {state} store, and those of {computed} were computed"
        )


def row(prompt: str, chosen: str, rejected: str) -> dict[str, list[Message]]:
    """Returns a data row: two conversations with the same beginning."""
    asked = Message(role="user", content=prompt)
    return {
        name: [asked, Message(role="assistant", content=answer)]
        for name, answer in (("chosen", chosen), ("rejected", rejected))
    }


def process(command: Sequence[str]) -> str:
    """Runs a process and returns its output. Raises ``SystemExit`` with the end of its errors if it fails."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with status {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables; returns 0."""
    parser = new_parser(__doc__, rounds=3)
    add_shape(parser, layers=4)
    add_trl(parser)
    parser.add_argument("--pairs", type=int, default=64, help="pairs of the epoch")
    parser.add_argument("--step", type=int, default=16, help="pairs per optimizer step")
    parser.add_argument("--micro", type=int, default=4, help="pairs per forward, on both sides")
    parser.add_argument("--scale", type=float, default=1.0, help="lengths relative to the paper's data")
    parser.add_argument("--override", nargs="+", default=[], metavar="KEY=VALUE", help="more settings for attnpo.fit")
    options = parsed(parser, arguments)
    if options.short:
        options.rounds, options.pairs = min(options.rounds, 1), min(options.pairs, 32)
    library.disable_progress_bar()
    python, missing = trl_python(options)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        world = World(options, folder)
        print(f"{Shape.of(options)}, {torch.get_num_threads()} threads, float32")
        print(f"{options.pairs} pairs in steps of {options.step}, {options.micro} per forward; tokens {world.tokens()}")
        print(f"TRL: {missing or python}", flush=True)
        warm = folder / "warm"
        world.ours(WARM, warm, BETA)  # fills the store
        competitors: dict[str, Callable[[], float]] = {
            COLD: lambda: world.ours(COLD, folder / f"store{world.runs}", BETA),
            WARM: lambda: world.ours(WARM, warm, 2 * BETA),
        }
        if python is not None:
            world.theirs(python)
            world.require_same_work()
            competitors = {TRL: lambda: world.theirs(python), **competitors}
        world.inner.clear()
        times = interleaved(competitors, options.rounds)
    base = TRL if python is not None else COLD
    inner = {name: middle(seconds[1:]) for name, seconds in world.inner.items()}  # without the discarded round
    rows = [[*one, f"{inner[one[0]]:.1f}", f"{inner[one[0]] / inner[base]:.2f}"] for one in times_rows(times, base)]
    of = f"of {base}"
    print(f"\n{table(('whole run', 'seconds, median (range)', of, 'after the imports', of), rows)}", flush=True)
    if world.trl:
        print(f"TRL {world.trl['versions'].get('trl')}, DPOConfig: {world.trl['arguments']}")
    bars = [
        Bar("whole run: ours of TRL's, store empty", COLD_BAR, ratio(times, COLD, TRL), False, missing),
        Bar("whole run: ours of TRL's, store warm", WARM_BAR, ratio(times, WARM, TRL), False, missing),
    ]
    results = {"seconds": times, "seconds_after_imports": world.inner, "trl": world.trl}
    finish("pipeline", options, results, bars, {"trl": world.trl.get("versions")})
    return 0


if __name__ == "__main__":
    sys.exit(main())
