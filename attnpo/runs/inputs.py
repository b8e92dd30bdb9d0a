"""From a composed config to training examples: pairs read, encoded and weighed."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from attnpo.data.base import PairSet, name_unused
from attnpo.data.overlap import Overlap, count_overlap, write_prompts
from attnpo.data.prepare import EncodedSet, ExampleSet, encode_pairs, fit_transforms, prepare_examples, unknown_share
from attnpo.live import phase
from attnpo.machine import planned_processes
from attnpo.models.described import beyond_positions
from attnpo.models.loading import text_config
from attnpo.runs.auto_layer import settle_layer
from attnpo.runs.context import RunContext, make_context
from attnpo.runs.identity import inputs_of
from attnpo.runs.memory import Memory
from attnpo.runs.run_config import RunConfig
from attnpo.runs.weighing import SPLITS, Weighed, weigh
from attnpo.schema import UserError
from attnpo.weights.base import ColumnSource

log = logging.getLogger(__name__)


UNKNOWN = 0.05  # of the response tokens; above it, a warning
EncodedPairs = tuple[dict[str, PairSet], dict[str, EncodedSet], Overlap]
WeighedExamples = tuple[Weighed, dict[str, ExampleSet]]


@dataclass(frozen=True)
class Inputs:
    """Pairs, weights and training examples of both splits; ``overlap``: what validation shares with training."""

    context: RunContext
    pairs: dict[str, PairSet]
    weighed: Weighed
    examples: dict[str, ExampleSet]
    overlap: Overlap | None = None


@phase("reading the pairs")
def read_pairs(context: RunContext) -> dict[str, PairSet]:
    """The pairs of both splits; logs which columns of the training data nothing reads."""
    source = context.cfg.data
    pairs = {split: source.load(split) for split in SPLITS}
    weights = context.cfg.weights
    name_unused(pairs["train"], weights.columns if isinstance(weights, ColumnSource) else ())
    return pairs


@phase("tokenising the pairs")
def encode(context: RunContext, pairs: dict[str, PairSet]) -> dict[str, EncodedSet]:
    """Training ids of both splits under the run's length rules."""
    rules = context.cfg.lengths
    encoded = {}
    for split, found in pairs.items():
        try:
            encoded[split] = encode_pairs(found.pairs, context.chat, rules)
        except UserError as error:
            raise UserError(f"{split}: {error}") from error
        _check_positions(context, split, encoded[split])
        share = unknown_share(encoded[split], context.tokenizer)
        if share > UNKNOWN:
            log.warning(
                "%s: %.0f %% of the response tokens are %s, text that the tokenizer does not know: neither judge nor "
                "policy can tell such words apart; take a model whose tokenizer fits the data",
                split,
                100 * share,
                context.tokenizer.unk_token,
            )
    return encoded


def _check_positions(context: RunContext, split: str, found: EncodedSet) -> None:
    """Raises UserError for a row that is longer than the model's positions, with the length that can be had."""
    model = context.model
    lengths = [max(len(side.prompt_ids) + len(side.response_ids) for side in sides.values()) for sides in found.encoded]
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
    context = settle_layer(context, encoded)
    weighed, examples = _memory.recall(lambda: _of_weights(context), lambda: _weigh(context, encoded), _pairs_in)
    return Inputs(context, pairs, weighed, examples, overlap)


def _read(context: RunContext) -> EncodedPairs:
    pairs = read_pairs(context)
    encoded = encode(context, pairs)
    return pairs, encoded, count_overlap(encoded["train"], encoded["val"])


def write_training_prompts(inputs: Inputs, folder: Path) -> None:
    """Leaves the digests of the prompts that a run trains on in its folder, for evaluations of its models."""
    trained = {example.pair_id for example in inputs.examples["train"].examples}
    write_prompts(folder, (pair.prompt for pair in inputs.pairs["train"].pairs if pair.pair_id in trained))


@phase("weights of the training tokens")
def _weigh(context: RunContext, encoded: dict[str, EncodedSet]) -> WeighedExamples:
    weighed = weigh(context, encoded)
    align = context.cfg.align
    source, captured, layers = weighed.source, weighed.captured, weighed.layers
    chosen = list(context.cfg.transforms.values())
    transforms = fit_transforms(chosen, encoded["train"], source, captured, layers, align)
    examples = {
        split: prepare_examples(encoded[split], source, captured, align, layers, transforms) for split in SPLITS
    }
    return replace(weighed, transforms=transforms), examples


# ------------------------------------------------------------------------------------------------ memory

# More entries than a study has arms, with those whose weights read a beta; larger sets than a laptop's are not kept.
_memory = Memory(entries=64, room=4096)  # pairs


def _pairs_in(made: EncodedPairs | WeighedExamples) -> int:
    return sum(part.read for part in made[1].values())


def _of_texts(context: RunContext) -> dict[str, object]:
    return {"what": "pairs", **{name: context.cfg.values[name] for name in ("data", "model", "lengths")}}


def _of_weights(context: RunContext) -> dict[str, object]:
    return {"what": "weights", **inputs_of(context.cfg), "objective": type(context.cfg.objective).__name__}
