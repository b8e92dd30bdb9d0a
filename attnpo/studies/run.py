"""One run from a composed config: prepare, train, score, report. Every point of a study is one of these."""

import json
import logging
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig

from attnpo.config import build, plain
from attnpo.config import save as save_config
from attnpo.data.collate import TrainingExample
from attnpo.data.datamodule import PreferenceDataModule
from attnpo.data.rules import BatchPlan
from attnpo.models.layouts import padded
from attnpo.models.loading import parameter_count
from attnpo.models.scored import ScoredLM
from attnpo.objectives.base import PreferenceObjective
from attnpo.schema import UserError
from attnpo.studies.account import example_statistics, log_inputs, versions
from attnpo.studies.inputs import Inputs, device_of, make_inputs
from attnpo.studies.policies import check_reference, load_policy, load_reference, load_start
from attnpo.studies.reference import fill_reference, with_reference
from attnpo.studies.samples import write_samples
from attnpo.training.export import Exporter, full_state
from attnpo.training.loggers import LOGS, close_loggers, make_loggers
from attnpo.training.metrics_file import merge_metrics
from attnpo.training.module import PreferenceModule, frozen
from attnpo.training.settings import CallbackSettings, TrainerSettings
from attnpo.training.trainer import (
    make_callbacks,
    make_trainer,
    quiet_lightning,
    total_steps,
)

log = logging.getLogger(__name__)

RESULT = "result.json"


@dataclass(frozen=True)
class Trained:
    """What training leaves behind for scoring and reports."""

    policy: ScoredLM
    reference: ScoredLM | None
    metrics: dict[str, float]
    steps: int
    seconds: float


def train(inputs: Inputs, folder: Path, resume: Path | None = None) -> Trained:
    """The trained policy of a run; writes logs and checkpoint folders under ``folder``."""
    cfg = inputs.ground.cfg
    check_reference(inputs.ground)
    settings: TrainerSettings = build(cfg.trainer)
    callbacks: CallbackSettings = build(cfg.callbacks)
    plan: BatchPlan = build(cfg.batch)
    objective: PreferenceObjective = build(cfg.objective)
    L.seed_everything(cfg.seed, verbose=False)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    policy = load_policy(inputs.ground)
    examples = {split: inputs.examples[split].examples for split in inputs.examples}
    reference = None
    if "reference" in objective.requires:
        if cfg.reference == "cached":
            table = fill_reference(inputs.ground, inputs.examples, policy)
            examples = {split: with_reference(table, made) for split, made in inputs.examples.items()}
        reference = load_reference(inputs.ground, policy)
    steps = total_steps(settings, -(-len(examples["train"]) // plan.pairs))
    module = PreferenceModule(policy, reference, objective, build(cfg.optimizer), steps)
    with quiet_lightning():
        trainer = make_trainer(
            settings,
            make_loggers(build(cfg.logger), folder, plain(cfg)),
            make_callbacks(callbacks, settings, folder, Exporter(inputs.ground.tokenizer), steps),
            folder,
            accumulation=1,
        )
    trainer.accumulate_grad_batches = plan.accumulation(trainer.world_size)
    trained = _fit(trainer, module, _datamodule(inputs, examples, plan), steps, resume)
    if not module.sharded:
        return trained
    whole = load_start(inputs.ground)
    whole.load_state_dict(full_state(module.policy.model))
    return replace(trained, policy=ScoredLM(whole), reference=None)


def _datamodule(inputs: Inputs, examples: Mapping[str, list[TrainingExample]], plan: BatchPlan) -> PreferenceDataModule:
    pad_id = inputs.ground.tokenizer.pad_token_id
    seed = inputs.ground.cfg.seed
    return PreferenceDataModule(examples["train"], examples["val"], padded, int(pad_id or 0), plan, seed)


def _fit(
    trainer: L.Trainer, module: PreferenceModule, data: PreferenceDataModule, steps: int, resume: Path | None
) -> Trained:
    started = time.perf_counter()
    log.info("training %d parameters for %d optimiser steps", parameter_count(module.policy.model), steps)
    first: dict[str, float] = {}
    status = "failed"
    try:
        with quiet_lightning():
            if resume is None:
                trainer.validate(module, data, verbose=False)
                first = _metrics(trainer)
                log.info("before the first step: val/loss %.6f (ln 2 = 0.693147)", first.get("val/loss", float("nan")))
            trainer.fit(module, data, ckpt_path=resume, weights_only=True)
        status = "success"
    finally:
        close_loggers(trainer.loggers, status)
    metrics = _metrics(trainer)
    metrics.update({f"first/{name}": value for name, value in first.items()})
    return Trained(module.policy, module.reference, metrics, trainer.global_step, time.perf_counter() - started)


def _metrics(trainer: L.Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items() if name not in ("step", "epoch")}


def find_resume(cfg: DictConfig, folder: Path) -> Path | None:
    """The checkpoint to continue from: ``resume`` auto (``last/`` if there), a path, or None."""
    if cfg.resume is None:
        return None
    path = folder / "last" / "state.ckpt" if cfg.resume == "auto" else Path(cfg.resume)
    if path.is_dir():
        path = path / "state.ckpt"
    if not path.is_file():
        if cfg.resume == "auto":
            log.info("resume=auto: no checkpoint at %s, starting from the beginning", path)
            return None
        raise UserError(f"resume={cfg.resume}: no checkpoint at {path}")
    return path


def run(cfg: DictConfig, folder: Path) -> dict[str, Any]:
    """The result of one run as plain data, also written to ``result.json`` in its folder.

    Config, metrics, curves, report, checkpoints and samples lie beside it. In a job of several processes the first one
    writes and scores; the others get an empty result.
    """
    began = time.perf_counter()
    inputs = make_inputs(cfg)
    cfg = inputs.ground.cfg
    leads = int(getattr(rank_zero_only, "rank", 0)) == 0
    if leads:
        save_config(cfg, folder / "config.yaml")
    log_inputs(inputs)
    resume = find_resume(cfg, folder)
    if resume is None and leads:
        shutil.rmtree(folder / LOGS, ignore_errors=True)  # of an earlier run in the same folder
    trained = train(inputs, folder, resume)
    if not leads:
        return {}
    merge_metrics(folder)
    trained.policy.to(device_of(cfg))  # Lightning's teardown leaves it on the CPU
    result: dict[str, Any] = {
        "seed": cfg.seed,
        "steps": trained.steps,
        "seconds": {"train": round(trained.seconds, 2)},
        "metrics": trained.metrics,
        "inputs": example_statistics(inputs),
        "versions": versions(),
        "truth": score_truth(inputs, trained),
    }
    callbacks: CallbackSettings = build(cfg.callbacks)
    if callbacks.samples:
        write_samples(inputs, trained.policy.model, callbacks, folder / "generations.jsonl")
    result["seconds"]["all"] = round(time.perf_counter() - began, 2)
    (folder / RESULT).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if callbacks.report:
        from attnpo.studies.pages import write_run_report

        write_run_report(inputs, result, callbacks, folder)
    return result


def score_truth(inputs: Inputs, trained: Trained) -> dict[str, Any] | None:
    """Scores against a known truth on validation and test prompts, or None in settings that have none."""
    cfg = inputs.ground.cfg
    if cfg.truth is None:
        return None
    scorer = build(cfg.truth)
    policy = frozen(trained.policy.model)
    base, tokenizer = frozen(load_start(inputs.ground)), inputs.ground.tokenizer
    scores = {}
    for split in ("validation", "test"):
        key = (inputs.ground.model.path, scorer, split)
        if key not in _base_answers:
            _base_answers[key] = scorer.base_answers(base, tokenizer, split=split)
        score = scorer.score(policy, base, tokenizer, split=split, base_answers=_base_answers[key])
        scores[split] = {**score.scalars(), "rewards": score.rewards.mean(axis=1).round(6).tolist()}
    log.info(
        "truth, held-out prompts: reward %.3f (base %.3f), win rate %.3f, KL %.2f",
        *(scores["test"][name] for name in ("reward", "base_reward", "win_rate", "kl")),
    )
    return {"scores": scores}


# The base answers the same prompts alike at every point of a study: sampled once per process.
_base_answers: dict[tuple[str, Any, str], Any] = {}
