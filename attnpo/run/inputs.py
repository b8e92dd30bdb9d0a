"""From a composed config to training examples: pairs read, encoded and weighed."""

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from attnpo.cli.progress import phase
from attnpo.data.arrow_rows import ExampleRows, NoJson, sizes_of
from attnpo.data.base import PairSet, PairSource, name_unused
from attnpo.data.collate import TrainingExample
from attnpo.data.overlap import Overlap, count_overlap, key_of_prompt, write_prompts
from attnpo.data.prepare import EncodedSet, ExampleSet, encode_pairs, fit_transforms, prepare_examples, unknown_share
from attnpo.models.described import beyond_positions
from attnpo.models.loading import text_config
from attnpo.run.context import RunContext, make_context
from attnpo.run.example_numbers import ExampleNumbers, Measured
from attnpo.run.identity import inputs_of
from attnpo.run.prepared_inputs import (
    Examples,
    Take,
    facts_of_data,
    facts_of_examples,
    facts_of_ids,
    prepare_examples_of,
    prepare_ids,
    prepare_pairs,
)
from attnpo.run.recall import Memory
from attnpo.run.run_config import RunConfig
from attnpo.run.weighing import SPLITS, Weighed, capture_method, weigh
from attnpo.schema import UserError
from attnpo.training.processes import planned_processes
from attnpo.weights.base import ColumnSource

log = logging.getLogger(__name__)


UNKNOWN = 0.05  # of the response tokens; above it, a warning
EncodedPairs = tuple[dict[str, PairSet], dict[str, EncodedSet], Overlap]


@dataclass(frozen=True)
class Inputs:
    """Pairs, weights and training examples of both splits.

    ``overlap``: what validation shares with training. ``measured``: what the examples are like, by split.
    """

    context: RunContext
    pairs: dict[str, PairSet]
    weighed: Weighed
    examples: dict[str, ExampleSet]
    overlap: Overlap | None = None
    measured: Mapping[str, Measured] = field(default_factory=dict)


@phase("reading the pairs")
def read_pairs(context: RunContext) -> dict[str, PairSet]:
    """The pairs of both splits; logs which columns of the training data nothing reads."""
    source, found, pairs = context.cfg.data, facts_of_data(context), None
    if found is not None and isinstance(source, PairSource):
        with suppress(NoJson):  # such pairs are held in memory
            pairs = prepare_pairs(Path(context.store.root), *found, source.load)
    if pairs is None:
        pairs = {split: source.load(split) for split in SPLITS}
    weights = context.cfg.weights
    name_unused(pairs["train"], weights.columns if isinstance(weights, ColumnSource) else ())
    return pairs


def encode(context: RunContext, pairs: dict[str, PairSet]) -> dict[str, EncodedSet]:
    """Training ids of both splits under the run's length rules."""
    return _encode(context, pairs)[0]


@phase("tokenising the pairs")
def _encode(context: RunContext, pairs: dict[str, PairSet]) -> tuple[dict[str, EncodedSet], Overlap | None]:
    """Training ids of both splits, and what the splits share, where that is known already."""

    def encode_split(split: str, take: Take | None = None) -> EncodedSet:
        try:
            return encode_pairs(pairs[split].pairs, context.chat, context.cfg.lengths, write=take)
        except UserError as error:
            raise UserError(f"{split}: {error}") from error

    facts, overlap = facts_of_ids(context, pairs), None
    if facts is None:
        encoded = {split: encode_split(split) for split in pairs}
    else:
        encoded, overlap = prepare_ids(Path(context.store.root), facts, pairs, encode_split)
    for split, found in encoded.items():
        _check_positions(context, split, found)
        share = unknown_share(found, context.tokenizer)
        if share > UNKNOWN:
            log.warning(
                "%s: %.0f %% of the response tokens are %s, text that the tokenizer does not know: neither judge nor "
                "policy can tell such words apart; take a model whose tokenizer fits the data",
                split,
                100 * share,
                context.tokenizer.unk_token,
            )
    return encoded, overlap


def _check_positions(context: RunContext, split: str, found: EncodedSet) -> None:
    """Raises UserError for a row that is longer than the model's positions, with the length that can be had."""
    model = context.model
    lengths = sizes_of(found.encoded).longest.tolist()
    longest = max(lengths, default=0)
    beyond = beyond_positions(text_config(model.path, model.revision), model.path, "lengths.max_length", longest)
    if beyond is not None:
        pair = found.pairs[lengths.index(longest)].pair_id
        raise UserError(f"{split}: a row of pair {pair} has {longest} tokens: {beyond}")


def make_inputs(cfg: RunConfig) -> Inputs:
    """Everything before the policy: pairs, weights (from the store or computed), training examples."""
    return inputs_on(make_context(cfg))


def inputs_on(context: RunContext) -> Inputs:
    """The same in a context that is made already."""
    context.cfg.batch.accumulation(planned_processes(context.cfg.trainer))  # refuses what cannot be split evenly
    pairs, encoded, overlap = _memory.recall(lambda: _of_texts(context), lambda: _read(context), _pairs_in)
    context = context.cfg.auto_layer.settle(context, encoded)
    made = _memory.recall(lambda: _of_weights(context), lambda: _weigh(context, pairs, encoded), _examples_in)
    return Inputs(context, pairs, made.weighed, made.sets, overlap, made.measured)


def _read(context: RunContext) -> EncodedPairs:
    pairs = read_pairs(context)
    encoded, overlap = _encode(context, pairs)
    return pairs, encoded, overlap or count_overlap(encoded["train"], encoded["val"])


def write_training_prompts(inputs: Inputs, folder: Path) -> None:
    """Leaves the digests of the prompts that a run trains on in its folder, for evaluations of its models."""
    examples, pairs = inputs.examples["train"].examples, inputs.pairs["train"].pairs
    if isinstance(examples, ExampleRows):
        write_prompts(folder, examples.prompts())
        return
    trained = {example.pair_id for example in examples}
    write_prompts(folder, (key_of_prompt(pair.prompt) for pair in pairs if pair.pair_id in trained))


@phase("weights of the training tokens")
def _weigh(context: RunContext, pairs: dict[str, PairSet], encoded: dict[str, EncodedSet]) -> Examples:
    method = capture_method(context, context.cfg.weights)
    facts = facts_of_examples(context, facts_of_ids(context, pairs), method)
    if facts is None:
        return _weigh_now(context, pairs, encoded)
    return prepare_examples_of(context, facts, encoded, method, partial(_weigh_now, context, pairs, encoded))


def _weigh_now(
    context: RunContext,
    pairs: Mapping[str, PairSet],
    encoded: dict[str, EncodedSet],
    take: Callable[[str, int, TrainingExample], None] | None = None,
) -> Examples:
    """Makes the examples of both splits; those that ``take`` is given are not held."""
    weighed = weigh(context, encoded)
    align, source, captured, layers = context.cfg.align, weighed.source, weighed.captured, weighed.layers
    chosen = list(context.cfg.transforms.values())
    transforms = fit_transforms(chosen, encoded["train"], source, captured, layers, align)
    sets, measured = dict[str, ExampleSet](), dict[str, Measured]()
    for split in SPLITS:
        numbers, places = ExampleNumbers(pairs[split], source), list[int]()
        examples: list[TrainingExample] = []

        def keep(place: int, example: TrainingExample) -> None:
            numbers.add(example)  # noqa: B023  # called in this round alone
            places.append(place)  # noqa: B023
            examples.append(example) if take is None else take(split, place, example)  # noqa: B023

        found = prepare_examples(encoded[split], source, captured, align, layers, transforms, keep)
        sets[split] = replace(found, examples=examples)
        sizes = sizes_of(encoded[split].encoded).take(np.array(places, dtype=np.int64))
        measured[split] = numbers.of(sizes)
    return Examples(replace(weighed, transforms=transforms), sets, measured)


# ------------------------------------------------------------------------------------------------ memory

# More entries than a study has arms, with those whose weights read a beta; larger sets than a laptop's are not kept.
_memory = Memory(entries=64, room=4096)  # pairs


def _pairs_in(made: EncodedPairs) -> int:
    return sum(part.read for part in made[1].values())


def _examples_in(made: Examples) -> int:
    return sum(part.read for part in made.sets.values())


def _of_texts(context: RunContext) -> dict[str, object]:
    return {"what": "pairs", **{name: context.cfg.values[name] for name in ("data", "model", "lengths")}}


def _of_weights(context: RunContext) -> dict[str, object]:
    return {"what": "weights", **inputs_of(context.cfg), "objective": type(context.cfg.objective).__name__}
