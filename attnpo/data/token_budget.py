"""What pairs cost in tokens, and whether a budget of tokens holds the longest of them."""

from collections.abc import Sequence

from attnpo.data.collate import TrainingExample
from attnpo.data.micro_batches import RowCost
from attnpo.schema import UserError


def cost_of(example: TrainingExample, cost: RowCost) -> int:
    """Tokens of a pair taken alone."""
    return cost.of([(side.prompt_ids, side.response_ids) for side in example.sides])


def require_room(examples: Sequence[TrainingExample], cost: RowCost, budget: int | None, key: str) -> None:
    """Raises UserError for a budget of tokens, given as ``key``, that is below the longest pair."""
    if budget is None or not examples:
        return
    longest = max(examples, key=lambda example: cost_of(example, cost))
    if (needed := cost_of(longest, cost)) > budget:
        raise UserError(
            f"{key} must hold the longest pair: expected at least {needed}, the tokens of pair {longest.pair_id} as "
            f"{cost.name} rows, got {budget}; raise {key}, or lower lengths.max_length"
        )
