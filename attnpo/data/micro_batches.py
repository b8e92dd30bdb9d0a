"""Micro-batches of an optimiser step: tokens of its pairs, where to cut, which rank takes what.

Owns the arithmetic, on plain numbers: no tensor, no epoch, no random order. A pair is its position in a list of sizes.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil

from attnpo.data.arrow_rows import sizes_of
from attnpo.data.collate import TrainingExample
from attnpo.schema import SIDES, UserError

log = logging.getLogger(__name__)


Hands = list[list[tuple[int, ...]]]
"""Pairs of a step by rank and micro-batch; every rank has as many micro-batches."""


@dataclass(frozen=True)
class RowCost:
    """Tokens of model input that pairs take under the layout of ``models.layouts`` called ``name``.

    ``padded``: every row is as long as the longest one. ``shared``: a prompt that both rows of a pair have lies there
    once.
    """

    name: str
    padded: bool = False
    shared: bool = False

    def of(self, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> int:
        """Returns tokens of one pair by itself, whose rows are (prompt ids, response ids)."""
        lengths = [len(prompt) + len(response) for prompt, response in rows]
        if self.padded:
            return len(lengths) * max(lengths)
        first = rows[0][0]
        same = self.shared and all(list(prompt) == list(first) for prompt, _ in rows[1:])
        return sum(lengths) - (len(rows) - 1) * len(first) * same

    def together(self, sizes: Sequence[int]) -> int:
        """Returns tokens of pairs in one forward, each of which takes one of ``sizes`` by itself."""
        return len(sizes) * max(sizes) if self.padded else sum(sizes)


PADDED = RowCost("padded", padded=True)
PACKED = RowCost("packed")
SHARED_PREFIX = RowCost("shared_prefix", shared=True)
COSTS = {cost.name: cost for cost in (PADDED, PACKED, SHARED_PREFIX)}


# ------------------------------------------------------------------------------------------------ cutting a line


def shares(total: int, parts: int) -> list[range]:
    """Ranges that cut ``total`` things into consecutive parts, sizes differing by at most one."""
    small, larger = divmod(total, parts)
    starts = [part * small + min(part, larger) for part in range(parts + 1)]
    return [range(low, high) for low, high in pairwise(starts)]


def fill(sizes: Sequence[int], cost: RowCost, limit: int) -> list[int]:
    """Returns where the fewest consecutive parts begin that take at most ``limit`` tokens each.

    ``sizes`` longest first.

    A single pair above the limit is a part of its own.
    """
    starts: list[int] = []
    taken = 0
    for place, size in enumerate(sizes):
        if starts:
            taken = sizes[starts[-1]] * (place + 1 - starts[-1]) if cost.padded else taken + size
        if not starts or taken > limit:
            starts.append(place)
            taken = size
    return starts


def partition(sizes: Sequence[int], parts: int, cost: RowCost) -> list[range]:
    """Returns ``parts`` consecutive non-empty ranges of ``sizes`` (longest first) whose largest cost is least.

    Where fewer would do at that cost, the costliest one is halved until there are enough. Raises ValueError for no
    part, or more parts than sizes.
    """
    if not 1 <= parts <= len(sizes):
        raise ValueError(f"{len(sizes)} pairs cannot be cut into {parts} parts")
    low, high = sizes[0], cost.together(sizes)
    while low < high:
        middle = (low + high) // 2
        if len(fill(sizes, cost, middle)) <= parts:
            high = middle
        else:
            low = middle + 1
    ranges = [range(begin, end) for begin, end in pairwise([*fill(sizes, cost, low), len(sizes)])]
    while len(ranges) < parts:
        place = max((i for i in range(len(ranges)) if len(ranges[i]) > 1), key=lambda i: _taken(sizes, cost, ranges[i]))
        ranges[place : place + 1] = _halves(sizes, cost, ranges[place])
    return ranges


def _taken(sizes: Sequence[int], cost: RowCost, part: range) -> int:
    return cost.together(sizes[part.start : part.stop])


def _halves(sizes: Sequence[int], cost: RowCost, part: range) -> tuple[range, range]:
    """Returns the cut of a part after which the larger half costs least."""
    cuts = ((range(part.start, cut), range(cut, part.stop)) for cut in part[1:])
    return min(cuts, key=lambda halves: max(_taken(sizes, cost, half) for half in halves))


def deal(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Returns the parts of each rank, costliest first: as many for each, the totals within one part of each other.

    Dealt in rounds of alike parts, so that what the ranks compute at the same time takes them as long; in a round the
    costliest part goes to the rank that has least so far. The number of parts is a multiple of ``ranks``.
    """
    order = sorted(range(len(costs)), key=lambda part: -costs[part])
    hands: list[list[int]] = [[] for _ in range(ranks)]
    totals = [0] * ranks
    for start in range(0, len(order), ranks):
        waiting = sorted(range(ranks), key=totals.__getitem__)
        for rank, part in zip(waiting, order[start : start + ranks], strict=True):
            hands[rank].append(part)
            totals[rank] += costs[part]
    return hands


# ------------------------------------------------------------------------------------------------ cutting a step


@dataclass(frozen=True)
class ByCount:
    """Micro-batches of ``micro`` pairs in the order of the step, sizes differing by at most one where it is uneven."""

    micro: int

    def __post_init__(self) -> None:
        if self.micro < 1:
            raise UserError(f"pairs per micro-batch must be at least 1, got {self.micro}")

    @property
    def rule(self) -> str:
        """Returns the rule in words; two cuttings of the same pairs with the same rule are the same."""
        return f"micro-batch {self.micro}"

    def micros(self, steps: Iterable[Sequence[int]], pairs: int, ranks: int, *, short: bool = False) -> int:
        """Returns the number of micro-batches per rank of any steps of so many pairs.

        As few as hold the largest share of a rank.

        But never more than the smallest share has pairs; that one then holds more than ``micro`` is logged.
        """
        share = ceil(pairs / ranks)
        micros = min(ceil(share / self.micro), pairs // ranks)
        if ceil(share / micros) > self.micro:
            log.warning(
                "a step of %d pairs for %d processes: one micro-batch holds %d pairs, not %d",
                pairs,
                ranks,
                ceil(share / micros),
                self.micro,
            )
        return micros

    def hands(self, step: Sequence[int], micros: int, ranks: int) -> Hands:
        """Returns the step in as many micro-batches on each rank: consecutive shares, in consecutive parts."""
        return [
            [tuple(step[share.start + i] for i in part) for part in shares(len(share), micros)]
            for share in shares(len(step), ranks)
        ]


@dataclass(frozen=True)
class ByTokens:
    """Micro-batches of pairs of alike length, each of at most ``budget`` tokens; ``sizes`` are those of every pair.

    The pairs of a step are sorted by size, the longest first (equal ones in the order of the step), and cut so that
    the largest micro-batch is as small as it can be. ``key`` is the setting that gave the budget.
    """

    sizes: Sequence[int] | Mapping[int, int] = field(repr=False)
    cost: RowCost
    budget: int
    key: str = "batch.tokens"

    @property
    def rule(self) -> str:
        """Returns the rule in words; two cuttings of the same pairs with the same rule are the same."""
        return f"at most {self.budget} tokens of {self.cost.name} rows"

    def tokens(self, part: Sequence[int]) -> int:
        """Returns tokens of pairs in one forward."""
        return self.cost.together([self.sizes[i] for i in part])

    def micros(self, steps: Iterable[Sequence[int]], pairs: int, ranks: int, *, short: bool = False) -> int:
        """Returns the number of micro-batches per rank of ``steps`` of so many pairs each.

        As few as keep the budget in all; 0 without one.

        Never more than the ranks have pairs. The ``short`` last steps of epochs, whose size nobody chose, then go above
        the budget, which is logged.

        Raises:
            UserError: steps of full size need more of them than there are pairs.
        """
        micros = max((self.min_micro_batches(step, ranks) for step in steps), default=0)
        if short and micros * ranks > pairs:
            log.warning(
                "a last step of %d pairs for %d processes: a forward of it may hold more tokens than %s %d",
                pairs,
                ranks,
                self.key,
                self.budget,
            )
            return pairs // ranks
        if micros * ranks > pairs:
            raise UserError(
                f"{self.key} {self.budget}: a step of {pairs} pairs on {ranks} processes needs {micros} forwards on "
                f"each, and with {micros * ranks} some would be empty; raise {self.key}, or take processes that divide "
                f"{pairs}"
            )
        return micros

    def min_micro_batches(self, step: Sequence[int], ranks: int) -> int:
        """Returns the fewest micro-batches per rank that keep the budget in one step."""
        return ceil(len(fill(self._line(step), self.cost, self.budget)) / ranks)

    def hands(self, step: Sequence[int], micros: int, ranks: int) -> Hands:
        """Returns the step in as many micro-batches on each rank, totals alike, the longest pairs first.

        Raises:
            ValueError: the step does not keep the budget in so few; ``micros`` has not seen it.
        """
        hands = self.closest(step, micros, ranks)
        most = max(self.tokens(part) for hand in hands for part in hand)
        if most > self.budget and (micros + 1) * ranks <= len(step):
            raise ValueError(f"{micros} micro-batches on {ranks} ranks need {most} tokens, not {self.budget}")
        return hands

    def closest(self, step: Sequence[int], micros: int, ranks: int) -> Hands:
        """Returns the same whatever the budget."""
        line = sorted(step, key=lambda i: -self.sizes[i])
        parts = [tuple(line[i] for i in part) for part in partition(self._line(step), micros * ranks, self.cost)]
        return [[parts[i] for i in hand] for hand in deal([self.tokens(part) for part in parts], ranks)]

    def _line(self, step: Sequence[int]) -> list[int]:
        return sorted((self.sizes[i] for i in step), reverse=True)


Cutting = ByCount | ByTokens
"""Rule that cuts the steps of a run into micro-batches."""


# ------------------------------------------------------------------------------------------------ a budget of tokens


def costs_of(examples: Sequence[TrainingExample], cost: RowCost) -> list[int]:
    """Returns the tokens of each pair taken alone."""
    sizes = sizes_of(examples)
    once = sizes.prompts[0] * sizes.shared if cost.shared else 0
    counts = len(SIDES) * sizes.longest if cost.padded else sizes.branches.sum(axis=0) - once
    return [int(count) for count in counts]


def require_room(examples: Sequence[TrainingExample], cost: RowCost, budget: int | None, key: str) -> None:
    """Raises UserError for a budget of tokens, given as ``key``, that is below the longest pair."""
    if budget is None or not examples:
        return
    costs = costs_of(examples, cost)
    if (needed := max(costs)) > budget:
        raise UserError(
            f"{key} must hold the longest pair: expected at least {needed}, the tokens of pair "
            f"{examples[costs.index(needed)].pair_id} as {cost.name} rows, got {budget}; raise {key}, or lower "
            "lengths.max_length"
        )
