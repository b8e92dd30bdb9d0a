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

from attnpo.text.ranges import Range


class AlignMethod(Enum):
    """How weights find their training tokens: edit alignment of ids (the paper's), or shared characters."""

    LEVENSHTEIN = "levenshtein"
    CHARACTERS = "characters"


class Aligned(NamedTuple):
    """Weights on the ``m`` training tokens of one response and how well the two tokenisations met.

    ``coverage`` is the share of the training tokens that hold characters and got a partner (1.0 when no training token
    holds a character: nothing is left without one). ``source_coverage`` is the share of the source's tokens whose
    weight was carried, whole or in part (1.0 for a source without tokens). ``matched`` marks the training tokens with
    a partner. ``arrived`` is the share of each source token's weight that training tokens with characters got.
    """

    weights: Float[Tensor, "m"]
    coverage: float
    source_coverage: float
    matched: Bool[Tensor, "m"]
    arrived: Float[Tensor, "n"]


def align(
    token_ids: Sequence[int] | Int[Tensor, "n"],
    offsets: Sequence[Range] | Int[Tensor, "n 2"],
    weights: Float[Tensor, "n"],
    target_ids: Sequence[int] | Int[Tensor, "m"],
    target_offsets: Sequence[Range] | Int[Tensor, "m 2"],
    method: AlignMethod = AlignMethod.LEVENSHTEIN,
) -> Aligned:
    """The weights on the target's tokens, in the dtype and on the device of ``weights``.

    ``offsets`` and ``target_offsets`` are half-open character ranges in the same response text; LEVENSHTEIN reads the
    target's only (for the coverage). Weights are neither renormalised nor rescaled: LEVENSHTEIN loses the weight of
    unmatched source tokens, CHARACTERS that of characters in front of the target's first and behind its last one. A
    character between them that no target token holds (a blank that its tokenizer drops) leaves its weight to the other
    characters of its source token, and where the target holds none of these either, to the target tokens before it.
    Identical input comes back as it is, to the last bit.

    Raises ValueError when lengths do not fit together.
    """
    source, source_ranges = _ints(token_ids), _ranges(offsets)
    target, target_ranges = _ints(target_ids), _ranges(target_offsets)
    for what, ids, ranges in (("source", source, source_ranges), ("target", target, target_ranges)):
        if len(ids) != len(ranges):
            raise ValueError(f"{what}: {len(ids)} token ids but {len(ranges)} character ranges")
    if weights.shape != (len(source),):
        raise ValueError(f"weights have shape {tuple(weights.shape)}, expected one row of {len(source)} source tokens")
    if method is AlignMethod.LEVENSHTEIN:
        moved = _carry(weights, _equal_ids(source, target), target_ranges)
    else:
        moved = _by_characters(source, source_ranges, weights, target, target_ranges)
    count = int(moved.holding.sum())
    coverage = int((moved.reached & moved.holding).sum()) / count if count else 1.0
    return Aligned(
        moved.weights,
        coverage,
        int(moved.carried.sum()) / len(source) if source else 1.0,
        torch.from_numpy(moved.reached).to(weights.device),
        torch.from_numpy(moved.shares).to(weights),
    )


def differing(
    first: Sequence[int], second: Sequence[int], min_match: int = 1
) -> tuple[Bool[Tensor, "n"], Bool[Tensor, "m"]]:
    """Marks the tokens of two texts that have no equal partner in a best edit alignment of them.

    Runs of fewer than ``min_match`` partners, neighbours in both texts, count as none.
    """
    changed = torch.ones(len(first), dtype=torch.bool), torch.ones(len(second), dtype=torch.bool)
    runs: list[list[tuple[int, int]]] = []
    for i, j in _equal_ids(list(first), list(second)):
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


def _ranges(values: Sequence[Range] | Tensor) -> list[Range]:
    if isinstance(values, Tensor):
        starts, ends = values.T.tolist() if len(values) else ([], [])
        return list(zip(starts, ends, strict=True))
    return [(start, end) for start, end in values]


class _Moved(NamedTuple):
    """Weights on the target, the source tokens carried with the shares of their weight on characters, the target tokens
    reached, and those that hold characters."""

    weights: Tensor
    carried: NDArray[np.bool_]
    shares: NDArray[np.float64]
    reached: NDArray[np.bool_]
    holding: NDArray[np.bool_]


def _carry(weights: Tensor, pairs: list[tuple[int, int]], target_ranges: list[Range]) -> _Moved:
    """Moves the weight of source token i to target token j for each pair (i, j); 0 elsewhere."""
    holding = np.array([end > start for start, end in target_ranges], dtype=np.bool_)
    carried, reached = np.zeros(len(weights), dtype=np.bool_), np.zeros(len(target_ranges), dtype=np.bool_)
    shares = np.zeros(len(weights))
    moved = torch.zeros(len(target_ranges), dtype=weights.dtype, device=weights.device)
    if pairs:
        index = np.array(pairs, dtype=np.int64)
        givers, receivers = index[:, 0], index[:, 1]
        moved[torch.from_numpy(receivers)] = weights[torch.from_numpy(givers)]
        carried[givers] = reached[receivers] = True
        shares[givers] = holding[receivers]
    return _Moved(moved, carried, shares, reached, holding)


def _equal_ids(source: list[int], target: list[int]) -> list[tuple[int, int]]:
    """Index pairs of equal ids in a best edit alignment; a common prefix is matched without asking for one.

    Where several alignments are best, the official code (package edit_distance, completion first) and this library may
    take different ones. Given the completion first and both from the end it takes theirs most often: in 418 of 600
    edited token sequences with word-like frequencies; in 360 with the judge first, 333 with the completion first alone.
    """
    prefix = 0
    for left, right in zip(source, target, strict=False):
        if left != right:
            break
        prefix += 1
    pairs = [(i, i) for i in range(prefix)]
    if prefix == len(source) or prefix == len(target):
        return pairs
    n, m = len(source), len(target)
    rest: list[tuple[int, int]] = []
    for kind, j0, j1, i0, i1 in Levenshtein.opcodes(target[prefix:][::-1], source[prefix:][::-1]):
        if kind == "equal":
            rest.extend((n - 1 - i, m - 1 - j) for i, j in zip(range(i0, i1), range(j0, j1), strict=True))
    return pairs + rest[::-1]


def _by_characters(
    source: list[int], source_ranges: list[Range], weights: Tensor, target: list[int], target_ranges: list[Range]
) -> _Moved:
    """Moves weights by equal tokens first, then by characters.

    Equal (id, range) tokens carry their weight as it is. Every other source token spreads its weight evenly over its
    characters; a character's weight goes in equal parts to the other target tokens that hold it, and to the directly
    matched ones only where no other does.
    """
    places: dict[tuple[int, Range], list[int]] = defaultdict(list)
    for j in range(len(target) - 1, -1, -1):
        places[(target[j], target_ranges[j])].append(j)
    pairs: list[tuple[int, int]] = []
    for i, key in enumerate(zip(source, source_ranges, strict=True)):
        if places.get(key):
            pairs.append((i, places[key].pop()))
    direct = _carry(weights, pairs, target_ranges)
    carried, reached = direct.carried.tolist(), direct.reached.tolist()
    rest = [i for i in range(len(source)) if not carried[i] and source_ranges[i][1] > source_ranges[i][0]]
    if not rest:
        return direct
    givers, given = _leave_gaps(*_owners(source_ranges, rest), target_ranges)
    low, high = int(given.min()), int(given.max()) + 1
    near = [j for j, (start, end) in enumerate(target_ranges) if start < high and end > low]
    length = max([high, *(target_ranges[j][1] for j in near)])
    held_by_free = np.bincount(_owners(target_ranges, [j for j in near if not reached[j]])[1], minlength=length)
    receivers, characters = _owners(target_ranges, near)
    taken = direct.reached[receivers] & (held_by_free[characters] > 0)
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


def _leave_gaps(
    givers: NDArray[np.int64], given: NDArray[np.int64], target_ranges: list[Range]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns (source token, character) without characters between target tokens that none of these holds.

    A source token that has no other characters keeps them as the last one in front that a target token holds.
    """
    gaps, reach = [], None
    for start, end in sorted(place for place in target_ranges if place[1] > place[0]):
        if reach is not None and start > reach:
            gaps.append((reach, start))
        reach = end if reach is None else max(reach, end)
    if not gaps:
        return givers, given
    held = np.arange(max(int(given.max()) + 1, gaps[-1][1]))
    for start, end in gaps:
        held[start:end] = start - 1
    inside = held[given] < given
    others = np.bincount(givers[~inside], minlength=int(givers.max()) + 1)
    stays = ~inside | (others[givers] == 0)
    return givers[stays], held[given[stays]]


def _owners(ranges: list[Range], tokens: list[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Two rows, token and character, with an entry for every character that one of ``tokens`` holds."""
    sizes = [ranges[token][1] - ranges[token][0] for token in tokens]
    owners = np.repeat(np.array(tokens, dtype=np.int64), sizes)
    spans = [np.arange(*ranges[token], dtype=np.int64) for token in tokens]
    return owners, np.concatenate(spans) if spans else np.zeros(0, dtype=np.int64)
