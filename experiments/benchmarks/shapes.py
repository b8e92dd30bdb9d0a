"""Models and data of the benchmarks: random Llamas of a chosen shape, pairs with the paper's lengths, and FLOP counts.

Imports only torch and transformers. Token i of the synthetic vocabulary is written ``t<i>``, so that ids and texts are
equivalent for every system.
"""

import math
import random
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

SPECIALS = ("<pad>", "<s>", "</s>", "<unk>")
PAD, BOS, EOS, UNK = range(4)
MEANS = (171, 272, 238)  # tokens of prompt, chosen and rejected response in the paper's data
SPREAD = (0.9, 0.7, 0.4)  # of log lengths: prompt, what both responses share, each response's own. Chosen so that
# padded over real tokens is 1.14, 1.52, 1.96 and 2.44 for 1, 2, 4 and 8 pairs (the data's: 1.14, 1.52, 1.94, 2.40)
DRAWS = 200  # of which the most typical one is taken: single draws differ by half in their share of padding

Lengths = tuple[int, int, int]
"""Tokens of prompt, chosen and rejected response."""


# ------------------------------------------------------------------------------------------------ models


@dataclass(frozen=True)
class Shape:
    """Shape of a Llama. By default the vocabulary head takes 7 % of the matrix work, as in Llama-3-8B.

    ``spread``: the standard deviation of its random weights.
    """

    width: int = 512
    layers: int = 4
    heads: int = 8
    kv_heads: int = 2
    mlp: int = 1792
    vocab: int = 2048
    positions: int = 8192
    spread: float = 0.02

    @classmethod
    def of(cls, options: Namespace) -> "Shape":
        """Returns the shape given by options, with Llama-3's proportions: 3.5 times as wide MLP, 4 queries per key."""
        heads, width = options.heads, options.width
        return cls(width, options.layers, heads, max(1, heads // 4), width * 7 // 2, options.vocab)

    def config(self) -> LlamaConfig:
        """Returns the shape as a transformers config."""
        return LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.width,
            intermediate_size=self.mlp,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=self.positions,
            initializer_range=self.spread,
            tie_word_embeddings=False,
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
        )

    def products(self) -> list[tuple[int, int]]:
        """Returns (inputs, outputs) of the matrix products of one layer, followed by the vocabulary head."""
        keys = self.width // self.heads * self.kv_heads
        layer = [(self.width, self.width), (self.width, keys), (self.width, keys), (self.width, self.width)]
        return [
            *layer,
            (self.width, self.mlp),
            (self.width, self.mlp),
            (self.mlp, self.width),
            (self.width, self.vocab),
        ]

    def head_share(self) -> float:
        """Returns the vocabulary head's share of all matrix parameters."""
        *layer, head = (inputs * outputs for inputs, outputs in self.products())
        return head / (self.layers * sum(layer) + head)


LLAMA3_8B = Shape(width=4096, layers=32, heads=32, kv_heads=8, mlp=14336, vocab=128256)


def add_shape(parser: ArgumentParser, *, layers: int) -> None:
    """Adds the options of a model's shape to a parser."""
    default = Shape()
    parser.add_argument("--width", type=int, default=default.width)
    parser.add_argument("--layers", type=int, default=layers)
    parser.add_argument("--heads", type=int, default=default.heads, help="query heads; a quarter as many key heads")
    parser.add_argument("--vocab", type=int, default=default.vocab)


def random_llama(shape: Shape, seed: int, **more: Any) -> PreTrainedModel:
    """Makes a random model in eval mode; ``more`` goes to ``from_config`` (dtype, attn_implementation)."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(shape.config(), **more).eval()


def word_tokenizer(vocab: int, words: Sequence[str] = (), chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Makes a tokenizer of the given size: special tokens, then ``words``, then ``t<id>``, separated by blanks."""
    known = [*SPECIALS, *dict.fromkeys(words)]
    if len(known) >= vocab:
        raise SystemExit(f"--vocab {vocab}: expected more than the {len(known)} tokens of the fixed texts")
    known += [f"t{number}" for number in range(len(known), vocab)]
    core = Tokenizer(models.WordLevel({token: number for number, token in enumerate(known)}, unk_token=SPECIALS[UNK]))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.decoder = decoders.WordPiece(prefix="\0", cleanup=False)
    pad, bos, eos, unk = SPECIALS
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        unk_token=unk,
        model_input_names=["input_ids", "attention_mask"],
        chat_template=chat_template,
    )


# ------------------------------------------------------------------------------------------------ pairs


class Pair(NamedTuple):
    """Token ids of a pair; both responses end with the end-of-sequence token."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]

    @property
    def tokens(self) -> int:
        """Returns the total number of tokens, P + C + R."""
        return sum(self.lengths)

    @property
    def lengths(self) -> Lengths:
        """Returns P, C and R."""
        return len(self.prompt), len(self.chosen), len(self.rejected)

    @property
    def rows(self) -> tuple[list[int], list[int]]:
        """Returns both responses."""
        return self.chosen, self.rejected


def draw_lengths(rng: random.Random, scale: float, limit: int) -> Lengths:
    """Draws a pair's lengths as in the paper, times ``scale``, with at most ``limit`` tokens per branch."""
    prompt, both, own = SPREAD
    shift = (both**2 + own**2) / 2
    common = rng.gauss(0, both) - shift
    logs = (rng.gauss(0, prompt) - prompt**2 / 2, common + rng.gauss(0, own), common + rng.gauss(0, own))
    lengths = [max(2, round(scale * mean * math.exp(log))) for mean, log in zip(MEANS, logs, strict=True)]
    first = min(lengths[0], limit * 7 // 8)
    return first, min(lengths[1], limit - first), min(lengths[2], limit - first)


def padded_tokens(lengths: Sequence[Lengths], micro: int) -> int:
    """Counts the tokens of padded micro-batches of the given size, in input order."""
    longest = [prompt + max(chosen, rejected) for prompt, chosen, rejected in lengths]
    cut = [longest[start : start + micro] for start in range(0, len(longest), micro)]
    return sum(2 * len(part) * max(part) for part in cut)


def typical_lengths(count: int, micro: int, seed: int, *, scale: float = 1.0, limit: int = 2048) -> list[Lengths]:
    """Returns the lengths of ``count`` pairs, as a typical draw.

    Among many draws, picks the one nearest to the mean in three token counts: padded in micro-batches of ``micro``
    pairs, with each prompt once, and of responses only.
    """
    rng = random.Random(seed)
    draws = [[draw_lengths(rng, scale, limit) for _ in range(count)] for _ in range(DRAWS)]
    sums = [
        (padded_tokens(draw, micro), sum(map(sum, draw)), sum(chosen + rejected for _, chosen, rejected in draw))
        for draw in draws
    ]
    means = [sum(column) / DRAWS for column in zip(*sums, strict=True)]
    distances = [sum((one / mean - 1) ** 2 for one, mean in zip(own, means, strict=True)) for own in sums]
    return draws[distances.index(min(distances))]


def make_pairs(lengths: Sequence[Lengths], vocab: int, seed: int, *, first: int = 4) -> list[Pair]:
    """Makes pairs of random ids, from ``first`` on, with the given lengths."""
    rng = random.Random(seed)
    pairs = []
    for sizes in lengths:
        prompt, chosen, rejected = ([rng.randrange(first, vocab) for _ in range(size)] for size in sizes)
        pairs.append(Pair(prompt, [*chosen[1:], EOS], [*rejected[1:], EOS]))
    return pairs


def text_of(ids: Sequence[int]) -> str:
    """Returns ids as text that ``word_tokenizer`` without words maps back to them."""
    return " ".join(SPECIALS[number] if number < len(SPECIALS) else f"t{number}" for number in ids)


# ------------------------------------------------------------------------------------------------ work


def causal(tokens: int) -> int:
    """Counts the query-key pairs of causal attention over a sequence."""
    return tokens * (tokens + 1) // 2


def step_flops(
    shape: Shape, tokens: int, scored: int, seen: int, *, trained: bool = True, recomputed: bool = False
) -> float:
    """Counts the floating-point operations of forward and backward from shapes.

    ``tokens`` go through the layers, ``scored`` through the head, and ``seen`` query-key pairs attend. Without
    ``trained`` no weight gets a gradient (as with adapters, whose own products are not counted). ``recomputed`` layers
    run forward twice, except for their last product, whose output the backward pass does not use.
    """
    *layer, head = (inputs * outputs for inputs, outputs in shape.products())
    linear, attention = 2 * shape.layers * sum(layer) * tokens, 4 * shape.width * shape.layers * seen
    products = 3 if trained else 2
    again = linear + attention - 2 * shape.layers * layer[-1] * tokens if recomputed else 0
    return float(products * (linear + 2 * head * scored) + 3 * attention + again)


def floor_flops(shape: Shape, pairs: Sequence[Pair], *, trained: bool = True) -> float:
    """Counts the minimal floating-point operations of one exact step on ``pairs`` with known reference log-probs.

    Each token of prompt and responses is processed once, the head runs on response tokens, and attention is causal. The
    backward pass costs twice the forward pass, or as much as it if no weight is ``trained``.
    """
    rows = [(len(pair.prompt), len(row)) for pair in pairs for row in pair.rows]
    seen = sum(causal(len(pair.prompt)) for pair in pairs) + sum(p * r + causal(r) for p, r in rows)
    return step_flops(shape, sum(pair.tokens for pair in pairs), sum(r for _, r in rows), seen, trained=trained)


def matmul_rate(shape: Shape, tokens: int, dtype: torch.dtype, device: torch.device, repeats: int = 5) -> float:
    """Measures the floating-point operations per second of the model's own matrix products, forward and backward.

    The best of ``repeats`` times counts for every product, because a lower bound must not be slow by chance.
    """
    products = [*shape.products()[:-1] * shape.layers, shape.products()[-1]]
    work = seconds = 0.0
    for (inputs, outputs), times in Counter(products).items():
        hidden = torch.randn(tokens, inputs, dtype=dtype, device=device)
        weight = torch.randn(outputs, inputs, dtype=dtype, device=device)
        gradient = torch.randn(tokens, outputs, dtype=dtype, device=device)
        for left, right in ((hidden, weight.T), (gradient, weight), (gradient.T, hidden)):
            found = []
            for _ in range(repeats + 1):
                settle(device)
                start = perf_counter()
                left @ right
                settle(device)
                found.append(perf_counter() - start)
            seconds += times * min(found)
            work += times * 2 * tokens * inputs * outputs
    return work / seconds


def settle(device: torch.device) -> None:
    """Waits until the GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
