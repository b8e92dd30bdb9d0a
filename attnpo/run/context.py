"""The context of a run: its settled config, its store, model spec, tokenizer, chat format, judge and verbalizer."""

import logging
from dataclasses import dataclass
from typing import TypeVar

from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as quiet

from attnpo.cli.progress import phase
from attnpo.config.compose import MISSING
from attnpo.data.rules import BatchPlan
from attnpo.data.scorers import RunScorers
from attnpo.judge.judge import RunJudge
from attnpo.models.compiled import require_backend
from attnpo.models.described import on_meta, require_exact
from attnpo.models.kept_digests import keep_digests
from attnpo.models.loading import (
    attention_of,
    load_chat,
    load_config,
    model_depth,
    text_config,
    weights_fingerprint,
)
from attnpo.models.lora import reach
from attnpo.models.memory import count_parameters
from attnpo.models.shape import Shape
from attnpo.models.spec import AUTO, ModelSpec
from attnpo.objectives.base import LengthFrom
from attnpo.run.combinations import require_reader, wants_auto
from attnpo.run.components import JudgePreparer
from attnpo.run.folders import store_root
from attnpo.run.run_config import RunConfig
from attnpo.run.startup import log_once
from attnpo.schema import UserError
from attnpo.system.store import Store
from attnpo.text.alignment import AlignMethod
from attnpo.text.chat import ChatFormat
from attnpo.weights.base import ScoredSource
from attnpo.weights.reward_model import RunReward
from attnpo.weights.sources.reward_attention import RewardAttention
from attnpo.weights.verbalizer import RunVerbalizer

log = logging.getLogger(__name__)

Config = TypeVar("Config", bound=RunConfig)


@dataclass(frozen=True)
class RunContext:
    """What every later step stands on: a settled config and the objects that read text.

    ``model`` and ``batch`` are those of the config with what ``auto`` became.
    """

    cfg: RunConfig
    store: Store
    model: ModelSpec
    batch: BatchPlan
    tokenizer: PreTrainedTokenizerBase
    chat: ChatFormat
    prepared: dict[str, object]


@phase("building or finding model and data")
def settle(cfg: Config) -> tuple[Config, dict[str, object]]:
    """Returns the config with the paths of model, data and judge known, and what ``prepare`` reports (empty without
    one).

    A path given by hand is kept. UserError when a path is still missing.
    """
    report: dict[str, object] = {}
    if cfg.prepare is not None:
        prepared = cfg.prepare.prepare(store_root(cfg) / "prepared")
        report = {**prepared.report, "reused": prepared.reused}
        for key, path in (("model.path", prepared.model_path), ("data.path", prepared.data_path)):
            if key in open_paths(cfg):
                cfg = cfg.with_value(key, str(path))
    lacking = open_paths(cfg)
    if lacking:
        raise UserError(f"{' and '.join(lacking)} must be given, as in {lacking[0]}=FOLDER_OR_HUB_NAME")
    cfg, judge = settle_judge(cfg)
    return cfg, {**report, "second": judge} if judge else report


def open_paths(cfg: RunConfig) -> list[str]:
    """Returns the keys of the paths of model and data that are still to be given."""
    mixed = getattr(cfg.data, "mix", None)
    paths = {"model.path": cfg.model.path, "data.path": None if mixed else getattr(cfg.data, "path", None)}
    return [key for key, path in paths.items() if path == MISSING]


def settle_judge(cfg: Config) -> tuple[Config, dict[str, object]]:
    """Returns the config with the path of a judge that is another model, and what ``prepare`` reports of one it built
    for it.

    Nothing is built (and the report is empty) for weights without a judge, for the own model and for a path that is
    given. UserError when another model is meant, none is named and ``prepare`` has none.
    """
    if not cfg.judge.other or cfg.judge.path is not None or "judge" not in cfg.weights.requires:
        return cfg, {}
    if not isinstance(cfg.prepare, JudgePreparer):
        raise UserError(
            "judge=other reads another model, and other_judge.path is null: set other_judge.path=FOLDER_OR_HUB_NAME "
            "(setting=testbed builds one of its own)"
        )
    try:
        made = cfg.prepare.prepare_judge(store_root(cfg) / "prepared")
    except UserError as error:
        raise UserError(f"judge=other, and other_judge.path is null: {error}, or set other_judge.path") from error
    cfg = cfg.with_value("other_judge.path", str(made.path)).with_value("judge.path", str(made.path))
    return cfg, {**made.report, "reused": made.reused}


@phase("reading the model's configuration and tokenizer")
def make_context(cfg: RunConfig) -> RunContext:
    """Returns the settled config with store, model description, tokenizer and chat format.

    Logs what the model is. Raises UserError for a judge, a layer, a verbalizer or a scorer that could not be read, and
    for weights that nothing would read, before any data is.
    """
    # Model folders load and save in moments; their bars bury the log.
    quiet.disable_progress_bar()  # type: ignore[no-untyped-call]
    keep_digests(store_root(cfg) / "digests", full=cfg.digests == "full")
    cfg, prepared = settle(cfg)
    if cfg.model.compile not in (None, AUTO):
        require_backend(cfg.model.compile)
    model, chat = load_chat(cfg.model)
    log_model(model)
    require_exact(text_config(model.path, model.revision), model.path, "lengths.max_length", cfg.lengths.max_length)
    batch = cfg.batch.decide(cfg.lengths.max_length)
    context = RunContext(cfg, Store(store_root(cfg)), model, batch, chat.tokenizer, chat, prepared)
    judged = ""
    require_reader(cfg.weights, cfg.objective)
    if "generator" in cfg.weights.requires:
        run_verbalizer(context)
    if "scorers" in cfg.weights.requires:
        run_scorers(context)
    if "reward" in cfg.weights.requires:
        cfg.weights.resolve(run_reward(context).num_layers)
    if "judge" in cfg.weights.requires:
        judge = run_judge(context)
        judged = f"; {judge.describe_frame()}"
        depth = judge.num_layers
        if len(depth.attending) < depth:
            layers = ", ".join(map(str, depth.attending))
            log_once([f"judge: {judge.path} has attention in {len(depth.attending)} of {int(depth)} layers: {layers}"])
        if not wants_auto(cfg.weights):
            cfg.weights.resolve(depth)
    log_once([f"chat template: training has {chat.chosen.origin}{judged}"])
    return context


def log_model(spec: ModelSpec) -> None:
    """Logs what a model's config says: class, parameters, layers. UserError when there is no such config."""
    layers = model_depth(spec.path, spec.revision)
    config = load_config(spec.path, spec.revision)
    parameters, adapters = count_parameters(config, spec.lora)
    name = (config.architectures or [type(config).__name__])[0]
    trained = f" ({adapters:,} more in adapters, which alone are trained)" if adapters else ""
    attention = attention_of(spec.path, spec.revision, spec.attn_implementation)
    instead = "" if attention == spec.attn_implementation else f", {attention} attention (its class has no other)"
    stored = str(config.dtype or spec.dtype).removeprefix("torch.")
    held = spec.dtype if stored == spec.dtype else f"{spec.dtype} (its folder: {stored})"
    lines = [f"model: {spec.path}, {name}, {parameters:,} parameters{trained}, {held}, {layers} layers{instead}"]
    if spec.lora is not None:
        lines.append(reach(on_meta(config), spec.lora))
    if spec.quantize is not None:
        packed = Shape.of(config).linear / parameters
        lines.append(f"model.quantize: {packed:.0%} of the parameters, the blocks' linear modules, are kept in 4 bits")
    log_once(lines)


def run_judge(context: RunContext) -> RunJudge:
    """Returns the run's judge, not loaded. UserError when its tokens cannot be matched with those of training."""
    judge = RunJudge(settle_judge(context.cfg)[0].judge, context.model, context.chat, context.store)
    key, length = "judge.max_length", judge.settings.max_length
    config = text_config(judge.path, judge.revision)
    require_exact(config, judge.path, key, length)
    if (most := judge.prompts.rules.max_length) < length:
        log_once([f"{key}={length}: prompts are cut to the {most} positions that the judge has"])
    check_tokenizers(context, judge)
    return judge


def run_verbalizer(context: RunContext) -> RunVerbalizer:
    """Returns the run's verbalizer, not loaded. UserError for wording, tokenizer or lengths that cannot be used."""
    return RunVerbalizer(context.cfg.verbalizer, context.model, context.chat, context.store)


def run_scorers(context: RunContext) -> RunScorers:
    """Returns the models that the run's weights compare, not loaded. UserError for what is missing or of another
    vocabulary.
    """
    source = context.cfg.weights
    if not isinstance(source, ScoredSource):
        raise UserError(f"weights {type(source).__name__} require scorers and name none; give it a property `scorers`")
    return RunScorers(source, context.model, context.chat, context.cfg.lengths)


def run_reward(context: RunContext) -> RunReward:
    """Returns the run's reward model, not loaded. UserError where none is named, or its tokens cannot be matched."""
    source = context.cfg.weights
    if not isinstance(source, RewardAttention):
        raise UserError(
            f"weights {type(source).__name__} need a reward model and name none: set weights=reward_attention"
        )
    reward = RunReward(source, context.model.fallback_template)
    require_exact(text_config(reward.path, reward.revision), reward.path, "weights.max_length", source.max_length)
    check_vocabulary(context, reward.tokenizer, reward.path, "weights.path")
    return reward


def check_tokenizers(context: RunContext, judge: RunJudge) -> None:
    """``check_vocabulary`` of a judge that is another model."""
    if judge.settings.path is not None:
        check_vocabulary(context, judge.tokenizer, judge.path, "judge.path")


def check_vocabulary(context: RunContext, tokenizer: PreTrainedTokenizerBase, path: str, key: str) -> None:
    """Refuses to match tokens of two vocabularies by their ids, warns where their count is the scale."""
    if tokenizer.get_vocab() == context.tokenizer.get_vocab():
        return
    if context.cfg.align.method is AlignMethod.LEVENSHTEIN:
        raise UserError(
            f"{key}={path} has another vocabulary than {context.model.path}: token ids cannot be matched; "
            "set align.method=characters (and objective.length_from=train)"
        )
    if getattr(context.cfg.objective, "length_from", None) is LengthFrom.SOURCE:
        warning = (
            f"objective.length_from=source: |y| counts the tokens of {path}, another vocabulary than that of "
            f"{context.model.path}, so the scale differs from training tokens; objective.length_from=train counts those"
        )
        log_once([warning], logging.WARNING)


def reference_fingerprint(context: RunContext) -> dict[str, object]:
    """Returns what identifies the reference's numbers: weights, number format, attention kernel family."""
    return {
        "weights": weights_fingerprint(context.model.path, context.model.revision),
        "dtype": context.model.dtype,
        "kernel": attention_of(context.model.path, context.model.revision, context.model.attn_implementation),
        "precision": context.cfg.trainer.precision,
        **({} if context.model.quantize is None else {"quantize": context.model.quantize}),
    }
