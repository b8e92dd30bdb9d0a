"""Model, data and judge of a run, and what its weights are read with: found, described and checked, not loaded."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as quiet

from attnpo.cli.progress import phase
from attnpo.cli.terminal import command_text
from attnpo.config.compose import MISSING
from attnpo.data import weighing
from attnpo.data.base import PairReader
from attnpo.data.collate import TrainingExample
from attnpo.data.prepare import EncodedSet
from attnpo.data.rules import LengthRules
from attnpo.data.scoring import RunScorers, score_examples
from attnpo.data.weighing import WeighingResult
from attnpo.judge.base import WeightReader
from attnpo.judge.judge import RunJudge
from attnpo.judge.settings import Judge
from attnpo.models.compiled import check_backend
from attnpo.models.described import build_on_meta, check_exact_length
from attnpo.models.kept_digests import set_digest_folder
from attnpo.models.layouts import Layout, padded_layout
from attnpo.models.loading import (
    load_chat,
    load_config,
    load_text_config,
    num_layers,
    resolve_attention,
    weights_fingerprint,
)
from attnpo.models.lora import describe_adapter_coverage
from attnpo.models.memory import ModelShape, count_parameters
from attnpo.models.scored import ScoredLM
from attnpo.models.spec import AUTO, ModelSpec
from attnpo.objectives.base import LengthFrom
from attnpo.run.combinations import require_reader, wants_auto
from attnpo.run.components import JudgePreparer, PreparedJudge, Preparer
from attnpo.run.folders import store_root
from attnpo.run.messages import log_once
from attnpo.run.run_config import RunConfig
from attnpo.schema import UserError
from attnpo.system.machine import inference_device
from attnpo.system.store import Store
from attnpo.text.alignment import AlignMethod
from attnpo.text.chat import ChatFormat
from attnpo.weights.base import ScoredSource, WeightSource
from attnpo.weights.capture import LogpPair
from attnpo.weights.readers import RunReward, RunVerbalizer
from attnpo.weights.sources.reward_attention import RewardAttention
from attnpo.weights.verbalizer_settings import Verbalizer


@dataclass(frozen=True)
class BaseModel:
    """Model that training starts from: its folder and formats, its chat format, where and how precisely it is run.

    ``precision``: that of the trainer, such as "bf16-mixed".
    """

    spec: ModelSpec
    chat: ChatFormat
    device: torch.device
    precision: str
    store: Store

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Returns the tokenizer of the training tokens."""
        return self.chat.tokenizer

    @property
    def is_mixed(self) -> bool:
        """Returns whether forward passes are computed in bf16."""
        return self.precision == "bf16-mixed"

    def autocast(self) -> torch.autocast:
        """Returns the number formats that the policy runs in, for stored and live log-probabilities alike."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.is_mixed)

    def score(
        self, model: ScoredLM, examples: Sequence[TrainingExample], layout: Layout = padded_layout
    ) -> dict[str, LogpPair]:
        """Returns the log-probabilities of the examples' response tokens, chosen and rejected, by pair id."""
        model.to(self.device)
        with self.autocast():
            return dict(score_examples(model, examples, self.chat.rows.pad_id, layout))

    def fingerprint(self) -> dict[str, object]:
        """Returns what identifies the reference's numbers: weights, number formats, attention kernel family."""
        return {
            "weights": weights_fingerprint(self.spec.path, self.spec.revision),
            "dtype": self.spec.dtype,
            "kernel": resolve_attention(self.spec.path, self.spec.revision, self.spec.attn_implementation),
            "precision": self.precision,
            **({} if self.spec.quantize is None else {"quantize": self.spec.quantize}),
        }


@dataclass(frozen=True)
class Readers:
    """Readers of token weights in a run, each described cheaply and loaded when it is asked.

    ``length_from``: whose tokens |y| counts, if any. ``command``: fills the store before a job of several processes.
    """

    base: BaseModel
    judge: Judge
    verbalizer: Verbalizer
    lengths: LengthRules
    align: AlignMethod
    length_from: LengthFrom | None
    command: str

    @property
    def refill(self) -> str:
        """Returns how the store is filled before a job of several processes."""
        return f"in one process or several: {self.command}"

    def make(self, source: WeightSource) -> WeightReader | None:
        """Returns what ``source`` is read with; None when it captures nothing. UserError for what is absent."""
        kinds: Mapping[str, Callable[[], WeightReader]] = {
            "judge": self.make_judge,
            "generator": lambda: RunVerbalizer(self.verbalizer, self.base.spec, self.base.chat, self.base.store),
            "scorers": lambda: self._make_scorers(source),
            "reward": lambda: self._make_reward(source),
        }
        wanted = sorted(source.requires)
        if not wanted:
            return None
        if len(wanted) > 1 or wanted[0] not in kinds:
            raise UserError(
                f"weights {type(source).__name__} need {' and '.join(wanted)}; a run has one of {', '.join(kinds)}: "
                "choose other weights"
            )
        return kinds[wanted[0]]()

    def make_judge(self) -> RunJudge:
        """Returns the run's judge, not loaded. UserError when its tokens cannot be matched with those of training."""
        judge = RunJudge(self.judge, self.base.spec, self.base.chat, self.base.store)
        key, length = "judge.max_length", judge.settings.max_length
        check_exact_length(load_text_config(judge.path, judge.revision), judge.path, key, length)
        if (most := judge.prompts.rules.max_length) < length:
            log_once([f"{key}={length}: prompts are cut to the {most} positions that the judge has"])
        if judge.settings.path is not None:
            self._check_vocabulary(judge.tokenizer, judge.path, "judge.path")
        return judge

    def weigh(
        self,
        source: WeightSource,
        encoded: Mapping[str, EncodedSet],
        *,
        shard: tuple[int, int] | None = None,
        every_row: bool = False,
    ) -> WeighingResult:
        """Returns the weights of ``source`` for the pairs of ``encoded`` (``data.weighing``); a layer must be known."""
        return weighing.weigh_splits(
            source,
            self.make(source),
            self.base.store,
            encoded,
            self.base.device,
            shard=shard,
            every_row=every_row,
            refill=self.refill,
        )

    def _make_scorers(self, source: WeightSource) -> RunScorers:
        if not isinstance(source, ScoredSource):
            raise UserError(
                f"weights {type(source).__name__} require scorers and name none; give it a property `scorers`"
            )
        return RunScorers(source, self.base.spec, self.base.chat, self.lengths)

    def _make_reward(self, source: WeightSource) -> RunReward:
        if not isinstance(source, RewardAttention):
            raise UserError(
                f"weights {type(source).__name__} need a reward model and name none: set weights=reward_attention"
            )
        reward = RunReward(source, self.base.spec.fallback_template)
        check_exact_length(
            load_text_config(reward.path, reward.revision), reward.path, "weights.max_length", source.max_length
        )
        self._check_vocabulary(reward.tokenizer, reward.path, "weights.path")
        return reward

    def _check_vocabulary(self, tokenizer: PreTrainedTokenizerBase, path: str, key: str) -> None:
        """Refuses to match tokens of two vocabularies by their ids, warns where their count is the scale."""
        own = self.base.spec.path
        if tokenizer.get_vocab() == self.base.tokenizer.get_vocab():
            return
        if self.align is AlignMethod.LEVENSHTEIN:
            raise UserError(
                f"{key}={path} has another vocabulary than {own}: token ids cannot be matched; set "
                "align.method=characters (and objective.length_from=train)"
            )
        if self.length_from is LengthFrom.SOURCE:
            warning = (
                f"objective.length_from=source: |y| counts the tokens of {path}, another vocabulary than that of {own}"
                ", so the scale differs from training tokens; objective.length_from=train counts those"
            )
            log_once([warning], logging.WARNING)


log = logging.getLogger(__name__)

Config = TypeVar("Config", bound=RunConfig)


class Resolved(NamedTuple, Generic[Config]):
    """Configuration whose paths are known, and what a run makes of it first: unpacked by each command's body.

    ``report``: what ``prepare`` says of model, data and judge where it built them.
    """

    cfg: Config
    base: BaseModel
    readers: Readers
    report: dict[str, object]


@phase("building or finding model and data")
def settle(cfg: Config) -> tuple[Config, dict[str, object]]:
    """Returns the config with the paths of model, data and judge known, and what ``prepare`` reports (empty without).

    A path given by hand is kept. UserError when a path is still missing.
    """
    report: dict[str, object] = {}
    root = store_root(cfg.store) / "prepared"
    if cfg.prepare is not None:
        prepared = cfg.prepare.prepare(root)
        report = {**prepared.report, "reused": prepared.reused}
        for key, path in (("model.path", prepared.model_path), ("data.path", prepared.data_path)):
            if key in open_paths(cfg.model, cfg.data):
                cfg = cfg.with_value(key, str(path))
    lacking = open_paths(cfg.model, cfg.data)
    if lacking:
        raise UserError(f"{' and '.join(lacking)} must be given, as in {lacking[0]}=FOLDER_OR_HUB_NAME")
    made = make_judge(cfg.judge, cfg.weights, cfg.prepare, root)
    if made is None:
        return cfg, report
    cfg = cfg.with_value("other_judge.path", str(made.path)).with_value("judge.path", str(made.path))
    return cfg, {**report, "second": report_of(made)}


def open_paths(model: ModelSpec, data: PairReader) -> list[str]:
    """Returns the keys of the paths of model and data that are still to be given."""
    mixed = getattr(data, "mix", None)
    paths = {"model.path": model.path, "data.path": None if mixed else getattr(data, "path", None)}
    return [key for key, path in paths.items() if path == MISSING]


def make_judge(judge: Judge, source: WeightSource, prepare: Preparer | None, root: Path) -> PreparedJudge | None:
    """Returns the other model that judges, built below ``root`` if it is missing; None where none is to be built.

    UserError when another model is meant, none is named and ``prepare`` has none.
    """
    if not judge.other or judge.path is not None or "judge" not in source.requires:
        return None
    if not isinstance(prepare, JudgePreparer):
        raise UserError(
            "judge=other reads another model, and other_judge.path is null: set other_judge.path=FOLDER_OR_HUB_NAME "
            "(setting=testbed builds one of its own)"
        )
    try:
        return prepare.prepare_judge(root)
    except UserError as error:
        raise UserError(f"judge=other, and other_judge.path is null: {error}, or set other_judge.path") from error


def report_of(judge: PreparedJudge) -> dict[str, object]:
    """Returns what ``prepare`` says of a judge that it built or found."""
    return {**judge.report, "reused": judge.reused}


def resolve(cfg: Config) -> Resolved[Config]:
    """Returns the settled config with the described model and what its weights are read with.

    Raises UserError for what could not be read or would not be, before any data is.
    """
    # Model folders load and save in moments; their bars bury the log.
    quiet.disable_progress_bar()  # type: ignore[no-untyped-call]
    set_digest_folder(store_root(cfg.store) / "digests", full=cfg.digests == "full")
    cfg, report = settle(cfg)
    with phase("reading the model's configuration and tokenizer"):
        if cfg.model.compile not in (None, AUTO):
            check_backend(cfg.model.compile)
        model, chat = load_chat(cfg.model)
        log_model(model)
        check_exact_length(
            load_text_config(model.path, model.revision), model.path, "lengths.max_length", cfg.lengths.max_length
        )
        device, store = inference_device(cfg.trainer.accelerator), Store(store_root(cfg.store))
        base = BaseModel(model, chat, device, cfg.trainer.precision, store)
        command = command_text("weigh", *cfg.composed.arguments())
        length_from = getattr(cfg.objective, "length_from", None)
        readers = Readers(base, cfg.judge, cfg.verbalizer, cfg.lengths, cfg.align.method, length_from, command)
        require_reader(cfg.weights, cfg.objective)
        judged = check_readers(readers, cfg.weights)
        log_once([f"chat template: training has {chat.chosen.origin}{judged}"])
    return Resolved(cfg, base, readers, report)


def check_readers(readers: Readers, source: WeightSource) -> str:
    """Returns how a judge's prompt is framed, "" without a judge; UserError for a reader or layer that is not there."""
    judge = readers.make(source)
    if "reward" in source.requires and judge is not None:
        source.resolve(judge.num_layers)
    if not isinstance(judge, RunJudge):
        return ""
    depth = judge.num_layers
    if len(depth.attending) < depth:
        layers = ", ".join(map(str, depth.attending))
        log_once([f"judge: {judge.path} has attention in {len(depth.attending)} of {int(depth)} layers: {layers}"])
    if not wants_auto(source):
        source.resolve(depth)
    return f"; {judge.describe_frame()}"


def log_model(spec: ModelSpec) -> None:
    """Logs what a model's config says: class, parameters, layers. UserError when there is no such config."""
    layers = num_layers(spec.path, spec.revision)
    config = load_config(spec.path, spec.revision)
    parameters, adapters = count_parameters(config, spec.lora)
    name = (config.architectures or [type(config).__name__])[0]
    trained = f" ({adapters:,} more in adapters, which alone are trained)" if adapters else ""
    attention = resolve_attention(spec.path, spec.revision, spec.attn_implementation)
    instead = "" if attention == spec.attn_implementation else f", {attention} attention (its class has no other)"
    stored = str(config.dtype or spec.dtype).removeprefix("torch.")
    held = spec.dtype if stored == spec.dtype else f"{spec.dtype} (its folder: {stored})"
    lines = [f"model: {spec.path}, {name}, {parameters:,} parameters{trained}, {held}, {layers} layers{instead}"]
    if spec.lora is not None:
        lines.append(describe_adapter_coverage(build_on_meta(config), spec.lora))
    if spec.quantize is not None:
        packed = ModelShape.from_model_config(config).linear / parameters
        lines.append(f"model.quantize: {packed:.0%} of the parameters, the blocks' linear modules, are kept in 4 bits")
    log_once(lines)
