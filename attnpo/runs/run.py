"""One run from a composed config: prepare, train, score, sample, report. Every point of a study is one of these."""

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import lightning as L
import torch
from lightning.pytorch.loggers import Logger
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from attnpo.answers.answering import chat_generator, encode_prompts
from attnpo.console import leads, training_began
from attnpo.data.collate import TrainingExample
from attnpo.data.datamodule import PreferenceDataModule
from attnpo.data.micro_batches import COSTS
from attnpo.data.prompts import Prompt
from attnpo.machine import as_launched, device_of, environment, require_world, versions
from attnpo.models.backbone import parameter_count
from attnpo.models.generate import context_length
from attnpo.models.layouts import LAYOUTS, Layout, choose, padded
from attnpo.models.packed_attention import attend_as_before
from attnpo.models.scored import ScoredLM
from attnpo.models.spec import ModelSpec
from attnpo.runs.context import make_context
from attnpo.runs.drift import measure_drift
from attnpo.runs.folders import make_folder
from attnpo.runs.for_page import PAIRS, keep_for_page
from attnpo.runs.identity import numbers_of
from attnpo.runs.input_summary import example_statistics, log_inputs
from attnpo.runs.inputs import Inputs, inputs_on
from attnpo.runs.memory_check import log_memory
from attnpo.runs.models import (
    compile_policy,
    fill_reference,
    keeper,
    load_policy,
    load_reference,
    load_start,
    reference_table,
    with_reference,
)
from attnpo.runs.report import heat_rows, make_exporter, publish_run, write_run_report
from attnpo.runs.result import RunResult, Scores
from attnpo.runs.resume import (
    RESULT,
    check_contents,
    check_folder,
    contents_of,
    find_resume,
    finished,
    keep_last,
    prepare_folder,
    tidy_checkpoints,
    write_config,
    write_result,
)
from attnpo.runs.run_config import RunConfig
from attnpo.runs.settings import require_parts
from attnpo.runs.token_logps import first_logps
from attnpo.schema import Message, PreferencePair, Sampling
from attnpo.training.gather import WholePolicy
from attnpo.training.loggers import check_tracker, open_loggers
from attnpo.training.metrics_file import merge_metrics
from attnpo.training.module import PreferenceModule, RowMaker, frozen
from attnpo.training.resume_state import Continuation
from attnpo.training.sampled_rows import AnchoredObjective, Anchors
from attnpo.training.settings import CallbackSettings, TrainerSettings
from attnpo.training.signals import Interruption
from attnpo.training.trainer import make_callbacks, make_trainer, quiet_lightning, total_steps
from attnpo.weights.base import OnlineSource, online_reads

log = logging.getLogger(__name__)


# Logged values that say nothing of the model: counters and how fast this machine was.
NO_RESULT = ("step", "epoch", "train/tokens_per_s", "train/pairs_per_s", "train/gpu_mem_gib")

Some = TypeVar("Some", bound=L.Callback)


@dataclass(frozen=True)
class Trained:
    """What training leaves behind for scoring and reports."""

    policy: ScoredLM
    reference: ScoredLM | None
    metrics: dict[str, float]
    steps: int
    seconds: float


def train(inputs: Inputs, folder: Path, loggers: list[Logger], resume: Path | None = None) -> Trained:
    """The trained policy of a run; writes logs and checkpoint folders under ``folder``."""
    cfg = inputs.context.cfg
    settings = as_launched(cfg.trainer)
    callbacks, objective = cfg.callbacks, cfg.objective
    require_parts(cfg.reference, inputs.context.model, cfg.optimizer)
    L.seed_everything(cfg.seed, verbose=False)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    leading = leads()  # before training: Lightning takes its variables back afterwards
    policy = load_policy(inputs.context)
    examples = {split: inputs.examples[split].examples for split in inputs.examples}
    reference, kept = None, None
    source = cfg.weights
    reads = objective.requires | online_reads(source)
    if "reference" in reads:
        if cfg.reference == "first_epoch":
            kept = keeper(inputs.context, inputs.examples)
        if cfg.reference == "cached":
            fill_reference(inputs.context, inputs.examples, policy)
        if cfg.reference == "cached" or (cfg.reference == "first_epoch" and kept is None):
            table = reference_table(inputs.context)
            examples = {split: with_reference(table, made) for split, made in inputs.examples.items()}
        else:
            reference = load_reference(inputs.context, policy)
    online = source if isinstance(source, OnlineSource) else None
    models = [model for model in (policy, reference) if model is not None]
    device = device_of(cfg.trainer.accelerator)
    layout = padded if inputs.context.model.reward else choose(cfg.layout, models, reads, device)
    compile_policy(inputs.context, policy, layout)
    data = _datamodule(inputs, examples, layout, settings)
    exporter = make_exporter(inputs, dtype=callbacks.export_dtype, card=callbacks.checkpoints and leading)
    gathered = WholePolicy()
    account = {"config": numbers_of(cfg), "contents": contents_of(inputs)}
    with quiet_lightning():
        trainer = make_trainer(
            settings,
            loggers,
            [gathered, *([kept] if kept else []), *make_callbacks(callbacks, settings, folder, exporter, account)],
            folder,
            accumulation=1,
            environment=environment(),
        )
    require_world(trainer.world_size, settings)
    trainer.accumulate_grad_batches = data.accumulation(trainer.world_size)
    steps = total_steps(settings, data.steps_per_epoch(trainer.world_size))
    makers = makers_of(inputs)
    transforms = inputs.weighed.transforms
    module = PreferenceModule(policy, reference, objective, cfg.optimizer, steps, online, makers, kept, transforms)
    del models, reference  # the module alone holds the reference, and may let it go
    trained = _fit(trainer, module, data, resume, folder / "last" if callbacks.checkpoints else None)
    if gathered.state is None and resume is not None and leading and sharded(policy):  # no step was left
        return replace(trained, policy=restored(inputs, resume), reference=None)
    if not gathered.state:  # not sharded, or not the first process
        return trained
    whole = load_start(inputs.context)
    whole.load_state_dict(gathered.state)
    return replace(trained, policy=ScoredLM(whole), reference=None)


def makers_of(inputs: Inputs) -> dict[str, RowMaker]:
    """What makes the further rows that the objective asks for with each micro-batch."""
    context, objective = inputs.context, inputs.context.cfg.objective
    if "group:anchor" not in objective.requires:
        return {}
    if not isinstance(objective, AnchoredObjective):
        raise ValueError(f"{type(objective).__name__} asks for anchors and does not say how they are sampled")
    ends = tuple(sorted({*context.chat.end_ids, context.tokenizer.eos_token_id} - {None}))
    limit = int(context.cfg.lengths.max_length)
    return {"anchor": Anchors(objective.anchor, ends, int(context.tokenizer.pad_token_id or 0), limit)}


def sharded(policy: ScoredLM) -> bool:
    """Whether the weights of a policy lie spread over processes."""
    return any(isinstance(parameter, DTensor) for parameter in policy.parameters())


def restored(inputs: Inputs, resume: Path) -> ScoredLM:
    """The whole policy of a checkpoint, without a trainer."""
    saved = torch.load(resume, map_location="cpu", weights_only=True, mmap=True)["state_dict"]
    policy = load_policy(inputs.context)
    policy.load_state_dict(
        {name.removeprefix("policy."): value for name, value in saved.items() if name.startswith("policy.")}
    )
    return policy


def _datamodule(
    inputs: Inputs,
    examples: Mapping[str, list[TrainingExample]],
    layout: Layout,
    settings: TrainerSettings,
) -> PreferenceDataModule:
    pad_id, cfg = int(inputs.context.tokenizer.pad_token_id or 0), inputs.context.cfg
    ahead = [name.removeprefix("ahead:") for name in cfg.objective.requires if name.startswith("ahead:")]
    return PreferenceDataModule(
        examples["train"],
        examples["val"],
        layout,
        pad_id,
        cfg.batch,
        cfg.seed,
        ahead=ahead,
        max_length=cfg.lengths.max_length,
        cost=next(COSTS[name] for name, made in LAYOUTS.items() if made is layout),
        epochs=settings.max_epochs,
        max_steps=settings.max_steps,
    )


def _fit(
    trainer: L.Trainer, module: PreferenceModule, data: PreferenceDataModule, resume: Path | None, last: Path | None
) -> Trained:
    started, steps = time.perf_counter(), module.total_steps
    log.info("training %d parameters for %d optimiser steps", parameter_count(module.policy.model), steps)
    interruption, past = _one(trainer, Interruption), _one(trainer, Continuation)
    with quiet_lightning(), interruption.reported(trainer, steps, last):
        if resume is None:
            trainer.validate(module, data, verbose=False)
            past.first = first = _metrics(trainer)
            log.info("before the first step: val/loss %.6f", first.get("val/loss", float("nan")))
        training_began()
        trainer.fit(module, data, ckpt_path=resume, weights_only=True)
    earlier = {name: value for name, value in past.metrics.items() if name not in NO_RESULT}
    metrics = {**earlier, **_metrics(trainer), **{f"first/{name}": value for name, value in past.first.items()}}
    return Trained(module.policy, module.reference, metrics, trainer.global_step, time.perf_counter() - started)


def _one(trainer: L.Trainer, kind: type[Some]) -> Some:
    return next(callback for callback in trainer.callbacks if isinstance(callback, kind))  # type: ignore[attr-defined]


def _metrics(trainer: L.Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items() if name not in NO_RESULT}


def run(cfg: RunConfig, folder: Path, point: bool = False) -> RunResult | None:
    """The result of one run, also written to ``result.json`` in its folder.

    Config, metrics, curves, report, checkpoints and samples lie beside it. In a job of several processes the first one
    writes and scores; the others get None. ``resume`` auto in the folder of a finished run gives its result;
    a run that was killed after its last step is scored and reported then. ``point``: a study's, which mends by itself
    what is damaged in its folder.

    Raises:
        Interrupted: a signal ended the training; what there is is saved.
        UserError: settings, inputs or the state to resume from are not as they must be.
    """
    began = time.perf_counter()
    as_launched(cfg.trainer)  # refuses before anything is loaded
    leading = leads()  # before training: Lightning takes its variables back afterwards
    before = finished(cfg, folder, point)
    if before is not None:
        return before if leading else None
    check_tracker(cfg.logger)
    resume = find_resume(cfg, folder, point)
    check_folder(folder, resume)
    if leading:
        make_folder(folder)
    context = make_context(cfg)
    log_memory(context)
    inputs = inputs_on(context)
    cfg = inputs.context.cfg
    if resume is not None:
        check_contents(inputs, resume)
    if leading:
        prepare_folder(folder, resume)
        write_config(cfg, folder)
    log_inputs(inputs)
    with open_loggers(cfg.logger, folder, cfg.values) as loggers:
        trained = train(inputs, folder, loggers, resume)
        if not leading:
            return None
        merge_metrics(folder)
        tidy_checkpoints(folder)
        callbacks = cfg.callbacks
        if callbacks.checkpoints:
            keep_last(folder, resume)
        trained.policy.to(device_of(cfg.trainer.accelerator))  # Lightning's teardown leaves it on the CPU
        attend_as_before(trained.policy.model)  # what is scored and sampled runs as any other model
        statistics, (truth, sampled) = example_statistics(inputs), score_truth(inputs, trained)
        drift = measure_drift(inputs, trained.policy, sampled)
        if callbacks.samples:
            write_samples(inputs, trained.policy.model, callbacks, folder / "generations.jsonl")
        seconds = {"train": round(trained.seconds, 2), "all": round(time.perf_counter() - began, 2)}
        result = RunResult(cfg.seed, trained.steps, seconds, trained.metrics, statistics, versions(), truth, drift)
        part = folder / f"{RESULT}.part"
        part.write_text(json.dumps(result.to_json(), indent=1) + "\n", encoding="utf-8")
        if point:
            keep_for_page(folder, heat_rows(inputs, PAIRS), sampled)
        if callbacks.report:
            shown = first_logps(inputs, trained.policy, callbacks.heat_maps)
            write_run_report(inputs, result, callbacks, folder, shown)
        publish_run(loggers, inputs, result, callbacks, folder)
    write_result(cfg, part)
    return result


def score_truth(inputs: Inputs, trained: Trained) -> tuple[dict[str, Scores] | None, list[PreferencePair]]:
    """Scores against a known truth on validation and test prompts, and the answers to the test prompts.

    Of each prompt the policy's answer, as if chosen, and the base's. None and no answers in settings without a truth.
    """
    scorer = inputs.context.cfg.truth
    if scorer is None:
        return None, []
    policy = frozen(trained.policy.model)
    base, tokenizer = frozen(load_start(inputs.context)), inputs.context.tokenizer
    scores: dict[str, Scores] = {}
    sampled: list[PreferencePair] = []
    for split in ("validation", "test"):
        key = (replace(inputs.context.model, lora=None, compile=None), scorer, split)
        if key not in _base_answers:
            _base_answers[key] = scorer.base_answers(base, tokenizer, split=split)
        rivals = _base_answers[key]
        score = scorer.score(policy, base, tokenizer, split=split, base_answers=rivals)
        rewards, of_base = (every.mean(axis=1).round(6).tolist() for every in (score.rewards, score.base_rewards))
        scores[split] = Scores(score.scalars(), rewards, of_base)
        sampled = [
            PreferencePair.make([Message(role="user", content=prompt)], answer, rival)
            for prompt, answer, rival in zip(score.prompts, score.answers, rivals.texts, strict=True)
        ]
    log.info(
        "truth, held-out prompts: reward %.3f (base %.3f), win rate %.3f, KL %.2f",
        *(scores["test"].numbers[name] for name in ("reward", "base_reward", "win_rate", "kl")),
    )
    return scores, sampled


# The base answers the same prompts alike at every point of a study: sampled once per process.
_base_answers: dict[tuple[ModelSpec, Any, str], Any] = {}


def write_samples(inputs: Inputs, policy: PreTrainedModel, settings: CallbackSettings, path: Path) -> None:
    """Answers the first ``settings.samples`` validation prompts with both models, a JSON line per prompt.

    Only pairs that are trained on, and prompts that leave room for ``settings.sample_tokens`` within lengths.max_length
    and the model's positions.
    """
    context = inputs.context
    trained = {example.pair_id for example in inputs.examples["val"].examples}
    pairs = [pair for pair in inputs.pairs["val"].pairs if pair.pair_id in trained]
    limit = min(context.cfg.lengths.max_length, context_length(policy.config) or context.cfg.lengths.max_length)
    encoded = encode_prompts(
        [Prompt(pair.pair_id, pair.prompt) for pair in pairs], context.chat, settings.sample_tokens, limit
    )
    pairs = [pair for pair in pairs if pair.pair_id in encoded.kept][: settings.samples]
    if not pairs:
        log.info("no validation prompt leaves room for %d sample tokens", settings.sample_tokens)
        return
    sampling = Sampling(max_new_tokens=settings.sample_tokens, seed=context.cfg.seed)
    reference = load_start(context)
    reference.to(policy.device)  # type: ignore[arg-type]
    answers = {
        name: chat_generator(model, context.chat).generate([pair.prompt for pair in pairs], sampling)
        for name, model in (("policy", policy), ("reference", reference))
    }
    with path.open("w", encoding="utf-8") as file:
        for i, pair in enumerate(pairs):
            row = {"prompt": list(pair.prompt), **{name: texts[i] for name, texts in answers.items()}}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    log.info("%d sample answers in %s", len(pairs), path)
