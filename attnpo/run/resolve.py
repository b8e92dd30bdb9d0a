"""Finds, describes and checks a run's model, data, judge and weight readers, without loading them."""

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
from attnpo.data.weighing import WeightingResult
from attnpo.judge.base import WeightReader
from attnpo.judge.judge import RunJudge
from attnpo.judge.settings import Judge
from attnpo.models.compiled import check_backend
from attnpo.models.description import build_on_meta, check_exact_length
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
from attnpo.models.stored_digests import set_digest_folder
from attnpo.objectives.base import LengthFrom
from attnpo.run.combinations import needs_layer_search, require_usable_weights
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
from attnpo.weights.readers import RunRewardModel, RunVerbalizer
from attnpo.weights.sources.reward_attention import RewardAttention
from attnpo.weights.verbalizer_settings import Verbalizer


@dataclass(frozen=True)
class BaseModel:
    """Model that training starts from: its settings, chat format, device, precision and store.

    ``precision``: the trainer's, e.g. "bf16-mixed".
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
        """Returns the autocast context in which the policy runs, for both stored and live log-probabilities."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.is_mixed)

    def score(
        self, model: ScoredLM, examples: Sequence[TrainingExample], layout: Layout = padded_layout
    ) -> dict[str, LogpPair]:
        """Returns the log-probabilities of the examples' response tokens (chosen, rejected) by pair id."""
        model.to(self.device)
        with self.autocast():
            return dict(score_examples(model, examples, self.chat.rows.pad_id, layout))

    def fingerprint(self) -> dict[str, object]:
        """Returns the properties that determine the reference's outputs: weights, dtypes and attention kernel."""
        return {
            "weights": weights_fingerprint(self.spec.path, self.spec.revision),
            "dtype": self.spec.dtype,
            "kernel": resolve_attention(self.spec.path, self.spec.revision, self.spec.attn_implementation),
            "precision": self.precision,
            **({} if self.spec.quantize is None else {"quantize": self.spec.quantize}),
        }


@dataclass(frozen=True)
class Readers:
    """Weight readers of a run; cheap to create, because models are loaded only on first use.

    ``length_from``: which tokens |y| counts (None: the objective has no such setting). ``command``: the command that
    fills the store before a multi-process job.
    """

    base: BaseModel
    judge: Judge
    verbalizer: Verbalizer
    lengths: LengthRules
    align: AlignMethod
    length_from: LengthFrom | None
    command: str

    @property
    def refill_command(self) -> str:
        """Returns instructions for filling the store before a multi-process job."""
        return f"in one or more processes: {self.command}"

    def make_reader(self, source: WeightSource) -> WeightReader | None:
        """Returns the reader that ``source`` needs, or None if it needs none. Raises UserError for an unknown kind."""
        kinds: Mapping[str, Callable[[], WeightReader]] = {
            "judge": self.make_judge,
            "generator": lambda: RunVerbalizer(self.verbalizer, self.base.spec, self.base.chat, self.base.store),
            "scorers": lambda: self._make_scorers(source),
            "reward": lambda: self._make_reward_reader(source),
        }
        wanted = sorted(source.requires)
        if not wanted:
            return None
        if len(wanted) > 1 or wanted[0] not in kinds:
            raise UserError(
                f"weights {type(source).__name__} need {' and '.join(wanted)}, but a run supports only one of "
                f"{', '.join(kinds)}: choose other weights"
            )
        return kinds[wanted[0]]()

    def make_judge(self) -> RunJudge:
        """Returns the run's judge, not yet loaded. Raises UserError if its tokens cannot match training tokens."""
        judge = RunJudge(self.judge, self.base.spec, self.base.chat, self.base.store)
        key, length = "judge.max_length", judge.settings.max_length
        check_exact_length(load_text_config(judge.path, judge.revision), judge.path, key, length)
        if (most := judge.prompts.rules.max_length) < length:
            log_once([f"{key}={length}: prompts are cut to {most} tokens, the judge's maximum number of positions"])
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
    ) -> WeightingResult:
        """Computes the weights of ``source`` for ``encoded`` pairs; the source's layer must already be known."""
        return weighing.load_or_compute_weights(
            source,
            self.make_reader(source),
            self.base.store,
            encoded,
            self.base.device,
            shard=shard,
            every_row=every_row,
            refill=self.refill_command,
        )

    def _make_scorers(self, source: WeightSource) -> RunScorers:
        if not isinstance(source, ScoredSource):
            raise UserError(
                f"weights {type(source).__name__} require scorers but name none: add a property `scorers` to the class"
            )
        return RunScorers(source, self.base.spec, self.base.chat, self.lengths)

    def _make_reward_reader(self, source: WeightSource) -> RunRewardModel:
        if not isinstance(source, RewardAttention):
            raise UserError(
                f"weights {type(source).__name__} need a reward model but name none: set weights=reward_attention"
            )
        reward = RunRewardModel(source, self.base.spec.fallback_template)
        check_exact_length(
            load_text_config(reward.path, reward.revision), reward.path, "weights.max_length", source.max_length
        )
        self._check_vocabulary(reward.tokenizer, reward.path, "weights.path")
        return reward

    def _check_vocabulary(self, tokenizer: PreTrainedTokenizerBase, path: str, key: str) -> None:
        """Raises UserError if token ids from two vocabularies would be matched; warns if |y| counts source tokens."""
        own = self.base.spec.path
        if tokenizer.get_vocab() == self.base.tokenizer.get_vocab():
            return
        if self.align is AlignMethod.LEVENSHTEIN:
            raise UserError(
                f"{key}={path} has a different vocabulary from {own}, so token ids cannot be matched: set "
                "align.method=characters (and objective.length_from=train)"
            )
        if self.length_from is LengthFrom.SOURCE:
            warning = (
                f"objective.length_from=source: |y| counts the tokens of {path}, whose vocabulary differs from {own}, "
                "so the scale does not match training tokens; set objective.length_from=train to count those"
            )
            log_once([warning], logging.WARNING)


log = logging.getLogger(__name__)

Config = TypeVar("Config", bound=RunConfig)


class ResolvedRun(NamedTuple, Generic[Config]):
    """Config with all paths filled in, and the components built from the config; commands unpack this tuple.

    ``report``: what ``prepare`` measured when it built model, data and judge.
    """

    cfg: Config
    base: BaseModel
    readers: Readers
    report: dict[str, object]


@phase("building or finding model and data")
def resolve_paths(cfg: Config) -> tuple[Config, dict[str, object]]:
    """Fills in the paths of model, data and judge; returns the config and the report of ``prepare``, if any.

    Keeps paths that are already set. Raises UserError if a path is still missing.
    """
    report: dict[str, object] = {}
    root = store_root(cfg.store) / "prepared"
    if cfg.prepare is not None:
        prepared = cfg.prepare.prepare(root)
        report = {**prepared.report, "reused": prepared.reused}
        for key, path in (("model.path", prepared.model_path), ("data.path", prepared.data_path)):
            if key in missing_path_keys(cfg.model, cfg.data):
                cfg = cfg.with_value(key, str(path))
    lacking = missing_path_keys(cfg.model, cfg.data)
    if lacking:
        raise UserError(f"set {' and '.join(lacking)}, e.g. {lacking[0]}=FOLDER_OR_HUB_NAME")
    made = make_judge(cfg.judge, cfg.weights, cfg.prepare, root)
    if made is None:
        return cfg, report
    cfg = cfg.with_value("other_judge.path", str(made.path)).with_value("judge.path", str(made.path))
    return cfg, {**report, "second": judge_report(made)}


def missing_path_keys(model: ModelSpec, data: PairReader) -> list[str]:
    """Returns the keys for model and data paths that are not set yet."""
    mixed = getattr(data, "mix", None)
    paths = {"model.path": model.path, "data.path": None if mixed else getattr(data, "path", None)}
    return [key for key, path in paths.items() if path == MISSING]


def make_judge(judge: Judge, source: WeightSource, prepare: Preparer | None, root: Path) -> PreparedJudge | None:
    """Returns the separate judge model, building it under ``root`` if it is missing; None if the run needs none.

    Raises UserError if a separate judge is requested, but its path is not set and ``prepare`` cannot build it.
    """
    if not judge.other or judge.path is not None or "judge" not in source.requires:
        return None
    if not isinstance(prepare, JudgePreparer):
        raise UserError(
            "judge=other needs a second model, but other_judge.path is null: set other_judge.path=FOLDER_OR_HUB_NAME "
            "(setting=testbed builds its own)"
        )
    try:
        return prepare.prepare_judge(root)
    except UserError as error:
        raise UserError(f"judge=other, but other_judge.path is null: {error}, or set other_judge.path") from error


def judge_report(judge: PreparedJudge) -> dict[str, object]:
    """Returns the measurements of a built judge, and whether an earlier build was reused."""
    return {**judge.report, "reused": judge.reused}


def resolve(cfg: Config) -> ResolvedRun[Config]:
    """Resolves a config: fills in its paths, describes the model and its readers, and checks them.

    Raises UserError, before any data is read, for anything that would fail to load later.
    """
    # Model folders load and save quickly; their progress bars would only clutter the log.
    quiet.disable_progress_bar()  # type: ignore[no-untyped-call]
    set_digest_folder(store_root(cfg.store) / "digests", full=cfg.digests == "full")
    cfg, report = resolve_paths(cfg)
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
        require_usable_weights(cfg.weights, cfg.objective)
        judged = check_readers(readers, cfg.weights)
        log_once([f"chat template: training uses {chat.chosen.origin}{judged}"])
    return ResolvedRun(cfg, base, readers, report)


def check_readers(readers: Readers, source: WeightSource) -> str:
    """Checks the weight reader and the source's layer; returns a log line on the judge's chat template, or "".

    Raises UserError for a reader or layer that does not exist.
    """
    judge = readers.make_reader(source)
    if "reward" in source.requires and judge is not None:
        source.resolve(judge.num_layers)
    if not isinstance(judge, RunJudge):
        return ""
    depth = judge.num_layers
    if len(depth.attending) < depth:
        layers = ", ".join(map(str, depth.attending))
        log_once([f"judge: {len(depth.attending)} of {int(depth)} layers of {judge.path} have attention: {layers}"])
    if not needs_layer_search(source):
        source.resolve(depth)
    return f"; {judge.describe_chat_template()}"


def log_model(spec: ModelSpec) -> None:
    """Logs a model's class, parameter count and layers from its config. Raises UserError if it has no config."""
    layers = num_layers(spec.path, spec.revision)
    config = load_config(spec.path, spec.revision)
    parameters, adapters = count_parameters(config, spec.lora)
    name = (config.architectures or [type(config).__name__])[0]
    trained = f" ({adapters:,} more in adapters; only these are trained)" if adapters else ""
    attention = resolve_attention(spec.path, spec.revision, spec.attn_implementation)
    instead = "" if attention == spec.attn_implementation else f", {attention} attention (its class supports no other)"
    stored = str(config.dtype or spec.dtype).removeprefix("torch.")
    held = spec.dtype if stored == spec.dtype else f"{spec.dtype} (stored as {stored})"
    lines = [f"model: {spec.path}, {name}, {parameters:,} parameters{trained}, {held}, {layers} layers{instead}"]
    if spec.lora is not None:
        lines.append(describe_adapter_coverage(build_on_meta(config), spec.lora))
    if spec.quantize is not None:
        packed = ModelShape.from_model_config(config).linear / parameters
        lines.append(
            f"model.quantize: {packed:.0%} of the parameters (the blocks' linear modules) are stored in 4 bits"
        )
    log_once(lines)
