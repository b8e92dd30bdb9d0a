"""Judge that reasons first: generates and caches traces, then reads the verdict after them."""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from attnpo.judge.base import JudgeModel, JudgeReading, ReasoningTrace
from attnpo.judge.prompts import TraceSuffix
from attnpo.models.backbone import require_causal_lm
from attnpo.models.generate import (
    GenerationRequest,
    StopAtText,
    batch_longest_first,
    collect_end_ids,
    decode_with_special_tokens,
    generate_tokens,
    padding_id,
)
from attnpo.schema import Sampling, UserError, digest
from attnpo.system.store import StoreTable, expect_array


class TraceGenerator:
    """Continues prompts with a causal LM until it generates ``until``, ends its turn, or reaches the token limit.

    ``token_budget``: maximum number of tokens in a batch, prompts and traces together; a batch has at least one prompt.
    ``end_ids``: ids that end a turn, in addition to those of the tokenizer and the model's folder. Raises UserError if
    the model cannot generate.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling,
        until: str,
        *,
        token_budget: int,
        end_ids: Sequence[int] = (),
    ) -> None:
        self.model = require_causal_lm(model)
        self.tokenizer, self.sampling, self.token_budget = tokenizer, sampling, token_budget
        if not self.model.can_generate():
            raise UserError(_cannot_generate_message(self.model, "its class has no generate method in transformers"))
        self._until = StopAtText(until, tokenizer)
        self._ends = collect_end_ids(self.model, tokenizer, end_ids)

    def generate(self, prompts: Sequence[Sequence[int]]) -> Iterator[dict[int, ReasoningTrace]]:
        """Yields the traces by prompt index, batch by batch, longest prompts first.

        Raises UserError if the model's own code fails during generation.
        """
        most = self.sampling.max_new_tokens
        lengths = [len(prompt) for prompt in prompts]
        for batch in batch_longest_first(lengths, lambda longest: self.token_budget // (longest + most)):
            rows = self._generate_batch([GenerationRequest(prompts[place]) for place in batch])
            yield {
                place: self._make_trace(row, index) for index, (place, row) in enumerate(zip(batch, rows, strict=True))
            }

    def _generate_batch(self, requests: Sequence[GenerationRequest]) -> list[list[int]]:
        pad_id = padding_id(self.model, self.tokenizer, self._ends)
        most = self.sampling.max_new_tokens
        try:
            return generate_tokens(self.model, requests, self.sampling, most, self._ends, pad_id, self._until)
        except (torch.OutOfMemoryError, UserError):
            raise
        except Exception as error:  # code of any model
            words = " ".join(str(error).split())[:200]
            raise UserError(_cannot_generate_message(self.model, f"{type(error).__name__}: {words}")) from error

    def _make_trace(self, row: list[int], index: int) -> ReasoningTrace:
        closed = index in self._until.lengths and self._until.lengths[index] == len(row)
        ids = row if closed or row[-1] not in self._ends else row[:-1]
        return ReasoningTrace(tuple(ids), decode_with_special_tokens(self.tokenizer, ids), closed)


def _cannot_generate_message(model: nn.Module, why: str) -> str:
    return (
        f"judge.trace: {type(model).__name__} cannot generate a trace ({why}): set judge.path to another model, or "
        "judge.trace=null"
    )


log = logging.getLogger(__name__)

TRACES = "traces"
"""Kind of the store's tables for traces: one row per prompt."""
IDS, TEXT, CLOSED = "ids", "text", "closed"
AT_ONCE = 64
"""Number of traces stored together; an interruption loses at most this many."""
LOG_EVERY = 60.0  # seconds


def trace_key(prompt: Sequence[int]) -> str:
    """Returns the store key of a prompt's trace."""
    return digest(list(prompt))[:32]


class TraceCache:
    """Traces by ``trace_key``, in a table of the store, or in memory if there is no table."""

    def __init__(self, table: StoreTable | None) -> None:
        self.table = table
        self._held: dict[str, ReasoningTrace] = {}

    def find_traces(self, keys: Sequence[str]) -> dict[str, ReasoningTrace]:
        """Returns the cached traces for ``keys``, without those that are missing."""
        if self.table is None:
            return {key: self._held[key] for key in keys if key in self._held}
        known = [key for key, columns in self.table.columns_present(keys).items() if IDS in columns]
        return {
            key: ReasoningTrace(tuple(expect_array(row[IDS]).tolist()), str(row[TEXT]), bool(row[CLOSED]))
            for key, row in self.table.read(known, [IDS, TEXT, CLOSED]).items()
        }

    def add_traces(self, traces: Mapping[str, ReasoningTrace]) -> None:
        """Stores ``traces``."""
        if self.table is None:
            self._held |= traces
        elif traces:
            self.table.append(
                {
                    key: {IDS: np.array(trace.ids, dtype=np.int32), TEXT: trace.text, CLOSED: trace.closed}
                    for key, trace in traces.items()
                }
            )


class ReasoningJudge:
    """Judge whose verdict position comes after its trace: prompt, trace, end of trace, prefill.

    Traces are read from ``kept``; ``generator`` generates missing ones. Rows cover only the prompt's own tokens, at the
    same positions as without a trace. ``limit``: maximum number of tokens in a trace.
    """

    def __init__(
        self, judge: JudgeModel, generator: TraceGenerator, kept: TraceCache, after: TraceSuffix, limit: int
    ) -> None:
        self.judge, self.generator, self.kept, self.after, self.limit = judge, generator, kept, after, limit

    @property
    def num_layers(self) -> int:
        """Returns the number of layers; layers are numbered from 1."""
        return self.judge.num_layers

    def read(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        layers: Sequence[int],
        per_head: bool = False,
        rollout: bool = False,
        verdict: bool = True,
        label_ids: tuple[int, int] | None = None,
    ) -> list[JudgeReading]:
        """Returns the judge's readings at the position after each prompt's trace, with the length of the trace."""
        traces = self.find_or_generate_traces(prompts)
        whole = [self.full_ids(prompt, trace) for prompt, trace in zip(prompts, traces, strict=True)]
        given = {"per_head": per_head, "rollout": rollout, "verdict": verdict}
        readings = self.judge.read(whole, layers=layers, label_ids=label_ids, **given)
        return [
            replace(
                reading,
                rows=reading.rows[..., : len(prompt)].clone(),
                rollout=None if reading.rollout is None else reading.rollout[: len(prompt)].clone(),
                trace=trace.length,
            )
            for prompt, trace, reading in zip(prompts, traces, readings, strict=True)
        ]

    def full_ids(self, prompt: Sequence[int], trace: ReasoningTrace) -> list[int]:
        """Returns the ids up to the verdict position; closes a trace that the judge did not end."""
        closing = () if trace.closed else self.after.closing
        return [*prompt, *trace.ids, *closing, *self.after.prefill]

    def find_or_generate_traces(self, prompts: Sequence[Sequence[int]]) -> list[ReasoningTrace]:
        """Returns the trace of each prompt; generates and stores missing ones."""
        keys = [trace_key(prompt) for prompt in prompts]
        found = self.kept.find_traces(list(dict.fromkeys(keys)))
        missing = {key: prompt for key, prompt in zip(keys, prompts, strict=True) if key not in found}
        if missing:
            found |= self._generate_missing(missing)
        return [found[key] for key in keys]

    def _generate_missing(self, missing: Mapping[str, Sequence[int]]) -> dict[str, ReasoningTrace]:
        names, began = list(missing), time.perf_counter()
        said = began
        done: dict[str, ReasoningTrace] = {}
        waiting: dict[str, ReasoningTrace] = {}
        log.info("judge: generating %d traces with at most %d tokens in total", len(names), len(names) * self.limit)
        for batch in self.generator.generate(list(missing.values())):
            waiting |= {names[place]: trace for place, trace in batch.items()}
            if len(waiting) >= AT_ONCE or len(done) + len(waiting) == len(names):
                self.kept.add_traces(waiting)
                done |= waiting
                waiting = {}
            now = time.perf_counter()
            if done and (now - said > LOG_EVERY or len(done) == len(names)):
                said, tokens = now, sum(len(trace.ids) for trace in done.values())
                log.info(
                    "judge: %d of %d traces generated, %.1f tokens on average, %.0f s",
                    len(done),
                    len(names),
                    tokens / len(done),
                    now - began,
                )
        return done
