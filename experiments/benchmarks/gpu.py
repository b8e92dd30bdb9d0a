"""Benchmarks this project on one GPU at the size of Llama-3-8B: `make gpu`, at most 8 minutes.

    make gpu                                                       all parts, each in its own process
    python -m experiments.benchmarks.gpu [--seconds 480] [--json FILE]                       the same
    python -m experiments.benchmarks.gpu --steps step judge        some parts; a single one runs in this process
    python -m experiments.benchmarks.gpu --steps step --settings full:shared_prefix:16384:checkpoint:compile
    python -m experiments.benchmarks.gpu --tiny                    a toy size on any machine, to check that it runs

Parts: ``tests`` (those marked gpu), ``step`` (an optimizer step: layouts, micro-batches, recomputation, compiled
blocks, full and LoRA), ``judge`` (a judge pass compared with the authors' way), ``trl`` (TRL at its best settings, if
its environment exists), ``run`` (start and end of a run by command). Every part prints and saves its table row by row.
A failed measurement is a row with its reason. FLOPs are counted from shapes. The floor is the minimum for any exact
step (``shapes.floor_flops``), and rates are relative to the measured rate of the model's own matrix products.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers.utils import logging as library

from attnpo.judge.causal_judge import CausalJudge
from experiments.benchmarks.extraction import ALL, AUTHORS, FIRST, LAST, authors, judge_prompts, reads
from experiments.benchmarks.gpu_step import (
    BETA,
    DEFAULT,
    FULL,
    LORA,
    Bench,
    Refused,
    Setting,
    make_model,
)
from experiments.benchmarks.harness import ROOT, Bar, Sheet, Worker, new_parser, parsed, saved_parts, say, timed
from experiments.benchmarks.pipeline import World
from experiments.benchmarks.shapes import (
    LLAMA3_8B,
    Pair,
    Shape,
    floor_flops,
    make_pairs,
    matmul_rate,
    settle,
    step_flops,
    text_of,
    typical_lengths,
    word_tokenizer,
)
from experiments.benchmarks.step import add_trl, trl_python

GIB = 1 << 30
NO_CUDA, NO_TIME, NO_DEV = "not run: needs CUDA", "not run: no time left", "not run: needs the extra dev (pytest)"
TINY = Shape(width=32, layers=2, heads=4, kv_heads=1, mlp=112, vocab=512)
RUN = {"tiny": TINY, "1b": Shape(width=2048, layers=16, heads=32, kv_heads=8, mlp=8192, vocab=128256), "8b": LLAMA3_8B}
SMALLER = 40  # budgets of tokens at toy size
SECONDS = {"tests": 80, "step": 215, "judge": 30, "trl": 75, "run": 80}
"""Seconds that the parts take at most; what one leaves the next may have."""
FULL_SHARE = 0.7  # of the time of ``step``, after which adapters have their turn
OVER = 15  # seconds from the end of a part's time, after which it starts nothing, to the end of its process
BARS = {FULL: 13.0, LORA: 16.0}
JUDGE_BARS = {LAST: 18.0, ALL: 17.0}
OF_TRL, OF_ESTIMATE = 3.0, 0.05
TRL_SETTINGS = ((2, False), (4, True), (4, False), (8, True), (1, False), (16, True), (2, True))
"""Pairs of a micro-batch and whether activations are recomputed."""


def device_of(options: Namespace) -> torch.device:
    """Returns the requested device."""
    return torch.device(options.device)


def shape_of(options: Namespace) -> Shape:
    """Returns the model's shape."""
    return TINY if options.tiny else LLAMA3_8B


def pairs_of(options: Namespace) -> list[Pair]:
    """Makes the pairs of a step."""
    scale = 0.1 if options.tiny else 1.0
    lengths = typical_lengths(options.pairs, 4, options.seed, scale=scale, limit=options.max_length)
    return make_pairs(lengths, shape_of(options).vocab, options.seed)


def attempt(sheet: Sheet, name: str, options: Namespace, work: Callable[[], None], until: float | None = None) -> None:
    """Measures a row; a failure or a lack of time is recorded as a row as well."""
    if time.monotonic() > (options.deadline if until is None else until):
        sheet.add(name, [], NO_TIME)
        return
    try:
        work()
    except torch.OutOfMemoryError:
        sheet.add(name, [], "out of memory", failed=True)
    except Refused as reason:
        sheet.add(name, [], f"refused: {first_line(reason)}", failed=True)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # a row, and the next one is tried
        sheet.add(name, [], f"{type(error).__name__}: {first_line(error)}", failed=True)


def first_line(error: BaseException) -> str:
    """Shortens an error to one line."""
    return " ".join(str(error).split())[:200]


def in_gib(size: int | None) -> str:
    """Formats bytes in GiB for a table cell."""
    return "needs CUDA" if size is None else f"{size / GIB:.3g}"


# ------------------------------------------------------------------------------------------------ tests


OUTCOME = re.compile(r"^(tests/\S+\.py)::(.+?) (PASSED|FAILED|ERROR|SKIPPED)\b")


def run_tests(options: Namespace) -> int:
    """Runs the tests marked gpu; returns 1 if any failed."""
    sheet = Sheet("tests", options, ("tests marked gpu", "passed", "failed", "skipped", "seconds"))
    marked = [file for file in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in file.read_text("utf-8")]
    marked.sort(key=lambda file: file.stem == "test_compiled")  # last: a compiler without a cache takes a minute
    files = [file.relative_to(ROOT).as_posix() for file in marked]
    missing = any(find_spec(name) is None for name in ("pytest", "pytest_timeout", "hypothesis", "beartype"))
    if missing or device_of(options).type != "cuda":
        for file in files:
            sheet.add(file, [], NO_DEV if missing else NO_CUDA)
        sheet.finish()
        return 0
    # Without the checks of shapes at each call, which compilers cannot read everywhere: CI runs them, on a CPU.
    plain = ["-o", "addopts=--import-mode=importlib"]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "-p", "no:cacheprovider", *plain, *files]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        add_outcomes(sheet, process.stdout)
    sheet.finish()
    return int(process.returncode != 0)


def add_outcomes(sheet: Sheet, lines: Iterable[str]) -> None:
    """Adds a row per test file from pytest's output, which is also written to stderr."""
    file, began, found = "", time.monotonic(), dict[str, str]()

    def close() -> None:
        counts = Counter(found.values())
        bad = [test for test, outcome in found.items() if outcome in ("FAILED", "ERROR")]
        passed, skipped, seconds = counts["PASSED"], counts["SKIPPED"], time.monotonic() - began
        cells = [str(passed), str(len(bad)), str(skipped), f"{seconds:.1f}"]
        note = f"failed: {', '.join(bad)}" if bad else ""
        sheet.add(file, cells, note, passed=passed, failures=len(bad), skipped=skipped, seconds=seconds)

    for line in lines:
        say(line.rstrip())
        if (outcome := OUTCOME.match(line)) is None:
            continue
        if file and outcome[1] != file:
            close()
            began, found = time.monotonic(), {}
        file, found[outcome[2]] = outcome[1], outcome[3]
    if file:
        close()


# ------------------------------------------------------------------------------------------------ step


def run_step(options: Namespace) -> int:
    """Times an optimizer step in every setting."""
    shape, device, pairs = shape_of(options), device_of(options), pairs_of(options)
    floors = {method: floor_flops(shape, pairs, trained=method == FULL) for method in (FULL, LORA)}
    tokens = sum(pair.tokens for pair in pairs)
    rate = matmul_rate(shape, min(tokens, 8192), getattr(torch, options.dtype), device)
    print(f"\n{shape}, {options.dtype} on {torch.cuda.get_device_name() if device.type == 'cuda' else 'the CPU'}")
    print(f"steps of {len(pairs)} pairs, {tokens:,} tokens with each prompt once")
    print(f"floor {floors[FULL] / 1e12:.4g} TFLOP, {floors[LORA] / 1e12:.4g} with adapters")
    print(f"matrix products of these shapes: {rate / 1e12:.4g} TFLOP/s")
    head = ("step", "seconds", "pairs/s", "tokens", "micro-batches", "TFLOP/s as run", "of the matmul rate")
    head += ("floor of the matmul rate", "peak GiB", "estimate GiB")
    sheet = Sheet("step", options, head, {"floor_flops": floors, "matmul_flops_per_s": rate})
    bench = Bench(options, shape, device, pairs)
    for method in (FULL, LORA):
        recipe = bench.recipe(method)
        said = "no optimizer step" if recipe is None else f"AdamW, moments {recipe.moments}"
        lacking = recipe is None and options.optimizer != "none"
        say(f"{method}: {said}{'; torchao is not installed' if lacking else ''}")
    settings = [Setting.parse(text) for text in options.settings]
    methods, now = {setting.method for setting in settings}, time.monotonic()
    half = now + FULL_SHARE * (options.deadline - now) if len(methods) > 1 else options.deadline
    for setting in sorted(settings, key=lambda each: each.method != FULL):  # adapters stay once they are there
        made = replace(setting, tokens=setting.tokens // SMALLER) if options.tiny else setting
        until = half if setting.method == FULL else options.deadline
        work = partial(time_step, sheet, bench, made, floors[setting.method], rate)
        attempt(sheet, str(made), options, work, until)
        bench.release()
    sheet.finish([] if options.tiny or device.type != "cuda" else step_bars(sheet.results["rows"]))
    return 0


def time_step(sheet: Sheet, bench: Bench, setting: Setting, floor: float, rate: float) -> None:
    """Adds the row of one setting."""
    found = bench.measure(setting)
    seconds = median(found.seconds)
    speed, run, share = len(bench.pairs) / seconds, found.flops / seconds, floor / seconds / rate
    cells = [f"{seconds:.3f}", f"{speed:.2f}", f"{sum(found.sizes):,}", str(len(found.sizes)), f"{run / 1e12:.4g}"]
    cells += [f"{100 * run / rate:.1f} %", f"{100 * share:.1f} %", in_gib(found.peak), in_gib(found.estimate)]
    note = f"log-probabilities {found.gap:.1g} from padded rows"
    note += "" if bench.recipe(setting.method) else ", no optimizer step"
    facts = {**asdict(found), "pairs_per_s": speed, "method": setting.method, "floor_share": share}
    sheet.add(str(setting), cells, note, **facts)


def step_bars(rows: Sequence[dict[str, Any]]) -> list[Bar]:
    """Returns the bars for one H100."""
    bars = []
    for method, least in BARS.items():
        speeds = [row["pairs_per_s"] for row in rows if row.get("method") == method]
        best = max(speeds, default=None)
        bars.append(Bar(f"step, {method}: the best setting", least, best, True, "no setting ran", " pairs/s"))
    apart = [abs(row["peak"] / row["estimate"] - 1) for row in rows if row.get("peak")]
    bars.append(Bar("step: peak from its estimate", OF_ESTIMATE, max(apart, default=None), False, "none", " of it"))
    return bars


# ------------------------------------------------------------------------------------------------ judge


def run_judge(options: Namespace) -> int:
    """Times our judge pass and the authors' way on the same prompts."""
    shape, device = shape_of(options), device_of(options)
    size = 0.1 if options.tiny else 1.0
    asked = Namespace(seed=options.seed, vocab=shape.vocab, pairs=2 if options.tiny else 24)
    asked.instruction, asked.prompt, asked.closing = (max(1, int(size * count)) for count in (150, 171, 60))
    asked.answers = [int(size * 272), int(size * 238)]
    prompts = judge_prompts(asked)
    print(f"\n{len(prompts)} judge prompts of {sum(map(len, prompts)) // len(prompts)} tokens, two for each pair")
    head = (
        "judge",
        "seconds",
        "pairs/s",
        "tokens/s",
        "TFLOP/s at full depth",
        "of the authors' way",
        "GiB over weights",
    )
    sheet = Sheet("judge", options, head, {"tokens": [len(prompt) for prompt in prompts]})
    model = make_model(options, shape, device)
    judge = CausalJudge(model)
    few = prompts[: min(16, len(prompts))]
    speeds: dict[str, float] = {}
    expected: list[torch.Tensor] = []

    def work(name: str, read: Callable[[Any], Any], asked: list[list[int]]) -> None:
        found = read(asked[:2])
        settle(device)
        base = reset_peak(device)
        seconds = min(timed(lambda: (read(asked), settle(device))) for _ in range(2))
        peak = None if base is None else torch.cuda.max_memory_allocated(device) - base
        speeds[name], tokens = len(asked) / 2 / seconds, sum(map(len, asked))
        flops = step_flops(shape, tokens, len(asked), 0, trained=False) / 2  # forward alone
        of = f"{speeds[name] / speeds[AUTHORS]:.2f}x" if AUTHORS in speeds else "-"
        rate = "-" if name == FIRST else f"{flops / seconds / 1e12:.4g}"
        cells = [f"{seconds:.3f}", f"{speeds[name]:.2f}", f"{tokens / seconds:,.0f}", rate, of, in_gib(peak)]
        note = f"{len(asked)} prompts"
        if name == AUTHORS:
            expected.extend(found)
        elif name == ALL and expected:
            gap = max(
                float((one.rows - other).abs().sum(-1).max() / 2) for one, other in zip(found, expected, strict=True)
            )
            note += f", rows {gap:.1g} from the authors' (total variation)"
        sheet.add(name, cells, note, seconds=seconds, pairs_per_s=speeds[name], peak=peak)

    model.set_attn_implementation("eager")
    attempt(sheet, AUTHORS, options, lambda: work(AUTHORS, lambda part: authors(model, part), few))
    model.set_attn_implementation("sdpa")
    for name, read in reads(judge).items():
        attempt(sheet, name, options, partial(work, name, read, prompts))
    bars = [
        Bar(f"judge: {name}", least, speeds.get(name), True, "did not run", " pairs/s")
        for name, least in JUDGE_BARS.items()
    ]
    sheet.finish([] if options.tiny or device.type != "cuda" else bars)
    return 0


def reset_peak(device: torch.device) -> int | None:
    """Resets the GPU's peak memory and returns the bytes allocated; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


# ------------------------------------------------------------------------------------------------ TRL


def run_trl(options: Namespace) -> int:
    """Times TRL's optimizer steps on the same pairs, sorted by length, in several settings."""
    head = ("TRL, full", "seconds", "pairs/s", "peak GiB", "ours is faster by")
    sheet = Sheet("trl", options, head)
    names = {each: f"{each[0]} pairs, {'checkpointing' if each[1] else 'no checkpointing'}" for each in TRL_SETTINGS}
    python, missing = trl_python(options)
    if python is None:
        for name in names.values():
            sheet.add(name, [], f"not run: {missing}")
        sheet.finish()
        return 0
    shape, pairs = shape_of(options), sorted(pairs_of(options), key=lambda pair: -pair.tokens)
    rows = saved_parts(options.json).get("step", {}).get("results", {}).get("rows", [])
    ours = max((row["pairs_per_s"] for row in rows if row.get("method") == FULL), default=None)
    best, too_large = 0.0, {True: sys.maxsize, False: sys.maxsize}
    texts = [[text_of(pair.prompt), *(f" {text_of(row)}" for row in pair.rows)] for pair in pairs]
    command = [str(python), "-m", "experiments.benchmarks.trl_worker", "fits"]
    visible = {} if device_of(options).type == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as folder, Worker(command, visible) as worker:
        word_tokenizer(shape.vocab).save_pretrained(folder)
        shape.config().save_pretrained(folder)
        loaded = worker.ask("load", folder=folder, dtype=options.dtype, seed=options.seed, threads=options.threads)
        sheet.results["versions"] = loaded["versions"]

        def work(micro: int, checkpointing: bool, name: str) -> None:
            nonlocal best
            if micro >= too_large[checkpointing] or len(pairs) % micro:
                sheet.add(name, [], "not run: a smaller micro-batch ran out of memory, or it does not divide the step")
                return
            found = worker.ask("fit", texts=texts, micro=micro, checkpointing=checkpointing, beta=BETA, steps=2)
            if "error" in found:
                too_large[checkpointing] = micro
                raise torch.OutOfMemoryError
            if found["tokens"] != [sum(column) for column in zip(*(pair.lengths for pair in pairs), strict=True)]:
                raise Refused(f"TRL tokenised the texts differently: {found['tokens']}")
            seconds = found["seconds"][-1]
            speed = len(pairs) / seconds
            best = max(best, speed)
            cells = [f"{seconds:.3f}", f"{speed:.2f}", in_gib(found["peak"]), f"{ours / speed:.2f}x" if ours else "-"]
            sheet.add(name, cells, **found, pairs_per_s=speed)

        for (micro, checkpointing), name in names.items():
            attempt(sheet, name, options, partial(work, micro, checkpointing, name))
    ratio = ours / best if ours and best else None
    bar = Bar("step: ours against TRL at its best settings", OF_TRL, ratio, True, "one of them did not run")
    sheet.finish([] if options.tiny or device_of(options).type != "cuda" else [bar])
    return 0


# ------------------------------------------------------------------------------------------------ start and end


def run_run(options: Namespace) -> int:
    """Times start and end of a run by its command, on an empty store and again on the filled store."""
    shape, device = RUN["tiny" if options.tiny else options.run_shape], device_of(options)
    scale = 0.1 if options.tiny else 1.0
    asked = Namespace(seed=options.seed, vocab=shape.vocab, pairs=8 if options.tiny else 64, scale=scale)
    asked.step, asked.micro, asked.override = asked.pairs // 2, 2 if options.tiny else 4, []
    if device.type == "cuda":
        asked.override = ["hardware=1x80gb", "batch.micro=null", "trainer.accelerator=gpu", "model.compile=null"]
    print(f"\nattnpo.fit: {asked.pairs} pairs, two optimizer steps, {shape}")
    head = ("run", "to the first step, s", "training, s", "from there to the end, s", "whole, s")
    sheet = Sheet("run", options, head)
    library.disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        made = Namespace(**{**vars(options), "dtype": "float32" if device.type == "cpu" else "bfloat16"})
        model = make_model(made, shape, device)
        world = World(asked, folder, model)
        del model
        reset_peak(device)
        for number, name in enumerate(("store empty", "store warm"), 1):

            def work(name: str = name, beta: float = number * BETA) -> None:
                start, training, end, lines = follow(world.command(folder / "store", beta), world, options)
                cells = [f"{seconds:.1f}" for seconds in (start, training, end, start + training + end)]
                loads = sum(" model: " in line for line in lines)
                sheet.add(name, cells, f"{loads} load of the model said", start=start, training=training, end=end)

            attempt(sheet, name, options, work)
    sheet.finish()
    return 0


def follow(command: Sequence[str], world: World, options: Namespace) -> tuple[float, float, float, list[str]]:
    """Follows a run; returns its seconds until the first step, in training and after it, and the lines it wrote.

    Raises ``RuntimeError`` with the last line if the run fails or does not begin to train.
    """
    began, first, lines = time.monotonic(), None, []
    device = {} if device_of(options).type == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **device}
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            say(lines[-1])
            if first is None and " training " in line and " optimiser step" in line:
                first = time.monotonic()
    whole = time.monotonic() - began
    if process.returncode or first is None:
        raise RuntimeError(f"attnpo.fit ended with status {process.returncode}: {lines[-1] if lines else ''}")
    training = float(world.result()["seconds"]["train"])
    return first - began, training, whole - (first - began) - training, lines


# ------------------------------------------------------------------------------------------------ all of it

STEPS: dict[str, Callable[[Namespace], int]] = {
    "tests": run_tests,
    "step": run_step,
    "judge": run_judge,
    "trl": run_trl,
    "run": run_run,
}


def run_all(options: Namespace, arguments: Sequence[str]) -> int:
    """Runs every requested part in its own process and stops parts that take too long; returns 1 if any failed."""
    began, failed, given = time.monotonic(), 0, 0.0
    options.json.unlink(missing_ok=True)
    for name in options.steps:
        given += options.seconds * SECONDS[name] / sum(SECONDS.values())
        left = max(0.0, given - (time.monotonic() - began) - OVER)
        say(f"{name}: at most {left:.0f} s, at {datetime.now():%H:%M:%S}")
        if device_of(options).type == "cpu" and name in ("tests", "trl"):  # they start what they run themselves
            STEPS[name](Namespace(**{**vars(options), "deadline": time.monotonic() + left}))
            continue
        command = [sys.executable, "-m", "experiments.benchmarks.gpu", *arguments, "--steps", name]
        command += ["--seconds", f"{left:.0f}", "--json", str(options.json)]
        failed += not is_finished(command, left + OVER)
        if not saved_parts(options.json).get(name, {}).get("results", {}).get("done"):
            print(f"{name}: stopped or failed; its rows so far are in {options.json}", flush=True)
    parts = saved_parts(options.json)
    bars = [
        Bar(**{key: value for key, value in bar.items() if key != "met"}) for p in parts.values() for bar in p["bars"]
    ]
    met = sum(bar.met is True for bar in bars)
    print(f"\n{len(parts)} of {len(options.steps)} parts, {met} of {len(bars)} bars met: {options.json}")
    return int(failed > 0)


def is_finished(command: Sequence[str], limit: float) -> bool:
    """Returns whether a process ended successfully in time; otherwise stops it and its children."""
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True) as process:
        try:
            return process.wait(timeout=limit) == 0
        except BaseException as error:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
    return False


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the parts and prints the tables; returns 0, or 1 if a test or a whole part failed."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = new_parser(__doc__, rounds=2)
    add_trl(parser)
    parser.set_defaults(json=ROOT / "outputs" / "bench" / "gpu.json")
    parser.add_argument("--tiny", action="store_true", help="a toy model and short pairs, in float32 on a CPU")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS), help="parts to run")
    parser.add_argument(
        "--seconds", type=float, help="time limit of all parts together (default: 480) or of a single one (none)"
    )
    parser.add_argument("--settings", nargs="+", default=DEFAULT, help="METHOD:LAYOUT:TOKENS[:checkpoint][:compile]")
    parser.add_argument("--optimizer", choices=("auto", "none"), default="auto", help="auto: as in hardware=1x80gb")
    parser.add_argument("--backend", help="backend of torch.compile; default: inductor, or eager at toy size")
    parser.add_argument(
        "--run-shape", choices=("1b", "8b"), default="1b", help="size of the run's model; 8b takes minutes"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"))
    parser.add_argument("--pairs", type=int, default=32, help="pairs per optimizer step")
    parser.add_argument("--max-length", type=int, default=2048, help="tokens of prompt and response")
    parser.add_argument("--chunk", type=int, default=1024, help="tokens through the vocabulary head at once")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parsed(parser, arguments)
    if options.tiny:
        options.pairs, options.rounds = 4, 1
    options.dtype = options.dtype or ("float32" if options.tiny else "bfloat16")
    options.backend = options.backend or ("eager" if options.tiny else "inductor")
    if not options.tiny and device_of(options).type != "cuda":
        raise SystemExit(
            "a model of 8 billion parameters needs a GPU; --tiny runs all of it at toy size on any machine"
        )
    if len(options.steps) > 1:
        options.seconds = options.seconds or 480.0
        return run_all(options, arguments)
    options.deadline = time.monotonic() + (options.seconds or float("inf"))
    return STEPS[options.steps[0]](options)


if __name__ == "__main__":
    sys.exit(main())
