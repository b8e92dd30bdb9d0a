"""Pairs that are not the run's own, weighed as its training pairs are; nothing goes into the store."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from attnpo.data.collate import TrainingExample, collate
from attnpo.data.prepare import EncodedSet, encode_pairs, prepare_examples
from attnpo.data.prepared import ExampleRecipe
from attnpo.data.weighing import WeighingResult
from attnpo.judge.base import LoadedJudge
from attnpo.models.layouts import padded_layout
from attnpo.objectives.base import LengthScaled, PreferenceObjective, mean_factors
from attnpo.run.resolve import Readers
from attnpo.schema import SIDES, Kind, PairWeights, PreferencePair, RowGroup
from attnpo.system.store import Store
from attnpo.weights.base import WeightSource
from attnpo.weights.capture import ensure_captured


class RewardFactors(NamedTuple):
    """Factors of the log-ratio of each response token, and the tokens they were made for (chosen, rejected)."""

    response_ids: tuple[list[int], list[int]]
    factors: tuple[Float[Tensor, " m"], Float[Tensor, " k"]]


def weigh_others(
    recipe: ExampleRecipe, weighed: WeighingResult, readers: Readers, pairs: Sequence[PreferencePair], ask: bool = False
) -> list[TrainingExample]:
    """Returns pairs as examples with weights; with weights of 0 where a pair gets none.

    Without weights where the source asks a generator, unless ``ask``, and where it reads columns that a pair lacks.
    """
    encoded = encode_pairs(pairs, readers.base.chat, readers.lengths, keep_same=True)
    known: dict[str, TrainingExample] = {}
    silent = "generator" in weighed.source.requires and not ask
    if not silent:
        source = weighed.source
        captured = _capture(readers, source, encoded.pairs)
        told = _with_columns(encoded, source)
        made = prepare_examples(told, source, captured, recipe.align, weighed.layers, weighed.transforms)
        known = {example.pair_id: example for example in made.examples}
    examples, none = [], (0.0, 0.0)
    for pair, sides in zip(encoded.pairs, encoded.encoded, strict=True):
        chosen, rejected = (torch.zeros(0 if silent else len(sides[side].response_ids)) for side in SIDES)
        bare = TrainingExample(pair.pair_id, sides["chosen"], sides["rejected"], (chosen, rejected), none, none)
        examples.append(known.get(pair.pair_id, bare))
    return examples


def _with_columns(encoded: EncodedSet, source: WeightSource) -> EncodedSet:
    """Returns the pairs that have every column that ``source`` reads."""
    if not source.columns:
        return encoded
    both = zip(encoded.pairs, encoded.encoded, strict=True)
    kept = [(pair, sides) for pair, sides in both if all(name in pair.extra for name in source.columns)]
    return replace(encoded, pairs=[pair for pair, _ in kept], encoded=[sides for _, sides in kept])


def _capture(readers: Readers, source: WeightSource, pairs: Sequence[PreferencePair]) -> dict[str, PairWeights]:
    """Returns what the run's source captures for other pairs, through a store that is thrown away."""
    reader = readers.make(source)
    if reader is None:
        return {}

    def load() -> object:
        loaded = reader.load(readers.base.device)
        return replace(loaded, verdict=False) if isinstance(loaded, LoadedJudge) else loaded

    with tempfile.TemporaryDirectory() as folder:
        captured, _ = ensure_captured(pairs, source, source.rows_read(), Store(Path(folder)), {}, load)
        return dict(captured)


def token_factors(objective: PreferenceObjective, rows: RowGroup) -> Float[Tensor, "rows R"]:
    """Returns what multiplies beta at each response token, as the objective has it."""
    if "token_weights" not in objective.requires:
        return torch.ones_like(rows.token_weights["reward"])
    if not isinstance(objective, LengthScaled):
        return mean_factors(rows)
    weights, _, lengths = objective.weighted(rows)
    return weights if lengths is None else weights * lengths.unsqueeze(-1)


def reward_factors(
    objective: PreferenceObjective,
    recipe: ExampleRecipe,
    weighed: WeighingResult,
    readers: Readers,
    pairs: Sequence[PreferencePair],
) -> Mapping[str, RewardFactors]:
    """Returns what the objective multiplies the log-ratios of other pairs by; pairs without any weight are left out."""
    found = {}
    factors = weighed.source.kind is Kind.FACTOR
    for example in weigh_others(recipe, weighed, readers, pairs, ask=True):
        if not any(bool(row.any()) for row in example.weights):
            continue
        rows = replace(collate([example], padded_layout, 0, 1).main, factors=factors)
        made = token_factors(objective, rows)
        chosen, rejected = (row[mask].double() for row, mask in zip(made, rows.response_mask, strict=True))
        ids = (example.chosen.response_ids, example.rejected.response_ids)
        found[example.pair_id] = RewardFactors(ids, (chosen, rejected))
    return found
