"""From a composed config to training examples: model and data settled, pairs read, weights captured, examples made.

Shared by ``fit``, ``weigh`` and ``show``; nothing here loads the policy.
"""

import logging
import os
from dataclasses import dataclass, replace
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as quiet

from attnpo.config import build
from attnpo.console import process as process
from attnpo.console import world_size as world_size
from attnpo.data.base import PairSet
from attnpo.data.prepare import EncodedSet, ExampleSet, Tally, encode_pairs, fit_transforms, prepare_examples
from attnpo.data.rules import BatchPlan
from attnpo.models.loading import load_tokenizer, weights_fingerprint
from attnpo.models.spec import ModelSpec
from attnpo.schema import PairWeights, UserError
from attnpo.studies.folders import store_root
from attnpo.studies.judging import JudgeRoom, read_template
from attnpo.studies.root import require_reader
from attnpo.studies.startup import log_model, log_store, planned_processes
from attnpo.text.alignment import AlignMethod
from attnpo.text.chat import ChatFormat
from attnpo.weights.base import WeightSource
from attnpo.weights.cache import Store, Table
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
class Ground:
    """What every later step stands on: a settled config and the objects that read text."""

    cfg: DictConfig
    store: Store
    model: ModelSpec
    tokenizer: PreTrainedTokenizerBase
    chat: ChatFormat
    prepared: dict[str, Any]


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


@dataclass(frozen=True)
class Inputs:
    """Pairs, weights and training examples of both splits."""

    ground: Ground
    pairs: dict[str, PairSet]
    weighed: Weighed
    examples: dict[str, ExampleSet]


def device_of(cfg: DictConfig) -> torch.device:
    """Where models that are not trained run: the GPU of this process if ``trainer.accelerator`` allows one."""
    if cfg.trainer.accelerator == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def settle(cfg: DictConfig) -> tuple[DictConfig, dict[str, Any]]:
    """The config with model and data paths known, and what ``prepare`` reports (empty without one).

    A path given by hand is kept. UserError when a path is still missing.
    """
    cfg = cfg.copy()
    report: dict[str, Any] = {}
    if cfg.prepare is not None:
        prepared = build(cfg.prepare).prepare(store_root(cfg) / "prepared")
        report = {**prepared.report, "reused": prepared.reused}
        for node, path in (("model", prepared.model_path), ("data", prepared.data_path)):
            if OmegaConf.is_missing(cfg[node], "path"):
                cfg[node].path = str(path)
    lacking = [f"{node}.path" for node in ("model", "data") if OmegaConf.is_missing(cfg[node], "path")]
    if lacking:
        raise UserError(f"{' and '.join(lacking)} must be given, as in {lacking[0]}=FOLDER_OR_HUB_NAME")
    return cfg, report


def lay_ground(cfg: DictConfig) -> Ground:
    """The settled config with store, model description, tokenizer and chat format.

    Logs what the model is. Raises UserError for a judge or a layer that could not be read, before any data is.
    """
    # Model folders load and save in moments; their bars bury the log.
    quiet.disable_progress_bar()  # type: ignore[no-untyped-call]
    cfg, prepared = settle(cfg)
    model: ModelSpec = build(cfg.model)
    model = replace(model, chat_template=read_template(model.chat_template))
    tokenizer = load_tokenizer(model.path, model.revision, model.chat_template)
    log_model(model)
    ground = Ground(cfg, Store(store_root(cfg)), model, tokenizer, ChatFormat(tokenizer), prepared)
    source: WeightSource = build(cfg.weights)
    if "judge" in source.requires:
        require_reader(source, build(cfg.objective))
        source.resolve(judge_room(ground).num_layers)
    return ground


def judge_room(ground: Ground) -> JudgeRoom:
    """The run's judge, not loaded. UserError when its tokens cannot be matched with those of training."""
    room = JudgeRoom(build(ground.cfg.judge), ground.model, ground.chat)
    check_tokenizers(ground, room)
    return room


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


def check_tokenizers(ground: Ground, room: JudgeRoom) -> None:
    """Nothing; refuses to match tokens of two vocabularies by their ids."""
    if room.judge.path is None or build(ground.cfg.align).method is not AlignMethod.LEVENSHTEIN:
        return
    if room.tokenizer.get_vocab() != ground.tokenizer.get_vocab():
        raise UserError(
            f"judge.path={room.path} has another vocabulary than {ground.model.path}: token ids cannot be matched; set "
            "align.method=characters (and objective.length_from=train)"
        )


def _progress(done: int, total: int) -> None:
    log.info("judge: %d of %d pairs", done, total)


def read_pairs(ground: Ground) -> dict[str, PairSet]:
    """The pairs of both splits."""
    source = build(ground.cfg.data)
    return {split: source.load(split) for split in SPLITS}


def encode(ground: Ground, pairs: dict[str, PairSet]) -> dict[str, EncodedSet]:
    """Training ids of both splits under the run's length rules."""
    rules = build(ground.cfg.lengths)
    encoded = {}
    for split, found in pairs.items():
        try:
            encoded[split] = encode_pairs(found.pairs, ground.chat, rules)
        except UserError as error:
            raise UserError(f"{split}: {error}") from error
    return encoded


def make_inputs(cfg: DictConfig) -> Inputs:
    """Everything before the policy: pairs, weights (from the store or computed), training examples."""
    return inputs_on(lay_ground(cfg))


def inputs_on(ground: Ground) -> Inputs:
    """The same on ground that is laid already."""
    plan: BatchPlan = build(ground.cfg.batch)
    plan.accumulation(planned_processes(ground.cfg))  # refuses what cannot be split evenly
    pairs = read_pairs(ground)
    encoded = encode(ground, pairs)
    weighed = weigh(ground, encoded)
    align = build(ground.cfg.align)
    source, captured, layers = weighed.source, weighed.captured, weighed.layers
    chosen = [build(node) for node in ground.cfg.transforms.values()]
    transforms = fit_transforms(chosen, encoded["train"], source, captured, layers)
    examples = {
        split: prepare_examples(encoded[split], source, captured, align, layers, transforms) for split in SPLITS
    }
    return Inputs(ground, pairs, weighed, examples)


def reference_fingerprint(ground: Ground) -> dict[str, Any]:
    """What identifies the reference's numbers: weights, number format, attention kernel family."""
    return {
        "weights": weights_fingerprint(ground.model.path, ground.model.revision),
        "dtype": ground.model.dtype,
        "kernel": ground.model.attn_implementation,
        "precision": ground.cfg.trainer.precision,
    }
