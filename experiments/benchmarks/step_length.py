"""Measures how time and memory of a training step grow with the length of its pairs.

    make lengths
    python -m experiments.benchmarks.step_length [--lengths 2048 4096 8192 16384] [--layers 2] [--width 128] [--heads 4]
        [--vocab 2048] [--rounds 3]

Each step has one pair whose branches have the given length, half prompt and half response. Runs forward and backward as
in training, with stored and live reference, with and without recomputed blocks. Prints a Markdown table: median seconds
per step and peak memory on top of the models at each length, and the slope of log cost over log length (1 is linear,
2 is attention only). Uses the CPU, one thread and float32. Seconds are CPU time, so that other load hardly matters.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from statistics import median
from time import process_time

import torch

from attnpo.models.scored import ScoredLM
from experiments.benchmarks.harness import MIB, interleaved, peak, say, slope, table
from experiments.benchmarks.shapes import Shape, make_pairs, random_llama
from experiments.benchmarks.step import SAME_AS_PLAIN, require_same
from experiments.benchmarks.systems import Ours, examples, with_reference

LAYOUT = "shared_prefix"
WAYS = ("stored reference", "stored reference, blocks recomputed", "live reference")


def steps(shape: Shape, length: int) -> dict[str, Ours]:
    """Returns the step on one pair with branches of ``length`` tokens, in every variant."""
    half = length // 2
    made = examples(make_pairs([(half, half, half)], shape.vocab, seed=0), weighted=1)
    stored = with_reference(made, ScoredLM(random_llama(shape, 1)))
    recomputed = random_llama(shape, 0)
    recomputed.train().activation_checkpointing_enable()  # in eval mode nothing is recomputed
    return {
        WAYS[0]: Ours(random_llama(shape, 0), None, LAYOUT, [stored]),
        WAYS[1]: Ours(recomputed, None, LAYOUT, [stored]),
        WAYS[2]: Ours(random_llama(shape, 0), random_llama(shape, 1), LAYOUT, [made]),
    }


def worked(step: Ours) -> float:
    """Returns the CPU seconds of a step; with one thread these belong to the step alone."""
    began = process_time()
    step.step()
    return process_time() - began


def measured(shape: Shape, lengths: Sequence[int], rounds: int) -> tuple[dict[str, list[float]], dict[str, list[int]]]:
    """Measures median CPU seconds and peak bytes of every variant at each length."""
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    bytes_: dict[str, list[int]] = {way: [] for way in WAYS}
    for length in lengths:
        say(f"{length} tokens")
        ways = steps(shape, length)
        for way in WAYS[1:]:  # nothing is timed before it is shown to compute the same
            require_same(way, ways[way].losses(), ways[WAYS[0]].losses(), SAME_AS_PLAIN)
        times = interleaved({way: partial(worked, step) for way, step in ways.items()}, rounds)
        for way, step in ways.items():
            seconds[way].append(median(times[way]))
            bytes_[way].append(peak(step.step))
    return seconds, bytes_


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    heads, width = options.heads, options.width
    keys = max(1, heads // 4)
    shape = Shape(width, options.layers, heads, keys, width * 7 // 2, options.vocab, positions=max(options.lengths))
    seconds, sizes = measured(shape, options.lengths, options.rounds)
    print(f"{options.layers} layers x {width}, {heads} heads, vocabulary {options.vocab}, float32, {LAYOUT}\n")
    rows = []
    for way in WAYS:
        rows.append([f"{way}: s", *(f"{at:.2f}" for at in seconds[way]), f"{slope(options.lengths, seconds[way]):.2f}"])
        rows.append(
            [f"{way}: MiB", *(f"{at / MIB:.1f}" for at in sizes[way]), f"{slope(options.lengths, sizes[way]):.2f}"]
        )
    print(table(("step", *(f"T={length}" for length in options.lengths), "slope"), rows))


if __name__ == "__main__":
    main()
