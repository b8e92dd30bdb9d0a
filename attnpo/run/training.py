"""Trains one run: sets up policy, reference, batches and Lightning's Trainer, and fits."""

import gc
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import lightning as L
import numpy as np
import torch
from lightning.pytorch.loggers import Logger
from torch import Tensor
from torch.distributed.tensor import DTensor

from attnpo.cli.progress import phase
from attnpo.cli.terminal import command_text, mark_training_started
from attnpo.data.arrow_rows import count_row_tokens, get_pair_ids
from attnpo.data.collate import TrainingExample
from attnpo.data.datamodule import PreferenceDataModule
from attnpo.data.prepare import ExampleSet
from attnpo.data.rules import AUTO, BatchPlan
from attnpo.data.weighing import log_stored_pairs
from attnpo.models.layouts import padded_layout
from attnpo.models.scored import ScoredLM
from attnpo.objectives.base import PreferenceObjective
from attnpo.run.inputs import Inputs
from attnpo.run.memory import describe_decision, make_memory_plan
from attnpo.run.models import (
    BYTES_PER_TOKEN,
    add_reference_logps,
    choose_layout,
    compile_policy,
    fill_reference_table,
    load_policy,
    load_reference,
    reference_table,
    refit_without_compilation,
)
from attnpo.run.report import make_exporter
from attnpo.run.resolve import BaseModel
from attnpo.run.run_config import RunConfig
from attnpo.schema import SIDES
from attnpo.system.processes import is_main_process
from attnpo.system.store import Store, StoreTable
from attnpo.text.chat import ChatFormat
from attnpo.training.anchor_rows import AnchoredObjective, AnchorSampler
from attnpo.training.callbacks import Movement
from attnpo.training.gather import FullPolicyGather, RankConsistencyCheck, SmallestTokenBudgets
from attnpo.training.module import PreferenceModule, RowMaker
from attnpo.training.processes import apply_launcher, make_cluster_environment, require_world_size
from attnpo.training.reference_cache import ReferenceRecorder
from attnpo.training.resume_state import ExactResume, get_random_state, set_random_state
from attnpo.training.settings import total_steps
from attnpo.training.signals import SignalHandler
from attnpo.training.trainer import make_callbacks, make_trainer, quiet_lightning
from attnpo.weights.base import OnlineSource, online_statistics
from attnpo.weights.capture import store_logps

log = logging.getLogger(__name__)


# Logged values that do not describe the model: counters and the machine's speed.
NO_RESULT = ("step", "epoch", "train/tokens_per_s", "train/pairs_per_s", "train/gpu_mem_gib")

Some = TypeVar("Some", bound=L.Callback)


@dataclass(frozen=True)
class TrainingOutcome:
    """Trained policy with its last metrics, step and duration, for scoring and reports."""

    policy: ScoredLM
    reference: ScoredLM | None
    metrics: dict[str, float]
    steps: int
    seconds: float


@phase("setting up training")
def train(
    cfg: RunConfig,
    base: BaseModel,
    batch: BatchPlan,
    inputs: Inputs,
    account: Mapping[str, object],
    facts: Mapping[str, object] | None,
    folder: Path,
    loggers: list[Logger],
    resume: Path | None = None,
) -> TrainingOutcome:
    """Trains the policy of a run; writes logs and checkpoint folders under ``folder``.

    ``base`` and ``batch``: fitted to memory. ``account``: data for ``checkpoint.json``. ``facts``: data for the model
    cards. ``resume``: the ``state.ckpt`` to continue from; None starts from the beginning.
    """
    settings = apply_launcher(cfg.trainer)
    callbacks, objective, source = cfg.callbacks, cfg.objective, cfg.weights
    L.seed_everything(cfg.seed, verbose=False)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    leading = is_main_process()  # read before training, because Lightning resets its variables afterwards
    policy = load_policy(base)
    examples = {split: made.examples for split, made in inputs.examples.items()}
    reference, kept = None, None
    reads = objective.requires | online_statistics(source)
    if "reference" in reads:
        table = reference_table(base, cfg.lengths)
        if cfg.reference == "first_epoch":
            kept = make_reference_recorder(base.store, table, inputs.examples)
        if cfg.reference == "cached":
            command = command_text("weigh", *cfg.composed.arguments())
            fill_reference_table(base, table, inputs.examples, policy, cfg.layout, command)
        if cfg.reference == "cached" or (cfg.reference == "first_epoch" and kept is None):
            examples = add_reference_logps_to_splits(base.store, table, inputs.examples)
        else:
            reference = load_reference(base, cfg.reference, policy)
    online = source if isinstance(source, OnlineSource) else None
    models = [model for model in (policy, reference) if model is not None]
    layout = padded_layout if base.spec.reward else choose_layout(base, cfg.layout, cfg.reference, models, reads)
    if not compile_policy(base, policy, layout, required=cfg.model.compile != AUTO):
        spec, batch = refit_without_compilation(make_memory_plan(cfg), base.spec, policy)
        base = replace(base, spec=spec)
    recipe = inputs.recipe
    data = PreferenceDataModule(
        cfg.data,
        base.chat,
        recipe.source,
        reader=recipe.reader,
        store=base.store,
        lengths=cfg.lengths,
        align=recipe.align,
        transforms=recipe.transforms,
        plan=batch,
        layout=layout,
        seed=cfg.seed,
        ahead=[name.removeprefix("ahead:") for name in objective.requires if name.startswith("ahead:")],
        epochs=settings.max_epochs,
        max_steps=settings.max_steps,
        auto=cfg.batch.tokens == AUTO,
    )
    data.set_examples(examples["train"], examples["val"])
    exporter = make_exporter(base.spec, base.chat, callbacks.export_dtype, facts)
    gathered = FullPolicyGather()
    watched: list[L.Callback] = [gathered, *([kept] if kept else [])]
    if len(cfg.model.memory_choices()) > 1 or cfg.model.compile == AUTO:
        watched.append(RankConsistencyCheck(*describe_decision(cfg.model, base.spec)))
    if batch != cfg.batch:
        watched.append(SmallestTokenBudgets(data))
    watched += make_callbacks(callbacks, settings, folder, exporter, account)

    def start_trainer() -> L.Trainer:
        with quiet_lightning():
            trainer = make_trainer(
                settings, loggers, watched, folder, accumulation=1, environment=make_cluster_environment()
            )
        require_world_size(trainer.world_size, settings)
        trainer.accumulate_grad_batches = data.accumulation_steps(trainer.world_size)
        return trainer

    trainer = start_trainer()
    steps = total_steps(settings, data.steps_per_epoch(trainer.world_size))
    makers = make_row_makers(objective, base.chat, int(cfg.lengths.max_length))
    transforms = inputs.weighed.transforms
    coefficient = base.spec.router_aux_loss_coef
    module = PreferenceModule(
        policy, reference, objective, cfg.optimizer, steps, online, makers, kept, transforms, coefficient
    )
    module.one_fit = True
    del models, reference  # so that the module can free the reference
    trained = _fit_policy(
        trainer, start_trainer, module, data, resume, folder / "last" if callbacks.checkpoints else None
    )
    whole = gathered.state
    if whole is None and resume is not None and leading and is_sharded(policy):  # no step was left
        whole = load_saved_state(resume)
    if not whole:  # not sharded, or not the first process
        return trained
    policy = load_policy(base)
    policy.model.load_state_dict({**policy.model.state_dict(), **whole})  # checkpoints lack frozen weights
    return replace(trained, policy=policy, reference=None)


def add_reference_logps_to_splits(
    store: Store, table: StoreTable, sets: Mapping[str, ExampleSet]
) -> dict[str, Sequence[TrainingExample]]:
    """Returns the examples of each split with the stored reference log-probabilities."""
    return {split: add_reference_logps(Path(store.root), table, made) for split, made in sets.items()}


def make_reference_recorder(
    store: Store, table: StoreTable, sets: Mapping[str, ExampleSet]
) -> ReferenceRecorder | None:
    """Returns the callback that records reference log-probabilities during training; None if all are stored."""
    pair_ids = list(dict.fromkeys(pair_id for made in sets.values() for pair_id in get_pair_ids(made.examples)))
    lacking = table.missing_pairs(pair_ids, SIDES)
    tokens = sum(int(np.sum(count_row_tokens(made.examples).responses)) for made in sets.values())
    size = BYTES_PER_TOKEN * tokens * len(lacking) // max(1, len(pair_ids))
    log_stored_pairs("reference log-probs", table, len(pair_ids), len(lacking), size)
    if not lacking:
        return None

    def load_complete() -> Mapping[str, Sequence[TrainingExample]] | None:
        return None if table.missing_pairs(pair_ids, SIDES) else add_reference_logps_to_splits(store, table, sets)

    return ReferenceRecorder(partial(store_logps, table), load_complete, set(pair_ids) - set(lacking))


def make_row_makers(objective: PreferenceObjective, chat: ChatFormat, max_length: int) -> dict[str, RowMaker]:
    """Returns the functions that build the objective's additional row groups for each micro-batch."""
    if "group:anchor" not in objective.requires:
        return {}
    if not isinstance(objective, AnchoredObjective):
        raise ValueError(f"{type(objective).__name__} requires anchors but has no property `anchor` to sample them")
    ends = tuple(sorted({*chat.end_ids, chat.tokenizer.eos_token_id} - {None}))
    return {"anchor": AnchorSampler(objective.anchor, ends, chat.rows.pad_id, max_length)}


def is_sharded(policy: ScoredLM) -> bool:
    """Returns whether a policy's weights are sharded across processes."""
    return any(isinstance(parameter, DTensor) for parameter in policy.parameters())


def load_saved_state(resume: Path) -> dict[str, Tensor]:
    """Reads the policy's full weights from a checkpoint, without a trainer."""
    saved = torch.load(resume, map_location="cpu", weights_only=True, mmap=True)["state_dict"]
    own = "policy.model."
    return {name.removeprefix(own): value for name, value in saved.items() if name.startswith(own)}


@phase("training")
def _fit_policy(
    trainer: L.Trainer,
    begin: Callable[[], L.Trainer],
    module: PreferenceModule,
    data: PreferenceDataModule,
    resume: Path | None,
    last: Path | None,
) -> TrainingOutcome:
    started, steps = time.perf_counter(), module.total_steps
    trained = sum(value.numel() for value in module.policy.model.parameters() if value.requires_grad)
    log.info("training %d parameters for %d optimiser steps", trained, steps)
    interruption, past = _find_callback(trainer, SignalHandler), _find_callback(trainer, ExactResume)
    with quiet_lightning(), interruption.handle_signals(trainer, steps, last):
        if resume is None:
            with phase("validation before the first step"):
                trainer.validate(module, data, verbose=False)
            past.first = _logged_metrics(trainer)
            log.info("before the first step: val/loss %.6f", past.first.get("val/loss", float("nan")))
        mark_training_started()
        before = get_random_state()
        enough = _fit_or_resume(trainer, module, data, resume)
    if not enough:
        trainer = begin()
        set_random_state(before)
        with quiet_lightning(), interruption.handle_signals(trainer, steps, last):
            trainer.fit(module, data, ckpt_path=resume, weights_only=True)
    earlier = {name: value for name, value in past.metrics.items() if name not in NO_RESULT}
    first = {f"first/{name}": value for name, value in past.first.items()}
    metrics = {**earlier, **_logged_metrics(trainer), **_find_callback(trainer, Movement).metrics, **first}
    return TrainingOutcome(module.policy, module.reference, metrics, trainer.global_step, time.perf_counter() - started)


def _fit_or_resume(
    trainer: L.Trainer, module: PreferenceModule, data: PreferenceDataModule, resume: Path | None
) -> bool:
    """Trains from the beginning, or from the checkpoint ``resume``; returns whether training finished.

    Returns False if a single process ran out of memory in its first step; the token budget is then halved, and the
    caller must restart with a new trainer.
    """
    token_budgets = data.token_budgets
    try:
        trainer.fit(module, data, ckpt_path=resume, weights_only=True)
        return True
    except torch.OutOfMemoryError:
        if trainer.world_size > 1 or module.sharded or module.updated or not data.halve_budget():
            raise
    log.warning(
        "out of memory in the first step: batch.tokens=auto is reduced from %d to %d tokens per forward, and training "
        "restarts",
        *(token_budgets[0], data.token_budgets[0]),
    )
    module.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.empty_cache()
    return False


def _find_callback(trainer: L.Trainer, kind: type[Some]) -> Some:
    return next(callback for callback in trainer.callbacks if isinstance(callback, kind))  # type: ignore[attr-defined]


def _logged_metrics(trainer: L.Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items() if name not in NO_RESULT}
