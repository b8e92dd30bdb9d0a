"""Loads a run's judge at most once, and only if the store lacks something."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from attnpo.config.named_files import read_template
from attnpo.judge.base import CAPTURE_VERSION, JudgeModel, JudgePrompt, LoadedJudge, WeightReader
from attnpo.judge.causal_judge import CausalJudge, kernel_for
from attnpo.judge.layers import Depth
from attnpo.judge.prompts import JudgePromptBuilder
from attnpo.judge.settings import STOP, TOKEN_BUDGET, Judge
from attnpo.judge.traces import TRACES, ReasoningJudge, TraceCache, TraceGenerator, trace_key
from attnpo.judge.verdicts import LabelMass, measure_label_mass
from attnpo.models.description import config_vocabulary_size, describe_model, max_positions
from attnpo.models.generate import extra_end_ids
from attnpo.models.loading import (
    inspect_model,
    load_config,
    load_model,
    load_text_config,
    load_tokenizer,
    num_heads,
    num_layers,
    weights_fingerprint,
)
from attnpo.models.memory import MemoryEstimate, estimate_pass, max_token_budget
from attnpo.models.spec import ModelSpec
from attnpo.schema import PreferencePair, UserError, digest
from attnpo.system.files import read_record, write_record
from attnpo.system.machine import device_memory
from attnpo.system.store import Store, StoreTable
from attnpo.text.chat import ChatFormat

log = logging.getLogger(__name__)


class AttentionReader(WeightReader):
    """Reads attention from the model at ``path`` and describes that model without loading it."""

    path: str
    revision: str | None
    dtype: str

    @property
    def num_heads(self) -> int:
        """Returns the number of query heads per layer without loading the model; raises UserError if layers differ."""
        return num_heads(self.path, self.revision)

    @property
    def kernel(self) -> str:
        """Returns the attention kernel family that the model runs with."""
        return kernel_for(inspect_model(self.path, self.revision))

    def fingerprint(self) -> dict[str, object]:
        """Returns the settings that affect the readings: model weights, dtype, attention kernel family."""
        return {"weights": weights_fingerprint(self.path, self.revision), "dtype": self.dtype, "kernel": self.kernel}


class RunJudge(AttentionReader):
    """Judge of a run, loaded at most once.

    Args:
        judge: the judge's settings.
        model: the run's model, which is also the judge unless ``judge.path`` names a different model.
        chat: the run's chat format, used unless ``judge.path`` names a different model.
        store: store for the traces of a judge that reasons first; if None, each ``load`` keeps its traces in memory.

    Raises:
        UserError: a different model is required but not named, the tokenizer has no character offsets, or the chat
            template does not use ``chat_template_kwargs``.
    """

    name, done, rounds = "judge", "judged", 2  # in both orders

    def __init__(self, judge: Judge, model: ModelSpec, chat: ChatFormat, store: Store | None = None) -> None:
        own = judge.path is None
        if own and judge.other:
            raise UserError(
                "judge.other=true requires a judge other than the run's own model, but judge.path is null: set "
                "other_judge.path=FOLDER_OR_HUB_NAME (with judge=other) or judge.path=FOLDER_OR_HUB_NAME"
            )
        self.tokenizer = chat.tokenizer
        self.settings, self.trace, self.dtype = judge, judge.trace, judge.dtype
        self.path = model.path if judge.path is None else judge.path
        self.revision = model.revision if own else judge.revision
        if not own:
            self.tokenizer = load_tokenizer(self.path, self.revision)
            if not self.tokenizer.is_fast:
                raise UserError(
                    f"judge.path={self.path}: expected a fast tokenizer with character offsets, got "
                    f"{type(self.tokenizer).__name__} without them, so its weights cannot be aligned with the "
                    "training tokens: choose a model folder with a tokenizer.json, or another judge"
                )
        config = load_text_config(self.path, self.revision)
        options, rows = judge.chat_template_kwargs, config_vocabulary_size(config)
        if not own:
            template, fallback = read_template(judge.chat_template, "judge.chat_template"), model.fallback_template
            chat = ChatFormat(self.tokenizer, template, fallback=fallback, kwargs=options, part="judge", rows=rows)
        asking = chat
        if own and judge.chat and options is not None:
            asking = ChatFormat(self.tokenizer, kwargs=options, part="judge", rows=rows)
        self.prompts = JudgePromptBuilder(judge.prompt_rules(max_positions(config)), asking, training=chat)
        self._store = store

    def describe_chat_template(self) -> str:
        """Describes the chat template that wraps the judge prompt."""
        if not self.settings.chat:
            return "the judge prompt is used as is, without a chat template (judge.chat=false)"
        whose = "it" if self.settings.path is None else f"that of {self.path} ({self.prompts.chat.chosen.origin})"
        return f"the judge prompt is a user turn in {whose}"

    @property
    def verdict(self) -> bool:
        """Returns whether the two label logits are read as well."""
        return self.settings.verdict

    def describe_pass(self, rows: str) -> str:
        """Describes a pass that reads ``rows``, for the log."""
        return f"judge pass: reading {rows} of {self.path} in both orders"

    def prompts_fingerprint(self) -> Mapping[str, object]:
        """Returns all prompt settings that affect the results."""
        return self.prompts.fingerprint()

    @property
    def num_layers(self) -> Depth:
        """Returns the judge's number of layers, and which have attention, without loading the model.

        Raises UserError if no layer can be read.
        """
        found, depth = inspect_model(self.path, self.revision), num_layers(self.path, self.revision)
        if not found.layers:
            raise UserError(
                f"judge: no layer of {self.path} ({found.name}) has softmax attention that can be read: {found.why}; "
                "set judge.path to another model"
            )
        return Depth(depth, found.layers)

    def decode_token(self, token: int) -> str:
        """Decodes a token id with the judge's tokenizer."""
        return str(self.tokenizer.decode([token]))

    def estimate_memory(self, budget: int) -> MemoryEstimate:
        """Estimates the memory of a judge pass with ``budget`` tokens (but at least one prompt) per forward pass."""
        config, length = load_config(self.path, self.revision), self.settings.max_length
        mapped = length if describe_model(config).mapped else 0
        return estimate_pass(config, dtype=self.settings.dtype, tokens=max(budget, length), mapped=mapped)

    def choose_token_budget(self, capacity: int | None) -> int:
        """Chooses the number of tokens per forward pass for a device with ``capacity`` bytes (None if unknown).

        The estimate does not cover the cached prompt states of a reasoning judge, so it is not used for one.
        """
        asked = self.settings.token_budget
        if not isinstance(asked, str):
            return asked
        if capacity is not None and self.settings.trace is None:
            with suppress(Exception):  # the config cannot be used for an estimate, which the estimate reports
                return max_token_budget(lambda tokens: self.estimate_memory(tokens).fits(capacity), TOKEN_BUDGET)
        return TOKEN_BUDGET

    def load(self, device: torch.device, *, keep: bool = True) -> LoadedJudge:
        """Loads the model onto ``device``; returns it with its prompt builder, for capturing weights.

        ``keep``: whether traces are read from and written to the store.
        """
        found = inspect_model(self.path, self.revision)
        model = load_model(
            self.path, dtype=self.settings.dtype, revision=self.revision, attn_implementation=found.judge_attention
        )
        model.to(device)  # type: ignore[arg-type]
        budget = self.choose_token_budget(device_memory(device))
        plain = CausalJudge(model, token_budget=budget, kernel=self.kernel)
        judge = add_reasoning(plain, self.prompts, TraceCache(self._trace_table() if keep else None))
        return LoadedJudge(judge, self.prompts, self.settings.verdict)

    def _trace_table(self) -> StoreTable | None:
        """Returns the store's table of traces; None if the judge does not reason or there is no store."""
        if self.settings.trace is None or self._store is None:
            return None
        key = {
            "judge": {**self.fingerprint(), **extra_end_ids(self.path)},
            "chat": self.prompts.chat.fingerprint(),
            "trace": self.settings.trace.fingerprint(),
        }
        return self._store.table(TRACES, key)

    def load_traces(self, pair: PreferencePair) -> tuple[str, ...]:
        """Returns the judge's stored traces for ``pair``, one per round.

        Empty unless the store has all of them. Raises UserError if the pair cannot be shown to the judge.
        """
        table = self._trace_table()
        if table is None:
            return ()
        keys = [trace_key(prompt.input_ids) for prompt in self.prompts.build(pair)]
        found = TraceCache(table).find_traces(keys)
        return tuple(found[key].text for key in keys) if found.keys() >= set(keys) else ()


def add_reasoning(judge: CausalJudge, prompts: JudgePromptBuilder, kept: TraceCache) -> JudgeModel:
    """Wraps ``judge`` so that it reasons first if the rules of ``prompts`` require a trace; otherwise returns it as is.

    Raises UserError if the model cannot generate.
    """
    rules, after = prompts.rules.trace, prompts.trace_suffix
    if rules is None or after is None:
        return judge
    generator = TraceGenerator(
        judge.model,
        prompts.chat.tokenizer,
        rules.sampling(),
        rules.until,
        token_budget=judge.token_budget,
        end_ids=sorted(prompts.chat.end_ids),
    )
    return ReasoningJudge(judge, generator, kept, after, rules.max_new_tokens)


# ------------------------------------------------------------------------------------------------ the labels

LABEL_MASS = "label_mass"
PAIRS = 16
"""Number of pairs to measure, with two prompts each. The standard error is at most 0.125 (if each mass is 0 or 1)."""
NOT_MEASURED = "judge: the store has weights for all pairs, but no valid measurement of the judge's labels"


@dataclass(frozen=True)
class LabelCheck:
    """Measures how much probability a judge puts on its labels for the first few ``pairs``, and stores the result."""

    judge: RunJudge
    store: Store
    pairs: Sequence[PreferencePair] = ()

    @cached_property
    def sample_prompts(self) -> list[JudgePrompt]:
        """Returns the prompts, two per pair, of the first ``PAIRS`` pairs that can be shown to the judge."""
        found: list[JudgePrompt] = []
        for pair in self.pairs:
            with suppress(UserError):
                found += self.judge.prompts.build(pair)
            if len(found) == 2 * PAIRS:
                break
        return found

    def load_measurement(self) -> LabelMass | None:
        """Loads the stored measurement; None if nothing is stored."""
        record = read_record(self._record_path)
        if record is None:
            return None
        texts = tuple((str(text), int(count)) for text, count in record["written"])
        return LabelMass(float(record["share"]), int(record["prompts"]), texts)

    def check_stored(self, load: Callable[[], LoadedJudge]) -> None:
        """Checks the stored measurement when all weights are already in the store.

        The measurement is missing if its record is damaged or was not copied, or if it was made on different pairs. If
        ``judge.low_label_mass`` is stop, the judge is then loaded with ``load`` and measured. If it is warn, a log line
        says that the measurement is missing.
        """
        mass = self.load_measurement()
        if mass is not None:
            self.enforce_minimum(mass)
        elif self.sample_prompts and not self._is_strict:
            log.info("%s; skipping the measurement because judge.low_label_mass=warn", NOT_MEASURED)
        elif self.sample_prompts:
            log.info("%s: loading the judge to measure them (judge.low_label_mass=warn skips this)", NOT_MEASURED)
            self.measure_and_check(load())

    def measure_and_check(self, judge: LoadedJudge) -> None:
        """Measures the sample pairs, unless their measurement is stored, and logs the result.

        With ``judge.low_label_mass=stop``, raises UserError if the result is below ``judge.min_label_mass`` or the
        labels cannot be read at all; with warn, it logs a warning in both cases.
        """
        mass = self.load_measurement()
        if mass is None and self.sample_prompts:
            prompts = [prompt.input_ids for prompt in self.sample_prompts]
            try:
                mass = measure_label_mass(judge.model, prompts, self.judge.prompts.label_ids, self.judge.decode_token)
            except UserError as unread:
                if self._is_strict:
                    raise
                log.warning("could not measure the probability of the judge's labels: %s", unread)
            else:
                self._store_measurement(mass)
        if mass is not None:
            self.enforce_minimum(mass)

    @property
    def _is_strict(self) -> bool:
        return self.judge.settings.low_label_mass == STOP

    def enforce_minimum(self, mass: LabelMass) -> None:
        """Logs the measurement; if it is low, logs a warning or, with low_label_mass=stop, raises UserError."""
        problem = mass.describe_shortfall(self.judge.settings.min_label_mass)
        if problem is not None and self._is_strict:
            raise UserError(f"{problem}. To continue anyway, set judge.low_label_mass=warn")
        log.info("%s", mass.describe_share())
        if problem is not None:
            log.warning("warning: %s", problem)

    def _store_measurement(self, mass: LabelMass) -> None:
        folder = self._record_path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_record(self._record_path, mass.to_dict())
        except OSError as error:
            raise UserError(
                f"store: the measurement of the judge's labels cannot be written to {folder} ({error}): free up "
                "space there, or choose a different folder with store=FOLDER"
            ) from error

    @cached_property
    def _record_path(self) -> Path:
        key = {
            "judge": self.judge.fingerprint(),
            "prompts": self.judge.prompts.fingerprint(),
            "pairs": [prompt.pair_id for prompt in self.sample_prompts[::2]],
            "code": CAPTURE_VERSION,
        }
        return Path(self.store.root) / LABEL_MASS / f"{digest(key)[:20]}.json"
