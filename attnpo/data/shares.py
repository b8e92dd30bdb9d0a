"""Tables shared out between training and validation, so that all pairs of one prompt stay on one side."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from attnpo.data.adapters import Columns, RowProblem, adapt
from attnpo.schema import UserError, digest


@dataclass(frozen=True)
class Shares:
    """The numbers of the rows on either side, in their order, and how many different prompts each side has."""

    train: list[int]
    val: list[int]
    train_prompts: int
    val_prompts: int


def share_out(prompts: Sequence[str | None], share: float, where: str) -> Shares:
    """Puts ``share`` of the different prompts aside for validation, rounded, one at least on either side.

    ``prompts`` are those of the rows (``prompts_of``). Those with the smallest digests are taken, so the order of the
    rows moves none. Rows that are no pair stay with training, where they are counted.

    Raises:
        UserError: fewer than two different prompts; ``where`` names the data.
    """
    different = sorted({prompt for prompt in prompts if prompt is not None})
    if len(different) < 2:
        raise UserError(
            f"{where}: data.val_share={share} shares out whole prompts, and its {len(prompts)} rows have "
            f"{len(different)} usable: give data of more prompts, or a file of its own for validation"
        )
    count = min(max(round(share * len(different)), 1), len(different) - 1)
    aside = set(different[:count])
    val = [number for number, prompt in enumerate(prompts) if prompt in aside]
    train = [number for number, prompt in enumerate(prompts) if prompt not in aside]
    return Shares(train, val, len(different) - count, count)


def prompts_of(rows: Iterable[Mapping[str, object]], columns: Columns) -> list[str | None]:
    """Returns the digest of all messages of each row's prompt; None for a row that is no pair."""
    return [_prompt(row, columns) for row in rows]


def _prompt(row: Mapping[str, object], columns: Columns) -> str | None:
    try:
        return digest([[turn["role"], turn["content"]] for turn in adapt(row, columns).pair.prompt])
    except RowProblem:
        return None
