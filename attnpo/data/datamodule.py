"""The Lightning data module: planned optimiser steps over prepared examples, resumable in mid-epoch."""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset

from attnpo.data.ahead import StepRows
from attnpo.data.collate import Layout, TrainingExample, collate
from attnpo.data.rules import BatchPlan
from attnpo.data.sampler import PlannedBatch, StepBatches
from attnpo.schema import PreferenceBatch, UserError

log = logging.getLogger(__name__)


@dataclass
class Batches(Dataset[PreferenceBatch]):
    """Examples indexed by planned batches instead of single positions."""

    examples: Sequence[TrainingExample]
    layout: Layout
    pad_id: int
    ahead: StepRows | None = None
    _counted: tuple[tuple[int, ...], tuple[int, int]] = field(default=((), (0, 0)), init=False, repr=False)

    def __getitem__(self, planned: PlannedBatch) -> PreferenceBatch:
        """The collated batch of a plan's indices; the first of a step has what is looked at before the step."""
        examples = [self.examples[i] for i in planned.indices]
        batch = collate(examples, self.layout, self.pad_id, planned.step_pairs, self._step_tokens(planned.whole))
        if self.ahead is None or planned.micro > 0:
            return batch
        return replace(batch, ahead=self.ahead.make(self.examples, planned, self.layout, self.pad_id))

    def _step_tokens(self, whole: tuple[int, ...]) -> tuple[int, int]:
        """Chosen and rejected response tokens of a step; counted once for all its micro-batches."""
        if whole != self._counted[0]:
            step = [self.examples[i] for i in whole if self.examples[i].pair_weight > 0]
            chosen = sum(len(example.chosen.response_ids) for example in step)
            self._counted = whole, (chosen, sum(len(example.rejected.response_ids) for example in step))
        return self._counted[1]


class PreferenceDataModule(L.LightningDataModule):
    """Batches of prepared training and validation examples.

    Every pair comes exactly once per epoch, on whatever number of ranks. The state saved with a checkpoint is what
    training has consumed, so a resumed run sees exactly the remaining batches.

    Args:
        train: training examples.
        val: validation examples; all of them are one step.
        layout: a function of ``models.layouts``.
        pad_id: token id put on padding positions.
        plan: pairs per step and per micro-batch.
        seed: the order of the training pairs.
        ahead: names of the rows that the objective looks at before each step (its "ahead:NAME").
        max_length: tokens that a row of these may have, prompt included; None for any number.

    Raises:
        UserError: a split is empty, or has one pair where rows are made of several.
    """

    def __init__(
        self,
        train: Sequence[TrainingExample],
        val: Sequence[TrainingExample],
        layout: Layout,
        pad_id: int,
        plan: BatchPlan,
        seed: int,
        ahead: Collection[str] = (),
        max_length: int | None = None,
    ) -> None:
        super().__init__()
        if not train:
            raise UserError("no training pair is left after dropping; see the counts above, and data.path")
        if not val:
            raise UserError("no validation pair is left after dropping; see the counts above, and data.val_split")
        for split, examples, key in (("training", train, "data.path"), ("validation", val, "data.val_split")):
            if ahead and len(examples) < 2:
                raise UserError(
                    f"the objective puts responses of one pair behind the prompt of another: expected at least 2 "
                    f"{split} pairs, got 1; see the counts above for those dropped, and {key}"
                )
        made = StepRows(ahead, max_length) if ahead else None
        self.train_batches = Batches(train, layout, pad_id, made)
        self.val_batches = Batches(val, layout, pad_id, made)
        self.plan, self.seed = plan, seed
        self.sampler: StepBatches | None = None
        self._resume: dict[str, Any] | None = None

    def _ranks(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer is not None else (0, 1)

    def _sampler(self, rank: int, world: int) -> StepBatches:
        return StepBatches(
            num_pairs=len(self.train_batches.examples),
            micro_batch=self.plan.micro,
            accumulation=self.plan.accumulation(world),
            seed=self.seed,
            shuffle=True,
            rank=rank,
            world_size=world,
        )

    def steps_per_epoch(self, processes: int) -> int:
        """Optimiser steps of an epoch on so many processes, which may not be able to share its last few pairs."""
        return self._sampler(0, processes).steps_per_epoch

    def place(self, state: dict[str, Any]) -> tuple[int, int, int]:
        """(epoch, micro-batches of it consumed, micro-batches in it) of a saved ``state``, in this run's splitting."""
        sampler = self._sampler(*self._ranks())
        sampler.load_state_dict(state)
        return sampler.epoch, sampler.consumed, len(sampler)

    def train_dataloader(self) -> DataLoader[PreferenceBatch]:
        """Planned micro-batches of this rank, shuffled anew each epoch."""
        sampler = self._sampler(*self._ranks())
        if self._resume is not None:
            sampler.load_state_dict(self._resume)
            self._resume = None
        if sampler.dropped:
            log.warning("%d pairs of each epoch are left out: fewer than there are processes", sampler.dropped)
        self.sampler = sampler
        return loader(self.train_batches, sampler)

    def val_dataloader(self) -> DataLoader[PreferenceBatch]:
        """Validation pairs in their order, split over ranks; every pair, since all of them are one step."""
        rank, world = self._ranks()
        pairs = len(self.val_batches.examples)
        sampler = StepBatches(
            num_pairs=pairs,
            micro_batch=self.plan.eval_micro,
            accumulation=max(1, -(-pairs // (self.plan.eval_micro * world))),
            seed=0,
            shuffle=False,
            rank=rank,
            world_size=world,
        )
        return loader(self.val_batches, sampler)

    def state_dict(self) -> dict[str, Any]:
        """The training sampler's state at the micro-batches that training has consumed."""
        if self.trainer is None or self.sampler is None:
            return {}
        consumed: int = vars(self.trainer.fit_loop.epoch_loop.batch_progress.current)["processed"]
        return self.sampler.state_dict(consumed)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing; the next training loader starts behind the consumed batches."""
        if state_dict:
            self._resume = dict(state_dict)


def loader(batches: Batches, sampler: StepBatches) -> DataLoader[PreferenceBatch]:
    """The loader of planned batches. It draws from a generator of its own, so training's random numbers stay apart."""
    return DataLoader(batches, sampler=sampler, batch_size=None, generator=torch.Generator())
