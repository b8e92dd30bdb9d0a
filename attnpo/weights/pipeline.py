"""From stored rows to weights on the training tokens: select, post-process, transform, align, end of turn.

Kept weights are never rescaled after alignment: what has no partner on the training side (a token the tokenizers
cut differently, the tail of a truncated response) is lost and shows as coverage (paper appendix on token matching).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

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
from attnpo.text.alignment import Aligned, AlignMethod, align
from attnpo.text.traces import before, start_apart
from attnpo.weights.apart import beside_trace, rows_with_trace
from attnpo.weights.arrival import shares_that_arrived
from attnpo.weights.base import NativeSource, OnlineSource, PairedSource, PartialSource, WeightSource, is_neutral
from attnpo.weights.layers import Row
from attnpo.weights.postprocess import EndToken, average_rounds, check_finite, flat_rounds, require_distribution
from attnpo.weights.transforms import WeightRow, WeightTransform, takes_factors

# Options of the group `transform` that mean the same for factors.
FOR_FACTORS = ("shuffled", "inverse", "uniform_on_support", "mixture", "one_side", "tail_cut")


@dataclass(frozen=True)
class TrainingWeights:
    """Weights of one pair on its training tokens; tuples are (chosen, rejected).

    ``lengths``: |y|, the number of source tokens. ``coverage``: share of the training tokens with characters that got
    a partner (from a ``PartialSource``: a partner about which something was said), those of a trace that is weighed
    apart left out. ``content``: how many such tokens there are; ``unmatched``: how many of them got none.
    ``source_coverage``, ``kept_mass``: shares of the source's tokens and of their absolute weights, after transforms,
    that arrived (``weights.arrival``); a trace that is weighed apart is left out.
    ``realigned``: responses whose judge rounds were cut into different tokens, so that one was aligned onto the other.
    ``flat``: sides whose raw weights were all 0 and which became uniform. ``factors``: the weights are factors, to be
    used as they are, and no distribution.
    """

    chosen: Float[Tensor, "m"]
    rejected: Float[Tensor, "k"]
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
    a raw row was all 0 and counts as uniform. ``said``: the tokens about which a ``PartialSource`` said something,
    None for sources that weigh every token. ``open``: the tokens that transforms may change, None for all. ``begins``:
    the first character that the source weighs, above 0 behind a trace that is weighed apart.
    """

    row: TokenWeights
    weights: Float[Tensor, "n"]
    realigned: bool
    flat: bool = False
    said: Bool[Tensor, "n"] | None = None
    open: Bool[Tensor, "n"] | None = None
    begins: int = 0

    @property
    def changeable(self) -> Bool[Tensor, "n"]:
        """The tokens that transforms may change."""
        return torch.ones(self.weights.numel(), dtype=torch.bool) if self.open is None else self.open


@dataclass(frozen=True)
class _Side:
    weights: Float[Tensor, "m"]
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
        captured = source.select(captured, layers)
    both = source.weigh_pair(_given(source, pair), encoded) if isinstance(source, PairedSource) else None
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
        said = torch.stack(raw).ne(0).any(dim=0) if isinstance(source, PartialSource) else None
        rule = None if said is not None else source.postprocess
        flat = rule is not None and flat_rounds([row[trace:] for row in raw], rule.round_order)
        open_to = rows[0].offsets[:, 1] > rows[0].offsets[:, 0] if source.kind is Kind.FACTOR else None
        if begins:
            weights = beside_trace(weights, trace)
            open_to = torch.arange(weights.numel()) >= trace
        finished[side] = Finished(rows[0], weights, realigned, flat, said, open_to, begins)
    return finished


def raw_weights(
    source: WeightSource,
    captured: PairWeights,
    encoded: Mapping[str, EncodedResponse],
    align_method: AlignMethod = AlignMethod.LEVENSHTEIN,
    *,
    layers: tuple[Row, ...] = (),
) -> dict[str, Float[Tensor, "_"]]:
    """By side, what was captured: the mean over its rounds on the training tokens, before any post-processing."""
    found = {}
    for side in SIDES:
        rows, _ = _same_tokens([item.side(side) for item in source.select(captured, layers).rounds])
        mean = average_rounds([row.weights[0] for row in rows])
        found[side] = _align(rows[0], mean, encoded[side], align_method).weights
    return found


def weight_rows(finished: Mapping[str, Finished], pair_id: str) -> dict[str, WeightRow]:
    """What a transform sees of a pair."""
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


def transformed(transform: WeightTransform, finished: Mapping[str, Finished], pair_id: str) -> dict[str, Finished]:
    """Both responses' weights after ``transform``. UserError naming the pair when it gives no finite numbers."""
    changed = {}
    for side, row in weight_rows(finished, pair_id).items():
        weights = finished[side].weights.clone()
        weights[finished[side].changeable] = _applied(transform, row)
        changed[side] = replace(finished[side], weights=weights)
    return changed


def _applied(transform: WeightTransform, row: WeightRow) -> Float[Tensor, "n"]:
    """The row's weights after ``transform``, in their own type. UserError naming the pair for what is no such row."""
    weights, where = transform(row), f"pair {row.pair_id}, {row.side}, after {type(transform).__name__}"
    if weights.shape != row.weights.shape:
        raise UserError(f"{where}: expected {row.weights.numel()} weights, got the shape {tuple(weights.shape)}")
    check_finite(weights, where)
    return weights.to(row.weights.dtype)


def transformed_batch(
    transforms: Sequence[WeightTransform], weights: Float[Tensor, "rows R"], batch: PreferenceBatch
) -> Float[Tensor, "rows R"]:
    """An online source's weights of a batch's main rows after the run's transforms, each response by itself.

    All its tokens are changed, the end of turn among them, as such sources weigh it like any other token.
    """
    mask, ids = batch.main.response_mask.cpu(), batch.main.response_ids.cpu()
    counts, changed = mask.sum(-1).tolist(), weights.detach().cpu().clone()
    for place, kept in enumerate(mask):
        side, pair = divmod(place, batch.pairs)
        other = counts[(1 - side) * batch.pairs + pair]
        row = WeightRow(changed[place, kept], ids[place, kept], batch.pair_ids[pair], SIDES[side], other)
        for transform in transforms:
            row = replace(row, weights=_applied(transform, row))
        changed[place, kept] = row.weights
    return changed.to(weights.device)


def fitted(
    transforms: Sequence[WeightTransform], finished: Mapping[str, Mapping[str, Finished]]
) -> tuple[WeightTransform, ...]:
    """The transforms, each fitted on the training rows (by pair id) as those before it leave them."""
    done: list[WeightTransform] = []
    pending: Mapping[str, Mapping[str, Finished]] = finished
    for place, transform in enumerate(transforms):
        if transform.needs_fit:
            rows = [row for pair_id, sides in pending.items() for row in weight_rows(sides, pair_id).values()]
            transform = transform.fit(rows)
        done.append(transform)
        if any(later.needs_fit for later in transforms[place + 1 :]):
            pending = {pair_id: transformed(transform, sides, pair_id) for pair_id, sides in pending.items()}
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
    own: Float[Tensor, "m"] | None,
) -> list[TokenWeights]:
    """One entry per round, each with the one row that the source selected; ``own``: a paired source's weights."""
    if captured is not None:
        return [item.side(side) for item in captured.rounds]
    if own is None and not isinstance(source, NativeSource):
        raise UserError(
            f"pair {_name(captured, pair)}: expected captured weights for {type(source).__name__}; run attnpo.weigh "
            "first"
        )
    pair = _given(source, pair)
    weights = source.weigh(pair, side, encoded) if own is None and isinstance(source, NativeSource) else own
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


def _finish(source: WeightSource, raw: Sequence[Float[Tensor, "n"]], where: str, trace: int = 0) -> Float[Tensor, "m"]:
    """One row out of the rounds: the source's post-processing, or their mean as it is; without the first ``trace``."""
    if source.postprocess is not None:
        return source.postprocess([row[trace:] for row in raw], where)
    for row in raw:
        check_finite(row, where)
        if not source.signed and bool((row < 0).any()):
            raise UserError(
                f"{where}: {type(source).__name__} states that its weights are not signed, got {row.min():g}"
            )
        if source.kind is Kind.DISTRIBUTION and not isinstance(source, PartialSource) and not bool(row.any()):
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


def _align(source: TokenWeights, weights: Float[Tensor, "n"], target: EncodedResponse, method: AlignMethod) -> Aligned:
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
