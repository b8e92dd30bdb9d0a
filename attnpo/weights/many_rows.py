"""Weights of many responses at once: what ``postprocess`` and ``text.alignment`` do for one, by arrays.

The rows of a chunk stand one behind the other in flat arrays. Only what is the same for every order of additions is
computed on these; sums of a row are torch's own, so that each number is, to the bit, the one that its response gets by
itself. A response that needs more than this (rounds on other tokens, tokens without an equal partner, a weight that is
refused) comes back as None and is left to the way for one.
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


class _Rows:
    """Where rows of ``counts`` items stand in a flat array."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.sizes = list(counts)
        self.counts = np.array(counts, dtype=np.int64)
        self.ends = np.cumsum(self.counts)
        self.starts = self.ends - self.counts
        self.owner = np.repeat(np.arange(len(counts)), self.counts)
        self.place = np.arange(len(self.owner)) - self.starts[self.owner]

    def sums(self, values: Floats) -> Floats:
        """Returns each row's sum, added in torch's order."""
        parts = torch.from_numpy(values).split_with_sizes(self.sizes)
        return np.array([float(part.sum()) for part in parts], dtype=np.float64)

    def numbers(self, marked: NDArray[np.bool_]) -> Ints:
        """Returns how many items of each row are marked."""
        return np.bincount(self.owner[marked], minlength=len(self.counts))

    def first(self, limits: Ints) -> Ints:
        """Returns where the first items of each row stand, as many as ``limits`` says."""
        return np.flatnonzero(self.place < limits[self.owner])

    def of(self, row: int) -> slice:
        """Returns where a row's items stand."""
        return slice(self.starts[row], self.ends[row])


def distributions(
    rule: Postprocess, responses: Sequence[Sequence[TokenWeights]]
) -> list[tuple[Float[Tensor, " _"], bool] | None]:
    """Returns what ``rule`` makes of each response's rounds, one or two on the same tokens, and if it is flat."""
    found: list[tuple[Tensor, bool] | None] = [None] * len(responses)
    for rounds in (1, 2):
        places = [place for place, parts in enumerate(responses) if len(parts) == rounds and _is_plain(parts)]
        rows = [[responses[place][order] for place in places] for order in range(rounds)]
        for place, made in zip(places, _distributions(rule, rows) if places else [], strict=True):
            found[place] = made
    return found


def _is_plain(parts: Sequence[TokenWeights]) -> bool:
    count = parts[0].token_ids.numel()
    return count > 0 and all(part.token_ids.numel() == count and part.weights.shape == (1, count) for part in parts)


def _distributions(
    rule: Postprocess, rounds: Sequence[Sequence[TokenWeights]]
) -> list[tuple[Float[Tensor, " _"], bool] | None]:
    """Returns the same for rounds of equal lengths; ``rounds`` has all rows of the first one, then the next's."""
    rows = _Rows([part.token_ids.numel() for part in rounds[0]])
    raw = [torch.cat([part.weights for part in parts], dim=1)[0].double().numpy() for parts in rounds]
    ids = [torch.cat([part.token_ids for part in parts]).numpy() for parts in rounds]
    highest = [np.maximum.reduceat(row, rows.starts) for row in raw]
    sound = np.ones(len(rows.counts), dtype=np.bool_)
    for row, high, other in zip(raw, highest, ids, strict=True):
        sound &= (np.minimum.reduceat(row, rows.starts) >= 0) & (high < np.inf)
        sound[rows.owner[other != ids[0]]] = False
    if not sound.all():
        kept = np.flatnonzero(sound).tolist()
        made = _distributions(rule, [[parts[place] for place in kept] for parts in rounds]) if kept else []
        found: list[tuple[Tensor, bool] | None] = [None] * len(sound)
        for place, one in zip(kept, made, strict=True):
            found[place] = one
        return found
    if rule.round_order is RoundOrder.NORMALIZE_THEN_MEAN:
        weights = _mean([_normalize(row, rows) for row in raw])
        flat = np.any([high == 0 for high in highest], axis=0)
    else:
        weights = _normalize(_mean(raw), rows)
        flat = np.all([high == 0 for high in highest], axis=0)
    weights = _fix_sink(weights, rows, rule.sink_tokens, rule.sink_min_length)
    return list(zip(torch.from_numpy(weights).split_with_sizes(rows.sizes), flat.tolist(), strict=True))


def _mean(rounds: Sequence[Floats]) -> Floats:
    return sum(rounds, np.zeros(1)) / len(rounds)  # from +0, so that -0 becomes it as in torch


def _normalize(weights: Floats, rows: _Rows) -> Floats:
    """Returns ``postprocess.normalize`` of each row."""
    high = np.maximum.reduceat(weights, rows.starts)
    flat = high == 0
    scaled = weights / np.where(flat, 1.0, high)[rows.owner]
    shares = scaled / np.where(flat, 1.0, rows.sums(scaled))[rows.owner]
    return np.where(flat[rows.owner], (1.0 / rows.counts)[rows.owner], shares) if flat.any() else shares


def _fix_sink(weights: Floats, rows: _Rows, first: int, least: int) -> Floats:
    """Returns ``postprocess.fix_sink`` of each row."""
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


class Landed(NamedTuple):
    """One response's weights on its training tokens; the numbers are those of ``pipeline.TrainingWeights``."""

    weights: Float[Tensor, " m"]
    length: float
    source_coverage: float
    kept_mass: float
    content: int
    partnered: int

    @property
    def coverage(self) -> float:
        """Returns the share of the tokens that had to get a partner and did."""
        return self.partnered / self.content if self.content else 1.0


def carry(
    responses: Sequence[tuple[TokenWeights, Float[Tensor, " _"], Bool[Tensor, " _"] | None]],
    encoded: Sequence[EncodedResponse],
    method: AlignMethod,
    end_is_mean: bool,
) -> list[Landed | None]:
    """Returns weights on the training tokens of responses whose tokens are alike to the end of the shorter side.

    Of each response: its tokens and their type, their weights, and about which of them something was said (None: all).
    Tokens without a character get 1/n of n source tokens if ``end_is_mean``, else 0.
    """
    fits = [
        row.token_ids.numel() == len(row.offsets) == len(weights) and len(onto.response_ids) == len(onto.offsets)
        for (row, weights, _), onto in zip(responses, encoded, strict=True)
    ]
    if not all(fits) or not responses:
        return [None] * len(responses)
    source = _Rows([row.token_ids.numel() for row, _, _ in responses])
    target = _Rows([len(onto.response_ids) for onto in encoded])
    shared = np.minimum(source.counts, target.counts)
    givers, receivers = source.first(shared), target.first(shared)
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
                shared[row], rest = match_equal_ids(ours[source.of(row)].tolist(), encoded[row].response_ids)
                begin = np.array([source.starts[row], target.starts[row]])
                pairs.append(np.array(rest, dtype=np.int64).reshape(-1, 2) + begin)
            behind = np.concatenate(pairs).T
            givers = np.concatenate([source.first(shared), behind[0]])
            receivers = np.concatenate([target.first(shared), behind[1]])

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
    tokens, content, partnered = source.numbers(arrived > 0), target.numbers(holds), target.numbers(matched)
    masses = weights.abs().split_with_sizes(source.sizes)
    found: list[Landed | None] = [None] * len(responses)
    for place, (mass, got) in enumerate(
        zip(masses, torch.from_numpy(arrived).split_with_sizes(source.sizes), strict=True)
    ):
        if not alone[place]:
            found[place] = Landed(
                rows[place].to(responses[place][0].weights.dtype, copy=True),
                float(source.sizes[place]),
                int(tokens[place]) / source.sizes[place] if source.sizes[place] else 1.0,
                kept_share(mass, got),
                int(content[place]),
                int(partnered[place]),
            )
    return found
