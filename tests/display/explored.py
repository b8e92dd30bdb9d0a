"""Pairs for the explorer's tests and pictures: many synthetic ones, and a few in writing that is hard to show."""

from dataclasses import replace

import numpy as np
import torch

from attnpo.display.explorer import ExplorerPair, ExplorerView
from attnpo.display.pair_record import WeightedResponse
from attnpo.display.weighted_pair import WeightedPair
from attnpo.schema import Message, PreferencePair

# ruff: noqa: RUF001  # letters that look like others are what is tested here
END = 2
WORDS = ["the", "judge", "reads", "both", "answers", "and", "its", "verdict", "rests", "on", "few", "tokens"]
HARD = (
    ("What is a sea?", "A sea is a large body of salt water.\nIt has waves; 5 < 6 & \"so\" on.", "Blue <b>thing</b>."),
    ("ما هو البحر؟", "البحر مساحة واسعة من الماء المالح، وفيه أسماك كثيرة.", "لا أعرف."),
    ("מהו ים?", "ים הוא גוף מים מלוחים גדול, כמו הים התיכון (Mare Nostrum).", "לא יודע."),
    ("海是什么？", "海是地球上广阔的咸水水域，里面有许多鱼。", "不知道。"),
    ("</script><script>console.error('acted')</script>",
     "\u202eevil\u202c \x1b[31m red\ttab <img src=x onerror=console.error(1)>",
     "👩‍🚀 flies; 𝕏 é\r\n    indented"),
)  # fmt: skip


def views(layers: int, sources: tuple[str, ...] = ("attention", "rollout"), rounds: int = 3) -> list[ExplorerView]:
    """Views of every source, layer and round."""
    names = ("combined", "round 1", "round 2")[:rounds]
    return [
        ExplorerView(source, f"L{layer + 1}", one) for source in sources for layer in range(layers) for one in names
    ]


def cut(text: str, every: int) -> WeightedResponse:
    """A text in tokens of ``every`` characters, with an end of turn."""
    places = range(0, len(text), every)
    offsets = [(start, min(len(text), start + every)) for start in places]
    ids = [10 + sum(map(ord, text[start:stop])) % 30000 for start, stop in offsets]
    return response_of(text, [*ids, END], [*offsets, (len(text), len(text))])


def spell(words: list[str]) -> WeightedResponse:
    """A response whose tokens are words with the space before them."""
    offsets, at = list[tuple[int, int]](), 0
    for word in words:
        offsets.append((at, at + len(word) + 1))
        at = offsets[-1][1]
    return response_of("".join(f" {word}" for word in words), [10 + len(word) for word in words], offsets)


def response_of(text: str, ids: list[int], offsets: list[tuple[int, int]]) -> WeightedResponse:
    """Returns a response without weights, all of whose tokens would have a partner."""
    tokens = tuple(text[start:stop] or "<|im_end|>" for start, stop in offsets)
    return WeightedResponse(text, tokens, tuple(ids), tuple(offsets), torch.zeros(len(ids)), len(ids), 1.0)


def weigh(side: WeightedResponse, rng: np.random.Generator, coverage: float = 1.0) -> WeightedResponse:
    """Log-normal weights that sum to 1, some of them 0 where coverage is below 1."""
    raw = np.exp(1.5 * rng.standard_normal(len(side.tokens)))
    raw[: round((1 - coverage) * len(raw))] = 0
    return replace(side, weights=torch.from_numpy(raw / raw.sum()), coverage=coverage)


def pair_of(
    number: int, prompt: str, sides: tuple[WeightedResponse, WeightedResponse], every: list[ExplorerView]
) -> dict[ExplorerView, WeightedPair]:
    """A pair with weights of every view."""
    rng = np.random.default_rng(number)
    coverage = 1.0 if number % 3 else 0.8
    pair = PreferencePair(f"pair-{number}", (Message(role="user", content=prompt),), *(side.text for side in sides))
    return {view: WeightedPair(pair, weigh(sides[0], rng, coverage), weigh(sides[1], rng)) for view in every}


def many(count: int, tokens: int, layers: int) -> list[ExplorerPair]:
    """``count`` pairs of ``tokens`` tokens (both responses together), two sources, ``layers``, three rounds."""
    rng, every = np.random.default_rng(0), views(layers)
    vocabulary = [*WORDS, *("".join(chr(97 + one) for one in rng.integers(0, 26, 5)) for _ in range(3000))]
    pairs: list[ExplorerPair] = []
    for number in range(count):
        drawn = [[vocabulary[one] for one in rng.integers(0, len(vocabulary), tokens // 2)] for _ in range(2)]
        sides = spell(drawn[0]), spell(drawn[1])
        pairs.append(pair_of(number, f"Question {number}: " + " ".join(drawn[0][:12]), sides, every))
    return pairs


def hard(layers: int = 2) -> list[dict[ExplorerView, WeightedPair]]:
    """Pairs in several scripts, with markup, controls and surrogates in them, and log-probabilities."""
    pairs = []
    for number, (prompt, *texts) in enumerate(HARD):
        chosen, rejected = (
            replace(side, scores={"reference_logp": torch.tensor([-0.25 * (at % 9) for at in range(len(side.tokens))])})
            for side in (cut(texts[0], 3), cut(texts[1], 2))
        )
        pairs.append(pair_of(number, prompt, (chosen, rejected), views(layers)))
    return pairs
