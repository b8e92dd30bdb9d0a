"""The policy a run trains and the reference it is held against: loaded live, or read as stored log-probabilities.

A stored reference is per-token float32 log-probabilities, so that no second model is held.
"""

import logging
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

from attnpo.cli.progress import phase
from attnpo.cli.terminal import command_text
from attnpo.data.arrow_rows import ExampleRows, pair_ids_of, sizes_of
from attnpo.data.collate import TrainingExample
from attnpo.data.prepare import ExampleSet
from attnpo.data.prepared import prepare_logps
from attnpo.data.scoring import score_examples
from attnpo.data.weighing import log_store
from attnpo.models.backbone import frozen, is_materialised
from attnpo.models.compiled import compile_blocks, require_same_numbers
from attnpo.models.layouts import LAYOUTS, Layout, padded
from attnpo.models.loading import load_model
from attnpo.models.lora import AdapterOff, add_lora
from attnpo.models.reward_policy import RewardPolicy
from attnpo.models.router import require_router, say_unused
from attnpo.models.scored import ScoredLM
from attnpo.models.spec import AUTO
from attnpo.models.trial import VERSION, asks_for_rows, choose, require_trainable
from attnpo.run.context import RunContext, reference_fingerprint
from attnpo.run.memory_choice import fit_memory
from attnpo.run.run_config import RunConfig
from attnpo.schema import SIDES, UserError, digest
from attnpo.system.files import Json, read_record, write_record
from attnpo.system.machine import device_of
from attnpo.system.processes import world_size
from attnpo.system.store import Table
from attnpo.weights.capture import REFERENCE, LogpPair, load_logps, reference_key, store_logps

log = logging.getLogger(__name__)


PAIRS_PER_SHARD = 1024
BYTES_PER_TOKEN = 4
LAYOUT_TRIALS = "layouts"  # the store's folder of layouts that models could take
LOAD_TRIALS = "loaded"  # and of models that could be loaded and run
COMPILE_TRIALS = "compiled"  # and of compiled blocks that were compared with plain ones
COMPILED_CODE = "TORCHINDUCTOR_CACHE_DIR"  # names the folder in which torch keeps compiled code


@phase("reference pass")
def fill_reference(
    context: RunContext, sets: Mapping[str, ExampleSet], model: ScoredLM, shard: tuple[int, int] | None = None
) -> Table:
    """Returns the store's table of reference log-probabilities, with what the examples need computed and added.

    ``model`` is the reference (the policy before its first step). ``shard`` (rank, ranks) computes only every ranks-th
    example; without it a job of several processes is refused, since each would compute everything.
    """
    table = reference_table(context)
    places: dict[str, tuple[Sequence[TrainingExample], int, int]] = {}
    for made in sets.values():
        tokens_of = np.sum(sizes_of(made.examples).responses, axis=0).tolist()
        for place, pair_id in enumerate(pair_ids_of(made.examples)):
            places[pair_id] = made.examples, place, tokens_of[place]
    wanted = list(places) if shard is None else list(places)[shard[0] :: shard[1]]
    lacking = [places[pair_id] for pair_id in table.missing(wanted, SIDES)]
    tokens = sum(count for *_, count in lacking)
    log_store("reference log-probs", table, len(wanted), len(lacking), BYTES_PER_TOKEN * tokens)
    if lacking and shard is None and world_size() > 1:
        raise UserError(
            "reference log-probs are missing in the store and this job has several processes; fill the store first: "
            + command_text("weigh", *context.cfg.composed.arguments())
        )
    pad_id = context.chat.rows.pad_id
    if lacking:
        model.to(device_of(context.cfg.trainer.accelerator))
    layout = choose_layout(context, [model]) if lacking else padded
    began = time.perf_counter()
    for start in range(0, len(lacking), PAIRS_PER_SHARD):
        chunk = [examples[place] for examples, place, _ in lacking[start : start + PAIRS_PER_SHARD]]
        with autocast(context.cfg):
            store_logps(table, dict(score_examples(model, chunk, pad_id, layout)))
        done = start + len(chunk)
        pace = done / (time.perf_counter() - began)
        log.info("reference log-probs: %d of %d pairs, %.1f pairs/s", done, len(lacking), pace)
    return table


def choose_layout(context: RunContext, models: Sequence[ScoredLM], requests: Collection[str] = ()) -> Layout:
    """Takes the layout that the store keeps for this model, device and versions; else tries which one, and keeps it.

    Args:
        context: what is asked for (``layout``), the model and the store.
        models: the policy, and the reference if it is a model.
        requests: as for ``trial.choose``.

    Raises:
        UserError: as ``trial.choose``.
    """
    cfg, device = context.cfg, device_of(context.cfg.trainer.accelerator)
    if cfg.layout == "padded" or not all(is_materialised(model.model) for model in models):
        return choose(cfg.layout, models, requests, device)
    facts = {
        "layout": cfg.layout,
        "lora": None if context.model.lora is None else asdict(context.model.lora),
        "reference": cfg.reference,
        "requests": [name for name in sorted(requests) if asks_for_rows(name)],
        **_trial_facts(context),
    }
    path = _kept(context, LAYOUT_TRIALS, facts)
    kept = (read_record(path) or {}).get("taken")
    if kept in LAYOUTS:
        log.info("layout %s: tried before with this model, device and versions, as the store says", kept)
        return LAYOUTS[kept]
    taken = choose(cfg.layout, models, requests, device)
    _keep(path, facts, taken=_name(taken))
    return taken


def _name(layout: Layout) -> str:
    return next(name for name, other in LAYOUTS.items() if other is layout)


def _kept(context: RunContext, folder: str, facts: dict[str, object]) -> Path:
    """Returns the store's file of a trial."""
    return Path(context.store.root) / folder / f"{digest(facts)[:20]}.json"


def _keep(path: Path, facts: dict[str, object], **found: Json) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_record(path, {"of": facts, **found})


def _trial_facts(context: RunContext) -> dict[str, object]:
    """Returns what identifies a trial of the run's model: weights, formats, device, versions."""
    device = device_of(context.cfg.trainer.accelerator)
    return {
        "model": reference_fingerprint(context),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "trial": VERSION},
    }


def _load_trial(context: RunContext) -> Path:
    """Returns the file that the store has once the run's model was found causal and ran in training mode."""
    return _kept(context, LOAD_TRIALS, _trial_facts(context))


def reference_table(context: RunContext) -> Table:
    """Returns the store's table of this run's reference log-probabilities."""
    rules = context.cfg.lengths
    limits = rules.max_prompt_length, rules.max_length
    key = reference_key(reference_fingerprint(context), context.chat.fingerprint(), *limits, keep=rules.keep.value)
    return context.store.table(REFERENCE, key)


def autocast(cfg: RunConfig) -> torch.autocast:
    """Returns the number formats the policy will run in, so that stored and live log-probabilities come
    the same way.
    """
    device = device_of(cfg.trainer.accelerator).type
    return torch.autocast(device, torch.bfloat16, enabled=cfg.trainer.precision == "bf16-mixed")


def with_reference(store: Path, table: Table, made: ExampleSet) -> Sequence[TrainingExample]:
    """Returns the examples of a split with the stored log-probabilities; UserError when one is missing or of another
    length.
    """
    examples, ids = made.examples, pair_ids_of(made.examples)
    chosen, rejected = (counts.tolist() for counts in sizes_of(examples).responses)

    def load(places: Sequence[int]) -> list[LogpPair]:
        lengths = {ids[place]: (chosen[place], rejected[place]) for place in places}
        stored = load_logps(table, list(lengths), lengths)
        return [stored[ids[place]] for place in places]

    if isinstance(examples, ExampleRows):
        return prepare_logps(store, table, examples, load)
    found = load(range(len(examples)))
    return [replace(one, reference_logps=logps) for one, logps in zip(examples, found, strict=True)]


@phase("loading the model")
def load_start(context: RunContext) -> PreTrainedModel:
    """Returns the model that training starts from, in eval mode and without adapters."""
    model = context.model
    return load_model(
        model.path,
        dtype=model.dtype,
        attn_implementation=model.attn_implementation,
        revision=model.revision,
        quantize=model.quantize,
        device=device_of(context.cfg.trainer.accelerator),
        tried=read_record(_load_trial(context)) is not None,
    )


def load_policy(context: RunContext) -> ScoredLM:
    """Returns the model to train; under ``model.lora`` with fresh adapters, which change no number before the first
    step.

    Under ``model.reward`` a reward model on the same base.
    """
    if context.model.reward:
        return _load_reward(context)
    model, trial = load_start(context), _load_trial(context)
    if read_record(trial) is None:
        require_trainable(model, context.model.path)
        _keep(trial, _trial_facts(context))
    if context.model.lora is not None:
        add_lora(model, context.model.lora)
    if context.model.router_aux_loss_coef:
        require_router(model)
    else:
        say_unused(model)
    policy = ScoredLM(model, chunk=context.model.chunk)
    if context.model.recomputes:
        policy.model.activation_checkpointing_enable(every_n_layers=context.model.checkpoint_every)
    return policy


def _load_reward(context: RunContext) -> RewardPolicy:
    spec = context.model
    model = load_model(
        spec.path,
        dtype=spec.dtype,
        attn_implementation=spec.attn_implementation,
        revision=spec.revision,
        reward=True,
        fresh_head=True,
    )
    model.config.pad_token_id = context.chat.rows.pad_id  # the library's classes look for a row's end by it
    model.to(device_of(context.cfg.trainer.accelerator))  # type: ignore[arg-type]
    policy = RewardPolicy(model)
    if spec.recomputes:
        policy.model.activation_checkpointing_enable(every_n_layers=spec.checkpoint_every)
    return policy


def compile_policy(context: RunContext, policy: ScoredLM, layout: Layout) -> RunContext:
    """Compiles the blocks of a policy that is to be trained in ``layout``, if ``model.compile`` says so.

    Returns the context; where ``auto`` finds blocks that do not run or give other numbers than plain ones, with memory
    fitted to plain ones. A trial that came to numbers is kept in the store, and what torch compiles beside it.

    Raises:
        UserError: a backend that was named and does not run, or gives other numbers.
    """
    device = device_of(context.cfg.trainer.accelerator)
    backend, _ = context.model.backend(device.type)
    if backend is None:
        return context
    os.environ.setdefault(COMPILED_CODE, str((Path(context.store.root) / "inductor").absolute()))
    log.info(
        "model.compile=%s: compiling takes about a minute where nothing is cached (64 s for 8B on an H100), later some "
        "seconds for a new layout: now a few blocks, unless the store has their comparison with plain ones, then the "
        "model's in the first step; torch keeps the code in %s",
        *(backend, os.environ[COMPILED_CODE]),
    )
    try:
        _require_right(context, policy, backend, layout, device)
    except UserError as error:
        if context.cfg.model.compile != AUTO:
            raise
        log.warning("model.compile=%s: blocks are not compiled: %s", AUTO, error)
        return _uncompiled(context, policy)
    compile_blocks(policy.model, backend)
    return context


def _require_right(context: RunContext, policy: ScoredLM, backend: str, layout: Layout, device: torch.device) -> None:
    """Raises ``UserError`` where compiled blocks do not run, or give other numbers, by the store's word if it has it.

    Blocks that do not run are tried again at the next start: a compiler may be there by then.
    """
    facts = {"backend": backend, "layout": _name(layout), **_trial_facts(context)}
    path = _kept(context, COMPILE_TRIALS, facts)
    kept = read_record(path)
    against = None if kept is None else kept.get("against")
    if kept is None:
        try:
            autocast = context.cfg.trainer.precision == "bf16-mixed"
            require_same_numbers(policy.model, backend, layout, device, autocast=autocast)
        except UserError as error:
            if error.__cause__ is not None:
                raise
            against = str(error)
        _keep(path, facts, against=against)
    else:
        log.info("model.compile=%s: compared before with this model, device and versions, as the store says", backend)
    if against is not None:
        raise UserError(str(against))


def _uncompiled(context: RunContext, policy: ScoredLM) -> RunContext:
    """Returns the context with memory fitted to plain blocks, and sets ``policy`` as it says."""
    asked, rules = context.cfg.model, context.cfg.lengths
    plain = replace(
        context.model,
        compile=None,
        gradient_checkpointing=asked.gradient_checkpointing,
        checkpoint_every=asked.checkpoint_every,
        logps_chunk=asked.logps_chunk,
    )
    fitted = fit_memory(replace(context, model=plain, batch=context.cfg.batch.decide(rules.max_length)))
    policy.chunk = fitted.model.chunk
    if fitted.model.recomputes:
        policy.model.activation_checkpointing_enable(every_n_layers=fitted.model.checkpoint_every)
    return fitted


def load_reference(context: RunContext, policy: ScoredLM) -> ScoredLM:
    """Returns the reference that is run during training: a frozen copy, or the policy without its adapters."""
    if context.cfg.reference == "adapter_off":
        return AdapterOff(policy)
    reference = ScoredLM(load_start(context), chunk=context.model.chunk)
    frozen(reference)
    return reference
