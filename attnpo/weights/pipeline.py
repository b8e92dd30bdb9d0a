"""Turns stored rows into weights on the training tokens: selects, post-processes, transforms and aligns them.

Finally, the end of turn gets its weight. Weights are not rescaled after alignment. Source tokens have no counterpart
among the training tokens if the two tokenizers split the text differently or if it was truncated. The weight of such
tokens is lost and lowers the coverage (paper appendix on token matching).

A reasoning trace that is weighted separately gets mass in proportion to its token count; the source weights only the
answer. If a response has t trace tokens and n answer tokens, each trace token gets 1 / (t + n), and the answer gets n /
(t + n), distributed by the source. Uniform weights stay uniform.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnpo.judge.layers import StoredRow
from attnpo.schema import (
    SIDES,
    EncodedResponse,
    Kind,
    PairWeights,
    PreferenceBatch,
    PreferencePair,
    TokenWeights,
    UserError,
)
from attnpo.text.alignment import AlignedWeights, AlignMethod, Ranges, align, to_range_array
from attnpo.text.traces import count_tokens_before, weighted_start
from attnpo.weights.arrival import coverage_and_kept_mass
from attnpo.weights.base import OnlineSource, TextSource, WeightSource, is_neutral
from attnpo.weights.batched import AlignedResponse, align_responses, postprocess_responses
from attnpo.weights.postprocess import (
    EndToken,
    Postprocess,
    average_rounds,
    check_finite,
    check_is_distribution,
    has_flat_rounds,
    normalize,
)
from attnpo.weights.transforms import WeightRow, WeightTransform, accepts_factors

CHUNK = 256
"""Number of pairs whose weights are computed together, so that the arrays fit into a CPU cache."""
_T = TypeVar("_T")

# Options of the group `transform` that also work on factors.
FOR_FACTORS = ("shuffled", "inverse", "uniform_on_support", "mixture", "one_side", "tail_cut")


@dataclass(frozen=True)
class TrainingWeights:
    """Weights of one pair on its training tokens; tuples are (chosen, rejected).

    ``lengths``: |y|, the number of source tokens. ``coverage``: share of the training tokens with text that have a
    counterpart (for a partial source, one with a weight), excluding a separately weighted trace. ``content``: number of
    training tokens that ``coverage`` counts. ``unmatched``: how many of them have no counterpart. ``source_coverage``
    and ``kept_mass``: shares of the source's tokens and of their absolute weight (after transforms) that reached
    training tokens, again excluding such a trace (see ``weights.arrival``). ``realigned``: number of responses that the
    judge rounds split into different tokens, so one round had to be aligned with the other. ``flat``: sides whose raw
    weights were all 0 and became uniform. ``factors``: whether the weights are factors, which are used unchanged, or a
    distribution.
    """

    chosen: Float[Tensor, " m"]
    rejected: Float[Tensor, " k"]
    lengths: tuple[float, float]
    coverage: tuple[float, float]
    source_coverage: tuple[float, float]
    kept_mass: tuple[float, float]
    unmatched: tuple[int, int]
    content: tuple[int, int]
    realigned: int = 0
    flat: tuple[str, ...] = ()
    factors: bool = False


@dataclass(frozen=True)
class SourceWeights:
    """Weights of one response, combined and post-processed, still on the source's tokens.

    ``row``: the source's tokens with their stored weights. ``realigned``: whether a round had different tokens.
    ``flat``: whether a raw row was all 0 and became uniform. ``weighted``: mask of the tokens to which a partial source
    assigned a weight; None for sources that weight every token. ``changeable``: mask of the tokens that transforms may
    change; None for all. ``begins``: index of the first character that the source weights; above 0 if a separately
    weighted trace precedes it.
    """

    row: TokenWeights
    weights: Float[Tensor, " n"]
    realigned: bool
    flat: bool = False
    weighted: Bool[Tensor, " n"] | None = None
    changeable: Bool[Tensor, " n"] | None = None
    begins: int = 0

    @property
    def changeable_tokens(self) -> Bool[Tensor, " n"]:
        """Returns a mask of the tokens that transforms may change."""
        return torch.ones(self.weights.numel(), dtype=torch.bool) if self.changeable is None else self.changeable


class PairInputs(NamedTuple):
    """Inputs for weighting a pair: captured rows (None if the source captures nothing) and training ids by side."""

    captured: PairWeights | None
    encoded: Mapping[str, EncodedResponse]
    pair: PreferencePair | None = None

    @property
    def pair_id(self) -> str:
        """Returns the pair's id, for error messages and transforms."""
        if self.captured is not None:
            return self.captured.pair_id
        return "without an id" if self.pair is None else self.pair.pair_id


def _check_postprocess(source: WeightSource) -> WeightSource:
    """Returns ``source``; UserError if its rows must not be post-processed."""
    if source.postprocess is not None:
        check_is_distribution(source.kind, source.signed)
    return source


def training_weights(
    source: WeightSource,
    captured: PairWeights | None,
    encoded: Mapping[str, EncodedResponse],
    align_method: AlignMethod = AlignMethod.LEVENSHTEIN,
    transforms: Sequence[WeightTransform] = (),
    *,
    layers: tuple[StoredRow, ...] = (),
    pair: PreferencePair | None = None,
) -> TrainingWeights:
    """Returns the weights of one pair on the training tokens in ``encoded`` ("chosen", "rejected").

    ``layers`` lists the rows of ``captured`` in order. ``captured`` is None for a source that captures nothing; such a
    source reads ``pair`` instead. Transforms must already be fitted; those of an online source are applied by
    ``transform_batch``. Raw rows are processed in float64 and returned in their original dtype. UserError if rows do
    not match the source's kind.
    """
    asked = PairInputs(captured, encoded, pair)
    finished = compute_source_weights(source, captured, encoded, layers=layers, pair=pair)
    finished = _apply_transforms(source, asked.pair_id, finished, transforms)
    return _join_sides(
        source, finished, [_align_response(source, asked, finished, side, align_method) for side in SIDES]
    )


def iterate_training_weights(
    source: WeightSource,
    pairs: Iterable[PairInputs],
    align_method: AlignMethod = AlignMethod.LEVENSHTEIN,
    transforms: Sequence[WeightTransform] = (),
    *,
    layers: tuple[StoredRow, ...] = (),
) -> Iterator[TrainingWeights]:
    """Yields the ``training_weights`` of many pairs in order. Batching leaves the results bit-identical."""
    _check_postprocess(source)
    for chunk in _split_into_chunks(pairs):
        done, problem = _collect_until_error(
            _apply_transforms(source, asked.pair_id, finished, transforms)
            for asked, finished in zip(chunk, _chunk_source_weights(source, chunk, layers), strict=True)
        )
        at_once = iter(_align_chunk(source, chunk, done, align_method))
        for asked, finished in zip(chunk, done, strict=False):
            sides = [next(at_once) or _align_response(source, asked, finished, side, align_method) for side in SIDES]
            yield _join_sides(source, finished, sides)
        if problem is not None:
            raise problem


def _join_sides(
    source: WeightSource, finished: Mapping[str, SourceWeights], sides: Sequence[AlignedResponse]
) -> TrainingWeights:
    chosen, rejected = sides
    return TrainingWeights(
        chosen=chosen.weights,
        rejected=rejected.weights,
        lengths=(chosen.length, rejected.length),
        coverage=(chosen.coverage, rejected.coverage),
        source_coverage=(chosen.source_coverage, rejected.source_coverage),
        kept_mass=(chosen.kept_mass, rejected.kept_mass),
        unmatched=(chosen.content - chosen.partnered, rejected.content - rejected.partnered),
        content=(chosen.content, rejected.content),
        realigned=sum(finished[side].realigned for side in SIDES),
        flat=tuple(side for side in SIDES if finished[side].flat),
        factors=source.kind is Kind.FACTOR and not isinstance(source, OnlineSource),
    )


def _split_into_chunks(pairs: Iterable[PairInputs]) -> Iterator[list[PairInputs]]:
    left = iter(pairs)
    while chunk := list(islice(left, CHUNK)):
        yield chunk


def _collect_until_error(items: Iterable[_T]) -> tuple[list[_T], Exception | None]:
    """Collects the items up to the first exception; returns both, so the caller can use the items before raising."""
    done: list[_T] = []
    try:
        for item in items:
            done.append(item)
    except Exception as problem:  # noqa: BLE001  raised after the items before it
        return done, problem
    return done, None


def _apply_transforms(
    source: WeightSource, pair_id: str, finished: dict[str, SourceWeights], transforms: Sequence[WeightTransform]
) -> dict[str, SourceWeights]:
    for transform in () if isinstance(source, OnlineSource) else transforms:
        finished = apply_transform(transform, finished, pair_id)
    return finished


def compute_source_weights(
    source: WeightSource,
    captured: PairWeights | None,
    encoded: Mapping[str, EncodedResponse],
    *,
    layers: tuple[StoredRow, ...] = (),
    pair: PreferencePair | None = None,
) -> dict[str, SourceWeights]:
    """Returns both responses' weights on the source's tokens, before transforms and alignment."""
    asked = PairInputs(captured, encoded, pair)
    return _selected_source_weights(_check_postprocess(source), asked, _select_row(source, asked, layers))


def iterate_source_weights(
    source: WeightSource, pairs: Iterable[PairInputs], layers: tuple[StoredRow, ...] = ()
) -> Iterator[dict[str, SourceWeights]]:
    """Yields the ``compute_source_weights`` of many pairs in order. Batching leaves the results bit-identical."""
    _check_postprocess(source)
    for chunk in _split_into_chunks(pairs):
        yield from _chunk_source_weights(source, chunk, layers)


def _chunk_source_weights(
    source: WeightSource, chunk: Sequence[PairInputs], layers: tuple[StoredRow, ...]
) -> Iterator[dict[str, SourceWeights]]:
    selected, problem = _collect_until_error(_select_row(source, asked, layers) for asked in chunk)
    at_once = iter(_postprocess_chunk(source, chunk, selected))
    for asked, captured in zip(chunk, selected, strict=False):
        both = {side: row for side, row in zip(SIDES, (next(at_once), next(at_once)), strict=True) if row is not None}
        yield both if len(both) == len(SIDES) else _selected_source_weights(source, asked, captured)
    if problem is not None:
        raise problem


def _postprocess_chunk(
    source: WeightSource, chunk: Sequence[PairInputs], selected: Sequence[PairWeights | None]
) -> list[SourceWeights | None]:
    """Applies post-processing to a chunk; returns each pair's responses, chosen first (None if not batchable)."""
    rule, partial = source.postprocess, source.partial
    if type(rule) is not Postprocess or source.kind is not Kind.DISTRIBUTION:
        return [None] * (2 * len(selected))
    responses = [
        []
        if captured is None or (asked.pair is not None and asked.pair.apart)
        else [item.side(side) for item in captured.rounds]
        for asked, captured in zip(chunk, selected, strict=False)
        for side in SIDES
    ]
    return [
        None
        if made is None
        else SourceWeights(parts[0], made[0], False, made[1] and not partial, _weighted_tokens(source, parts))
        for parts, made in zip(responses, postprocess_responses(rule, responses), strict=True)
    ]


def _weighted_tokens(source: WeightSource, rounds: Sequence[TokenWeights]) -> Bool[Tensor, " n"] | None:
    """Returns a mask of the tokens to which a partial source assigned a weight in any round."""
    return torch.cat([row.weights for row in rounds]).ne(0).any(dim=0) if source.partial else None


def _align_chunk(
    source: WeightSource, chunk: Sequence[PairInputs], done: Sequence[Mapping[str, SourceWeights]], method: AlignMethod
) -> list[AlignedResponse | None]:
    """Aligns a chunk; returns each pair's responses, chosen first (None if not batchable)."""
    found: list[AlignedResponse | None] = [None] * (2 * len(done))
    if source.tokens == "train":
        return found
    rows = [one[side] for one in done for side in SIDES]
    onto = [asked.encoded[side] for asked, _ in zip(chunk, done, strict=False) for side in SIDES]
    plain = [place for place, row in enumerate(rows) if not row.begins]
    landed = align_responses(
        [(rows[place].row, rows[place].weights, rows[place].weighted) for place in plain],
        [onto[place] for place in plain],
        method,
        _end_gets_mean(source),
    )
    for place, one in zip(plain, landed, strict=True):
        found[place] = one
    return found


def _end_gets_mean(source: WeightSource) -> bool:
    return source.postprocess is not None and source.postprocess.end_token is EndToken.MEAN


def _select_row(source: WeightSource, asked: PairInputs, layers: tuple[StoredRow, ...]) -> PairWeights | None:
    return None if asked.captured is None else source.select(asked.captured, layers)


def _selected_source_weights(
    source: WeightSource, asked: PairInputs, captured: PairWeights | None
) -> dict[str, SourceWeights]:
    """Returns both responses' weights on the source's tokens; ``captured`` contains only the selected row."""
    encoded, pair, both = asked.encoded, asked.pair, None
    if captured is None and isinstance(source, TextSource):
        if pair is None:
            raise ValueError(f"{type(source).__name__} computes weights from a pair's text, but no pair was given")
        both = source.weigh_pair(pair, encoded)
    rule = None if source.partial else source.postprocess
    finished = {}
    for side in SIDES:
        where = f"pair {asked.pair_id if captured is None else captured.pair_id}, {side}"
        rows = _raw_rows(source, captured, asked, side, None if both is None else both[side])
        if not rows:
            raise UserError(
                f"{where}: expected at least one round of captured weights, got none; run attnpo.weigh again"
            )
        rows, realigned = _align_rounds(rows)
        begins = 0 if pair is None else weighted_start(pair, side)
        rows, trace = prepend_trace_rows(source, rows, encoded[side], begins)
        raw = [row.weights[0].double() for row in rows]
        weights = _combine_rounds(source, raw, where, trace)
        flat = rule is not None and has_flat_rounds([row[trace:] for row in raw], rule.round_order)
        open_to = rows[0].offsets[:, 1] > rows[0].offsets[:, 0] if source.kind is Kind.FACTOR else None
        if begins:
            weights = join_trace_and_answer(weights, trace)
            open_to = torch.arange(weights.numel()) >= trace
        finished[side] = SourceWeights(
            rows[0], weights, realigned, flat, _weighted_tokens(source, rows), open_to, begins
        )
    return finished


def align_raw_weights(
    source: WeightSource,
    captured: PairWeights,
    encoded: Mapping[str, EncodedResponse],
    align_method: AlignMethod = AlignMethod.LEVENSHTEIN,
    *,
    layers: tuple[StoredRow, ...] = (),
) -> dict[str, Float[Tensor, " _"]]:
    """Returns the captured weights by side: the mean over rounds on the training tokens, before any post-processing."""
    found = {}
    for side in SIDES:
        rows, _ = _align_rounds([item.side(side) for item in source.select(captured, layers).rounds])
        mean = average_rounds([row.weights[0] for row in rows])
        found[side] = _align_row(rows[0], mean, encoded[side].response_ids, encoded[side].offsets, align_method).weights
    return found


def rows_to_transform(finished: Mapping[str, SourceWeights], pair_id: str) -> dict[str, WeightRow]:
    """Returns the rows of a pair that transforms operate on."""
    seen = {side: finished[side].changeable_tokens for side in SIDES}
    return {
        side: WeightRow(
            finished[side].weights[seen[side]],
            finished[side].row.token_ids[seen[side]],
            pair_id,
            side,
            int(seen[other].sum()),
        )
        for side, other in zip(SIDES, SIDES[::-1], strict=True)
    }


def apply_transform(
    transform: WeightTransform, finished: Mapping[str, SourceWeights], pair_id: str
) -> dict[str, SourceWeights]:
    """Applies ``transform`` to both responses; UserError naming the pair if the resulting weights are invalid."""
    changed = {}
    for side, row in rows_to_transform(finished, pair_id).items():
        weights = finished[side].weights.clone()
        weights[finished[side].changeable_tokens] = _apply_to_row(transform, row)
        changed[side] = replace(finished[side], weights=weights)
    return changed


def _apply_to_row(transform: WeightTransform, row: WeightRow) -> Float[Tensor, " n"]:
    """Transforms the weights of ``row`` in their dtype; UserError naming the pair if shape or values are invalid."""
    weights, where = transform(row), f"pair {row.pair_id}, {row.side}, after {type(transform).__name__}"
    if weights.shape != row.weights.shape:
        raise UserError(f"{where}: expected {row.weights.numel()} weights, got shape {tuple(weights.shape)}")
    check_finite(weights, where)
    return weights.to(row.weights.dtype)


def transform_batch(
    transforms: Sequence[WeightTransform], weights: Float[Tensor, "rows R"], batch: PreferenceBatch
) -> Float[Tensor, "rows R"]:
    """Applies the run's transforms to an online source's weights for a batch's main rows, one response at a time.

    Transforms see all tokens, including the end of turn, which online sources weight like any other token.
    """
    mask, ids = batch.main.response_mask.cpu(), batch.main.response_ids.cpu()
    counts, changed = mask.sum(-1).tolist(), weights.detach().cpu().clone()
    for place, kept in enumerate(mask):
        side, pair = divmod(place, batch.pairs)
        other = counts[(1 - side) * batch.pairs + pair]
        row = WeightRow(changed[place, kept], ids[place, kept], batch.pair_ids[pair], SIDES[side], other)
        for transform in transforms:
            row = replace(row, weights=_apply_to_row(transform, row))
        changed[place, kept] = row.weights
    return changed.to(weights.device)


def fit_transforms_in_order(
    transforms: Sequence[WeightTransform], finished: Mapping[str, Mapping[str, SourceWeights]]
) -> tuple[WeightTransform, ...]:
    """Fits each transform on the training rows (by pair id) after applying the transforms before it."""
    done: list[WeightTransform] = []
    pending: Mapping[str, Mapping[str, SourceWeights]] = finished
    for place, transform in enumerate(transforms):
        if transform.needs_fit:
            rows = [row for pair_id, sides in pending.items() for row in rows_to_transform(sides, pair_id).values()]
            transform = transform.fit(rows)
        done.append(transform)
        if any(later.needs_fit for later in transforms[place + 1 :]):
            pending = {pair_id: apply_transform(transform, sides, pair_id) for pair_id, sides in pending.items()}
    return tuple(done)


def check_transforms(source: WeightSource, transforms: Sequence[object]) -> None:
    """Rejects transforms that are undefined for a source's weights.

    Transforms that treat weights as shares of a whole are rejected for factors and signed rows. For an online source,
    whose weights do not exist before training, these transforms and fitted ones are rejected. An online source that
    weights whole pairs accepts no transforms.
    """
    if not transforms:
        return
    names, name = ", ".join(type(transform).__name__ for transform in transforms), type(source).__name__
    online = isinstance(source, OnlineSource)
    if online and is_neutral(source):
        raise UserError(
            f"transforms ({names}) change token weights, but {name} weights whole pairs and gives all tokens the same "
            "weight: remove the transforms"
        )
    refused = ", ".join(type(transform).__name__ for transform in transforms if not accepts_factors(transform))
    if refused and (online or source.signed or source.kind is not Kind.DISTRIBUTION):
        what = (
            "computes its weights in every step"
            if online
            else f"yields {'signed rows' if source.signed else 'factors'}"
        )
        raise UserError(
            f"transforms ({refused}) need distributions over the response that exist before training, but {name} "
            f"{what}: use {', '.join(FOR_FACTORS[:-1])} or {FOR_FACTORS[-1]}, or another source"
        )


def _raw_rows(
    source: WeightSource, captured: PairWeights | None, asked: PairInputs, side: str, own: Float[Tensor, " m"] | None
) -> list[TokenWeights]:
    """Returns one entry per round, with only the selected row. ``own``: the weights of a text source."""
    if captured is not None:
        return [item.side(side) for item in captured.rounds]
    encoded = asked.encoded[side]
    if own is None:
        raise UserError(
            f"pair {asked.pair_id}: expected captured weights for {type(source).__name__}; run attnpo.weigh first"
        )
    count = len(encoded.response_ids)
    if own.shape != (count,):
        raise UserError(
            f"pair {asked.pair_id}, {side}: expected {count} weights from {type(source).__name__}, one for each "
            f"training token, got shape {tuple(own.shape)}; correct the source"
        )
    offsets = torch.from_numpy(to_range_array(encoded.offsets))
    ids = torch.from_numpy(np.array(encoded.response_ids, dtype=np.int64))
    return [TokenWeights(ids, offsets, own.unsqueeze(0))]


def _align_response(
    source: WeightSource, asked: PairInputs, both: Mapping[str, SourceWeights], side: str, method: AlignMethod
) -> AlignedResponse:
    finished, encoded = both[side], asked.encoded[side]
    base, weights = finished.row, finished.weights
    places = to_range_array(encoded.offsets)
    holds = torch.from_numpy(places[:, 1] > places[:, 0])
    if source.tokens == "train":
        _check_same_ids(base, encoded, f"pair {asked.pair_id}, {side}")
        arrived = (torch.arange(weights.numel()) < holds.numel()).to(weights)
        weights, matched = weights[: holds.numel()], holds
    else:
        aligned = _align_row(base, weights, encoded.response_ids, places, method)
        weights, matched, arrived = aligned.weights, aligned.matched & holds, aligned.arrived
        if finished.weighted is not None:
            matched &= _align_row(base, finished.weighted.double(), encoded.response_ids, places, method).weights > 0
        weights = torch.where(holds, weights, 1.0 / base.token_ids.numel() if _end_gets_mean(source) else 0.0)
    weighed = holds & (torch.arange(holds.numel()) >= count_tokens_before(finished.begins, encoded.offsets))
    trace = count_tokens_before(finished.begins, base.offsets.tolist()) if finished.begins else 0
    return AlignedResponse(
        weights.to(base.weights.dtype),
        float(holds.numel() if source.tokens == "train" else base.token_ids.numel()),
        *coverage_and_kept_mass(finished.weights[trace:], arrived[trace:]),
        int(weighed.sum()),
        int((matched & weighed).sum()),
    )


def _combine_rounds(
    source: WeightSource, raw: Sequence[Float[Tensor, " n"]], where: str, trace: int
) -> Float[Tensor, " m"]:
    """Combines the rounds into one row, by post-processing or by averaging, excluding the first ``trace`` tokens."""
    if source.postprocess is not None:
        return source.postprocess([row[trace:] for row in raw], where)
    for row in raw:
        check_finite(row, where)
        if not source.signed and bool((row < 0).any()):
            raise UserError(
                f"{where}: {type(source).__name__} is declared unsigned, but has a weight of {row.min():g}; "
                "correct the source"
            )
        if source.kind is Kind.DISTRIBUTION and not source.partial and not bool(row.any()):
            raise UserError(
                f"{where}: {type(source).__name__} is declared as a distribution, but all {row.numel()} weights are 0; "
                "drop the pair or correct the source"
            )
    return average_rounds(raw)[trace:]


def _align_rounds(rows: list[TokenWeights]) -> tuple[list[TokenWeights], bool]:
    """Aligns all rounds with the first by characters; returns the result and whether any round had different tokens."""
    base, same = rows[0], [rows[0]]
    realigned = False
    for row in rows[1:]:
        if not torch.equal(row.token_ids, base.token_ids):
            aligned = _align_row(row, row.weights[0], base.token_ids, base.offsets, AlignMethod.CHARACTERS)
            row, realigned = replace(base, weights=aligned.weights.unsqueeze(0)), True
        same.append(row)
    return same, realigned


def _align_row(
    source: TokenWeights,
    weights: Float[Tensor, " n"],
    target_ids: Sequence[int] | Int[Tensor, " m"],
    target_offsets: Ranges,
    method: AlignMethod,
) -> AlignedWeights:
    """Aligns ``weights``, which belong to the tokens of ``source``, with the target tokens."""
    return align(source.token_ids, source.offsets, weights, target_ids, target_offsets, method)


def _check_same_ids(source: TokenWeights, encoded: EncodedResponse, where: str) -> None:
    """Raises UserError unless the training ids equal the source's ids, or a prefix of them if truncated."""
    count = len(encoded.response_ids)
    if source.token_ids[:count].tolist() != list(encoded.response_ids):
        raise UserError(
            f"{where}: the weights were captured for different training token ids; capture them again with this "
            "tokenizer and chat template"
        )


def check_trace_weighting(source: WeightSource) -> None:
    """Raises UserError for a source whose weights are not a distribution."""
    online = isinstance(source, OnlineSource) and not is_neutral(source)
    if online or source.signed or source.kind is not Kind.DISTRIBUTION:
        what = (
            "computes its weights in every step"
            if online
            else f"yields {'signed rows' if source.signed else 'factors'}"
        )
        raise UserError(
            "data.columns.traces=weigh_apart splits the mass of a distribution between a reasoning trace and its "
            f"answer, but {type(source).__name__} {what}: set data.columns.traces=keep or strip, or use a source of "
            "distributions, e.g. weights=attention"
        )


def prepend_trace_rows(
    source: WeightSource, rows: Sequence[TokenWeights], encoded: EncodedResponse, begins: int
) -> tuple[list[TokenWeights], int]:
    """Extends the rounds of one response to the tokens of its trace; returns them and the number of trace tokens.

    ``begins``: index of the answer's first character; 0 if there is no separately weighted trace. A judge reads only
    the answer, so the trace's training tokens (those containing text) are prepended with weight 0.
    """
    if not begins:
        return list(rows), 0
    check_trace_weighting(source)
    if source.tokens != "train":
        rows = [_prepend_row(row, encoded, begins) for row in rows]
    return list(rows), count_tokens_before(begins, rows[0].offsets.tolist())


def _prepend_row(row: TokenWeights, encoded: EncodedResponse, begins: int) -> TokenWeights:
    tokens = list(zip(encoded.response_ids, encoded.offsets, strict=True))[
        : count_tokens_before(begins, encoded.offsets)
    ]
    held = [(token, place) for token, place in tokens if place[1] > place[0]]
    ids = torch.tensor([token for token, _ in held], dtype=torch.long)
    offsets = torch.tensor([place for _, place in held], dtype=torch.long).reshape(-1, 2)
    nothing = row.weights.new_zeros(row.weights.shape[0], len(held))
    return replace(
        row,
        token_ids=torch.cat([ids, row.token_ids]),
        offsets=torch.cat([offsets, row.offsets]),
        weights=torch.cat([nothing, row.weights], dim=1),
    )


def join_trace_and_answer(answer: Float[Tensor, " n"], trace: int) -> Float[Tensor, " m"]:
    """Joins trace and answer into a distribution. Trace tokens get the mean weight, and the answer gets the rest."""
    tokens = max(1, trace + answer.numel())
    return torch.cat([answer.new_full((trace,), 1 / tokens), normalize(answer) * (answer.numel() / tokens)])
