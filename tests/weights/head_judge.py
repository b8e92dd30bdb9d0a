"""A judge with several heads whose rows are easy to work out by hand."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attnpo.judge.base import JudgeReading
from tests.weights.fakes import FakeJudge


def head_row(layer: int, head: int, places: Sequence[int]) -> list[float]:
    """The row of one head at 1-based prompt positions."""
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
