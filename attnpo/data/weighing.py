"""Reads captured weights of pairs from the store, and computes those that are missing."""

import hashlib
import json
import logging
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from attnpo.cli.progress import phase
from attnpo.data.arrow_rows import ConcatenatedPairs, PairSubset, count_row_tokens
from attnpo.data.prepare import EncodedSet, Tally
from attnpo.judge.base import LoadedJudge, WeightReader
from attnpo.judge.judge import LabelCheck, RunJudge
from attnpo.judge.layers import StoredRow, describe_rows, layer_column
from attnpo.judge.verdicts import JudgeStatistics, LabelMass, TraceStatistics, judge_statistics, trace_statistics
from attnpo.schema import PairWeights, PreferencePair, UserError, list_pair_ids
from attnpo.system.files import format_bytes
from attnpo.system.processes import world_size
from attnpo.system.store import Store, StoreTable
from attnpo.weights.base import WeightSource
from attnpo.weights.capture import (
    TOKENS,
    VERDICTS,
    WEIGHTS,
    CapturedRows,
    CaptureReport,
    ensure_captured,
    estimate_bytes,
    unreadable_pairs,
    weights_key,
)
from attnpo.weights.readers import RunVerbalizer, VerbalizerStatistics
from attnpo.weights.transforms import WeightTransform

log = logging.getLogger(__name__)


SPLITS = ("train", "val")

Captured = Mapping[str, PairWeights]


@dataclass(frozen=True)
class WeightingResult:
    """Resolved weight source with the rows captured for a set of pairs (empty if the source captures nothing).

    ``layers``: layer of each captured row. ``depth``: number of layers in the judge, 0 if there is no judge. ``key``:
    store key of the captured rows, or a key for the columns that the source reads. ``verdicts`` and ``answers``:
    statistics of the judge's verdicts and of the verbalizer's answers, if any. ``label_mass``: probability mass on the
    judge's labels. ``traces``: lengths of the judge's traces. ``transforms``: the run's transforms, fitted on its
    training pairs. ``reads``: number of sequences that models read per pair. ``seconds``: time per pair, None if
    unknown. ``rounds``: number of prompts read. ``cut``: number of those prompts that were truncated.
    """

    source: WeightSource
    captured: Captured
    report: CaptureReport | None
    verdicts: JudgeStatistics | None
    layers: tuple[StoredRow, ...]
    depth: int
    key: dict[str, object]
    answers: VerbalizerStatistics | None = None
    transforms: Sequence[WeightTransform] = ()
    reads: int = 0
    seconds: float | None = None
    label_mass: LabelMass | None = None
    traces: TraceStatistics | None = None
    rounds: int = 0
    cut: int = 0


REFILL = "in one process, with data.prepare_data() and data.setup('fit')"


def load_or_compute_weights(
    source: WeightSource,
    reader: WeightReader | None,
    store: Store | None,
    encoded: Mapping[str, EncodedSet],
    device: torch.device,
    *,
    shard: tuple[int, int] | None = None,
    every_row: bool = False,
    refill: str = REFILL,
) -> WeightingResult:
    """Resolves ``source`` and loads its rows for the pairs of ``encoded``; computes rows missing from the store.

    Logs the pairs that the model cannot read.

    Args:
        source: weight source with its layer resolved.
        reader: model from which the source computes weights; None if the source captures nothing.
        store: store for the captured rows.
        encoded: pairs with their training ids, by split.
        device: device for the reader's model, if it must be loaded.
        shard: (rank, ranks) restricts the work to every ranks-th pair, so that several workers can fill one store. If
            it is None, missing rows in a job of several processes raise an error because every process would compute
            the same rows.
        every_row: load all stored rows, not only those that the source reads.
        refill: instruction for filling the store first, included in that error.

    Raises:
        UserError: the model cannot read any of the pairs (even if this was recorded by another process), or rows are
            missing in a job of several processes.
    """
    if reader is None:
        return WeightingResult(source.resolve(1), {}, None, None, (), 0, _columns_key(source, encoded))
    assert store is not None
    source = source.resolve(reader.num_layers or 1)
    layers = source.rows_to_store(reader.num_layers or 1, lambda: reader.num_heads)
    wanted: Sequence[PreferencePair] = ConcatenatedPairs([encoded[split].pairs for split in SPLITS])
    share = wanted if shard is None else PairSubset(wanted, range(shard[0], len(wanted), shard[1]))
    key = weights_key(source, reader.fingerprint(), reader.prompts_fingerprint())
    columns = [TOKENS, *(layer_column(layer) for layer in layers), *([VERDICTS] if reader.verdict else [])]
    table = store.table(WEIGHTS, key)
    lacking = _log_stored_weights(table, set(list_pair_ids(share)), encoded, columns, reader.rounds, len(layers))
    labels = LabelCheck(reader, store, wanted) if isinstance(reader, RunJudge) else None

    def reject_multiple_processes(lacks: str) -> None:
        if shard is None and world_size() > 1:
            raise UserError(
                f"{lacks} missing from the store, but this job has {world_size()} processes; first fill the store "
                f"{refill}"
            )

    def load_judge() -> LoadedJudge:
        reject_multiple_processes("the judge's measured label mass is")
        judge = reader.load(device)
        assert isinstance(judge, LoadedJudge)
        return judge

    def load_reader() -> object:
        reject_multiple_processes("weights are")
        log.info("%s", reader.describe_pass(describe_rows(layers)))
        if reader.trace is not None:
            most = reader.trace.max_new_tokens
            log.info(
                "the judge generates a reasoning trace before each of %d verdicts, at most %d tokens in total "
                "(judge.trace.max_new_tokens=%d)",
                reader.rounds * lacking,
                reader.rounds * lacking * most,
                most,
            )
        made = reader.load(device)
        if labels is not None and isinstance(made, LoadedJudge):
            labels.measure_and_check(made)
        return made

    rows = layers if every_row else source.rows_to_read()
    with phase(f"{reader.name} pass"):
        captured, report = ensure_captured(
            share,
            source,
            layers,
            store,
            key,
            load_reader,
            load_layers=rows,
            verdicts=reader.verdict,
            progress=partial(log.info, "%s: %d of %d pairs", reader.name),
        )
    if report.computed:
        log.info("weights: %d pairs computed in %.1f s", report.computed, report.seconds)
    if labels is not None and not report.computed:
        labels.check_stored(load_judge)
    _log_unreadable(table, list(dict.fromkeys(list_pair_ids(wanted))), columns, reader)
    told = captured.iterate_rounds if isinstance(captured, CapturedRows) else captured.values
    prompts = Counter[str]()
    seen = _count_prompts(told(), prompts)
    verdicts = None
    if isinstance(reader, RunJudge) and reader.verdict:
        verdicts = judge_statistics(seen, reader.prompts.label_ids)
    deque(seen, maxlen=0)  # without verdicts, the rows have not been iterated yet
    return WeightingResult(
        source,
        captured,
        report,
        verdicts,
        rows,
        reader.num_layers,
        key,
        reader.compute_answer_statistics(share, captured) if isinstance(reader, RunVerbalizer) else None,
        reads=reader.reads,
        seconds=table.seconds_per_pair(captured),
        label_mass=None if labels is None else labels.load_measurement(),
        traces=None if reader.trace is None else trace_statistics(told(), reader.trace),
        rounds=prompts["read"],
        cut=prompts["cut"],
    )


def _count_prompts(captured: Iterable[PairWeights], prompts: Counter[str]) -> Iterator[PairWeights]:
    """Yields ``captured`` unchanged; counts the prompts read and the truncated prompts."""
    for pair in captured:
        prompts["read"] += len(pair.rounds)
        prompts["cut"] += sum(item.cut for item in pair.rounds)
        yield pair


def _columns_key(source: WeightSource, encoded: Mapping[str, EncodedSet]) -> dict[str, object]:
    """Returns a key for the columns that a source reads, since a pair's id does not depend on these columns."""
    if not source.columns:
        return {}
    found = hashlib.sha256()
    for split in SPLITS:
        for pair in encoded[split].pairs:
            values = [pair.extra.get(name) for name in source.columns]
            found.update(json.dumps([pair.pair_id, values], default=repr).encode())
    return {"columns": list(source.columns), "values": found.hexdigest()}


def _log_stored_weights(
    table: StoreTable, wanted: set[str], encoded: Mapping[str, EncodedSet], columns: list[str], rounds: int, layers: int
) -> int:
    """Logs how many wanted pairs are stored and the size of the missing ones; returns the number missing."""
    lacking = set(table.missing_pairs(sorted(wanted), columns))
    tokens = 0
    for made in encoded.values():
        of_pairs = np.sum(count_row_tokens(made.encoded).responses, axis=0)
        tokens += rounds * int(of_pairs[[pair_id in lacking for pair_id in list_pair_ids(made.pairs)]].sum())
    log_stored_pairs("weights", table, len(wanted), len(lacking), estimate_bytes(tokens, layers))
    return len(lacking)


def _log_unreadable(table: StoreTable, wanted: list[str], columns: list[str], reader: WeightReader) -> None:
    """Logs the wanted pairs that the model could not read, grouped by reason.

    Raises:
        UserError: the model cannot read any of the wanted pairs.
    """
    found = unreadable_pairs(table, wanted)
    if not found:
        return
    first = next(iter(found.values()))
    if len(found) == len(wanted):
        raise UserError(
            f"the {reader.name} cannot read any of the {len(wanted)} pairs, e.g. pair {first.pair_id}: {first.story}"
        )
    tally = Tally()
    for pair_id, pair in found.items():
        tally.add(pair.reason, pair_id)
        tally.words.setdefault(pair.reason, "" if pair.story == pair.reason else f"; first: {pair.story}")
    pending = len(table.missing_pairs(wanted, columns))
    stored = f" ({pending} more are being processed elsewhere)" if pending else ""
    for reason, count in sorted(tally.counts.items()):
        log.warning(
            "%d of %d pairs%s cannot be %s and get no weights (%s): %s%s%s",
            count,
            len(wanted) - pending,
            stored,
            reader.done,
            reason,
            ", ".join(tally.first[reason]),
            ", ..." if count > len(tally.first[reason]) else "",
            tally.words[reason],
        )


def log_stored_pairs(what: str, table: StoreTable, total: int, lacking: int, size: int) -> None:
    """Logs how many pairs of ``what`` are stored and, if any are missing, why and how much will be written.

    If all are missing, also logs the first difference from the key of the most similar stored table. ``size``: upper
    limit of the bytes that will be written.
    """
    line = f"{what}: {total - lacking} of {total} pairs in the store"
    if lacking:
        difference = table.nearest_difference() if lacking == total else None
        nearest = f" (most similar in the store: {difference})" if difference else ""
        line += f"{nearest}; computing {lacking}, at most about {format_bytes(size)} to write"
    log.info("%s", line)
