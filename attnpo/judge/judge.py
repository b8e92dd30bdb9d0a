"""Judge and verbalizer of a run: described cheaply, loaded once, and only when something is missing in the store."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from attnpo.config.named_files import read_template
from attnpo.judge.base import CAPTURE_VERSION, JudgeModel, JudgePrompt, LoadedJudge, WeightReader
from attnpo.judge.layers import Depth
from attnpo.judge.prompts import JudgePrompts
from attnpo.judge.reader import CausalJudge, kernel_for
from attnpo.judge.settings import STOP, TOKEN_BUDGET, Judge
from attnpo.judge.traces import TRACES, KeptTraces, ThinkingJudge, TraceWriter, trace_key
from attnpo.judge.verdicts import LabelMass, measure_labels
from attnpo.models.described import describe_model, stated_positions, token_rows
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
    """Reader of the attention of the model at ``path``, described from its config alone."""

    path: str
    revision: str | None
    dtype: str

    @property
    def num_heads(self) -> int:
        """Returns the query heads of each layer, from the model's config alone; UserError when layers differ in it."""
        return num_heads(self.path, self.revision)

    @property
    def kernel(self) -> str:
        """Returns the attention kernel family that the model runs with."""
        return kernel_for(inspect_model(self.path, self.revision))

    def fingerprint(self) -> dict[str, object]:
        """Returns what identifies the model's numbers: weights, number format, attention kernel family."""
        return {"weights": weights_fingerprint(self.path, self.revision), "dtype": self.dtype, "kernel": self.kernel}


class RunJudge(AttentionReader):
    """Judge that is described cheaply and loaded at most once.

    Args:
        judge: the component. UserError when another model is meant and none is named, for a tokenizer that gives no
            characters, and for ``chat_template_kwargs`` that its chat template never reads.
        model: the run's model, which judges unless ``judge.path`` names another.
        chat: the run's chat format, used unless ``judge.path`` names another model.
        store: where the traces of a judge that thinks first are kept; None keeps them in memory, for each ``load``.
    """

    name, done, rounds = "judge", "judged", 2  # in both orders

    def __init__(self, judge: Judge, model: ModelSpec, chat: ChatFormat, store: Store | None = None) -> None:
        own = judge.path is None
        if own and judge.other:
            raise UserError(
                "judge.other=true means another model than the run's own, and judge.path is null: set "
                "other_judge.path=FOLDER_OR_HUB_NAME (with judge=other) or judge.path"
            )
        self.tokenizer = chat.tokenizer
        self.settings, self.trace, self.dtype = judge, judge.trace, judge.dtype
        self.path = model.path if judge.path is None else judge.path
        self.revision = model.revision if own else judge.revision
        if not own:
            self.tokenizer = load_tokenizer(self.path, self.revision)
            if not self.tokenizer.is_fast:
                raise UserError(
                    f"judge.path={self.path}: expected a fast tokenizer, which tells each token's characters, got "
                    f"{type(self.tokenizer).__name__}, which does not, so its weights cannot be carried onto the "
                    "training tokens: name a model folder with a tokenizer.json, or another judge"
                )
        config = load_text_config(self.path, self.revision)
        options, rows = judge.chat_template_kwargs, token_rows(config)
        if not own:
            template, fallback = read_template(judge.chat_template, "judge.chat_template"), model.fallback_template
            chat = ChatFormat(self.tokenizer, template, fallback=fallback, kwargs=options, part="judge", rows=rows)
        asking = chat
        if own and judge.chat and options is not None:
            asking = ChatFormat(self.tokenizer, kwargs=options, part="judge", rows=rows)
        self.prompts = JudgePrompts(judge.rules(stated_positions(config)), asking, training=chat)
        self._store = store

    def describe_frame(self) -> str:
        """Returns in words in which chat template the judge sees its wording."""
        if not self.settings.chat:
            return "the judge's prompt is its wording without a chat template (judge.chat=false)"
        whose = "it" if self.settings.path is None else f"{self.path}'s, {self.prompts.chat.chosen.origin}"
        return f"the judge's wording is a user turn of {whose}"

    @property
    def verdict(self) -> bool:
        """Returns whether the two label logits are read as well."""
        return self.settings.verdict

    def describe_pass(self, rows: str) -> str:
        """Returns in words what a pass does that reads ``rows``."""
        return f"judge pass: reading {rows} of {self.path} in both orders"

    def fingerprint_of_prompts(self) -> Mapping[str, object]:
        """Returns every setting of the prompts that changes a number."""
        return self.prompts.fingerprint()

    @property
    def num_layers(self) -> Depth:
        """Returns the depth of the judge, with the layers that have attention, read from its config alone.

        UserError when there is none to read.
        """
        found, depth = inspect_model(self.path, self.revision), num_layers(self.path, self.revision)
        if not found.layers:
            raise UserError(
                f"judge: no layer of {self.path} ({found.name}) has softmax attention that can be read: {found.why}; "
                "name another model as judge.path"
            )
        return Depth(depth, found.layers)

    def written(self, token: int) -> str:
        """Returns a token of the judge as text."""
        return str(self.tokenizer.decode([token]))

    def estimate(self, budget: int) -> MemoryEstimate:
        """Estimates what the judge pass needs with so many tokens in a forward, and one prompt at least."""
        config, length = load_config(self.path, self.revision), self.settings.max_length
        mapped = length if describe_model(config).mapped else 0
        return estimate_pass(config, dtype=self.settings.dtype, tokens=max(budget, length), mapped=mapped)

    def budget(self, capacity: int | None) -> int:
        """Chooses the tokens of a forward on a device of so many bytes, where they are known.

        What a judge that thinks first keeps of a prompt is not in the estimate, so that its number is the least.
        """
        asked = self.settings.token_budget
        if not isinstance(asked, str):
            return asked
        if capacity is not None and self.settings.trace is None:
            with suppress(Exception):  # a config that cannot be read for it, which is said with the estimate
                return max_token_budget(lambda tokens: self.estimate(tokens).fits(capacity), TOKEN_BUDGET)
        return TOKEN_BUDGET

    def load(self, device: torch.device, *, keep: bool = True) -> LoadedJudge:
        """Returns model and prompts for capturing; loads the model onto ``device``.

        ``keep``: whether traces are read from the store and kept there.
        """
        found = inspect_model(self.path, self.revision)
        model = load_model(
            self.path, dtype=self.settings.dtype, revision=self.revision, attn_implementation=found.judge_attention
        )
        model.to(device)  # type: ignore[arg-type]
        budget = self.budget(device_memory(device))
        plain = CausalJudge(model, token_budget=budget, kernel=self.kernel)
        judge = thinking(plain, self.prompts, KeptTraces(self._traces() if keep else None))
        return LoadedJudge(judge, self.prompts, self.settings.verdict)

    def _traces(self) -> StoreTable | None:
        """Returns the table of the traces; None without traces or a store."""
        if self.settings.trace is None or self._store is None:
            return None
        key = {
            "judge": {**self.fingerprint(), **extra_end_ids(self.path)},
            "chat": self.prompts.chat.fingerprint(),
            "trace": self.settings.trace.fingerprint(),
        }
        return self._store.table(TRACES, key)

    def stored_traces(self, pair: PreferencePair) -> tuple[str, ...]:
        """Returns what the judge wrote about ``pair`` before its verdicts, by round.

        Empty where the store has not all of it.

        UserError for a pair that it cannot be shown.
        """
        table = self._traces()
        if table is None:
            return ()
        keys = [trace_key(prompt.input_ids) for prompt in self.prompts.build(pair)]
        found = KeptTraces(table).find(keys)
        return tuple(found[key].text for key in keys) if found.keys() >= set(keys) else ()


def thinking(judge: CausalJudge, prompts: JudgePrompts, kept: KeptTraces) -> JudgeModel:
    """Returns ``judge`` itself or, where ``prompts`` leave room for a trace, one that writes it first.

    UserError for a model that cannot write.
    """
    rules, after = prompts.rules.trace, prompts.after_trace
    if rules is None or after is None:
        return judge
    writer = TraceWriter(
        judge.model,
        prompts.chat.tokenizer,
        rules.sampling(),
        rules.until,
        token_budget=judge.token_budget,
        end_ids=sorted(prompts.chat.end_ids),
    )
    return ThinkingJudge(judge, writer, kept, after, rules.max_new_tokens)


# ------------------------------------------------------------------------------------------------ the labels

LABEL_MASS = "label_mass"
PAIRS = 16
"""Pairs whose two prompts are measured. The mean has a standard error of 0.125 at worst: masses of 0 and 1 alone."""
NOT_MEASURED = "judge: the store has weights of all pairs, but no sound measurement of the judge's labels on these"


@dataclass(frozen=True)
class LabelCheck:
    """Measurement of a run's judge on the first of ``pairs`` that it can be shown, in the store under all of these."""

    judge: RunJudge
    store: Store
    pairs: Sequence[PreferencePair] = ()

    @cached_property
    def sample_prompts(self) -> list[JudgePrompt]:
        """Returns the prompts, two a pair, of the first ``PAIRS`` pairs that the judge can be shown."""
        found: list[JudgePrompt] = []
        for pair in self.pairs:
            with suppress(UserError):
                found += self.judge.prompts.build(pair)
            if len(found) == 2 * PAIRS:
                break
        return found

    def load_known(self) -> LabelMass | None:
        """Returns what the store has of them; None where they were not measured."""
        record = read_record(self._path)
        if record is None:
            return None
        texts = tuple((str(text), int(count)) for text, count in record["written"])
        return LabelMass(float(record["share"]), int(record["prompts"]), texts)

    def recall(self, load: Callable[[], LoadedJudge]) -> None:
        """Holds weights that are all stored against the measurement of them, which the store may lack.

        It does where the record is damaged or was not copied along, or other pairs were first. With stop ``load`` then
        gives the judge to measure again; with warn a line says that nothing is known.
        """
        mass = self.load_known()
        if mass is not None:
            self.enforce(mass)
        elif self.sample_prompts and not self._stops:
            log.info("%s, and judge.low_label_mass=warn does not measure anew", NOT_MEASURED)
        elif self.sample_prompts:
            log.info("%s: loading the judge to measure (judge.low_label_mass=warn goes on without)", NOT_MEASURED)
            self.measure(load())

    def measure(self, judge: LoadedJudge) -> None:
        """Measures the pairs that can be shown, unless that is stored, and says what came out.

        UserError below ``judge.min_label_mass`` where ``judge.low_label_mass`` is stop, and then also for labels that
        cannot be read at all; with warn both are warnings.
        """
        mass = self.load_known()
        if mass is None and self.sample_prompts:
            prompts = [prompt.input_ids for prompt in self.sample_prompts]
            try:
                mass = measure_labels(judge.model, prompts, self.judge.prompts.label_ids, self.judge.written)
            except UserError as unread:
                if self._stops:
                    raise
                log.warning("the probability of the judge's labels was not measured: %s", unread)
            else:
                self._keep(mass)
        if mass is not None:
            self.enforce(mass)

    @property
    def _stops(self) -> bool:
        return self.judge.settings.low_label_mass == STOP

    def enforce(self, mass: LabelMass) -> None:
        """Logs the measurement, with a warning where it is low; UserError there where low_label_mass is stop."""
        problem = mass.problem(self.judge.settings.min_label_mass)
        if problem is not None and self._stops:
            raise UserError(f"{problem}. judge.low_label_mass=warn goes on all the same")
        log.info("%s", mass.text())
        if problem is not None:
            log.warning("warning: %s", problem)

    def _keep(self, mass: LabelMass) -> None:
        folder = self._path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_record(self._path, mass.numbers())
        except OSError as error:
            raise UserError(
                f"store: the measurement of the judge's labels cannot be written to {folder} ({error}): make room "
                "there, or name another folder with store=FOLDER"
            ) from error

    @cached_property
    def _path(self) -> Path:
        key = {
            "judge": self.judge.fingerprint(),
            "prompts": self.judge.prompts.fingerprint(),
            "pairs": [prompt.pair_id for prompt in self.sample_prompts[::2]],
            "code": CAPTURE_VERSION,
        }
        return Path(self.store.root) / LABEL_MASS / f"{digest(key)[:20]}.json"
