"""From a composed config to training examples: the data module of a run, its pairs read, encoded and weighed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from attnpo.data import prepared
from attnpo.data.arrow_rows import ExampleRows, count_row_tokens, find_pairs
from attnpo.data.base import PairSet
from attnpo.data.example_numbers import SplitStatistics
from attnpo.data.overlap import Overlap, digest_prompt, write_prompt_digests
from attnpo.data.prepare import EncodedSet, ExampleSet
from attnpo.data.prepared import EncodedTexts, ExampleRecipe, WeighedSplits
from attnpo.data.rules import LengthRules
from attnpo.data.weighing import WeighingResult
from attnpo.display.weighed_pair import WeighedPair, pair_with_weights
from attnpo.models.described import position_warning
from attnpo.models.loading import load_text_config
from attnpo.models.spec import ModelSpec
from attnpo.run.identity import identity_of
from attnpo.run.point_cache import Memory
from attnpo.run.resolve import BaseModel, Readers
from attnpo.run.run_config import RunConfig
from attnpo.schema import UserError
from attnpo.training.processes import planned_processes
from attnpo.weights.base import OnlineSource
from attnpo.weights.capture import LogpPair


@dataclass(frozen=True)
class Inputs:
    """Pairs, weights and training examples of both splits.

    ``recipe``: how the weights were made; ``overlap``: what validation shares with training; ``measured``: what
    examples are like; ``layer_choice``: the record of the layer found.
    """

    pairs: dict[str, PairSet]
    weighed: WeighingResult
    examples: dict[str, ExampleSet]
    recipe: ExampleRecipe
    overlap: Overlap | None = None
    measured: Mapping[str, SplitStatistics] = field(default_factory=dict)
    layer_choice: Mapping[str, object] | None = None


def encode(pairs: Mapping[str, PairSet], base: BaseModel, rules: LengthRules) -> EncodedTexts:
    """Returns the training ids of both splits under length rules. UserError beyond the model's positions."""
    texts = prepared.encode(pairs, base.chat, rules, base.store)
    check_positions(base.spec, texts.encoded)
    return texts


def check_positions(model: ModelSpec, encoded: Mapping[str, EncodedSet]) -> None:
    """Raises UserError for a row that is longer than the model's positions, with the length that can be had."""
    for split, found in encoded.items():
        lengths = count_row_tokens(found.encoded).longest_branch.tolist()
        longest = max(lengths, default=0)
        beyond = position_warning(
            load_text_config(model.path, model.revision), model.path, "lengths.max_length", longest
        )
        if beyond is not None:
            pair = found.pairs[lengths.index(longest)].pair_id
            raise UserError(f"{split}: a row of pair {pair} has {longest} tokens: {beyond}")


def read_inputs(cfg: RunConfig, base: BaseModel, readers: Readers) -> Inputs:
    """Returns everything before the policy: pairs, weights (from the store or computed), training examples.

    ``base`` and ``readers``: of the resolved configuration (``resolve``).
    """
    cfg.batch.accumulation_steps(planned_processes(cfg.trainer))  # refuses what cannot be split evenly
    identity = identity_of(cfg)
    by_texts: dict[str, object] = {"what": "pairs", **{name: cfg.values[name] for name in ("data", "model", "lengths")}}

    def read() -> EncodedTexts:
        pairs = prepared.read_pairs(cfg.data, cfg.weights, base.store)
        return prepared.encode(pairs, base.chat, cfg.lengths, base.store)

    texts = _memory.recall(lambda: by_texts, read, _pairs_in)
    check_positions(base.spec, texts.encoded)
    source, choice = cfg.auto_layer.settle(cfg.weights, readers, texts.encoded["train"])
    by_weights: dict[str, object] = {
        "what": "weights",
        **identity.inputs,
        "objective": type(cfg.objective).__name__,
        "layer": getattr(source, "layer", None),
    }

    def weigh() -> tuple[ExampleRecipe, WeighedSplits]:
        recipe = ExampleRecipe(source, readers.make(source), [*cfg.transforms.values()], cfg.align, cfg.data)
        return recipe, prepared.make_examples(recipe, texts, base.store, base.device, readers.refill)

    recipe, made = _memory.recall(lambda: by_weights, weigh, _examples_in)
    return Inputs(texts.pairs, made.weighed, made.sets, recipe, texts.overlap, made.measured, choice)


def write_training_prompts(inputs: Inputs, folder: Path) -> None:
    """Leaves the digests of the prompts that a run trains on in its folder, for evaluations of its models."""
    examples, pairs = inputs.examples["train"].examples, inputs.pairs["train"].pairs
    if isinstance(examples, ExampleRows):
        write_prompt_digests(folder, examples.prompt_digests())
        return
    trained = {example.pair_id for example in examples}
    write_prompt_digests(folder, (digest_prompt(pair.prompt) for pair in pairs if pair.pair_id in trained))


# ------------------------------------------------------------------------------------------------ memory

# More entries than a study has arms, with those whose weights read a beta; larger sets than a laptop's are not kept.
_memory = Memory(entries=64, room=4096)  # pairs


def _pairs_in(made: EncodedTexts) -> int:
    return sum(part.read for part in made.encoded.values())


def _examples_in(made: tuple[ExampleRecipe, WeighedSplits]) -> int:
    return sum(part.read for part in made[1].sets.values())


def decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[int], str]:
    """Returns a function from a token's id to its text."""
    return lambda token: str(tokenizer.decode([token]))


def heat_rows(
    inputs: Inputs, tokenizer: PreTrainedTokenizerBase, count: int, policy: Mapping[str, LogpPair] | None = None
) -> list[WeighedPair]:
    """Returns the first ``count`` training pairs with their weights, and the judge's verdicts where it was asked.

    None where training computes the weights. ``policy``: log-probabilities of pairs' tokens after training, by id.
    """
    if isinstance(inputs.weighed.source, OnlineSource):
        return []
    examples = inputs.examples["train"].examples[:count]
    pairs = find_pairs(inputs.pairs["train"].pairs, [example.pair_id for example in examples])
    rows = []
    for example in examples:
        known = {"logp": (policy or {}).get(example.pair_id), "reference_logp": example.reference_logps}
        scores = [{name: both[side] for name, both in known.items() if both is not None} for side in range(2)]
        captured = inputs.weighed.captured.get(example.pair_id)
        pair = pairs[example.pair_id]
        rows.append(pair_with_weights(pair, example, decoder(tokenizer), captured, scores))
    return rows
