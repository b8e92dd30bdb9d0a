"""What pairs cost in tokens, and whether a budget of tokens holds the longest of them."""

from collections.abc import Sequence

from attnpo.data.arrow_rows import sizes_of
from attnpo.data.collate import TrainingExample
from attnpo.data.micro_batches import RowCost
from attnpo.schema import SIDES, UserError


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
