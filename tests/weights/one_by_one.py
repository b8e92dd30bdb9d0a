"""Weights of one pair at a time as the package made them before it took many at once: the oracle of that way.

A copy from before; nothing here follows the package's own alignment, or its steps from stored rows to examples.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import Levenshtein
import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from attnpo.data.prepare import (
    DROPPED_FOR_COVERAGE,
    REFUSED,
    SILENT,
    UNASKED,
    VOID,
    EncodedSet,
    ExampleSet,
    Tally,
    make_example,
)
from attnpo.data.rules import AlignRules
from attnpo.judge.layers import Row
from attnpo.schema import SIDES, EncodedResponse, Kind, PairWeights, PreferencePair, TokenWeights, UserError
from attnpo.text.alignment import Aligned, AlignMethod
from attnpo.text.ranges import Range
from attnpo.text.traces import before, start_apart
from attnpo.weights.apart import beside_trace, rows_with_trace
from attnpo.weights.arrival import shares_that_arrived
from attnpo.weights.base import (
    OnlineSource,
    TextSource,
    WeightSource,
    least_coverage,
)
from attnpo.weights.capture import Unreadable
from attnpo.weights.pipeline import Finished, TrainingWeights, transformed
from attnpo.weights.postprocess import EndToken, average_rounds, check_finite, flat_rounds, require_distribution
from attnpo.weights.sources.attention import Attention
from attnpo.weights.sources.edits import Edits
from attnpo.weights.transforms import WeightTransform


def prepare_examples(
    encoded: EncodedSet,
    source: WeightSource,
    captured: Mapping[str, PairWeights],
    align: AlignRules,
    layers: tuple[Row, ...] = (),
    transforms: Sequence[WeightTransform] = (),
) -> ExampleSet:
    tally = Tally(encoded.tally.counts.copy(), {event: list(ids) for event, ids in encoded.tally.first.items()})
    examples, content, unmatched = [], 0, 0
    least = least_coverage(source, align.min_coverage)
    uncovered = f"{DROPPED_FOR_COVERAGE} below {'weights' if align.min_coverage is None else 'align'}.min_coverage"
    unreadable = next((words for need, words in REFUSED.items() if need in source.requires), UNASKED)
    for pair, sides in zip(encoded.pairs, encoded.encoded, strict=True):
        pair_id = pair.pair_id
        raw = captured.get(pair_id)
        if raw is not None and not raw.rounds:
            tally.add(f"{unreadable}: {raw.reason}" if isinstance(raw, Unreadable) else unreadable, pair_id)
            continue
        weights = training_weights(source, raw, sides, align.method, transforms, layers=layers, pair=pair)
        content += sum(weights.content)
        unmatched += sum(weights.unmatched)
        if weights.realigned:
            tally.add("judge rounds cut a response into different tokens; aligned by characters", pair_id)
        if source.partial and min(weights.coverage) == 0:
            tally.add(SILENT, pair_id)
            continue
        if min(weights.coverage) < least:
            tally.add(f"{uncovered} {least:g}", pair_id)
            continue
        for side in weights.flat:
            tally.add(f"all raw weights of the {side} response are 0: uniform instead", pair_id)
        example = make_example(
            pair_id, sides, weights, source.pair_weight(pair) if isinstance(source, TextSource) else 1.0
        )
        for side, row in zip(SIDES, example.weights, strict=True):
            if not bool(row.any()):
                tally.add(f"no weighted token in the {side} response", pair_id)
        if example.pair_weight == 0:
            tally.add(VOID, pair_id)
        examples.append(example)
    return ExampleSet(examples, tally, encoded.read, encoded.read - len(examples), content, unmatched)


def select(source: WeightSource, captured: PairWeights, layers: tuple[Row, ...]) -> PairWeights:
    if not isinstance(source, Attention):
        return source.select(captured, layers)
    places = [layers.index(row) for row in source.rows_read()]

    def one_row(weights: TokenWeights) -> TokenWeights:
        return replace(weights, weights=weights.weights[places].mean(dim=0, keepdim=True))

    return replace(
        captured,
        rounds=tuple(
            replace(item, chosen=one_row(item.chosen), rejected=one_row(item.rejected)) for item in captured.rounds
        ),
    )


@dataclass(frozen=True)
class _Side:
    weights: Float[Tensor, " m"]
    length: float
    coverage: float
    source_coverage: float
    kept_mass: float
    unmatched: int
    content: int
    realigned: bool


def training_weights(
    source: WeightSource,
    captured: PairWeights | None,
    encoded: Mapping[str, EncodedResponse],
    align_method: AlignMethod = AlignMethod.LEVENSHTEIN,
    transforms: Sequence[WeightTransform] = (),
    *,
    layers: tuple[Row, ...] = (),
    pair: PreferencePair | None = None,
) -> TrainingWeights:
    """The weights of one pair on the training tokens in ``encoded`` ("chosen", "rejected").

    ``layers`` names the rows of ``captured`` in their order. ``captured`` is None for a source that captures nothing,
    which reads ``pair`` instead. Transforms come fitted; an online source's are left to ``transformed_batch``. Raw rows
    are processed in float64 and returned in their own type. UserError for rows that are not what the source's kind
    promises.
    """
    pair_id = _name(captured, pair)
    finished = finished_weights(source, captured, encoded, layers=layers, pair=pair)
    for transform in () if isinstance(source, OnlineSource) else transforms:
        finished = transformed(transform, finished, pair_id)
    chosen, rejected = (
        _on_training_tokens(source, finished[side], encoded[side], align_method, f"pair {pair_id}, {side}")
        for side in SIDES
    )
    return TrainingWeights(
        chosen=chosen.weights,
        rejected=rejected.weights,
        lengths=(chosen.length, rejected.length),
        coverage=(chosen.coverage, rejected.coverage),
        source_coverage=(chosen.source_coverage, rejected.source_coverage),
        kept_mass=(chosen.kept_mass, rejected.kept_mass),
        unmatched=(chosen.unmatched, rejected.unmatched),
        content=(chosen.content, rejected.content),
        realigned=chosen.realigned + rejected.realigned,
        flat=tuple(side for side in SIDES if finished[side].flat),
        factors=source.kind is Kind.FACTOR and not isinstance(source, OnlineSource),
    )


def _name(captured: PairWeights | None, pair: PreferencePair | None) -> str:
    """The pair's id for errors and transforms."""
    if captured is not None:
        return captured.pair_id
    return "without an id" if pair is None else pair.pair_id


def finished_weights(
    source: WeightSource,
    captured: PairWeights | None,
    encoded: Mapping[str, EncodedResponse],
    *,
    layers: tuple[Row, ...] = (),
    pair: PreferencePair | None = None,
) -> dict[str, Finished]:
    """Both responses' weights on the source's tokens, before transforms and alignment."""
    if source.postprocess is not None:
        require_distribution(source.kind, source.signed)
    if captured is not None:
        captured = select(source, captured, layers)
    both = source.weigh_pair(_given(source, pair), encoded) if isinstance(source, Edits) else None
    finished = {}
    for side in SIDES:
        where = f"pair {_name(captured, pair)}, {side}"
        rows = _raw_rows(source, captured, encoded[side], pair, side, None if both is None else both[side])
        if not rows:
            raise UserError(f"{where}: expected at least one round of captured weights, got none; capture it again")
        rows, realigned = _same_tokens(rows)
        begins = 0 if pair is None else start_apart(pair, side)
        rows, trace = rows_with_trace(source, rows, encoded[side], begins)
        raw = [row.weights[0].double() for row in rows]
        weights = _finish(source, raw, where, trace)
        said = torch.stack(raw).ne(0).any(dim=0) if source.partial else None
        rule = None if said is not None else source.postprocess
        flat = rule is not None and flat_rounds([row[trace:] for row in raw], rule.round_order)
        open_to = rows[0].offsets[:, 1] > rows[0].offsets[:, 0] if source.kind is Kind.FACTOR else None
        if begins:
            weights = beside_trace(weights, trace)
            open_to = torch.arange(weights.numel()) >= trace
        finished[side] = Finished(rows[0], weights, realigned, flat, said, open_to, begins)
    return finished


def _given(source: WeightSource, pair: PreferencePair | None) -> PreferencePair:
    if pair is None:
        raise ValueError(f"{type(source).__name__} weighs a pair's own text, and no pair was given")
    return pair


def _raw_rows(
    source: WeightSource,
    captured: PairWeights | None,
    encoded: EncodedResponse,
    pair: PreferencePair | None,
    side: str,
    own: Float[Tensor, " m"] | None,
) -> list[TokenWeights]:
    """One entry per round, each with the one row that the source selected; ``own``: a paired source's weights."""
    if captured is not None:
        return [item.side(side) for item in captured.rounds]
    if own is None and not isinstance(source, TextSource):
        raise UserError(
            f"pair {_name(captured, pair)}: expected captured weights for {type(source).__name__}; run attnpo.weigh "
            "first"
        )
    pair = _given(source, pair)
    weights = source.weigh(pair, side, encoded) if own is None and isinstance(source, TextSource) else own
    count = len(encoded.response_ids)
    assert weights is not None
    if weights.shape != (count,):
        raise UserError(
            f"pair {pair.pair_id}, {side}: expected {count} weights of {type(source).__name__}, one for each training "
            f"token, got the shape {tuple(weights.shape)}; correct the source"
        )
    offsets = torch.tensor(encoded.offsets, dtype=torch.long).reshape(-1, 2)
    ids = torch.tensor(encoded.response_ids, dtype=torch.long)
    return [TokenWeights(ids, offsets, weights.unsqueeze(0))]


def _on_training_tokens(
    source: WeightSource, finished: Finished, encoded: EncodedResponse, method: AlignMethod, where: str
) -> _Side:
    base, weights, dtype = finished.row, finished.weights, finished.row.weights.dtype
    holds = torch.tensor([end > start for start, end in encoded.offsets], dtype=torch.bool)
    if source.tokens == "train":
        _require_same_ids(base, encoded, where)
        arrived = (torch.arange(weights.numel()) < holds.numel()).to(weights)
        weights, matched = weights[: holds.numel()], holds
    else:
        aligned = _align(base, weights, encoded, method)
        weights, matched, arrived = aligned.weights, aligned.matched & holds, aligned.arrived
        if finished.said is not None:
            matched &= _align(base, finished.said.double(), encoded, method).weights > 0
        if source.postprocess is not None and source.postprocess.end_token is EndToken.MEAN:
            weights = torch.where(holds, weights, 1.0 / base.token_ids.numel())
        else:
            weights = torch.where(holds, weights, 0.0)
    weighed = holds & (torch.arange(holds.numel()) >= before(finished.begins, encoded.offsets))
    content, partnered = int(weighed.sum()), int((matched & weighed).sum())
    trace = before(finished.begins, base.offsets.tolist()) if finished.begins else 0
    source_coverage, kept_mass = shares_that_arrived(finished.weights[trace:], arrived[trace:])
    return _Side(
        weights=weights.to(dtype),
        length=float(holds.numel() if source.tokens == "train" else base.token_ids.numel()),
        coverage=partnered / content if content else 1.0,
        source_coverage=source_coverage,
        kept_mass=kept_mass,
        unmatched=content - partnered,
        content=content,
        realigned=finished.realigned,
    )


def _finish(
    source: WeightSource, raw: Sequence[Float[Tensor, " n"]], where: str, trace: int = 0
) -> Float[Tensor, " m"]:
    """One row out of the rounds: the source's post-processing, or their mean as it is; without the first ``trace``."""
    if source.postprocess is not None:
        return source.postprocess([row[trace:] for row in raw], where)
    for row in raw:
        check_finite(row, where)
        if not source.signed and bool((row < 0).any()):
            raise UserError(
                f"{where}: {type(source).__name__} states that its weights are not signed, got {row.min():g}"
            )
        if source.kind is Kind.DISTRIBUTION and not source.partial and not bool(row.any()):
            raise UserError(
                f"{where}: {type(source).__name__} states that its weights are a distribution, and all {row.numel()} "
                "of them are 0; drop the pair or correct the source"
            )
    return average_rounds(raw)[trace:]


def _same_tokens(rows: list[TokenWeights]) -> tuple[list[TokenWeights], bool]:
    """All rounds on the tokens of the first one, and whether any had to be moved there.

    Rounds have the same tokenizer and the same response, but text assembly may cut a border token differently;
    characters decide then, whatever method is used towards the training tokens.
    """
    base, same = rows[0], [rows[0]]
    realigned = False
    for row in rows[1:]:
        if not torch.equal(row.token_ids, base.token_ids):
            onto = EncodedResponse([], base.token_ids.tolist(), [(start, end) for start, end in base.offsets.tolist()])
            aligned = _align(row, row.weights[0], onto, AlignMethod.CHARACTERS)
            row, realigned = replace(base, weights=aligned.weights.unsqueeze(0)), True
        same.append(row)
    return same, realigned


def _align(source: TokenWeights, weights: Float[Tensor, " n"], target: EncodedResponse, method: AlignMethod) -> Aligned:
    """``weights``, which stand on the tokens of ``source``, on the response tokens of ``target``."""
    return align(source.token_ids, source.offsets, weights, target.response_ids, target.offsets, method)


def _require_same_ids(source: TokenWeights, encoded: EncodedResponse, where: str) -> None:
    """Raises UserError unless the training ids are the source's, or their beginning when truncated."""
    count = len(encoded.response_ids)
    if source.token_ids[:count].tolist() != list(encoded.response_ids):
        raise UserError(
            f"{where}: weights on training tokens were captured for other token ids; capture them again with this "
            "tokenizer and chat template"
        )


def align(
    token_ids: Sequence[int] | Int[Tensor, " n"],
    offsets: Sequence[Range] | Int[Tensor, "n 2"],
    weights: Float[Tensor, " n"],
    target_ids: Sequence[int] | Int[Tensor, " m"],
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
