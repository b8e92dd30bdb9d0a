"""The run's weight source with what it captured for the pairs at hand; what the store lacks is computed."""

import logging
from dataclasses import dataclass, replace
from typing import Any

from attnpo.config import build
from attnpo.console import world_size
from attnpo.data.prepare import EncodedSet, Tally
from attnpo.schema import PairWeights, UserError
from attnpo.studies.ground import Ground, device_of, judge_room
from attnpo.studies.root import require_reader
from attnpo.studies.startup import log_store
from attnpo.weights.base import WeightSource
from attnpo.weights.cache import Table
from attnpo.weights.capture import (
    TOKENS,
    VERDICTS,
    WEIGHTS,
    CaptureReport,
    ensure_captured,
    estimate_bytes,
    layer_column,
    unreadable_pairs,
    weights_key,
)
from attnpo.weights.verdicts import JudgeStatistics, judge_statistics

log = logging.getLogger(__name__)

SPLITS = ("train", "val")


@dataclass(frozen=True)
class Weighed:
    """A resolved weight source and what it captured for the pairs at hand (empty for sources without a judge).

    ``layers`` names the rows of ``captured``; ``depth`` is the number of the judge's layers, 0 without a judge; ``key``
    is the store's key of the captured rows.
    """

    source: WeightSource
    captured: dict[str, PairWeights]
    report: CaptureReport | None
    verdicts: JudgeStatistics | None
    layers: tuple[int, ...]
    depth: int
    key: dict[str, Any]


def weigh(ground: Ground, encoded: dict[str, EncodedSet], *, shard: tuple[int, int] | None = None) -> Weighed:
    """The run's weight source with everything it captured for the pairs of ``encoded``; computes what the store lacks.

    ``shard`` (rank, ranks) restricts the work to every ranks-th pair, for several workers filling one store. Without
    it, missing rows in a job of several processes are refused: they would be computed by every process. Logs the pairs
    that the judge cannot be shown. UserError when it can be shown none of them, whichever process stored that.
    """
    cfg = ground.cfg
    source: WeightSource = build(cfg.weights)
    if "judge" not in source.requires:
        return Weighed(source.resolve(1), {}, None, None, (), 0, {})
    require_reader(source, build(cfg.objective))
    room = judge_room(ground)
    depth = room.num_layers
    source = source.resolve(depth)
    layers = source.capture_layers(depth)
    wanted = [pair for split in SPLITS for pair in encoded[split].pairs]
    share = wanted if shard is None else wanted[shard[0] :: shard[1]]
    key = weights_key(source, room.fingerprint(), room.prompts)
    columns = [TOKENS, *(layer_column(layer) for layer in layers), *([VERDICTS] if room.judge.verdict else [])]
    table = ground.store.table(WEIGHTS, key)
    _log_stored(table, {pair.pair_id for pair in share}, encoded, columns, len(layers))

    def tools() -> Any:
        if shard is None and world_size() > 1:
            raise UserError(
                f"weights are missing in the store and this job has {world_size()} processes; fill the store first "
                "with the same overrides: python -m attnpo.weigh ... (or torchrun -m attnpo.weigh ...)"
            )
        log.info("judge pass: reading %d layers of %s in both orders", len(layers), room.path)
        return replace(room.tools(device_of(cfg)), progress=_progress)

    captured, report = ensure_captured(
        share, source, layers, ground.store, key, tools, load_layers=source.wanted(), verdicts=room.judge.verdict
    )
    if report.computed:
        log.info("weights: %d pairs computed in %.1f s", report.computed, report.seconds)
    _log_unreadable(table, list(dict.fromkeys(pair.pair_id for pair in wanted)), columns)
    verdicts = judge_statistics(list(captured.values()), room.prompts.label_ids) if room.judge.verdict else None
    return Weighed(source, captured, report, verdicts, source.wanted(), depth, key)


def _log_stored(
    table: Table, wanted: set[str], encoded: dict[str, EncodedSet], columns: list[str], layers: int
) -> None:
    """Nothing; logs what the store holds of the wanted pairs and about how much will be written for the others.

    Their size goes by the training tokens, in both orders of the responses.
    """
    lacking = set(table.missing(sorted(wanted), columns))
    tokens = 2 * sum(
        len(side.response_ids)
        for made in encoded.values()
        for pair, sides in zip(made.pairs, made.encoded, strict=True)
        if pair.pair_id in lacking
        for side in sides.values()
    )
    difference = table.nearest_difference() if len(lacking) == len(wanted) else None
    log_store("weights", len(wanted), len(lacking), difference, estimate_bytes(tokens, layers))


def _log_unreadable(table: Table, wanted: list[str], columns: list[str]) -> None:
    """Nothing; logs by reason which of the wanted pairs the judge cannot be shown, as far as they are stored by now.

    UserError when that is every pair: the last of several processes sees what all of them stored.
    """
    found = unreadable_pairs(table, wanted)
    if not found:
        return
    first = next(iter(found.values()))
    if len(found) == len(wanted):
        raise UserError(
            f"the judge can be shown none of {len(wanted)} pairs; the first, pair {first.pair_id}: {first.story}"
        )
    tally = Tally()
    for pair_id, pair in found.items():
        tally.add(pair.reason, pair_id)
        tally.words.setdefault(pair.reason, "" if pair.story == pair.reason else f"; the first: {pair.story}")
    pending = len(table.missing(wanted, columns))
    stored = f" ({pending} more are still with other processes)" if pending else ""
    for reason, count in sorted(tally.counts.items()):
        log.warning(
            "%d of %d pairs%s cannot be judged and get no weights: %s: %s%s%s",
            count,
            len(wanted) - pending,
            stored,
            reason,
            ", ".join(tally.first[reason]),
            ", ..." if count > len(tally.first[reason]) else "",
            tally.words[reason],
        )


def _progress(done: int, total: int) -> None:
    log.info("judge: %d of %d pairs", done, total)
