"""Batches that plan whole optimiser steps, the same for every way to split them, resumable at any batch.

An optimiser step is ``micro_batch * accumulation * world_size`` consecutive pairs of the epoch's permutation; which
pairs a step holds does not depend on how the product is split. Each batch knows the number of pairs of its whole
step, so a loss of ``sum over pairs / step_pairs`` needs no knowledge of the splitting.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil
from typing import Any

import torch
from torch.utils.data import Sampler

from attnpo.schema import UserError, digest

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlannedBatch:
    """One micro-batch of one rank.

    ``indices`` are positions in the list of pairs, ``step`` counts the optimiser steps of the epoch from 0,
    ``step_pairs`` is the number of pairs of the whole step over all ranks and micro-batches, and ``micro`` of
    ``micros`` is this micro-batch's place in the step (every rank has the same ``micros`` in the same step). ``whole``
    are the positions of all pairs of the step, ``own`` those of this rank, micro-batch by micro-batch.
    """

    indices: list[int]
    step: int
    step_pairs: int
    micro: int
    micros: int
    epoch: int = 0
    whole: tuple[int, ...] = field(default=(), repr=False, compare=False)
    own: tuple[tuple[int, ...], ...] = field(default=(), repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    @property
    def closes_step(self) -> bool:
        """Whether the optimiser steps after this micro-batch."""
        return self.micro == self.micros - 1


@dataclass(frozen=True)
class _Layout:
    """How a step is split; ``size`` pairs in a full step."""

    micro_batch: int
    accumulation: int
    world_size: int

    @property
    def size(self) -> int:
        return self.micro_batch * self.accumulation * self.world_size

    def micros(self, pairs: int) -> int:
        """Micro-batches per rank of a step of ``pairs`` >= world_size pairs.

        As few as hold the largest share, but never more than the smallest share has pairs.
        """
        return min(ceil(ceil(pairs / self.world_size) / self.micro_batch), pairs // self.world_size)

    def largest(self, pairs: int) -> int:
        """Pairs of the largest micro-batch of such a step."""
        return ceil(ceil(pairs / self.world_size) / self.micros(pairs))


def _shares(total: int, parts: int) -> list[tuple[int, int]]:
    """Half-open ranges that cut ``total`` things into consecutive parts, sizes differing by at most one."""
    small, larger = divmod(total, parts)
    starts = [part * small + min(part, larger) for part in range(parts + 1)]
    return list(pairwise(starts))


class StepBatches(Sampler[PlannedBatch]):
    """The planned batches of one rank, epoch after epoch; give it to a loader as ``sampler`` with ``batch_size=None``.

    Every pair is seen exactly once per epoch, in an order that only ``seed`` and the epoch decide (the order of the
    list when ``shuffle`` is false). The last step of an epoch may be short: each rank gets an equal share of it (up
    to one pair), in the same number of micro-batches of at least one pair. Two consequences:

    - fewer pairs left than ranks: they are dropped, other ones in each epoch; ``dropped`` counts them;
    - ``micro_batch`` 1 and a remainder that the ranks cannot share evenly: one micro-batch holds two pairs, which is
      logged. ``drop_last`` leaves out the short step altogether (and counts its pairs).

    Iterating again starts the next epoch after a full pass, and the same epoch anew after a broken one. After
    ``load_state_dict`` the first full pass gives exactly the batches that were left.

    Args:
        num_pairs: length of the list of pairs.
        micro_batch: pairs per micro-batch and rank.
        accumulation: micro-batches per optimiser step and rank.
        seed: together with the epoch the key of the permutation.
        shuffle: whether to permute at all.
        rank: this process among the ``world_size`` that share the steps.
        world_size: number of processes.
        drop_last: leave out the short last step.

    Raises:
        UserError: a size below 1, or an epoch without a single step.
        ValueError: ``rank`` is not one of the ranks.
    """

    def __init__(
        self,
        num_pairs: int,
        micro_batch: int,
        accumulation: int,
        seed: int = 0,
        shuffle: bool = True,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
    ) -> None:
        for name, value in (("micro_batch", micro_batch), ("accumulation", accumulation), ("world_size", world_size)):
            if value < 1:
                raise UserError(f"{name} must be at least 1, got {value}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be 0 to {world_size - 1}, got {rank}")
        self.num_pairs, self.seed, self.shuffle, self.rank = num_pairs, seed, shuffle, rank
        self.drop_last = drop_last
        self._layout = _Layout(micro_batch, accumulation, world_size)
        full, rest = divmod(num_pairs, self._layout.size)
        short = 0 if drop_last or rest < world_size else rest
        self.dropped = rest - short
        self._full, self._short = full, short
        self.steps_per_epoch = full + (short > 0)
        if self.steps_per_epoch == 0:
            raise UserError(
                f"{num_pairs} pairs make no optimiser step of {micro_batch} x {accumulation} x {world_size} pairs "
                f"(micro-batch x accumulation x processes{', short steps dropped' if drop_last else ''}); "
                "give more pairs or a smaller batch"
            )
        if short and self._layout.largest(short) > micro_batch:
            _LOG.warning(
                "the last step of an epoch has %d pairs for %d processes: one micro-batch holds %d pairs, not %d",
                short,
                world_size,
                self._layout.largest(short),
                micro_batch,
            )
        self.epoch = 0
        self.consumed = 0
        self._start = 0
        self._passed = False

    def __len__(self) -> int:
        """Micro-batches of this rank in a whole epoch (the same for every rank, also after a resume)."""
        return self._full * self._layout.accumulation + (self._layout.micros(self._short) if self._short else 0)

    def __iter__(self) -> Iterator[PlannedBatch]:
        if self._passed:
            self._enter(self.epoch + 1)
        self.consumed = self._start
        for batch in self._plan(self._start):
            self.consumed += 1
            yield batch
        self._passed = True

    def set_epoch(self, epoch: int) -> None:
        """Nothing; the next pass is ``epoch``, from its first batch unless it is the epoch being resumed."""
        if epoch != self.epoch or self._passed:
            self._enter(epoch)

    def _enter(self, epoch: int) -> None:
        self.epoch, self.consumed, self._start, self._passed = epoch, 0, 0, False

    def order(self) -> list[int]:
        """The permutation of the current epoch."""
        if not self.shuffle:
            return list(range(self.num_pairs))
        generator = torch.Generator().manual_seed(int(digest([self.seed, self.epoch])[:15], 16))
        return [int(index) for index in torch.randperm(self.num_pairs, generator=generator)]

    def _plan(self, start: int) -> Iterator[PlannedBatch]:
        """The batches of the current epoch from number ``start`` on."""
        order, epoch = self.order(), self.epoch
        first, skip = divmod(start, self._layout.accumulation)
        for step in range(first, self.steps_per_epoch):
            offset = step * self._layout.size
            pairs = self._layout.size if step < self._full else self._short
            low, high = _shares(pairs, self._layout.world_size)[self.rank]
            cuts = _shares(high - low, self._layout.micros(pairs))
            whole = tuple(order[offset : offset + pairs])
            own = tuple(whole[low + begin : low + end] for begin, end in cuts)
            for micro in range(len(cuts)):
                if step > first or micro >= skip:
                    yield PlannedBatch(list(own[micro]), step, pairs, micro, len(cuts), epoch, whole, own)

    # -------------------------------------------------------------------------------------------- resuming

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """Plain values to resume from: epoch, batches of it consumed, and what decides which pairs those were.

        ``batches`` is the number of batches of the epoch that were trained on; without it, the number handed out,
        which is larger when a loader's workers fetch ahead.
        """
        return {
            "epoch": self.epoch,
            "batches": self.consumed if batches is None else batches,
            "order": self._order_key(),
            "layout": [self._layout.micro_batch, self._layout.accumulation, self._layout.world_size],
        }

    def _order_key(self) -> dict[str, Any]:
        return {
            "num_pairs": self.num_pairs,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "step_size": self._layout.size,
            "drop_last": self.drop_last,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing; the next pass gives the batches left of the saved epoch, possibly none.

        The step may be split in another way than when the state was saved (other micro-batch, accumulation or number
        of processes for the same product), provided that it was saved between two optimiser steps. A state with
        "epoch" and "batches" alone is taken to be of this very plan.

        Raises:
            UserError: the state belongs to other pairs, another order or step size, lies inside a step that is now
            split in another way, or comes from processes that left out pairs which these do not, or the reverse.
        """
        order = self._order_key()
        saved = state.get("order", order)
        differing = [f"{key} was {saved.get(key)}, is {now}" for key, now in order.items() if saved.get(key) != now]
        if differing:
            raise UserError(
                f"cannot resume with another order of the data: {', '.join(differing)}. "
                "Use the data and batch settings of the saved run"
            )
        layout = _Layout(*state["layout"]) if "layout" in state else self._layout
        batches = self._translate(int(state["batches"]), layout)
        if not 0 <= batches <= len(self):
            raise UserError(f"cannot resume after batch {batches}: an epoch has {len(self)} batches")
        self._enter(int(state["epoch"]))
        self.consumed = self._start = batches

    def _translate(self, batches: int, saved: _Layout) -> int:
        """The number of batches consumed in the layout ``saved``, counted in this one."""
        if saved == self._layout:
            return batches
        rest = self.num_pairs % self._layout.size
        if not self.drop_last and (rest >= saved.world_size) != (rest >= self._layout.world_size):
            raise UserError(
                f"an epoch ends with {rest} pairs, which {max(saved.world_size, self._layout.world_size)} processes "
                f"leave out and {min(saved.world_size, self._layout.world_size)} do not: resume with "
                f"{saved.world_size} processes, as the run was saved with"
            )
        last = self._full * saved.accumulation
        if batches > last:
            if not self.drop_last and rest >= saved.world_size and batches == last + saved.micros(rest):
                return len(self)
        elif batches % saved.accumulation == 0:
            return batches // saved.accumulation * self._layout.accumulation
        raise UserError(
            "the run was saved inside an optimiser step, so it can only be resumed with the same split: micro-batch "
            f"{saved.micro_batch}, accumulation {saved.accumulation}, {saved.world_size} processes"
        )
