"""Lightning's data module: pairs with token weights, in planned optimiser steps, resumable in mid-epoch."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import lightning as L
import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

from attnpo.data.arrow_rows import pair_weights_of, sizes_of
from attnpo.data.base import SPLITS, PairReader
from attnpo.data.collate import Layout, TrainingExample, bare_rows, collate
from attnpo.data.micro_batches import COSTS, PADDED, ByCount, ByTokens, Cutting, RowCost, costs_of, require_room
from attnpo.data.prepared import Examples, Recipe, Texts, encode, make_examples, read_pairs
from attnpo.data.rules import AlignRules, BatchPlan, LengthRules
from attnpo.data.sampler import PlannedBatch, SamplerState, StepBatches, steps_in
from attnpo.judge.base import WeightReader
from attnpo.models.layouts import LAYOUTS, padded_layout
from attnpo.schema import PreferenceBatch, RowGroup, UserError
from attnpo.system.machine import inference_device
from attnpo.system.processes import world_size
from attnpo.system.store import Store
from attnpo.text.chat import ChatFormat
from attnpo.weights.base import WeightSource
from attnpo.weights.transforms import WeightTransform

log = logging.getLogger(__name__)


# ------------------------------------------------------------------------------------ rows ahead of a step

Ids = tuple[Sequence[int], Sequence[int]]
"""Prompt ids and response ids of one row."""


def partners(examples: Sequence[TrainingExample], step: Sequence[int]) -> dict[int, int]:
    """Returns by the position of each pair of ``step`` the pair whose responses are put after its prompt.

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


def make_mismatched(examples: Sequence[TrainingExample], planned: PlannedBatch) -> list[list[Ids]]:
    """Returns each pair's prompt with both responses of its partner: of a micro-batch the chosen ones first.

    The mismatched sequences of KTO's reference point (Ethayarajh et al. 2024, section 4).
    """
    other = partners(examples, planned.whole)
    made: list[list[Ids]] = []
    for micro in planned.of_rank:
        chosen = [(examples[i].chosen.prompt_ids, examples[other[i]].chosen.response_ids) for i in micro]
        rejected = [(examples[i].rejected.prompt_ids, examples[other[i]].rejected.response_ids) for i in micro]
        made.append([*chosen, *rejected])
    return made


MAKERS: Mapping[str, Callable[[Sequence[TrainingExample], PlannedBatch], list[list[Ids]]]] = {
    "mismatched": make_mismatched
}
"""Rows of a rank's step by name, a list for each of its micro-batches; given any micro-batch of that step."""


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
        """Returns by name a row group for each micro-batch of the rank's step."""
        groups = {}
        for name in sorted(self.names):
            micros = MAKERS[name](examples, planned)
            if self.max_length is not None:
                micros = self._fit(name, micros, self.max_length)
            groups[name] = tuple(bare_rows(rows, layout, pad_id) for rows in micros)
        return groups

    def _fit(self, name: str, micros: list[list[Ids]], max_length: int) -> list[list[Ids]]:
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


# ------------------------------------------------------------------------------------ batches of whole steps


@dataclass
class Batches(Dataset[PreferenceBatch]):
    """Examples indexed by planned batches instead of single positions."""

    examples: Sequence[TrainingExample]
    layout: Layout
    pad_id: int
    cutting: Cutting
    ahead: StepRows | None = None
    _trained: npt.NDArray[np.int64] = field(init=False, repr=False)  # response tokens that are, [2 pairs]

    def __post_init__(self) -> None:
        self._trained = np.stack(sizes_of(self.examples).responses) * (pair_weights_of(self.examples) > 0)

    def __getitem__(self, planned: PlannedBatch) -> PreferenceBatch:
        """Returns the collated batch of a plan's indices; the first of a step has what is looked at before the step."""
        examples = [self.examples[i] for i in planned.indices]
        batch = collate(examples, self.layout, self.pad_id, planned.step_pairs, self._step_tokens(planned.whole))
        if self.ahead is None or planned.micro > 0:
            return batch
        if isinstance(self.cutting, ByTokens):
            planned = regroup_for_pre_step(self.examples, planned, self.ahead, self.cutting)
        return replace(batch, ahead=self.ahead.make(self.examples, planned, self.layout, self.pad_id))

    def _step_tokens(self, whole: tuple[int, ...]) -> tuple[int, int]:
        """Returns chosen and rejected response tokens of a step."""
        chosen, rejected = self._trained[:, list(whole)].sum(axis=1).tolist()
        return chosen, rejected


def regroup_for_pre_step(
    examples: Sequence[TrainingExample], planned: PlannedBatch, ahead: StepRows, cutting: ByTokens
) -> PlannedBatch:
    """Returns the same step with its pairs shared out anew for the rows ahead of it, whose lengths are others.

    They keep the budget of ``cutting`` where their longest does, in as many groups for every rank; a sum over the rows
    of all ranks is the same.
    """
    alone = replace(planned, of_rank=tuple((i,) for i in planned.whole))
    sizes = dict.fromkeys(planned.whole, 0)
    for name in ahead.names:
        for (i,), rows in zip(alone.of_rank, MAKERS[name](examples, alone), strict=True):
            fitted = rows if ahead.max_length is None else [cut(row, ahead.max_length) for row in rows]
            sizes[i] = max(sizes[i], cutting.cost.of(fitted))
    of_rows = replace(cutting, sizes=sizes, budget=max(cutting.budget, *sizes.values()))
    groups = min(of_rows.min_micro_batches(planned.whole, planned.ranks), len(planned.whole) // planned.ranks)
    return replace(planned, of_rank=tuple(of_rows.closest(planned.whole, groups, planned.ranks)[planned.rank]))


class PreferenceDataModule(L.LightningDataModule):
    """Preference pairs with token weights: weighs what the store lacks, loads the rest, plans whole optimiser steps.

    ``prepare_data`` and ``setup`` do the work, called by a Trainer or by hand before there is one. In a job of several
    processes ``setup`` maps what the store has and refuses where weights are missing, as every process would compute
    them. Every pair comes exactly once per epoch, on whatever number of ranks. The state saved with a checkpoint is
    what training has consumed, so a resumed run sees exactly the remaining batches.

    Args:
        pairs: where the pairs of the splits "train" and "val" come from, such as ``PairSource("pairs.jsonl")``.
        chat: the chat format of the policy, with its tokenizer.
        source: where token weights come from.
        reader: the model that ``source`` reads, such as a judge; None for weights that no model is asked for.
        store: where weights and large data are kept; needed with a reader.
        lengths: how long prompts and pairs may be.
        align: how weights are carried onto the training tokens.
        transforms: changes of the weights, in their order.
        plan: pairs per step and per micro-batch; validation is one step of all its pairs.
        layout: a function of ``models.layouts``.
        seed: the order of the training pairs, where the plan shuffles them.
        ahead: names of the rows that the objective looks at before each step (its "ahead:NAME").
        epochs: how many the run has, from which the micro-batches of its steps follow; None asks the Trainer.
        max_steps: optimiser steps of the run, if they and not the epochs end it.
        auto: whether the plan's budget of training tokens is a choice, so that another may take its place.
        device: where the reader's model runs; None is a GPU if there is one.

    Raises:
        UserError: in ``setup``, for data that cannot be read or trained on, and for missing weights in a job of
            several processes.
    """

    def __init__(
        self,
        pairs: PairReader,
        chat: ChatFormat,
        source: WeightSource,
        *,
        reader: WeightReader | None = None,
        store: Store | None = None,
        lengths: LengthRules | None = None,
        align: AlignRules | None = None,
        transforms: Sequence[WeightTransform] = (),
        plan: BatchPlan | None = None,
        layout: Layout = padded_layout,
        seed: int = 0,
        ahead: Collection[str] = (),
        epochs: int | None = None,
        max_steps: int = -1,
        auto: bool = False,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        if source.requires and (reader is None or store is None):
            raise UserError(
                f"weights {type(source).__name__} are read with a model ({', '.join(sorted(source.requires))}) and "
                "kept in a store: give reader=... and store=Store(FOLDER)"
            )
        self.source, self.chat = source, chat
        self._from, self._reader, self._store, self._device = pairs, reader, store, device or inference_device("auto")
        self._lengths = LengthRules() if lengths is None else lengths
        self._align = AlignRules() if align is None else align
        self._transforms = tuple(transforms)
        self.texts: Texts | None = None
        self.made: Examples | None = None
        self.layout, self.pad_id, self.plan, self.seed = layout, chat.rows.pad_id, plan or BatchPlan(), seed
        self.epochs, self.max_steps = epochs, max_steps
        self._begin(ahead, self._lengths.max_length, auto)

    @classmethod
    def from_examples(
        cls,
        train: Sequence[TrainingExample],
        val: Sequence[TrainingExample],
        layout: Layout = padded_layout,
        pad_id: int = 0,
        plan: BatchPlan | None = None,
        seed: int = 0,
        ahead: Collection[str] = (),
        max_length: int | None = None,
        epochs: int | None = None,
        max_steps: int = -1,
        auto: bool = False,
    ) -> "PreferenceDataModule":
        """Makes a data module of examples that are there, without pairs or store.

        ``max_length``: tokens that a row ahead of a step may have, prompt included; None for any number.
        """
        data = cls.__new__(cls)
        L.LightningDataModule.__init__(data)
        data.texts = data.made = None
        data.layout, data.pad_id, data.plan, data.seed = layout, pad_id, plan or BatchPlan(), seed
        data.epochs, data.max_steps = epochs, max_steps
        data._begin(ahead, max_length, auto)
        data.put(train, val)
        return data

    def _begin(self, ahead: Collection[str], longest: int | None, auto: bool) -> None:
        self._ahead = StepRows(ahead, longest) if ahead else None
        self.chosen = self.plan.budget if auto else None
        self._batches: tuple[Batches, Batches] | None = None
        self.sampler: StepBatches | None = None
        self._resume: SamplerState | None = None

    # ------------------------------------------------------------------------------------------------ before training
    def prepare_data(self) -> None:
        """Weighs what the store lacks, in a job of one process; others leave it to ``setup``, which all of them run."""
        if self._batches is None and world_size() == 1:
            self.weigh()

    def setup(self, stage: str) -> None:
        """Maps or makes the examples, once, and makes the Trainer's accumulation that of the plan."""
        if self._batches is None:
            made = self.weigh()
            self.put(*(made.sets[split].examples for split in SPLITS))
        if self.trainer is None:
            return
        if self.trainer.world_size > 1 and vars(self.trainer._accelerator_connector)["use_distributed_sampler"]:
            raise UserError(
                "the Trainer would put a sampler of its own in the place of the planned steps of several processes: "
                "give it use_distributed_sampler=False"
            )
        if self.epochs is None:
            self.epochs = self.trainer.max_epochs or 1
            self.max_steps = self.max_steps if self.max_steps > 0 else self.trainer.max_steps
        asked, planned = self.trainer.accumulate_grad_batches, self.accumulation(self.trainer.world_size)
        if asked not in (1, planned):
            log.warning("accumulate_grad_batches=%d of the Trainer becomes the %d of the plan", asked, planned)
        self.trainer.accumulate_grad_batches = planned

    def read(self) -> "Texts":
        """Returns the pairs of both splits and their training ids, read once."""
        if self.texts is None:
            pairs = read_pairs(self._from, self.source, self._store)
            self.texts = encode(pairs, self.chat, self._lengths, self._store)
        return self.texts

    def weigh(self) -> Examples:
        """Returns weights and examples of both splits, made once; ``source`` has its layer settled by now."""
        if self.made is None:
            texts = self.read()
            recipe = Recipe(self.source, self._reader, self._transforms, self._align, self._from)
            self.made = make_examples(recipe, texts, self._store, self._device)
        return self.made

    # ------------------------------------------------------------------------------------------------ the batches
    def put(self, train: Sequence[TrainingExample], val: Sequence[TrainingExample]) -> None:
        """Takes the examples of both splits, in the place of those before.

        Raises:
            UserError: a split is empty, or has one pair where rows are made of several, or one above the budget.
        """
        if not train:
            raise UserError("no training pair is left after dropping; see the counts above, and data.path")
        if not val:
            raise UserError("no validation pair is left after dropping; see the counts above, and data.val_split")
        for split, examples, key in (("training", train, "data.path"), ("validation", val, "data.val_split")):
            if self._ahead and len(examples) < 2:
                raise UserError(
                    f"the objective puts responses of one pair after the prompt of another: expected at least 2 "
                    f"{split} pairs, got 1; see the counts above for those dropped, and {key}"
                )
        plan = self.plan
        cost = next((COSTS[name] for name, made in LAYOUTS.items() if made is self.layout), PADDED)
        by_train = make_cutting(train, cost, "batch.tokens", plan.budget, plan.per_forward)
        by_val = make_cutting(val, cost, "batch.eval_tokens", plan.eval_budget, plan.eval_per_forward)
        self._batches = (
            Batches(train, self.layout, self.pad_id, by_train, self._ahead),
            Batches(val, self.layout, self.pad_id, by_val, self._ahead),
        )

    def _of_split(self, place: int) -> Batches:
        if self._batches is None:
            self.setup("fit")
        assert self._batches is not None
        return self._batches[place]

    @property
    def train_batches(self) -> Batches:
        """Returns training examples, indexed by planned batches."""
        return self._of_split(0)

    @property
    def val_batches(self) -> Batches:
        """Returns validation examples, indexed by planned batches."""
        return self._of_split(1)

    def _ranks(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer is not None else (0, 1)

    def _sampler(self, rank: int, world: int) -> StepBatches:
        self.plan.accumulation(world)  # refuses what cannot be shared evenly
        steps = self.steps_per_epoch(world)
        return StepBatches(
            num_pairs=len(self.train_batches.examples),
            size=self.plan.pairs,
            cutting=self.train_batches.cutting,
            seed=self.seed,
            shuffle=self.plan.shuffle,
            rank=rank,
            world_size=world,
            epochs=(self.epochs or 1) if self.max_steps < 0 else max(1, -(-self.max_steps // max(1, steps))),
        )

    def steps_per_epoch(self, processes: int) -> int:
        """Returns the number of optimiser steps of an epoch.

        So many processes may not be able to share its last few pairs.
        """
        return steps_in(len(self.train_batches.examples), self.plan.pairs, processes)

    def accumulation(self, processes: int) -> int:
        """Returns the number of micro-batches per optimiser step on each of so many processes.

        Raises:
            UserError: the steps cannot be cut as the plan asks.
        """
        return self._sampler(0, processes).split.accumulation

    # ------------------------------------------------------------------------------------------------ the budget
    @property
    def budgets(self) -> tuple[int, ...]:
        """Returns the tokens per forward of training and of validation, where budgets and not pairs decide."""
        cuttings = (self.train_batches.cutting, self.val_batches.cutting)
        return tuple(cutting.budget for cutting in cuttings if isinstance(cutting, ByTokens))

    def agree(self, budgets: Sequence[int]) -> None:
        """Takes the budgets that all processes of a job can hold, in the order of ``budgets``."""
        left = iter(budgets)
        for batches in (self.train_batches, self.val_batches):
            if isinstance(batches.cutting, ByTokens):
                batches.cutting = replace(batches.cutting, budget=next(left))
        self.chosen = self.chosen and budgets[0]

    def halve(self) -> bool:
        """Halves a chosen budget, as far as the longest pair allows; False where that leaves it as it was."""
        cutting = self.train_batches.cutting
        if self.chosen is None or not isinstance(cutting, ByTokens):
            return False
        longest = max(cutting.sizes[i] for i in range(len(self.train_batches.examples)))
        self._take(max(cutting.budget // 2, longest))
        return cutting.budget > longest

    def _take(self, budget: int) -> None:
        if isinstance(self.train_batches.cutting, ByTokens):
            self.train_batches.cutting = replace(self.train_batches.cutting, budget=budget)

    def place(self, state: SamplerState) -> tuple[int, int, int]:
        """Returns (epoch, its micro-batches consumed, its micro-batches) of a saved ``state`` in this run's splitting.

        Where the budget is a choice, a state saved inside a step goes on with its own, and so does one whose run began
        with the same choice and found it too large.
        """
        sampler = self._sampler(*self._ranks())
        chosen, used = state.get("budgets", (0, 0))
        if self.chosen is not None and (self.chosen == chosen or (used and sampler.is_inside(state))):
            self._take(used)
            sampler = self._sampler(*self._ranks())
        sampler.load_state_dict(state)
        return sampler.epoch, sampler.consumed, len(sampler)

    def train_dataloader(self) -> DataLoader[PreferenceBatch]:
        """Returns planned micro-batches of this rank, shuffled anew each epoch unless the plan keeps the order."""
        sampler = self._sampler(*self._ranks())
        if self._resume is not None:
            sampler.load_state_dict(self._resume)
            self._resume = None
        if sampler.dropped:
            log.warning("%d pairs of each epoch are left out: fewer than there are processes", sampler.dropped)
        if isinstance(sampler.cutting, ByTokens):
            _say(sampler, sampler.cutting)
        self.sampler = sampler
        return loader(self.train_batches, sampler)

    def val_dataloader(self) -> DataLoader[PreferenceBatch]:
        """Returns validation pairs, split over ranks; every pair, since all of them are one step."""
        rank, world = self._ranks()
        pairs = len(self.val_batches.examples)
        sampler = StepBatches(pairs, pairs, self.val_batches.cutting, shuffle=False, rank=rank, world_size=world)
        return loader(self.val_batches, sampler)

    def state_dict(self) -> dict[str, object]:
        """Returns the training sampler's state at the micro-batches that training has consumed."""
        if self.trainer is None or self.sampler is None:
            return {}
        consumed: int = vars(self.trainer.fit_loop.epoch_loop.batch_progress.current)["processed"]
        state = self.sampler.state_dict(consumed)
        if self.chosen is not None:
            state["budgets"] = [self.chosen, self.budgets[0]]
        return dict(state)

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Makes the next training loader start after the consumed batches."""
        if state_dict:
            self._resume = cast(SamplerState, state_dict)


def make_cutting(
    examples: Sequence[TrainingExample], cost: RowCost, key: str, tokens: int | None, micro: int
) -> Cutting:
    """Returns what cuts the steps of ``examples``.

    A budget of ``tokens``, given as ``key``, or else ``micro`` pairs at a time.

    UserError for a budget below the longest pair.
    """
    if tokens is None:
        return ByCount(micro)
    require_room(examples, cost, tokens, key)
    return ByTokens(costs_of(examples, cost), cost, tokens, key)


def _say(sampler: StepBatches, cutting: ByTokens) -> None:
    """Logs how full the micro-batches of the epoch are."""
    tokens = [cutting.tokens(part) for part in sampler.parts()]
    log.info(
        "micro-batches: %d for the %d pairs of a step, %d on each process; %s %d; %s rows, %d tokens at most and %d in "
        "the mean",
        sampler.split.accumulation * sampler.split.world_size,
        sampler.size,
        sampler.split.accumulation,
        cutting.key,
        cutting.budget,
        cutting.cost.name,
        max(tokens),
        round(sum(tokens) / len(tokens)),
    )


def loader(batches: Batches, sampler: StepBatches) -> DataLoader[PreferenceBatch]:
    """Returns the loader of planned batches, which draws from a generator of its own and not from training's."""
    return DataLoader(batches, sampler=sampler, batch_size=None, generator=torch.Generator())
