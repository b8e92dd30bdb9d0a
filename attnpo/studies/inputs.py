"""From a composed config to training examples: model and data settled, pairs read, weights captured, examples made.

Shared by ``fit``, ``weigh`` and ``show``; nothing here loads the policy.
"""

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as quiet

from attnpo.config import build, cache_root
from attnpo.data.base import PairSet
from attnpo.data.prepare import EncodedSet, ExampleSet, encode_pairs, prepare_examples
from attnpo.models.loading import load_tokenizer, weights_fingerprint
from attnpo.models.spec import ModelSpec
from attnpo.schema import PairWeights, UserError
from attnpo.studies.judging import JudgeRoom, read_template
from attnpo.text.alignment import AlignMethod
from attnpo.text.chat import ChatFormat
from attnpo.weights.base import WeightSource
from attnpo.weights.cache import Store
from attnpo.weights.capture import CaptureReport, ensure_captured, weights_key
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


def store_root(cfg: DictConfig) -> Path:
    """The folder of stored weights, reference log-probabilities and testbed bases."""
    return Path(cfg.store).expanduser() if cfg.store is not None else cache_root()


def process() -> tuple[int, int]:
    """(rank, number of processes) of this job as torchrun or SLURM announce them; (0, 1) otherwise."""
    for rank, ranks in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if ranks in os.environ:
            return int(os.environ.get(rank, "0")), int(os.environ[ranks])
    return 0, 1


def world_size() -> int:
    """Number of processes of this job."""
    return process()[1]


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
    """The settled config with store, model description, tokenizer and chat format."""
    # Model folders load and save in moments; their bars bury the log.
    quiet.disable_progress_bar()  # type: ignore[no-untyped-call]
    cfg, prepared = settle(cfg)
    model: ModelSpec = build(cfg.model)
    model = replace(model, chat_template=read_template(model.chat_template))
    tokenizer = load_tokenizer(model.path, model.revision, model.chat_template)
    return Ground(cfg, Store(store_root(cfg)), model, tokenizer, ChatFormat(tokenizer), prepared)


def weigh(ground: Ground, encoded: dict[str, EncodedSet], *, shard: tuple[int, int] | None = None) -> Weighed:
    """The run's weight source with everything it captured for the pairs of ``encoded``; computes what the store lacks.

    ``shard`` (rank, ranks) restricts the work to every ranks-th pair, for several workers filling one store. Without
    it, missing rows in a job of several processes are refused: they would be computed by every process.
    """
    cfg = ground.cfg
    source: WeightSource = build(cfg.weights)
    if "judge" not in source.requires:
        return Weighed(source.resolve(1), {}, None, None, (), 0, {})
    objective = build(cfg.objective)
    if "token_weights" not in objective.requires:
        raise UserError(
            f"objective {type(objective).__name__} reads no token weights, so those of {type(source).__name__} would "
            "be computed for nothing: set weights=uniform, or an objective that reads weights (objective=twdpo)"
        )
    room = JudgeRoom(build(cfg.judge), ground.model, ground.chat)
    check_tokenizers(ground, room)
    depth = room.num_layers
    source = source.resolve(depth)
    layers = source.capture_layers(depth)
    wanted = [pair for split in SPLITS for pair in encoded[split].pairs]
    if shard is not None:
        wanted = wanted[shard[0] :: shard[1]]
    key = weights_key(source, room.fingerprint(), room.prompts)

    def tools() -> Any:
        if shard is None and world_size() > 1:
            raise UserError(
                f"weights are missing in the store and this job has {world_size()} processes; fill the store first "
                "with the same overrides: python -m attnpo.weigh ... (or torchrun -m attnpo.weigh ...)"
            )
        log.info("judge pass: reading %d layers of %s in both orders", len(layers), room.path)
        return replace(room.tools(device_of(cfg)), progress=_progress)

    captured, report = ensure_captured(
        wanted, source, layers, ground.store, key, tools, load_layers=source.wanted(), verdicts=room.judge.verdict
    )
    log.info("weights: %d pairs from the store, %d computed in %.1f s", report.hits, report.computed, report.seconds)
    verdicts = judge_statistics(list(captured.values()), room.prompts.label_ids) if room.judge.verdict else None
    return Weighed(source, captured, report, verdicts, source.wanted(), depth, key)


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
    return {split: encode_pairs(found.pairs, ground.chat, rules) for split, found in pairs.items()}


def make_inputs(cfg: DictConfig) -> Inputs:
    """Everything before the policy: pairs, weights (from the store or computed), training examples."""
    ground = lay_ground(cfg)
    pairs = read_pairs(ground)
    encoded = encode(ground, pairs)
    weighed = weigh(ground, encoded)
    align = build(ground.cfg.align)
    examples = {
        split: prepare_examples(encoded[split], weighed.source, weighed.captured, align, layers=weighed.layers)
        for split in SPLITS
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
