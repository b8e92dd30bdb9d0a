"""From a composed config to training examples: the data module of a run, its pairs read, encoded and weighed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from attnpo.data import reading
from attnpo.data.arrow_rows import ExampleRows, sizes_of
from attnpo.data.base import PairSet
from attnpo.data.example_numbers import Measured
from attnpo.data.overlap import Overlap, key_of_prompt, write_prompts
from attnpo.data.prepare import EncodedSet, ExampleSet
from attnpo.data.prepared import Examples, Recipe, facts_of_ids
from attnpo.data.reading import Texts
from attnpo.data.weighing import Weighed
from attnpo.models.described import beyond_positions
from attnpo.models.loading import text_config
from attnpo.run.combinations import require_reader
from attnpo.run.context import RunContext, make_context
from attnpo.run.identity import inputs_of
from attnpo.run.recall import Memory
from attnpo.run.run_config import RunConfig
from attnpo.run.weighing import describe_refill, make_reader
from attnpo.schema import UserError
from attnpo.system.machine import device_of
from attnpo.training.processes import planned_processes


@dataclass(frozen=True)
class Inputs:
    """Pairs, weights and training examples of both splits.

    ``overlap``: what validation shares with training. ``measured``: what the examples are like, by split. ``recipe``:
    how the weights were made.
    """

    context: RunContext
    pairs: dict[str, PairSet]
    weighed: Weighed
    examples: dict[str, ExampleSet]
    overlap: Overlap | None = None
    measured: Mapping[str, Measured] = field(default_factory=dict)
    recipe: Recipe | None = None


def read_pairs(context: RunContext) -> dict[str, PairSet]:
    """Returns the pairs of both splits; logs which columns of the training data nothing reads."""
    return reading.read_pairs(context.cfg.data, context.cfg.weights, context.store)


def encode(context: RunContext, pairs: Mapping[str, PairSet]) -> dict[str, EncodedSet]:
    """Returns the training ids of both splits under the run's length rules. UserError beyond the model's positions."""
    encoded = reading.encode(pairs, context.chat, context.cfg.lengths, context.store).encoded
    check_positions(context, encoded)
    return encoded


def check_positions(context: RunContext, encoded: Mapping[str, EncodedSet]) -> None:
    """Raises UserError for a row that is longer than the model's positions, with the length that can be had."""
    model = context.model
    for split, found in encoded.items():
        lengths = sizes_of(found.encoded).longest.tolist()
        longest = max(lengths, default=0)
        beyond = beyond_positions(text_config(model.path, model.revision), model.path, "lengths.max_length", longest)
        if beyond is not None:
            pair = found.pairs[lengths.index(longest)].pair_id
            raise UserError(f"{split}: a row of pair {pair} has {longest} tokens: {beyond}")


def make_inputs(cfg: RunConfig) -> Inputs:
    """Returns everything before the policy: pairs, weights (from the store or computed), training examples."""
    return inputs_on(make_context(cfg))


def inputs_on(context: RunContext) -> Inputs:
    """Returns the same in a context that is made already."""
    cfg = context.cfg
    cfg.batch.accumulation(planned_processes(cfg.trainer))  # refuses what cannot be split evenly
    require_reader(cfg.weights, cfg.objective)
    texts = _memory.recall(lambda: _of_texts(context), lambda: _read(context), _pairs_in)
    check_positions(context, texts.encoded)
    context = cfg.auto_layer.settle(context, texts.encoded)
    recipe, made = _memory.recall(lambda: _of_weights(context), lambda: _weigh(context, texts), _examples_in)
    return Inputs(context, texts.pairs, made.weighed, made.sets, texts.overlap, made.measured, recipe)


def _read(context: RunContext) -> Texts:
    return reading.encode(read_pairs(context), context.chat, context.cfg.lengths, context.store)


def _weigh(context: RunContext, texts: Texts) -> tuple[Recipe, Examples]:
    cfg, store = context.cfg, context.store
    recipe = Recipe(cfg.weights, make_reader(context, cfg.weights), [*cfg.transforms.values()], cfg.align, cfg.data)
    ids = facts_of_ids(context.chat, cfg.lengths, texts.pairs)
    device, refill = device_of(cfg.trainer.accelerator), describe_refill(context)
    return recipe, reading.make_examples(recipe, texts.pairs, texts.encoded, ids, store, device, refill)


def write_training_prompts(inputs: Inputs, folder: Path) -> None:
    """Leaves the digests of the prompts that a run trains on in its folder, for evaluations of its models."""
    examples, pairs = inputs.examples["train"].examples, inputs.pairs["train"].pairs
    if isinstance(examples, ExampleRows):
        write_prompts(folder, examples.prompts())
        return
    trained = {example.pair_id for example in examples}
    write_prompts(folder, (key_of_prompt(pair.prompt) for pair in pairs if pair.pair_id in trained))


# ------------------------------------------------------------------------------------------------ memory

# More entries than a study has arms, with those whose weights read a beta; larger sets than a laptop's are not kept.
_memory = Memory(entries=64, room=4096)  # pairs


def _pairs_in(made: Texts) -> int:
    return sum(part.read for part in made.encoded.values())


def _examples_in(made: tuple[Recipe, Examples]) -> int:
    return sum(part.read for part in made[1].sets.values())


def _of_texts(context: RunContext) -> dict[str, object]:
    return {"what": "pairs", **{name: context.cfg.values[name] for name in ("data", "model", "lengths")}}


def _of_weights(context: RunContext) -> dict[str, object]:
    return {"what": "weights", **inputs_of(context.cfg), "objective": type(context.cfg.objective).__name__}
