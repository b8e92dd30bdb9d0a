"""Metrics averaged over the whole optimiser step and all ranks, whatever the micro-batching."""

from collections.abc import Mapping

import torch
import torchmetrics
from jaxtyping import Float
from torch import Tensor


class PairMeans(torchmetrics.Metric):
    """Means over pairs of named per-pair values, summed over micro-batches and ranks before dividing."""

    full_state_update = False
    pairs: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.add_state("pairs", default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, values: Mapping[str, Float[Tensor, " pairs"]]) -> None:
        """Adds one micro-batch. The first call fixes the names."""
        for name, value in values.items():
            state = self._state(name)
            if name not in self.names:
                self.names.append(name)
                self.add_state(state, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
                setattr(self, state, getattr(self, state).to(self.device))
            setattr(self, state, getattr(self, state) + value.detach().double().sum())
        self.pairs = self.pairs + len(next(iter(values.values())))

    def compute(self) -> dict[str, Tensor]:
        """Returns the mean of every name seen so far."""
        return {name: getattr(self, self._state(name)) / self.pairs.clamp(min=1) for name in self.names}

    @staticmethod
    def _state(name: str) -> str:
        return "sum_" + name.replace("/", "_")
