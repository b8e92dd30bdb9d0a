"""Judge and verbalizer of a run: described cheaply, loaded once, and only when something is missing in the store."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import islice

import torch

from attnpo.answers.answering import chat_generator
from attnpo.config_files import read_template
from attnpo.judging import JudgeModel
from attnpo.machine import memory_of
from attnpo.models.described import describe, stated_positions, token_rows
from attnpo.models.generate import ends_of_folder, longest_sequence
from attnpo.models.judge import CausalJudge, kernel_for
from attnpo.models.loading import (
    described,
    load_config,
    load_model,
    load_tokenizer,
    model_depth,
    model_heads,
    text_config,
    weights_fingerprint,
)
from attnpo.models.spec import ModelSpec
from attnpo.models.trace_writer import TraceWriter
from attnpo.runs.judge_traces import TRACES, KeptTraces, ThinkingJudge, trace_key
from attnpo.runs.settings import TOKEN_BUDGET, Judge, Verbalizer
from attnpo.schema import SIDES, Generator, Message, PairWeights, PreferencePair, Sampling, UserError, digest
from attnpo.text.chat import ChatFormat
from attnpo.text.judge_template import JudgePrompts
from attnpo.text.score_prompt import ScoreQuestions
from attnpo.training.memory import MemoryEstimate, estimate_pass, most_tokens
from attnpo.weights.answer_statistics import AnswerStatistics, answer_statistics
from attnpo.weights.base import Tools
from attnpo.weights.cache import Store, Table
from attnpo.weights.layers import Depth

log = logging.getLogger(__name__)


class RunJudge:
    """A judge that is described cheaply and loaded at most once.

    Args:
        judge: the component. UserError when another model is meant and none is named, for a tokenizer that gives no
            characters, and for ``chat_template_kwargs`` that its chat template never reads.
        model: the run's model, which judges unless ``judge.path`` names another.
        chat: the run's chat format, used unless ``judge.path`` names another model.
        store: where the traces of a judge that thinks first are kept; None keeps them in memory, for each ``tools``.
    """

    def __init__(self, judge: Judge, model: ModelSpec, chat: ChatFormat, store: Store | None = None) -> None:
        own = judge.path is None
        if own and judge.other:
            raise UserError(
                "judge.other=true means another model than the run's own, and judge.path is null: set "
                "other_judge.path=FOLDER_OR_HUB_NAME (with judge=other) or judge.path"
            )
        self.tokenizer = chat.tokenizer
        self.settings = judge
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
        config = text_config(self.path, self.revision)
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
    def num_layers(self) -> Depth:
        """Depth of the judge, with the layers that have attention, read from its config alone.

        UserError when there is none to read.
        """
        found, depth = described(self.path, self.revision), model_depth(self.path, self.revision)
        if not found.layers:
            raise UserError(
                f"judge: no layer of {self.path} ({found.name}) has softmax attention that can be read: {found.why}; "
                "name another model as judge.path"
            )
        return Depth(depth, found.layers)

    @property
    def num_heads(self) -> int:
        """Query heads of each layer of the judge, read from its config alone; UserError when layers differ in it."""
        return model_heads(self.path, self.revision)

    def fingerprint(self) -> dict[str, object]:
        """What identifies the judge's numbers: weights, number format, attention kernel family."""
        return {
            "weights": weights_fingerprint(self.path, self.revision),
            "dtype": self.settings.dtype,
            "kernel": kernel_for(described(self.path, self.revision)),
        }

    def written(self, token: int) -> str:
        """A token of the judge as text."""
        return str(self.tokenizer.decode([token]))

    def estimate(self, budget: int) -> MemoryEstimate:
        """Estimates what the judge pass needs with so many tokens in a forward, and one prompt at least."""
        config, length = load_config(self.path, self.revision), self.settings.max_length
        mapped = length if describe(config).mapped else 0
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
                return most_tokens(lambda tokens: self.estimate(tokens).fits(capacity), TOKEN_BUDGET)
        return TOKEN_BUDGET

    def tools(self, device: torch.device, *, keep: bool = True) -> Tools:
        """Model and prompts for capturing; loads the model onto ``device``.

        ``keep``: whether traces are read from the store and kept there.
        """
        found = described(self.path, self.revision)
        model = load_model(
            self.path, dtype=self.settings.dtype, revision=self.revision, attn_implementation=found.reading
        )
        model.to(device)  # type: ignore[arg-type]
        budget = self.budget(memory_of(device))
        plain = CausalJudge(model, token_budget=budget, kernel=kernel_for(found))
        judge = thinking(plain, self.prompts, KeptTraces(self._traces() if keep else None))
        return Tools(judge=judge, prompts=self.prompts, verdict=self.settings.verdict)

    def _traces(self) -> Table | None:
        """The table of the traces; None without traces or a store."""
        if self.settings.trace is None or self._store is None:
            return None
        key = {
            "judge": {**self.fingerprint(), **ends_of_folder(self.path)},
            "chat": self.prompts.chat.fingerprint(),
            "trace": self.settings.trace.fingerprint(),
        }
        return self._store.table(TRACES, key)

    def stored_traces(self, pair: PreferencePair) -> tuple[str, ...]:
        """What the judge wrote about ``pair`` before its verdicts, by round; empty where the store has not all of it.

        UserError for a pair that it cannot be shown.
        """
        table = self._traces()
        if table is None:
            return ()
        keys = [trace_key(prompt.input_ids) for prompt in self.prompts.build(pair)]
        found = KeptTraces(table).find(keys)
        return tuple(found[key].text for key in keys) if found.keys() >= set(keys) else ()


def thinking(judge: CausalJudge, prompts: JudgePrompts, kept: KeptTraces) -> JudgeModel:
    """``judge`` itself or, where ``prompts`` leave room for a trace, one that writes it first.

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


ANSWERS = "answers"
ANSWER = "answer"
# Raised by hand with every change of the code that moves an answer.
ANSWERS_VERSION = "1"
BATCHES_AT_ONCE = 4
"""Batches of answers that go into the store together."""


class RunVerbalizer:
    """A verbalizer that is described cheaply and loaded only when an answer is missing.

    Args:
        verbalizer: the component.
        model: the run's model, which answers unless ``verbalizer.path`` names another.
        chat: the run's chat format: that of the prompts unless another model is named, and always that of the tokens.
        store: where the answers are kept.
    """

    def __init__(self, verbalizer: Verbalizer, model: ModelSpec, chat: ChatFormat, store: Store) -> None:
        own = verbalizer.path is None
        self.settings = verbalizer
        self.path = model.path if verbalizer.path is None else verbalizer.path
        self.revision = model.revision if own else verbalizer.revision
        self.chat = chat
        if not own:
            tokenizer = load_tokenizer(self.path, self.revision)
            rows = token_rows(text_config(self.path, self.revision))
            template = read_template(verbalizer.chat_template, "verbalizer.chat_template")
            fallback = model.fallback_template
            self.chat = ChatFormat(tokenizer, template, fallback=fallback, part="verbalizer", rows=rows)
        self.questions = ScoreQuestions(verbalizer.template(), self.chat, chat, self._prompt_room())
        self._store = store

    def _prompt_room(self) -> int | None:
        """Tokens that a prompt may have; UserError when the answer alone takes all there are."""
        limit = longest_sequence(self.path, self.revision, "verbalizer.max_length", self.settings.max_length)
        new = self.settings.sampling.max_new_tokens
        if limit is not None and limit <= new:
            source = "verbalizer.max_length" if self.settings.max_length is not None else f"positions of {self.path}"
            raise UserError(
                f"verbalizer.sampling.max_new_tokens={new} leaves no room for a prompt within {limit} tokens "
                f"({source}): lower it"
            )
        return None if limit is None else limit - new

    def fingerprint(self) -> dict[str, object]:
        """What identifies the answers to given prompts: model weights, number format, decoding, chat format."""
        maker = self.settings.known_parts
        return {
            "weights": {**weights_fingerprint(self.path, self.revision), **ends_of_folder(self.path)},
            "dtype": self.settings.dtype,
            "sampling": self.settings.sampling.fingerprint(),
            "chat": self.chat.fingerprint(),
            "known_parts": None if maker is None else maker.fingerprint(),
            "code": ANSWERS_VERSION,
        }

    def _answers(self) -> Table:
        return self._store.table(ANSWERS, self.fingerprint())

    def tools(self, device: torch.device) -> Tools:
        """Generator, questions and decoding for capturing; the model is loaded when the first answer is missing."""
        at_once = BATCHES_AT_ONCE * self.settings.batch_size
        generator = StoredAnswers(self._answers(), lambda: self._generator(device), at_once)
        return Tools(generator=generator, questions=self.questions, sampling=self.settings.sampling)

    def _generator(self, device: torch.device) -> Generator:
        model = load_model(self.path, dtype=self.settings.dtype, revision=self.revision)
        model.to(device)  # type: ignore[arg-type]
        if self.settings.known_parts is not None:
            return self.settings.known_parts.generator(model, self.chat.tokenizer)
        return chat_generator(model, self.chat, self.settings.batch_size, self.settings.token_budget)

    def statistics(self, pairs: Sequence[PreferencePair], captured: Mapping[str, PairWeights]) -> AnswerStatistics:
        """How well the answers about ``pairs`` could be read, from the texts in the store."""
        asked = {
            (pair.pair_id, side): prompt_key(self.questions.messages(pair, side))
            for pair in pairs
            if pair.pair_id in captured and captured[pair.pair_id].rounds
            for side in SIDES
        }
        stored = stored_answers(self._answers(), list(asked.values()))
        return answer_statistics(pairs, captured, {at: stored[key] for at, key in asked.items() if key in stored})


def prompt_key(prompt: Sequence[Message]) -> str:
    """The name under which the answer to a prompt is kept."""
    return digest([[turn["role"], turn["content"]] for turn in prompt])[:32]


def stored_answers(table: Table, keys: Sequence[str]) -> dict[str, str]:
    """The stored answers among ``keys``."""
    known = [key for key, columns in table.columns_present(keys).items() if ANSWER in columns]
    return {key: str(row[ANSWER]) for key, row in table.read(known, [ANSWER]).items()}


class StoredAnswers:
    """A generator that keeps its answers in a table and asks ``make``'s generator for missing ones only.

    Equal prompts get one answer. ``make`` is called at most once. Answers are stored, and their number is logged,
    whenever there are ``at_once`` of them: an interruption loses no more.
    """

    def __init__(self, table: Table, make: Callable[[], Generator], at_once: int = 64) -> None:
        self.table, self.make, self.at_once = table, make, at_once
        self._generator: Generator | None = None

    def generate(self, prompts: Sequence[Sequence[Message]], sampling: Sampling) -> list[str]:
        """One answer per prompt, in their order."""
        keys = [prompt_key(prompt) for prompt in prompts]
        found = stored_answers(self.table, keys)
        missing = {key: prompt for key, prompt in zip(keys, prompts, strict=True) if key not in found}
        if missing and self._generator is None:
            self._generator = self.make()
        # The longest first, as within a batch: what does not fit into memory fails at once, and little is padded.
        waiting = iter(sorted(missing, key=lambda key: -sum(len(turn["content"]) for turn in missing[key])))
        done, began = 0, time.perf_counter()
        while self._generator is not None and (some := list(islice(waiting, self.at_once))):
            answers = self._generator.generate([missing[key] for key in some], sampling)
            new = dict(zip(some, answers, strict=True))
            self.table.append({key: {ANSWER: text} for key, text in new.items()})
            found |= new
            done += len(new)
            log.info("verbalizer: %d of %d answers, %.0f s", done, len(missing), time.perf_counter() - began)
        return [found[key] for key in keys]
