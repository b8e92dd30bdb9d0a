"""From stored rows to weights on the training tokens: select, post-process, transform, align, end of turn.

Kept weights are never rescaled after alignment: what has no partner on the training side (a token the tokenizers
cut differently, the tail of a truncated response) is lost and shows as coverage (paper appendix on token matching).

A reasoning trace weighed apart has its share of the tokens as its mass, a source's weights are the answer's: of a
response with t tokens of trace and n tokens of answer each token of the trace gets 1 / (t + n), and the answer's share
n / (t + n) in proportion to its own distribution. Uniform weights stay uniform.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnpo.judge.layers import Row
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
from attnpo.weights.arrival import shares_that_arrived
from attnpo.weights.base import OnlineSource, TextSource, WeightSource, is_neutral
from attnpo.weights.many_rows import Landed, carry, distributions
from attnpo.weights.postprocess import (
    EndToken,
    Postprocess,
    average_rounds,
    check_finite,
    flat_rounds,
    normalize,
    require_distribution,
)
from attnpo.weights.transforms import WeightRow, WeightTransform, takes_factors

CHUNK = 256
"""Pairs whose weights are computed at once: their arrays fit a processor's cache."""
_T = TypeVar("_T")

# Options of the group `transform` that mean the same for factors.
FOR_FACTORS = ("shuffled", "inverse", "uniform_on_support", "mixture", "one_side", "tail_cut")


@dataclass(frozen=True)
class TrainingWeights:
    """Weights of one pair on its training tokens; tuples are (chosen, rejected).

    ``lengths``: |y|, the number of source tokens. ``coverage``: share of the training tokens with characters that got
    a partner (from a partial source: a partner about which something was said), those of a trace that is weighed
    apart left out. ``content``: how many such tokens there are; ``unmatched``: how many of them got none.
    ``source_coverage``, ``kept_mass``: shares of the source's tokens and of their absolute weights, after transforms,
    that arrived (``weights.arrival``); a trace that is weighed apart is left out.
    ``realigned``: responses whose judge rounds were cut into different tokens, so that one was aligned onto the other.
    ``flat``: sides whose raw weights were all 0 and which became uniform. ``factors``: the weights are factors, to be
    used as they are, and no distribution.
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
class Finished:
    """One response's weights, combined and post-processed, still on the source's tokens.

    ``row`` holds these tokens (and what was stored on them); ``realigned`` says that a round had other ones. ``flat``:
    a raw row was all 0 and counts as uniform. ``said``: the tokens about which a partial source said something,
    None for sources that weigh every token. ``open``: the tokens that transforms may change, None for all. ``begins``:
    the first character that the source weighs, above 0 behind a trace that is weighed apart.
    """

    row: TokenWeights
    weights: Float[Tensor, " n"]
    realigned: bool
    flat: bool = False
    said: Bool[Tensor, " n"] | None = None
    open: Bool[Tensor, " n"] | None = None
    begins: int = 0

    @property
    def changeable(self) -> Bool[Tensor, " n"]:
        """Returns the tokens that transforms may change."""
        return torch.ones(self.weights.numel(), dtype=torch.bool) if self.open is None else self.open


class PairToWeigh(NamedTuple):
    """Captured rows of a pair (None for a source that captures nothing), its training ids by side, and the pair."""

    captured: PairWeights | None
    encoded: Mapping[str, EncodedResponse]
    pair: PreferencePair | None = None

    @property
    def pair_id(self) -> str:
        """Returns the pair's id for errors and transforms."""
        if self.captured is not None:
            return self.captured.pair_id
        return "without an id" if self.pair is None else self.pair.pair_id


def _check(source: WeightSource) -> WeightSource:
    """Returns ``source``. UserError for one whose rows must not be post-processed."""
    if source.postprocess is not None:
        require_distribution(source.kind, source.signed)
    return source


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
    """Returns the weights of one pair on the training tokens in ``encoded`` ("chosen", "rejected").

    ``layers`` names the rows of ``captured`` in their order. ``captured`` is None for a source that captures nothing,
    which reads ``pair`` instead. Transforms come fitted; an online source's are left to ``transformed_batch``. Raw rows
    are processed in float64 and returned in their own type. UserError for rows that are not what the source's kind
    promises.
    """
    asked = PairToWeigh(captured, encoded, pair)
    finished = finished_weights(source, captured, encoded, layers=layers, pair=pair)
    finished = _replace_rows(source, asked.pair_id, finished, transforms)
    return _join(source, finished, [_land(source, asked, finished, side, align_method) for side in SIDES])


def weigh_pairs(
    source: WeightSource,
    pairs: Iterable[PairToWeigh],
    align_method: AlignMethod = AlignMethod.LEVENSHTEIN,
    transforms: Sequence[WeightTransform] = (),
    *,
    layers: tuple[Row, ...] = (),
) -> Iterator[TrainingWeights]:
    """Yields what ``training_weights`` makes of each of many pairs, in their order and to the bit, by arrays."""
    _check(source)
    for chunk in _chunks(pairs):
        done, problem = _until_problem(
            _replace_rows(source, asked.pair_id, finished, transforms)
            for asked, finished in zip(chunk, _finish_chunk(source, chunk, layers), strict=True)
        )
        at_once = iter(_carry(source, chunk, done, align_method))
        for asked, finished in zip(chunk, done, strict=False):
            sides = [next(at_once) or _land(source, asked, finished, side, align_method) for side in SIDES]
            yield _join(source, finished, sides)
        if problem is not None:
            raise problem


def _join(source: WeightSource, finished: Mapping[str, Finished], sides: Sequence[Landed]) -> TrainingWeights:
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


def _chunks(pairs: Iterable[PairToWeigh]) -> Iterator[list[PairToWeigh]]:
    left = iter(pairs)
    while chunk := list(islice(left, CHUNK)):
        yield chunk


def _until_problem(items: Iterable[_T]) -> tuple[list[_T], Exception | None]:
    """Returns the items before the first that raises, and what it raised, to be raised after they are used."""
    done: list[_T] = []
    try:
        for item in items:
            done.append(item)
    except Exception as problem:  # noqa: BLE001  raised after the items before it
        return done, problem
    return done, None


def _replace_rows(
    source: WeightSource, pair_id: str, finished: dict[str, Finished], transforms: Sequence[WeightTransform]
) -> dict[str, Finished]:
    for transform in () if isinstance(source, OnlineSource) else transforms:
        finished = apply_transform(transform, finished, pair_id)
    return finished


def finished_weights(
    source: WeightSource,
    captured: PairWeights | None,
    encoded: Mapping[str, EncodedResponse],
    *,
    layers: tuple[Row, ...] = (),
    pair: PreferencePair | None = None,
) -> dict[str, Finished]:
    """Returns both responses' weights on the source's tokens, before transforms and alignment."""
    asked = PairToWeigh(captured, encoded, pair)
    return _finish_selected(_check(source), asked, _select(source, asked, layers))


def finish_pairs(
    source: WeightSource, pairs: Iterable[PairToWeigh], layers: tuple[Row, ...] = ()
) -> Iterator[dict[str, Finished]]:
    """Yields what ``finished_weights`` makes of each of many pairs, in their order and to the bit, by arrays."""
    _check(source)
    for chunk in _chunks(pairs):
        yield from _finish_chunk(source, chunk, layers)


def _finish_chunk(
    source: WeightSource, chunk: Sequence[PairToWeigh], layers: tuple[Row, ...]
) -> Iterator[dict[str, Finished]]:
    selected, problem = _until_problem(_select(source, asked, layers) for asked in chunk)
    at_once = iter(_average_rounds(source, chunk, selected))
    for asked, captured in zip(chunk, selected, strict=False):
        both = {side: row for side, row in zip(SIDES, (next(at_once), next(at_once)), strict=True) if row is not None}
        yield both if len(both) == len(SIDES) else _finish_selected(source, asked, captured)
    if problem is not None:
        raise problem


def _average_rounds(
    source: WeightSource, chunk: Sequence[PairToWeigh], selected: Sequence[PairWeights | None]
) -> list[Finished | None]:
    """Returns both responses of each pair, chosen first, from plain rounds of distributions; None for the others."""
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
        None if made is None else Finished(parts[0], made[0], False, made[1] and not partial, _said(source, parts))
        for parts, made in zip(responses, distributions(rule, responses), strict=True)
    ]


def _said(source: WeightSource, rounds: Sequence[TokenWeights]) -> Bool[Tensor, " n"] | None:
    """Returns the tokens about which a partial source said something in one of the rounds."""
    return torch.cat([row.weights for row in rounds]).ne(0).any(dim=0) if source.partial else None


def _carry(
    source: WeightSource, chunk: Sequence[PairToWeigh], done: Sequence[Mapping[str, Finished]], method: AlignMethod
) -> list[Landed | None]:
    """Returns both responses of each pair, chosen first, where tokens begin alike on both sides; else None."""
    found: list[Landed | None] = [None] * (2 * len(done))
    if source.tokens == "train":
        return found
    rows = [one[side] for one in done for side in SIDES]
    onto = [asked.encoded[side] for asked, _ in zip(chunk, done, strict=False) for side in SIDES]
    plain = [place for place, row in enumerate(rows) if not row.begins]
    landed = carry(
        [(rows[place].row, rows[place].weights, rows[place].said) for place in plain],
        [onto[place] for place in plain],
        method,
        _is_end_mean(source),
    )
    for place, one in zip(plain, landed, strict=True):
        found[place] = one
    return found


def _is_end_mean(source: WeightSource) -> bool:
    return source.postprocess is not None and source.postprocess.end_token is EndToken.MEAN


def _select(source: WeightSource, asked: PairToWeigh, layers: tuple[Row, ...]) -> PairWeights | None:
    return None if asked.captured is None else source.select(asked.captured, layers)


def _finish_selected(source: WeightSource, asked: PairToWeigh, captured: PairWeights | None) -> dict[str, Finished]:
    """Returns both responses' weights on the source's tokens, from ``captured`` with the one row that was selected."""
    encoded, pair, both = asked.encoded, asked.pair, None
    if captured is None and isinstance(source, TextSource):
        if pair is None:
            raise ValueError(f"{type(source).__name__} weighs a pair's own text, and no pair was given")
        both = source.weigh_pair(pair, encoded)
    rule = None if source.partial else source.postprocess
    finished = {}
    for side in SIDES:
        where = f"pair {asked.pair_id if captured is None else captured.pair_id}, {side}"
        rows = _raw_rows(source, captured, asked, side, None if both is None else both[side])
        if not rows:
            raise UserError(f"{where}: expected at least one round of captured weights, got none; capture it again")
        rows, realigned = _same_tokens(rows)
        begins = 0 if pair is None else weighted_start(pair, side)
        rows, trace = rows_with_trace(source, rows, encoded[side], begins)
        raw = [row.weights[0].double() for row in rows]
        weights = _finish(source, raw, where, trace)
        flat = rule is not None and flat_rounds([row[trace:] for row in raw], rule.round_order)
        open_to = rows[0].offsets[:, 1] > rows[0].offsets[:, 0] if source.kind is Kind.FACTOR else None
        if begins:
            weights = beside_trace(weights, trace)
            open_to = torch.arange(weights.numel()) >= trace
        finished[side] = Finished(rows[0], weights, realigned, flat, _said(source, rows), open_to, begins)
    return finished


def raw_weights(
    source: WeightSource,
    captured: PairWeights,
    encoded: Mapping[str, EncodedResponse],
    align_method: AlignMethod = AlignMethod.LEVENSHTEIN,
    *,
    layers: tuple[Row, ...] = (),
) -> dict[str, Float[Tensor, " _"]]:
    """Returns by side, what was captured.

    The mean over its rounds on the training tokens, before any post-processing.
    """
    found = {}
    for side in SIDES:
        rows, _ = _same_tokens([item.side(side) for item in source.select(captured, layers).rounds])
        mean = average_rounds([row.weights[0] for row in rows])
        found[side] = _align(rows[0], mean, encoded[side].response_ids, encoded[side].offsets, align_method).weights
    return found


def weight_rows(finished: Mapping[str, Finished], pair_id: str) -> dict[str, WeightRow]:
    """Returns what a transform sees of a pair."""
    seen = {side: finished[side].changeable for side in SIDES}
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


def apply_transform(transform: WeightTransform, finished: Mapping[str, Finished], pair_id: str) -> dict[str, Finished]:
    """Returns both responses' weights after ``transform``. UserError naming the pair for other numbers."""
    changed = {}
    for side, row in weight_rows(finished, pair_id).items():
        weights = finished[side].weights.clone()
        weights[finished[side].changeable] = _apply_to_row(transform, row)
        changed[side] = replace(finished[side], weights=weights)
    return changed


def _apply_to_row(transform: WeightTransform, row: WeightRow) -> Float[Tensor, " n"]:
    """Returns the row's weights after ``transform``, in their own type. UserError naming the pair."""
    weights, where = transform(row), f"pair {row.pair_id}, {row.side}, after {type(transform).__name__}"
    if weights.shape != row.weights.shape:
        raise UserError(f"{where}: expected {row.weights.numel()} weights, got the shape {tuple(weights.shape)}")
    check_finite(weights, where)
    return weights.to(row.weights.dtype)


def transformed_batch(
    transforms: Sequence[WeightTransform], weights: Float[Tensor, "rows R"], batch: PreferenceBatch
) -> Float[Tensor, "rows R"]:
    """Returns an online source's weights of a batch's main rows after the run's transforms, each response by itself.

    All its tokens are changed, the end of turn among them, as such sources weigh it like any other token.
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


def fit_in_order(
    transforms: Sequence[WeightTransform], finished: Mapping[str, Mapping[str, Finished]]
) -> tuple[WeightTransform, ...]:
    """Returns the transforms, each fitted on the training rows (by pair id) as those before it leave them."""
    done: list[WeightTransform] = []
    pending: Mapping[str, Mapping[str, Finished]] = finished
    for place, transform in enumerate(transforms):
        if transform.needs_fit:
            rows = [row for pair_id, sides in pending.items() for row in weight_rows(sides, pair_id).values()]
            transform = transform.fit(rows)
        done.append(transform)
        if any(later.needs_fit for later in transforms[place + 1 :]):
            pending = {pair_id: apply_transform(transform, sides, pair_id) for pair_id, sides in pending.items()}
    return tuple(done)


def check_transforms(source: WeightSource, transforms: Sequence[object]) -> None:
    """Refuses transforms that have no meaning for a source's weights.

    Those that read weights as shares of a whole, for factors and signed rows. Those, and the fitted ones, for an online
    source, whose weights come after all training rows. Any, for an online source of pair weights.
    """
    if not transforms:
        return
    names, name = ", ".join(type(transform).__name__ for transform in transforms), type(source).__name__
    online = isinstance(source, OnlineSource)
    if online and is_neutral(source):
        raise UserError(
            f"transforms ({names}) change the weights of tokens, and {name} weighs whole pairs, their tokens alike: "
            "remove them"
        )
    refused = ", ".join(type(transform).__name__ for transform in transforms if not takes_factors(transform))
    if refused and (online or source.signed or source.kind is not Kind.DISTRIBUTION):
        what = "computes its own in every step" if online else f"gives {'signed rows' if source.signed else 'factors'}"
        raise UserError(
            f"transforms ({refused}) work on distributions over the response that stand before training; {name} "
            f"{what}: take {', '.join(FOR_FACTORS[:-1])} or {FOR_FACTORS[-1]}, or another source"
        )


def _raw_rows(
    source: WeightSource, captured: PairWeights | None, asked: PairToWeigh, side: str, own: Float[Tensor, " m"] | None
) -> list[TokenWeights]:
    """Returns one entry per round, with the one row that was selected; ``own``: a text source's weights."""
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
            f"pair {asked.pair_id}, {side}: expected {count} weights of {type(source).__name__}, one for each training "
            f"token, got the shape {tuple(own.shape)}; correct the source"
        )
    offsets = torch.from_numpy(to_range_array(encoded.offsets))
    ids = torch.from_numpy(np.array(encoded.response_ids, dtype=np.int64))
    return [TokenWeights(ids, offsets, own.unsqueeze(0))]


def _land(
    source: WeightSource, asked: PairToWeigh, both: Mapping[str, Finished], side: str, method: AlignMethod
) -> Landed:
    finished, encoded = both[side], asked.encoded[side]
    base, weights = finished.row, finished.weights
    places = to_range_array(encoded.offsets)
    holds = torch.from_numpy(places[:, 1] > places[:, 0])
    if source.tokens == "train":
        _require_same_ids(base, encoded, f"pair {asked.pair_id}, {side}")
        arrived = (torch.arange(weights.numel()) < holds.numel()).to(weights)
        weights, matched = weights[: holds.numel()], holds
    else:
        aligned = _align(base, weights, encoded.response_ids, places, method)
        weights, matched, arrived = aligned.weights, aligned.matched & holds, aligned.arrived
        if finished.said is not None:
            matched &= _align(base, finished.said.double(), encoded.response_ids, places, method).weights > 0
        weights = torch.where(holds, weights, 1.0 / base.token_ids.numel() if _is_end_mean(source) else 0.0)
    weighed = holds & (torch.arange(holds.numel()) >= count_tokens_before(finished.begins, encoded.offsets))
    trace = count_tokens_before(finished.begins, base.offsets.tolist()) if finished.begins else 0
    return Landed(
        weights.to(base.weights.dtype),
        float(holds.numel() if source.tokens == "train" else base.token_ids.numel()),
        *shares_that_arrived(finished.weights[trace:], arrived[trace:]),
        int(weighed.sum()),
        int((matched & weighed).sum()),
    )


def _finish(source: WeightSource, raw: Sequence[Float[Tensor, " n"]], where: str, trace: int) -> Float[Tensor, " m"]:
    """Returns the rounds as one row, post-processed or their plain mean; without the first ``trace``."""
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
    """Returns all rounds on the tokens of the first, moved there by characters, and whether any had to be."""
    base, same = rows[0], [rows[0]]
    realigned = False
    for row in rows[1:]:
        if not torch.equal(row.token_ids, base.token_ids):
            aligned = _align(row, row.weights[0], base.token_ids, base.offsets, AlignMethod.CHARACTERS)
            row, realigned = replace(base, weights=aligned.weights.unsqueeze(0)), True
        same.append(row)
    return same, realigned


def _align(
    source: TokenWeights,
    weights: Float[Tensor, " n"],
    target_ids: Sequence[int] | Int[Tensor, " m"],
    target_offsets: Ranges,
    method: AlignMethod,
) -> AlignedWeights:
    """Returns ``weights``, which stand on the tokens of ``source``, on the target's."""
    return align(source.token_ids, source.offsets, weights, target_ids, target_offsets, method)


def _require_same_ids(source: TokenWeights, encoded: EncodedResponse, where: str) -> None:
    """Raises UserError unless the training ids are the source's, or their beginning when truncated."""
    count = len(encoded.response_ids)
    if source.token_ids[:count].tolist() != list(encoded.response_ids):
        raise UserError(
            f"{where}: weights on training tokens were captured for other token ids; capture them again with this "
            "tokenizer and chat template"
        )


def check_apart(source: WeightSource) -> None:
    """Raises UserError for a source whose weights are no shares of a whole."""
    online = isinstance(source, OnlineSource) and not is_neutral(source)
    if online or source.signed or source.kind is not Kind.DISTRIBUTION:
        what = "computes its own in every step" if online else f"gives {'signed rows' if source.signed else 'factors'}"
        raise UserError(
            "data.columns.traces=weigh_apart shares the mass of a distribution between a reasoning trace and its "
            f"answer, and {type(source).__name__} {what}: set data.columns.traces=keep or strip, or take a source of "
            "distributions, such as weights=attention"
        )


def rows_with_trace(
    source: WeightSource, rows: Sequence[TokenWeights], encoded: EncodedResponse, begins: int
) -> tuple[list[TokenWeights], int]:
    """Returns the rounds of one response on the tokens of trace and answer, and how many of these are the trace's.

    ``begins``: the answer's first character; 0 when nothing is weighed apart. A judge has read the answer alone: the
    trace's training tokens, those that hold a character of it, are put in front with a weight of 0.
    """
    if not begins:
        return list(rows), 0
    check_apart(source)
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


def beside_trace(answer: Float[Tensor, " n"], trace: int) -> Float[Tensor, " m"]:
    """Returns the distribution of trace, its tokens at the mean, and answer, its weights in the rest; sum 1."""
    tokens = max(1, trace + answer.numel())
    return torch.cat([answer.new_full((trace,), 1 / tokens), normalize(answer) * (answer.numel() / tokens)])
