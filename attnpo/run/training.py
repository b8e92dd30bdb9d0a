"""Training of one run: the policy, its reference, the batches and Lightning around them."""

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
from attnpo.data.weighing import log_store
from attnpo.models.layouts import padded_layout
from attnpo.models.scored import ScoredLM
from attnpo.objectives.base import PreferenceObjective
from attnpo.run.inputs import Inputs
from attnpo.run.memory import decision, footprint
from attnpo.run.models import (
    BYTES_PER_TOKEN,
    choose_layout,
    compile_policy,
    fill_reference,
    load_policy,
    load_reference,
    reference_table,
    with_reference,
    without_compilation,
)
from attnpo.run.report import make_exporter
from attnpo.run.resolve import BaseModel
from attnpo.run.run_config import RunConfig
from attnpo.schema import SIDES
from attnpo.system.processes import is_main_process
from attnpo.system.store import Store, StoreTable
from attnpo.text.chat import ChatFormat
from attnpo.training.anchor_rows import AnchoredObjective, Anchors
from attnpo.training.callbacks import Movement
from attnpo.training.gather import LeastBudgets, SameEverywhere, WholePolicy
from attnpo.training.module import PreferenceModule, RowMaker
from attnpo.training.processes import as_launched, environment, require_world
from attnpo.training.reference_cache import KeptReference
from attnpo.training.resume_state import Continuation, random_state, set_random_state
from attnpo.training.settings import total_steps
from attnpo.training.signals import Interruption
from attnpo.training.trainer import make_callbacks, make_trainer, quiet_lightning
from attnpo.weights.base import OnlineSource, online_reads
from attnpo.weights.capture import store_logps

log = logging.getLogger(__name__)


# Logged values that say nothing of the model: counters and how fast this machine was.
NO_RESULT = ("step", "epoch", "train/tokens_per_s", "train/pairs_per_s", "train/gpu_mem_gib")

Some = TypeVar("Some", bound=L.Callback)


@dataclass(frozen=True)
class Trained:
    """Outcome of a training, for scoring and reports."""

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
) -> Trained:
    """Returns the trained policy of a run; writes logs and checkpoint folders under ``folder``.

    ``base`` and ``batch``: what memory allows; ``account``: of the checkpoints; ``facts``: of their cards.
    """
    settings = as_launched(cfg.trainer)
    callbacks, objective, source = cfg.callbacks, cfg.objective, cfg.weights
    L.seed_everything(cfg.seed, verbose=False)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    leading = is_main_process()  # before training: Lightning takes its variables back afterwards
    policy = load_policy(base)
    examples = {split: made.examples for split, made in inputs.examples.items()}
    reference, kept = None, None
    reads = objective.requires | online_reads(source)
    if "reference" in reads:
        table = reference_table(base, cfg.lengths)
        if cfg.reference == "first_epoch":
            kept = keeper(base.store, table, inputs.examples)
        if cfg.reference == "cached":
            command = command_text("weigh", *cfg.composed.arguments())
            fill_reference(base, table, inputs.examples, policy, cfg.layout, command)
        if cfg.reference == "cached" or (cfg.reference == "first_epoch" and kept is None):
            examples = with_references(base.store, table, inputs.examples)
        else:
            reference = load_reference(base, cfg.reference, policy)
    online = source if isinstance(source, OnlineSource) else None
    models = [model for model in (policy, reference) if model is not None]
    layout = padded_layout if base.spec.reward else choose_layout(base, cfg.layout, cfg.reference, models, reads)
    if not compile_policy(base, policy, layout, required=cfg.model.compile != AUTO):
        spec, batch = without_compilation(footprint(cfg), base.spec, policy)
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
    gathered = WholePolicy()
    watched: list[L.Callback] = [gathered, *([kept] if kept else [])]
    if len(cfg.model.memory_choices()) > 1 or cfg.model.compile == AUTO:
        watched.append(SameEverywhere(*decision(cfg.model, base.spec)))
    if batch != cfg.batch:
        watched.append(LeastBudgets(data))
    watched += make_callbacks(callbacks, settings, folder, exporter, account)

    def begin() -> L.Trainer:
        with quiet_lightning():
            trainer = make_trainer(settings, loggers, watched, folder, accumulation=1, environment=environment())
        require_world(trainer.world_size, settings)
        trainer.accumulate_grad_batches = data.accumulation_steps(trainer.world_size)
        return trainer

    trainer = begin()
    steps = total_steps(settings, data.steps_per_epoch(trainer.world_size))
    makers = makers_of(objective, base.chat, int(cfg.lengths.max_length))
    transforms = inputs.weighed.transforms
    coefficient = base.spec.router_aux_loss_coef
    module = PreferenceModule(
        policy, reference, objective, cfg.optimizer, steps, online, makers, kept, transforms, coefficient
    )
    module.one_fit = True
    del models, reference  # the module alone holds the reference, and may let it go
    trained = _fit(trainer, begin, module, data, resume, folder / "last" if callbacks.checkpoints else None)
    whole = gathered.state
    if whole is None and resume is not None and leading and is_sharded(policy):  # no step was left
        whole = saved_state(resume)
    if not whole:  # not sharded, or not the first process
        return trained
    policy = load_policy(base)
    policy.model.load_state_dict({**policy.model.state_dict(), **whole})  # a checkpoint holds what is trained alone
    return replace(trained, policy=policy, reference=None)


def with_references(
    store: Store, table: StoreTable, sets: Mapping[str, ExampleSet]
) -> dict[str, Sequence[TrainingExample]]:
    """Returns the examples of every split with the stored log-probabilities, as ``with_reference`` does."""
    return {split: with_reference(Path(store.root), table, made) for split, made in sets.items()}


def keeper(store: Store, table: StoreTable, sets: Mapping[str, ExampleSet]) -> KeptReference | None:
    """Returns what stores a run's reference log-probabilities while it computes them; None if all are stored."""
    pair_ids = list(dict.fromkeys(pair_id for made in sets.values() for pair_id in get_pair_ids(made.examples)))
    lacking = table.missing_pairs(pair_ids, SIDES)
    tokens = sum(int(np.sum(count_row_tokens(made.examples).responses)) for made in sets.values())
    size = BYTES_PER_TOKEN * tokens * len(lacking) // max(1, len(pair_ids))
    log_store("reference log-probs", table, len(pair_ids), len(lacking), size)
    if not lacking:
        return None

    def complete() -> Mapping[str, Sequence[TrainingExample]] | None:
        return None if table.missing_pairs(pair_ids, SIDES) else with_references(store, table, sets)

    return KeptReference(partial(store_logps, table), complete, set(pair_ids) - set(lacking))


def makers_of(objective: PreferenceObjective, chat: ChatFormat, max_length: int) -> dict[str, RowMaker]:
    """Returns what makes the further rows that the objective asks for with each micro-batch."""
    if "group:anchor" not in objective.requires:
        return {}
    if not isinstance(objective, AnchoredObjective):
        raise ValueError(f"{type(objective).__name__} asks for anchors and does not say how they are sampled")
    ends = tuple(sorted({*chat.end_ids, chat.tokenizer.eos_token_id} - {None}))
    return {"anchor": Anchors(objective.anchor, ends, chat.rows.pad_id, max_length)}


def is_sharded(policy: ScoredLM) -> bool:
    """Returns whether the weights of a policy lie spread over processes."""
    return any(isinstance(parameter, DTensor) for parameter in policy.parameters())


def saved_state(resume: Path) -> dict[str, Tensor]:
    """Reads the policy's whole weights from a checkpoint, without a trainer."""
    saved = torch.load(resume, map_location="cpu", weights_only=True, mmap=True)["state_dict"]
    own = "policy.model."
    return {name.removeprefix(own): value for name, value in saved.items() if name.startswith(own)}


@phase("training")
def _fit(
    trainer: L.Trainer,
    begin: Callable[[], L.Trainer],
    module: PreferenceModule,
    data: PreferenceDataModule,
    resume: Path | None,
    last: Path | None,
) -> Trained:
    started, steps = time.perf_counter(), module.total_steps
    trained = sum(value.numel() for value in module.policy.model.parameters() if value.requires_grad)
    log.info("training %d parameters for %d optimiser steps", trained, steps)
    interruption, past = _one(trainer, Interruption), _one(trainer, Continuation)
    with quiet_lightning(), interruption.handle_signals(trainer, steps, last):
        if resume is None:
            with phase("validation before the first step"):
                trainer.validate(module, data, verbose=False)
            past.first = _metrics(trainer)
            log.info("before the first step: val/loss %.6f", past.first.get("val/loss", float("nan")))
        mark_training_started()
        before = random_state()
        enough = _has_room(trainer, module, data, resume)
    if not enough:
        trainer = begin()
        set_random_state(before)
        with quiet_lightning(), interruption.handle_signals(trainer, steps, last):
            trainer.fit(module, data, ckpt_path=resume, weights_only=True)
    earlier = {name: value for name, value in past.metrics.items() if name not in NO_RESULT}
    first = {f"first/{name}": value for name, value in past.first.items()}
    metrics = {**earlier, **_metrics(trainer), **_one(trainer, Movement).metrics, **first}
    return Trained(module.policy, module.reference, metrics, trainer.global_step, time.perf_counter() - started)


def _has_room(trainer: L.Trainer, module: PreferenceModule, data: PreferenceDataModule, resume: Path | None) -> bool:
    """Trains; False where memory ran out in the first step of a single process whose budget could be halved."""
    budgets = data.token_budgets
    try:
        trainer.fit(module, data, ckpt_path=resume, weights_only=True)
        return True
    except torch.OutOfMemoryError:
        if trainer.world_size > 1 or module.sharded or module.updated or not data.halve_budget():
            raise
    log.warning(
        "out of memory in the first step: batch.tokens=auto becomes %d tokens per forward, not %d, and the step starts "
        "anew",
        *(data.token_budgets[0], budgets[0]),
    )
    module.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.empty_cache()
    return False


def _one(trainer: L.Trainer, kind: type[Some]) -> Some:
    return next(callback for callback in trainer.callbacks if isinstance(callback, kind))  # type: ignore[attr-defined]


def _metrics(trainer: L.Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items() if name not in NO_RESULT}
