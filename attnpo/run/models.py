"""Loads the policy that a run trains, and its reference: a live model or stored log-probabilities.

A stored reference is one float32 log-probability per token, which avoids keeping a second model in memory.
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
from attnpo.data.weighing import log_stored_pairs
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
from attnpo.run.memory import MemoryPlan, fit_memory
from attnpo.run.resolve import BaseModel
from attnpo.schema import SIDES, UserError, digest
from attnpo.system.files import Json, read_record, write_record
from attnpo.system.processes import world_size
from attnpo.system.store import StoreTable
from attnpo.weights.capture import REFERENCE, LogpPair, load_logps, reference_key, store_logps

log = logging.getLogger(__name__)


PAIRS_PER_SHARD = 1024
BYTES_PER_TOKEN = 4
LAYOUT_TRIALS = "layouts"  # folder in the store: which layouts models support
LOAD_TRIALS = "loaded"  # folder in the store: which models load and run
COMPILE_TRIALS = "compiled"  # folder in the store: comparisons of compiled blocks with plain ones
COMPILED_CODE = "TORCHINDUCTOR_CACHE_DIR"  # environment variable for torch's folder of compiled code


@phase("reference pass")
def fill_reference_table(
    base: BaseModel,
    table: StoreTable,
    sets: Mapping[str, ExampleSet],
    model: ScoredLM,
    layout: str,
    refill: str,
    shard: tuple[int, int] | None = None,
) -> None:
    """Computes the reference log-probabilities that are missing from ``table``, and adds them.

    ``model``: the reference. ``shard`` (rank, ranks): compute only every ranks-th example. If it is None, raises
    UserError if a multi-process job would have to compute any. ``refill``: command that fills the store, named in that
    error.
    """
    places: dict[str, tuple[Sequence[TrainingExample], int, int]] = {}
    for made in sets.values():
        tokens_of = np.sum(count_row_tokens(made.examples).responses, axis=0).tolist()
        for place, pair_id in enumerate(get_pair_ids(made.examples)):
            places[pair_id] = made.examples, place, tokens_of[place]
    wanted = list(places) if shard is None else list(places)[shard[0] :: shard[1]]
    lacking = [places[pair_id] for pair_id in table.missing_pairs(wanted, SIDES)]
    tokens = sum(count for *_, count in lacking)
    log_stored_pairs("reference log-probs", table, len(wanted), len(lacking), BYTES_PER_TOKEN * tokens)
    if lacking and shard is None and world_size() > 1:
        raise UserError(
            "reference log-probs are missing from the store, which a multi-process job cannot fill; fill it "
            "first with: " + refill
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
    """Returns the layout stored for this model, device and versions, or runs a trial and stores its result.

    ``reference``: kind of reference. ``models``, ``requests`` and errors: as in ``trial.select_layout``.
    """
    if layout == "padded" or not all(is_materialised(model.model) for model in models):
        return select_layout(layout, models, requests, base.device)
    facts = {
        "layout": layout,
        "lora": None if base.spec.lora is None else asdict(base.spec.lora),
        "reference": reference,
        "requests": [name for name in sorted(requests) if needs_separate_rows(name)],
    }
    trial = _TrialRecord.for_model(base, LAYOUT_TRIALS, facts)
    kept = (read_record(trial.path) or {}).get("taken")
    if kept in LAYOUTS:
        log.info("layout %s: taken from the store (earlier trial with this model, device and versions)", kept)
        return LAYOUTS[kept]
    taken = select_layout(layout, models, requests, base.device)
    trial.save(taken=_layout_name(taken))
    return taken


def _layout_name(layout: Layout) -> str:
    return next(name for name, other in LAYOUTS.items() if other is layout)


class _TrialRecord(NamedTuple):
    """Stored record of a trial of the run's model, keyed by weights, dtypes, device and versions."""

    path: Path
    facts: Mapping[str, object]

    @classmethod
    def for_model(cls, base: BaseModel, folder: str, more: Mapping[str, object]) -> "_TrialRecord":
        device = base.device
        facts = {
            **more,
            "model": base.fingerprint(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "trial": VERSION},
        }
        return cls(Path(base.store.root) / folder / f"{digest(facts)[:20]}.json", facts)

    def save(self, **found: Json) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_record(self.path, {"of": self.facts, **found})


def reference_table(base: BaseModel, rules: LengthRules) -> StoreTable:
    """Returns the store's table of reference log-probabilities for the given length rules."""
    limits = rules.max_prompt_length, rules.max_length
    key = reference_key(base.fingerprint(), base.chat.fingerprint(), *limits, keep=rules.keep.value)
    return base.store.table(REFERENCE, key)


def add_reference_logps(store: Path, table: StoreTable, made: ExampleSet) -> Sequence[TrainingExample]:
    """Adds stored log-probabilities to a split's examples. Raises UserError if any are missing or mismatched."""
    examples, ids = made.examples, get_pair_ids(made.examples)
    chosen, rejected = (counts.tolist() for counts in count_row_tokens(examples).responses)

    def load_pairs(places: Sequence[int]) -> list[LogpPair]:
        lengths = {ids[place]: (chosen[place], rejected[place]) for place in places}
        stored = load_logps(table, list(lengths), lengths)
        return [stored[ids[place]] for place in places]

    if isinstance(examples, ExampleRows):
        return prepare_logps(store, table, examples, load_pairs)
    found = load_pairs(range(len(examples)))
    return [replace(one, reference_logps=logps) for one, logps in zip(examples, found, strict=True)]


@phase("loading the model")
def load_base_model(base: BaseModel) -> PreTrainedModel:
    """Loads the model that training starts from, in eval mode and without adapters."""
    model = base.spec
    return load_model(
        model.path,
        dtype=model.dtype,
        attn_implementation=model.attn_implementation,
        revision=model.revision,
        quantize=model.quantize,
        device=base.device,
        tried=read_record(_TrialRecord.for_model(base, LOAD_TRIALS, {}).path) is not None,
    )


def load_policy(base: BaseModel) -> ScoredLM:
    """Loads the model to train; with ``model.lora``, adds new adapters, which initially leave the output unchanged.

    With ``model.reward``, loads a reward model on the same base.
    """
    spec = base.spec
    if spec.reward:
        return _load_reward_policy(base)
    model, trial = (
        load_base_model(base),
        _TrialRecord.for_model(base, LOAD_TRIALS, {}),
    )  # saved once the model has been checked
    if read_record(trial.path) is None:
        check_trainable(model, spec.path)
        trial.save()
    if spec.lora is not None:
        add_lora(model, spec.lora)
    if spec.router_aux_loss_coef:
        check_router(model)
    else:
        log_unused_coefficient(model)
    return _enable_checkpointing(ScoredLM(model, chunk=spec.chunk), spec)


def _enable_checkpointing(policy: ScoredLM, spec: ModelSpec) -> ScoredLM:
    """Enables activation checkpointing if ``spec`` requests it; returns the policy."""
    if spec.uses_checkpointing:
        policy.model.activation_checkpointing_enable(every_n_layers=spec.checkpoint_every)
    return policy


def _load_reward_policy(base: BaseModel) -> ScoredLM:
    spec = base.spec
    model = load_model(
        spec.path,
        dtype=spec.dtype,
        attn_implementation=spec.attn_implementation,
        revision=spec.revision,
        reward=True,
        fresh_head=True,
    )
    model.config.pad_token_id = base.chat.rows.pad_id  # transformers finds a row's last token by it
    model.to(base.device)  # type: ignore[arg-type]
    return _enable_checkpointing(RewardPolicy(model), spec)


def compile_policy(base: BaseModel, policy: ScoredLM, layout: Layout, *, required: bool) -> bool:
    """Compiles a policy's blocks for training in ``layout`` if ``model.compile`` requests it.

    Returns False if compiled blocks fail or their outputs differ from those of uncompiled blocks; raises UserError
    instead if ``required``. Stores the result of the comparison, and torch's compiled code next to it.
    """
    backend, _ = base.spec.backend(base.device.type)
    if backend is None:
        return True
    os.environ.setdefault(COMPILED_CODE, str((Path(base.store.root) / "inductor").absolute()))
    log.info(
        "model.compile=%s: compiling takes about a minute without a cache (64 s for 8B on an H100), then a few "
        "seconds for each new layout. A few blocks are compiled now and compared with uncompiled ones, unless the "
        "store has the result; the rest are compiled in the first step. torch caches the code in %s",
        *(backend, os.environ[COMPILED_CODE]),
    )
    try:
        _require_same_numbers(base, policy, backend, layout)
    except UserError as error:
        if required:
            raise
        log.warning("model.compile=%s: training continues without compiled blocks (%s)", AUTO, error)
        return False
    compile_blocks(policy.model, backend)
    return True


def _require_same_numbers(base: BaseModel, policy: ScoredLM, backend: str, layout: Layout) -> None:
    """Raises ``UserError`` if compiled blocks fail or change the outputs; uses the stored result if there is one."""
    trial = _TrialRecord.for_model(base, COMPILE_TRIALS, {"backend": backend, "layout": _layout_name(layout)})
    kept = read_record(trial.path)
    against = None if kept is None else kept.get("against")
    if kept is None:
        try:
            check_compiled_blocks(policy.model, backend, layout, base.device, autocast=base.is_mixed)
        except UserError as error:
            if error.__cause__ is not None:
                raise
            against = str(error)
        trial.save(against=against)
    else:
        log.info(
            "model.compile=%s: using the stored comparison with uncompiled blocks (same model, device and versions)",
            backend,
        )
    if against is not None:
        raise UserError(str(against))


def refit_without_compilation(plan: MemoryPlan, spec: ModelSpec, policy: ScoredLM) -> tuple[ModelSpec, BatchPlan]:
    """Fits the model and batch settings to memory again, without compilation; updates ``policy`` accordingly."""
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
    _enable_checkpointing(policy, spec)
    return spec, batch


def load_reference(base: BaseModel, kind: str, policy: ScoredLM) -> ScoredLM:
    """Loads the live reference: a frozen copy of the base model, or the policy without its adapters."""
    if kind == "adapter_off":
        return AdapterDisabledReference(policy)
    reference = ScoredLM(load_base_model(base), chunk=base.spec.chunk)
    freeze(reference)
    return reference
