"""Collates training examples into batches: builds the padded rows of a ``PreferenceBatch``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnpo.schema import EncodedResponse, ModelInputs, PreferenceBatch, RowGroup

Layout = Callable[
    [Sequence[tuple[Sequence[int], Sequence[int]]], int],
    tuple[ModelInputs, Int[Tensor, "rows R"], Bool[Tensor, "rows R"]],
]
"""Function from rows of (prompt ids, response ids) and a padding id to model inputs, response ids and response mask."""


@dataclass(frozen=True)
class TrainingExample:
    """Truncated pair for training, with a weight for each response token.

    ``weights``: token weights of both responses (Float["m"] each). ``lengths``: |y| of both responses as counted by the
    weight source. ``coverage``: share of content tokens that match a source token. ``source_coverage``: share of the
    source's tokens whose weight reached training tokens. ``kept_mass``: share of the source's total weight that reached
    training tokens. ``reference_logps``: float32 log-probability of each token under the reference. ``factors``:
    whether the weights are plain factors rather than a distribution.
    """

    pair_id: str
    chosen: EncodedResponse
    rejected: EncodedResponse
    weights: tuple[Float[Tensor, " m"], Float[Tensor, " k"]]
    lengths: tuple[float, float]
    coverage: tuple[float, float]
    pair_weight: float = 1.0
    reference_logps: tuple[Float[Tensor, " m"], Float[Tensor, " k"]] | None = None
    factors: bool = False
    source_coverage: tuple[float, float] = (1.0, 1.0)
    kept_mass: tuple[float, float] = (1.0, 1.0)

    @property
    def sides(self) -> tuple[EncodedResponse, EncodedResponse]:
        """Returns the chosen and the rejected response."""
        return self.chosen, self.rejected

    @property
    def weight_scales(self) -> tuple[float, float]:
        """Returns, per side, the factor that makes uniform weights equal 1: |y| for a distribution, 1 for factors."""
        return (1.0, 1.0) if self.factors else self.lengths

    @property
    def longest_branch(self) -> int:
        """Returns the token count of the longer branch, prompt included."""
        return max(len(side.prompt_ids) + len(side.response_ids) for side in self.sides)


def pad_rows(rows: Sequence[Float[Tensor, " _"]], width: int) -> Float[Tensor, "rows R"]:
    """Stacks rows of different lengths into one tensor, right-padded with zeros, in the dtype of the first row."""
    out = torch.zeros(len(rows), width, dtype=rows[0].dtype)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out


def collate(
    examples: Sequence[TrainingExample],
    layout: Layout,
    pad_id: int,
    step_pairs: int,
    step_tokens: tuple[int, int] = (0, 0),
) -> PreferenceBatch:
    """Builds the batch of ``examples``: all chosen rows, then all rejected rows in the same pair order.

    Args:
        examples: P pairs, at least one. All or none must have reference log-probabilities; all or none must have
            factors.
        layout: a function from ``models.layouts``.
        pad_id: token id for padding positions of the model inputs.
        step_pairs: number of pairs in the whole optimizer step over all ranks, which normalizes the loss.
        step_tokens: token counts of the chosen and of the rejected responses in the whole step.
    """
    sides = [example.chosen for example in examples] + [example.rejected for example in examples]
    inputs, response_ids, response_mask = layout([(side.prompt_ids, side.response_ids) for side in sides], pad_id)
    width = response_ids.shape[1]
    weights = [example.weights[0] for example in examples] + [example.weights[1] for example in examples]
    lengths = [example.lengths[0] for example in examples] + [example.lengths[1] for example in examples]
    stored = [example.reference_logps for example in examples if example.reference_logps is not None]
    logps = [pair[0] for pair in stored] + [pair[1] for pair in stored]
    rows = RowGroup(
        response_ids=response_ids,
        response_mask=response_mask,
        token_weights={"reward": pad_rows(weights, width)},
        source_lengths=torch.tensor(lengths, dtype=torch.float32),
        reference_logps=pad_rows(logps, width) if len(stored) == len(examples) else None,
        inputs=inputs,
        factors=examples[0].factors,
    )
    return PreferenceBatch(
        groups={"main": rows},
        pair_weight=torch.tensor([example.pair_weight for example in examples], dtype=torch.float32),
        pair_ids=tuple(example.pair_id for example in examples),
        step_pairs=step_pairs,
        step_tokens=step_tokens,
    )


def make_unweighted_rows(
    sequences: Sequence[tuple[Sequence[int], Sequence[int]]], layout: Layout, pad_id: int
) -> RowGroup:
    """Builds rows from (prompt ids, response ids), with zero weights and without reference log-probabilities."""
    inputs, response_ids, response_mask = layout(sequences, pad_id)
    return RowGroup(
        response_ids=response_ids,
        response_mask=response_mask,
        token_weights={"reward": torch.zeros(response_mask.shape)},
        source_lengths=response_mask.sum(-1).float(),
        reference_logps=None,
        inputs=inputs,
    )
