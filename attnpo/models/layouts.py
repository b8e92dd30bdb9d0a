"""Arranges prompts and responses as model inputs, with the positions that predict the response tokens.

A layout returns ``ModelInputs`` with a ``predict_index``, the map from response space (rows x R) to the model's hidden
states. All layouts produce the same results up to rounding; ``trial`` finds out which ones a model supports.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from attnpo.schema import ModelInputs, UserError

log = logging.getLogger(__name__)

Sequences = Sequence[tuple[Sequence[int], Sequence[int]]]
"""(prompt ids, response ids) per row."""


class LayoutOutput(NamedTuple):
    """Model inputs, with the ids and mask of the response tokens to score, in response space."""

    inputs: ModelInputs
    response_ids: Int[Tensor, "rows R"]
    response_mask: Bool[Tensor, "rows R"]


Layout = Callable[[Sequences, int], LayoutOutput]
"""Function from (sequences, padding id) to model inputs with their response tokens."""


def padded_layout(sequences: Sequences, pad_id: int) -> LayoutOutput:
    """Lays out one right-padded row per (prompt ids, response ids); every model supports this layout.

    ``position_ids`` continue through the padding, so that no library mistakes it for a second packed sequence.
    ``predict_index[i, t]`` is the flat index (into batch*T) of the position before response token t. Outside the
    ``response_mask``, ``predict_index`` is 0 and ``response_ids`` is ``pad_id``. Raises ``UserError`` if there are no
    sequences or a prompt is empty.
    """
    check_rows(sequences)
    input_ids, mask = right_pad([[*prompt, *response] for prompt, response in sequences], pad_id)
    rows, width = input_ids.shape
    starts = [row * width + len(prompt) for row, (prompt, _) in enumerate(sequences)]
    response_ids, response_mask = right_pad([response for _, response in sequences], pad_id)
    inputs = ModelInputs(
        input_ids=input_ids,
        position_ids=torch.arange(width).repeat(rows, 1),
        attention_mask=mask.long(),
        predict_index=_predict_index(sequences, [start - 1 for start in starts], starts),
        scored=response_mask.nonzero(),
    )
    return LayoutOutput(inputs, response_ids, response_mask)


def packed_layout(sequences: Sequences, pad_id: int) -> LayoutOutput:
    """Lays out all sequences in one row; positions restart for each. Raises ``UserError`` like ``padded_layout``."""
    return _pack_into_one_row(sequences, pad_id, 0)


def shared_prefix_layout(sequences: Sequences, pad_id: int) -> LayoutOutput:
    """Lays out pairs in one row without padding: the prompt once, then the chosen and the rejected response.

    Rows i and P+i (of 2P rows) form a pair. The rejected response attends to the prompt and to itself, and its
    positions continue after the prompt. Pairs with different prompts become two sequences. Raises ``UserError`` like
    ``padded_layout``.
    """
    return _pack_into_one_row(sequences, pad_id, len(sequences) // 2 if len(sequences) % 2 == 0 else 0)


LAYOUTS: dict[str, Layout] = {"padded": padded_layout, "packed": packed_layout, "shared_prefix": shared_prefix_layout}
NAMES = ("auto", *LAYOUTS)


def check_rows(sequences: Sequences) -> None:
    """Raises ``UserError`` if there are no sequences or a prompt is empty."""
    if not sequences:
        raise UserError("a batch needs at least one sequence, got none: check the sampler's batch size")
    for row, (prompt, _) in enumerate(sequences):
        if len(prompt) == 0:
            raise UserError(
                f"row {row}: the prompt has no tokens, so nothing predicts the first response token: add at least a "
                "beginning-of-sequence token to the chat template, or drop the row"
            )


def _pack_into_one_row(sequences: Sequences, pad_id: int, pairs: int) -> LayoutOutput:
    """Packs all sequences into one row; unless ``pairs`` is 0, rows i and ``pairs``+i share a common prompt."""
    check_rows(sequences)
    ids: list[int] = []
    positions: list[int] = []
    segments: list[tuple[int, int, int, int]] = []
    before, starts = [0] * len(sequences), [0] * len(sequences)
    order = list(_row_order(sequences, pairs))
    for row, prefix in order:
        prompt, response = sequences[row]
        stretch = response if prefix is not None else [*prompt, *response]
        shared = len(prompt) if prefix is not None else 0
        first, begin = len(ids), len(ids) if prefix is None else before[prefix] - len(prompt) + 1
        segments.append((first, len(stretch), begin if shared else 0, shared))
        before[row] = begin + len(prompt) - 1
        starts[row] = first + len(prompt) - shared
        ids += stretch
        positions += range(shared, shared + len(stretch))
    response_ids, response_mask = right_pad([response for _, response in sequences], pad_id)
    inputs = ModelInputs(
        input_ids=torch.tensor([ids], dtype=torch.long),
        position_ids=torch.tensor([positions], dtype=torch.long),
        attention_mask=None,
        predict_index=_predict_index(sequences, before, starts),
        segments=torch.tensor(segments, dtype=torch.long),
        segment_rows=torch.tensor([row for row, _ in order]),
        scored=response_mask.nonzero(),
    )
    return LayoutOutput(inputs, response_ids, response_mask)


def _row_order(sequences: Sequences, pairs: int) -> Iterator[tuple[int, int | None]]:
    """Yields the rows in packing order, each with the earlier row whose prompt it shares, or None."""
    for row in range(pairs or len(sequences)):
        yield row, None
        if pairs:
            same = list(sequences[row][0]) == list(sequences[pairs + row][0])
            if not same:
                _log_unshared_prompts()
            yield pairs + row, row if same else None


@cache
def _log_unshared_prompts() -> None:
    log.info(
        "layout shared_prefix: the prompts of some pairs differ because each branch is truncated separately; these "
        "pairs are packed as two sequences"
    )


def _predict_index(sequences: Sequences, before: Sequence[int], starts: Sequence[int]) -> Int[Tensor, "rows R"]:
    """Returns the flat index of the state that predicts each token: ``before`` for the first, then the previous."""
    index = torch.zeros(len(sequences), max(len(response) for _, response in sequences), dtype=torch.long)
    for row, (_, response) in enumerate(sequences):
        count = len(response)
        index[row, :count] = torch.arange(starts[row] - 1, starts[row] - 1 + count)
        index[row, : min(count, 1)] = before[row]
    return index


def right_pad(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Int[Tensor, "rows T"], Bool[Tensor, "rows T"]]:
    """Pads rows of ids on the right; returns the ids and a mask that is false on padding."""
    each = [torch.tensor(list(row), dtype=torch.long) for row in rows]
    mask = pad_sequence([torch.ones_like(ids, dtype=torch.bool) for ids in each], batch_first=True)
    return pad_sequence(each, batch_first=True, padding_value=pad_id), mask
