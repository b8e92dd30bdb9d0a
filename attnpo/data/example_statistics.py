"""Computes statistics of a split's examples: lengths, weight concentration, and the share of weight that is kept."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attnpo.data.arrow_rows import AT_ONCE, TokenCounts
from attnpo.data.base import SET, PairSet
from attnpo.data.collate import TrainingExample
from attnpo.data.prepare import percentiles
from attnpo.schema import SIDES
from attnpo.weights.arrival import COLUMNS, KEPT_MASS, WeightCoverage
from attnpo.weights.base import OnlineSource, WeightSource


@dataclass
class ExampleMeans:
    """Running means over examples; examples are added in batches and not kept."""

    count: int = 0
    _sums: dict[str, float] = field(default_factory=dict)

    def add(self, examples: Sequence[TrainingExample]) -> None:
        """Adds examples."""
        self.count += len(examples)
        rows = [row.double().numpy() for example in examples for row in example.weights]
        starts, weights = np.cumsum([0, *map(len, rows)])[:-1], np.concatenate(rows)
        mass = np.abs(weights)
        totals = np.repeat(np.add.reduceat(mass, starts), np.diff([*starts, len(mass)]))
        squares = np.add.reduceat(np.divide(mass, totals, out=np.zeros_like(mass), where=totals > 0) ** 2, starts)
        lengths = np.array([example.lengths for example in examples]).ravel()
        effective = np.divide(1.0, squares, out=np.zeros_like(squares), where=squares > 0) / np.maximum(1.0, lengths)
        found = {"effective_share": effective.sum() / 2, "mass": np.add.reduceat(weights, starts).sum()}
        for name in ("coverage", "source_coverage"):
            found[name] = sum(sum(getattr(example, name)) / 2 for example in examples)
        for side, name in enumerate(KEPT_MASS):
            found[name] = sum(example.kept_mass[side] for example in examples)
        for name, value in found.items():
            self._sums[name] = self._sums.get(name, 0.0) + float(value)

    def mean(self, name: str, of: int = 1) -> float:
        """Returns a mean, rounded as in a run's result; 0 if there are no examples."""
        return round(self._sums.get(name, 0.0) / max(1, of * self.count), 5)

    @property
    def mean_coverage(self) -> WeightCoverage:
        """Returns the mean coverage, source coverage and kept mass; NaN if there are no examples."""
        names = ("coverage", *COLUMNS)
        return WeightCoverage(*(self.mean(name) if self.count else math.nan for name in names))

    def coverage_by_name(self, source: WeightSource) -> dict[str, float]:
        """Returns the mean coverage and, unless weights are computed in each step, source coverage and kept mass."""
        names = ("coverage",) if isinstance(source, OnlineSource) else ("coverage", *COLUMNS)
        return {name: self.mean(name) for name in names}


@dataclass(frozen=True)
class SplitStatistics:
    """Statistics of a split's examples for a run's result, and the mean coverage of the examples' weights."""

    numbers: dict[str, Any]
    arrival: WeightCoverage


class ExampleStatistics:
    """Computes a split's statistics from examples of ``pairs`` that are added one by one."""

    def __init__(self, pairs: PairSet, source: WeightSource) -> None:
        self._source, self._accounts, self._all = source, pairs.sets, ExampleMeans()
        self._sets = {name: ExampleMeans() for name in pairs.sets}
        self._waiting: list[TrainingExample] = []
        # A pair in several sets counts for the last one.
        self._home = {pair.pair_id: str(pair.extra[SET]) for pair in pairs.pairs} if pairs.sets else {}

    def add(self, example: TrainingExample) -> None:
        """Adds one example."""
        self._waiting.append(example)
        if len(self._waiting) == AT_ONCE:
            self._flush()

    def _flush(self) -> None:
        some, self._waiting = self._waiting, []
        if some:
            self._all.add(some)
        for name, means in self._sets.items():
            if own := [example for example in some if self._home[example.pair_id] == name]:
                means.add(own)

    def compute(self, sizes: TokenCounts) -> SplitStatistics:
        """Returns the statistics; ``sizes`` are the token counts of the examples."""
        self._flush()
        source, every = self._source, self._all
        online = isinstance(source, OnlineSource)
        sets = {
            name: {**vars(account), "pairs": self._sets[name].count, **self._sets[name].coverage_by_name(source)}
            for name, account in self._accounts.items()
        }
        numbers = {
            **every.coverage_by_name(source),
            **({} if online else {"effective_share": every.mean("effective_share"), "mass": every.mean("mass", of=2)}),
            "lengths": percentiles(sizes.longest_branch.tolist()),
            "tokens": token_percentiles(sizes),
            **({"sets": sets} if sets else {}),
        }
        return SplitStatistics(numbers, every.mean_coverage)


def token_percentiles(sizes: TokenCounts) -> dict[str, dict[str, int]]:
    """Returns the 50th, 90th and 99th percentiles and the maximum of training token counts.

    Covers prompts, chosen and rejected responses, and the longer branch of each pair.
    """
    parts = {
        "prompt": sizes.prompts[0],
        "longest": sizes.longest_branch,
        **dict(zip(SIDES, sizes.responses, strict=True)),
    }
    return {name: percentiles(parts[name].tolist()) for name in ("prompt", *SIDES, "longest")}
