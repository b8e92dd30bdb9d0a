"""Pairs for the explorer's tests and pictures: many synthetic ones, and a few in writing that is hard to show."""

import numpy as np

from attnpo.display.explorer import ExplorerPair, ExplorerSide, SideWeights, View
from attnpo.schema import Message

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


def views(layers: int, sources: tuple[str, ...] = ("attention", "rollout"), rounds: int = 3) -> list[View]:
    """Views of every source, layer and round."""
    names = ("combined", "round 1", "round 2")[:rounds]
    return [View(source, f"L{layer + 1}", one) for source in sources for layer in range(layers) for one in names]


def cut(text: str, every: int) -> ExplorerSide:
    """A text in tokens of ``every`` characters, with an end of turn."""
    offsets = [(start, min(len(text), start + every)) for start in range(0, len(text), every)]
    ids = [10 + sum(map(ord, text[start:stop])) % 30000 for start, stop in offsets]
    return ExplorerSide(text, [*ids, END], [*offsets, (len(text), len(text))], {END: "<|im_end|>"})


def spelled(words: list[str]) -> ExplorerSide:
    """A response whose tokens are words with the space before them."""
    text, offsets = "", list[tuple[int, int]]()
    for word in words:
        offsets.append((len(text), len(text) + len(word) + 1))
        text += " " + word
    return ExplorerSide(text, [10 + len(word) for word in words], offsets)


def weighed(side: ExplorerSide, rng: np.random.Generator, coverage: float = 1.0) -> SideWeights:
    """Log-normal weights that sum to 1, some of them 0 where coverage is below 1."""
    raw = np.exp(1.5 * rng.standard_normal(len(side.token_ids)))
    raw[: round((1 - coverage) * len(raw))] = 0
    return SideWeights((raw / raw.sum()).tolist(), len(raw), coverage)


def pair_of(number: int, prompt: str, sides: tuple[ExplorerSide, ExplorerSide], every: list[View]) -> ExplorerPair:
    """A pair with weights of every view."""
    rng = np.random.default_rng(number)
    coverage = 1.0 if number % 3 else 0.8
    messages: list[Message] = [{"role": "user", "content": prompt}]
    weights = {view: (weighed(sides[0], rng, coverage), weighed(sides[1], rng)) for view in every}
    return ExplorerPair(f"pair-{number}", messages, *sides, weights)


def many(count: int, tokens: int, layers: int) -> list[ExplorerPair]:
    """``count`` pairs of ``tokens`` tokens (both responses together), two sources, ``layers``, three rounds."""
    rng, every = np.random.default_rng(0), views(layers)
    vocabulary = [*WORDS, *("".join(chr(97 + one) for one in rng.integers(0, 26, 5)) for _ in range(3000))]
    pairs = []
    for number in range(count):
        drawn = [[vocabulary[one] for one in rng.integers(0, len(vocabulary), tokens // 2)] for _ in range(2)]
        sides = spelled(drawn[0]), spelled(drawn[1])
        pairs.append(pair_of(number, f"Question {number}: " + " ".join(drawn[0][:12]), sides, every))
    return pairs


def hard(layers: int = 2) -> list[ExplorerPair]:
    """Pairs in several scripts, with markup, controls and surrogates in them, and log-probabilities."""
    pairs = []
    for number, (prompt, chosen, rejected) in enumerate(HARD):
        sides = cut(chosen, 3), cut(rejected, 2)
        known = [
            ExplorerSide(
                side.text, side.token_ids, side.offsets, side.ends,
                {"reference": [-0.25 * (place % 9) for place in range(len(side.token_ids))]},
            )
            for side in sides
        ]  # fmt: skip
        pairs.append(pair_of(number, prompt, (known[0], known[1]), views(layers)))
    return pairs
