"""Captured weights of a run's pairs: read from the store, or computed where it lacks them."""

import hashlib
import json
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from attnpo.cli.progress import phase
from attnpo.cli.terminal import command_text
from attnpo.data.arrow_rows import Joined, Picked, sizes_of
from attnpo.data.prepare import EncodedSet, Tally
from attnpo.judge.base import LoadedJudge
from attnpo.judge.label_check import LabelCheck
from attnpo.judge.label_mass import LabelMass
from attnpo.judge.layers import Row, layer_column, rows_in_words
from attnpo.judge.trace_lengths import TraceStatistics, trace_statistics
from attnpo.judge.trace_rules import TraceRules
from attnpo.judge.verdicts import JudgeStatistics, judge_statistics
from attnpo.run.context import RunContext, log_store, run_judge, run_reward, run_scorers, run_verbalizer
from attnpo.run.settings import require_reader
from attnpo.schema import PairWeights, PreferencePair, UserError, ids_of
from attnpo.system.machine import device_of
from attnpo.system.processes import world_size
from attnpo.system.store import Table
from attnpo.weights.answer_statistics import AnswerStatistics
from attnpo.weights.base import ColumnSource, WeightSource
from attnpo.weights.capture import (
    TOKENS,
    VERDICTS,
    WEIGHTS,
    CapturedRows,
    CaptureReport,
    ensure_captured,
    estimate_bytes,
    rows_to_store,
    unreadable_pairs,
    weights_key,
)
from attnpo.weights.transforms import WeightTransform

log = logging.getLogger(__name__)


SPLITS = ("train", "val")

Captured = Mapping[str, PairWeights]


@dataclass(frozen=True)
class Weighed:
    """A resolved weight source and what it captured for the pairs at hand (empty for sources that capture nothing).

    ``layers`` names the rows of ``captured``; ``depth`` is the number of the judge's layers, 0 without a judge; ``key``
    is the store's key of the captured rows, or what identifies the columns of the data that the source reads.
    ``verdicts`` and ``answers`` are the account of the judge's verdicts and of the answers about parts, where such were
    read; ``label_mass`` is what was measured of the judge's labels, ``traces`` how long its traces are. ``transforms``
    are the run's, fitted on its training pairs. ``reads``: sequences that models read of each pair to capture it;
    ``seconds``: what that took per pair, None where it is not known. ``rounds``: prompts that were read, ``cut``: those
    that had to be cut.
    """

    source: WeightSource
    captured: Captured
    report: CaptureReport | None
    verdicts: JudgeStatistics | None
    layers: tuple[Row, ...]
    depth: int
    key: dict[str, object]
    answers: AnswerStatistics | None = None
    transforms: Sequence[WeightTransform] = ()
    reads: int = 0
    seconds: float | None = None
    label_mass: LabelMass | None = None
    traces: TraceStatistics | None = None
    rounds: int = 0
    cut: int = 0


@dataclass(frozen=True)
class CaptureMethod:
    """What a source captures with, described without loading a model.

    ``name`` and ``done`` are the words for it in the log ("judge", "judged"); ``work`` is a pass that reads the given
    rows, in words. ``depth``: layers of the model if layers are read, else 0; ``heads`` counts its query heads.
    ``rounds``: rows per response and layer. ``reads``: sequences that models read of a pair, an answer that one writes
    counted once. ``verdict``: verdicts are read as well. ``model`` and ``prompts`` are
    fingerprints for the store's key. ``load`` loads the model and makes what capturing needs. ``verdicts`` and
    ``answers`` are the account of what was captured. ``labels`` measures what a judge does with its labels. ``trace``:
    how a judge thinks before it is read, if it does.
    """

    name: str
    done: str
    work: Callable[[str], str]
    depth: int
    heads: Callable[[], int]
    rounds: int
    reads: int
    verdict: bool
    model: dict[str, object]
    prompts: dict[str, object]
    load: Callable[[], object]
    verdicts: Callable[[Iterable[PairWeights]], JudgeStatistics | None]
    answers: Callable[[Sequence[PreferencePair], Captured], AnswerStatistics | None]
    labels: LabelCheck | None = None
    trace: TraceRules | None = None


def _judge(context: RunContext) -> CaptureMethod:
    judge = run_judge(context)
    verdict = judge.settings.verdict
    return CaptureMethod(
        name="judge",
        done="judged",
        work=lambda rows: f"judge pass: reading {rows} of {judge.path} in both orders",
        depth=judge.num_layers,
        heads=lambda: judge.num_heads,
        rounds=2,
        reads=2,  # both orders
        verdict=verdict,
        model=judge.fingerprint(),
        prompts=judge.prompts.fingerprint(),
        load=lambda: judge.load(device_of(context.cfg.trainer.accelerator)),
        verdicts=lambda captured: judge_statistics(captured, judge.prompts.label_ids) if verdict else None,
        answers=lambda pairs, captured: None,
        labels=LabelCheck(judge, context.store),
        trace=judge.settings.trace,
    )


def _verbalizer(context: RunContext) -> CaptureMethod:
    verbalizer = run_verbalizer(context)
    return CaptureMethod(
        name="verbalizer",
        done="scored in words",
        work=lambda rows: f"verbalizer pass: {verbalizer.path} scores the parts of both responses",
        depth=0,
        heads=lambda: 0,
        rounds=1,
        reads=2,
        verdict=False,
        model=verbalizer.fingerprint(),
        prompts=verbalizer.questions.fingerprint(),
        load=lambda: verbalizer.load(device_of(context.cfg.trainer.accelerator)),
        verdicts=lambda captured: None,
        answers=verbalizer.statistics,
    )


def _scorers(context: RunContext) -> CaptureMethod:
    scorers = run_scorers(context)
    return CaptureMethod(
        name="scorers",
        done="scored",
        work=lambda rows: f"scorer pass: {scorers.paths()} read the training tokens of both responses",
        depth=0,
        heads=lambda: 0,
        rounds=1,
        reads=2 * len(scorers.models),
        verdict=False,
        model=scorers.fingerprint(),
        prompts=scorers.texts.fingerprint(),
        load=lambda: scorers.load(device_of(context.cfg.trainer.accelerator)),
        verdicts=lambda captured: None,
        answers=lambda pairs, captured: None,
    )


def _reward(context: RunContext) -> CaptureMethod:
    reward = run_reward(context)
    return CaptureMethod(
        name="reward model",
        done="read",
        work=lambda rows: f"reward model: reading {rows} of {reward.path} on both responses",
        depth=reward.num_layers,
        heads=lambda: reward.num_heads,
        rounds=1,
        reads=2,
        verdict=False,
        model=reward.fingerprint(),
        prompts=reward.chat.fingerprint(),
        load=lambda: reward.load(device_of(context.cfg.trainer.accelerator)),
        verdicts=lambda captured: None,
        answers=lambda pairs, captured: None,
    )


CAPTURE_METHODS: Mapping[str, Callable[[RunContext], CaptureMethod]] = {
    "judge": _judge,
    "generator": _verbalizer,
    "scorers": _scorers,
    "reward": _reward,
}


def capture_method(context: RunContext, source: WeightSource) -> CaptureMethod | None:
    """What ``source`` captures with in this run; None when it captures nothing. UserError for what is not there."""
    wanted = sorted(source.requires)
    if not wanted:
        return None
    if len(wanted) > 1 or wanted[0] not in CAPTURE_METHODS:
        raise UserError(
            f"weights {type(source).__name__} need {' and '.join(wanted)}; a run has one of "
            f"{', '.join(CAPTURE_METHODS)}: choose other weights"
        )
    return CAPTURE_METHODS[wanted[0]](context)


def weigh(
    context: RunContext,
    encoded: dict[str, EncodedSet],
    *,
    shard: tuple[int, int] | None = None,
    every_row: bool = False,
) -> Weighed:
    """The run's weight source with everything it captured for the pairs of ``encoded``; computes what the store lacks.

    ``shard`` (rank, ranks) restricts the work to every ranks-th pair, for several workers filling one store. Without
    it, missing rows in a job of several processes are refused: they would be computed by every process. ``every_row``
    gives all stored rows, not only those that the source reads. Logs the pairs that the model cannot be shown.
    ``weights.layer=auto`` must be settled already (``cfg.auto_layer.settle``). UserError when the model can be shown
    none of them, whichever process stored that.
    """
    require_reader(context.cfg.weights, context.cfg.objective)
    source = context.cfg.weights
    method = capture_method(context, source)
    if method is None:
        return Weighed(source.resolve(1), {}, None, None, (), 0, _columns_key(source, encoded))
    source = source.resolve(method.depth or 1)
    layers = rows_to_store(source, method.depth or 1, method.heads)
    wanted: Sequence[PreferencePair] = Joined([encoded[split].pairs for split in SPLITS])
    share = wanted if shard is None else Picked(wanted, range(shard[0], len(wanted), shard[1]))
    key = weights_key(source, method.model, method.prompts)
    columns = [TOKENS, *(layer_column(layer) for layer in layers), *([VERDICTS] if method.verdict else [])]
    table = context.store.table(WEIGHTS, key)
    lacking = _log_stored(table, set(ids_of(share)), encoded, columns, method.rounds, len(layers))

    def refuse_many(lacks: str) -> None:
        if shard is None and world_size() > 1:
            raise UserError(
                f"{lacks} missing in the store and this job has {world_size()} processes; fill the store first, in one "
                f"process or several: {command_text('weigh', *context.cfg.composed.arguments())}"
            )

    def load_judge() -> LoadedJudge:
        refuse_many("the measurement of the judge's labels is")
        judge = method.load()
        assert isinstance(judge, LoadedJudge)
        return judge

    def load() -> object:
        refuse_many("weights are")
        log.info("%s", method.work(rows_in_words(layers)))
        if method.trace is not None:
            most = method.trace.max_new_tokens
            log.info(
                "judge: a trace before each of %d verdicts, at most %d tokens to write (judge.trace.max_new_tokens=%d)",
                method.rounds * lacking,
                method.rounds * lacking * most,
                most,
            )
        made = method.load()
        if method.labels is not None and isinstance(made, LoadedJudge):
            method.labels.before(made, wanted)
        return made

    rows = layers if every_row else source.wanted()
    with phase(f"{method.name} pass"):
        captured, report = ensure_captured(
            share,
            source,
            layers,
            context.store,
            key,
            load,
            load_layers=rows,
            verdicts=method.verdict,
            progress=partial(log.info, "%s: %d of %d pairs", method.name),
        )
    if report.computed:
        log.info("weights: %d pairs computed in %.1f s", report.computed, report.seconds)
    if method.labels is not None and not report.computed:
        method.labels.recall(load_judge, wanted)
    label_mass = None if method.labels is None else method.labels.known(wanted)
    _log_unreadable(table, list(dict.fromkeys(ids_of(wanted))), columns, method)
    told = captured.without_tokens if isinstance(captured, CapturedRows) else captured.values
    prompts = Counter[str]()
    seen = _counting(told(), prompts)
    verdicts = method.verdicts(seen)
    deque(seen, maxlen=0)  # where no verdicts were asked for, none is looked at before
    return Weighed(
        source,
        captured,
        report,
        verdicts,
        rows,
        method.depth,
        key,
        method.answers(share, captured),
        reads=method.reads,
        seconds=table.seconds_per_pair(captured),
        label_mass=label_mass,
        traces=None if method.trace is None else trace_statistics(told(), method.trace),
        rounds=prompts["read"],
        cut=prompts["cut"],
    )


def _counting(captured: Iterable[PairWeights], prompts: Counter[str]) -> Iterator[PairWeights]:
    """Yields ``captured``; counts the prompts that were read, and those that had to be cut."""
    for pair in captured:
        prompts["read"] += len(pair.rounds)
        prompts["cut"] += sum(item.cut for item in pair.rounds)
        yield pair


def _columns_key(source: WeightSource, encoded: Mapping[str, EncodedSet]) -> dict[str, object]:
    """What identifies the columns that a source reads, which the pairs' ids do not cover; empty for other sources."""
    if not isinstance(source, ColumnSource):
        return {}
    found = hashlib.sha256()
    for split in SPLITS:
        for pair in encoded[split].pairs:
            values = [pair.extra.get(name) for name in source.columns]
            found.update(json.dumps([pair.pair_id, values], default=repr).encode())
    return {"columns": list(source.columns), "values": found.hexdigest()}


def _log_stored(
    table: Table, wanted: set[str], encoded: dict[str, EncodedSet], columns: list[str], rounds: int, layers: int
) -> int:
    """Logs what the store holds of the wanted pairs and about how much will be written for the others.

    Their size goes by the training tokens, in each round. Returns the number of the others.
    """
    lacking = set(table.missing(sorted(wanted), columns))
    tokens = 0
    for made in encoded.values():
        of_pairs = np.sum(sizes_of(made.encoded).responses, axis=0)
        tokens += rounds * int(of_pairs[[pair_id in lacking for pair_id in ids_of(made.pairs)]].sum())
    log_store("weights", table, len(wanted), len(lacking), estimate_bytes(tokens, layers))
    return len(lacking)


def _log_unreadable(table: Table, wanted: list[str], columns: list[str], method: CaptureMethod) -> None:
    """Logs by reason which of the wanted pairs the model cannot be shown, as far as they are stored by now.

    UserError when that is every pair: the last of several processes sees what all of them stored.
    """
    found = unreadable_pairs(table, wanted)
    if not found:
        return
    first = next(iter(found.values()))
    if len(found) == len(wanted):
        raise UserError(
            f"the {method.name} can be shown none of {len(wanted)} pairs; the first, pair {first.pair_id}: "
            f"{first.story}"
        )
    tally = Tally()
    for pair_id, pair in found.items():
        tally.add(pair.reason, pair_id)
        tally.words.setdefault(pair.reason, "" if pair.story == pair.reason else f"; the first: {pair.story}")
    pending = len(table.missing(wanted, columns))
    stored = f" ({pending} more are still with other processes)" if pending else ""
    for reason, count in sorted(tally.counts.items()):
        log.warning(
            "%d of %d pairs%s cannot be %s and get no weights: %s: %s%s%s",
            count,
            len(wanted) - pending,
            stored,
            method.done,
            reason,
            ", ".join(tally.first[reason]),
            ", ..." if count > len(tally.first[reason]) else "",
            tally.words[reason],
        )
