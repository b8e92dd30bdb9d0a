"""Turns a config into training examples: reads, encodes and weights the pairs of a run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from attnpo.data import prepared
from attnpo.data.arrow_rows import ExampleRows, count_row_tokens, find_pairs
from attnpo.data.base import PairSet
from attnpo.data.example_statistics import SplitStatistics
from attnpo.data.overlap import Overlap, digest_prompt, write_prompt_digests
from attnpo.data.prepare import EncodedSet, ExampleSet
from attnpo.data.prepared import EncodedTexts, ExampleRecipe, WeightedSplits
from attnpo.data.rules import LengthRules
from attnpo.data.weighing import WeightingResult
from attnpo.display.weighted_pair import WeightedPair, pair_with_weights
from attnpo.models.description import position_warning
from attnpo.models.loading import load_text_config
from attnpo.models.spec import ModelSpec
from attnpo.run.identity import make_identity
from attnpo.run.point_cache import PointCache
from attnpo.run.resolve import BaseModel, Readers
from attnpo.run.run_config import RunConfig
from attnpo.schema import UserError
from attnpo.training.processes import planned_processes
from attnpo.weights.base import OnlineSource
from attnpo.weights.capture import LogpPair


@dataclass(frozen=True)
class Inputs:
    """Pairs, weights and training examples of both splits.

    ``recipe``: how the weights were computed. ``overlap``: how many pairs are in both validation and training data.
    ``measured``: statistics of the examples. ``layer_choice``: record of the layer search.
    """

    pairs: dict[str, PairSet]
    weighed: WeightingResult
    examples: dict[str, ExampleSet]
    recipe: ExampleRecipe
    overlap: Overlap | None = None
    measured: Mapping[str, SplitStatistics] = field(default_factory=dict)
    layer_choice: Mapping[str, object] | None = None


def encode_splits(pairs: Mapping[str, PairSet], base: BaseModel, rules: LengthRules) -> EncodedTexts:
    """Encodes both splits under the length rules. Raises UserError for rows longer than the model's context."""
    texts = prepared.encode(pairs, base.chat, rules, base.store)
    check_positions(base.spec, texts.encoded)
    return texts


def check_positions(model: ModelSpec, encoded: Mapping[str, EncodedSet]) -> None:
    """Raises UserError for a row longer than the model's context; the message suggests a length that works."""
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
    """Returns all training inputs: pairs, weights (from the store or computed) and examples.

    ``base`` and ``readers``: from the resolved config (``resolve``).
    """
    cfg.batch.accumulation_steps(planned_processes(cfg.trainer))  # checks that the batch divides evenly
    identity = make_identity(cfg)
    by_texts: dict[str, object] = {"what": "pairs", **{name: cfg.values[name] for name in ("data", "model", "lengths")}}

    def load_texts() -> EncodedTexts:
        pairs = prepared.read_pairs(cfg.data, cfg.weights, base.store)
        return prepared.encode(pairs, base.chat, cfg.lengths, base.store)

    texts = _memory.get_or_make(lambda: by_texts, load_texts, _count_pairs)
    check_positions(base.spec, texts.encoded)
    source, choice = cfg.auto_layer.resolve_layer(cfg.weights, readers, texts.encoded["train"])
    by_weights: dict[str, object] = {
        "what": "weights",
        **identity.inputs,
        "objective": type(cfg.objective).__name__,
        "layer": getattr(source, "layer", None),
    }

    def weigh_texts() -> tuple[ExampleRecipe, WeightedSplits]:
        recipe = ExampleRecipe(source, readers.make_reader(source), [*cfg.transforms.values()], cfg.align, cfg.data)
        return recipe, prepared.make_examples(recipe, texts, base.store, base.device, readers.refill_command)

    recipe, made = _memory.get_or_make(lambda: by_weights, weigh_texts, _count_examples)
    return Inputs(texts.pairs, made.weighed, made.sets, recipe, texts.overlap, made.measured, choice)


def write_training_prompts(inputs: Inputs, folder: Path) -> None:
    """Writes digests of the training prompts to the run folder, so that evaluations can recognise these prompts."""
    examples, pairs = inputs.examples["train"].examples, inputs.pairs["train"].pairs
    if isinstance(examples, ExampleRows):
        write_prompt_digests(folder, examples.prompt_digests())
        return
    trained = {example.pair_id for example in examples}
    write_prompt_digests(folder, (digest_prompt(pair.prompt) for pair in pairs if pair.pair_id in trained))


# ------------------------------------------------------------------------------------------------ memory

# Enough entries for the arms of a study, also if weights depend on beta; larger data sets are not kept.
_memory = PointCache(entries=64, room=4096)  # pairs


def _count_pairs(made: EncodedTexts) -> int:
    return sum(part.read for part in made.encoded.values())


def _count_examples(made: tuple[ExampleRecipe, WeightedSplits]) -> int:
    return sum(part.read for part in made[1].sets.values())


def make_decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[int], str]:
    """Returns a function that decodes one token id to text."""
    return lambda token: str(tokenizer.decode([token]))


def make_heat_map_pairs(
    inputs: Inputs, tokenizer: PreTrainedTokenizerBase, count: int, policy: Mapping[str, LogpPair] | None = None
) -> list[WeightedPair]:
    """Returns the first ``count`` training pairs with their weights and the judge's verdicts, if any.

    Returns an empty list if weights are computed during training. ``policy``: the tokens' log-probabilities after
    training, by pair id.
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
        rows.append(pair_with_weights(pair, example, make_decoder(tokenizer), captured, scores))
    return rows
