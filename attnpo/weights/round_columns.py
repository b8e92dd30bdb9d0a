"""The rounds of a captured pair as columns of the store, and back."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from attnpo.judging import TraceLength
from attnpo.schema import PairWeights, Round, TokenWeights, UserError
from attnpo.weights.cache import Array, Cell, array_in, fields_in
from attnpo.weights.layers import Row, layer_column

TOKENS = "tokens"
VERDICTS = "verdicts"
TRACES = "traces"


def pack_tokens(pair: PairWeights, parts: Sequence[TokenWeights]) -> dict[str, Cell]:
    """The tokens of ``parts``, the responses of all rounds, and what is known of the rounds."""
    return {
        "chosen_is_a": np.array([item.chosen_is_a for item in pair.rounds], dtype=np.int8),
        "cut": np.array([item.cut for item in pair.rounds], dtype=np.int8),
        "counts": np.array([part.token_ids.numel() for part in parts], dtype=np.int32),
        "ids": torch.cat([part.token_ids for part in parts] or [torch.zeros(0)]).to(torch.int32),
        "offsets": torch.cat([part.offsets for part in parts] or [torch.zeros(0)]).flatten().to(torch.int32),
    }


def pack_verdicts(pair: PairWeights) -> dict[str, Cell] | None:
    """The verdicts; None where one was not read."""
    logits = [item.verdict_logits for item in pair.rounds if item.verdict_logits is not None]
    if len(logits) < len(pair.rounds):
        return None
    # -1 stands for a token that was not recorded.
    tokens = [-1 if item.verdict_token is None else item.verdict_token for item in pair.rounds]
    return {"logits": torch.cat(logits or [torch.zeros(0)]).float(), "tokens": np.array(tokens, dtype=np.int64)}


def pack_traces(pair: PairWeights) -> dict[str, Cell] | None:
    """How long the traces are; None where there are none."""
    traces = [item.trace for item in pair.rounds if item.trace is not None]
    if not traces or len(traces) < len(pair.rounds):
        return None
    return {
        "tokens": np.array([trace.tokens for trace in traces], dtype=np.int32),
        "closed": np.array([trace.closed for trace in traces], dtype=np.int8),
    }


def unpack(pair_id: str, row: Mapping[str, Cell], layers: Sequence[Row]) -> PairWeights:
    """The pair whose columns ``row`` has: tokens, ``layers`` and, where they were read, verdicts and traces.

    UserError for columns that do not belong together.
    """
    tokens = _arrays(row[TOKENS])
    judged = None if VERDICTS not in row else _arrays(row[VERDICTS])
    traced = None if TRACES not in row else _arrays(row[TRACES])
    ends = np.cumsum(tokens["counts"])
    total = int(ends[-1]) if ends.size else 0
    stacked = [array_in(row[layer_column(layer)]) for layer in layers]
    weights = torch.from_numpy(np.stack(stacked) if stacked else np.zeros((0, total), dtype=np.float32))
    if weights.shape[1] != total:
        raise UserError(
            f"store: pair {pair_id} has {weights.shape[1]} weights on {total} tokens, so its shards do not belong "
            "together; delete the folder of this key and run attnpo.weigh again"
        )
    ids = torch.from_numpy(tokens["ids"]).long()
    offsets = torch.from_numpy(tokens["offsets"]).long().reshape(-1, 2)
    sides = [
        TokenWeights(ids[end - count : end], offsets[end - count : end], weights[:, end - count : end].contiguous())
        for end, count in zip(ends.tolist(), tokens["counts"].tolist(), strict=True)
    ]
    rounds = []
    for place, chosen_is_a in enumerate(tokens["chosen_is_a"].tolist()):
        logits, token, trace = None, None, None
        if judged is not None:
            logits = torch.from_numpy(judged["logits"][2 * place : 2 * place + 2])
            token = int(judged["tokens"][place])
        if traced is not None:
            trace = TraceLength(int(traced["tokens"][place]), bool(traced["closed"][place]))
        rounds.append(
            Round(
                bool(chosen_is_a),
                sides[2 * place],
                sides[2 * place + 1],
                logits,
                None if token == -1 else token,
                bool(tokens["cut"][place]),
                trace,
            )
        )
    return PairWeights(pair_id, tuple(rounds))


def _arrays(cell: Cell) -> dict[str, Array]:
    return {name: array_in(part) for name, part in fields_in(cell).items()}
