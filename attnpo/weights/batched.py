"""Batched versions of ``postprocess`` and ``text.alignment`` that process many responses at once.

The rows of a chunk are concatenated in flat arrays. Only operations that do not depend on the order of addition run on
these arrays, and torch sums each row separately. The results are therefore bit-identical to processing each response on
its own. Responses that need more work (rounds on different tokens, tokens without an identical counterpart, invalid
weights) are returned as None; the caller handles them one by one.
"""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from attnpo.schema import EncodedResponse, TokenWeights
from attnpo.text.alignment import AlignMethod, match_equal_ids
from attnpo.text.ranges import as_array
from attnpo.weights.arrival import kept_share
from attnpo.weights.postprocess import Postprocess, RoundOrder

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class _FlatRows:
    """Layout of rows in a flat array; ``counts``: number of items in each row."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.sizes = list(counts)
        self.counts = np.array(counts, dtype=np.int64)
        self.ends = np.cumsum(self.counts)
        self.starts = self.ends - self.counts
        self.owner = np.repeat(np.arange(len(counts)), self.counts)
        self.place = np.arange(len(self.owner)) - self.starts[self.owner]

    def row_sums(self, values: Floats) -> Floats:
        """Returns the sum of each row, adding in the same order as torch."""
        parts = torch.from_numpy(values).split_with_sizes(self.sizes)
        return np.array([float(part.sum()) for part in parts], dtype=np.float64)

    def count_marked(self, marked: NDArray[np.bool_]) -> Ints:
        """Returns the number of marked items in each row."""
        return np.bincount(self.owner[marked], minlength=len(self.counts))

    def first_items(self, limits: Ints) -> Ints:
        """Returns the indices of the first ``limits`` items of each row."""
        return np.flatnonzero(self.place < limits[self.owner])

    def row_slice(self, row: int) -> slice:
        """Returns the slice of a row in the flat array."""
        return slice(self.starts[row], self.ends[row])


def postprocess_responses(
    rule: Postprocess, responses: Sequence[Sequence[TokenWeights]]
) -> list[tuple[Float[Tensor, " _"], bool] | None]:
    """Applies ``rule`` to each response's rounds; returns the weights, and whether the raw weights were all 0.

    Only responses with one or two rounds on the same tokens are handled; all others yield None.
    """
    found: list[tuple[Tensor, bool] | None] = [None] * len(responses)
    for rounds in (1, 2):
        places = [place for place, parts in enumerate(responses) if len(parts) == rounds and _is_plain(parts)]
        rows = [[responses[place][order] for place in places] for order in range(rounds)]
        for place, made in zip(places, _postprocess_rounds(rule, rows) if places else [], strict=True):
            found[place] = made
    return found


def _is_plain(parts: Sequence[TokenWeights]) -> bool:
    count = parts[0].token_ids.numel()
    return count > 0 and all(part.token_ids.numel() == count and part.weights.shape == (1, count) for part in parts)


def _postprocess_rounds(
    rule: Postprocess, rounds: Sequence[Sequence[TokenWeights]]
) -> list[tuple[Float[Tensor, " _"], bool] | None]:
    """Applies ``rule`` to rounds of equal length. ``rounds[0]`` has the rows of the first round, and so on."""
    rows = _FlatRows([part.token_ids.numel() for part in rounds[0]])
    raw = [torch.cat([part.weights for part in parts], dim=1)[0].double().numpy() for parts in rounds]
    ids = [torch.cat([part.token_ids for part in parts]).numpy() for parts in rounds]
    highest = [np.maximum.reduceat(row, rows.starts) for row in raw]
    sound = np.ones(len(rows.counts), dtype=np.bool_)
    for row, high, other in zip(raw, highest, ids, strict=True):
        sound &= (np.minimum.reduceat(row, rows.starts) >= 0) & (high < np.inf)
        sound[rows.owner[other != ids[0]]] = False
    if not sound.all():
        kept = np.flatnonzero(sound).tolist()
        made = _postprocess_rounds(rule, [[parts[place] for place in kept] for parts in rounds]) if kept else []
        found: list[tuple[Tensor, bool] | None] = [None] * len(sound)
        for place, one in zip(kept, made, strict=True):
            found[place] = one
        return found
    if rule.round_order is RoundOrder.NORMALIZE_THEN_MEAN:
        weights = _mean_of_rounds([_normalize_rows(row, rows) for row in raw])
        flat = np.any([high == 0 for high in highest], axis=0)
    else:
        weights = _normalize_rows(_mean_of_rounds(raw), rows)
        flat = np.all([high == 0 for high in highest], axis=0)
    weights = _fix_sinks(weights, rows, rule.sink_tokens, rule.sink_min_length)
    return list(zip(torch.from_numpy(weights).split_with_sizes(rows.sizes), flat.tolist(), strict=True))


def _mean_of_rounds(rounds: Sequence[Floats]) -> Floats:
    return sum(rounds, np.zeros(1)) / len(rounds)  # from +0, so that -0 becomes it as in torch


def _normalize_rows(weights: Floats, rows: _FlatRows) -> Floats:
    """Applies ``postprocess.normalize`` to each row."""
    high = np.maximum.reduceat(weights, rows.starts)
    flat = high == 0
    scaled = weights / np.where(flat, 1.0, high)[rows.owner]
    shares = scaled / np.where(flat, 1.0, rows.row_sums(scaled))[rows.owner]
    return np.where(flat[rows.owner], (1.0 / rows.counts)[rows.owner], shares) if flat.any() else shares


def _fix_sinks(weights: Floats, rows: _FlatRows, first: int, least: int) -> Floats:
    """Applies ``postprocess.fix_sink`` to each row."""
    long = rows.counts >= least
    if first <= 0 or not long.any():
        return weights
    heads = np.minimum(first, rows.counts)
    parts = torch.from_numpy(weights).split_with_sizes(rows.sizes)
    total, rest = np.array([(float(part.sum()), float(part[first:].sum())) for part in parts], dtype=np.float64).T
    mean = total / rows.counts
    tail = weights / np.where(rest > 0, rest, 1.0)[rows.owner] * (mean * (rows.counts - heads))[rows.owner]
    is_mean = ~(rest > 0)[rows.owner] | (rows.place < heads[rows.owner])
    return np.where(long[rows.owner], np.where(is_mean, mean[rows.owner], tail), weights)


class AlignedResponse(NamedTuple):
    """Weights of one response on its training tokens; the fields are defined in ``pipeline.TrainingWeights``."""

    weights: Float[Tensor, " m"]
    length: float
    source_coverage: float
    kept_mass: float
    content: int
    partnered: int

    @property
    def coverage(self) -> float:
        """Returns the share of text tokens that have a counterpart; 1 if there are no text tokens."""
        return self.partnered / self.content if self.content else 1.0


def align_responses(
    responses: Sequence[tuple[TokenWeights, Float[Tensor, " _"], Bool[Tensor, " _"] | None]],
    encoded: Sequence[EncodedResponse],
    method: AlignMethod,
    end_is_mean: bool,
) -> list[AlignedResponse | None]:
    """Aligns weights with the training tokens if both tokenizations agree up to the end of the shorter one.

    Each item of ``responses`` consists of the source tokens, their weights, and a mask of the tokens that have a weight
    (None if all have one). Training tokens that contain no response text get 1/n if ``end_is_mean`` (n is the number of
    source tokens), else 0.
    """
    fits = [
        row.token_ids.numel() == len(row.offsets) == len(weights) and len(onto.response_ids) == len(onto.offsets)
        for (row, weights, _), onto in zip(responses, encoded, strict=True)
    ]
    if not all(fits) or not responses:
        return [None] * len(responses)
    source = _FlatRows([row.token_ids.numel() for row, _, _ in responses])
    target = _FlatRows([len(onto.response_ids) for onto in encoded])
    shared = np.minimum(source.counts, target.counts)
    givers, receivers = source.first_items(shared), target.first_items(shared)
    ours = torch.cat([row.token_ids for row, _, _ in responses]).numpy()
    theirs = np.fromiter(chain.from_iterable(onto.response_ids for onto in encoded), np.int64, len(target.owner))
    differs = ours[givers] != theirs[receivers]
    places = np.concatenate([as_array(onto.offsets) for onto in encoded])
    holds = places[:, 1] > places[:, 0]
    if method is AlignMethod.CHARACTERS:
        offsets = torch.cat([row.offsets for row, _, _ in responses]).numpy()
        differs |= (offsets[givers] != places[receivers]).any(axis=1)
        alone = source.counts > target.counts
        alone[source.owner[givers[differs]]] = True
    else:
        alone = np.zeros(len(encoded), dtype=np.bool_)
        edited = np.unique(source.owner[givers[differs]])
        if edited.size:
            pairs = [np.zeros((0, 2), dtype=np.int64)]
            for row in edited.tolist():
                shared[row], rest = match_equal_ids(ours[source.row_slice(row)].tolist(), encoded[row].response_ids)
                begin = np.array([source.starts[row], target.starts[row]])
                pairs.append(np.array(rest, dtype=np.int64).reshape(-1, 2) + begin)
            behind = np.concatenate(pairs).T
            givers = np.concatenate([source.first_items(shared), behind[0]])
            receivers = np.concatenate([target.first_items(shared), behind[1]])

    weights = torch.cat([one for _, one, _ in responses])
    moved, matched, arrived = np.zeros(len(holds)), np.zeros(len(holds), np.bool_), np.zeros(len(ours))
    moved[receivers] = weights.numpy()[givers]
    matched[receivers] = True
    if responses[0][2] is not None:
        matched[receivers] = torch.cat([one for _, _, one in responses if one is not None]).numpy()[givers]
    matched &= holds
    arrived[givers] = holds[receivers]
    ends = (1.0 / source.counts)[target.owner] if end_is_mean else 0.0
    rows = torch.from_numpy(np.where(holds, moved, ends)).split_with_sizes(target.sizes)
    tokens, content, partnered = (
        source.count_marked(arrived > 0),
        target.count_marked(holds),
        target.count_marked(matched),
    )
    masses = weights.abs().split_with_sizes(source.sizes)
    found: list[AlignedResponse | None] = [None] * len(responses)
    for place, (mass, got) in enumerate(
        zip(masses, torch.from_numpy(arrived).split_with_sizes(source.sizes), strict=True)
    ):
        if not alone[place]:
            found[place] = AlignedResponse(
                rows[place].to(responses[place][0].weights.dtype, copy=True),
                float(source.sizes[place]),
                int(tokens[place]) / source.sizes[place] if source.sizes[place] else 1.0,
                kept_share(mass, got),
                int(content[place]),
                int(partnered[place]),
            )
    return found
