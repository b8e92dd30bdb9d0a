"""Measures how the memory of reading a judge's attention grows with the prompt length.

    python -m experiments.benchmarks.rollout_memory [--lengths 1024 2048 4096] [--layers 4] [--width 256] [--heads 8]
        [--dense]

Prints a Markdown table for three kinds of models (causal, windowed, soft-capped scores): the reading of both orders of
a pair (rollout; rows of all layers as head means or single heads), the peak memory on top of the model at each length,
and the slope of log peak over log length. The bar is 1.1 at 1k, 2k and 4k tokens. Linear growth is 1; full attention
maps come near 2, shown by ``--dense`` (the model's own eager attention with ``output_attentions``, one prompt; it needs
3 GiB). Takes a minute on one CPU thread.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from attnpo.judge.causal_judge import CausalJudge
from experiments.benchmarks.harness import MIB, peak, slope

WINDOW = 512
KINDS: dict[str, Callable[..., PretrainedConfig]] = {
    "causal": lambda **shape: LlamaConfig(**shape),
    "windowed": lambda **shape: MistralConfig(**shape, sliding_window=WINDOW),
    "soft-capped": lambda **shape: Gemma2Config(**shape, sliding_window=WINDOW, attn_logit_softcapping=3.0),
}


def made(kind: str, options: argparse.Namespace, **more: Any) -> PreTrainedModel:
    """Makes a random model of one kind."""
    config = KINDS[kind](
        vocab_size=512,
        hidden_size=options.width,
        intermediate_size=options.width * 7 // 2,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=max(1, options.heads // 4),
        head_dim=options.width // options.heads,
        max_position_embeddings=max(options.lengths),
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, **more).eval()


def readings(model: PreTrainedModel) -> dict[str, Callable[[list[int]], object]]:
    """Returns the readings to measure, by their name in the table."""
    judge = CausalJudge(model)
    every = range(1, judge.num_layers + 1)
    return {
        "rollout": lambda ids: judge.read(orders(ids), layers=(), rollout=True, verdict=False),
        "rows of all layers": lambda ids: judge.read(orders(ids), layers=every, verdict=False),
        "rows of all heads": lambda ids: judge.read(orders(ids), layers=every, per_head=True, verdict=False),
    }


def orders(ids: list[int]) -> list[list[int]]:
    """Returns two prompts of one length, like both orders of a pair: equal for two fifths, then swapped answers."""
    start, middle = 2 * len(ids) // 5, 7 * len(ids) // 10
    return [ids, ids[:start] + ids[middle:] + ids[start:middle]]


def dense(model: PreTrainedModel) -> dict[str, Callable[[list[int]], object]]:
    """Returns the dense comparison: all attention maps of all layers, as the model returns them."""

    def maps(ids: list[int]) -> object:
        with torch.inference_mode():
            return model.get_decoder()(input_ids=torch.tensor([ids]), output_attentions=True).attentions

    return {"whole maps (eager)": maps}


def peaks(read: Callable[[list[int]], object], lengths: Sequence[int]) -> list[int]:
    """Returns the peak bytes of a reading at each length, on top of the model."""
    prompts = [[5 + place % 500 for place in range(length)] for length in lengths]
    read(prompts[0])  # what is made once does not count
    return [peak(lambda ids=ids: read(ids)) for ids in prompts]  # type: ignore[misc]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dense", action="store_true", help="also measure the model's own eager attention maps")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shape = f"{options.layers} layers x {options.width}, {options.heads} heads"
    print(f"{shape}, float32, both orders of a pair, peak in MiB\n")
    print(f"| model | read | {' | '.join(f'T={length}' for length in options.lengths)} | slope |")
    print(f"|---|---|{'---|' * len(options.lengths)}---|")
    for kind in KINDS:
        asked = readings(made(kind, options))
        if options.dense:
            asked |= dense(made(kind, options, attn_implementation="eager"))
        for what, read in asked.items():
            sizes = peaks(read, options.lengths)
            cells = " | ".join(f"{size / MIB:.1f}" for size in sizes)
            print(f"| {kind} | {what} | {cells} | {slope(options.lengths, sizes):.2f} |", flush=True)


if __name__ == "__main__":
    main()
