"""Steps before training: pairs read, their training ids, and the weighed examples that are made of these.

Large data is prepared once in the store and mapped from there (``attnpo.data.prepared``), little is held in memory.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from attnpo.cli.progress import phase
from attnpo.data.arrow_rows import NoJson, sizes_of
from attnpo.data.base import SPLITS, PairReader, PairSet, PairSource, name_unused
from attnpo.data.collate import TrainingExample
from attnpo.data.example_numbers import ExampleNumbers, Measured
from attnpo.data.overlap import Overlap, count_overlap
from attnpo.data.prepare import EncodedSet, ExampleSet, encode_pairs, fit_transforms, prepare_examples, unknown_share
from attnpo.data.prepared import (
    Examples,
    Recipe,
    Take,
    facts_of_data,
    facts_of_ids,
    prepare_examples_of,
    prepare_ids,
    prepare_pairs,
)
from attnpo.data.rules import LengthRules
from attnpo.data.weighing import REFILL, weigh
from attnpo.schema import UserError
from attnpo.system.store import Store
from attnpo.text.chat import ChatFormat
from attnpo.weights.base import WeightSource

log = logging.getLogger(__name__)

UNKNOWN = 0.05  # of the response tokens; above it, a warning


@dataclass(frozen=True)
class Texts:
    """Pairs of both splits, their training ids, and what validation shares with training."""

    pairs: dict[str, PairSet]
    encoded: dict[str, EncodedSet]
    overlap: Overlap


@phase("reading the pairs")
def read_pairs(source: PairReader, weights: WeightSource, store: Store | None) -> dict[str, PairSet]:
    """Returns the pairs of both splits; logs which columns of the training data neither pairs nor ``weights`` read."""
    found, pairs = None if store is None else facts_of_data(source), None
    if found is not None and store is not None and isinstance(source, PairSource):
        with suppress(NoJson):  # such pairs are held in memory
            pairs = prepare_pairs(Path(store.root), *found, source.load)
    if pairs is None:
        pairs = {split: source.load(split) for split in SPLITS}
    name_unused(pairs["train"], weights.columns)
    return pairs


@phase("tokenising the pairs")
def encode(pairs: Mapping[str, PairSet], chat: ChatFormat, rules: LengthRules, store: Store | None) -> Texts:
    """Returns both splits with their training ids under the length rules, and what they share.

    Warns of text that the tokenizer does not know. UserError naming the split when nothing is left of it.
    """

    def encode_split(split: str, take: Take | None = None) -> EncodedSet:
        try:
            return encode_pairs(pairs[split].pairs, chat, rules, write=take)
        except UserError as error:
            raise UserError(f"{split}: {error}") from error

    facts = None if store is None else facts_of_ids(chat, rules, pairs)
    if facts is None or store is None:
        encoded = {split: encode_split(split) for split in pairs}
        overlap = count_overlap(encoded["train"], encoded["val"])
    else:
        encoded, overlap = prepare_ids(Path(store.root), facts, pairs, encode_split)
    for split, found in encoded.items():
        share = unknown_share(found, chat.tokenizer)
        if share > UNKNOWN:
            log.warning(
                "%s: %.0f %% of the response tokens are %s, text that the tokenizer does not know: neither judge nor "
                "policy can tell such words apart; take a model whose tokenizer fits the data",
                split,
                100 * share,
                chat.tokenizer.unk_token,
            )
    return Texts(dict(pairs), encoded, overlap)


@phase("weights of the training tokens")
def make_examples(
    recipe: Recipe,
    pairs: Mapping[str, PairSet],
    encoded: Mapping[str, EncodedSet],
    ids: Mapping[str, object] | None,
    store: Store | None,
    device: torch.device,
    refill: str = REFILL,
) -> Examples:
    """Returns the examples that ``recipe`` makes of both splits; reads with its model what the store lacks.

    ``ids`` are the facts that decide the training ids, where examples are prepared in the store.
    """
    make = partial(_make_examples, recipe, pairs, encoded, store, device, refill)
    facts = recipe.facts(ids)
    return make() if facts is None or store is None else prepare_examples_of(store, facts, encoded, recipe, make)


def _make_examples(
    recipe: Recipe,
    pairs: Mapping[str, PairSet],
    encoded: Mapping[str, EncodedSet],
    store: Store | None,
    device: torch.device,
    refill: str,
    take: Callable[[str, int, TrainingExample], None] | None = None,
) -> Examples:
    """Makes the examples of both splits; those that ``take`` is given are not held."""
    weighed = weigh(recipe.source, recipe.reader, store, encoded, device, refill=refill)
    align, source, captured, layers = recipe.align, weighed.source, weighed.captured, weighed.layers
    transforms = fit_transforms(recipe.transforms, encoded["train"], source, captured, layers, align)
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
