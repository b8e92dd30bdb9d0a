"""Rows that an objective looks at before an optimiser step, made of the pairs of that very step.

Owns which prompt goes with which responses and how long they may get. What a step's rows are depends on its pairs and
their order alone, never on how the step is split over micro-batches and ranks.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from attnpo.data.collate import Layout, TrainingExample, bare_rows
from attnpo.data.sampler import PlannedBatch
from attnpo.schema import RowGroup

log = logging.getLogger(__name__)


Ids = tuple[Sequence[int], Sequence[int]]
"""Prompt ids and response ids of one row."""

RowsOf = Callable[[Sequence[TrainingExample], PlannedBatch], list[list[Ids]]]
"""The rows of a rank's step, a list for each of its micro-batches; ``planned`` is any micro-batch of that step."""


def partners(examples: Sequence[TrainingExample], step: Sequence[int]) -> dict[int, int]:
    """By the position of each pair of ``step``, the pair whose responses are put after its prompt.

    That is the nearest earlier pair of the step (the step taken as a ring) with another prompt, and the pair before
    where all of them share one. A step of a single pair takes its place in the ring of all examples instead.

    Raises:
        ValueError: there is a single example, so no other pair.
    """
    if len(examples) < 2:
        raise ValueError("mismatched rows need at least two pairs")
    if len(step) == 1:
        return {step[0]: partners(examples, range(len(examples)))[step[0]]}
    prompts = [examples[position].chosen.prompt_ids for position in step]
    starts = [place for place in range(len(step)) if prompts[place] != prompts[place - 1]]
    if not starts:
        return {position: step[place - 1] for place, position in enumerate(step)}
    partner: dict[int, int] = {}
    before = step[starts[0] - 1]
    for place in range(starts[0], starts[0] + len(step)):
        here = place % len(step)
        if prompts[here] != prompts[here - 1]:
            before = step[here - 1]
        partner[step[here]] = before
    return partner


def mismatched(examples: Sequence[TrainingExample], planned: PlannedBatch) -> list[list[Ids]]:
    """Returns each pair's prompt with both responses of its partner: first the chosen ones of a micro-batch, then the
    rejected.

    The mismatched sequences of KTO's reference point (Ethayarajh et al. 2024, section 4).
    """
    other = partners(examples, planned.whole)
    made: list[list[Ids]] = []
    for micro in planned.of_rank:
        chosen = [(examples[i].chosen.prompt_ids, examples[other[i]].chosen.response_ids) for i in micro]
        rejected = [(examples[i].rejected.prompt_ids, examples[other[i]].rejected.response_ids) for i in micro]
        made.append([*chosen, *rejected])
    return made


MAKERS: Mapping[str, RowsOf] = {"mismatched": mismatched}


def cut(row: Ids, max_length: int) -> Ids:
    """Returns the row with its response cut to what the prompt leaves of ``max_length``, one token at least."""
    prompt, response = row
    return prompt, response[: max(1, max_length - len(prompt))]


@dataclass
class StepRows:
    """Makes the rows that an objective named with "ahead:NAME", for a whole step of this rank at once.

    Rows longer than ``max_length`` (None: as long as they come) lose the end of their response; the first step that
    has such rows tells their number in the log.

    Raises:
        ValueError: nobody here makes rows of such a name.
    """

    names: Collection[str]
    max_length: int | None = None
    _told: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.names) - set(MAKERS))
        if unknown:
            raise ValueError(f"no rows ahead of a step are called {', '.join(unknown)}; there are {', '.join(MAKERS)}")

    def make(
        self, examples: Sequence[TrainingExample], planned: PlannedBatch, layout: Layout, pad_id: int
    ) -> dict[str, tuple[RowGroup, ...]]:
        """By name a row group for each micro-batch of the rank's step."""
        groups = {}
        for name in sorted(self.names):
            micros = MAKERS[name](examples, planned)
            if self.max_length is not None:
                micros = self._fitted(name, micros, self.max_length)
            groups[name] = tuple(bare_rows(rows, layout, pad_id) for rows in micros)
        return groups

    def _fitted(self, name: str, micros: list[list[Ids]], max_length: int) -> list[list[Ids]]:
        rows = [row for micro in micros for row in micro]
        long = sum(len(prompt) + len(response) > max_length for prompt, response in rows)
        if long and not self._told:
            log.info(
                "%s rows: %d of the %d of this step are longer than lengths.max_length %d; their responses are cut "
                "there, and those of later steps too",
                name,
                long,
                len(rows),
                max_length,
            )
            self._told = True
        return [[cut(row, max_length) for row in micro] for micro in micros] if long else micros
