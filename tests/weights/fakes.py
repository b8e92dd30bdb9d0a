"""A judge and prompts small enough to work out by hand, for tests of weights."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from attnpo.judge.base import JudgePrompt, JudgeReading
from attnpo.schema import PreferencePair

LABELS = (900, 901)


def make_pair(number: int, chosen: str = "good words here", rejected: str = "bad") -> PreferencePair:
    return PreferencePair.from_texts([{"role": "user", "content": f"question {number}"}], chosen, rejected)


def words(text: str) -> list[tuple[int, int]]:
    """Character ranges of the words of ``text``, each with the blank before it."""
    ranges, start = [], 0
    for word in text.split(" "):
        end = start + len(word) + (1 if start else 0)
        ranges.append((start, end))
        start = end
    return ranges


def word_id(word: str) -> int:
    return 10 + sum(word.strip().encode()) % 700


@dataclass
class FakePrompts:
    """Two instruction tokens, answer A, a separator, answer B, one token that asks."""

    label_ids: tuple[int, int] = LABELS

    def build(self, pair: PreferencePair) -> tuple[JudgePrompt, JudgePrompt]:
        return self._round(pair, True), self._round(pair, False)

    def fingerprint(self) -> dict[str, Any]:
        return {"tokenizer": "words", "template": "two tokens"}

    def _round(self, pair: PreferencePair, chosen_is_a: bool) -> JudgePrompt:
        ids, spans, offsets = [1, 2], {}, {}
        for side in ("chosen", "rejected") if chosen_is_a else ("rejected", "chosen"):
            text = pair.response(side)
            offsets[side] = words(text)
            spans[side] = (len(ids), len(ids) + len(offsets[side]))
            ids += [word_id(text[start:end]) for start, end in offsets[side]] + [3]
        return JudgePrompt(pair.pair_id, [*ids, 4], chosen_is_a, spans, offsets)


@dataclass
class FakeJudge:
    """Row of layer L at position t: (L + 1/(t+1)) / 3, a number that float32 has to round.

    ``calls`` records the number of prompts and the layers of each call; ``fail_at`` raises in that call.
    """

    num_layers: int = 4
    calls: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    fail_at: int | None = None

    def fingerprint(self) -> dict[str, Any]:
        return {"weights": "fake", "dtype": "float32", "kernel": "none"}

    def read(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        layers: Sequence[int],
        per_head: bool = False,
        rollout: bool = False,
        verdict: bool = True,
        label_ids: tuple[int, int] | None = None,
    ) -> list[JudgeReading]:
        if self.fail_at is not None and len(self.calls) == self.fail_at:
            raise KeyboardInterrupt
        self.calls.append((len(prompts), tuple(layers)))
        assert (label_ids is not None) == verdict
        return [self._one(ids, layers, verdict) for ids in prompts]

    def _one(self, ids: Sequence[int], layers: Sequence[int], verdict: bool) -> JudgeReading:
        places = torch.arange(1, len(ids) + 1, dtype=torch.float32)
        rows = torch.stack([(layer + 1 / places) / 3 for layer in layers])
        if not verdict:
            return JudgeReading(rows)
        return JudgeReading(rows, None, torch.tensor([sum(ids) / 7, 0.1]), LABELS[0])


def head_row(layer: int, head: int, places: Sequence[int]) -> list[float]:
    """Returns the row of one head at 1-based prompt positions."""
    return [(layer + head / 10 + 1 / place) / 7 for place in places]


@dataclass
class HeadJudge(FakeJudge):
    """Row of head h in layer L at position t: (L + h/10 + 1/(t+1)) / 7; without ``per_head`` their mean.

    ``per_head_calls`` records what each call asked for.
    """

    num_heads: int = 3

    def __post_init__(self) -> None:
        self.per_head_calls: list[bool] = []

    def read(self, prompts: Sequence[Sequence[int]], *, per_head: bool = False, **asked: object) -> list[JudgeReading]:  # type: ignore[override]
        self.per_head_calls.append(per_head)
        readings = super().read(prompts, **asked)  # type: ignore[arg-type]
        return [
            JudgeReading(self._heads(ids, asked["layers"], per_head), None, item.verdict_logits, item.verdict_token)  # type: ignore[arg-type]
            for ids, item in zip(prompts, readings, strict=True)
        ]

    def _heads(self, ids: Sequence[int], layers: Sequence[int], per_head: bool) -> torch.Tensor:
        places = range(1, len(ids) + 1)
        rows = torch.tensor([[head_row(layer, h + 1, places) for h in range(self.num_heads)] for layer in layers])
        return rows if per_head else rows.mean(1)
