"""Plans whole optimizer steps, regardless of how they are divided into batches, and can resume at any batch.

An optimizer step is ``size`` consecutive pairs of the epoch's permutation; these pairs do not depend on how the step is
divided into micro-batches and among ranks (``data.micro_batches``). Each batch records the number of pairs in the whole
step, so that the loss can be computed as ``sum over pairs / step_pairs`` regardless of the division.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NotRequired, TypedDict

import torch
from torch.utils.data import Sampler

from attnpo.data.micro_batches import BatchRule
from attnpo.schema import UserError, digest


@dataclass(frozen=True)
class PlannedBatch:
    """One micro-batch of one rank.

    ``indices``: positions in the list of pairs. ``step``: index of the optimizer step within the epoch. ``step_pairs``:
    number of pairs in the whole step, over all ranks and micro-batches. ``micro``: index of this micro-batch in the
    step; ``micros``: number of micro-batches in the step, the same on every rank. ``whole``: positions of all pairs of
    the step. ``of_rank``: positions of this rank's pairs in the step, by micro-batch. ``rank``: this rank. ``ranks``:
    number of ranks.
    """

    indices: list[int]
    step: int
    step_pairs: int
    micro: int
    micros: int
    epoch: int = 0
    whole: tuple[int, ...] = field(default=(), repr=False, compare=False)
    of_rank: tuple[tuple[int, ...], ...] = field(default=(), repr=False, compare=False)
    rank: int = field(default=0, repr=False, compare=False)
    ranks: int = field(default=1, repr=False, compare=False)


@dataclass(frozen=True)
class StepSplit:
    """Division of a run's steps: the rule, the number of micro-batches per rank and the number of ranks.

    ``short``: number of micro-batches in an epoch's short last step, 0 if there is none.
    """

    rule: str
    accumulation: int
    short: int
    world_size: int


class SamplerState(TypedDict):
    """Position in the data at which a run was saved.

    ``batches``: number of batches of ``epoch`` that were consumed. ``order``: settings that determine the order of the
    data. ``layout``: how steps were divided. ``budgets``: token budget first chosen by the memory estimate, and the
    budget in use when the run was saved.
    """

    epoch: int
    batches: int
    order: dict[str, int]
    layout: dict[str, Any]
    budgets: NotRequired[Sequence[int]]


def count_steps(num_pairs: int, size: int, world_size: int) -> int:
    """Returns the number of optimizer steps per epoch.

    Counts steps of ``size`` pairs, plus a short last step unless it has fewer pairs than ranks.
    """
    full, rest = divmod(num_pairs, size)
    return (full if size >= world_size else 0) + (rest >= world_size)


class StepBatchSampler(Sampler[PlannedBatch]):
    """Sampler of one rank's planned batches, to be passed to a loader as ``sampler`` with ``batch_size=None``.

    Every pair is used exactly once per epoch. The step to which a pair belongs depends only on ``seed`` and the epoch
    or, without ``shuffle``, on list order. All full steps have the same number of micro-batches on every rank and in
    every epoch, because Lightning accumulates a fixed number. It is the smallest number with which ``cutting`` can
    divide every step of the run. An epoch's final step may be short; its number of micro-batches is the smallest that
    suffices in every epoch, and each has at least one pair. If fewer pairs than ranks are left, they are not used;
    ``dropped`` is their number. They differ in each epoch or, without ``shuffle``, are always the last ones.

    After a complete iteration, iterating again starts the next epoch; after an interrupted one, the same epoch starts
    over. After ``load_state_dict``, the first complete iteration yields exactly the remaining batches.

    Args:
        num_pairs: length of the list of pairs.
        size: pairs per optimizer step over all ranks.
        cutting: rule that divides a step into micro-batches.
        seed: seed that, together with the epoch, determines the permutation.
        shuffle: whether to shuffle the pairs in each epoch.
        rank: index of this process among ``world_size``.
        world_size: number of processes that share the steps.
        epochs: number of epochs in the run, for rules that depend on the pairs of each step.

    Raises:
        UserError: ``size`` is below 1, an epoch has no step, or a step cannot be divided.
        ValueError: ``rank`` is out of range.
    """

    def __init__(
        self,
        num_pairs: int,
        size: int,
        cutting: BatchRule,
        seed: int = 0,
        shuffle: bool = True,
        rank: int = 0,
        world_size: int = 1,
        epochs: int = 1,
    ) -> None:
        for name, value in (("pairs per step", size), ("processes", world_size)):
            if value < 1:
                raise UserError(f"{name} must be at least 1, got {value}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be between 0 and {world_size - 1}, got {rank}")
        self.num_pairs, self.size, self.seed, self.shuffle, self.rank = num_pairs, size, seed, shuffle, rank
        self.cutting = cutting
        self._full, rest = divmod(num_pairs, size)
        self._short = 0 if rest < world_size else rest
        self.dropped = rest - self._short
        self.steps_per_epoch = self._full + (self._short > 0)
        if self.steps_per_epoch == 0 or (self._full and size < world_size):
            raise UserError(
                f"{num_pairs} pairs are too few for an optimizer step of {size} pairs on {world_size} processes: "
                "each process needs at least one pair; use more pairs or fewer processes"
            )
        self.split = self._plan_split(world_size, epochs)
        self.epoch = 0
        self.consumed = 0
        self._start = 0
        self._passed = False

    def _plan_split(self, world_size: int, epochs: int) -> StepSplit:
        """Returns the division with the smallest number of micro-batches per rank that suffices for all ``epochs``."""
        steps = (step for epoch in range(epochs) for step in self._split_into_steps(epoch)[: self._full])
        accumulation, short = self.cutting.num_micro_batches(steps, self.size, world_size), 0
        if self._short:
            last = (self._split_into_steps(epoch)[-1] for epoch in range(epochs))
            short = self.cutting.num_micro_batches(last, self._short, world_size, short=True)
        return StepSplit(self.cutting.description, max(accumulation, short), short, world_size)

    def __len__(self) -> int:
        """Returns the number of this rank's micro-batches in a whole epoch.

        The number is the same for every rank and epoch, including after a resume.
        """
        return self._full * self.split.accumulation + self.split.short

    def __iter__(self) -> Iterator[PlannedBatch]:
        if self._passed:
            self._start_epoch(self.epoch + 1)
        self.consumed = self._start
        for batch in self._iter_batches(self._start):
            self.consumed += 1
            yield batch
        self._passed = True

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration, which starts at the first batch unless that epoch is being resumed."""
        if epoch != self.epoch or self._passed:
            self._start_epoch(epoch)

    def _start_epoch(self, epoch: int) -> None:
        self.epoch, self.consumed, self._start, self._passed = epoch, 0, 0, False

    def epoch_order(self, epoch: int) -> list[int]:
        """Returns the permutation of an epoch."""
        if not self.shuffle:
            return list(range(self.num_pairs))
        generator = torch.Generator().manual_seed(int(digest([self.seed, epoch])[:15], 16))
        permutation: list[int] = torch.randperm(self.num_pairs, generator=generator).tolist()
        return permutation

    def _split_into_steps(self, epoch: int) -> list[list[int]]:
        """Returns the pairs of each step of an epoch."""
        order = self.epoch_order(epoch)
        return [order[step * self.size : (step + 1) * self.size] for step in range(self.steps_per_epoch)]

    def iter_micro_batches(self) -> Iterator[tuple[int, ...]]:
        """Yields the pairs of every micro-batch of the current epoch, for all ranks."""
        for number, step in enumerate(self._split_into_steps(self.epoch)):
            for hand in self.cutting.split_step(step, self._num_micro_batches(number), self.split.world_size):
                yield from hand

    def _num_micro_batches(self, step: int) -> int:
        return self.split.accumulation if step < self._full else self.split.short

    def _iter_batches(self, start: int) -> Iterator[PlannedBatch]:
        """Yields the batches of the current epoch, starting at index ``start``."""
        epoch, steps, ranks = self.epoch, self._split_into_steps(self.epoch), self.split.world_size
        first, skip = divmod(start, self.split.accumulation)
        for step in range(first, len(steps)):
            whole, micros = tuple(steps[step]), self._num_micro_batches(step)
            of_rank = tuple(self.cutting.split_step(whole, micros, ranks)[self.rank])
            for micro in range(skip if step == first else 0, micros):
                batch = list(of_rank[micro])
                yield PlannedBatch(batch, step, len(whole), micro, micros, epoch, whole, of_rank, self.rank, ranks)

    # -------------------------------------------------------------------------------------------- resuming

    def state_dict(self, batches: int | None = None) -> SamplerState:
        """Returns the state to resume from: epoch, batches consumed, and the settings that determine a batch's pairs.

        ``batches``: number of batches of the epoch that were trained on; by default the number yielded so far, which
        exceeds the number trained on if a loader's workers prefetch.
        """
        return {
            "epoch": self.epoch,
            "batches": self.consumed if batches is None else batches,
            "order": self._order_key(),
            "layout": asdict(self.split),
        }

    def _order_key(self) -> dict[str, int]:
        return {"num_pairs": self.num_pairs, "seed": self.seed, "shuffle": self.shuffle, "step_size": self.size}

    def load_state_dict(self, state: SamplerState) -> None:
        """Makes the next iteration yield the remaining batches of the saved epoch; there may be none.

        If the state was saved between two optimizer steps, the division of steps (rule, number of micro-batches or
        processes) may differ from the saved run's.

        Raises:
            UserError: the data, their order or the step size changed; or the state was saved within a step and the
                division changed; or only one of the two runs drops the last pairs of an epoch.
        """
        order, saved = self._order_key(), state["order"]
        differing = [f"{key} was {saved.get(key)}, is {now}" for key, now in order.items() if saved.get(key) != now]
        if differing:
            raise UserError(
                f"cannot resume because the order of the data changed: {', '.join(differing)}. "
                "Use the data and batch settings of the saved run"
            )
        batches = self._convert_batch_count(int(state["batches"]), StepSplit(**state["layout"]))
        if not 0 <= batches <= len(self):
            raise UserError(f"cannot resume after batch {batches}: an epoch has only {len(self)} batches")
        self._start_epoch(int(state["epoch"]))
        self.consumed = self._start = batches

    def is_mid_step(self, state: SamplerState) -> bool:
        """Returns whether ``state`` was saved within an optimizer step."""
        return self._is_mid_step(int(state["batches"]), StepSplit(**state["layout"]))

    def _is_mid_step(self, batches: int, split: StepSplit) -> bool:
        last = self._full * split.accumulation
        return batches != last + split.short and (batches > last or batches % split.accumulation > 0)

    def _convert_batch_count(self, batches: int, saved: StepSplit) -> int:
        """Converts a number of batches consumed under the ``saved`` division to this run's division."""
        if saved == self.split:
            return batches
        rest = self.num_pairs % self.size
        if (rest >= saved.world_size) != (rest >= self.split.world_size):
            raise UserError(
                f"an epoch ends with {rest} pairs, which {max(saved.world_size, self.split.world_size)} processes "
                f"drop but {min(saved.world_size, self.split.world_size)} do not: resume with "
                f"{saved.world_size} processes, as in the saved run"
            )
        last = self._full * saved.accumulation
        if saved.short and batches == last + saved.short:
            return len(self)
        if not self._is_mid_step(batches, saved):
            return batches // saved.accumulation * self.split.accumulation
        raise UserError(
            "the run was saved within an optimizer step, so it can only be resumed with the same division: "
            f"{saved.rule}, accumulation {saved.accumulation}, {saved.world_size} processes"
        )
