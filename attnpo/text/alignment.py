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

Range = tuple[int, int]


class AlignMethod(Enum):
    """How weights find their training tokens: edit alignment of ids (the paper's), or shared characters."""

    LEVENSHTEIN = "levenshtein"
    CHARACTERS = "characters"


class Aligned(NamedTuple):
    """Weights on the ``m`` training tokens of one response and how well the two tokenisations met.

    ``coverage`` is the share of the training tokens that hold characters and got a partner (1.0 when no training token
    holds a character: nothing is left without one). ``source_coverage`` is the share of the source's tokens whose
    weight was carried, whole or in part (1.0 for a source without tokens). ``matched`` marks the training tokens with
    a partner.
    """

    weights: Float[Tensor, "m"]
    coverage: float
    source_coverage: float
    matched: Bool[Tensor, "m"]


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
    unmatched source tokens, CHARACTERS that of characters the target does not hold. Identical input comes back as it
    is, to the last bit.

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
        pairs = _equal_ids(source, target)
        moved = _carry(weights, pairs, len(target))
        carried, reached = {i for i, _ in pairs}, {j for _, j in pairs}
    else:
        moved, carried, reached = _by_characters(source, source_ranges, weights, target, target_ranges)
    matched = torch.zeros(len(target), dtype=torch.bool, device=weights.device)
    matched[sorted(reached)] = True
    holding = [j for j, (start, end) in enumerate(target_ranges) if end > start]
    coverage = sum(j in reached for j in holding) / len(holding) if holding else 1.0
    return Aligned(moved, coverage, len(carried) / len(source) if source else 1.0, matched)


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


def _carry(weights: Tensor, pairs: list[tuple[int, int]], length: int) -> Tensor:
    """[length] with the weight of source token i at j for each pair (i, j), 0 elsewhere."""
    moved = torch.zeros(length, dtype=weights.dtype, device=weights.device)
    if pairs:
        index = torch.tensor(pairs, device=weights.device)
        moved[index[:, 1]] = weights[index[:, 0]]
    return moved


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
) -> tuple[Tensor, set[int], set[int]]:
    """Weights on the target, the source tokens carried, the target tokens reached.

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
    moved = _carry(weights, pairs, len(target))
    carried, reached = {i for i, _ in pairs}, {j for _, j in pairs}
    rest = [i for i in range(len(source)) if i not in carried and source_ranges[i][1] > source_ranges[i][0]]
    if not rest:
        return moved, carried, reached
    low, high = min(source_ranges[i][0] for i in rest), max(source_ranges[i][1] for i in rest)
    near = [j for j, (start, end) in enumerate(target_ranges) if start < high and end > low]
    length = max([high, *(target_ranges[j][1] for j in near)])
    held_by_free = np.bincount(_owners(target_ranges, [j for j in near if j not in reached])[1], minlength=length)
    receivers, characters = _owners(target_ranges, near)
    taken = np.isin(receivers, sorted(reached)) & (held_by_free[characters] > 0)
    receivers, characters = receivers[~taken], characters[~taken]
    holders = np.bincount(characters, minlength=length)

    givers, given = _owners(source_ranges, rest)
    sizes = np.array([end - start for start, end in source_ranges])
    row = weights.detach().to("cpu", torch.float64).numpy()
    mass = np.bincount(given, weights=row[givers] / sizes[givers], minlength=length)
    spread = np.bincount(receivers, weights=mass[characters] / holders[characters], minlength=len(target))
    touched = np.bincount(given, minlength=length) > 0
    moved = moved + torch.from_numpy(spread).to(moved)
    carried |= set(givers[holders[given] > 0].tolist())
    reached |= set(receivers[touched[characters]].tolist())
    return moved, carried, reached


def _owners(ranges: list[Range], tokens: list[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Two rows, token and character, with an entry for every character that one of ``tokens`` holds."""
    sizes = [ranges[token][1] - ranges[token][0] for token in tokens]
    owners = np.repeat(np.array(tokens, dtype=np.int64), sizes)
    spans = [np.arange(*ranges[token], dtype=np.int64) for token in tokens]
    return owners, np.concatenate(spans) if spans else np.zeros(0, dtype=np.int64)
