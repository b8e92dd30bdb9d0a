"""Stores captured weights and reference log-probabilities: keys, columns, and computation of missing entries.

The key includes all settings that affect the stored values. It does not include layer, heads, sink or order of
normalisation, so all studies of these settings share one judge pass. The key does record whether rows are single heads
or means over heads. Single heads are stored in a separate table because there are so many of them.
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
from attnpo.judge.layers import StoredRow, layer_column
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
AT_ONCE = 4096  # pairs read from the store at once: all of a small set
CHUNK_ROWS = 32768
"""Maximum number of rows in a chunk of pairs: with a thousand heads, larger chunks could exhaust memory."""
UNPACKED = 256
"""Number of pairs whose columns are converted to tensors at a time."""


# --------------------------------------------------------------------------------------------- keys


def weights_key(
    source: WeightSource, judge: Mapping[str, object] | None, prompts: Mapping[str, object] | None
) -> dict[str, object]:
    """Returns the store key of captured weights, built from the fingerprints of ``judge`` and ``prompts``.

    The judge's fingerprint covers weights, dtype and attention kernel family; it is computed without loading the model.
    The fingerprint of the prompts covers tokenizer, chat template, judge template, assembly and length limits. The text
    of a pair is covered by its ``pair_id``.
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
    """Returns the store key of reference log-probabilities, built from model, chat format and truncation.

    ``model`` (weights, dtype, kernel family) and ``chat`` are fingerprints; ``keep``: which end of the text truncation
    keeps.
    """
    return {
        "model": model,
        "chat": chat,
        "max_prompt_length": max_prompt_length,
        "max_length": max_length,
        "code": REFERENCE_VERSION,
        **({} if keep == "start" else {"keep": keep}),  # older tables without the key are those of "start"
    }


# --------------------------------------------------------------------------------------------- captured weights


@dataclass(frozen=True)
class UnreadablePair(PairWeights):
    """Pair that cannot be shown to the judge. It has a reason instead of rounds.

    ``reason``: generic wording shared by all pairs with the same problem. ``story``: details of this pair.
    """

    reason: str
    story: str


def prepare_pairs(
    pairs: Sequence[PreferencePair], show: Callable[[PreferencePair], _Shown]
) -> tuple[dict[str, _Shown], dict[str, UnreadablePair]]:
    """Calls ``show`` on each pair; returns two dicts by pair id: the results, and the pairs that raised RefusedText."""
    shown: dict[str, _Shown] = {}
    refused: dict[str, UnreadablePair] = {}
    for pair in pairs:
        try:
            shown[pair.pair_id] = show(pair)
        except RefusedText as problem:
            refused[pair.pair_id] = UnreadablePair(pair.pair_id, (), problem.reason, str(problem))
    return shown, refused


def store_captured(
    table: StoreTable, captured: Sequence[PairWeights], layers: Sequence[StoredRow], seconds: float | None = None
) -> None:
    """Appends captured pairs to ``table``, including their tokens and verdicts.

    ``layers`` lists the weight rows in order. Each column concatenates the rounds, and within a round the chosen
    response comes first. Rows are float32 or narrower. A pair that the source could not read has no rounds; its reason
    is stored in a separate column. ``seconds``: duration of the capture.
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
        if isinstance(pair, UnreadablePair):
            row[REFUSED] = {"reason": pair.reason, "story": pair.story}
        rows[pair.pair_id] = row
    table.append(rows, seconds)


def load_captured(table: StoreTable, pair_ids: Sequence[str], layers: Sequence[StoredRow]) -> dict[str, PairWeights]:
    """Returns the stored pairs with the rows of ``layers``, in that order, with verdicts if available.

    Pairs that could not be shown to the judge are returned as ``UnreadablePair``. UserError if a pair or a layer is
    missing.
    """
    stored = table.read(pair_ids, [TOKENS, *(layer_column(layer) for layer in layers)], OPTIONAL_COLUMNS)
    captured: dict[str, PairWeights] = {}
    while stored:
        captured |= unpack_pairs({pair_id: stored.pop(pair_id) for pair_id in list(islice(stored, UNPACKED))}, layers)
    return captured | unreadable_pairs(table, pair_ids)


class CapturedRows(Mapping[str, PairWeights]):
    """Captured weights by pair id, read from the store's table in blocks, in the order of the pairs."""

    def __init__(self, table: StoreTable, pair_ids: Sequence[str], layers: Sequence[StoredRow]) -> None:
        self._table, self._ids, self._layers = table, pair_ids, layers
        self._places = {pair_id: place for place, pair_id in enumerate(pair_ids)}
        self._some: dict[str, PairWeights] = {}

    def __getitem__(self, pair_id: str) -> PairWeights:
        if pair_id not in self._some:
            begin = self._places[pair_id] // AT_ONCE * AT_ONCE
            self._some = load_captured(self._table, self._ids[begin : begin + AT_ONCE], self._layers)
        return self._some[pair_id]

    def iterate_rounds(self) -> Iterator[PairWeights]:
        """Yields each pair with its rounds (verdicts and traces) but without tokens or weights."""
        for begin in range(0, len(self._ids), AT_ONCE):
            yield from unpack_rounds(self._table.read(self._ids[begin : begin + AT_ONCE], ROUNDS, OPTIONAL_COLUMNS))

    def __contains__(self, pair_id: object) -> bool:
        return pair_id in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._ids)

    def __len__(self) -> int:
        return len(self._ids)


def unreadable_pairs(table: StoreTable, pair_ids: Sequence[str]) -> dict[str, UnreadablePair]:
    """Returns the stored pairs among ``pair_ids`` that cannot be shown to the judge, in order, with the reason.

    Pairs that are not stored (yet) are ignored.
    """
    refused = [pair_id for pair_id, columns in table.columns_present(pair_ids).items() if REFUSED in columns]
    unreadable = {}
    for pair_id, row in table.read(refused, [REFUSED]).items():
        why = expect_mapping(row[REFUSED])
        unreadable[pair_id] = UnreadablePair(pair_id, (), str(why["reason"]), str(why["story"]))
    return unreadable


def estimate_bytes(tokens: int, rows: int) -> int:
    """Returns an upper bound in bytes on the disk space for ``tokens`` source tokens (summed over rounds and sides).

    Each token takes 4 bytes per row (a layer, or one head of a layer) and 12 bytes for its id and character range,
    before compression.
    """
    return tokens * (4 * rows + 12)


@dataclass(frozen=True)
class CaptureReport:
    """Report of ``ensure_captured``: how many pairs were in the store, how many were computed, and how long it took.

    ``difference``: if no pair was found in the store, the first part of the key in which the most similar stored table
    differs; otherwise None.
    """

    hits: int
    computed: int
    seconds: float
    difference: str | None


def ensure_captured(
    pairs: Sequence[PreferencePair],
    source: WeightSource,
    layers: tuple[StoredRow, ...],
    store: Store,
    key: Mapping[str, object],
    load: Callable[[], object],
    chunk_pairs: int = 256,
    *,
    load_layers: tuple[StoredRow, ...] | None = None,
    verdicts: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Mapping[str, PairWeights], CaptureReport]:
    """Returns captured weights by pair id, computing those that are not in the store.

    Missing pairs are captured ``chunk_pairs`` at a time (fewer if they have very many rows) and stored chunk by chunk,
    so an interrupted run resumes where it stopped. Pairs that cannot be shown to the judge are stored as
    ``UnreadablePair``. ``load`` returns the loaded model and is called only if something is missing. ``load_layers``:
    the rows to return, by default all of ``layers``. With ``verdicts``, pairs stored without verdicts count as missing.
    ``progress`` is called with (pairs done, total pairs) after each chunk.
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
        _capture_missing(table, pairs, missing, source, layers, load(), chunk_pairs, progress)
    captured = CapturedRows(table, list(unique), layers if load_layers is None else load_layers)
    report = CaptureReport(len(unique) - len(lacking), len(lacking), time.perf_counter() - begin, difference)
    return captured, report


def _capture_missing(
    table: StoreTable,
    pairs: Sequence[PreferencePair],
    places: Mapping[str, int],
    source: WeightSource,
    layers: tuple[StoredRow, ...],
    reader: object,
    chunk_pairs: int,
    progress: Callable[[int, int], None] | None,
) -> None:
    done = 0
    with ThreadPoolExecutor(1) as writer:
        written: Future[None] | None = None
        for group, absent in _group_by_missing_layers(table, list(places), layers):
            size = min(chunk_pairs, max(1, CHUNK_ROWS // len(absent)))
            for start in range(0, len(group), size):
                chunk = [pairs[places[pair_id]] for pair_id in group[start : start + size]]
                began = time.perf_counter()
                captured = source.capture(chunk, reader, absent)
                seconds = time.perf_counter() - began
                if written is not None:
                    written.result()
                # Compressed and written while the judge reads the next chunk; at most one chunk is waiting.
                written = writer.submit(store_captured, table, captured, absent, seconds)
                done += len(chunk)
                if progress is not None:
                    progress(done, len(places))
        if written is not None:
            written.result()


def _group_by_missing_layers(
    table: StoreTable, pair_ids: Sequence[str], layers: tuple[StoredRow, ...]
) -> list[tuple[list[str], tuple[StoredRow, ...]]]:
    """Groups the pair ids by missing layers, so that no stored layer is recomputed."""
    present = table.columns_present(pair_ids)
    groups: dict[tuple[StoredRow, ...], list[str]] = {}
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
    """Returns the stored log-probabilities (chosen, rejected) by pair id.

    UserError if a pair is missing, or if a row does not have the length given by ``lengths`` (number of response tokens
    on each side).
    """
    logps = {}
    for pair_id, row in table.read(pair_ids, list(SIDES)).items():
        chosen, rejected = (torch.from_numpy(expect_array(row[side])) for side in SIDES)
        if lengths is not None and (chosen.numel(), rejected.numel()) != tuple(lengths[pair_id]):
            raise UserError(
                f"store {table.folder}: pair {pair_id} has log-probabilities for {chosen.numel()} and "
                f"{rejected.numel()} tokens, expected {lengths[pair_id]}; delete this folder and recompute them"
            )
        logps[pair_id] = (chosen, rejected)
    return logps


TOKENS = "tokens"
VERDICTS = "verdicts"
TRACES = "traces"
OPTIONAL_COLUMNS = (VERDICTS, TRACES)
"""Columns that only some pairs have."""
ROUNDS = (f"{TOKENS}.chosen_is_a", f"{TOKENS}.cut")
"""Fields of each round other than its tokens."""
_NO_TOKENS = TokenWeights(torch.zeros(0, dtype=torch.long), torch.zeros(0, 2, dtype=torch.long), torch.zeros(1, 0))


def pack_tokens(pair: PairWeights, parts: Sequence[TokenWeights]) -> dict[str, Cell]:
    """Returns the tokens of ``parts`` (the responses of all rounds) and the order and truncation flag of each round."""
    return {
        "chosen_is_a": np.array([item.chosen_is_a for item in pair.rounds], dtype=np.int8),
        "cut": np.array([item.cut for item in pair.rounds], dtype=np.int8),
        "counts": np.array([part.token_ids.numel() for part in parts], dtype=np.int32),
        "ids": torch.cat([part.token_ids for part in parts] or [torch.zeros(0)]).to(torch.int32),
        "offsets": torch.cat([part.offsets for part in parts] or [torch.zeros(0)]).flatten().to(torch.int32),
    }


def pack_verdicts(pair: PairWeights) -> dict[str, Cell] | None:
    """Packs the verdicts of a pair's rounds into columns; returns None if any verdict is missing."""
    logits = [item.verdict_logits for item in pair.rounds if item.verdict_logits is not None]
    if len(logits) < len(pair.rounds):
        return None
    # -1 stands for a token that was not recorded.
    tokens = [-1 if item.verdict_token is None else item.verdict_token for item in pair.rounds]
    return {"logits": torch.cat(logits or [torch.zeros(0)]).float(), "tokens": np.array(tokens, dtype=np.int64)}


def pack_traces(pair: PairWeights) -> dict[str, Cell] | None:
    """Packs the lengths of a pair's traces into columns; returns None unless every round has a trace."""
    traces = [item.trace for item in pair.rounds if item.trace is not None]
    if not traces or len(traces) < len(pair.rounds):
        return None
    return {
        "tokens": np.array([trace.tokens for trace in traces], dtype=np.int32),
        "closed": np.array([trace.closed for trace in traces], dtype=np.int8),
    }


def unpack_pairs(stored: Mapping[str, Mapping[str, Cell]], layers: Sequence[StoredRow]) -> dict[str, PairWeights]:
    """Rebuilds pairs from their stored columns: tokens, ``layers`` and, if present, verdicts and traces.

    The columns are given by pair id. The tensors are views of shared tensors. UserError if the columns do not match.
    """
    if not stored:
        return {}
    tokens = [_read_arrays(row[TOKENS]) for row in stored.values()]
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
                    f"store: pair {pair_id} has {found} weights for {total} tokens, so its shards do not "
                    "match; delete the folder of this key and run attnpo.weigh again"
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
        pair_id: PairWeights(pair_id, tuple(_build_rounds(row, list(islice(rounds, len(part["chosen_is_a"]))))))
        for (pair_id, row), part in zip(stored.items(), tokens, strict=True)
    }


def unpack_rounds(stored: Mapping[str, Mapping[str, Cell]]) -> Iterator[PairWeights]:
    """Rebuilds pairs, without tokens, from their stored ``ROUNDS`` and ``OPTIONAL_COLUMNS`` (by pair id)."""
    for pair_id, row in stored.items():
        known = _read_arrays(row[TOKENS])
        rounds = zip(known["chosen_is_a"].tolist(), known["cut"].tolist(), strict=True)
        yield PairWeights(
            pair_id, tuple(_build_rounds(row, [(first, cut, _NO_TOKENS, _NO_TOKENS) for first, cut in rounds]))
        )


def _build_rounds(
    row: Mapping[str, Cell], rounds: Sequence[tuple[int, int, TokenWeights, TokenWeights]]
) -> Iterator[JudgeRound]:
    """Yields the rounds of a pair with the verdicts and traces in ``row``."""
    judged = None if VERDICTS not in row else _read_arrays(row[VERDICTS])
    traced = None if TRACES not in row else _read_arrays(row[TRACES])
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


def _read_arrays(cell: Cell) -> dict[str, Array]:
    return {name: expect_array(part) for name, part in expect_mapping(cell).items()}
