"""Captured weights and reference log-probabilities in the store: keys, columns, and filling what is missing.

Every setting that changes a stored number is in the key; layer, heads, sink and normalisation order are not, so
one judge pass serves every study over them. Only whether heads are chosen at all is: single heads have a table of their
own, because there are many of them.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from attnpo.judge.base import CAPTURE_VERSION
from attnpo.judge.layers import Row, layer_column
from attnpo.schema import (
    SIDES,
    JudgeRound,
    PairWeights,
    PreferencePair,
    TokenWeights,
    TraceLength,
    UserError,
    list_pair_ids,
)
from attnpo.system.store import Array, Cell, Store, StoreTable, expect_array, expect_mapping
from attnpo.text.chat import RefusedText
from attnpo.weights.base import WeightSource

_Shown = TypeVar("_Shown")

WEIGHTS = "weights"
REFERENCE = "reference"
REFUSED = "refused"
REFERENCE_VERSION = "1"
AT_ONCE = 4096  # pairs that are read from the store together: all of a small set
CHUNK_ROWS = 32768
"""Pairs x rows at once: with a thousand heads a chunk of pairs would fill the memory with rows."""
UNPACKED = 256
"""Pairs whose columns are made tensors at once."""


# --------------------------------------------------------------------------------------------- keys


def weights_key(
    source: WeightSource, judge: Mapping[str, object] | None, prompts: Mapping[str, object] | None
) -> dict[str, object]:
    """Returns the key of captured weights, from the fingerprints of ``judge`` and ``prompts``.

    The judge's names its weights, dtype and attention kernel family, so that it need not be loaded; the prompts' its
    tokenizer, chat template, judge template, assembly and length rules. The text of a pair is in its ``pair_id``.
    """
    return {"source": source.capture_fingerprint(), "judge": judge, "prompts": prompts, "code": CAPTURE_VERSION}


def reference_key(
    model: Mapping[str, object],
    chat: Mapping[str, object],
    max_prompt_length: int,
    max_length: int,
    *,
    keep: str = "start",
) -> dict[str, object]:
    """Returns the key of reference log-probabilities: model (weights, dtype, kernel family), training ids, truncation.

    ``model`` and ``chat`` are fingerprints; ``keep`` is the end truncation keeps.
    """
    return {
        "model": model,
        "chat": chat,
        "max_prompt_length": max_prompt_length,
        "max_length": max_length,
        "code": REFERENCE_VERSION,
        **({} if keep == "start" else {"keep": keep}),  # tables from before there was a choice stay those of "start"
    }


# --------------------------------------------------------------------------------------------- captured weights


@dataclass(frozen=True)
class Unreadable(PairWeights):
    """Pair that the judge cannot be shown: no rounds, but why.

    ``reason`` is in words that fit every such pair, ``story`` is about this one.
    """

    reason: str
    story: str


def show_pairs(
    pairs: Sequence[PreferencePair], show: Callable[[PreferencePair], _Shown]
) -> tuple[dict[str, _Shown], dict[str, Unreadable]]:
    """Returns by id what ``show`` makes of each pair, and the pairs for which it raises RefusedText, with why."""
    shown: dict[str, _Shown] = {}
    refused: dict[str, Unreadable] = {}
    for pair in pairs:
        try:
            shown[pair.pair_id] = show(pair)
        except RefusedText as problem:
            refused[pair.pair_id] = Unreadable(pair.pair_id, (), problem.reason, str(problem))
    return shown, refused


def store_captured(
    table: StoreTable, captured: Sequence[PairWeights], layers: Sequence[Row], seconds: float | None = None
) -> None:
    """Appends the rows of ``layers`` (the order of the weight rows), the tokens they stand on, and the verdicts.

    A column runs over the rounds, in each the chosen then the rejected response. Rows are float32 or narrower. A pair
    without rounds, which the source could not read, is stored as that; the reason has a column of its own. ``seconds``:
    what capturing them took.
    """
    rows = {}
    for pair in captured:
        parts = [item.side(side) for item in pair.rounds for side in SIDES]
        weights = torch.cat([part.weights for part in parts], dim=-1) if parts else torch.zeros(len(layers), 0)
        if weights.dtype == torch.float64 or weights.shape[0] != len(layers):
            raise ValueError(f"expected {len(layers)} rows of float32 or narrower, got {weights.shape} {weights.dtype}")
        row: dict[str, Cell] = {TOKENS: pack_tokens(pair, parts)}
        row |= {layer_column(layer): values for layer, values in zip(layers, weights.float().numpy(), strict=True)}
        for name, packed in ((VERDICTS, pack_verdicts(pair)), (TRACES, pack_traces(pair))):
            if packed is not None:
                row[name] = packed
        if isinstance(pair, Unreadable):
            row[REFUSED] = {"reason": pair.reason, "story": pair.story}
        rows[pair.pair_id] = row
    table.append(rows, seconds)


def load_captured(table: StoreTable, pair_ids: Sequence[str], layers: Sequence[Row]) -> dict[str, PairWeights]:
    """Returns the stored pairs with rows of ``layers`` in that order, and verdicts where they were read.

    What a judge could not be shown is ``Unreadable``. UserError when a pair or a layer is missing.
    """
    stored = table.read(pair_ids, [TOKENS, *(layer_column(layer) for layer in layers)], TOLD)
    captured: dict[str, PairWeights] = {}
    while stored:
        captured |= unpack({pair_id: stored.pop(pair_id) for pair_id in list(islice(stored, UNPACKED))}, layers)
    return captured | unreadable_pairs(table, pair_ids)


class CapturedRows(Mapping[str, PairWeights]):
    """Captured weights of pairs, read from the store's table some pairs at a time, in their order."""

    def __init__(self, table: StoreTable, pair_ids: Sequence[str], layers: Sequence[Row]) -> None:
        self._table, self._ids, self._layers = table, pair_ids, layers
        self._places = {pair_id: place for place, pair_id in enumerate(pair_ids)}
        self._some: dict[str, PairWeights] = {}

    def __getitem__(self, pair_id: str) -> PairWeights:
        if pair_id not in self._some:
            begin = self._places[pair_id] // AT_ONCE * AT_ONCE
            self._some = load_captured(self._table, self._ids[begin : begin + AT_ONCE], self._layers)
        return self._some[pair_id]

    def without_tokens(self) -> Iterator[PairWeights]:
        """Yields what is known of the rounds of every pair, on no tokens."""
        for begin in range(0, len(self._ids), AT_ONCE):
            yield from unpack_rounds(self._table.read(self._ids[begin : begin + AT_ONCE], ROUNDS, TOLD))

    def __contains__(self, pair_id: object) -> bool:
        return pair_id in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._ids)

    def __len__(self) -> int:
        return len(self._ids)


def unreadable_pairs(table: StoreTable, pair_ids: Sequence[str]) -> dict[str, Unreadable]:
    """Returns those of ``pair_ids`` stored as pairs that the judge cannot be shown, in their order, with the reason.

    Pairs that are not stored (yet) are no error.
    """
    refused = [pair_id for pair_id, columns in table.columns_present(pair_ids).items() if REFUSED in columns]
    unreadable = {}
    for pair_id, row in table.read(refused, [REFUSED]).items():
        why = expect_mapping(row[REFUSED])
        unreadable[pair_id] = Unreadable(pair_id, (), str(why["reason"]), str(why["story"]))
    return unreadable


def estimate_bytes(tokens: int, rows: int) -> int:
    """Returns the upper bound of the disk space of rows on ``tokens`` source tokens (summed over rounds and sides).

    4 bytes per row (a layer, or one head of a layer) and 12 for a token's id and character range; compression comes
    on top.
    """
    return tokens * (4 * rows + 12)


@dataclass(frozen=True)
class CaptureReport:
    """Report of ``ensure_captured``: pairs found, pairs computed, seconds, and why nothing was found if so.

    ``difference`` names the first key part that differs from the most similar stored table; None on a full hit.
    """

    hits: int
    computed: int
    seconds: float
    difference: str | None


def ensure_captured(
    pairs: Sequence[PreferencePair],
    source: WeightSource,
    layers: tuple[Row, ...],
    store: Store,
    key: Mapping[str, object],
    load: Callable[[], object],
    chunk_pairs: int = 256,
    *,
    load_layers: tuple[Row, ...] | None = None,
    verdicts: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Mapping[str, PairWeights], CaptureReport]:
    """Returns captured weights by pair id, computing what the store lacks.

    Missing pairs are captured ``chunk_pairs`` at a time (fewer when they have very many rows) and stored chunk by
    chunk, so an interrupted run goes on where it stopped. Pairs that the judge cannot be shown are stored as
    ``Unreadable``, also when there are no others. ``load`` gives the model that is read, and is called only
    when something is missing. ``load_layers`` are the rows to return, all of ``layers`` by default. ``verdicts``: pairs
    stored without verdicts count as missing. ``progress`` is called with (pairs done, pairs in all) after each chunk.
    """
    begin = time.perf_counter()
    table = store.table(WEIGHTS, key)
    unique = {pair_id: place for place, pair_id in enumerate(list_pair_ids(pairs))}
    columns = [TOKENS, *(layer_column(layer) for layer in layers), *([VERDICTS] if verdicts else [])]
    lacking = table.missing_pairs(list(unique), columns)
    difference = None
    if lacking:
        difference = table.nearest_difference() if len(lacking) == len(unique) else None
        missing = {pair_id: unique[pair_id] for pair_id in lacking}
        _fill(table, pairs, missing, source, layers, load(), chunk_pairs, progress)
    captured = CapturedRows(table, list(unique), layers if load_layers is None else load_layers)
    report = CaptureReport(len(unique) - len(lacking), len(lacking), time.perf_counter() - begin, difference)
    return captured, report


def _fill(
    table: StoreTable,
    pairs: Sequence[PreferencePair],
    places: Mapping[str, int],
    source: WeightSource,
    layers: tuple[Row, ...],
    reader: object,
    chunk_pairs: int,
    progress: Callable[[int, int], None] | None,
) -> None:
    done = 0
    with ThreadPoolExecutor(1) as writer:
        written: Future[None] | None = None
        for group, absent in _by_missing_layers(table, list(places), layers):
            size = min(chunk_pairs, max(1, CHUNK_ROWS // len(absent)))
            for start in range(0, len(group), size):
                chunk = [pairs[places[pair_id]] for pair_id in group[start : start + size]]
                began = time.perf_counter()
                captured = source.capture(chunk, reader, absent)
                seconds = time.perf_counter() - began
                if written is not None:
                    written.result()
                # Compressed and written while the next chunk is read by the judge; one chunk waits at most.
                written = writer.submit(store_captured, table, captured, absent, seconds)
                done += len(chunk)
                if progress is not None:
                    progress(done, len(places))
        if written is not None:
            written.result()


def _by_missing_layers(
    table: StoreTable, pair_ids: Sequence[str], layers: tuple[Row, ...]
) -> list[tuple[list[str], tuple[Row, ...]]]:
    """Returns the pairs' ids grouped by the layers they lack, so that no stored layer is computed again."""
    present = table.columns_present(pair_ids)
    groups: dict[tuple[Row, ...], list[str]] = {}
    for pair_id in pair_ids:
        absent = tuple(layer for layer in layers if layer_column(layer) not in present[pair_id])
        groups.setdefault(absent or layers[-1:], []).append(pair_id)  # only verdicts are missing
    return [(group, absent) for absent, group in groups.items()]


# --------------------------------------------------------------------------------------------- reference log-probs

LogpPair = tuple[Float[Tensor, " m"], Float[Tensor, " k"]]


def store_logps(table: StoreTable, logps: Mapping[str, LogpPair]) -> None:
    """Appends float32 log-probabilities of the chosen and the rejected response tokens of each pair."""
    table.append({pair_id: {side: row.float() for side, row in zip(SIDES, rows, strict=True)}
                  for pair_id, rows in logps.items()})  # fmt: skip


def load_logps(
    table: StoreTable, pair_ids: Sequence[str], lengths: Mapping[str, tuple[int, int]] | None = None
) -> dict[str, LogpPair]:
    """Returns the stored log-probabilities (chosen, rejected) of each pair id.

    UserError when one is missing, or when a row is not as long as ``lengths`` (response tokens of both sides) says.
    """
    logps = {}
    for pair_id, row in table.read(pair_ids, list(SIDES)).items():
        chosen, rejected = (torch.from_numpy(expect_array(row[side])) for side in SIDES)
        if lengths is not None and (chosen.numel(), rejected.numel()) != tuple(lengths[pair_id]):
            raise UserError(
                f"store {table.folder}: pair {pair_id} has log-probabilities of {chosen.numel()} and "
                f"{rejected.numel()} tokens, expected {lengths[pair_id]}; delete this folder and compute them again"
            )
        logps[pair_id] = (chosen, rejected)
    return logps


TOKENS = "tokens"
VERDICTS = "verdicts"
TRACES = "traces"
TOLD = (VERDICTS, TRACES)
"""Columns that only some pairs have."""
ROUNDS = (f"{TOKENS}.chosen_is_a", f"{TOKENS}.cut")
"""Fields of every round beside its tokens."""
_NO_TOKENS = TokenWeights(torch.zeros(0, dtype=torch.long), torch.zeros(0, 2, dtype=torch.long), torch.zeros(1, 0))


def pack_tokens(pair: PairWeights, parts: Sequence[TokenWeights]) -> dict[str, Cell]:
    """Returns the tokens of ``parts``, the responses of all rounds, and what is known of the rounds."""
    return {
        "chosen_is_a": np.array([item.chosen_is_a for item in pair.rounds], dtype=np.int8),
        "cut": np.array([item.cut for item in pair.rounds], dtype=np.int8),
        "counts": np.array([part.token_ids.numel() for part in parts], dtype=np.int32),
        "ids": torch.cat([part.token_ids for part in parts] or [torch.zeros(0)]).to(torch.int32),
        "offsets": torch.cat([part.offsets for part in parts] or [torch.zeros(0)]).flatten().to(torch.int32),
    }


def pack_verdicts(pair: PairWeights) -> dict[str, Cell] | None:
    """Returns the verdicts; None where one was not read."""
    logits = [item.verdict_logits for item in pair.rounds if item.verdict_logits is not None]
    if len(logits) < len(pair.rounds):
        return None
    # -1 stands for a token that was not recorded.
    tokens = [-1 if item.verdict_token is None else item.verdict_token for item in pair.rounds]
    return {"logits": torch.cat(logits or [torch.zeros(0)]).float(), "tokens": np.array(tokens, dtype=np.int64)}


def pack_traces(pair: PairWeights) -> dict[str, Cell] | None:
    """Returns how long the traces are; None where there are none."""
    traces = [item.trace for item in pair.rounds if item.trace is not None]
    if not traces or len(traces) < len(pair.rounds):
        return None
    return {
        "tokens": np.array([trace.tokens for trace in traces], dtype=np.int32),
        "closed": np.array([trace.closed for trace in traces], dtype=np.int8),
    }


def unpack(stored: Mapping[str, Mapping[str, Cell]], layers: Sequence[Row]) -> dict[str, PairWeights]:
    """Returns the pairs whose columns ``stored`` has by pair id.

    Tokens, ``layers`` and, where they were read, verdicts and traces. Their tensors are parts of common ones.

    UserError for columns that do not belong together.
    """
    if not stored:
        return {}
    tokens = [_arrays(row[TOKENS]) for row in stored.values()]
    counts, chosen_is_a, cut = (
        np.concatenate([part[name] for part in tokens]) for name in ("counts", "chosen_is_a", "cut")
    )
    by_pair = np.array([len(part["counts"]) for part in tokens])
    totals = np.diff(np.concatenate([[0], np.cumsum(counts)])[np.concatenate([[0], np.cumsum(by_pair)])]).tolist()
    for layer in layers:
        for (pair_id, row), total in zip(stored.items(), totals, strict=True):
            found = expect_array(row[layer_column(layer)]).size
            if found != total:
                raise UserError(
                    f"store: pair {pair_id} has {found} weights on {total} tokens, so its shards do not belong "
                    "together; delete the folder of this key and run attnpo.weigh again"
                )
    stacked = [np.concatenate([expect_array(row[layer_column(layer)]) for row in stored.values()]) for layer in layers]
    weights = torch.from_numpy(np.stack(stacked) if stacked else np.zeros((0, sum(totals)), dtype=np.float32))
    sizes = counts.tolist()
    ids = torch.from_numpy(np.concatenate([part["ids"] for part in tokens])).long().split_with_sizes(sizes)
    offsets = (
        torch.from_numpy(np.concatenate([part["offsets"] for part in tokens]))
        .long()
        .reshape(-1, 2)
        .split_with_sizes(sizes)
    )
    parts = zip(ids, offsets, weights.split_with_sizes(sizes, dim=1), strict=True)
    sides = iter([TokenWeights(one, places, row.contiguous()) for one, places, row in parts])
    rounds = zip(chosen_is_a.tolist(), cut.tolist(), sides, sides, strict=True)
    return {
        pair_id: PairWeights(pair_id, tuple(_rounds(row, list(islice(rounds, len(part["chosen_is_a"]))))))
        for (pair_id, row), part in zip(stored.items(), tokens, strict=True)
    }


def unpack_rounds(stored: Mapping[str, Mapping[str, Cell]]) -> Iterator[PairWeights]:
    """Yields the pairs whose ``ROUNDS`` and ``TOLD`` columns ``stored`` has by pair id, their rounds on no tokens."""
    for pair_id, row in stored.items():
        known = _arrays(row[TOKENS])
        rounds = zip(known["chosen_is_a"].tolist(), known["cut"].tolist(), strict=True)
        yield PairWeights(pair_id, tuple(_rounds(row, [(first, cut, _NO_TOKENS, _NO_TOKENS) for first, cut in rounds])))


def _rounds(
    row: Mapping[str, Cell], rounds: Sequence[tuple[int, int, TokenWeights, TokenWeights]]
) -> Iterator[JudgeRound]:
    """Yields the rounds of a pair with the verdicts and traces that ``row`` has."""
    judged = None if VERDICTS not in row else _arrays(row[VERDICTS])
    traced = None if TRACES not in row else _arrays(row[TRACES])
    logits = (
        [None] * len(rounds)
        if judged is None
        else torch.from_numpy(judged["logits"]).split_with_sizes([2] * len(rounds))
    )
    read = [-1] * len(rounds) if judged is None else judged["tokens"].tolist()
    for place, (chosen_is_a, cut, chosen, rejected) in enumerate(rounds):
        trace = None
        if traced is not None:
            trace = TraceLength(int(traced["tokens"][place]), bool(traced["closed"][place]))
        token = None if read[place] == -1 else read[place]
        yield JudgeRound(bool(chosen_is_a), chosen, rejected, logits[place], token, bool(cut), trace)


def _arrays(cell: Cell) -> dict[str, Array]:
    return {name: expect_array(part) for name, part in expect_mapping(cell).items()}
