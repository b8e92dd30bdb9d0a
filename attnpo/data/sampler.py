"""Batches that plan whole optimiser steps, the same for every way to cut them, resumable at any batch.

An optimiser step is ``size`` consecutive pairs of the epoch's permutation; which pairs a step holds does not depend on
how it is cut into micro-batches and shared over ranks (``data.micro_batches``). Each batch knows the number of pairs of
its whole step, so a loss of ``sum over pairs / step_pairs`` needs no knowledge of the cutting.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NotRequired, TypedDict

import torch
from torch.utils.data import Sampler

from attnpo.data.micro_batches import Cutting
from attnpo.schema import UserError, digest


@dataclass(frozen=True)
class PlannedBatch:
    """One micro-batch of one rank.

    ``indices`` are positions in the list of pairs, ``step`` counts the optimiser steps of the epoch from 0,
    ``step_pairs`` is the number of pairs of the whole step over all ranks and micro-batches, and ``micro`` of
    ``micros`` is this micro-batch's place in the step (every rank has the same ``micros`` in the same step). ``whole``
    are the positions of all pairs of the step, ``of_rank`` those of this rank, micro-batch by micro-batch; ``rank`` is
    one of ``ranks``.
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
class Split:
    """Split of a run's steps: by which rule, into how many micro-batches per rank, over how many ranks.

    ``short`` are the micro-batches of the short last step of an epoch, 0 where there is none.
    """

    rule: str
    accumulation: int
    short: int
    world_size: int


class SamplerState(TypedDict):
    """Where in the data a run was saved.

    ``batches`` of ``epoch`` were consumed, of the order that ``order`` decides, in steps cut as ``layout`` says.
    ``budgets``: of tokens, as chosen by the memory estimate and as used in the end.
    """

    epoch: int
    batches: int
    order: dict[str, int]
    layout: dict[str, Any]
    budgets: NotRequired[Sequence[int]]


def steps_in(num_pairs: int, size: int, world_size: int) -> int:
    """Returns the number of optimiser steps of an epoch.

    Those of ``size`` pairs, and a short one unless it has fewer pairs than ranks.
    """
    full, rest = divmod(num_pairs, size)
    return (full if size >= world_size else 0) + (rest >= world_size)


class StepBatches(Sampler[PlannedBatch]):
    """Planned batches of one rank, epoch after epoch; give it to a loader as ``sampler`` with ``batch_size=None``.

    Every pair is seen exactly once per epoch. Which step it is in is decided by ``seed`` and the epoch alone (the order
    of the list when ``shuffle`` is false). Every full step has the same number of micro-batches on every rank in all
    epochs, since Lightning accumulates a fixed number: as few as ``cutting`` needs for the worst step of the run. The
    last step of an epoch may be short, and has as few as it needs in any epoch, at least one pair in each. Fewer pairs
    left than ranks are dropped, other ones in each epoch (without ``shuffle`` the last ones always); ``dropped`` counts
    them.

    Iterating again starts the next epoch after a full pass, and the same epoch anew after a broken one. After
    ``load_state_dict`` the first full pass gives exactly the batches that were left.

    Args:
        num_pairs: length of the list of pairs.
        size: pairs per optimiser step over all ranks.
        cutting: how a step becomes micro-batches.
        seed: together with the epoch the key of the permutation.
        shuffle: whether to permute at all.
        rank: this process among the ``world_size`` that share the steps.
        world_size: number of processes.
        epochs: how many the run has; a cutting that looks at the pairs plans for those.

    Raises:
        UserError: a size below 1, an epoch without a single step, or a step that cannot be cut.
        ValueError: ``rank`` is not one of the ranks.
    """

    def __init__(
        self,
        num_pairs: int,
        size: int,
        cutting: Cutting,
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
            raise ValueError(f"rank must be 0 to {world_size - 1}, got {rank}")
        self.num_pairs, self.size, self.seed, self.shuffle, self.rank = num_pairs, size, seed, shuffle, rank
        self.cutting = cutting
        self._full, rest = divmod(num_pairs, size)
        self._short = 0 if rest < world_size else rest
        self.dropped = rest - self._short
        self.steps_per_epoch = self._full + (self._short > 0)
        if self.steps_per_epoch == 0 or (self._full and size < world_size):
            raise UserError(
                f"{num_pairs} pairs make no optimiser step of {size} pairs on {world_size} processes: each needs one "
                "pair of it at least; give more pairs, or fewer processes"
            )
        self.split = self._plan_split(world_size, epochs)
        self.epoch = 0
        self.consumed = 0
        self._start = 0
        self._passed = False

    def _plan_split(self, world_size: int, epochs: int) -> Split:
        """Returns the split whose micro-batches are as few as every step of ``epochs`` allows."""
        steps = (step for epoch in range(epochs) for step in self._steps(epoch)[: self._full])
        accumulation, short = self.cutting.micros(steps, self.size, world_size), 0
        if self._short:
            last = (self._steps(epoch)[-1] for epoch in range(epochs))
            short = self.cutting.micros(last, self._short, world_size, short=True)
        return Split(self.cutting.rule, max(accumulation, short), short, world_size)

    def __len__(self) -> int:
        """Returns the number of micro-batches of this rank in a whole epoch.

        It is the same for every rank and epoch, also after a resume.
        """
        return self._full * self.split.accumulation + self.split.short

    def __iter__(self) -> Iterator[PlannedBatch]:
        if self._passed:
            self._enter(self.epoch + 1)
        self.consumed = self._start
        for batch in self._plan(self._start):
            self.consumed += 1
            yield batch
        self._passed = True

    def set_epoch(self, epoch: int) -> None:
        """Makes ``epoch`` the next pass, from its first batch unless it is the epoch being resumed."""
        if epoch != self.epoch or self._passed:
            self._enter(epoch)

    def _enter(self, epoch: int) -> None:
        self.epoch, self.consumed, self._start, self._passed = epoch, 0, 0, False

    def order(self, epoch: int) -> list[int]:
        """Returns the permutation of an epoch."""
        if not self.shuffle:
            return list(range(self.num_pairs))
        generator = torch.Generator().manual_seed(int(digest([self.seed, epoch])[:15], 16))
        permutation: list[int] = torch.randperm(self.num_pairs, generator=generator).tolist()
        return permutation

    def _steps(self, epoch: int) -> list[list[int]]:
        """Returns the pairs of each step of an epoch."""
        order = self.order(epoch)
        return [order[step * self.size : (step + 1) * self.size] for step in range(self.steps_per_epoch)]

    def parts(self) -> Iterator[tuple[int, ...]]:
        """Yields the pairs of every micro-batch of the current epoch, of all ranks."""
        for number, step in enumerate(self._steps(self.epoch)):
            for hand in self.cutting.hands(step, self._micros(number), self.split.world_size):
                yield from hand

    def _micros(self, step: int) -> int:
        return self.split.accumulation if step < self._full else self.split.short

    def _plan(self, start: int) -> Iterator[PlannedBatch]:
        """Yields the batches of the current epoch from number ``start`` on."""
        epoch, steps, ranks = self.epoch, self._steps(self.epoch), self.split.world_size
        first, skip = divmod(start, self.split.accumulation)
        for step in range(first, len(steps)):
            whole, micros = tuple(steps[step]), self._micros(step)
            of_rank = tuple(self.cutting.hands(whole, micros, ranks)[self.rank])
            for micro in range(skip if step == first else 0, micros):
                batch = list(of_rank[micro])
                yield PlannedBatch(batch, step, len(whole), micro, micros, epoch, whole, of_rank, self.rank, ranks)

    # -------------------------------------------------------------------------------------------- resuming

    def state_dict(self, batches: int | None = None) -> SamplerState:
        """Returns plain values to resume from: epoch, batches of it consumed, and what decides which pairs those were.

        ``batches`` is the number of batches of the epoch that were trained on; without it, the number handed out,
        which is larger when a loader's workers fetch ahead.
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
        """Makes the next pass give the batches left of the saved epoch, possibly none.

        The steps may be cut in another way than when the state was saved (another rule, another number of
        micro-batches or processes), provided that it was saved between two optimiser steps.

        Raises:
            UserError: the state belongs to other pairs, another order or step size, lies inside a step that is now
            cut in another way, or comes from processes that left out pairs which these do not, or the reverse.
        """
        order, saved = self._order_key(), state["order"]
        differing = [f"{key} was {saved.get(key)}, is {now}" for key, now in order.items() if saved.get(key) != now]
        if differing:
            raise UserError(
                f"cannot resume with another order of the data: {', '.join(differing)}. "
                "Use the data and batch settings of the saved run"
            )
        batches = self._translate(int(state["batches"]), Split(**state["layout"]))
        if not 0 <= batches <= len(self):
            raise UserError(f"cannot resume after batch {batches}: an epoch has {len(self)} batches")
        self._enter(int(state["epoch"]))
        self.consumed = self._start = batches

    def is_inside(self, state: SamplerState) -> bool:
        """Tells whether ``state`` was saved inside an optimiser step."""
        return self._divides(int(state["batches"]), Split(**state["layout"]))

    def _divides(self, batches: int, split: Split) -> bool:
        last = self._full * split.accumulation
        return batches != last + split.short and (batches > last or batches % split.accumulation > 0)

    def _translate(self, batches: int, saved: Split) -> int:
        """Returns the number of batches consumed in the split ``saved``, counted in this one."""
        if saved == self.split:
            return batches
        rest = self.num_pairs % self.size
        if (rest >= saved.world_size) != (rest >= self.split.world_size):
            raise UserError(
                f"an epoch ends with {rest} pairs, which {max(saved.world_size, self.split.world_size)} processes "
                f"leave out and {min(saved.world_size, self.split.world_size)} do not: resume with "
                f"{saved.world_size} processes, as the run was saved with"
            )
        last = self._full * saved.accumulation
        if saved.short and batches == last + saved.short:
            return len(self)
        if not self._divides(batches, saved):
            return batches // saved.accumulation * self.split.accumulation
        raise UserError(
            "the run was saved inside an optimiser step, so it can only be resumed with the same split: "
            f"{saved.rule}, accumulation {saved.accumulation}, {saved.world_size} processes"
        )
