"""Policy a run trains and the reference it is held against: loaded live, or read as stored log-probabilities.

A stored reference is per-token float32 log-probabilities, so that no second model is held.
"""

import logging
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

from attnpo.cli.progress import phase
from attnpo.data.arrow_rows import ExampleRows, count_row_tokens, get_pair_ids
from attnpo.data.collate import TrainingExample
from attnpo.data.prepare import ExampleSet
from attnpo.data.prepared import prepare_logps
from attnpo.data.rules import BatchPlan, LengthRules
from attnpo.data.weighing import log_store
from attnpo.models.backbone import freeze, is_materialised
from attnpo.models.compiled import check_compiled_blocks, compile_blocks
from attnpo.models.layouts import LAYOUTS, Layout
from attnpo.models.loading import load_model
from attnpo.models.lora import AdapterDisabledReference, add_lora
from attnpo.models.reward_policy import RewardPolicy
from attnpo.models.router import check_router, log_unused_coefficient
from attnpo.models.scored import ScoredLM
from attnpo.models.spec import AUTO, ModelSpec
from attnpo.models.trial import VERSION, check_trainable, needs_separate_rows, select_layout
from attnpo.run.memory import Footprint, fit_memory
from attnpo.run.resolve import BaseModel
from attnpo.schema import SIDES, UserError, digest
from attnpo.system.files import Json, read_record, write_record
from attnpo.system.processes import world_size
from attnpo.system.store import StoreTable
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
    base: BaseModel,
    table: StoreTable,
    sets: Mapping[str, ExampleSet],
    model: ScoredLM,
    layout: str,
    refill: str,
    shard: tuple[int, int] | None = None,
) -> None:
    """Computes what the examples lack in a table of reference log-probabilities, and adds it.

    ``model`` is the reference. ``shard`` (rank, ranks) computes only every ranks-th example; without it a job of
    several processes is refused: ``refill`` is the command that fills the store.
    """
    places: dict[str, tuple[Sequence[TrainingExample], int, int]] = {}
    for made in sets.values():
        tokens_of = np.sum(count_row_tokens(made.examples).responses, axis=0).tolist()
        for place, pair_id in enumerate(get_pair_ids(made.examples)):
            places[pair_id] = made.examples, place, tokens_of[place]
    wanted = list(places) if shard is None else list(places)[shard[0] :: shard[1]]
    lacking = [places[pair_id] for pair_id in table.missing_pairs(wanted, SIDES)]
    tokens = sum(count for *_, count in lacking)
    log_store("reference log-probs", table, len(wanted), len(lacking), BYTES_PER_TOKEN * tokens)
    if lacking and shard is None and world_size() > 1:
        raise UserError(
            "reference log-probs are missing in the store and this job has several processes; fill the store first: "
            + refill
        )
    if not lacking:
        return
    model.to(base.device)
    taken = choose_layout(base, layout, "cached", [model])
    began = time.perf_counter()
    for start in range(0, len(lacking), PAIRS_PER_SHARD):
        chunk = [examples[place] for examples, place, _ in lacking[start : start + PAIRS_PER_SHARD]]
        store_logps(table, base.score(model, chunk, taken))
        done = start + len(chunk)
        pace = done / (time.perf_counter() - began)
        log.info("reference log-probs: %d of %d pairs, %.1f pairs/s", done, len(lacking), pace)


def choose_layout(
    base: BaseModel, layout: str, reference: str, models: Sequence[ScoredLM], requests: Collection[str] = ()
) -> Layout:
    """Takes the layout that the store keeps for this model, device and versions; else tries which one, and keeps it.

    ``reference``: its kind; ``models`` and ``requests``: as for ``trial.choose``, which also says what is refused.
    """
    if layout == "padded" or not all(is_materialised(model.model) for model in models):
        return select_layout(layout, models, requests, base.device)
    facts = {
        "layout": layout,
        "lora": None if base.spec.lora is None else asdict(base.spec.lora),
        "reference": reference,
        "requests": [name for name in sorted(requests) if needs_separate_rows(name)],
    }
    trial = _Trial.of(base, LAYOUT_TRIALS, facts)
    kept = (read_record(trial.path) or {}).get("taken")
    if kept in LAYOUTS:
        log.info("layout %s: tried before with this model, device and versions, as the store says", kept)
        return LAYOUTS[kept]
    taken = select_layout(layout, models, requests, base.device)
    trial.keep(taken=_name(taken))
    return taken


def _name(layout: Layout) -> str:
    return next(name for name, other in LAYOUTS.items() if other is layout)


class _Trial(NamedTuple):
    """Record that the store keeps of a trial of the run's model: known by weights, formats, device, versions."""

    path: Path
    facts: Mapping[str, object]

    @classmethod
    def of(cls, base: BaseModel, folder: str, more: Mapping[str, object]) -> "_Trial":
        device = base.device
        facts = {
            **more,
            "model": base.fingerprint(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "trial": VERSION},
        }
        return cls(Path(base.store.root) / folder / f"{digest(facts)[:20]}.json", facts)

    def keep(self, **found: Json) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_record(self.path, {"of": self.facts, **found})


def reference_table(base: BaseModel, rules: LengthRules) -> StoreTable:
    """Returns the store's table of reference log-probabilities under length rules."""
    limits = rules.max_prompt_length, rules.max_length
    key = reference_key(base.fingerprint(), base.chat.fingerprint(), *limits, keep=rules.keep.value)
    return base.store.table(REFERENCE, key)


def with_reference(store: Path, table: StoreTable, made: ExampleSet) -> Sequence[TrainingExample]:
    """Returns a split's examples with the stored log-probs; UserError when one is missing or of another length."""
    examples, ids = made.examples, get_pair_ids(made.examples)
    chosen, rejected = (counts.tolist() for counts in count_row_tokens(examples).responses)

    def load(places: Sequence[int]) -> list[LogpPair]:
        lengths = {ids[place]: (chosen[place], rejected[place]) for place in places}
        stored = load_logps(table, list(lengths), lengths)
        return [stored[ids[place]] for place in places]

    if isinstance(examples, ExampleRows):
        return prepare_logps(store, table, examples, load)
    found = load(range(len(examples)))
    return [replace(one, reference_logps=logps) for one, logps in zip(examples, found, strict=True)]


@phase("loading the model")
def load_start(base: BaseModel) -> PreTrainedModel:
    """Returns the model that training starts from, in eval mode and without adapters."""
    model = base.spec
    return load_model(
        model.path,
        dtype=model.dtype,
        attn_implementation=model.attn_implementation,
        revision=model.revision,
        quantize=model.quantize,
        device=base.device,
        tried=read_record(_Trial.of(base, LOAD_TRIALS, {}).path) is not None,
    )


def load_policy(base: BaseModel) -> ScoredLM:
    """Returns the model to train; under ``model.lora`` with fresh adapters, which change no number at first.

    Under ``model.reward`` a reward model on the same base.
    """
    spec = base.spec
    if spec.reward:
        return _load_reward(base)
    model, trial = load_start(base), _Trial.of(base, LOAD_TRIALS, {})  # kept once it is causal and runs in training
    if read_record(trial.path) is None:
        check_trainable(model, spec.path)
        trial.keep()
    if spec.lora is not None:
        add_lora(model, spec.lora)
    if spec.router_aux_loss_coef:
        check_router(model)
    else:
        log_unused_coefficient(model)
    return _with_checkpointing(ScoredLM(model, chunk=spec.chunk), spec)


def _with_checkpointing(policy: ScoredLM, spec: ModelSpec) -> ScoredLM:
    """Makes a policy compute its activations again in the backward pass where ``spec`` says so; returns it."""
    if spec.uses_checkpointing:
        policy.model.activation_checkpointing_enable(every_n_layers=spec.checkpoint_every)
    return policy


def _load_reward(base: BaseModel) -> ScoredLM:
    spec = base.spec
    model = load_model(
        spec.path,
        dtype=spec.dtype,
        attn_implementation=spec.attn_implementation,
        revision=spec.revision,
        reward=True,
        fresh_head=True,
    )
    model.config.pad_token_id = base.chat.rows.pad_id  # the library's classes look for a row's end by it
    model.to(base.device)  # type: ignore[arg-type]
    return _with_checkpointing(RewardPolicy(model), spec)


def compile_policy(base: BaseModel, policy: ScoredLM, layout: Layout, *, required: bool) -> bool:
    """Compiles the blocks of a policy that is to be trained in ``layout``, if ``model.compile`` says so.

    Returns False where blocks that are not ``required`` (``auto``) do not run or give other numbers; UserError for
    those that are. A trial that came to numbers is kept in the store, and what torch compiles beside it.
    """
    backend, _ = base.spec.backend(base.device.type)
    if backend is None:
        return True
    os.environ.setdefault(COMPILED_CODE, str((Path(base.store.root) / "inductor").absolute()))
    log.info(
        "model.compile=%s: compiling takes about a minute where nothing is cached (64 s for 8B on an H100), later some "
        "seconds for a new layout: now a few blocks, unless the store has their comparison with plain ones, then the "
        "model's in the first step; torch keeps the code in %s",
        *(backend, os.environ[COMPILED_CODE]),
    )
    try:
        _require_right(base, policy, backend, layout)
    except UserError as error:
        if required:
            raise
        log.warning("model.compile=%s: blocks are not compiled: %s", AUTO, error)
        return False
    compile_blocks(policy.model, backend)
    return True


def _require_right(base: BaseModel, policy: ScoredLM, backend: str, layout: Layout) -> None:
    """Raises ``UserError`` where compiled blocks do not run, or give other numbers, by the store's word if any."""
    trial = _Trial.of(base, COMPILE_TRIALS, {"backend": backend, "layout": _name(layout)})
    kept = read_record(trial.path)
    against = None if kept is None else kept.get("against")
    if kept is None:
        try:
            check_compiled_blocks(policy.model, backend, layout, base.device, autocast=base.is_mixed)
        except UserError as error:
            if error.__cause__ is not None:
                raise
            against = str(error)
        trial.keep(against=against)
    else:
        log.info("model.compile=%s: compared before with this model, device and versions, as the store says", backend)
    if against is not None:
        raise UserError(str(against))


def without_compilation(plan: Footprint, spec: ModelSpec, policy: ScoredLM) -> tuple[ModelSpec, BatchPlan]:
    """Returns model and batch with memory fitted to plain blocks in place of ``spec``; sets ``policy`` as they say."""
    asked = plan.model
    plain = replace(
        spec,
        compile=None,
        gradient_checkpointing=asked.gradient_checkpointing,
        checkpoint_every=asked.checkpoint_every,
        logps_chunk=asked.logps_chunk,
    )
    spec, batch = fit_memory(replace(plan, model=plain))
    policy.chunk = spec.chunk
    _with_checkpointing(policy, spec)
    return spec, batch


def load_reference(base: BaseModel, kind: str, policy: ScoredLM) -> ScoredLM:
    """Returns the reference that is run during training: a frozen copy, or the policy without its adapters."""
    if kind == "adapter_off":
        return AdapterDisabledReference(policy)
    reference = ScoredLM(load_start(base), chunk=base.spec.chunk)
    freeze(reference)
    return reference
