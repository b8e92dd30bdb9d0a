"""Benchmarks reading a judge's attention rows: our way against the authors' way.

    python -m experiments.benchmarks.extraction [--short] [--pairs 4] [--json FILE]

Judge prompts have a realistic shape: a fixed instruction, the pair's prompt, both answers, and closing words; each pair
is shown in both orders. The authors' way is reimplemented here: eager attention with ``output_attentions``, one prompt
at a time, every layer's T x T map, its mean over the heads, the last row. Our way is ``CausalJudge.read``, as called in
the judge pass. Timing starts only after both give the same rows in every layer. Peak memory is that of one pair in both
orders; the growth of rollout's memory is measured as in ``rollout_memory.py``.
"""

import random
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attnpo.judge.base import JudgeReading
from attnpo.judge.causal_judge import CausalJudge
from experiments.benchmarks.harness import (
    MIB,
    Bar,
    Times,
    finish,
    interleaved,
    new_parser,
    parsed,
    peak,
    profiled,
    ratio,
    slope,
    table,
    timed,
    times_rows,
)
from experiments.benchmarks.rollout_memory import made, peaks, readings
from experiments.benchmarks.shapes import Shape, add_shape, random_llama

SAME_ROWS = 1e-5
AUTHORS = "authors' way"
LAST, ALL, FIRST = "last layer", "all layers", "layer 1, no verdict"
BARS = ((LAST, 1.9), (ALL, 1.6), (FIRST, 40.0))
MEMORY_BAR, SLOPE_BAR = 0.2, 1.1
LABELS = (4, 5)  # ids whose logits are the verdict
SPREAD = 0.06  # of the weights: with the usual 0.02 attention is flat, and wrong rows would pass for right ones
MARK = 12  # tokens before each part that name it

Prompts = Sequence[Sequence[int]]


def judge_prompts(options: Namespace) -> list[list[int]]:
    """Returns the judge prompts of all pairs, two per pair; the lengths of a pair's texts vary by up to a tenth."""
    rng = random.Random(options.seed)

    def ids(count: int) -> list[int]:
        return [rng.randrange(4, options.vocab) for _ in range(count)]

    def about(count: int) -> list[int]:
        return ids(max(1, round(count * rng.uniform(0.9, 1.1))))

    instruction, closing, marks = ids(options.instruction), ids(options.closing), [ids(MARK) for _ in range(3)]
    prompts = []
    for _ in range(options.pairs):
        question, one, other = (about(count) for count in (options.prompt, *options.answers))
        for first, second in ((one, other), (other, one)):
            parts = (instruction, marks[0], question, marks[1], first, marks[2], second, closing)
            prompts.append([number for part in parts for number in part])
    return prompts


def authors(model: PreTrainedModel, prompts: Prompts) -> list[Tensor]:
    """Returns the last row of every layer's head mean [layers T] for every prompt, from full attention maps."""
    rows = []
    with torch.no_grad():
        for prompt in prompts:
            output = model(
                input_ids=torch.tensor([prompt], device=model.device), output_attentions=True, use_cache=False
            )
            output.logits[0, -1].argmax()  # the verdict
            rows.append(torch.stack([maps[0].mean(0)[-1] for maps in output.attentions]).float().cpu())
    return rows


def reads(judge: CausalJudge) -> dict[str, Callable[[Prompts], list[JudgeReading]]]:
    """Returns the readings requested from our judge, by their name in the table."""
    every = range(1, judge.num_layers + 1)
    return {
        LAST: lambda prompts: judge.read(prompts, layers=(judge.num_layers,), label_ids=LABELS),
        ALL: lambda prompts: judge.read(prompts, layers=every, label_ids=LABELS),
        FIRST: lambda prompts: judge.read(prompts, layers=(1,), verdict=False),
    }


def require_same_rows(found: Sequence[JudgeReading], expected: Sequence[Tensor], layers: Sequence[int]) -> float:
    """Returns the largest difference between rows of the 1-based ``layers``. Raises ``SystemExit`` above the bound."""
    picked = [layer - 1 for layer in layers]
    gaps = [float((one.rows - other[picked]).abs().max()) for one, other in zip(found, expected, strict=True)]
    if not max(gaps) <= SAME_ROWS:
        raise SystemExit(
            f"layers {list(layers)}: rows differ from the authors' by {max(gaps):.3g} (prompt "
            f"{gaps.index(max(gaps))}), expected at most {SAME_ROWS:.0e}; nothing was timed"
        )
    return max(gaps)


def measure(options: Namespace) -> tuple[Times, dict[str, int], float]:
    """Measures times, peak memory of one pair, and the difference between the rows."""
    prompts, shape = judge_prompts(options), replace(Shape.of(options), spread=SPREAD)
    eager = random_llama(shape, options.seed, attn_implementation="eager")
    judge = CausalJudge(random_llama(shape, options.seed), token_budget=options.budget)
    ours = reads(judge)
    expected = authors(eager, prompts)
    layers = {LAST: (shape.layers,), ALL: range(1, shape.layers + 1), FIRST: (1,)}
    gap = max(require_same_rows(read(prompts), expected, layers[name]) for name, read in ours.items())
    competitors: dict[str, Callable[[], float]] = {AUTHORS: lambda: timed(lambda: authors(eager, prompts))}
    for name, read in ours.items():
        competitors[name] = lambda read=read: timed(lambda: read(prompts))  # type: ignore[misc]
    times = interleaved(competitors, options.rounds)
    pair = prompts[:2]
    held = {AUTHORS: peak(lambda: authors(eager, pair))}
    held |= {name: peak(lambda read=read: read(pair)) for name, read in ours.items()}  # type: ignore[misc]
    if options.profile:
        for name, read in ours.items():
            print(f"\n{name}\n\n{profiled(lambda read=read: read(prompts))}\n")  # type: ignore[misc]
    return times, held, gap


def rollout_growth(options: Namespace) -> tuple[list[int], float]:
    """Returns the peak bytes of a rollout at each length, and the exponent of their growth."""
    shape = Namespace(lengths=options.lengths, layers=4, width=options.rollout_width, heads=8)
    sizes = peaks(readings(made("causal", shape))["rollout"], options.lengths)
    return sizes, slope(options.lengths, sizes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables; returns 0."""
    parser = new_parser(__doc__, rounds=5)
    add_shape(parser, layers=8)
    parser.add_argument("--pairs", type=int, default=4, help="pairs per timing, two prompts each")
    parser.add_argument(
        "--instruction", type=int, default=150, help="tokens of the fixed text before the pair's prompt"
    )
    parser.add_argument("--prompt", type=int, default=171)
    parser.add_argument("--answers", type=int, nargs=2, default=[272, 238])
    parser.add_argument("--closing", type=int, default=60, help="tokens of the fixed text after the second answer")
    parser.add_argument(
        "--budget", type=int, default=16384, help="tokens per forward of our judge (judge.token_budget)"
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096], help="prompt lengths for rollout")
    parser.add_argument("--rollout-width", type=int, default=256, help="model width for rollout")
    options = parsed(parser, arguments)
    if options.short:
        options.pairs = min(options.pairs, 2)
    lengths = [len(prompt) for prompt in judge_prompts(options)]
    print(f"{Shape.of(options)}, {torch.get_num_threads()} threads, float32")
    print(f"{options.pairs} pairs in both orders, {min(lengths)} to {max(lengths)} tokens per prompt")
    times, held, gap = measure(options)
    rows = [[*row, f"{held[row[0]] / MIB:.0f}"] for row in times_rows(times, AUTHORS)]
    print(f"largest difference to the authors' rows: {gap:.1e}\n")
    print(table(("rows", "seconds, median (range)", "of the authors'", "peak MiB, one pair"), rows), flush=True)
    sizes, growth = rollout_growth(options)
    cells = [[str(length), f"{size / MIB:.1f}"] for length, size in zip(options.lengths, sizes, strict=True)]
    print(f"\n{table(('rollout, tokens', 'peak MiB'), cells)}")
    bars = [Bar(f"extraction: {name}", bound, ratio(times, AUTHORS, name), True) for name, bound in BARS]
    bars.append(
        Bar("extraction: peak memory, all layers of the authors'", MEMORY_BAR, held[ALL] / held[AUTHORS], False)
    )
    bars.append(Bar("extraction: slope of rollout's memory", SLOPE_BAR, growth, False, unit=""))
    results: dict[str, Any] = {"seconds": times, "peak_bytes": held, "rows_gap": gap, "tokens": lengths}
    finish("extraction", options, results | {"rollout_bytes": sizes}, bars)
    return 0


if __name__ == "__main__":
    sys.exit(main())
