"""Computes weights for pairs from outside a run, in the same way as for its training pairs.

Nothing is written to the store.
"""

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
from attnpo.data.weighing import WeightingResult
from attnpo.judge.base import LoadedJudge
from attnpo.models.layouts import padded_layout
from attnpo.objectives.base import LengthScaled, PreferenceObjective, mean_factors
from attnpo.run.resolve import Readers
from attnpo.schema import SIDES, Kind, PairWeights, PreferencePair, RowGroup
from attnpo.system.store import Store
from attnpo.weights.base import WeightSource
from attnpo.weights.capture import ensure_captured


class RewardFactors(NamedTuple):
    """Factors that multiply the log-ratio of each response token, with the token ids (chosen, rejected)."""

    response_ids: tuple[list[int], list[int]]
    factors: tuple[Float[Tensor, " m"], Float[Tensor, " k"]]


def weigh_other_pairs(
    recipe: ExampleRecipe,
    weighed: WeightingResult,
    readers: Readers,
    pairs: Sequence[PreferencePair],
    ask: bool = False,
) -> list[TrainingExample]:
    """Returns the pairs as weighted examples; pairs without weights get weights of 0.

    Sources that need a generator's answers return empty weights unless ``ask`` is set. Pairs that lack the source's
    columns get weights of 0.
    """
    encoded = encode_pairs(pairs, readers.base.chat, readers.lengths, keep_same=True)
    known: dict[str, TrainingExample] = {}
    silent = "generator" in weighed.source.requires and not ask
    if not silent:
        source = weighed.source
        captured = _capture_without_store(readers, source, encoded.pairs)
        told = _drop_pairs_without_columns(encoded, source)
        made = prepare_examples(told, source, captured, recipe.align, weighed.layers, weighed.transforms)
        known = {example.pair_id: example for example in made.examples}
    examples, none = [], (0.0, 0.0)
    for pair, sides in zip(encoded.pairs, encoded.encoded, strict=True):
        chosen, rejected = (torch.zeros(0 if silent else len(sides[side].response_ids)) for side in SIDES)
        bare = TrainingExample(pair.pair_id, sides["chosen"], sides["rejected"], (chosen, rejected), none, none)
        examples.append(known.get(pair.pair_id, bare))
    return examples


def _drop_pairs_without_columns(encoded: EncodedSet, source: WeightSource) -> EncodedSet:
    """Drops pairs that lack a column required by ``source``."""
    if not source.columns:
        return encoded
    both = zip(encoded.pairs, encoded.encoded, strict=True)
    kept = [(pair, sides) for pair, sides in both if all(name in pair.extra for name in source.columns)]
    return replace(encoded, pairs=[pair for pair, _ in kept], encoded=[sides for _, sides in kept])


def _capture_without_store(
    readers: Readers, source: WeightSource, pairs: Sequence[PreferencePair]
) -> dict[str, PairWeights]:
    """Captures the raw weights that ``source`` needs for other pairs, in a temporary store."""
    reader = readers.make_reader(source)
    if reader is None:
        return {}

    def load_without_verdict() -> object:
        loaded = reader.load(readers.base.device)
        return replace(loaded, verdict=False) if isinstance(loaded, LoadedJudge) else loaded

    with tempfile.TemporaryDirectory() as folder:
        captured, _ = ensure_captured(
            pairs, source, source.rows_to_read(), Store(Path(folder)), {}, load_without_verdict
        )
        return dict(captured)


def token_factors(objective: PreferenceObjective, rows: RowGroup) -> Float[Tensor, "rows R"]:
    """Returns the factor that multiplies beta at each response token, as the objective defines it."""
    if "token_weights" not in objective.requires:
        return torch.ones_like(rows.token_weights["reward"])
    if not isinstance(objective, LengthScaled):
        return mean_factors(rows)
    weights, _, lengths = objective.weighted(rows)
    return weights if lengths is None else weights * lengths.unsqueeze(-1)


def reward_factors(
    objective: PreferenceObjective,
    recipe: ExampleRecipe,
    weighed: WeightingResult,
    readers: Readers,
    pairs: Sequence[PreferencePair],
) -> Mapping[str, RewardFactors]:
    """Returns the objective's log-ratio factors for pairs from outside the run, by pair id; omits unweighted pairs."""
    found = {}
    factors = weighed.source.kind is Kind.FACTOR
    for example in weigh_other_pairs(recipe, weighed, readers, pairs, ask=True):
        if not any(bool(row.any()) for row in example.weights):
            continue
        rows = replace(collate([example], padded_layout, 0, 1).main, factors=factors)
        made = token_factors(objective, rows)
        chosen, rejected = (row[mask].double() for row, mask in zip(made, rows.response_mask, strict=True))
        ids = (example.chosen.response_ids, example.rejected.response_ids)
        found[example.pair_id] = RewardFactors(ids, (chosen, rejected))
    return found
