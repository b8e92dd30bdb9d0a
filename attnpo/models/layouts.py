"""Layouts: how prompts and responses become model inputs, and where each response token is predicted.

Owns the map from response space (rows x R) to the model's hidden states. Objectives, weights and metrics never see a
prompt, a pad or a packed row: a layout gives ``ModelInputs`` with a ``predict_index``, and that is all the scored
model needs.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from attnpo.schema import ModelInputs, UserError


class Laid(NamedTuple):
    """Model inputs with the response tokens they score: ids and mask in response space."""

    inputs: ModelInputs
    response_ids: Int[Tensor, "rows R"]
    response_mask: Bool[Tensor, "rows R"]


def padded(sequences: Sequence[tuple[Sequence[int], Sequence[int]]], pad_id: int) -> Laid:
    """Inputs, response ids and response mask for one right-padded model row per (prompt ids, response ids).

    Row i of the batch is row i of response space. ``position_ids`` count on through the padding, so that no library
    takes the padding for a second packed sequence. ``predict_index[i, t]`` is the flat index (into batch*T) of the
    position before response token t: a causal model predicts a token from the state before it. Under a false
    ``response_mask`` it is 0 and ``response_ids`` holds ``pad_id``.

    Raises ``UserError`` when there is no sequence or a prompt is empty (its first response token would have no
    predicting state).
    """
    if not sequences:
        raise UserError("a batch needs at least one sequence, got none; check the sampler's batch size")
    for row, (prompt, _) in enumerate(sequences):
        if len(prompt) == 0:
            raise UserError(
                f"row {row}: the prompt has no token, so nothing predicts the first response token; give the chat "
                "template at least a beginning-of-sequence token or drop the row"
            )
    rows = len(sequences)
    width = max(len(prompt) + len(response) for prompt, response in sequences)
    span = max(len(response) for _, response in sequences)
    input_ids = torch.full((rows, width), pad_id, dtype=torch.long)
    attention_mask = torch.zeros(rows, width, dtype=torch.long)
    response_ids = torch.full((rows, span), pad_id, dtype=torch.long)
    response_mask = torch.zeros(rows, span, dtype=torch.bool)
    predict_index = torch.zeros(rows, span, dtype=torch.long)
    for row, (prompt, response) in enumerate(sequences):
        start, count = len(prompt), len(response)
        input_ids[row, : start + count] = torch.tensor([*prompt, *response], dtype=torch.long)
        attention_mask[row, : start + count] = 1
        response_ids[row, :count] = torch.tensor(list(response), dtype=torch.long)
        response_mask[row, :count] = True
        first = row * width + start - 1
        predict_index[row, :count] = torch.arange(first, first + count)
    position_ids = torch.arange(width).repeat(rows, 1)
    inputs = ModelInputs(
        input_ids=input_ids, position_ids=position_ids, attention_mask=attention_mask, predict_index=predict_index
    )
    return Laid(inputs, response_ids, response_mask)
