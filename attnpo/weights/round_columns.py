"""The rounds of a captured pair as columns of the store, and back."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

import numpy as np
import torch

from attnpo.judge.layers import Row, layer_column
from attnpo.schema import PairWeights, Round, TokenWeights, TraceLength, UserError
from attnpo.system.store import Array, Cell, array_in, fields_in

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
    """Returns the pairs whose columns ``stored`` has by pair id: tokens, ``layers`` and, where they were read, verdicts
    and traces. Their tensors are parts of common ones.

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
            found = array_in(row[layer_column(layer)]).size
            if found != total:
                raise UserError(
                    f"store: pair {pair_id} has {found} weights on {total} tokens, so its shards do not belong "
                    "together; delete the folder of this key and run attnpo.weigh again"
                )
    stacked = [np.concatenate([array_in(row[layer_column(layer)]) for row in stored.values()]) for layer in layers]
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


def _rounds(row: Mapping[str, Cell], rounds: Sequence[tuple[int, int, TokenWeights, TokenWeights]]) -> Iterator[Round]:
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
        yield Round(bool(chosen_is_a), chosen, rejected, logits[place], token, bool(cut), trace)


def _arrays(cell: Cell) -> dict[str, Array]:
    return {name: array_in(part) for name, part in fields_in(cell).items()}
