"""Estimates the memory of training on pairs of 8k and 16k tokens on each GPU; nothing is run or loaded.

    python -m experiments.benchmarks.long_memory

Prints a Markdown table for the shape of Llama-3-8B with a long context. For every recipe (lengths, hardware, full
weights or adapters) it shows the estimated peak, that of the judge pass, the choices of ``auto`` (whether activations
are kept, and how many tokens go through the vocabulary head at once), and whether both fit with 5 % of the device left
free. If training all weights does not fit with float32 moments, a row with 8-bit moments follows.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from transformers import LlamaConfig

from attnpo.config.compose import compose, parse_subset
from attnpo.judge.settings import TOKEN_BUDGET, Judge
from attnpo.models.memory import GIB, MemoryEstimate, estimate_pass
from attnpo.models.spec import ModelSpec
from attnpo.run.memory import MemoryConfig, choose_fastest_fit, make_memory_plan
from experiments.benchmarks.harness import table

LENGTHS = ("8k", "16k")
CAPACITY = {"1x141gb": 139.8, "8x80gb": 79.2, "8x141gb": 139.8}  # GiB that the drivers of such GPUs report
WHOLE, EIGHT_BITS, ADAPTERS = "full", "full, 8-bit moments", "LoRA"
METHODS = {
    WHOLE: (),
    EIGHT_BITS: ("optimizer=adamw8bit",),
    ADAPTERS: ("model=lora", "model.dtype=bfloat16", "reference=adapter_off"),
}
SHAPE = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=131072,
)
HEAD = ("lengths, hardware, method", "GiB on each GPU", "GiB of the judge pass", "activations", "head", "fits")


@dataclass(frozen=True)
class Recipe(MemoryConfig):
    """Parts of a composed recipe that determine the memory of training and of the judge pass."""

    judge: Judge


def recipe(length: str, hardware: str, method: str) -> Recipe:
    """Composes a recipe as a user would."""
    words = ["setting=llama3_8b_base_sft", f"hardware={hardware}", f"lengths={length}", *METHODS[method]]
    return parse_subset(compose("fit", words), Recipe)


def decide(made: Recipe, capacity: int) -> tuple[ModelSpec, MemoryEstimate]:
    """Resolves a recipe's ``auto`` for devices of a given size; returns the choice and its memory estimate."""
    choices, plan = made.model.memory_choices(), make_memory_plan(made)
    estimates = [plan.estimate(SHAPE, choice, plan.smallest_batch) for choice in choices]
    place, _ = choose_fastest_fit(estimates, capacity)
    return choices[place], estimates[place]


def rows() -> Iterator[list[str]]:
    """Returns the table's rows."""
    for length in LENGTHS:
        for hardware, size in CAPACITY.items():
            capacity, whole_fits = int(size * GIB), True
            for method in METHODS:
                if method == EIGHT_BITS and whole_fits:
                    continue
                made = recipe(length, hardware, method)
                model, training = decide(made, capacity)
                tokens = max(TOKEN_BUDGET, made.judge.max_length)
                judged = estimate_pass(SHAPE, dtype=made.judge.dtype, tokens=tokens)
                fits = training.fits(capacity) and judged.fits(capacity)
                whole_fits = fits if method == WHOLE else whole_fits
                yield [
                    f"{length}, {hardware}, {method}",
                    f"{training.total / GIB:.1f}",
                    f"{judged.total / GIB:.1f}",
                    "computed again" if model.uses_checkpointing else "kept",
                    str(model.chunk),
                    "yes" if fits else f"does not fit {size} GiB",
                ]


def main() -> None:
    """Prints the table."""
    print(table(HEAD, list(rows())))


if __name__ == "__main__":
    main()
