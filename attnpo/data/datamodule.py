"""Defines the Lightning data module for preference pairs with token weights.

It plans whole optimizer steps and can resume within an epoch.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import lightning as L
import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

from attnpo.data.arrow_rows import count_row_tokens, get_pair_weights
from attnpo.data.base import SPLITS, PairReader
from attnpo.data.collate import Layout, TrainingExample, collate, make_unweighted_rows
from attnpo.data.micro_batches import (
    COSTS,
    PADDED,
    BatchByCount,
    BatchByTokens,
    BatchRule,
    RowCost,
    check_token_budget,
    count_pair_tokens,
)
from attnpo.data.prepared import EncodedTexts, ExampleRecipe, WeightedSplits, encode, make_examples, read_pairs
from attnpo.data.rules import AlignRules, BatchPlan, LengthRules
from attnpo.data.sampler import PlannedBatch, SamplerState, StepBatchSampler, count_steps
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


# ------------------------------------------------------------------------------------ pre-step rows

Ids = tuple[Sequence[int], Sequence[int]]
"""Prompt ids and response ids of one row."""


def find_mismatch_partners(examples: Sequence[TrainingExample], step: Sequence[int]) -> dict[int, int]:
    """Maps each pair in ``step`` to a partner; mismatched rows join the pair's prompt to the partner's responses.

    The partner is the nearest earlier pair in the step with a different prompt, wrapping around from the first pair to
    the last. If all prompts are equal, the partner is the previous pair. If the step has only one pair, the partner is
    taken from all examples.

    Raises:
        ValueError: there is only one example.
    """
    if len(examples) < 2:
        raise ValueError("mismatched rows need at least two pairs")
    if len(step) == 1:
        return {step[0]: find_mismatch_partners(examples, range(len(examples)))[step[0]]}
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


def make_mismatched_rows(examples: Sequence[TrainingExample], planned: PlannedBatch) -> list[list[Ids]]:
    """Returns each pair's prompt with both responses of its partner; in a micro-batch, chosen responses come first.

    These are the mismatched sequences of KTO's reference point (Ethayarajh et al. 2024, section 4).
    """
    other = find_mismatch_partners(examples, planned.whole)
    made: list[list[Ids]] = []
    for micro in planned.of_rank:
        chosen = [(examples[i].chosen.prompt_ids, examples[other[i]].chosen.response_ids) for i in micro]
        rejected = [(examples[i].rejected.prompt_ids, examples[other[i]].rejected.response_ids) for i in micro]
        made.append([*chosen, *rejected])
    return made


MAKERS: Mapping[str, Callable[[Sequence[TrainingExample], PlannedBatch], list[list[Ids]]]] = {
    "mismatched": make_mismatched_rows
}
"""Functions by name. Each builds one rank's rows from the step's planned batch and returns one list per micro-batch."""


def truncate_response(row: Ids, max_length: int) -> Ids:
    """Truncates the response to fit ``max_length`` together with the prompt; keeps at least one response token."""
    prompt, response = row
    return prompt, response[: max(1, max_length - len(prompt))]


@dataclass
class PreStepRows:
    """Builds the rows that an objective requests with "ahead:NAME", for one rank's share of a step.

    In rows longer than ``max_length`` (None: no limit), the response is truncated; the number of such rows is
    logged for the first affected step.

    Raises:
        ValueError: a name is unknown.
    """

    names: Collection[str]
    max_length: int | None = None
    _told: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.names) - set(MAKERS))
        if unknown:
            raise ValueError(f"unknown pre-step rows {', '.join(unknown)}; known: {', '.join(MAKERS)}")

    def make_rows(
        self, examples: Sequence[TrainingExample], planned: PlannedBatch, layout: Layout, pad_id: int
    ) -> dict[str, tuple[RowGroup, ...]]:
        """Returns this rank's rows for the step by name, with one group per micro-batch."""
        groups = {}
        for name in sorted(self.names):
            micros = MAKERS[name](examples, planned)
            if self.max_length is not None:
                micros = self._truncate_rows(name, micros, self.max_length)
            groups[name] = tuple(make_unweighted_rows(rows, layout, pad_id) for rows in micros)
        return groups

    def _truncate_rows(self, name: str, micros: list[list[Ids]], max_length: int) -> list[list[Ids]]:
        rows = [row for micro in micros for row in micro]
        long = sum(len(prompt) + len(response) > max_length for prompt, response in rows)
        if long and not self._told:
            log.info(
                "%s rows: %d of %d in this step are longer than lengths.max_length=%d; the responses of such rows are "
                "truncated in all steps",
                name,
                long,
                len(rows),
                max_length,
            )
            self._told = True
        return [[truncate_response(row, max_length) for row in micro] for micro in micros] if long else micros


# ------------------------------------------------------------------------------------ batches of planned steps


@dataclass
class BatchDataset(Dataset[PreferenceBatch]):
    """Dataset of examples, indexed by planned batches."""

    examples: Sequence[TrainingExample]
    layout: Layout
    pad_id: int
    cutting: BatchRule
    ahead: PreStepRows | None = None
    _trained: npt.NDArray[np.int64] = field(init=False, repr=False)  # trained response tokens, [2, pairs]

    def __post_init__(self) -> None:
        self._trained = np.stack(count_row_tokens(self.examples).responses) * (get_pair_weights(self.examples) > 0)

    def __getitem__(self, planned: PlannedBatch) -> PreferenceBatch:
        """Returns the collated batch for a plan; the first batch of each step also contains the pre-step rows."""
        examples = [self.examples[i] for i in planned.indices]
        batch = collate(examples, self.layout, self.pad_id, planned.step_pairs, self._step_tokens(planned.whole))
        if self.ahead is None or planned.micro > 0:
            return batch
        if isinstance(self.cutting, BatchByTokens):
            planned = regroup_for_pre_step(self.examples, planned, self.ahead, self.cutting)
        return replace(batch, ahead=self.ahead.make_rows(self.examples, planned, self.layout, self.pad_id))

    def _step_tokens(self, whole: tuple[int, ...]) -> tuple[int, int]:
        """Returns the number of chosen and of rejected response tokens in a step."""
        chosen, rejected = self._trained[:, list(whole)].sum(axis=1).tolist()
        return chosen, rejected


def regroup_for_pre_step(
    examples: Sequence[TrainingExample], planned: PlannedBatch, ahead: PreStepRows, cutting: BatchByTokens
) -> PlannedBatch:
    """Regroups a step's pairs into micro-batches by the lengths of the pairs' pre-step rows.

    Groups stay within the budget of ``cutting`` unless a single row exceeds it; every rank gets the same number of
    groups. Sums over the rows of all ranks do not change.
    """
    alone = replace(planned, of_rank=tuple((i,) for i in planned.whole))
    sizes = dict.fromkeys(planned.whole, 0)
    for name in ahead.names:
        for (i,), rows in zip(alone.of_rank, MAKERS[name](examples, alone), strict=True):
            fitted = rows if ahead.max_length is None else [truncate_response(row, ahead.max_length) for row in rows]
            sizes[i] = max(sizes[i], cutting.cost.pair_cost(fitted))
    of_rows = replace(cutting, sizes=sizes, budget=max(cutting.budget, *sizes.values()))
    groups = min(of_rows.min_micro_batches(planned.whole, planned.ranks), len(planned.whole) // planned.ranks)
    return replace(
        planned, of_rank=tuple(of_rows.split_ignoring_budget(planned.whole, groups, planned.ranks)[planned.rank])
    )


class PreferenceDataModule(L.LightningDataModule):
    """Lightning data module for preference pairs with token weights.

    Computes weights missing from the store, loads the rest and plans whole optimizer steps. ``prepare_data`` and
    ``setup`` do the work; a Trainer calls both, or you can call both before creating a Trainer. With several processes,
    ``setup`` only reads the store and raises if weights are missing, since otherwise every process would compute them.
    Each pair is used exactly once per epoch, for any number of ranks. Checkpoints record how many batches were trained
    on, so a resumed run continues with exactly the remaining batches.

    Args:
        pairs: source of the splits "train" and "val", e.g. ``PairSource("pairs.jsonl")``.
        chat: chat format of the policy, with its tokenizer.
        source: weight source.
        reader: model from which ``source`` computes weights, e.g. a judge; None if no model is needed.
        store: store for weights and prepared data; required if ``reader`` is given.
        lengths: limits for prompts and pairs.
        align: settings for mapping weights to training tokens.
        transforms: weight transforms, applied in order.
        plan: pairs per step and per micro-batch; validation is one step with all validation pairs.
        layout: a function from ``models.layouts``.
        seed: seed for the training order; used only if the plan shuffles.
        ahead: names of the rows that the objective needs before each step (NAME in "ahead:NAME").
        epochs: number of epochs, used to plan micro-batches; None uses the Trainer's number.
        max_steps: maximum number of optimizer steps, if the run is to stop before ``epochs`` epochs.
        auto: whether the plan's token budget was chosen automatically and may be changed.
        device: device for the reader's model; None uses a GPU if available.

    Raises:
        UserError: in ``setup``, if the data cannot be read or trained on, or if weights are missing with several
            processes.
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
                f"the weight source {type(source).__name__} needs a model ({', '.join(sorted(source.requires))}) "
                "and a store: pass reader=... and store=Store(FOLDER)"
            )
        self.source, self.chat = source, chat
        self._from, self._reader, self._store, self._device = pairs, reader, store, device or inference_device("auto")
        self._lengths = LengthRules() if lengths is None else lengths
        self._align = AlignRules() if align is None else align
        self._transforms = tuple(transforms)
        self.texts: EncodedTexts | None = None
        self.made: WeightedSplits | None = None
        self.layout, self.pad_id, self.plan, self.seed = layout, chat.rows.pad_id, plan or BatchPlan(), seed
        self.epochs, self.max_steps = epochs, max_steps
        self._init_state(ahead, self._lengths.max_length, auto)

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
        """Creates a data module from existing examples; needs neither pairs nor a store.

        ``max_length``: maximum tokens of a pre-step row, prompt included; None for no limit.
        """
        data = cls.__new__(cls)
        L.LightningDataModule.__init__(data)
        data.texts = data.made = None
        data.layout, data.pad_id, data.plan, data.seed = layout, pad_id, plan or BatchPlan(), seed
        data.epochs, data.max_steps = epochs, max_steps
        data._init_state(ahead, max_length, auto)
        data.set_examples(train, val)
        return data

    def _init_state(self, ahead: Collection[str], longest: int | None, auto: bool) -> None:
        self._ahead = PreStepRows(ahead, longest) if ahead else None
        self.chosen = self.plan.token_budget if auto else None
        self._batches: tuple[BatchDataset, BatchDataset] | None = None
        self.sampler: StepBatchSampler | None = None
        self._resume: SamplerState | None = None

    # ------------------------------------------------------------------------------------------------ before training
    def prepare_data(self) -> None:
        """Computes missing weights in a single-process job; in multi-process jobs, ``setup`` raises instead."""
        if self._batches is None and world_size() == 1:
            self.weigh()

    def setup(self, stage: str) -> None:
        """Loads or builds the examples once, and sets the Trainer's gradient accumulation to the planned value."""
        if self._batches is None:
            made = self.weigh()
            self.set_examples(*(made.sets[split].examples for split in SPLITS))
        if self.trainer is None:
            return
        if self.trainer.world_size > 1 and vars(self.trainer._accelerator_connector)["use_distributed_sampler"]:
            raise UserError(
                "the Trainer would replace the sampler that plans steps across several processes: pass "
                "use_distributed_sampler=False to the Trainer"
            )
        if self.epochs is None:
            self.epochs = self.trainer.max_epochs or 1
            self.max_steps = self.max_steps if self.max_steps > 0 else self.trainer.max_steps
        asked, planned = self.trainer.accumulate_grad_batches, self.accumulation_steps(self.trainer.world_size)
        if asked not in (1, planned):
            log.warning("the Trainer's accumulate_grad_batches=%d is overridden by the planned %d", asked, planned)
        self.trainer.accumulate_grad_batches = planned

    def read_and_encode(self) -> EncodedTexts:
        """Reads and encodes the pairs of both splits; cached."""
        if self.texts is None:
            pairs = read_pairs(self._from, self.source, self._store)
            self.texts = encode(pairs, self.chat, self._lengths, self._store)
        return self.texts

    def weigh(self) -> WeightedSplits:
        """Computes weights and examples of both splits; cached. The layer of ``source`` must be resolved."""
        if self.made is None:
            texts = self.read_and_encode()
            recipe = ExampleRecipe(self.source, self._reader, self._transforms, self._align, self._from)
            self.made = make_examples(recipe, texts, self._store, self._device)
        return self.made

    # ------------------------------------------------------------------------------------------------ the batches
    def set_examples(self, train: Sequence[TrainingExample], val: Sequence[TrainingExample]) -> None:
        """Sets the examples of both splits, replacing earlier ones.

        Raises:
            UserError: a split is empty, has only one pair although the objective combines several, or has a pair that
                exceeds the token budget.
        """
        if not train:
            raise UserError("no training pairs are left: check the counts of dropped pairs above and data.path")
        if not val:
            raise UserError("no validation pairs are left: check the counts of dropped pairs above and data.val_split")
        for split, examples, key in (("training", train, "data.path"), ("validation", val, "data.val_split")):
            if self._ahead and len(examples) < 2:
                raise UserError(
                    f"the objective combines prompts and responses from different pairs, so it needs at "
                    f"least 2 {split} pairs, but there is only 1; check the counts of dropped pairs above and {key}"
                )
        plan = self.plan
        cost = next((COSTS[name] for name, made in LAYOUTS.items() if made is self.layout), PADDED)
        by_train = make_batching(train, cost, "batch.tokens", plan.token_budget, plan.pairs_per_forward)
        by_val = make_batching(val, cost, "batch.eval_tokens", plan.eval_token_budget, plan.eval_pairs_per_forward)
        self._batches = (
            BatchDataset(train, self.layout, self.pad_id, by_train, self._ahead),
            BatchDataset(val, self.layout, self.pad_id, by_val, self._ahead),
        )

    def _get_batches(self, place: int) -> BatchDataset:
        if self._batches is None:
            self.setup("fit")
        assert self._batches is not None
        return self._batches[place]

    @property
    def train_batches(self) -> BatchDataset:
        """Returns the training examples, indexed by planned batches."""
        return self._get_batches(0)

    @property
    def val_batches(self) -> BatchDataset:
        """Returns the validation examples, indexed by planned batches."""
        return self._get_batches(1)

    def _rank_and_world_size(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer is not None else (0, 1)

    def _make_sampler(self, rank: int, world: int) -> StepBatchSampler:
        self.plan.accumulation_steps(world)  # raises if a step cannot be divided evenly
        steps = self.steps_per_epoch(world)
        return StepBatchSampler(
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
        """Returns the number of optimizer steps per epoch.

        The number depends on ``processes``: a final step with fewer pairs than processes is dropped.
        """
        return count_steps(len(self.train_batches.examples), self.plan.pairs, processes)

    def accumulation_steps(self, processes: int) -> int:
        """Returns the number of micro-batches per optimizer step on each of ``processes`` processes.

        Raises:
            UserError: the steps cannot be divided into micro-batches as the plan requires.
        """
        return self._make_sampler(0, processes).split.accumulation

    # ------------------------------------------------------------------------------------------------ the budget
    @property
    def token_budgets(self) -> tuple[int, ...]:
        """Returns the token budgets per forward pass, training first; a split without a budget is skipped."""
        cuttings = (self.train_batches.cutting, self.val_batches.cutting)
        return tuple(cutting.budget for cutting in cuttings if isinstance(cutting, BatchByTokens))

    def set_budgets(self, budgets: Sequence[int]) -> None:
        """Sets the budgets, in the order of ``token_budgets``, to values small enough for all processes of a job."""
        left = iter(budgets)
        for batches in (self.train_batches, self.val_batches):
            if isinstance(batches.cutting, BatchByTokens):
                batches.cutting = replace(batches.cutting, budget=next(left))
        self.chosen = self.chosen and budgets[0]

    def halve_budget(self) -> bool:
        """Halves an automatic budget, but not below the longest pair; returns False if it cannot be halved further."""
        cutting = self.train_batches.cutting
        if self.chosen is None or not isinstance(cutting, BatchByTokens):
            return False
        longest = max(cutting.sizes[i] for i in range(len(self.train_batches.examples)))
        self._set_train_budget(max(cutting.budget // 2, longest))
        return cutting.budget > longest

    def _set_train_budget(self, budget: int) -> None:
        if isinstance(self.train_batches.cutting, BatchByTokens):
            self.train_batches.cutting = replace(self.train_batches.cutting, budget=budget)

    def locate_saved_position(self, state: SamplerState) -> tuple[int, int, int]:
        """Returns (epoch, consumed micro-batches, total micro-batches in that epoch) for a saved ``state``.

        Both counts refer to this run's micro-batches. With an automatic budget, the saved run's budget is restored if
        the state was saved within a step, or if the saved run started with the same budget and had to lower it.
        """
        sampler = self._make_sampler(*self._rank_and_world_size())
        chosen, used = state.get("budgets", (0, 0))
        if self.chosen is not None and (self.chosen == chosen or (used and sampler.is_mid_step(state))):
            self._set_train_budget(used)
            sampler = self._make_sampler(*self._rank_and_world_size())
        sampler.load_state_dict(state)
        return sampler.epoch, sampler.consumed, len(sampler)

    def train_dataloader(self) -> DataLoader[PreferenceBatch]:
        """Returns a loader of this rank's planned micro-batches, reshuffled each epoch if the plan shuffles."""
        sampler = self._make_sampler(*self._rank_and_world_size())
        if self._resume is not None:
            sampler.load_state_dict(self._resume)
            self._resume = None
        if sampler.dropped:
            log.warning(
                "the last %d pairs of each epoch are dropped because there are fewer of them than processes",
                sampler.dropped,
            )
        if isinstance(sampler.cutting, BatchByTokens):
            _log_micro_batches(sampler, sampler.cutting)
        self.sampler = sampler
        return make_loader(self.train_batches, sampler)

    def val_dataloader(self) -> DataLoader[PreferenceBatch]:
        """Returns a loader that yields all validation pairs in a single step, split across ranks."""
        rank, world = self._rank_and_world_size()
        pairs = len(self.val_batches.examples)
        sampler = StepBatchSampler(pairs, pairs, self.val_batches.cutting, shuffle=False, rank=rank, world_size=world)
        return make_loader(self.val_batches, sampler)

    def state_dict(self) -> dict[str, object]:
        """Returns the state of the training sampler after the micro-batches trained on so far."""
        if self.trainer is None or self.sampler is None:
            return {}
        consumed: int = vars(self.trainer.fit_loop.epoch_loop.batch_progress.current)["processed"]
        state = self.sampler.state_dict(consumed)
        if self.chosen is not None:
            state["budgets"] = [self.chosen, self.token_budgets[0]]
        return dict(state)

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Makes the next training loader start after the batches that ``state`` counts as consumed."""
        if state_dict:
            self._resume = cast(SamplerState, state_dict)


def make_batching(
    examples: Sequence[TrainingExample], cost: RowCost, key: str, tokens: int | None, micro: int
) -> BatchRule:
    """Returns the rule that divides steps of ``examples`` into micro-batches.

    Uses a token budget of ``tokens`` (config key ``key``) or, if that is None, ``micro`` pairs per micro-batch.

    Raises:
        UserError: the budget is too small for the longest pair.
    """
    if tokens is None:
        return BatchByCount(micro)
    check_token_budget(examples, cost, tokens, key)
    return BatchByTokens(count_pair_tokens(examples, cost), cost, tokens, key)


def _log_micro_batches(sampler: StepBatchSampler, cutting: BatchByTokens) -> None:
    """Logs how many tokens the epoch's micro-batches contain."""
    tokens = [cutting.batch_tokens(part) for part in sampler.iter_micro_batches()]
    log.info(
        "micro-batches: %d per step of %d pairs, %d on each process; %s=%d; each has %s rows with at most %d tokens "
        "(%d on average)",
        sampler.split.accumulation * sampler.split.world_size,
        sampler.size,
        sampler.split.accumulation,
        cutting.key,
        cutting.budget,
        cutting.cost.name,
        max(tokens),
        round(sum(tokens) / len(tokens)),
    )


def make_loader(batches: BatchDataset, sampler: StepBatchSampler) -> DataLoader[PreferenceBatch]:
    """Returns a loader of planned batches; it has its own random generator, so the global one is unchanged."""
    return DataLoader(batches, sampler=sampler, batch_size=None, generator=torch.Generator())
