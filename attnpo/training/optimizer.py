"""The optimiser's recipe: plain numbers and the learning-rate curve they describe."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnpo.schema import UserError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Optimizer:
    """AdamW with linear warm-up and cosine decay (paper appendix: lr 1e-6, warm-up ratio 0.1, cosine).

    ``warmup`` below 1 is a share of all optimiser steps, from 1 on a number of steps. ``schedule`` is "cosine" or
    "constant"; ``final_share`` is what remains of lr at the end of a cosine.
    """

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup: float = 0.1
    schedule: str = "cosine"
    final_share: float = 0.0

    def __post_init__(self) -> None:
        if self.schedule not in ("cosine", "constant"):
            raise UserError(f"optimizer.schedule must be cosine or constant, got {self.schedule!r}")
        if self.warmup < 0:
            raise UserError(f"optimizer.warmup must be a share of all steps or a number of steps, got {self.warmup}")
        if not self.lr > 0:
            raise UserError(f"optimizer.lr must be above 0, got {self.lr}")

    def factor(self, step: int, total: int) -> float:
        """What lr is multiplied with at optimiser step ``step`` (0-based) of ``total``."""
        warmup = math.ceil(self.warmup * total) if self.warmup < 1 else int(self.warmup)
        if step < warmup:
            return (step + 1) / warmup
        if self.schedule == "constant":
            return 1.0
        progress = min(1.0, (step - warmup) / max(1, total - warmup))
        return self.final_share + (1 - self.final_share) * 0.5 * (1 + math.cos(math.pi * progress))

    def make(self, parameters: "Iterable[torch.nn.Parameter]") -> "torch.optim.Optimizer":
        """The optimiser over ``parameters``; the schedule is ``factor``'s business."""
        import torch

        return torch.optim.AdamW(parameters, lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay)
