"""A judge that thinks first: its traces, written once and kept, and what is read after them."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from attnpo.judge.base import JudgeModel, JudgeReading, WrittenTrace
from attnpo.judge.trace_rules import AfterTrace
from attnpo.judge.trace_writer import TraceWriter
from attnpo.schema import digest
from attnpo.system.store import Table, array_in

log = logging.getLogger(__name__)

TRACES = "traces"
"""The kind of the store's tables that traces are kept in: a row per prompt."""
IDS, TEXT, CLOSED = "ids", "text", "closed"
AT_ONCE = 64
"""Traces that are stored together: an interruption loses no more."""
LOG_EVERY = 60.0  # seconds


def trace_key(prompt: Sequence[int]) -> str:
    """Returns the name under which the trace to a prompt is kept."""
    return digest(list(prompt))[:32]


class KeptTraces:
    """Traces by ``trace_key``: in a table of the store or, without one, in memory."""

    def __init__(self, table: Table | None) -> None:
        self.table = table
        self._held: dict[str, WrittenTrace] = {}

    def find(self, keys: Sequence[str]) -> dict[str, WrittenTrace]:
        """Returns those of ``keys`` that are known."""
        if self.table is None:
            return {key: self._held[key] for key in keys if key in self._held}
        known = [key for key, columns in self.table.columns_present(keys).items() if IDS in columns]
        return {
            key: WrittenTrace(tuple(array_in(row[IDS]).tolist()), str(row[TEXT]), bool(row[CLOSED]))
            for key, row in self.table.read(known, [IDS, TEXT, CLOSED]).items()
        }

    def keep(self, traces: Mapping[str, WrittenTrace]) -> None:
        """Adds ``traces``."""
        if self.table is None:
            self._held |= traces
        elif traces:
            self.table.append(
                {
                    key: {IDS: np.array(trace.ids, dtype=np.int32), TEXT: trace.text, CLOSED: trace.closed}
                    for key, trace in traces.items()
                }
            )


class ThinkingJudge:
    """A judge whose verdict position comes after its trace: prompt, trace, its end, prefill.

    Traces are read from ``kept``; ``writer`` writes those that are missing. Rows are those of the prompt's own tokens,
    whose places are as without a trace. ``limit``: tokens that a trace has at most.
    """

    def __init__(self, judge: JudgeModel, writer: TraceWriter, kept: KeptTraces, after: AfterTrace, limit: int) -> None:
        self.judge, self.writer, self.kept, self.after, self.limit = judge, writer, kept, after, limit

    @property
    def num_layers(self) -> int:
        """Depth of the model; layers are counted 1..num_layers."""
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
        """Returns the judge's readings at the position after each prompt's trace, with the trace's length."""
        traces = self.traces(prompts)
        readings = self.judge.read(
            [self.whole(prompt, trace) for prompt, trace in zip(prompts, traces, strict=True)],
            layers=layers,
            per_head=per_head,
            rollout=rollout,
            verdict=verdict,
            label_ids=label_ids,
        )
        return [
            replace(
                reading,
                rows=reading.rows[..., : len(prompt)].clone(),
                rollout=None if reading.rollout is None else reading.rollout[: len(prompt)].clone(),
                trace=trace.length,
            )
            for prompt, trace, reading in zip(prompts, traces, readings, strict=True)
        ]

    def whole(self, prompt: Sequence[int], trace: WrittenTrace) -> list[int]:
        """Returns the ids up to the verdict position: a trace that the judge did not end is closed."""
        closing = () if trace.closed else self.after.closing
        return [*prompt, *trace.ids, *closing, *self.after.prefill]

    def traces(self, prompts: Sequence[Sequence[int]]) -> list[WrittenTrace]:
        """Returns the trace to each prompt; those that are not kept yet are written and kept."""
        keys = [trace_key(prompt) for prompt in prompts]
        found = self.kept.find(list(dict.fromkeys(keys)))
        missing = {key: prompt for key, prompt in zip(keys, prompts, strict=True) if key not in found}
        if missing:
            found |= self._written(missing)
        return [found[key] for key in keys]

    def _written(self, missing: Mapping[str, Sequence[int]]) -> dict[str, WrittenTrace]:
        names, began = list(missing), time.perf_counter()
        said = began
        done: dict[str, WrittenTrace] = {}
        waiting: dict[str, WrittenTrace] = {}
        log.info("judge: writing %d traces, at most %d tokens", len(names), len(names) * self.limit)
        for batch in self.writer.write(list(missing.values())):
            waiting |= {names[place]: trace for place, trace in batch.items()}
            if len(waiting) >= AT_ONCE or len(done) + len(waiting) == len(names):
                self.kept.keep(waiting)
                done |= waiting
                waiting = {}
            now = time.perf_counter()
            if done and (now - said > LOG_EVERY or len(done) == len(names)):
                said, tokens = now, sum(len(trace.ids) for trace in done.values())
                log.info(
                    "judge: %d of %d traces written, %.1f tokens in the mean, %.0f s",
                    len(done),
                    len(names),
                    tokens / len(done),
                    now - began,
                )
        return done
