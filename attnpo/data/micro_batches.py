"""Divides an optimizer step into micro-batches and assigns them to ranks.

Does only integer arithmetic and knows nothing about tensors, epochs or shuffling. A pair is an index into a list of
sizes.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil

from attnpo.data.arrow_rows import count_row_tokens
from attnpo.data.collate import TrainingExample
from attnpo.schema import SIDES, UserError

log = logging.getLogger(__name__)


RankBatches = list[list[tuple[int, ...]]]
"""Pairs of a step, by rank and micro-batch; every rank has the same number of micro-batches."""


@dataclass(frozen=True)
class RowCost:
    """Counts the input tokens of pairs in the layout ``name`` of ``models.layouts``.

    ``padded``: every row is padded to the longest row. ``shared``: if both rows of a pair have the same prompt, the
    prompt tokens are counted once.
    """

    name: str
    padded: bool = False
    shared: bool = False

    def pair_cost(self, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> int:
        """Returns the number of input tokens of a single pair, given as rows of (prompt ids, response ids)."""
        lengths = [len(prompt) + len(response) for prompt, response in rows]
        if self.padded:
            return len(lengths) * max(lengths)
        first = rows[0][0]
        same = self.shared and all(list(prompt) == list(first) for prompt, _ in rows[1:])
        return sum(lengths) - (len(rows) - 1) * len(first) * same

    def batch_cost(self, sizes: Sequence[int]) -> int:
        """Returns the number of input tokens in a forward pass of several pairs, given the token count of each pair."""
        return len(sizes) * max(sizes) if self.padded else sum(sizes)


PADDED = RowCost("padded", padded=True)
PACKED = RowCost("packed")
SHARED_PREFIX = RowCost("shared_prefix", shared=True)
COSTS = {cost.name: cost for cost in (PADDED, PACKED, SHARED_PREFIX)}


# ----------------------------------------------------------------------------------------- partitioning a sorted list


def split_evenly(total: int, parts: int) -> list[range]:
    """Splits ``total`` items into consecutive ranges whose sizes differ by at most one."""
    small, larger = divmod(total, parts)
    starts = [part * small + min(part, larger) for part in range(parts + 1)]
    return [range(low, high) for low, high in pairwise(starts)]


def fill_greedily(sizes: Sequence[int], cost: RowCost, limit: int) -> list[int]:
    """Splits ``sizes`` into the fewest consecutive parts of at most ``limit`` tokens; returns the start indices.

    ``sizes`` must be sorted, longest first. A single pair above the limit forms its own part.
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


def partition_by_cost(sizes: Sequence[int], parts: int, cost: RowCost) -> list[range]:
    """Splits ``sizes`` (longest first) into consecutive non-empty ranges, minimizing the largest cost.

    If fewer than ``parts`` ranges suffice for that cost, the costliest range is halved until there are enough.

    Raises:
        ValueError: ``parts`` is below 1 or above the number of sizes.
    """
    if not 1 <= parts <= len(sizes):
        raise ValueError(f"cannot split {len(sizes)} pairs into {parts} non-empty parts")
    low, high = sizes[0], cost.batch_cost(sizes)
    while low < high:
        middle = (low + high) // 2
        if len(fill_greedily(sizes, cost, middle)) <= parts:
            high = middle
        else:
            low = middle + 1
    ranges = [range(begin, end) for begin, end in pairwise([*fill_greedily(sizes, cost, low), len(sizes)])]
    while len(ranges) < parts:
        place = max(
            (i for i in range(len(ranges)) if len(ranges[i]) > 1), key=lambda i: _range_cost(sizes, cost, ranges[i])
        )
        ranges[place : place + 1] = _split_in_two(sizes, cost, ranges[place])
    return ranges


def _range_cost(sizes: Sequence[int], cost: RowCost, part: range) -> int:
    return cost.batch_cost(sizes[part.start : part.stop])


def _split_in_two(sizes: Sequence[int], cost: RowCost, part: range) -> tuple[range, range]:
    """Splits a range in two so that the larger of the two costs is as small as possible."""
    cuts = ((range(part.start, cut), range(cut, part.stop)) for cut in part[1:])
    return min(cuts, key=lambda halves: max(_range_cost(sizes, cost, half) for half in halves))


def assign_to_ranks(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Assigns parts to ranks, costliest first; every rank gets the same number of parts, with similar total cost.

    In each round the ranks get parts of similar cost, so they take about the same time; the costliest part of a round
    goes to the rank whose total so far is smallest. The number of parts must be a multiple of ``ranks``.
    """
    order = sorted(range(len(costs)), key=lambda part: -costs[part])
    assigned: list[list[int]] = [[] for _ in range(ranks)]
    totals = [0] * ranks
    for start in range(0, len(order), ranks):
        waiting = sorted(range(ranks), key=totals.__getitem__)
        for rank, part in zip(waiting, order[start : start + ranks], strict=True):
            assigned[rank].append(part)
            totals[rank] += costs[part]
    return assigned


# ------------------------------------------------------------------------------------------------ batch rules


@dataclass(frozen=True)
class BatchByCount:
    """Splits a step, in order, into micro-batches of ``micro`` pairs; uneven sizes differ by at most one."""

    micro: int

    def __post_init__(self) -> None:
        if self.micro < 1:
            raise UserError(f"pairs per micro-batch must be at least 1, got {self.micro}")

    @property
    def description(self) -> str:
        """Returns a description of the rule; equal descriptions mean equal micro-batches."""
        return f"micro-batch {self.micro}"

    def num_micro_batches(self, steps: Iterable[Sequence[int]], pairs: int, ranks: int, *, short: bool = False) -> int:
        """Returns the number of micro-batches per rank for steps of ``pairs`` pairs.

        This is the smallest number that suffices for the rank with the most pairs, but at most the number of pairs on
        the rank with the fewest. If a micro-batch then exceeds ``micro`` pairs, a warning is logged.
        """
        share = ceil(pairs / ranks)
        micros = min(ceil(share / self.micro), pairs // ranks)
        if ceil(share / micros) > self.micro:
            log.warning(
                "a step of %d pairs on %d processes needs a micro-batch of %d pairs instead of %d",
                pairs,
                ranks,
                ceil(share / micros),
                self.micro,
            )
        return micros

    def split_step(self, step: Sequence[int], micros: int, ranks: int) -> RankBatches:
        """Splits a step into consecutive shares per rank, and each share into ``micros`` micro-batches."""
        return [
            [tuple(step[share.start + i] for i in part) for part in split_evenly(len(share), micros)]
            for share in split_evenly(len(step), ranks)
        ]


@dataclass(frozen=True)
class BatchByTokens:
    """Groups pairs of similar length into micro-batches of at most ``budget`` tokens.

    The pairs of a step are sorted by size, longest first (ties in step order), and split so that the largest
    micro-batch is as small as possible. ``sizes``: number of input tokens of each pair. ``key``: config key that sets
    the budget.
    """

    sizes: Sequence[int] | Mapping[int, int] = field(repr=False)
    cost: RowCost
    budget: int
    key: str = "batch.tokens"

    @property
    def description(self) -> str:
        """Returns a description of the rule; equal descriptions mean equal micro-batches."""
        return f"at most {self.budget} tokens of {self.cost.name} rows"

    def batch_tokens(self, part: Sequence[int]) -> int:
        """Returns the number of input tokens of the given pairs in one forward pass."""
        return self.cost.batch_cost([self.sizes[i] for i in part])

    def num_micro_batches(self, steps: Iterable[Sequence[int]], pairs: int, ranks: int, *, short: bool = False) -> int:
        """Returns the number of micro-batches per rank for ``steps`` of ``pairs`` pairs each.

        This is the smallest number that keeps all steps within the budget; it is 0 if there are no steps. If ``short``
        is set, the steps are the short last steps of epochs: the number is then limited to the pairs per rank, and a
        warning is logged if a step may exceed the budget.

        Raises:
            UserError: steps of full size need more micro-batches than there are pairs.
        """
        micros = max((self.min_micro_batches(step, ranks) for step in steps), default=0)
        if short and micros * ranks > pairs:
            log.warning(
                "the final step has only %d pairs across %d processes, so a forward pass may exceed %s=%d tokens",
                pairs,
                ranks,
                self.key,
                self.budget,
            )
            return pairs // ranks
        if micros * ranks > pairs:
            raise UserError(
                f"{self.key}={self.budget}: a step of {pairs} pairs on {ranks} processes needs {micros} forward "
                f"passes on each, so some of the {micros * ranks} would be empty; raise {self.key}, or use a number of "
                f"processes that divides {pairs}"
            )
        return micros

    def min_micro_batches(self, step: Sequence[int], ranks: int) -> int:
        """Returns the smallest number of micro-batches per rank that keeps one step within the budget."""
        return ceil(len(fill_greedily(self._sorted_sizes(step), self.cost, self.budget)) / ranks)

    def split_step(self, step: Sequence[int], micros: int, ranks: int) -> RankBatches:
        """Splits a step into ``micros`` micro-batches per rank with similar totals, longest pairs first.

        Raises:
            ValueError: the step exceeds the budget with ``micros`` micro-batches because ``num_micro_batches`` was
                called without this step.
        """
        hands = self.split_ignoring_budget(step, micros, ranks)
        most = max(self.batch_tokens(part) for hand in hands for part in hand)
        if most > self.budget and (micros + 1) * ranks <= len(step):
            raise ValueError(
                f"{micros} micro-batches on {ranks} ranks need {most} tokens, above the budget {self.budget}"
            )
        return hands

    def split_ignoring_budget(self, step: Sequence[int], micros: int, ranks: int) -> RankBatches:
        """Splits a step as ``split_step`` does, but without checking the budget."""
        line = sorted(step, key=lambda i: -self.sizes[i])
        parts = [
            tuple(line[i] for i in part)
            for part in partition_by_cost(self._sorted_sizes(step), micros * ranks, self.cost)
        ]
        return [
            [parts[i] for i in hand] for hand in assign_to_ranks([self.batch_tokens(part) for part in parts], ranks)
        ]

    def _sorted_sizes(self, step: Sequence[int]) -> list[int]:
        return sorted((self.sizes[i] for i in step), reverse=True)


BatchRule = BatchByCount | BatchByTokens
"""Rule that divides a run's steps into micro-batches."""


# ------------------------------------------------------------------------------------------------ token budget


def count_pair_tokens(examples: Sequence[TrainingExample], cost: RowCost) -> list[int]:
    """Returns the number of input tokens of each pair when it is batched alone."""
    sizes = count_row_tokens(examples)
    once = sizes.prompts[0] * sizes.shared if cost.shared else 0
    counts = len(SIDES) * sizes.longest_branch if cost.padded else sizes.branch_tokens.sum(axis=0) - once
    return [int(count) for count in counts]


def check_token_budget(examples: Sequence[TrainingExample], cost: RowCost, budget: int | None, key: str) -> None:
    """Checks that the longest pair fits the token budget, which is set by the config key ``key``.

    Raises:
        UserError: the longest pair exceeds the budget.
    """
    if budget is None or not examples:
        return
    costs = count_pair_tokens(examples, cost)
    if (needed := max(costs)) > budget:
        raise UserError(
            f"{key}={budget} is too small for the longest pair: pair {examples[costs.index(needed)].pair_id} has "
            f"{needed} tokens in {cost.name} rows; raise {key} to at least {needed}, or lower lengths.max_length"
        )
