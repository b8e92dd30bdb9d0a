"""Moves token weights from the source's tokens to the training tokens of the same response.

There are two methods. LEVENSHTEIN is the method from the paper's appendix on token matching: each training token gets
the weight of the source token that it is matched to in an optimal edit alignment of token ids, or 0 if it has no match.
CHARACTERS needs no common vocabulary: the weight of a source token without an equal counterpart is moved to the
training tokens that cover the same characters.

Differs from the official code in that training ids are never changed (the official code prepends an unmatched judge
token to the completion).
"""

from collections import defaultdict
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import Levenshtein
import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from attnpo.text.ranges import Range, as_array

Ranges = Sequence[Range] | Int[Tensor, "_ 2"] | NDArray[np.int64]
"""Half-open character ranges, one per token."""


class AlignMethod(Enum):
    """Alignment method: an edit alignment of token ids (as in the paper), or shared characters."""

    LEVENSHTEIN = "levenshtein"
    CHARACTERS = "characters"


class AlignedWeights(NamedTuple):
    """Weights on the ``m`` training tokens of one response, with statistics of the alignment.

    ``coverage``: share of matched training tokens among those that cover characters (1.0 if no training token does).
    ``source_coverage``: share of source tokens whose weight was moved, wholly or partly (1.0 for a source without
    tokens). ``matched``: whether each training token has a match. ``arrived``: for each source token, the share of its
    weight that reached training tokens that cover characters.
    """

    weights: Float[Tensor, " m"]
    coverage: float
    source_coverage: float
    matched: Bool[Tensor, " m"]
    arrived: Float[Tensor, " n"]


def align(
    token_ids: Sequence[int] | Int[Tensor, " n"],
    offsets: Ranges,
    weights: Float[Tensor, " n"],
    target_ids: Sequence[int] | Int[Tensor, " m"],
    target_offsets: Ranges,
    method: AlignMethod = AlignMethod.LEVENSHTEIN,
) -> AlignedWeights:
    """Returns the weights of the target tokens, in the dtype and on the device of ``weights``.

    ``offsets`` and ``target_offsets`` are half-open character ranges in the same response text; LEVENSHTEIN uses only
    ``target_offsets`` (for the coverage). Weights are neither renormalised nor rescaled. LEVENSHTEIN drops the weight
    of unmatched source tokens. CHARACTERS drops the weight of characters before the first or after the last target
    token. If no target token covers a character in between (e.g. a space dropped by the tokenizer), the character's
    weight moves to the other characters of the same source token or, if no target token covers these either, to the
    preceding target tokens. Identical inputs yield bit-identical weights.

    Raises:
        ValueError: lengths do not match.
    """
    source, target = _to_ints(token_ids), _to_ints(target_ids)
    for name, ids, ranges in (("source", source, offsets), ("target", target, target_offsets)):
        if len(ids) != len(ranges):
            raise ValueError(f"{name}: {len(ids)} token ids but {len(ranges)} character ranges")
    if weights.shape != (len(source),):
        raise ValueError(f"weights have shape {tuple(weights.shape)}, expected ({len(source)},) for the source tokens")
    target_places = to_range_array(target_offsets)
    holding = target_places[:, 1] > target_places[:, 0]
    if method is AlignMethod.LEVENSHTEIN:
        moved = _move_matched(weights, *match_equal_ids(source, target), holding)
    else:
        moved = _move_by_characters(source, to_range_array(offsets), weights, target, target_places, holding)
    count = np.count_nonzero(holding)
    coverage = np.count_nonzero(moved.reached & holding) / count if count else 1.0
    return AlignedWeights(
        moved.weights,
        coverage,
        np.count_nonzero(moved.carried) / len(source) if source else 1.0,
        torch.from_numpy(moved.reached).to(weights.device),
        torch.from_numpy(moved.shares).to(weights),
    )


def mark_differing_tokens(
    first: Sequence[int], second: Sequence[int], min_match: int = 1
) -> tuple[Bool[Tensor, " n"], Bool[Tensor, " m"]]:
    """Marks the tokens of two responses that have no equal counterpart in an optimal edit alignment.

    A match counts only in a run of at least ``min_match`` matched tokens that are consecutive in both responses.
    """
    changed = torch.ones(len(first), dtype=torch.bool), torch.ones(len(second), dtype=torch.bool)
    runs: list[list[tuple[int, int]]] = []
    prefix, rest = match_equal_ids(list(first), list(second))
    for i, j in [*((place, place) for place in range(prefix)), *rest]:
        if runs and runs[-1][-1] == (i - 1, j - 1):
            runs[-1].append((i, j))
        else:
            runs.append([(i, j)])
    for run in runs:
        if len(run) >= min_match:
            changed[0][[i for i, _ in run]] = False
            changed[1][[j for _, j in run]] = False
    return changed


def _to_ints(values: Sequence[int] | Tensor) -> list[int]:
    # Levenshtein silently treats torch tensors as entirely different, so pass Python ints only.
    return values.tolist() if isinstance(values, Tensor) else list(map(int, values))


def to_range_array(values: Ranges) -> NDArray[np.int64]:
    """Converts character ranges to an array with two columns."""
    if isinstance(values, Tensor):
        return values.cpu().reshape(-1, 2).numpy()
    if isinstance(values, np.ndarray):
        return values
    return as_array(values)


class _MovedWeights(NamedTuple):
    """Target weights, the share of each source token's weight that was moved, and the target tokens it reached."""

    weights: Tensor
    carried: NDArray[np.bool_]
    shares: NDArray[np.float64]
    reached: NDArray[np.bool_]


def _move_matched(
    weights: Tensor, prefix: int, rest: Sequence[tuple[int, int]], holding: NDArray[np.bool_]
) -> _MovedWeights:
    """Moves the weight of source token i to target token j, for i = j < ``prefix`` and each (i, j) in ``rest``."""
    carried, reached = np.zeros(len(weights), dtype=np.bool_), np.zeros(len(holding), dtype=np.bool_)
    shares, moved = np.zeros(len(weights)), weights.new_zeros(len(holding))
    carried[:prefix] = reached[:prefix] = True
    shares[:prefix], moved[:prefix] = holding[:prefix], weights[:prefix]
    if rest:
        givers, receivers = np.array(rest, dtype=np.int64).T
        moved[torch.from_numpy(receivers)] = weights[torch.from_numpy(givers)]
        carried[givers] = reached[receivers] = True
        shares[givers] = holding[receivers]
    return _MovedWeights(moved, carried, shares, reached)


def _count_prefix(first: NDArray[np.int64], second: NDArray[np.int64]) -> int:
    """Returns the number of rows in the common prefix of two arrays."""
    count = min(len(first), len(second))
    differs = np.flatnonzero(first[:count] != second[:count])
    return int(differs[0]) // max(1, first[0].size) if differs.size else count


def match_equal_ids(source: list[int], target: list[int]) -> tuple[int, list[tuple[int, int]]]:
    """Matches equal ids in an optimal edit alignment.

    Returns the length of the common prefix, which is matched directly, and the matched index pairs after that prefix.

    If several alignments are optimal, the official code (package edit_distance, completion first) and this library may
    choose different ones. They agree most often with the completion first and both sequences reversed: on 418 of 600
    edited token sequences with word-like frequencies. They agree on 360 with the judge first and on 333 without
    reversing.
    """
    prefix = _count_prefix(np.array(source, dtype=np.int64), np.array(target, dtype=np.int64))
    if prefix == len(source) or prefix == len(target):
        return prefix, []
    n, m = len(source), len(target)
    rest: list[tuple[int, int]] = []
    for kind, j0, j1, i0, i1 in Levenshtein.opcodes(target[prefix:][::-1], source[prefix:][::-1]):
        if kind == "equal":
            rest.extend((n - 1 - i, m - 1 - j) for i, j in zip(range(i0, i1), range(j0, j1), strict=True))
    return prefix, rest[::-1]


def _move_by_characters(
    source: list[int],
    source_places: NDArray[np.int64],
    weights: Tensor,
    target: list[int],
    target_places: NDArray[np.int64],
    holding: NDArray[np.bool_],
) -> _MovedWeights:
    """Moves weights to tokens with equal id and range; spreads the rest over the unmatched tokens' characters."""
    direct = _move_matched(weights, *_match_equal_tokens(source, source_places, target, target_places), holding)
    reached = direct.reached
    rest = np.flatnonzero(~direct.carried & (source_places[:, 1] > source_places[:, 0]))
    if not rest.size:
        return direct
    givers, given = _remove_gaps(*_character_owners(source_places, rest), target_places)
    low, high = int(given.min()), int(given.max()) + 1
    is_near = (target_places[:, 0] < high) & (target_places[:, 1] > low)
    length = max(high, int(target_places[is_near, 1].max(initial=0)))
    held_by_free = np.bincount(
        _character_owners(target_places, np.flatnonzero(is_near & ~reached))[1], minlength=length
    )
    receivers, characters = _character_owners(target_places, np.flatnonzero(is_near))
    taken = reached[receivers] & (held_by_free[characters] > 0)
    receivers, characters = receivers[~taken], characters[~taken]
    holders = np.bincount(characters, minlength=length)

    sizes = np.bincount(givers, minlength=len(source))
    row = weights.detach().to("cpu", torch.float64).numpy()
    mass = np.bincount(given, weights=row[givers] / sizes[givers], minlength=length)
    spread = np.bincount(receivers, weights=mass[characters] / holders[characters], minlength=len(target))
    touched = np.bincount(given, minlength=length) > 0
    going = np.bincount(givers[holders[given] > 0], minlength=len(source))
    direct.carried[going > 0] = True
    direct.shares[rest] = going[rest] / sizes[rest]
    direct.reached[receivers[touched[characters]]] = True
    return direct._replace(weights=direct.weights + torch.from_numpy(spread).to(direct.weights))


def _match_equal_tokens(
    source: list[int], source_places: NDArray[np.int64], target: list[int], target_places: NDArray[np.int64]
) -> tuple[int, list[tuple[int, int]]]:
    """Matches tokens with equal id and range; returns the length of the common prefix and the index pairs after it."""
    ours, theirs = np.column_stack([source, source_places]), np.column_stack([target, target_places])
    prefix = _count_prefix(ours, theirs)
    if prefix == len(source) or prefix == len(target):
        return prefix, []
    places: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for j, key in reversed(list(enumerate(map(tuple, theirs[prefix:].tolist()), prefix))):
        places[key].append(j)
    keys = enumerate(map(tuple, ours[prefix:].tolist()), prefix)
    return prefix, [(i, places[key].pop()) for i, key in keys if places.get(key)]


def _remove_gaps(
    givers: NDArray[np.int64], given: NDArray[np.int64], target_places: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Removes characters in gaps of the target; a token without other characters gets the one before the gap."""
    places = target_places[target_places[:, 1] > target_places[:, 0]]
    places = places[np.argsort(places[:, 0], kind="stable")]
    reach = np.maximum.accumulate(places[:, 1])
    gaps = np.flatnonzero(places[1:, 0] > reach[:-1])
    if not gaps.size:
        return givers, given
    held = np.arange(max(int(given.max()) + 1, int(places[gaps[-1] + 1, 0])))
    for gap in gaps:
        held[reach[gap] : places[gap + 1, 0]] = reach[gap] - 1
    inside = held[given] < given
    others = np.bincount(givers[~inside], minlength=int(givers.max()) + 1)
    stays = ~inside | (others[givers] == 0)
    return givers[stays], held[given[stays]]


def _character_owners(
    places: NDArray[np.int64], tokens: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns two arrays, token and character, with one entry for each character of ``tokens``."""
    starts, ends = places[tokens].T
    sizes = np.maximum(ends - starts, 0)
    first = np.cumsum(sizes) - sizes
    return np.repeat(tokens, sizes), np.arange(int(sizes.sum())) + np.repeat(starts - first, sizes)
