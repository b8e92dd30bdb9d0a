"""Token weights moved from the source's tokens onto the training tokens of the same response.

Two methods. LEVENSHTEIN is the paper's (appendix on token matching): tokens with equal ids in a best edit alignment
carry their weight one to one, everything else gets 0. CHARACTERS needs no common vocabulary: what has no equal token
travels by the characters it holds.

Differs from the official code: the ids of the training side are never edited (there a lone judge token without a
partner is put in front of the completion).
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

from attnpo.text.ranges import Range, as_places

Ranges = Sequence[Range] | Int[Tensor, "_ 2"] | NDArray[np.int64]
"""Half-open character ranges, one for each token."""


class AlignMethod(Enum):
    """Method by which weights find their training tokens: edit alignment of ids (the paper's), or shared characters."""

    LEVENSHTEIN = "levenshtein"
    CHARACTERS = "characters"


class Aligned(NamedTuple):
    """Weights on the ``m`` training tokens of one response and how well the two tokenisations met.

    ``coverage`` is the share of the training tokens that hold characters and got a partner (1.0 when no training token
    holds a character: nothing is left without one). ``source_coverage`` is the share of the source's tokens whose
    weight was carried, whole or in part (1.0 for a source without tokens). ``matched`` marks the training tokens with
    a partner. ``arrived`` is the share of each source token's weight that training tokens with characters got.
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
) -> Aligned:
    """Returns the weights on the target's tokens, in the dtype and on the device of ``weights``.

    ``offsets`` and ``target_offsets`` are half-open character ranges in the same response text; LEVENSHTEIN reads the
    target's only (for the coverage). Weights are neither renormalised nor rescaled: LEVENSHTEIN loses the weight of
    unmatched source tokens, CHARACTERS that of characters in front of the target's first and behind its last one. A
    character between them that no target token holds (a blank that its tokenizer drops) leaves its weight to the other
    characters of its source token, and where the target holds none of these either, to the target tokens before it.
    Identical input comes back as it is, to the last bit.

    Raises ValueError when lengths do not fit together.
    """
    source, target = _ints(token_ids), _ints(target_ids)
    for what, ids, ranges in (("source", source, offsets), ("target", target, target_offsets)):
        if len(ids) != len(ranges):
            raise ValueError(f"{what}: {len(ids)} token ids but {len(ranges)} character ranges")
    if weights.shape != (len(source),):
        raise ValueError(f"weights have shape {tuple(weights.shape)}, expected one row of {len(source)} source tokens")
    target_places = range_array(target_offsets)
    holding = target_places[:, 1] > target_places[:, 0]
    if method is AlignMethod.LEVENSHTEIN:
        moved = _carry(weights, *equal_ids(source, target), holding)
    else:
        moved = _by_characters(source, range_array(offsets), weights, target, target_places, holding)
    count = np.count_nonzero(holding)
    coverage = np.count_nonzero(moved.reached & holding) / count if count else 1.0
    return Aligned(
        moved.weights,
        coverage,
        np.count_nonzero(moved.carried) / len(source) if source else 1.0,
        torch.from_numpy(moved.reached).to(weights.device),
        torch.from_numpy(moved.shares).to(weights),
    )


def differing(
    first: Sequence[int], second: Sequence[int], min_match: int = 1
) -> tuple[Bool[Tensor, " n"], Bool[Tensor, " m"]]:
    """Marks the tokens of two texts that have no equal partner in a best edit alignment of them.

    Runs of fewer than ``min_match`` partners, neighbours in both texts, count as none.
    """
    changed = torch.ones(len(first), dtype=torch.bool), torch.ones(len(second), dtype=torch.bool)
    runs: list[list[tuple[int, int]]] = []
    prefix, rest = equal_ids(list(first), list(second))
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


def _ints(values: Sequence[int] | Tensor) -> list[int]:
    # Levenshtein takes a torch tensor without complaint and answers "replace everything": only Python ints go in.
    return values.tolist() if isinstance(values, Tensor) else list(map(int, values))


def range_array(values: Ranges) -> NDArray[np.int64]:
    """Returns character ranges as rows of two."""
    if isinstance(values, Tensor):
        return values.cpu().reshape(-1, 2).numpy()
    if isinstance(values, np.ndarray):
        return values
    return as_places(values)


class _Moved(NamedTuple):
    """Weights on the target, source tokens carried, shares of their weight on characters, target tokens reached."""

    weights: Tensor
    carried: NDArray[np.bool_]
    shares: NDArray[np.float64]
    reached: NDArray[np.bool_]


def _carry(weights: Tensor, prefix: int, rest: Sequence[tuple[int, int]], holding: NDArray[np.bool_]) -> _Moved:
    """Moves the weight of source token i to target token j: of i = j below ``prefix``, and of each pair of ``rest``."""
    carried, reached = np.zeros(len(weights), dtype=np.bool_), np.zeros(len(holding), dtype=np.bool_)
    shares, moved = np.zeros(len(weights)), weights.new_zeros(len(holding))
    carried[:prefix] = reached[:prefix] = True
    shares[:prefix], moved[:prefix] = holding[:prefix], weights[:prefix]
    if rest:
        givers, receivers = np.array(rest, dtype=np.int64).T
        moved[torch.from_numpy(receivers)] = weights[torch.from_numpy(givers)]
        carried[givers] = reached[receivers] = True
        shares[givers] = holding[receivers]
    return _Moved(moved, carried, shares, reached)


def _count_prefix(first: NDArray[np.int64], second: NDArray[np.int64]) -> int:
    """Returns how many rows both begin with."""
    count = min(len(first), len(second))
    differs = np.flatnonzero(first[:count] != second[:count])
    return int(differs[0]) // max(1, first[0].size) if differs.size else count


def equal_ids(source: list[int], target: list[int]) -> tuple[int, list[tuple[int, int]]]:
    """Returns equal ids in a best edit alignment.

    The length of the common prefix, matched without asking for one, and the index pairs behind it.

    Where several alignments are best, the official code (package edit_distance, completion first) and this library may
    take different ones. Given the completion first and both from the end it takes theirs most often: in 418 of 600
    edited token sequences with word-like frequencies; in 360 with the judge first, 333 with the completion first alone.
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


def _by_characters(
    source: list[int],
    source_places: NDArray[np.int64],
    weights: Tensor,
    target: list[int],
    target_places: NDArray[np.int64],
    holding: NDArray[np.bool_],
) -> _Moved:
    """Moves weights between equal (id, range) tokens, others evenly over their characters to the free tokens there."""
    direct = _carry(weights, *_equal_tokens(source, source_places, target, target_places), holding)
    reached = direct.reached
    rest = np.flatnonzero(~direct.carried & (source_places[:, 1] > source_places[:, 0]))
    if not rest.size:
        return direct
    givers, given = _leave_gaps(*_owners(source_places, rest), target_places)
    low, high = int(given.min()), int(given.max()) + 1
    is_near = (target_places[:, 0] < high) & (target_places[:, 1] > low)
    length = max(high, int(target_places[is_near, 1].max(initial=0)))
    held_by_free = np.bincount(_owners(target_places, np.flatnonzero(is_near & ~reached))[1], minlength=length)
    receivers, characters = _owners(target_places, np.flatnonzero(is_near))
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


def _equal_tokens(
    source: list[int], source_places: NDArray[np.int64], target: list[int], target_places: NDArray[np.int64]
) -> tuple[int, list[tuple[int, int]]]:
    """Returns tokens of equal id and range: how many both begin with, and index pairs behind, in their order."""
    ours, theirs = np.column_stack([source, source_places]), np.column_stack([target, target_places])
    prefix = _count_prefix(ours, theirs)
    if prefix == len(source) or prefix == len(target):
        return prefix, []
    places: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for j, key in reversed(list(enumerate(map(tuple, theirs[prefix:].tolist()), prefix))):
        places[key].append(j)
    keys = enumerate(map(tuple, ours[prefix:].tolist()), prefix)
    return prefix, [(i, places[key].pop()) for i, key in keys if places.get(key)]


def _leave_gaps(
    givers: NDArray[np.int64], given: NDArray[np.int64], target_places: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns (source token, character) without gaps of the target; a token with no other character keeps one."""
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


def _owners(places: NDArray[np.int64], tokens: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns two rows, token and character, with an entry for every character that one of ``tokens`` holds."""
    starts, ends = places[tokens].T
    sizes = np.maximum(ends - starts, 0)
    first = np.cumsum(sizes) - sizes
    return np.repeat(tokens, sizes), np.arange(int(sizes.sum())) + np.repeat(starts - first, sizes)
